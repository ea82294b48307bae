//! Exact replay of answers (pitfall 46): the next prompt begins with the tokens that were sampled, whatever their spacing,
//! key order or tokenisation, as long as the message still says what they say.

#![allow(clippy::unwrap_used, reason = "a failed call is a failed test")]

use std::collections::HashMap;
use std::ffi::{CString, c_char};
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};

use dsv4::TokenId;
use dsv4::chat::{ChatOptions, Message, Parser, Reply, Role, Sampled, ThinkingMode, render, render_json};
use dsv4::ffi::chat::*;
use dsv4::ffi::model::*;
use dsv4::ffi::status::dsv4_status;
use dsv4::tokenizer::{Markup, Tokenizer};
use serde_json::{Value, json};

use ThinkingMode::{Chat, Thinking};

const EOS: &str = "<｜end▁of▁sentence｜>";
const TOOLS: &str = r#"[{"type": "function", "function": {"name": "find", "parameters": {}}}]"#;

/// What no renderer would write: one newline before the block, JSON with odd spaces and key order, spaces between tags.
const ODD: &str = concat!(
    "I look it up.</think>One moment.\n<｜DSML｜tool_calls>\n\n <｜DSML｜invoke name=\"find\">\n",
    "<｜DSML｜parameter name=\"where\" string=\"false\">{ \"z\":1.50,\"a\" : [ 1,2 ] }</｜DSML｜parameter>\n\n",
    "<｜DSML｜parameter name=\"all\" string=\"true\">x \"y\"</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>",
    "<｜end▁of▁sentence｜>"
);

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models/tiny-v4")
}

fn tiny() -> Tokenizer {
    Tokenizer::from_file(&folder().join("tokenizer.json")).unwrap()
}

fn options(thinking: ThinkingMode, tools: bool) -> ChatOptions {
    ChatOptions { thinking, tools: tools.then(|| TOOLS.to_owned()), ..ChatOptions::default() }
}

/// The answer whose tokens these are.
fn answer(tokenizer: &Tokenizer, thinking: ThinkingMode, tokens: &[TokenId]) -> Reply {
    let (mut parser, mut reply) = (Parser::new(thinking), Reply::default());
    for &id in tokens {
        parser.push_token(tokenizer, id).unwrap().iter().for_each(|event| reply.push(event));
    }
    parser.finish().iter().for_each(|event| reply.push(event));
    reply
}

/// Tokens of `text` that the tokenizer would not choose: one a byte, where markers allow.
fn by_bytes(tokenizer: &Tokenizer, text: &str) -> Vec<TokenId> {
    let whole = tokenizer.encode(text, Markup::Parse).unwrap();
    let is_marker = |id: TokenId| tokenizer.is_markup(id) || tokenizer.is_special(id);
    let byte = |byte: u8| (0..2000).find(|&id| !is_marker(id) && tokenizer.token_bytes(id).unwrap() == [byte]).unwrap();
    let split = |id: TokenId| match is_marker(id) {
        true => vec![id],
        false => tokenizer.token_bytes(id).unwrap().iter().map(|&b| byte(b)).collect(),
    };
    whole.into_iter().flat_map(split).collect()
}

fn user(text: &str) -> Message {
    Message::new(Role::User, text)
}

fn ids(tokenizer: &Tokenizer, messages: &[Message], options: &ChatOptions) -> Vec<TokenId> {
    render(messages, options).unwrap().encode(tokenizer).unwrap()
}

fn without_tokens(message: &Message) -> Message {
    Message { sampled: None, ..message.clone() }
}

/// The JSON that a client makes of a message when it reads and writes it: arguments without spaces, keys sorted, reasoning
/// and content as they are.
fn rewritten(message: &str) -> Value {
    let mut message: Value = serde_json::from_str(message).unwrap();
    for call in message["tool_calls"].as_array_mut().into_iter().flatten() {
        let mut arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
        arguments.sort_all_objects();
        call["function"]["arguments"] = Value::String(arguments.to_string());
    }
    message
}

/// Pitfall 46.
#[test]
fn a_call_with_odd_spacing_and_key_order_comes_back_token_for_token() {
    let (tokenizer, options) = (tiny(), options(Thinking, true));
    let first = ids(&tokenizer, &[user("Where?")], &options);
    let sampled = tokenizer.encode(ODD, Markup::Parse).unwrap();
    let reply = answer(&tokenizer, Thinking, &sampled);
    assert_eq!((reply.reasoning_content.as_str(), reply.content.as_str()), ("I look it up.", "One moment."));

    let mut message = rewritten(&reply.to_json());
    let arguments = message["tool_calls"][0]["function"]["arguments"].as_str().unwrap().to_owned();
    assert_eq!(arguments, r#"{"all":"x \"y\"","where":{"a":[1,2],"z":1.5}}"#, "the client writes it its own way");
    let next = |message: &Value| {
        let result = json!({"role": "tool", "tool_call_id": "1", "content": "there"});
        let messages = json!([{"role": "user", "content": "Where?"}, message, result]).to_string();
        render_json(&messages, &options).unwrap().encode(&tokenizer).unwrap()
    };
    let begin = [first, sampled].concat();
    assert_eq!(next(&message)[..begin.len()], begin);
    message.as_object_mut().unwrap().remove("sampled");
    assert!(!next(&message).starts_with(&begin), "the message alone does not tell");
}

/// Pitfall 46, for clients that send nothing back but the standard fields: the tokens are kept by the call's id.
#[test]
fn tokens_kept_by_the_id_of_a_call_are_put_in_again() {
    let (tokenizer, options) = (tiny(), options(Thinking, true));
    let sampled = tokenizer.encode(ODD, Markup::Parse).unwrap();
    let mut message = rewritten(&answer(&tokenizer, Thinking, &sampled).to_json());
    message["tool_calls"][0]["id"] = json!("call_7");
    let mut kept: HashMap<String, Value> = HashMap::new();
    kept.insert("call_7".into(), message.as_object_mut().unwrap().remove("sampled").unwrap());

    let id = message["tool_calls"][0]["id"].as_str().unwrap();
    message["sampled"] = kept[id].clone();
    let messages = json!([{"role": "user", "content": "Where?"}, message]).to_string();
    let begin = [ids(&tokenizer, &[user("Where?")], &options), sampled].concat();
    assert_eq!(render_json(&messages, &options).unwrap().encode(&tokenizer).unwrap(), begin);
}

#[test]
fn tokens_that_the_tokenizer_would_not_choose_come_back() {
    let tokenizer = tiny();
    for (thinking, text) in [
        (Chat, format!("Once upon a time 漢😀{EOS}")),
        (Thinking, format!("So.</think>Once upon a time{EOS}")),
        (Thinking, ODD.to_owned()),
    ] {
        let options = options(thinking, true);
        let sampled = by_bytes(&tokenizer, &text);
        assert_ne!(sampled, tokenizer.encode(&text, Markup::Parse).unwrap(), "{text}");
        let message = answer(&tokenizer, thinking, &sampled).to_message();
        let begin = [ids(&tokenizer, &[user("Q")], &options), sampled].concat();
        let next = [user("Q"), message.clone(), user("And?")];
        assert_eq!(ids(&tokenizer, &next, &options)[..begin.len()], begin, "{text}");
        // three answers in a row, each replayed
        let many = [user("Q"), message.clone(), user("And?"), message.clone(), user("Then?"), message];
        let before = ids(&tokenizer, &many[..5], &options);
        let after = ids(&tokenizer, &many, &options);
        assert_eq!(after[..before.len()], before);
        assert_eq!(after[before.len()..], begin[begin.len() - (after.len() - before.len())..]);
    }
}

#[test]
fn bytes_that_are_no_text_come_back_as_they_were() {
    let tokenizer = tiny();
    let mut sampled = by_bytes(&tokenizer, "a€b");
    // a code point without its end
    sampled.remove(3);
    let message = answer(&tokenizer, Chat, &sampled).to_message();
    assert_eq!(message.content, "a\u{fffd}b");
    let begin = [ids(&tokenizer, &[user("Q")], &options(Chat, false)), sampled].concat();
    assert_eq!(ids(&tokenizer, &[user("Q"), message], &options(Chat, false))[..begin.len()], begin);
}

#[test]
fn an_edited_message_is_rendered_from_what_it_says() {
    let (tokenizer, options) = (tiny(), options(Thinking, true));
    let original = answer(&tokenizer, Thinking, &by_bytes(&tokenizer, ODD)).to_message();
    let edits: [fn(&mut Message); 8] = [
        |m| m.content.push('!'),
        |m| m.content.clear(),
        |m| m.reasoning_content = None,
        |m| m.reasoning_content = Some("I knew.".into()),
        |m| m.tool_calls.clear(),
        |m| m.tool_calls[0].name.push('2'),
        |m| m.tool_calls[0].arguments = m.tool_calls[0].arguments.replace("1.50", "1.51"),
        |m| m.tool_calls.push(m.tool_calls[0].clone()),
    ];
    let unedited = ids(&tokenizer, &[user("Q"), original.clone()], &options);
    assert_ne!(unedited, ids(&tokenizer, &[user("Q"), without_tokens(&original)], &options));
    for (i, edit) in edits.iter().enumerate() {
        let mut edited = original.clone();
        edit(&mut edited);
        let rendered = ids(&tokenizer, &[user("Q"), without_tokens(&edited), user("And?")], &options);
        assert_eq!(ids(&tokenizer, &[user("Q"), edited, user("And?")], &options), rendered, "edit {i}");
    }
}

#[test]
fn an_answer_whose_reasoning_is_dropped_differs_from_there_on() {
    let tokenizer = tiny();
    let dropping = options(Thinking, false);
    let keeping = ChatOptions { drop_thinking: false, ..dropping.clone() };
    let sampled = by_bytes(&tokenizer, &format!("Hm.</think>Yes.{EOS}"));
    let message = answer(&tokenizer, Thinking, &sampled).to_message();
    let begin = [ids(&tokenizer, &[user("Q")], &dropping), sampled].concat();
    let next = [user("Q"), message.clone(), user("And?")];
    assert_eq!(ids(&tokenizer, &next[..2], &dropping), begin, "nothing is dropped before the next user message");
    assert_eq!(ids(&tokenizer, &next, &keeping)[..begin.len()], begin);
    let plain = [user("Q"), without_tokens(&message), user("And?")];
    assert_eq!(ids(&tokenizer, &next, &dropping), ids(&tokenizer, &plain, &dropping));
    // the same where thinking was switched on or off meanwhile, even if nothing was thought
    for (thinking, text) in [(Thinking, "</think>Yes."), (Chat, "Yes.")] {
        let message = answer(&tokenizer, thinking, &by_bytes(&tokenizer, text)).to_message();
        let other = options(if thinking == Chat { Thinking } else { Chat }, true);
        let plain = ids(&tokenizer, &[user("Q"), without_tokens(&message)], &other);
        assert_eq!(ids(&tokenizer, &[user("Q"), message], &other), plain, "{text}");
    }
}

#[test]
fn an_answer_cut_off_within_its_reasoning_is_closed_behind_its_tokens() {
    let (tokenizer, options) = (tiny(), options(Thinking, true));
    let sampled = by_bytes(&tokenizer, "I wonder");
    let message = answer(&tokenizer, Thinking, &sampled).to_message();
    let end = tokenizer.encode(&format!("</think>{EOS}"), Markup::Parse).unwrap();
    let whole = [ids(&tokenizer, &[user("Q")], &options), sampled, end].concat();
    assert_eq!(ids(&tokenizer, &[user("Q"), message], &options), whole);
}

#[test]
fn an_unfinished_answer_goes_on_behind_its_tokens() {
    let (tokenizer, options) = (tiny(), options(Chat, false));
    let sampled = by_bytes(&tokenizer, "Once upon a");
    let message = Message { wo_eos: true, ..answer(&tokenizer, Chat, &sampled).to_message() };
    let begin = [ids(&tokenizer, &[user("Q")], &options), sampled].concat();
    assert_eq!(ids(&tokenizer, &[user("Q"), message.clone()], &options), begin);
    // where text follows directly, the two are one text
    let more = Message::new(Role::Assistant, " time");
    let plain = ids(&tokenizer, &[user("Q"), without_tokens(&message), more.clone()], &options);
    assert_eq!(ids(&tokenizer, &[user("Q"), message, more], &options), plain);
}

#[test]
fn tokens_that_are_no_well_formed_answer_are_never_replayed() {
    let (tokenizer, options) = (tiny(), options(Chat, false));
    let plain = ids(&tokenizer, &[user("Q"), Message::new(Role::Assistant, "Yes.")], &options);
    let yes = tokenizer.encode("Yes.", Markup::Text).unwrap();
    let marker = |spelling| tokenizer.encode(spelling, Markup::Parse).unwrap();
    let around = |spelling| [yes.clone(), marker(spelling)].concat();
    for tokens in [
        around("<｜User｜>"),
        around("</think>"),
        around("<｜DSML｜tool_calls>"),
        [marker("<think>R</think>"), yes.clone()].concat(),
        [yes.clone(), marker(EOS), marker("<｜User｜>"), yes.clone()].concat(),
        vec![],
        vec![4_000_000_000],
        [yes.clone(), vec![99_999]].concat(),
    ] {
        let message = Message {
            sampled: Some(Sampled { thinking: Chat, tokens: tokens.clone() }),
            ..Message::new(Role::Assistant, "Yes.")
        };
        assert_eq!(ids(&tokenizer, &[user("Q"), message], &options), plain, "{tokens:?}");
    }
}

#[test]
fn the_field_is_read_strictly_and_written_back_as_it_was() {
    let tokenizer = tiny();
    let reply = answer(&tokenizer, Thinking, &by_bytes(&tokenizer, ODD));
    let sampled = reply.sampled.clone().unwrap();
    assert_eq!(sampled.tokens.len() + 1, by_bytes(&tokenizer, ODD).len(), "the end of sentence is the renderer's");
    let message: Value = serde_json::from_str(&reply.to_json()).unwrap();
    assert_eq!(message["sampled"], json!({"thinking": true, "tokens": sampled.tokens}));
    let options = options(Thinking, true);
    let from_rust = ids(&tokenizer, &[user("Q"), reply.to_message()], &options);
    let text = json!([{"role": "user", "content": "Q"}, message]).to_string();
    assert_eq!(render_json(&text, &options).unwrap().encode(&tokenizer).unwrap(), from_rust);
    for (sampled, reason) in [
        (json!([1]), "messages[0].sampled: expected an object, found an array"),
        (json!({"tokens": [1]}), "messages[0].sampled: expected both thinking and tokens"),
        (json!({"thinking": 1, "tokens": []}), "messages[0].sampled.thinking: expected a boolean, found a number"),
        (json!({"thinking": true, "tokens": [1, -1]}), "messages[0].sampled.tokens[1]: expected a token id, found -1"),
        (json!({"thinking": true, "tokens": [1.0]}), "messages[0].sampled.tokens[0]: expected a token id, found 1.0"),
        (json!({"thinking": true, "tokens": [], "x": 1}), "messages[0].sampled.x: this format has no place for it"),
    ] {
        let text = json!([{"role": "assistant", "content": "", "sampled": sampled}]).to_string();
        assert_eq!(render_json(&text, &options).unwrap_err().message(), reason);
    }
    let misplaced = json!([{"role": "user", "content": "", "sampled": {}}]).to_string();
    let error = render_json(&misplaced, &options).unwrap_err();
    assert_eq!(error.message(), "messages[0].sampled: this format has no place for it");
    let none = json!([{"role": "assistant", "content": "", "sampled": null}]).to_string();
    assert!(render_json(&none, &options).is_ok());
}

/// The same through the C API: parser, message, render.
#[test]
fn the_c_api_brings_sampled_tokens_back() {
    let tokenizer = tiny();
    let tools = CString::new(TOOLS).unwrap();
    let sampled = by_bytes(&tokenizer, ODD);
    let path = CString::new(folder().to_str().unwrap()).unwrap();
    let mut model = null_mut();
    // SAFETY: valid texts, structs that the library fills, and objects that are freed once, at the end.
    unsafe {
        assert_eq!(dsv4_model_open(path.as_ptr(), null(), &raw mut model, null_mut()), dsv4_status::Ok);
        let mut options: dsv4_chat_options = std::mem::zeroed();
        dsv4_chat_options_init_sized(&raw mut options, size_of::<dsv4_chat_options>());
        (options.thinking, options.tools) = (1, tools.as_ptr());
        let tokens = |messages: &Value| {
            let text = messages.to_string();
            let (mut prompt, mut ids, mut n) = (null_mut(), null(), 0);
            let messages: *const c_char = text.as_ptr().cast();
            let status = dsv4_chat_render(model, messages, text.len(), &raw const options, &raw mut prompt, null_mut());
            assert_eq!(status, dsv4_status::Ok);
            assert_eq!(dsv4_prompt_tokens(prompt, &raw mut ids, &raw mut n, null_mut()), dsv4_status::Ok);
            let ids = std::slice::from_raw_parts(ids, n).to_vec();
            dsv4_prompt_free(prompt);
            ids
        };
        let question = json!({"role": "user", "content": "Where?"});
        let begin = [tokens(&json!([question])), sampled.clone()].concat();

        let mut parser = null_mut();
        assert_eq!(dsv4_chat_parser_new(model, 1, &raw mut parser, null_mut()), dsv4_status::Ok);
        let message = || {
            let (mut json, mut len) = (null(), 0);
            assert_eq!(dsv4_chat_parser_message(parser, &raw mut json, &raw mut len, null_mut()), dsv4_status::Ok);
            let json = std::slice::from_raw_parts(json.cast::<u8>(), len);
            rewritten(std::str::from_utf8(json).unwrap())
        };
        for (i, &id) in sampled.iter().enumerate() {
            if i == 10 {
                assert!(message().get("sampled").is_none(), "an answer that is not complete");
            }
            assert_eq!(dsv4_chat_parser_push_token(parser, id, null_mut()), dsv4_status::Ok);
        }
        let mut answer = message();
        let next = tokens(&json!([question, answer, {"role": "tool", "content": "there"}]));
        assert_eq!(next[..begin.len()], begin);
        answer["content"] = json!("Two moments.");
        assert!(!tokens(&json!([question, answer])).starts_with(&begin), "an edited message");
        dsv4_chat_parser_free(parser);
        dsv4_model_free(model);
    }
}
