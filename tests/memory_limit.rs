//! Large inputs in an address space that is too small for them: each function of the C API that takes a text, a list of
//! tokens or one token after the other either works or says `OUT_OF_MEMORY` with the bytes, and works once there is room.
//!
//! Each case runs in a process of its own, since what must not happen is its death.

#![cfg(target_os = "linux")]

use std::ffi::{CStr, CString, c_char};
use std::mem::zeroed;
use std::path::Path;
use std::process::Command;
use std::ptr::{null, null_mut};
use std::{env, fs};

use dsv4::ffi::chat::*;
use dsv4::ffi::engine::*;
use dsv4::ffi::generate::*;
use dsv4::ffi::model::*;
use dsv4::ffi::sampler::*;
use dsv4::ffi::session::*;
use dsv4::ffi::status::*;
use dsv4::ffi::tokenizer::*;

/// Name of the variable that makes this program the child for one case.
const CASE: &str = "DSV4_MEMORY_CASE";
/// With one arena, a setting of glibc, no address space is reserved ahead, so that a refusal is certain.
const TIGHT: &str = "MALLOC_ARENA_MAX";
const CASES: [(&str, Case); 11] = [
    ("encode", encode),
    ("encode without a place to cut", encode_one_word),
    ("count tokens", count_tokens),
    ("decode", decode),
    ("render content", render_content),
    ("render structure", render_structure),
    ("render tools", render_tools),
    ("parse text", parse_text),
    ("stop string", stop_string),
    ("accept", accept),
    ("token id", token_id),
];
/// What is done in a child.
type Case = fn(&World);

const LARGE: usize = 4_000_000;
const MIB: u64 = 1 << 20;

#[test]
fn a_large_input_is_refused_and_never_kills_the_host() {
    let program = env::current_exe().expect("a path");
    for (name, _) in CASES {
        // with the allocator as it is, and with one that keeps nothing back for later
        for tight in [false, true] {
            let mut child = Command::new(&program);
            child.args(["--exact", "case_in_a_child", "--nocapture"]).env(CASE, name);
            if tight {
                child.env(TIGHT, "1").env("MALLOC_MMAP_THRESHOLD_", "65536").env("MALLOC_TRIM_THRESHOLD_", "65536");
            }
            let child = child.output().expect("the child started");
            let said = [child.stdout, child.stderr].concat();
            assert!(child.status.success(), "{name}: {}\n{}", child.status, String::from_utf8_lossy(&said));
        }
    }
}

#[test]
fn case_in_a_child() {
    let Ok(wanted) = env::var(CASE) else { return };
    let (_, case) = CASES.iter().find(|(name, _)| *name == wanted).expect("a case of the list");
    case(&World::new());
}

/// What every case needs.
struct World {
    model: *mut dsv4_model,
}

impl World {
    fn new() -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models/tiny-v4");
        let path = CString::new(path.to_str().expect("a UTF-8 path")).expect("no NUL");
        let mut model = null_mut();
        // SAFETY: valid arguments, here and in all calls below.
        assert_eq!(unsafe { dsv4_model_open(path.as_ptr(), null(), &raw mut model, null_mut()) }, dsv4_status::Ok);
        let world = Self { model };
        // the tokenizer's own tables are there already
        assert_eq!(world.encode("warm", null_mut(), 0, null_mut()), dsv4_status::Ok);
        world
    }

    fn encode(&self, text: &str, tokens: *mut u32, capacity: usize, err: *mut dsv4_error) -> dsv4_status {
        let mut n = 0;
        // SAFETY: as above.
        unsafe {
            dsv4_tokenizer_encode(self.model, text.as_ptr().cast(), text.len(), 0, tokens, capacity, &raw mut n, err)
        }
    }
}

/// Calls with more and more room until the outcome is `wanted`; before that it is `OUT_OF_MEMORY`, at least once
/// where nothing is reserved ahead.
fn squeezed(wanted: dsv4_status, mut call: impl FnMut(*mut dsv4_error) -> dsv4_status) {
    let mut refused = 0;
    let mut room = MIB;
    loop {
        // SAFETY: a struct of numbers.
        let mut err: dsv4_error = unsafe { zeroed() };
        limit(Some(room));
        let status = call(&raw mut err);
        limit(None);
        // SAFETY: every call ends the message with a NUL.
        let message = unsafe { CStr::from_ptr(err.message.as_ptr()) }.to_string_lossy();
        if status == wanted {
            assert!(refused > 0 || env::var_os(TIGHT).is_none(), "{room} bytes were enough at once");
            return;
        }
        assert_eq!(status, dsv4_status::OutOfMemory, "with {room} bytes: {message}");
        assert!(message.contains("cannot allocate ") && message.contains(" bytes for "), "{message}");
        refused += 1;
        room *= 2;
        assert!(room < 1 << 36, "{message}");
    }
}

/// Lets the address space grow by `room` bytes and no more, or without a limit.
fn limit(room: Option<u64>) {
    let pages = fs::read_to_string("/proc/self/statm").expect("the size of this process");
    let pages: u64 = pages.split(' ').next().and_then(|n| n.parse().ok()).expect("a number of pages");
    let limit = libc::rlimit {
        rlim_cur: room.map_or(libc::RLIM_INFINITY, |room| pages * 4096 + room),
        rlim_max: libc::RLIM_INFINITY,
    };
    // SAFETY: a valid struct.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) }, 0);
}

fn prose() -> String {
    "It was a dark night, and nobody came.\n".repeat(LARGE / 38)
}

fn encode(world: &World) {
    let (text, mut tokens) = (prose(), vec![0u32; LARGE]);
    squeezed(dsv4_status::Ok, |err| world.encode(&text, tokens.as_mut_ptr(), LARGE, err));
}

fn encode_one_word(world: &World) {
    let text = "a".repeat(LARGE / 10);
    squeezed(dsv4_status::Ok, |err| world.encode(&text, null_mut(), 0, err));
}

fn count_tokens(world: &World) {
    let text = prose();
    squeezed(dsv4_status::Ok, |err| world.encode(&text, null_mut(), 0, err));
}

fn decode(world: &World) {
    let tokens = vec![300u32; LARGE];
    let mut len = 0;
    // SAFETY: as above.
    squeezed(dsv4_status::Ok, |err| unsafe {
        dsv4_tokenizer_decode(world.model, tokens.as_ptr(), LARGE, null_mut(), 0, &raw mut len, err)
    });
}

fn render(world: &World, messages: &str, options: *const dsv4_chat_options, err: *mut dsv4_error) -> dsv4_status {
    let mut prompt = null_mut();
    // SAFETY: as above.
    let status = unsafe {
        dsv4_chat_render(world.model, messages.as_ptr().cast(), messages.len(), options, &raw mut prompt, err)
    };
    // SAFETY: NULL, or made by the call and not used any more.
    unsafe { dsv4_prompt_free(prompt) };
    status
}

fn render_content(world: &World) {
    let messages = format!(r#"[{{"role": "user", "content": "{}"}}]"#, prose().replace('\n', " "));
    squeezed(dsv4_status::Ok, |err| render(world, &messages, null(), err));
}

fn render_structure(world: &World) {
    let messages = format!("[{}0]", r#"{"a":[]},"#.repeat(LARGE / 40));
    squeezed(dsv4_status::Chat, |err| render(world, &messages, null(), err));
}

fn render_tools(world: &World) {
    let tool = r#"{"type": "function", "function": {"name": "f", "parameters": {"a": [1, 2, 3]}}}"#;
    let tools = CString::new(format!("[{}]", vec![tool; LARGE / 800].join(","))).expect("no NUL");
    // SAFETY: a struct of numbers and NULL.
    let mut options: dsv4_chat_options = unsafe { zeroed() };
    // SAFETY: the memory has that size.
    unsafe { dsv4_chat_options_init_sized(&raw mut options, size_of::<dsv4_chat_options>()) };
    options.tools = tools.as_ptr();
    squeezed(dsv4_status::Ok, |err| render(world, r#"[{"role": "user", "content": ""}]"#, &raw const options, err));
}

fn parse_text(world: &World) {
    let mut parser = null_mut();
    // SAFETY: as above.
    assert_eq!(unsafe { dsv4_chat_parser_new(world.model, 0, &raw mut parser, null_mut()) }, dsv4_status::Ok);
    let text = prose();
    // SAFETY: as above.
    squeezed(dsv4_status::Ok, |err| unsafe {
        dsv4_chat_parser_push_text(parser, text.as_ptr().cast(), text.len(), err)
    });
    let (mut json, mut len): (*const c_char, usize) = (null(), 0);
    // SAFETY: as above.
    squeezed(dsv4_status::Ok, |err| unsafe { dsv4_chat_parser_message(parser, &raw mut json, &raw mut len, err) });
    assert!(len > text.len());
    let mut event = dsv4_chat_event { size: size_of::<dsv4_chat_event>(), text: null(), text_len: 0, kind: 0, call: 0 };
    // SAFETY: as above.
    squeezed(dsv4_status::Ok, |err| unsafe { dsv4_chat_parser_next(parser, &raw mut event, err) });
    // all but a character that could begin a tag
    assert!(event.kind == dsv4_event_kind::Content as i32 && event.text_len + 2 > text.len(), "no event was lost");
    // SAFETY: not used any more.
    unsafe { dsv4_chat_parser_free(parser) };
}

fn sampler(repetition_penalty: f32) -> *mut dsv4_sampler {
    // SAFETY: a struct of numbers and NULL.
    let mut options: dsv4_sampler_options = unsafe { zeroed() };
    // SAFETY: the memory has that size.
    unsafe { dsv4_sampler_options_init_sized(&raw mut options, size_of::<dsv4_sampler_options>()) };
    options.repetition_penalty = repetition_penalty;
    let mut sampler = null_mut();
    // SAFETY: as above.
    assert_eq!(unsafe { dsv4_sampler_new(&raw const options, &raw mut sampler, null_mut()) }, dsv4_status::Ok);
    sampler
}

fn stop_string(world: &World) {
    let (mut engine, mut session) = (null_mut(), null_mut());
    // SAFETY: as above.
    assert_eq!(unsafe { dsv4_engine_new(world.model, null(), &raw mut engine, null_mut()) }, dsv4_status::Ok);
    // SAFETY: as above.
    assert_eq!(unsafe { dsv4_session_new(engine, null(), &raw mut session, null_mut()) }, dsv4_status::Ok);
    let tokens = [0u32, 300];
    // SAFETY: as above.
    let fed = unsafe { dsv4_session_feed(session, tokens.as_ptr(), 2, None, null_mut(), null_mut()) };
    assert_eq!(fed, dsv4_status::Ok);
    let text = CString::new(prose()).expect("no NUL");
    let texts = [text.as_ptr()];
    // SAFETY: a struct of numbers and NULL.
    let mut options: dsv4_generation_options = unsafe { zeroed() };
    // SAFETY: the memory has that size.
    unsafe { dsv4_generation_options_init_sized(&raw mut options, size_of::<dsv4_generation_options>()) };
    options.stop_strings = texts.as_ptr();
    options.n_stop_strings = 1;
    let (sampler, mut generation) = (sampler(1.0), null_mut());
    // SAFETY: as above.
    squeezed(dsv4_status::Ok, |err| unsafe {
        dsv4_generation_new(session, sampler, &raw const options, &raw mut generation, err)
    });
}

fn accept(_: &World) {
    let sampler = sampler(1.1);
    let mut next = 0;
    squeezed(dsv4_status::Ok, |err| {
        while next < 4_000_000 {
            // SAFETY: as above.
            let status = unsafe { dsv4_sampler_accept(sampler, next, err) };
            if status != dsv4_status::Ok {
                return status;
            }
            next += 1;
        }
        dsv4_status::Ok
    });
}

fn token_id(world: &World) {
    let (text, mut token) = (prose(), 0);
    limit(Some(MIB));
    // SAFETY: as above.
    let status =
        unsafe { dsv4_tokenizer_token_id(world.model, text.as_ptr().cast(), text.len(), &raw mut token, null_mut()) };
    limit(None);
    assert_eq!(status, dsv4_status::NotFound);
}
