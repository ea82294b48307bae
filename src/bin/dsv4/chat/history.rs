//! The conversation in a session's tokens: a chat that goes on needs its messages, and the tokens tell them.

use dsv4::chat::{ChatOptions, Message, Parser, Reply, Role, ThinkingMode, render};
use dsv4::tokenizer::Tokenizer;
use dsv4::{Error, ErrorKind, Result, TokenId};

const USER: &str = "<｜User｜>";
const ASSISTANT: &str = "<｜Assistant｜>";
const THINK: &str = "<think>";
const EOS: &str = "<｜end▁of▁sentence｜>";

/// The user's messages and the answers in `tokens`, the tokens of a chat with this system message and these options.
///
/// # Errors
/// `InvalidArgument` if they begin otherwise or are no chat.
pub(super) fn read(
    tokens: &[TokenId],
    system: Option<&Message>,
    options: &ChatOptions,
    tokenizer: &Tokenizer,
) -> Result<Vec<Message>> {
    let refuse = |why| Error::new(ErrorKind::InvalidArgument, why);
    let user = tokenizer.id_of(USER);
    let is_user = |id: &TokenId| Some(*id) == user;
    let probe: Vec<Message> = system.cloned().into_iter().chain([Message::new(Role::User, "")]).collect();
    let head = render(&probe, options)?.encode(tokenizer)?;
    let head = head.split(is_user).next().unwrap_or_default();
    let mut parts = tokens.split(is_user);
    if parts.next() != Some(head) {
        return Err(refuse("begins otherwise: give the system message, tools and effort that it was made with"));
    }
    let mut messages = Vec::new();
    for part in parts {
        let (question, answer) = turn(part, tokenizer)?.ok_or_else(|| refuse("holds something other than a chat"))?;
        messages.extend([question, answer]);
    }
    Ok(messages)
}

/// A message and its answer; `None` if `tokens` are something else.
fn turn(tokens: &[TokenId], tokenizer: &Tokenizer) -> Result<Option<(Message, Message)>> {
    let assistant = tokenizer.id_of(ASSISTANT);
    let Some(at) = tokens.iter().position(|&id| Some(id) == assistant) else { return Ok(None) };
    let Some((&begin, answer)) = tokens[at + 1..].split_first() else { return Ok(None) };
    let is_thinking = Some(begin) == tokenizer.id_of(THINK);
    let mut parser = Parser::new(if is_thinking { ThinkingMode::Thinking } else { ThinkingMode::Chat });
    let mut reply = Reply::default();
    for &id in answer {
        parser.push_token(tokenizer, id)?.iter().for_each(|event| reply.push(event));
    }
    parser.finish().iter().for_each(|event| reply.push(event));
    let question = tokenizer.decode(&tokens[..at])?;
    let is_chat =
        reply.malformed.is_empty() && !answer.iter().rev().skip(1).any(|&id| Some(id) == tokenizer.id_of(EOS));
    Ok(is_chat.then(|| (Message::new(Role::User, question), reply.to_message())))
}
