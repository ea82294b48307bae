//! What the model writes, as it writes it: reasoning, content and tool calls as events.
//!
//! Invariants: the events do not depend on how the output is cut into pieces (only on where text
//! deltas are cut, not on their concatenation); no byte of a tag appears in a delta; nothing is
//! lost: what does not follow the format comes out as [`Event::Malformed`] with its text. The
//! concatenated argument deltas of a call that ends are a JSON object.

use std::collections::HashSet;

use super::json::{self, Json};
use super::options::ThinkingMode;
use super::sampled::Sampled;
use super::scanner::{Marker, Piece, Scanner};
use super::tag::{self, Reading, Tag};
use crate::TokenId;
use crate::alloc;
use crate::error::Result;
use crate::tokenizer::{TokenKind, Tokenizer, Utf8Stream};

/// One step of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// More of what the model thinks.
    ReasoningDelta(String),
    /// More of the answer.
    ContentDelta(String),
    /// A tool call begins. Calls are numbered from 0.
    ToolCallBegin {
        /// Number of the call.
        index: usize,
        /// The function's name.
        name: String,
    },
    /// More JSON text of the call's arguments.
    ToolCallArgumentDelta {
        /// Number of the call.
        index: usize,
        /// The text to append.
        json: String,
    },
    /// The call is complete and its arguments are a JSON object.
    ToolCallEnd {
        /// Number of the call.
        index: usize,
    },
    /// Output that does not follow the format.
    Malformed {
        /// The text as the model wrote it.
        raw: String,
        /// The call that began with this text; it is void.
        call: Option<usize>,
    },
    /// The answer is complete; no event follows. With its tokens, if the parser was fed with tokens.
    End(Option<Sampled>),
}

/// Incremental parser of one answer. Feed it with [`Parser::push_token`] (exact: control tokens
/// are told by their ids) or with text, not with both, and end it with [`Parser::finish`].
///
/// ```
/// use dsv4::chat::{Event, Parser, ThinkingMode};
/// let mut parser = Parser::new(ThinkingMode::Thinking);
/// let mut events = parser.push_text("Two and two.</thi");
/// events.extend(parser.push_text("nk>It is 4."));
/// events.extend(parser.finish());
/// let mut answer = String::new();
/// for event in &events {
///     match event {
///         Event::ReasoningDelta(text) => print!("({text})"),
///         Event::ContentDelta(text) => answer.push_str(text),
///         Event::ToolCallBegin { name, .. } => println!("calls {name}"),
///         Event::ToolCallArgumentDelta { .. } | Event::ToolCallEnd { .. } => {}
///         Event::Malformed { raw, .. } => eprintln!("odd: {raw}"),
///         Event::End(_) => {}
///     }
/// }
/// assert_eq!(answer, "It is 4.");
/// assert_eq!(events.last(), Some(&Event::End(None)));
/// ```
#[derive(Clone, Debug)]
pub struct Parser {
    scanner: Scanner,
    utf8: Utf8Stream,
    state: State,
    /// A tag whose end has not come.
    tag: Option<OpenTag>,
    /// The last few characters, which belong to a tag if one follows: `<`, `</`, and between them
    /// and shown text up to two newlines.
    held: String,
    /// True once anything but white space was shown in the present channel.
    shown: bool,
    /// Text of the call being read, or of what is out of place between calls.
    raw: String,
    /// Parameter names of the call being read.
    names: HashSet<String>,
    /// Calls begun.
    calls: usize,
    thinking: ThinkingMode,
    /// What it was fed, if with tokens.
    tokens: Vec<TokenId>,
    events: Vec<Event>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Channel {
    Reasoning,
    Content,
}

#[derive(Clone, Debug)]
enum State {
    /// Outside of tool calls.
    Text(Channel),
    /// In `tool_calls`, between calls.
    Block,
    /// In `invoke`, between parameters.
    Call,
    /// In a string `parameter`.
    StringValue,
    /// In any other `parameter`: its text so far.
    JsonValue(String),
    /// In a call that is not well-formed, until it ends; `void` if it was begun as an event.
    Broken {
        void: Option<usize>,
        resume: Option<Channel>,
    },
    /// After `tool_calls`.
    After,
    Ended,
}

#[derive(Clone, Debug)]
struct OpenTag {
    is_closing: bool,
    /// What follows `｜DSML｜`.
    body: String,
}

impl OpenTag {
    fn source(&self) -> String {
        let start = if self.is_closing { "</" } else { "<" };
        format!("{start}{}{}", Marker::Dsml.spelling(), self.body)
    }
}

impl Parser {
    /// A parser for the answer to a prompt rendered in `thinking` mode (whose prompt already
    /// contains `<think>` or `</think>`).
    pub fn new(thinking: ThinkingMode) -> Self {
        let channel = match thinking {
            ThinkingMode::Thinking => Channel::Reasoning,
            ThinkingMode::Chat => Channel::Content,
        };
        Self {
            scanner: Scanner::default(),
            utf8: Utf8Stream::default(),
            state: State::Text(channel),
            tag: None,
            held: String::new(),
            shown: false,
            raw: String::new(),
            names: HashSet::new(),
            calls: 0,
            thinking,
            tokens: Vec::new(),
            events: Vec::new(),
        }
    }

    /// Takes one generated token. Text that merely spells a control token stays text.
    ///
    /// # Errors
    /// `Tokenizer` when `id` is outside the vocabulary, `OutOfMemory`; the parser is unchanged.
    pub fn push_token(&mut self, tokenizer: &Tokenizer, id: TokenId) -> Result<Vec<Event>> {
        let bytes = tokenizer.token_bytes(id)?;
        alloc::reserve("the answer's tokens", &mut self.tokens, 1)?;
        if bytes.is_empty() {
            // an id without a token, which pads the vocabulary
            self.record(id);
            return Ok(Vec::new());
        }
        if tokenizer.kind(id)? == TokenKind::Ordinary {
            let text = self.utf8.push(bytes);
            self.text(&text);
        } else {
            let cut_off = self.utf8.finish();
            self.text(&cut_off);
            self.marker(&Marker::from_spelling(&String::from_utf8_lossy(bytes)));
        }
        self.record(id);
        Ok(std::mem::take(&mut self.events))
    }

    /// Remembers a token of the answer; there is room for it.
    fn record(&mut self, id: TokenId) {
        if !matches!(self.state, State::Ended) {
            self.tokens.push(id);
        }
    }

    /// Takes output as text; control tokens are told by their spelling.
    pub fn push_text(&mut self, text: &str) -> Vec<Event> {
        for piece in self.scanner.push(text) {
            match piece {
                Piece::Text(text) => self.text(&text),
                Piece::Marker(marker) => self.marker(&marker),
            }
        }
        std::mem::take(&mut self.events)
    }

    /// As [`Parser::push_text`]; the bytes may end within a code point.
    pub fn push_bytes(&mut self, bytes: &[u8]) -> Vec<Event> {
        let text = self.utf8.push(bytes);
        self.push_text(&text)
    }

    /// Ends the answer (no token follows, for whatever reason) and gives out what was held back.
    /// Nothing after an end-of-sentence token.
    pub fn finish(&mut self) -> Vec<Event> {
        let mut events = match self.utf8.finish() {
            cut_off if cut_off.is_empty() => Vec::new(),
            cut_off => self.push_text(&cut_off),
        };
        let rest = self.scanner.finish();
        let is_half_tag = rest.contains('｜') && self.tag.is_none();
        if is_half_tag && matches!(self.state, State::Text(_)) {
            let opening = split_opening(&mut self.held);
            self.flush();
            self.malformed(format!("{opening}{rest}"), None);
        } else {
            self.text(&rest);
        }
        self.end();
        events.append(&mut self.events);
        events
    }

    fn text(&mut self, text: &str) {
        for c in text.chars() {
            self.character(c);
        }
    }

    fn character(&mut self, c: char) {
        if self.is_in_call() {
            self.raw.push(c);
        }
        if let Some(tag) = &mut self.tag {
            tag.body.push(c);
            match tag::read(tag.is_closing, &tag.body) {
                Reading::Incomplete => {}
                Reading::Complete(complete) => self.complete_tag(complete),
                Reading::Bad => self.bad_tag(),
            }
            return;
        }
        match self.state {
            State::Text(_) => {
                self.held.push(c);
                let certain = may_precede_tag(&self.held);
                let shown: String = self.held.drain(..certain).collect();
                self.show(&shown);
            }
            State::Broken { .. } => self.end_broken(),
            State::Ended => {}
            _ => self.structure_character(c),
        }
    }

    /// A character inside `tool_calls`, or after it.
    fn structure_character(&mut self, c: char) {
        match (self.held.as_str(), c) {
            ("", '<') | ("<", '/') => self.held.push(c),
            _ => {
                let before = std::mem::take(&mut self.held);
                self.structure_text(&before);
                match c {
                    '<' => self.held.push(c),
                    _ => self.structure_text(c.encode_utf8(&mut [0; 4])),
                }
            }
        }
    }

    /// Text inside `tool_calls` that is no part of a tag.
    fn structure_text(&mut self, text: &str) {
        match &mut self.state {
            State::StringValue => {
                let mut escaped = String::new();
                json::write_string_body(text, &mut escaped);
                self.argument(escaped);
            }
            State::JsonValue(value) => value.push_str(text),
            State::Block | State::After => {
                let is_space = text.chars().all(char::is_whitespace);
                if !is_space || !self.raw.is_empty() {
                    self.raw.push_str(text);
                }
            }
            State::Call if text.chars().all(char::is_whitespace) => {}
            State::Call => self.break_call(),
            // An earlier part of the same text broke the call; `raw` has this one already.
            State::Broken { .. } | State::Text(_) | State::Ended => {}
        }
    }

    fn marker(&mut self, marker: &Marker) {
        if matches!(self.state, State::Ended) {
            return;
        }
        if *marker == Marker::Eos {
            self.end();
            return;
        }
        if self.is_in_call() {
            self.raw.push_str(marker.spelling());
        }
        if let Some(tag) = &mut self.tag {
            // `<｜DSML｜…<｜DSML｜`: the second `<` opens another tag.
            let opening = if *marker == Marker::Dsml { split_opening(&mut tag.body) } else { String::new() };
            self.bad_tag();
            self.held.push_str(&opening);
        }
        match self.state {
            State::Text(channel) => self.marker_in_text(channel, marker),
            State::Broken { .. } | State::Ended => {}
            _ => self.marker_in_structure(marker),
        }
    }

    fn marker_in_text(&mut self, channel: Channel, marker: &Marker) {
        match (marker, channel) {
            (Marker::Dsml, _) if self.held.ends_with(['<', '/']) => self.open_tag(),
            (Marker::EndThink, Channel::Reasoning) => {
                self.flush();
                self.enter(Channel::Content);
            }
            // The model repeats what its prompt ended with.
            (Marker::Think, Channel::Reasoning) | (Marker::EndThink, Channel::Content)
                if !self.shown && self.held.trim().is_empty() => {}
            // It thinks although its prompt did not ask for it.
            (Marker::Think, Channel::Content) if !self.shown && self.held.trim().is_empty() => {
                self.held.clear();
                self.enter(Channel::Reasoning);
            }
            _ => {
                self.flush();
                self.malformed(marker.spelling().to_owned(), None);
            }
        }
    }

    fn marker_in_structure(&mut self, marker: &Marker) {
        if *marker == Marker::Dsml && !self.held.is_empty() {
            return self.open_tag();
        }
        let before = std::mem::take(&mut self.held);
        self.structure_text(&before);
        match (&self.state, marker) {
            // DSML inside a value, with no tag around it: not something to pass on as an argument.
            (State::StringValue | State::JsonValue(_), Marker::Dsml) => self.break_call(),
            _ => self.structure_text(marker.spelling()),
        }
    }

    fn open_tag(&mut self) {
        let is_closing = split_opening(&mut self.held) == "</";
        self.tag = Some(OpenTag { is_closing, body: String::new() });
    }

    fn complete_tag(&mut self, tag: Tag) {
        let source = self.tag.take().map_or_else(String::new, |open| open.source());
        match (&mut self.state, tag) {
            (State::Text(_), Tag::ToolCalls) => {
                // The empty line before the block belongs to it.
                self.held.clear();
                self.state = State::Block;
            }
            (&mut State::Text(channel), Tag::Invoke { .. }) => {
                self.flush();
                self.raw = source;
                self.state = State::Broken { void: None, resume: Some(channel) };
            }
            (State::Text(_), _) => {
                self.flush();
                self.malformed(source, None);
            }
            (State::Block, Tag::Invoke { name }) => self.begin_call(name, source),
            (State::Block, Tag::EndToolCalls) => {
                self.flush_raw();
                self.state = State::After;
            }
            (State::After, Tag::ToolCalls) => {
                self.flush_raw();
                self.state = State::Block;
            }
            (State::Block | State::After, _) => self.raw.push_str(&source),
            (State::Call, Tag::Parameter { name, is_string }) => self.begin_value(name, is_string),
            (State::Call, Tag::EndInvoke) => self.end_call(),
            (State::StringValue, Tag::EndParameter) => {
                self.argument("\"".to_owned());
                self.state = State::Call;
            }
            (State::JsonValue(value), Tag::EndParameter) if Json::parse_as_python(value).is_ok() => {
                let value = value.trim().to_owned();
                self.argument(value);
                self.state = State::Call;
            }
            _ => self.break_call(),
        }
    }

    fn bad_tag(&mut self) {
        let Some(open) = self.tag.take() else { return };
        let mut source = open.source();
        match self.state {
            State::Text(_) => {
                let ended_by_line = source.ends_with('\n');
                source.truncate(source.len() - usize::from(ended_by_line));
                self.flush();
                self.malformed(source, None);
                if ended_by_line {
                    self.character('\n');
                }
            }
            State::Block | State::After => self.raw.push_str(&source),
            _ => self.break_call(),
        }
    }

    fn begin_call(&mut self, name: String, source: String) {
        self.flush_raw();
        self.raw = source;
        self.names.clear();
        self.events.push(Event::ToolCallBegin { index: self.calls, name });
        self.calls += 1;
        self.state = State::Call;
    }

    fn begin_value(&mut self, name: String, is_string: bool) {
        let mut json = String::from(if self.names.is_empty() { "{" } else { ", " });
        json::write_string(&name, &mut json);
        json.push_str(": ");
        if !self.names.insert(name) {
            return self.break_call();
        }
        if is_string {
            json.push('"');
        }
        self.argument(json);
        self.state = if is_string { State::StringValue } else { State::JsonValue(String::new()) };
    }

    fn end_call(&mut self) {
        let end = if self.names.is_empty() { "{}" } else { "}" };
        self.argument(end.to_owned());
        self.events.push(Event::ToolCallEnd { index: self.calls - 1 });
        self.raw.clear();
        self.state = State::Block;
    }

    /// The call that was begun turns out not to be well-formed.
    fn break_call(&mut self) {
        self.held.clear();
        self.state = State::Broken { void: Some(self.calls - 1), resume: None };
        self.end_broken();
    }

    /// Goes on after a broken call when its end, or the block's, has come.
    fn end_broken(&mut self) {
        let State::Broken { void, resume } = self.state else { return };
        let ends_call = self.raw.ends_with("</｜DSML｜invoke>");
        let ends_block = self.raw.ends_with("</｜DSML｜tool_calls>");
        if !ends_call && !ends_block {
            return;
        }
        let raw = std::mem::take(&mut self.raw);
        self.malformed(raw, void);
        self.held.clear();
        self.state = match resume {
            Some(channel) => State::Text(channel),
            None if ends_block => State::After,
            None => State::Block,
        };
    }

    fn end(&mut self) {
        if matches!(self.state, State::Ended) {
            return;
        }
        if self.tag.is_some() {
            self.bad_tag();
        }
        let held = if self.is_in_call() { String::new() } else { self.held.clone() };
        match &self.state {
            State::Text(_) => self.flush(),
            State::Block => {
                let opening = "<｜DSML｜tool_calls>";
                let raw = format!("{opening}{}{held}", self.raw);
                self.malformed(raw, None);
            }
            State::After => {
                self.raw.push_str(&held);
                self.flush_raw();
            }
            State::Call | State::StringValue | State::JsonValue(_) => {
                let raw = std::mem::take(&mut self.raw);
                self.malformed(raw, Some(self.calls - 1));
            }
            State::Broken { void, .. } => {
                let void = *void;
                let raw = std::mem::take(&mut self.raw);
                self.malformed(raw, void);
            }
            State::Ended => {}
        }
        self.state = State::Ended;
        let tokens = std::mem::take(&mut self.tokens);
        let sampled = (!tokens.is_empty()).then_some(Sampled { thinking: self.thinking, tokens });
        self.events.push(Event::End(sampled));
    }

    /// True while the model thinks.
    pub(super) fn is_in_reasoning(&self) -> bool {
        matches!(self.state, State::Text(Channel::Reasoning))
    }

    /// True where `raw` collects all that is read.
    fn is_in_call(&self) -> bool {
        use State::{Broken, Call, JsonValue, StringValue};
        matches!(self.state, Call | StringValue | JsonValue(_) | Broken { .. })
    }

    fn enter(&mut self, channel: Channel) {
        self.state = State::Text(channel);
        self.shown = false;
    }

    fn flush(&mut self) {
        let held = std::mem::take(&mut self.held);
        self.show(&held);
    }

    /// Gives out text in the present channel.
    fn show(&mut self, text: &str) {
        let State::Text(channel) = self.state else { return };
        if text.is_empty() {
            return;
        }
        self.shown |= !text.trim().is_empty();
        let last = match (self.events.last_mut(), channel) {
            (Some(Event::ReasoningDelta(last)), Channel::Reasoning)
            | (Some(Event::ContentDelta(last)), Channel::Content) => Some(last),
            _ => None,
        };
        match (last, channel) {
            (Some(last), _) => last.push_str(text),
            (None, Channel::Reasoning) => self.events.push(Event::ReasoningDelta(text.to_owned())),
            (None, Channel::Content) => self.events.push(Event::ContentDelta(text.to_owned())),
        }
    }

    fn argument(&mut self, text: String) {
        let index = self.calls - 1;
        if let Some(Event::ToolCallArgumentDelta { json, .. }) = self.events.last_mut() {
            json.push_str(&text);
            return;
        }
        self.events.push(Event::ToolCallArgumentDelta { index, json: text });
    }

    fn malformed(&mut self, raw: String, call: Option<usize>) {
        self.events.push(Event::Malformed { raw, call });
    }

    /// Reports what was out of place between calls.
    fn flush_raw(&mut self) {
        let raw = std::mem::take(&mut self.raw);
        if !raw.trim().is_empty() {
            self.malformed(raw.trim_end().to_owned(), None);
        }
    }
}

/// Takes a `<` or `</` off the end of `text`.
fn split_opening(text: &mut String) -> String {
    let rest = text.strip_suffix("</").or(text.strip_suffix('<')).unwrap_or(text);
    text.split_off(rest.len())
}

/// Length of the part of `text` that no tag after it can claim: all but up to two newlines and a
/// `<` or `</` at its end.
fn may_precede_tag(text: &str) -> usize {
    let opening = text.strip_suffix("</").or(text.strip_suffix('<')).unwrap_or(text);
    let line = opening.strip_suffix('\n').unwrap_or(opening);
    line.strip_suffix('\n').unwrap_or(line).len()
}
