//! OpenAI-style messages: read strictly, nothing that would change the meaning is dropped.
//!
//! A field that is absent or null counts as not given. A field this format has no place for is an
//! error naming it; only `mask` (a training detail of the official test files), the `index` of a
//! tool call and the `name` of a tool message (its call id says the same) are passed over.

use super::json::{Json, fail};
use super::options::ThinkingMode;
use super::sampled::Sampled;
use crate::TokenId;
use crate::error::{Result, beginning};

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Instructions at the start; may offer tools and ask for a response format.
    System,
    /// The person; neighbouring user and tool messages form one turn.
    User,
    /// The model.
    Assistant,
    /// The result of one tool call.
    Tool,
    /// DeepSeek's internal role: a user turn that may offer tools.
    Developer,
    /// A note on date, place and the like, beside the turns.
    LatestReminder,
}

/// DeepSeek's quick instructions: short answers from a control token at the end of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Which action to take; asked where the answer would begin.
    Action,
    /// A search query.
    Query,
    /// How authoritative the sources must be.
    Authority,
    /// The subject of the request.
    Domain,
    /// A title; asked after the answer.
    Title,
    /// Which address to read.
    ReadUrl,
}

impl Task {
    pub(super) fn marker(self) -> &'static str {
        match self {
            Self::Action => "<｜action｜>",
            Self::Query => "<｜query｜>",
            Self::Authority => "<｜authority｜>",
            Self::Domain => "<｜domain｜>",
            Self::Title => "<｜title｜>",
            Self::ReadUrl => "<｜read_url｜>",
        }
    }

    fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "action" => Self::Action,
            "query" => Self::Query,
            "authority" => Self::Authority,
            "domain" => Self::Domain,
            "title" => Self::Title,
            "read_url" => Self::ReadUrl,
            _ => return None,
        })
    }
}

/// A function that the model called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// The id by which a tool message answers it.
    pub id: Option<String>,
    /// The function's name.
    pub name: String,
    /// Its arguments, by convention a JSON object; other text is kept as it is.
    pub arguments: String,
}

/// One message of a conversation.
///
/// ```
/// use dsv4::chat::{ChatOptions, Message, Role, ToolCall, render};
/// let mut asked = Message::new(Role::Assistant, "");
/// asked.tool_calls.push(ToolCall { id: Some("1".into()), name: "add".into(), arguments: r#"{"a": 2, "b": 2}"#.into() });
/// let mut answered = Message::new(Role::Tool, "4");
/// answered.tool_call_id = Some("1".into());
/// let prompt = render(&[Message::new(Role::User, "2 + 2?"), asked, answered], &ChatOptions::default())?;
/// assert!(prompt.to_text().contains("add"));
/// # Ok::<(), dsv4::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said; the text parts of a list are joined by an empty line.
    pub content: String,
    /// Assistant only: what the model thought before it answered.
    pub reasoning_content: Option<String>,
    /// Assistant only: the functions it called.
    pub tool_calls: Vec<ToolCall>,
    /// Tool only: the call that this message answers.
    pub tool_call_id: Option<String>,
    /// System and developer only: the functions offered, each the JSON of OpenAI's `function`.
    pub tools: Vec<String>,
    /// System and developer only: JSON that the answer shall follow.
    pub response_format: Option<String>,
    /// User, developer and assistant only: the quick instruction at the message's end.
    pub task: Option<Task>,
    /// Assistant only: the message is unfinished and the model shall go on with it.
    pub wo_eos: bool,
    /// Assistant only: the tokens with which the model said this. The next prompt has exactly these, whatever other
    /// tokens or spacing the same message could have, so it begins with the tokens that the session already holds.
    ///
    /// They are used where they say what the message says: the same reasoning, content and calls, of which ids and the
    /// order, spacing and number literals of JSON arguments do not count. A message that was edited is rendered from
    /// what it says now. So is one whose answer had malformed parts, and one in a place for which the format wants
    /// another beginning: with [`ChatOptions::drop_thinking`](super::ChatOptions::drop_thinking), an answer that
    /// reasoned loses its reasoning when the next user message comes, and its tokens differ from there on.
    ///
    /// In JSON it is the message's field `sampled`: `{"thinking": true, "tokens": [1, 2]}`. A server whose clients do
    /// not send the field back keeps it by the id that it gave the answer's first call, and puts it in again.
    pub sampled: Option<Sampled>,
}

impl Message {
    /// A message of `role` that only says something.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self {
            role,
            content: content.into(),
            reasoning_content: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            tools: Vec::new(),
            response_format: None,
            task: None,
            wo_eos: false,
            sampled: None,
        }
    }

    /// Reads one message; `place` names it in errors.
    fn from_json(json: &Json, place: &str) -> Result<Self> {
        let Json::Object(fields) = json else {
            return fail(place, format_args!("expected an object, found {}", json.kind()));
        };
        let role = role(json, place)?;
        let mut message = Self::new(role, "");
        let mut has_content = false;
        for (key, value) in fields.iter().filter(|(_, value)| *value != Json::Null) {
            let place = format!("{place}.{key}");
            let speaks = matches!(role, Role::User | Role::Developer | Role::Assistant);
            let instructs = matches!(role, Role::System | Role::Developer);
            match (key.as_str(), role) {
                ("role" | "mask", _) | ("name", Role::Tool) => {}
                ("content", _) => {
                    message.content = content(value, role, &place)?;
                    has_content = true;
                }
                ("reasoning_content", Role::Assistant) => {
                    message.reasoning_content = Some(string(value, &place)?);
                }
                ("tool_calls", Role::Assistant) => {
                    message.tool_calls = each(value, &place, tool_call)?;
                }
                ("wo_eos", Role::Assistant) => message.wo_eos = boolean(value, &place)?,
                ("sampled", Role::Assistant) => message.sampled = Some(sampled(value, &place)?),
                ("tool_call_id", Role::Tool) => {
                    message.tool_call_id = Some(string(value, &place)?);
                }
                ("tools", _) if instructs => message.tools = tools(value, &place)?,
                ("response_format", _) if instructs => {
                    message.response_format = response_format(value, &place)?;
                }
                ("task", _) if speaks => message.task = Some(task(value, &place)?),
                _ => return fail(&place, "this format has no place for it"),
            }
        }
        if !has_content && matches!(role, Role::User | Role::LatestReminder | Role::Tool) {
            return fail(place, "content is missing");
        }
        Ok(message)
    }
}

/// A conversation with what a request carries beside it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Conversation {
    pub(super) messages: Vec<Message>,
    pub(super) tools: Vec<String>,
    pub(super) response_format: Option<String>,
}

impl Conversation {
    /// Reads a list of messages, or an object with `messages` and perhaps `tools` and
    /// `response_format`.
    pub(super) fn from_json(text: &str) -> Result<Self> {
        let json = Json::parse(text).map_err(|e| e.context("messages"))?;
        let Json::Object(fields) = &json else {
            return Ok(Self { messages: messages(&json)?, ..Self::default() });
        };
        let mut conversation = Self::default();
        for (key, value) in fields.iter().filter(|(_, value)| *value != Json::Null) {
            match key.as_str() {
                "messages" => conversation.messages = messages(value)?,
                "tools" => conversation.tools = tools(value, "tools")?,
                "response_format" => {
                    conversation.response_format = response_format(value, "response_format")?;
                }
                _ => return fail(key, "not supported beside messages, tools and response_format"),
            }
        }
        if json.get("messages").is_none() {
            return fail("messages", "missing");
        }
        Ok(conversation)
    }
}

fn messages(json: &Json) -> Result<Vec<Message>> {
    each(json, "messages", Message::from_json)
}

/// Functions of an OpenAI `tools` array given as text.
pub(super) fn tools_from_text(text: &str) -> Result<Vec<String>> {
    tools(&Json::parse(text).map_err(|e| e.context("tools"))?, "tools")
}

/// An OpenAI `response_format` given as text; `None` for plain text.
pub(super) fn response_format_from_text(text: &str) -> Result<Option<String>> {
    let json = Json::parse(text).map_err(|e| e.context("response_format"))?;
    response_format(&json, "response_format")
}

fn role(message: &Json, place: &str) -> Result<Role> {
    let Some(name) = message.get("role") else { return fail(place, "role is missing") };
    match name.as_str() {
        Some("system") => Ok(Role::System),
        Some("user") => Ok(Role::User),
        Some("assistant") => Ok(Role::Assistant),
        Some("tool") => Ok(Role::Tool),
        Some("developer") => Ok(Role::Developer),
        Some("latest_reminder") => Ok(Role::LatestReminder),
        _ => fail(&format!("{place}.role"), format_args!("unknown role {}", name.dump())),
    }
}

/// Text, or the text parts of a list. Tool results may name parts that cannot be shown, as the
/// official encoder does; elsewhere such a part would be a question the model never sees.
fn content(json: &Json, role: Role, place: &str) -> Result<String> {
    if let Some(text) = json.as_str() {
        return Ok(text.to_owned());
    }
    if !matches!(json, Json::Array(_)) {
        let found = json.kind();
        return fail(place, format_args!("expected a string or a list of parts, found {found}"));
    }
    let part = |part: &Json, place: &str| {
        let kind = part.get("type").and_then(Json::as_str);
        match (kind, part.get("text").and_then(Json::as_str)) {
            (Some("text"), Some(text)) => Ok(text.to_owned()),
            (Some(kind), _) if kind != "text" && role == Role::Tool => Ok(format!("[Unsupported {kind}]")),
            (Some(kind), _) if kind != "text" => {
                fail(place, format_args!("parts of type {kind:?} are not supported, only text"))
            }
            _ => fail(place, "expected {\"type\": \"text\", \"text\": …}"),
        }
    };
    Ok(each(json, place, part)?.join("\n\n"))
}

fn tool_call(json: &Json, place: &str) -> Result<ToolCall> {
    let Json::Object(fields) = json else {
        return fail(place, format_args!("expected an object, found {}", json.kind()));
    };
    let mut id = None;
    for (key, value) in fields.iter().filter(|(_, value)| *value != Json::Null) {
        let place = format!("{place}.{key}");
        match key.as_str() {
            "id" => id = Some(string(value, &place)?),
            "type" if value.as_str() == Some("function") => {}
            "function" | "index" => {}
            _ => return fail(&place, "this format has no place for it"),
        }
    }
    let Some(function) = json.get("function") else { return fail(place, "function is missing") };
    let place = format!("{place}.function");
    let name = function_name(function, &place)?;
    let arguments = match function.get("arguments") {
        Some(Json::String(text)) => text.clone(),
        Some(object @ Json::Object(_)) => object.dump(),
        Some(other) => {
            let found = other.kind();
            return fail(&place, format_args!("arguments: expected a string, found {found}"));
        }
        None => return fail(&place, "arguments are missing"),
    };
    Ok(ToolCall { id, name, arguments })
}

fn sampled(json: &Json, place: &str) -> Result<Sampled> {
    let Json::Object(fields) = json else {
        return fail(place, format_args!("expected an object, found {}", json.kind()));
    };
    let (mut thinking, mut tokens) = (None, None);
    for (key, value) in fields {
        let place = format!("{place}.{key}");
        match key.as_str() {
            "thinking" => thinking = Some(boolean(value, &place)?),
            "tokens" => tokens = Some(each(value, &place, token)?),
            _ => return fail(&place, "this format has no place for it"),
        }
    }
    let (Some(thinking), Some(tokens)) = (thinking, tokens) else {
        return fail(place, "expected both thinking and tokens");
    };
    Ok(Sampled { thinking: if thinking { ThinkingMode::Thinking } else { ThinkingMode::Chat }, tokens })
}

fn token(json: &Json, place: &str) -> Result<TokenId> {
    let id = match json {
        Json::Number(literal) => literal.parse().ok(),
        _ => None,
    };
    match id {
        Some(id) => Ok(id),
        None => fail(place, format_args!("expected a token id, found {}", beginning(&json.dump(), 40))),
    }
}

fn tools(json: &Json, place: &str) -> Result<Vec<String>> {
    each(json, place, |tool, place| {
        if let Some(kind) = tool.get("type").filter(|kind| kind.as_str() != Some("function")) {
            return fail(place, format_args!("tools of type {} are not supported", kind.dump()));
        }
        let Some(function) = tool.get("function") else {
            return fail(place, "function is missing");
        };
        function_name(function, &format!("{place}.function"))?;
        Ok(function.dump())
    })
}

fn function_name(function: &Json, place: &str) -> Result<String> {
    match function.get("name").and_then(Json::as_str) {
        Some(name) if !name.is_empty() => Ok(name.to_owned()),
        _ => fail(place, "name is missing"),
    }
}

fn response_format(json: &Json, place: &str) -> Result<Option<String>> {
    let Json::Object(fields) = json else {
        return fail(place, format_args!("expected an object, found {}", json.kind()));
    };
    let plain = fields.is_empty() || json.get("type").and_then(Json::as_str) == Some("text");
    Ok((!plain).then(|| json.dump()))
}

fn task(json: &Json, place: &str) -> Result<Task> {
    match json.as_str().and_then(Task::from_name) {
        Some(task) => Ok(task),
        None => fail(place, format_args!("unknown task {}", json.dump())),
    }
}

fn string(json: &Json, place: &str) -> Result<String> {
    match json.as_str() {
        Some(text) => Ok(text.to_owned()),
        None => fail(place, format_args!("expected a string, found {}", json.kind())),
    }
}

fn boolean(json: &Json, place: &str) -> Result<bool> {
    match json {
        Json::Bool(value) => Ok(*value),
        _ => fail(place, format_args!("expected a boolean, found {}", json.kind())),
    }
}

/// Reads every item of an array with its place.
fn each<T>(json: &Json, place: &str, read: impl Fn(&Json, &str) -> Result<T>) -> Result<Vec<T>> {
    let Json::Array(items) = json else {
        return fail(place, format_args!("expected an array, found {}", json.kind()));
    };
    let numbered = items.iter().enumerate();
    numbered.map(|(index, item)| read(item, &format!("{place}[{index}]"))).collect()
}
