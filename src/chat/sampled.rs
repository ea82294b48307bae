//! Exact replay: an answer goes into the next prompt with the tokens that the model chose for it.
//!
//! A message does not determine them. The model may space and order a call's parameters as it likes, and choose tokens
//! that the tokenizer would not make of the same text; a history rendered from messages alone then differs from what the
//! cache holds. So an answer carries its tokens, which stand for the message wherever they say the same. Whoever edits
//! the message gets what it says now.
//!
//! Invariant: what is replayed is well-formed and says what the message says, whoever gave the tokens; no control token
//! comes in by them that the format does not have there.

#![forbid(unsafe_code)]

use std::ops::Range;

use super::json::Json;
use super::markers::END_THINK;
use super::message::{Message, ToolCall};
use super::options::ThinkingMode;
use super::parser::Parser;
use super::reply::Reply;
use crate::TokenId;
use crate::alloc;
use crate::error::Result;
use crate::tokenizer::Tokenizer;

/// The tokens of one answer as the model gave them. [`Parser`] records them; see [`Message::sampled`].
///
/// ```
/// use dsv4::Markup;
/// use dsv4::chat::{Event, Parser, ThinkingMode};
/// let model = dsv4::Model::open("examples/models/tiny-v4")?;
/// let tokenizer = model.tokenizer()?;
/// let tokens = tokenizer.encode("It is so.", Markup::Text)?;
/// let mut parser = Parser::new(ThinkingMode::Chat);
/// for &token in &tokens {
///     parser.push_token(tokenizer, token)?;
/// }
/// let Some(Event::End(Some(sampled))) = parser.finish().pop() else { panic!("an answer ends") };
/// assert_eq!(sampled.tokens, tokens);
/// # Ok::<(), dsv4::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sampled {
    /// What its prompt ended with: `<think>` or `</think>`.
    pub thinking: ThinkingMode,
    /// From the first token behind the prompt, without the end-of-sentence token.
    pub tokens: Vec<TokenId>,
}

/// A place in a prompt where an answer's own tokens may stand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Replay {
    /// The segments that say the same, rendered from the message.
    pub(super) segments: Range<usize>,
    /// An assistant message with its tokens.
    pub(super) answer: Message,
}

/// Bytes that parsing an answer takes at most for each of its bytes: texts that grow by doubling, JSON that is escaped.
/// (`tests/tokenizer_memory.rs` measures it.)
const PARSING_COST: usize = 40;

impl Replay {
    /// The answer's tokens, if they say what its message says.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub(super) fn tokens(&self, tokenizer: &Tokenizer) -> Result<Option<Vec<TokenId>>> {
        let Some(Sampled { thinking, tokens }) = &self.answer.sampled else { return Ok(None) };
        let mut bytes = 0;
        for &id in tokens {
            // the tokens of another vocabulary
            let Ok(token) = tokenizer.token_bytes(id) else { return Ok(None) };
            bytes += token.len();
        }
        alloc::probe("an earlier answer", bytes.saturating_mul(PARSING_COST))?;
        let (mut parser, mut reply) = (Parser::new(*thinking), Reply::default());
        for &id in tokens {
            parser.push_token(tokenizer, id)?.iter().for_each(|event| reply.push(event));
        }
        let ends_in_reasoning = parser.is_in_reasoning();
        parser.finish().iter().for_each(|event| reply.push(event));
        // the format has no place for reasoning where the prompt asked for none
        let is_out_of_place = *thinking == ThinkingMode::Chat && !reply.reasoning_content.is_empty();
        // behind an end of sentence nothing was parsed, and nothing recorded
        let is_whole = reply.sampled == self.answer.sampled;
        if !is_whole || is_out_of_place || !says(&reply, &self.answer) {
            return Ok(None);
        }
        let mut replayed = alloc::with_capacity("an earlier answer", tokens.len() + 1)?;
        replayed.extend_from_slice(tokens);
        if ends_in_reasoning {
            // cut off there; the format ends all reasoning
            let Some(end) = tokenizer.id_of(END_THINK) else { return Ok(None) };
            replayed.push(end);
        }
        Ok(Some(replayed))
    }
}

/// Whether `reply` is well-formed and all of it is in `message`, and nothing else.
fn says(reply: &Reply, message: &Message) -> bool {
    let calls = || reply.tool_calls.iter().zip(&message.tool_calls);
    reply.malformed.is_empty()
        && reply.content == message.content
        && reply.reasoning_content == message.reasoning_content.as_deref().unwrap_or_default()
        && reply.tool_calls.len() == message.tool_calls.len()
        && calls().all(|(ours, theirs)| is_same_call(ours, theirs))
}

/// Whether two calls are equal but for their ids, which are the caller's, and for how their JSON is written.
fn is_same_call(a: &ToolCall, b: &ToolCall) -> bool {
    if a.name != b.name {
        return false;
    }
    if a.arguments == b.arguments {
        return true;
    }
    match (Json::parse_as_python(&a.arguments), Json::parse_as_python(&b.arguments)) {
        (Ok(a), Ok(b)) => a.is_same(&b),
        _ => false,
    }
}
