//! Messages to a prompt, byte for byte as the official encoder writes it (`encoding_dsv4.py`).

use std::collections::HashMap;

use super::json::fail;
use super::markers::{ASSISTANT, BOS, END_THINK, EOS, LATEST_REMINDER, THINK, USER};
use super::message::{self, Conversation, Message, Role, Task};
use super::options::{ChatOptions, ThinkingMode};
use super::prompt::Prompt;
use super::tools;
use crate::alloc;
use crate::error::{Result, bail};

/// The prompt for a conversation given as JSON: a list of OpenAI-style messages, or an object with
/// `messages` and perhaps `tools` and `response_format` (then not in `options` too).
///
/// ```
/// use dsv4::chat::{ChatOptions, render_json};
/// let prompt = render_json(r#"[{"role": "user", "content": "What is the weather in Paris?"}]"#, &ChatOptions {
///     tools: Some(r#"[{"type": "function", "function": {"name": "weather", "parameters": {}}}]"#.into()),
///     ..ChatOptions::default()
/// })?;
/// assert!(prompt.to_text().contains("weather"));
///
/// let error = render_json(r#"[{"role": "user", "content": 5}]"#, &ChatOptions::default()).unwrap_err();
/// assert!(error.message().starts_with("messages[0].content"), "{error}");
/// # Ok::<(), dsv4::Error>(())
/// ```
///
/// # Errors
/// `Chat` naming the place in the JSON, as `messages[2].tool_calls[0].function`, when it is not
/// JSON, has an unknown role, an unsupported field or part, or a value of the wrong type;
/// otherwise as [`render`]. A key twice in one object and an empty list are refused too.
pub fn render_json(json: &str, options: &ChatOptions) -> Result<Prompt> {
    let conversation = Conversation::from_json(json)?;
    let both = [
        ("tools", !conversation.tools.is_empty() && options.tools.is_some()),
        ("response_format", conversation.response_format.is_some() && options.response_format.is_some()),
    ];
    if let Some((name, _)) = both.iter().find(|(_, both)| *both) {
        return fail(name, "given both beside the messages and in the options");
    }
    build(conversation, options)
}

/// The prompt for `messages`.
///
/// ```
/// use dsv4::chat::{ChatOptions, Message, Role, render};
/// let prompt = render(&[Message::new(Role::User, "Hello!")], &ChatOptions::default())?;
/// assert_eq!(prompt.to_text(), "<｜begin▁of▁sentence｜><｜User｜>Hello!<｜Assistant｜></think>");
/// # Ok::<(), dsv4::Error>(())
/// ```
///
/// # Errors
/// `Chat` naming the message when the conversation cannot be written in this format;
/// `InvalidArgument` for a reasoning effort that the mode or the checkpoint does not know; `OutOfMemory`.
pub fn render(messages: &[Message], options: &ChatOptions) -> Result<Prompt> {
    probe(messages)?;
    build(Conversation { messages: messages.to_vec(), ..Conversation::default() }, options)
}

/// Copies of the messages' texts that rendering makes at most, buffers that grow by doubling and JSON that is escaped
/// included.
const COPIES: usize = 13;

/// Asks for the memory that rendering takes.
fn probe(messages: &[Message]) -> Result<()> {
    let bytes = |message: &Message| {
        let calls = message.tool_calls.iter().map(|call| call.name.len() + call.arguments.len());
        let rest = [&message.reasoning_content, &message.response_format, &message.tool_call_id];
        let rest = rest.into_iter().flatten().chain(&message.tools).map(String::len);
        let tokens = message.sampled.as_ref().map_or(0, |sampled| size_of_val(sampled.tokens.as_slice()));
        size_of::<Message>() + message.content.len() + calls.chain(rest).sum::<usize>() + tokens
    };
    alloc::probe("the prompt", messages.iter().map(bytes).sum::<usize>().saturating_mul(COPIES))
}

fn build(mut conversation: Conversation, options: &ChatOptions) -> Result<Prompt> {
    if conversation.messages.is_empty() {
        return fail("messages", "the list is empty: there is nothing to answer");
    }
    probe(&conversation.messages)?;
    if let Some(text) = &options.tools {
        conversation.tools = message::tools_from_text(text)?;
    }
    if let Some(text) = &options.response_format {
        conversation.response_format = message::response_format_from_text(text)?;
    }
    let messages = instruct(conversation)?;
    let offers_tools = messages.iter().any(|message| !message.tools.is_empty());

    let mut turns = merge(messages)?;
    sort_results(&mut turns);
    let thinking = options.thinking == ThinkingMode::Thinking;
    let drop_thinking = options.drop_thinking && !offers_tools;
    if thinking && drop_thinking {
        drop_earlier_thinking(&mut turns);
    }
    let last_user = last_user(&turns);
    let add_generation_prompt = options.add_generation_prompt;
    let renderer = Renderer { turns: &turns, thinking, drop_thinking, last_user, add_generation_prompt };
    let mut prompt = Prompt::default();
    prompt.marker(BOS);
    prompt.text(effort_prefix(options)?);
    for index in 0..turns.len() {
        renderer.message(&mut prompt, index)?;
        renderer.transition(&mut prompt, index);
    }
    Ok(prompt)
}

fn effort_prefix(options: &ChatOptions) -> Result<&'static str> {
    if let (ThinkingMode::Chat, Some(effort)) = (options.thinking, options.effort) {
        bail!(InvalidArgument, "reasoning effort {} is given, but thinking is off", effort.name());
    }
    options.effort_rules.prefix(options.effort)
}

/// Puts the request's tools and response format into the system message at the start, making one
/// if there is none.
fn instruct(conversation: Conversation) -> Result<Vec<Message>> {
    let Conversation { mut messages, tools, response_format } = conversation;
    if tools.is_empty() && response_format.is_none() {
        return Ok(messages);
    }
    if messages.first().is_none_or(|first| first.role != Role::System) {
        messages.insert(0, Message::new(Role::System, ""));
    }
    let system = &mut messages[0];
    if !tools.is_empty() {
        if !system.tools.is_empty() {
            return fail("messages[0].tools", "given both in the system message and beside it");
        }
        system.tools = tools;
    }
    if response_format.is_some() {
        if system.response_format.is_some() {
            let what = "given both in the system message and beside it";
            return fail("messages[0].response_format", what);
        }
        system.response_format = response_format;
    }
    Ok(messages)
}

/// A message as it is rendered: user and tool messages in a row are one turn of several blocks.
struct Turn {
    /// For user turns its content is empty and `blocks` counts.
    message: Message,
    /// Index of the (first) message in the caller's list, for errors.
    source: usize,
    blocks: Vec<Block>,
}

enum Block {
    Text(String),
    ToolResult { call_id: Option<String>, content: String },
}

impl Default for Block {
    fn default() -> Self {
        Self::Text(String::new())
    }
}

fn merge(messages: Vec<Message>) -> Result<Vec<Turn>> {
    let mut turns: Vec<Turn> = Vec::new();
    for (source, mut message) in messages.into_iter().enumerate() {
        let content = match message.role {
            Role::User | Role::Tool => std::mem::take(&mut message.content),
            _ => {
                turns.push(Turn { message, source, blocks: Vec::new() });
                continue;
            }
        };
        let is_text = message.role == Role::User;
        let block = match message.role {
            Role::User => Block::Text(content),
            _ => Block::ToolResult { call_id: message.tool_call_id.take(), content },
        };
        // Text does not go on after a quick instruction; a tool result does.
        let open = turns
            .last_mut()
            .filter(|turn| turn.message.role == Role::User && !(is_text && turn.message.task.is_some()));
        let Some(turn) = open else {
            message.role = Role::User;
            turns.push(Turn { message, source, blocks: vec![block] });
            continue;
        };
        if message.task.is_some() {
            let place = format!("messages[{source}].task");
            return fail(&place, "the message continues a user turn, where a task would be lost");
        }
        turn.blocks.push(block);
    }
    Ok(turns)
}

/// Orders the results within each user turn as the calls before it; a result without a known call
/// counts as the first call's, and equal ones keep their order.
fn sort_results(turns: &mut [Turn]) {
    let mut order: HashMap<String, usize> = HashMap::new();
    for turn in turns {
        if turn.message.role == Role::Assistant && !turn.message.tool_calls.is_empty() {
            let calls = turn.message.tool_calls.iter().enumerate();
            order = calls.filter_map(|(index, call)| Some((call.id.clone()?, index))).collect();
            continue;
        }
        let is_result = |block: &Block| matches!(block, Block::ToolResult { .. });
        let rank = |block: &Block| match block {
            Block::ToolResult { call_id: Some(id), .. } => order.get(id).copied().unwrap_or(0),
            _ => 0,
        };
        // Texts keep their places; the results are dealt out anew over theirs.
        let places: Vec<usize> = (0..turn.blocks.len()).filter(|&i| is_result(&turn.blocks[i])).collect();
        let taken = places.iter().map(|&i| std::mem::take(&mut turn.blocks[i]));
        let mut results: Vec<Block> = taken.collect();
        results.sort_by_key(rank);
        for (place, result) in places.into_iter().zip(results) {
            turn.blocks[place] = result;
        }
    }
}

/// Index of the last user or developer turn.
fn last_user(turns: &[Turn]) -> Option<usize> {
    turns.iter().rposition(|turn| matches!(turn.message.role, Role::User | Role::Developer))
}

/// Removes reasoning and developer turns before the last user turn.
fn drop_earlier_thinking(turns: &mut Vec<Turn>) {
    let Some(last) = last_user(turns) else { return };
    for turn in &mut turns[..last] {
        turn.message.reasoning_content = None;
    }
    let mut index = 0;
    turns.retain(|turn| {
        index += 1;
        index > last || turn.message.role != Role::Developer
    });
}

struct Renderer<'a> {
    turns: &'a [Turn],
    thinking: bool,
    drop_thinking: bool,
    last_user: Option<usize>,
    add_generation_prompt: bool,
}

impl Renderer<'_> {
    fn message(&self, prompt: &mut Prompt, index: usize) -> Result<()> {
        let Turn { message, blocks, source } = &self.turns[index];
        match message.role {
            Role::System => self.instructions(prompt, message),
            Role::Developer => {
                if message.content.is_empty() {
                    return fail(&format!("messages[{source}]"), "a developer message needs content");
                }
                prompt.marker(USER);
                self.instructions(prompt, message);
            }
            Role::LatestReminder => {
                prompt.marker(LATEST_REMINDER);
                prompt.text(&message.content);
            }
            Role::User | Role::Tool => {
                prompt.marker(USER);
                user_blocks(prompt, blocks);
            }
            Role::Assistant => self.assistant(prompt, index)?,
        }
        Ok(())
    }

    fn instructions(&self, prompt: &mut Prompt, message: &Message) {
        prompt.text(&message.content);
        if !message.tools.is_empty() {
            prompt.text("\n\n");
            tools::offer(prompt, &message.tools);
        }
        if let Some(format) = &message.response_format {
            prompt.text(RESPONSE_FORMAT);
            prompt.text(format);
        }
    }

    fn assistant(&self, prompt: &mut Prompt, index: usize) -> Result<()> {
        let Turn { message, source, .. } = &self.turns[index];
        let answers_task = index > 0 && self.turns[index - 1].message.task.is_some();
        let after_last_user = self.last_user.is_none_or(|last| index > last);
        let reasons = self.thinking && !answers_task && (!self.drop_thinking || after_last_user);
        let mode = if reasons { ThinkingMode::Thinking } else { ThinkingMode::Chat };
        // the answer's own tokens need a marker, or an end, on both sides
        let ends = !message.wo_eos || index + 1 == self.turns.len();
        let has_tokens = message.sampled.as_ref().is_some_and(|sampled| sampled.thinking == mode);
        let start = prompt.boundary().filter(|_| ends && has_tokens);
        if reasons {
            prompt.text(message.reasoning_content.as_deref().unwrap_or(""));
            prompt.marker(END_THINK);
        }
        prompt.text(&message.content);
        if !message.tool_calls.is_empty() {
            tools::calls(prompt, &message.tool_calls, &format!("messages[{source}]"))?;
        }
        if let Some(start) = start {
            prompt.replay(start, message);
        }
        if !message.wo_eos {
            prompt.marker(EOS);
        }
        Ok(())
    }

    /// What follows a message when the model, a reminder or nothing comes next.
    fn transition(&self, prompt: &mut Prompt, index: usize) {
        let next = self.turns.get(index + 1).map(|turn| turn.message.role);
        if !matches!(next, None | Some(Role::Assistant | Role::LatestReminder)) {
            return;
        }
        let message = &self.turns[index].message;
        let is_user = matches!(message.role, Role::User | Role::Developer);
        let wants_answer = is_user && (next.is_some() || self.add_generation_prompt);
        let reasons_here = !self.drop_thinking || self.last_user.is_none_or(|last| index >= last);
        match message.task {
            Some(Task::Action) => {
                prompt.marker(ASSISTANT);
                prompt.marker(if self.thinking { THINK } else { END_THINK });
                prompt.marker(Task::Action.marker());
            }
            Some(task) => prompt.marker(task.marker()),
            None if wants_answer => {
                prompt.marker(ASSISTANT);
                prompt.marker(if self.thinking && reasons_here { THINK } else { END_THINK });
            }
            None => {}
        }
    }
}

fn user_blocks(prompt: &mut Prompt, blocks: &[Block]) {
    for (index, block) in blocks.iter().enumerate() {
        prompt.text(if index == 0 { "" } else { "\n\n" });
        match block {
            Block::Text(text) => prompt.text(text),
            Block::ToolResult { content, .. } => {
                prompt.text("<tool_result>");
                prompt.text(content);
                prompt.text("</tool_result>");
            }
        }
    }
}

const RESPONSE_FORMAT: &str = "

## Response Format:

You MUST strictly adhere to the following schema to reply:
";
