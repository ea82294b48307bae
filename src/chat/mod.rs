//! The chat format of V4: messages to prompt, and what the model writes back to messages.
//!
//! Encoding follows the official encoder byte for byte (`encoding_dsv4.py`) with one difference
//! that is the point of [`Prompt`]: text from users never becomes a control token, whatever it
//! spells. Decoding is incremental and never loses output: what is not well-formed comes out as
//! [`Event::Malformed`] with its raw text. An answer that is fed to the parser token by token goes into the next prompt
//! with those very tokens, so that a cache finds it again (see [`Message::sampled`]).
//!
//! This module knows tokens by their spelling; ids come from the `tokenizer`.
//!
//! ```
//! use dsv4::chat::{ChatOptions, Message, Role, ThinkingMode, parse, render};
//! let messages = [Message::new(Role::System, "Be brief."), Message::new(Role::User, "Hello!")];
//! let prompt = render(&messages, &ChatOptions { thinking: ThinkingMode::Thinking, ..Default::default() })?;
//! assert_eq!(prompt.to_text(), "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hello!<｜Assistant｜><think>");
//!
//! let reply = parse("A greeting.</think>Hi.", ThinkingMode::Thinking);
//! assert_eq!((reply.reasoning_content.as_str(), reply.content.as_str()), ("A greeting.", "Hi."));
//! # Ok::<(), dsv4::Error>(())
//! ```

#![forbid(unsafe_code)]

mod json;
mod markers;
mod message;
mod options;
mod parser;
mod prompt;
mod render;
mod reply;
mod sampled;
mod scanner;
mod tag;
mod tools;

pub use message::{Message, Role, Task, ToolCall};
pub use options::{ChatOptions, EffortRules, ReasoningEffort, ThinkingMode};
pub use parser::{Event, Parser};
pub use prompt::{Prompt, Segment};
pub use render::{render, render_json};
pub use reply::{Reply, parse};
pub use sampled::Sampled;
