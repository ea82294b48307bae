//! What encoding and loading take, counted by the allocator: the estimates that the library asks for beforehand are upper
//! bounds, and the memory of a long text is that of its pieces.

#![allow(clippy::unwrap_used, reason = "a failed call is a failed test")]

#[path = "common/shared.rs"]
mod shared;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use dsv4::chat::{ChatOptions, Message, Parser, Reply, Role, ThinkingMode, render, render_json};
use dsv4::{Markup, Tokenizer};

/// Counts what each thread holds, and the most it held.
struct Counting;

thread_local! {
    static HELD: Cell<i64> = const { Cell::new(0) };
    static MOST: Cell<i64> = const { Cell::new(0) };
    /// The largest single request: the library's own probe, which is not counted.
    static LIMIT: Cell<usize> = const { Cell::new(usize::MAX) };
}

// SAFETY: everything is the system allocator's; only numbers are added up.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // a small block also costs its header and rounding
        count((layout.size() + 16) as i64);
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-((layout.size() + 16) as i64));
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(ptr, layout) }
    }
}

fn count(bytes: i64) {
    let probe = bytes.unsigned_abs() as usize > LIMIT.get();
    if probe {
        return;
    }
    HELD.set(HELD.get() + bytes);
    MOST.set(MOST.get().max(HELD.get()));
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes that `work` held beyond those before it; requests above `limit` are probes.
fn most(limit: usize, work: impl FnOnce()) -> usize {
    let before = HELD.get();
    MOST.set(before);
    LIMIT.set(limit);
    work();
    LIMIT.set(usize::MAX);
    (MOST.get() - before) as usize
}

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/models/tiny-v4");

fn tokenizer() -> Tokenizer {
    Tokenizer::from_file(format!("{MODEL}/tokenizer.json").as_ref()).unwrap()
}

#[test]
fn the_estimates_bound_what_encoding_takes() {
    let tokenizer = tokenizer();
    tokenizer.encode("warm", Markup::Text).unwrap();
    // no place to cut in any of them
    for part in
        ["a", "7", "7a", "a7", " ", "!", "!a", ".7", "\n", "\n7", "é", "é!", "😀", "q\t", " .", "Z\u{300}", "'s1", "7é"]
    {
        let text = part.repeat(64 << 10);
        let cost = most(390 * text.len(), || drop(tokenizer.encode(&text, Markup::Text))) as f64 / text.len() as f64;
        assert!(cost < 400.0, "{part:?} takes {cost:.0} bytes for each byte of text");
    }
}

#[test]
fn the_estimate_bounds_what_loading_takes() {
    let tiny = format!("{MODEL}/tokenizer.json").into();
    let official = shared::shared("loading the official tokenizer", "data/tokenizer/tokenizer.json");
    for path in [Some(tiny), official].into_iter().flatten() {
        let json = std::fs::read(path).unwrap();
        let cost = most(23 * json.len(), || drop(Tokenizer::from_bytes(&json).unwrap())) as f64 / json.len() as f64;
        assert!(cost < 24.0, "{cost:.1} bytes for each byte of tokenizer.json");
    }
}

#[test]
fn the_estimate_bounds_what_json_takes() {
    for part in [
        "0",
        "[]",
        "{}",
        "[0]",
        r#"{"":0}"#,
        r#"{"a":[]}"#,
        r#""""#,
        r#"[{"a":"b","c":"d"}]"#,
        r#"{"a":{"b":{"c":1}}}"#,
    ] {
        let text = format!("[{}]", vec![part; 50_000].join(","));
        let structure = text.bytes().filter(|b| b"[{,:".contains(b)).count();
        let estimate = 4 * text.len() + 320 * structure;
        let taken = most(estimate - 1, || drop(render_json(&text, &ChatOptions::default()).unwrap_err()));
        assert!(taken < estimate, "{part}: {taken} bytes, {estimate} were asked for");
    }
    let keys: Vec<String> = (0..50_000).map(|i| format!("\"{i}\":0")).collect();
    let text = format!("{{{}}}", keys.join(","));
    let estimate = 4 * text.len() + 320 * 100_000;
    let taken = most(estimate - 1, || drop(render_json(&text, &ChatOptions::default()).unwrap_err()));
    assert!(taken < estimate, "{taken} bytes for one object of 50,000 keys");
}

#[test]
fn the_estimate_bounds_what_reading_an_answer_takes() {
    for part in
        ["a", "<", "</think>", "<think>", "a</think>", "｜DSML｜", "<｜DSML｜", "<｜DSML｜tool_calls>", "\n\n", "é"]
    {
        let text = part.repeat(200_000 / part.len());
        let taken = most(usize::MAX, || {
            let (mut parser, mut reply) = (Parser::new(ThinkingMode::Chat), Reply::default());
            let events = parser.push_text(&text);
            events.iter().for_each(|event| reply.push(event));
        });
        assert!(taken < 160 * text.len(), "{part:?}: {} bytes a byte", taken / text.len());
    }
}

#[test]
fn the_estimate_bounds_what_replaying_an_answer_takes() {
    let tokenizer = tokenizer();
    let call = |kind: &str, value: &str| {
        format!(
            "<｜DSML｜tool_calls><｜DSML｜invoke name=\"f\"><｜DSML｜parameter name=\"a\" string=\"{kind}\">{value}\
             </｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>"
        )
    };
    for text in [
        "a".repeat(200_000),
        "\n\n<".repeat(70_000),
        "😀".repeat(50_000),
        call("true", &"\u{1}".repeat(200_000)),
        call("true", &"<".repeat(200_000)),
        call("false", &format!("\"{}\"", "a".repeat(200_000))),
    ] {
        let ids = tokenizer.encode(&text, Markup::Parse).unwrap();
        let (mut parser, mut reply) = (Parser::new(ThinkingMode::Chat), Reply::default());
        for &id in &ids {
            parser.push_token(&tokenizer, id).unwrap().iter().for_each(|event| reply.push(event));
        }
        parser.finish().iter().for_each(|event| reply.push(event));
        let messages = [Message::new(Role::User, ""), reply.to_message()];
        let prompt = render(&messages, &ChatOptions::default()).unwrap();
        let mut replayed = Vec::new();
        let estimate = 40 * text.len();
        // the library's own request is the largest
        let taken = most(estimate - 1, || replayed = prompt.encode(&tokenizer).unwrap());
        assert!(replayed.windows(ids.len()).any(|window| window == ids), "{:?}", &text[..20]);
        assert!(taken < estimate, "{:?}: {} bytes a byte", &text[..20], taken / text.len());
    }
}

#[test]
fn a_long_text_takes_the_memory_of_its_pieces() {
    let tokenizer = tokenizer();
    let text = std::fs::read_to_string(format!("{MODEL}/eval.txt")).unwrap();
    let long = text.repeat(8_000_000 / text.len());
    tokenizer.encode(&text, Markup::Text).unwrap();
    let taken = most(8 << 20, || drop(tokenizer.encode(&long, Markup::Text)));
    // the ids themselves, grown by doubling, and one piece
    assert!(taken < 20 << 20, "{taken} bytes for {} bytes of text", long.len());
}
