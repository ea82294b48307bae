//! A whole answer, put together from the parser's events.

use super::json::write_string;
use super::message::{Message, Role, ToolCall};
use super::options::ThinkingMode;
use super::parser::{Event, Parser};
use super::sampled::Sampled;

/// An answer of the model. Feed it events as they come, or let [`parse`] do it.
///
/// ```
/// use dsv4::chat::{Reply, ThinkingMode, parse};
/// let reply: Reply = parse("Because.</think>It is so.", ThinkingMode::Thinking);
/// assert!(reply.tool_calls.is_empty() && reply.malformed.is_empty());
/// // into the next prompt, or to a client that speaks OpenAI's JSON
/// assert_eq!(reply.to_message().content, "It is so.");
/// assert_eq!(reply.to_json(), r#"{"role": "assistant", "content": "It is so.", "reasoning_content": "Because."}"#);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reply {
    /// What the model thought.
    pub reasoning_content: String,
    /// What it says.
    pub content: String,
    /// The functions it calls; without ids, which are the caller's to give.
    pub tool_calls: Vec<ToolCall>,
    /// Output that did not follow the format, in order.
    pub malformed: Vec<String>,
    /// Its tokens, if the parser was fed with tokens and the answer is complete.
    pub sampled: Option<Sampled>,
    /// Number of the call that is being read, and the call.
    open: Option<(usize, ToolCall)>,
}

impl Reply {
    /// Adds one event.
    pub fn push(&mut self, event: &Event) {
        match event {
            Event::ReasoningDelta(text) => self.reasoning_content.push_str(text),
            Event::ContentDelta(text) => self.content.push_str(text),
            Event::ToolCallBegin { index, name } => {
                let call = ToolCall { id: None, name: name.clone(), arguments: String::new() };
                self.open = Some((*index, call));
            }
            Event::ToolCallArgumentDelta { json, .. } => {
                if let Some((_, call)) = &mut self.open {
                    call.arguments.push_str(json);
                }
            }
            Event::ToolCallEnd { .. } => {
                self.tool_calls.extend(self.open.take().map(|(_, call)| call));
            }
            Event::Malformed { raw, call } => {
                self.malformed.push(raw.clone());
                if call.is_some() {
                    self.open = None;
                }
            }
            Event::End(sampled) => self.sampled.clone_from(sampled),
        }
    }

    /// The answer as a message of the conversation, to render the next prompt with: which then has the answer's own
    /// tokens ([`Message::sampled`]).
    pub fn to_message(&self) -> Message {
        let mut message = Message::new(Role::Assistant, self.content.clone());
        if !self.reasoning_content.is_empty() {
            message.reasoning_content = Some(self.reasoning_content.clone());
        }
        message.tool_calls = self.tool_calls.clone();
        message.sampled = self.sampled.clone();
        message
    }

    /// The answer as an OpenAI-style message, which [`render_json`](super::render_json) takes
    /// back: `content`, `reasoning_content` if any, `tool_calls` if any, and this library's own `sampled`, the tokens
    /// (see [`Message::sampled`]).
    pub fn to_json(&self) -> String {
        let mut json = String::from("{\"role\": \"assistant\", \"content\": ");
        write_string(&self.content, &mut json);
        if !self.reasoning_content.is_empty() {
            json.push_str(", \"reasoning_content\": ");
            write_string(&self.reasoning_content, &mut json);
        }
        for (index, call) in self.tool_calls.iter().enumerate() {
            json.push_str(if index == 0 { ", \"tool_calls\": [" } else { ", " });
            json.push_str("{\"type\": \"function\", \"function\": {\"name\": ");
            write_string(&call.name, &mut json);
            json.push_str(", \"arguments\": ");
            write_string(&call.arguments, &mut json);
            json.push_str("}}");
        }
        json.push_str(if self.tool_calls.is_empty() { "" } else { "]" });
        if let Some(Sampled { thinking, tokens }) = &self.sampled {
            let is_thinking = *thinking == ThinkingMode::Thinking;
            json.push_str(&format!(", \"sampled\": {{\"thinking\": {is_thinking}, \"tokens\": ["));
            for (index, id) in tokens.iter().enumerate() {
                json.push_str(if index == 0 { "" } else { ", " });
                json.push_str(&id.to_string());
            }
            json.push_str("]}");
        }
        json.push('}');
        json
    }
}

/// Parses a whole answer given as text (what follows the generation prompt).
///
/// ```
/// use dsv4::chat::{ThinkingMode, parse};
/// assert_eq!(parse("Yes.", ThinkingMode::Chat).content, "Yes.");
/// ```
pub fn parse(text: &str, thinking: ThinkingMode) -> Reply {
    let mut parser = Parser::new(thinking);
    let mut reply = Reply::default();
    let mut events = parser.push_text(text);
    events.extend(parser.finish());
    events.iter().for_each(|event| reply.push(event));
    reply
}
