//! The parser of model output: pitfalls 85, 87, 89 and 92, fed whole, by bytes, cut anywhere, and
//! by tokens.

#![allow(
    clippy::unwrap_used,
    clippy::match_same_arms,
    reason = "a failed call is a failed test; arms follow the events"
)]

use std::path::Path;

use dsv4::chat::{
    ChatOptions, Event, Message, Parser, Reply, Role, ThinkingMode, ToolCall, parse, render, render_json,
};
use dsv4::tokenizer::{Markup, Tokenizer};
use proptest::prelude::*;
use serde_json::Value;

use ThinkingMode::{Chat, Thinking};

const CALL: &str = "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"s\" string=\"true\">a \"b\"\n</parameter></｜DSML｜parameter>\n<｜DSML｜parameter name=\"n\" string=\"false\">[1, {\"k\": null}]</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"g\">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls><｜end▁of▁sentence｜>";

fn tiny() -> Tokenizer {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    Tokenizer::from_file(&root.join("examples/models/tiny-v4/tokenizer.json")).unwrap()
}

/// Events with neighbouring deltas of the same kind joined.
fn joined(events: impl IntoIterator<Item = Event>) -> Vec<Event> {
    let mut all: Vec<Event> = Vec::new();
    for event in events {
        match (all.last_mut(), &event) {
            (Some(Event::ReasoningDelta(last)), Event::ReasoningDelta(text)) => last.push_str(text),
            (Some(Event::ContentDelta(last)), Event::ContentDelta(text)) => last.push_str(text),
            (Some(Event::ToolCallArgumentDelta { json: last, .. }), Event::ToolCallArgumentDelta { json, .. }) => {
                last.push_str(json);
            }
            _ => all.push(event),
        }
    }
    all
}

fn fed<'a>(thinking: ThinkingMode, parts: impl IntoIterator<Item = &'a [u8]>) -> Vec<Event> {
    let mut parser = Parser::new(thinking);
    let mut events: Vec<Event> = parts.into_iter().flat_map(|part| parser.push_bytes(part)).collect();
    events.extend(parser.finish());
    assert!(parser.finish().is_empty(), "finishing twice gives nothing");
    joined(events)
}

/// Parses `text` whole, byte by byte and cut in two at every byte; all must agree.
fn reply(text: &str, thinking: ThinkingMode) -> Reply {
    let bytes = text.as_bytes();
    let whole = fed(thinking, [bytes]);
    assert_eq!(fed(thinking, bytes.chunks(1)), whole, "byte by byte: {text}");
    for cut in 0..bytes.len() {
        assert_eq!(fed(thinking, [&bytes[..cut], &bytes[cut..]]), whole, "cut at byte {cut}: {text}");
    }
    assert_eq!(whole.iter().filter(|e| matches!(e, Event::End(_))).count(), 1);
    assert_eq!(whole.last(), Some(&Event::End(None)));
    check(&whole);
    let reply = parse(text, thinking);
    let mut assembled = Reply::default();
    whole.iter().for_each(|event| assembled.push(event));
    assert_eq!(assembled, reply);
    reply
}

/// What must hold of any output's events.
fn check(events: &[Event]) {
    let mut arguments = String::new();
    for event in events {
        match event {
            Event::ReasoningDelta(text) | Event::ContentDelta(text) => {
                assert!(!text.contains("｜DSML｜"), "tag bytes in text: {text}");
                assert!(!text.is_empty());
            }
            Event::ToolCallBegin { .. } => arguments.clear(),
            Event::ToolCallArgumentDelta { json, .. } => {
                arguments.push_str(json);
                assert!(!arguments.contains("｜DSML｜"), "tag bytes in arguments: {arguments}");
            }
            Event::ToolCallEnd { .. } => {
                let parsed: Value = serde_json::from_str(&arguments).unwrap();
                assert!(parsed.is_object(), "{arguments}");
            }
            Event::Malformed { .. } | Event::End(_) => {}
        }
    }
}

fn calls(reply: &Reply) -> Vec<(&str, &str)> {
    reply.tool_calls.iter().map(|call| (call.name.as_str(), call.arguments.as_str())).collect()
}

fn invoke(body: &str) -> String {
    format!("<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n{body}\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>")
}

#[test]
fn reasoning_content_and_calls_come_apart() {
    let r = reply(&format!("I think.\n</think>Well:{CALL}"), Thinking);
    assert_eq!(r.reasoning_content, "I think.\n");
    assert_eq!(r.content, "Well:");
    assert_eq!(calls(&r), [("f", "{\"s\": \"a \\\"b\\\"\\n</parameter>\", \"n\": [1, {\"k\": null}]}"), ("g", "{}")]);
    assert!(r.malformed.is_empty());

    let r = reply("Just text.\n\nWith <tags> & 1 < 2 </b>\n\n", Chat);
    assert_eq!(r.content, "Just text.\n\nWith <tags> & 1 < 2 </b>\n\n");
    assert!(r.reasoning_content.is_empty() && r.tool_calls.is_empty() && r.malformed.is_empty());
}

#[test]
fn events_arrive_while_the_call_is_written() {
    let mut parser = Parser::new(Chat);
    let head =
        "Hi\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"s\" string=\"true\">ab";
    let events = parser.push_text(head);
    assert_eq!(
        events,
        [
            Event::ContentDelta("Hi".into()),
            Event::ToolCallBegin { index: 0, name: "f".into() },
            Event::ToolCallArgumentDelta { index: 0, json: "{\"s\": \"ab".into() },
        ]
    );
    assert_eq!(parser.push_text("\n"), [Event::ToolCallArgumentDelta { index: 0, json: "\\n".into() }]);
    let tail = "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>";
    let ended = [Event::ToolCallArgumentDelta { index: 0, json: "\"}".into() }, Event::ToolCallEnd { index: 0 }];
    assert_eq!(parser.push_text(tail), ended);
    assert_eq!(parser.push_text("<｜end▁of▁sentence｜>x"), [Event::End(None)]);
    assert_eq!(parser.push_text("more"), []);
    assert_eq!(parser.finish(), []);
}

/// Pitfall 92.
#[test]
fn missing_and_repeated_think_tags_do_not_mix_up_the_channels() {
    let parts = |text: &str, thinking| {
        let r = reply(text, thinking);
        (r.reasoning_content, r.content, r.tool_calls.len(), r.malformed)
    };
    let of = |reasoning: &str, content: &str, calls, malformed: &[&str]| {
        (reasoning.to_owned(), content.to_owned(), calls, malformed.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>())
    };
    // Missing </think>: it was all reasoning, unless a tool call ends it.
    assert_eq!(parts("never ends", Thinking), of("never ends", "", 0, &[]));
    assert_eq!(parts(&format!("so I call{CALL}"), Thinking), of("so I call", "", 2, &[]));
    // Double <think>, and one that the prompt already had.
    assert_eq!(parts("<think>R</think>C", Thinking), of("R", "C", 0, &[]));
    assert_eq!(parts("<think><think>R</think>C", Thinking), of("R", "C", 0, &[]));
    assert_eq!(parts("R<think>S</think>C", Thinking), of("RS", "C", 0, &["<think>"]));
    // Chat mode: the model thinks all the same, or repeats </think>.
    assert_eq!(parts("<think>R</think>C", Chat), of("R", "C", 0, &[]));
    assert_eq!(parts("</think>C", Chat), of("", "C", 0, &[]));
    assert_eq!(parts("C</think>D", Chat), of("", "CD", 0, &["</think>"]));
    assert_eq!(parts("R</think>C</think>D<think>E", Thinking), of("R", "CDE", 0, &["</think>", "<think>"]));
    // Empty thinking, then a call.
    assert_eq!(parts(&format!("</think>{CALL}"), Thinking), of("", "", 2, &[]));
    assert_eq!(parts("</thi", Thinking), of("</thi", "", 0, &[]));
    assert_eq!(parts("hello<｜User｜>", Chat), of("", "hello", 0, &["<｜User｜>"]));
}

/// Pitfall 85.
#[test]
fn broken_calls_come_out_as_malformed_with_their_text() {
    let void = |body: &str| {
        let text = format!("C\n\n{}", invoke(body));
        let r = reply(&text, Chat);
        assert_eq!(r.content, "C", "{text}");
        assert_eq!(calls(&r), [], "{text}");
        let start = text.find("<｜DSML｜invoke").unwrap();
        let end = text.find("</｜DSML｜invoke>").unwrap() + "</｜DSML｜invoke>".len();
        assert_eq!(r.malformed[0], text[start..end], "{text}");
    };
    let parameter = |name: &str, kind: &str, value: &str| {
        format!("<｜DSML｜parameter name=\"{name}\" string=\"{kind}\">{value}</｜DSML｜parameter>")
    };
    void("<｜DSML｜parameter name=\"a\" string=\"true\">no close");
    void(&parameter("a", "false", "not json"));
    void(&parameter("a", "false", ""));
    void(&parameter("a", "maybe", "x"));
    void(&[parameter("a", "true", "x"), parameter("a", "true", "y")].join("\n"));
    void("stray text");
    void("<<｜DSML｜parameter name=\"a\" string=\"true\">x</｜DSML｜parameter>");
    void(&parameter("a", "true", "<｜DSML｜parameter name=\"b\" string=\"true\">nested"));
    void(&parameter("a", "true", "<｜DSML｜tool_calls>"));
    void(&parameter("a", "true", "bare ｜DSML｜ in a value"));
    void("</｜DSML｜parameter>");
    void("<｜DSML｜parameter name=\"a\">x</｜DSML｜parameter>");
}

#[test]
fn a_broken_call_does_not_take_its_neighbours_along() {
    let good = |name: &str| format!("<｜DSML｜invoke name=\"{name}\">\n</｜DSML｜invoke>\n");
    let text = format!(
        "<｜DSML｜tool_calls>\n{}<｜DSML｜invoke name=\"b\">\n?\n</｜DSML｜invoke>\njunk {}</｜DSML｜tool_calls>\n after",
        good("a"),
        good("c")
    );
    let r = reply(&text, Chat);
    assert_eq!(calls(&r), [("a", "{}"), ("c", "{}")]);
    assert_eq!(r.malformed, ["<｜DSML｜invoke name=\"b\">\n?\n</｜DSML｜invoke>", "junk", "after"]);
    assert_eq!(r.content, "");
}

#[test]
fn output_that_stops_within_a_tag_shows_none_of_it() {
    let block_end = CALL.find("</｜DSML｜tool_calls>").unwrap() + "</｜DSML｜tool_calls>".len();
    for cut in CALL.char_indices().map(|(at, _)| at).filter(|&at| at <= block_end) {
        let r = reply(&format!("C{}", &CALL[..cut]), Chat);
        let has_begun = CALL[..cut].contains('｜');
        let before = if has_begun { "" } else { &CALL[..cut] };
        // Within the first tag the newlines before it are still text.
        assert_eq!(r.content.trim_end(), format!("C{before}").trim_end(), "cut at {cut}");
        let is_whole = !has_begun || cut == block_end;
        assert_eq!(r.malformed.is_empty(), is_whole, "cut at {cut}: {:?}", r.malformed);
    }
    for half in ["<｜", "<｜DSML", "</｜DSML｜", "<｜DSML｜tool_ca", "｜DS", "<｜end▁of"] {
        let r = reply(&format!("C{half}"), Chat);
        assert_eq!((r.content.as_str(), r.malformed), ("C", vec![half.to_owned()]));
    }
    let r = reply("<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n</｜DSML｜invoke>\n", Chat);
    assert_eq!(calls(&r), [("f", "{}")]);
    assert_eq!(r.malformed, ["<｜DSML｜tool_calls>"]);
}

#[test]
fn tags_outside_of_a_block_are_malformed() {
    let malformed = |text: &str| {
        let r = reply(text, Chat);
        assert!(r.tool_calls.is_empty());
        (r.content, r.malformed.join("|"))
    };
    let of = |content: &str, malformed: &str| (content.to_owned(), malformed.to_owned());
    assert_eq!(malformed("a ｜DSML｜ b"), of("a  b", "｜DSML｜"));
    assert_eq!(malformed("a<｜DSML｜x y>b"), of("ab", "<｜DSML｜x y>"));
    assert_eq!(malformed("a<｜DSML｜x\nb"), of("a\nb", "<｜DSML｜x"));
    assert_eq!(malformed("a</｜DSML｜parameter>b"), of("ab", "</｜DSML｜parameter>"));
    let lone = "<｜DSML｜invoke name=\"f\">\nsecret</｜DSML｜invoke>";
    assert_eq!(malformed(&format!("a\n{lone}b")), of("a\nb", lone));
    assert_eq!(malformed("a<｜DSML｜<｜DSML｜tool_calls>\n</｜DSML｜tool_calls>"), of("a", "<｜DSML｜"));
}

#[test]
fn the_block_may_follow_text_directly_and_come_twice() {
    let block = invoke("");
    let r = reply(&format!("C{block}\n{block}"), Chat);
    assert_eq!((r.content.as_str(), r.tool_calls.len(), r.malformed.len()), ("C", 2, 0));
}

#[test]
fn a_full_width_bar_cut_within_utf_8_is_put_together() {
    let bytes = CALL.as_bytes();
    let cut = CALL.find('｜').unwrap() + 1;
    let events = fed(Chat, [&bytes[..cut], &bytes[cut..cut + 1], &bytes[cut + 1..]]);
    assert_eq!(events, fed(Chat, [bytes]));
    let lost = fed(Chat, [&bytes[..cut]]);
    assert_eq!(lost, [Event::ContentDelta("\n\n<\u{fffd}".into()), Event::End(None)]);
}

/// Pitfalls 89 and 92: with ids, only the control token counts, not its spelling.
#[test]
fn tokens_split_on_ids_and_not_on_spellings() {
    let tokenizer = tiny();
    let mut ids = tokenizer.encode("the tag </think> and ｜DSML｜ as text", Markup::Text).unwrap();
    ids.extend(tokenizer.encode(&format!("</think>C{CALL}"), Markup::Parse).unwrap());
    let mut parser = Parser::new(Thinking);
    let mut r = Reply::default();
    for id in ids {
        parser.push_token(&tokenizer, id).unwrap().iter().for_each(|event| r.push(event));
    }
    assert_eq!(r.reasoning_content, "the tag </think> and ｜DSML｜ as text");
    assert_eq!(r.content, "C");
    assert_eq!(r.tool_calls.len(), 2);
    assert!(r.malformed.is_empty());
    assert!(parser.push_token(&tokenizer, 99_999).is_err());
}

#[test]
fn tokens_and_text_give_the_same_answer() {
    let tokenizer = tiny();
    for text in [format!("R 漢😀</think>C{CALL}"), format!("R{CALL}"), "R</think>C<｜DSML｜x".to_owned()] {
        let mut parser = Parser::new(Thinking);
        let mut events = Vec::new();
        for id in tokenizer.encode(&text, Markup::Parse).unwrap() {
            events.extend(parser.push_token(&tokenizer, id).unwrap());
        }
        events.extend(parser.finish());
        let Some(end @ Event::End(Some(_))) = events.last_mut() else { panic!("{events:?}") };
        *end = Event::End(None);
        assert_eq!(joined(events), fed(Thinking, [text.as_bytes()]), "{text}");
    }
}

/// Pitfall 87.
#[test]
fn thirty_two_interleaved_parsers_share_no_state() {
    let texts: Vec<String> =
        (0..32).map(|n| format!("R{n}</think>C{n}{}", CALL.replace("\"f\"", &format!("\"f{n}\"")))).collect();
    let mut parsers: Vec<Parser> = (0..32).map(|_| Parser::new(Thinking)).collect();
    let mut replies = vec![Reply::default(); 32];
    let longest = texts.iter().map(String::len).max().unwrap();
    for at in 0..longest {
        for ((text, parser), reply) in texts.iter().zip(&mut parsers).zip(&mut replies) {
            if let Some(byte) = text.as_bytes().get(at) {
                parser.push_bytes(&[*byte]).iter().for_each(|event| reply.push(event));
            }
        }
    }
    for (n, reply) in replies.iter().enumerate() {
        assert_eq!((reply.reasoning_content.clone(), reply.content.clone()), (format!("R{n}"), format!("C{n}")));
        assert_eq!(reply.tool_calls[0].name, format!("f{n}"));
        assert_eq!(*reply, parse(&texts[n], Thinking));
    }
}

#[test]
fn a_megabyte_without_an_end_is_parsed_in_time() {
    let start = std::time::Instant::now();
    for text in ["<｜DSML｜invoke name=\">", "<", "\n", "</think>", "<｜DSML｜tool_calls>"] {
        parse(&text.repeat((1 << 20) / text.len()), Chat);
    }
    let open = format!("<｜DSML｜invoke name=\"{}", ">".repeat(1 << 20));
    assert!(!parse(&open, Chat).malformed.is_empty());
    let value = invoke(&format!("<｜DSML｜parameter name=\"a\" string=\"true\">{}", "<｜".repeat(1 << 18)));
    assert_eq!(parse(&value, Chat).malformed.len(), 1);
    assert!(start.elapsed().as_secs() < 30);
}

#[test]
fn an_answer_goes_back_into_the_next_prompt_as_it_was() {
    let question = Message::new(Role::User, "Q");
    let options = ChatOptions { thinking: Thinking, ..ChatOptions::default() };
    let prompt = render(std::slice::from_ref(&question), &options).unwrap().to_text();
    let answer = format!("R\n</think>C{CALL}");
    let r = reply(&answer, Thinking);
    let next = render(&[question, r.to_message()], &options).unwrap().to_text();
    assert_eq!(next, prompt.clone() + &answer);
    let json = format!("[{{\"role\": \"user\", \"content\": \"Q\"}}, {}]", r.to_json());
    assert_eq!(render_json(&json, &options).unwrap().to_text(), prompt + &answer);
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-1_000_000i32..1_000_000).prop_map(|v| Value::from(f64::from(v) / 64.0)),
        "\\PC{0,6}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::hash_map("[a-z\"\\\\]{1,4}", inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// DSML in all states of disrepair.
fn debris() -> impl Strategy<Value = String> {
    let part = prop::sample::select(vec![
        "<",
        "</",
        "｜DSML｜",
        "<｜DSML｜",
        "</｜DSML｜",
        "tool_calls>",
        "invoke name=\"f\">",
        "invoke>",
        "parameter name=\"a\" string=\"true\">",
        "parameter name=\"b\" string=\"false\">",
        "parameter>",
        "<｜DSML｜tool_calls>\n",
        "</｜DSML｜tool_calls>",
        "<｜DSML｜invoke name=\"f\">\n",
        "</｜DSML｜invoke>\n",
        "<｜DSML｜parameter name=\"a\" string=\"true\">",
        "<｜DSML｜parameter name=\"b\" string=\"false\">",
        "</｜DSML｜parameter>\n",
        "1",
        "x",
        "\n",
        "\n\n",
        " ",
        ">",
        "\"",
        "｜",
        "<think>",
        "</think>",
        "<｜User｜>",
        "</thin",
    ]);
    prop::collection::vec(part, 0..24).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_arguments_survive_being_written_and_read(
        arguments in prop::collection::hash_map("[a-z >]{1,6}", any_json(), 0..5), content in "[^｜<]{0,20}",
    ) {
        let arguments = Value::Object(arguments.into_iter().collect());
        let mut said = Message::new(Role::Assistant, content);
        said.tool_calls = vec![ToolCall { id: None, name: "f".into(), arguments: arguments.to_string() }];
        let messages = [Message::new(Role::User, "Q"), said.clone()];
        let written = render(&messages, &ChatOptions::default()).unwrap().to_text();
        let answer = written.split_once("</think>").unwrap().1;
        prop_assume!(!said.content.contains("think>"));
        let r = parse(answer, Chat);
        prop_assert_eq!(&r.content, &said.content);
        prop_assert_eq!(r.malformed.len(), 0, "{:?}", r.malformed);
        let read: Value = serde_json::from_str(&r.tool_calls[0].arguments).unwrap();
        prop_assert_eq!(read, arguments);
    }

    #[test]
    fn debris_never_leaks_tags_and_never_depends_on_the_cut(text in debris(), thinking: bool, cut in any::<prop::sample::Index>()) {
        let thinking = if thinking { Thinking } else { Chat };
        let whole = fed(thinking, [text.as_bytes()]);
        check(&whole);
        prop_assert_eq!(&fed(thinking, text.as_bytes().chunks(1)), &whole);
        let cut = if text.is_empty() { 0 } else { cut.index(text.len()) };
        prop_assert_eq!(&fed(thinking, [&text.as_bytes()[..cut], &text.as_bytes()[cut..]]), &whole);
        prop_assert!(matches!(whole.last(), Some(Event::End(None))));
    }
}
