//! Chat
//!
//! OpenAI-style messages to a prompt, exactly as the model was trained to see it, and what the model writes back to
//! events: reasoning, content, tool calls. Text from users never becomes a control token, whatever it spells.

use std::collections::VecDeque;
use std::ffi::c_char;
use std::ptr;
use std::sync::Arc;

use super::args::{
    Options, Out, OutStruct, SizedStruct, c_bytes, c_text, choice, flag, free, init_options, object, options, text,
};
use super::guard::{guard, guard_value};
use super::handle::{Exclusive, Shared};
use super::model::{dsv4_model, reserved};
use super::status::{dsv4_error, dsv4_status};
use crate::TokenId;
use crate::alloc;
use crate::chat::{ChatOptions, EffortRules, Event, Parser, ReasoningEffort, Reply, ThinkingMode, render_json};
use crate::error::Result;
use crate::model::config::{Config, Draft};
use crate::tokenizer::Tokenizer;

/// How much the model shall reason.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum dsv4_effort {
    /// The checkpoint's own.
    Default = 0,
    /// Only for checkpoints with DSpark stages, whose default it is.
    Low = 1,
    /// The default of the April checkpoints.
    High = 2,
    /// As much as the checkpoint was trained for.
    Max = 3,
}

const EFFORTS: [(dsv4_effort, Option<ReasoningEffort>); 4] = [
    (dsv4_effort::Default, None),
    (dsv4_effort::Low, Some(ReasoningEffort::Low)),
    (dsv4_effort::High, Some(ReasoningEffort::High)),
    (dsv4_effort::Max, Some(ReasoningEffort::Max)),
];

/// Which texts stand for which effort; they differ between releases.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum dsv4_effort_rules {
    /// Those of the checkpoint, told by its draft module. The default.
    Checkpoint = 0,
    /// Those of April 2026.
    April = 1,
    /// Those of July and August 2026.
    Dspark = 2,
}

const EFFORT_RULES: [(dsv4_effort_rules, Option<EffortRules>); 3] = [
    (dsv4_effort_rules::Checkpoint, None),
    (dsv4_effort_rules::April, Some(EffortRules::April)),
    (dsv4_effort_rules::Dspark, Some(EffortRules::Dspark0731)),
];

/// How messages become a prompt. Fill with `dsv4_chat_options_init`, then change what you like.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dsv4_chat_options {
    /// `sizeof(dsv4_chat_options)`.
    pub size: usize,
    /// OpenAI `tools`: a JSON array that ends with a NUL; NULL if there are none. Read during the call only.
    pub tools: *const c_char,
    /// OpenAI `response_format`: a JSON object that ends with a NUL; NULL for plain text. Read during the call only.
    pub response_format: *const c_char,
    /// 1 lets the model reason before it answers; 0 by default.
    pub thinking: i32,
    /// A `dsv4_effort`; anything but `DEFAULT` needs `thinking`.
    pub effort: i32,
    /// A `dsv4_effort_rules`.
    pub effort_rules: i32,
    /// 1, the default, leaves out the reasoning of answers before the last user message, as the models were trained. It
    /// has no effect when tools are offered.
    pub drop_thinking: i32,
    /// 1, the default, ends the prompt where the model's answer begins.
    pub add_generation_prompt: i32,
    /// 0.
    pub reserved: i32,
}

// SAFETY: `repr(C)`, `size` first, plain fields without padding.
unsafe impl SizedStruct for dsv4_chat_options {
    const NAME: &'static str = "dsv4_chat_options";
}

impl Options for dsv4_chat_options {
    fn defaults() -> Self {
        let rust = ChatOptions::default();
        Self {
            size: size_of::<Self>(),
            tools: ptr::null(),
            response_format: ptr::null(),
            thinking: i32::from(rust.thinking == ThinkingMode::Thinking),
            effort: dsv4_effort::Default as i32,
            effort_rules: dsv4_effort_rules::Checkpoint as i32,
            drop_thinking: i32::from(rust.drop_thinking),
            add_generation_prompt: i32::from(rust.add_generation_prompt),
            reserved: 0,
        }
    }
}

/// A prompt: tokens for `dsv4_session_feed`, and text for people. Functions that take it as `const` may run on several
/// threads at once.
pub struct dsv4_prompt {
    shared: Shared<Rendered>,
}

struct Rendered {
    tokens: Vec<TokenId>,
    /// Ends with a NUL.
    text: Vec<u8>,
}

/// Sets every default in `options`, a struct of `size` bytes. Use `dsv4_chat_options_init`, which passes the size as your
/// header has it. `options` may be NULL; then nothing happens.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dsv4_chat_options_init_sized(options: *mut dsv4_chat_options, size: usize) {
    guard_value("dsv4_chat_options_init_sized", (), || {
        // SAFETY: NULL or `size` bytes by the header's contract.
        unsafe { init_options(options, size) }
    });
}

/// Renders `messages_len` bytes of JSON, a list of OpenAI-style messages: `[{"role": "user", "content": "Hello"}]` with
/// the roles system, developer, user, assistant and tool. `options` may be NULL. `*out` receives the prompt, to be freed
/// with `dsv4_prompt_free`.
///
/// Where an assistant message has a field `sampled` (see `dsv4_chat_parser_message`), the prompt has those tokens, so that
/// it begins with what the session that gave the answer holds, whatever spacing, order of arguments or tokens the model
/// chose. They are used as long as they say what the message says (ids of calls and the way their JSON is written do not
/// count): an edited message is rendered from what it says now. So is an answer with malformed parts, and one in a place
/// for which the format wants another beginning: with `drop_thinking` an answer that reasoned loses its reasoning when the
/// next user message comes, and the tokens differ from there on.
///
/// Errors: `CHAT` naming the place in the JSON, for example `messages[2].tool_calls[0].function`, also for a key that an
/// object has twice and for a list without messages; `OUT_OF_MEMORY` with the bytes; `INVALID_ARGUMENT` for
/// an effort that the mode or the checkpoint does not know; `NOT_FOUND`, `IO` and `TOKENIZER` if the model's tokenizer
/// cannot be read or lacks a control token.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_chat_render(
    model: *const dsv4_model,
    messages: *const c_char,
    messages_len: usize,
    options: *const dsv4_chat_options,
    out: *mut *mut dsv4_prompt,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let out = unsafe { Out::new(out, "out") };
    guard("dsv4_chat_render", err, || {
        // SAFETY: as above.
        let model = unsafe { object(model, "model") }?.get()?;
        // SAFETY: as above.
        let messages = unsafe { text(messages, messages_len, "messages") }?;
        // SAFETY: as above.
        let options = unsafe { self::options(options) }?;
        out.check()?;
        // SAFETY: as above; the texts are read during this call only.
        let options = unsafe { read(&options, model.model.config()) }?;
        let prompt = render_json(messages, &options)?;
        let tokens = prompt.encode(model.model.tokenizer()?)?;
        let text = prompt.to_c_text()?;
        out.give(dsv4_prompt { shared: Shared::new("the prompt", Rendered { tokens, text }) });
        Ok(())
    })
}

/// Frees a prompt. `prompt` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dsv4_prompt_free(prompt: *mut dsv4_prompt) {
    guard_value("dsv4_prompt_free", (), || {
        // SAFETY: NULL or an object that nobody uses any more, by the header's contract.
        unsafe { free(prompt) }
    });
}

/// The prompt's tokens: `*tokens` points to `*n` ids, which live as long as the prompt.
///
/// Errors: only `INVALID_ARGUMENT` and `POISONED`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_prompt_tokens(
    prompt: *const dsv4_prompt,
    tokens: *mut *const u32,
    n: *mut usize,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let tokens = unsafe { Out::new(tokens, "tokens") };
    // SAFETY: as above.
    let n = unsafe { Out::new(n, "n") };
    guard("dsv4_prompt_tokens", err, || {
        // SAFETY: as above.
        let prompt = unsafe { object(prompt, "prompt") }?.shared.get()?;
        tokens.check()?;
        n.check()?;
        tokens.set(prompt.tokens.as_ptr());
        n.set(prompt.tokens.len());
        Ok(())
    })
}

/// The prompt as the official encoder writes it for these messages, `*len` bytes of UTF-8 and a final NUL, which live as
/// long as the prompt. An answer that has its own tokens may be spaced differently there.
/// Do not encode it with `DSV4_MARKUP_PARSE` to feed it: that makes control tokens of whatever users spelt.
///
/// Errors: only `INVALID_ARGUMENT` and `POISONED`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_prompt_text(
    prompt: *const dsv4_prompt,
    text: *mut *const c_char,
    len: *mut usize,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let text = unsafe { Out::new(text, "text") };
    // SAFETY: as above.
    let len = unsafe { Out::new(len, "len") };
    guard("dsv4_prompt_text", err, || {
        // SAFETY: as above.
        let prompt = unsafe { object(prompt, "prompt") }?.shared.get()?;
        text.check()?;
        len.check()?;
        text.set(prompt.text.as_ptr().cast());
        len.set(prompt.text.len() - 1);
        Ok(())
    })
}

/// Reads one answer of the model while it is written. One thread at a time; a second one gets `BUSY`.
pub struct dsv4_chat_parser {
    exclusive: Exclusive<Answer>,
}

struct Answer {
    tokenizer: Arc<Tokenizer>,
    parser: Parser,
    reply: Reply,
    events: VecDeque<Event>,
    /// Text of the last event or message, and a NUL.
    text: Vec<u8>,
    /// Bytes of output taken so far.
    taken: usize,
}

/// Bytes that the parser and the events take at most for each byte of new output.
/// (`tests/tokenizer_memory.rs` measures it.)
const EVENT_COST: usize = 160;
/// Bytes that are taken at most for each byte of the output so far, while buffers of it and of its tokens grow.
const COPIES: usize = 20;
/// Bytes of JSON for one token.
const TOKEN_JSON: usize = 12;

/// What an event says.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum dsv4_event_kind {
    /// There is no event; push more.
    None = 0,
    /// More of what the model thinks.
    Reasoning = 1,
    /// More of the answer.
    Content = 2,
    /// Tool call number `call` begins; the text is the function's name.
    ToolCallBegin = 3,
    /// More JSON text of the call's arguments.
    ToolCallArguments = 4,
    /// The call is complete, and its arguments together are a JSON object.
    ToolCallEnd = 5,
    /// Output that does not follow the format, as the model wrote it. If `call` is not -1, that call is void.
    Malformed = 6,
    /// The answer is complete.
    End = 7,
}

/// One step of an answer. Set `size` to `sizeof(dsv4_chat_event)` before the call that fills it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dsv4_chat_event {
    /// `sizeof(dsv4_chat_event)`.
    pub size: usize,
    /// `text_len` bytes of UTF-8 and a final NUL, valid until the next call with this parser. Never NULL after success.
    pub text: *const c_char,
    /// Bytes of `text`, without the NUL.
    pub text_len: usize,
    /// A `dsv4_event_kind`.
    pub kind: i32,
    /// Number of the tool call, from 0; -1 if the event belongs to none.
    pub call: i32,
}

// SAFETY: `repr(C)`, `size` first, plain fields without padding.
unsafe impl SizedStruct for dsv4_chat_event {
    const NAME: &'static str = "dsv4_chat_event";
}

/// Starts reading an answer to a prompt that was rendered with this `thinking` (0 or 1). `*out` receives the parser, to be
/// freed with `dsv4_chat_parser_free`.
///
/// Errors: `NOT_FOUND`, `IO` and `TOKENIZER` if the model's tokenizer cannot be read.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_chat_parser_new(
    model: *const dsv4_model,
    thinking: i32,
    out: *mut *mut dsv4_chat_parser,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let out = unsafe { Out::new(out, "out") };
    guard("dsv4_chat_parser_new", err, || {
        // SAFETY: as above.
        let model = unsafe { object(model, "model") }?.get()?;
        let mode = thinking_mode(thinking)?;
        out.check()?;
        let answer = Answer {
            tokenizer: Arc::clone(model.model.tokenizer()?),
            parser: Parser::new(mode),
            reply: Reply::default(),
            events: VecDeque::new(),
            text: vec![0],
            taken: 0,
        };
        out.give(dsv4_chat_parser { exclusive: Exclusive::new("the chat parser", answer) });
        Ok(())
    })
}

/// Frees a parser. `parser` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dsv4_chat_parser_free(parser: *mut dsv4_chat_parser) {
    guard_value("dsv4_chat_parser_free", (), || {
        // SAFETY: NULL or an object that nobody uses any more, by the header's contract.
        unsafe { free(parser) }
    });
}

/// Takes one generated token, the end-of-sentence token included; then take the events with `dsv4_chat_parser_next`.
///
/// Errors: `TOKENIZER` for an id outside the vocabulary, `OUT_OF_MEMORY`, `BUSY`; the parser is unchanged.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_chat_parser_push_token(
    parser: *mut dsv4_chat_parser,
    token: u32,
    err: *mut dsv4_error,
) -> dsv4_status {
    guard("dsv4_chat_parser_push_token", err, || {
        // SAFETY: by the header's contract.
        let mut answer = unsafe { object(parser, "parser") }?.exclusive.get()?;
        let answer = &mut *answer;
        // a token may stand for no bytes, but is recorded all the same
        answer.take(answer.tokenizer.token_bytes(token)?.len().max(1))?;
        let events = answer.parser.push_token(&answer.tokenizer, token)?;
        answer.queue(events);
        Ok(())
    })
}

/// Takes output as `text_len` bytes of UTF-8, in which control tokens are told by their spelling. For output that is not
/// there as tokens; do not mix with `dsv4_chat_parser_push_token`.
///
/// Errors: `OUT_OF_MEMORY`, and the parser is unchanged; `BUSY`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_chat_parser_push_text(
    parser: *mut dsv4_chat_parser,
    text: *const c_char,
    text_len: usize,
    err: *mut dsv4_error,
) -> dsv4_status {
    guard("dsv4_chat_parser_push_text", err, || {
        // SAFETY: by the header's contract.
        let mut answer = unsafe { object(parser, "parser") }?.exclusive.get()?;
        // SAFETY: as above.
        let text = unsafe { self::text(text, text_len, "text") }?;
        answer.take(text.len())?;
        let events = answer.parser.push_text(text);
        answer.queue(events);
        Ok(())
    })
}

/// Ends the answer, for whatever reason no token follows; then take the last events with `dsv4_chat_parser_next`.
///
/// Errors: `OUT_OF_MEMORY`, and the parser is unchanged; `BUSY`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_chat_parser_finish(parser: *mut dsv4_chat_parser, err: *mut dsv4_error) -> dsv4_status {
    guard("dsv4_chat_parser_finish", err, || {
        // SAFETY: by the header's contract.
        let mut answer = unsafe { object(parser, "parser") }?.exclusive.get()?;
        answer.take(0)?;
        let events = answer.parser.finish();
        answer.queue(events);
        Ok(())
    })
}

/// The next event, or one of kind `NONE` if more has to be pushed first.
///
/// Errors: `OUT_OF_MEMORY`, and the event is given again by the next call; `BUSY`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_chat_parser_next(
    parser: *mut dsv4_chat_parser,
    event: *mut dsv4_chat_event,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let event = unsafe { OutStruct::new(event, "event") };
    guard("dsv4_chat_parser_next", err, || {
        // SAFETY: as above.
        let mut answer = unsafe { object(parser, "parser") }?.exclusive.get()?;
        event.check()?;
        event.set(answer.next()?);
        Ok(())
    })
}

/// The answer so far as an OpenAI-style message, to append to the messages of the next `dsv4_chat_render`: `*json` points
/// to `*len` bytes of UTF-8 and a final NUL, valid until the next call with this parser.
///
/// An answer that came by `dsv4_chat_parser_push_token` and is complete (after the end-of-sentence token or
/// `dsv4_chat_parser_finish`) also has the field `sampled`, `{"thinking": true, "tokens": [1, 2]}`: its tokens, with which
/// the next prompt has this answer exactly as the model wrote it. A server whose clients do not send the field back keeps
/// it by the id that it gave the answer's first call, and puts it into the message again. See `dsv4_chat_render`.
///
/// Errors: `OUT_OF_MEMORY`; `BUSY`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_chat_parser_message(
    parser: *mut dsv4_chat_parser,
    json: *mut *const c_char,
    len: *mut usize,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let json = unsafe { Out::new(json, "json") };
    // SAFETY: as above.
    let len = unsafe { Out::new(len, "len") };
    guard("dsv4_chat_parser_message", err, || {
        // SAFETY: as above.
        let mut answer = unsafe { object(parser, "parser") }?.exclusive.get()?;
        json.check()?;
        len.check()?;
        // each character may be escaped with six, in a buffer that grows by doubling
        let tokens = answer.reply.sampled.as_ref().map_or(0, |sampled| sampled.tokens.len());
        let json_bytes = answer.taken.saturating_mul(6).saturating_add(tokens.saturating_mul(TOKEN_JSON));
        alloc::probe("the message", json_bytes.saturating_mul(3))?;
        let message = answer.reply.to_json();
        answer.keep(&message)?;
        json.set(answer.text.as_ptr().cast());
        len.set(answer.text.len() - 1);
        Ok(())
    })
}

impl Answer {
    /// Asks for the memory that `bytes` more of output can take.
    fn take(&mut self, bytes: usize) -> Result<()> {
        let copies = self.taken.saturating_mul(COPIES);
        alloc::probe("the answer", bytes.saturating_mul(EVENT_COST).saturating_add(copies))?;
        self.taken += bytes;
        Ok(())
    }

    fn queue(&mut self, events: Vec<Event>) {
        events.iter().for_each(|event| self.reply.push(event));
        self.events.extend(events);
    }

    fn next(&mut self) -> Result<dsv4_chat_event> {
        let event = self.events.pop_front();
        let (kind, text, call) = match &event {
            None => (dsv4_event_kind::None, "", None),
            Some(Event::ReasoningDelta(text)) => (dsv4_event_kind::Reasoning, text.as_str(), None),
            Some(Event::ContentDelta(text)) => (dsv4_event_kind::Content, text.as_str(), None),
            Some(Event::ToolCallBegin { index, name }) => (dsv4_event_kind::ToolCallBegin, name.as_str(), Some(*index)),
            Some(Event::ToolCallArgumentDelta { index, json }) => {
                (dsv4_event_kind::ToolCallArguments, json.as_str(), Some(*index))
            }
            Some(Event::ToolCallEnd { index }) => (dsv4_event_kind::ToolCallEnd, "", Some(*index)),
            Some(Event::Malformed { raw, call }) => (dsv4_event_kind::Malformed, raw.as_str(), *call),
            Some(Event::End(_)) => (dsv4_event_kind::End, "", None),
        };
        if let Err(e) = self.keep(text) {
            // there was room for it when it was popped
            self.events.extend(event);
            self.events.rotate_right(1);
            return Err(e);
        }
        Ok(dsv4_chat_event {
            size: size_of::<dsv4_chat_event>(),
            text: self.text.as_ptr().cast(),
            text_len: self.text.len() - 1,
            kind: kind as i32,
            call: call.and_then(|index| i32::try_from(index).ok()).unwrap_or(-1),
        })
    }

    fn keep(&mut self, text: &str) -> Result<()> {
        self.text = c_bytes(text)?;
        Ok(())
    }
}

fn thinking_mode(thinking: i32) -> Result<ThinkingMode> {
    Ok(if flag(thinking, "thinking")? { ThinkingMode::Thinking } else { ThinkingMode::Chat })
}

/// The Rust options behind those of C.
///
/// # Safety
/// The texts are NULL or end with a NUL.
unsafe fn read(options: &dsv4_chat_options, config: &Config) -> Result<ChatOptions> {
    reserved(options.reserved)?;
    let is_dspark = matches!(config.draft, Draft::Dspark { .. });
    let rules = choice(options.effort_rules, "effort_rules", &EFFORT_RULES, |rules| rules as i32)?;
    let optional = |ptr: *const c_char, name| -> Result<Option<String>> {
        if ptr.is_null() {
            return Ok(None);
        }
        // SAFETY: by the contract above.
        Ok(Some(alloc::copied_text(name, unsafe { c_text(ptr, name) }?)?))
    };
    Ok(ChatOptions {
        thinking: thinking_mode(options.thinking)?,
        effort: choice(options.effort, "effort", &EFFORTS, |effort| effort as i32)?,
        effort_rules: rules.unwrap_or(EffortRules::for_config(is_dspark)),
        drop_thinking: flag(options.drop_thinking, "drop_thinking")?,
        add_generation_prompt: flag(options.add_generation_prompt, "add_generation_prompt")?,
        tools: optional(options.tools, "tools")?,
        response_format: optional(options.response_format, "response_format")?,
    })
}
