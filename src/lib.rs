//! DeepSeek-V4 inside your own process.
//!
//! Open an official checkpoint folder, make an engine on it, feed a session and sample: no daemon, no Python, no
//! conversion, no second copy of the weights. The same objects, under the same names, are the C API (`include/dsv4.h`).
//!
//! | object | what it is |
//! |---|---|
//! | [`Model`] | config, tokenizer and memory-mapped weights of one folder; shared, immutable |
//! | [`Engine`] | a model on a device: numerics, threads, the cache that its sessions share |
//! | [`Session`] | one token timeline with its cache |
//! | [`Sampler`] | logits to a token, deterministic for a seed |
//! | [`Tokenizer`] | text to tokens and back |
//! | [`chat`] | messages to prompt tokens, output tokens to events |
//!
//! # A first program
//!
//! ```
//! use dsv4::{Engine, EngineOptions, GenerateOptions, Markup, Model, Sampler, SamplerOptions, Session, SessionOptions};
//!
//! let model = Model::open("examples/models/tiny-v4")?;
//! let engine = Engine::new(&model, EngineOptions::default())?;
//! let mut session = Session::new(&engine, SessionOptions::default())?;
//! let mut sampler = Sampler::new(SamplerOptions::default())?;
//! // a text begins with the begin-of-sentence token; prompts of `chat` have it
//! let mut prompt = vec![model.config().bos_token_id];
//! prompt.extend(model.tokenizer()?.encode("Once upon a time", Markup::Text)?);
//! session.feed(&prompt)?;
//! for piece in session.generate(&mut sampler, GenerateOptions { max_tokens: Some(20), ..Default::default() })? {
//!     print!("{}", piece?.text);
//! }
//! # Ok::<(), dsv4::Error>(())
//! ```
//!
//! # A conversation
//!
//! [`chat::render`] makes the prompt, [`Session::keep_common`] goes back to what the session has of it already, a
//! [`chat::Parser`] tells reasoning, answer and tool calls apart, and the answer goes into the next prompt with its own
//! tokens:
//!
//! ```
//! use dsv4::chat::{ChatOptions, Event, Message, Parser, Reply, Role, ThinkingMode, render};
//! # use dsv4::{Engine, EngineOptions, GenerateOptions, Model, Sampler, SamplerOptions, Session, SessionOptions};
//! # let model = Model::open("examples/models/tiny-v4")?;
//! # let engine = Engine::new(&model, EngineOptions::default())?;
//! # let mut session = Session::new(&engine, SessionOptions::default())?;
//! # let mut sampler = Sampler::new(SamplerOptions::default())?;
//! let mut messages = Vec::new();
//! for question in ["Tell me about the sea.", "And the ships?"] {
//!     messages.push(Message::new(Role::User, question));
//!     let prompt = render(&messages, &ChatOptions::default())?.encode(model.tokenizer()?)?;
//!     let kept = session.keep_common(&prompt)?;
//!     session.feed(&prompt[kept..])?;
//!
//!     let (mut parser, mut reply) = (Parser::new(ThinkingMode::Chat), Reply::default());
//!     let mut show = |events: Vec<Event>| {
//!         for event in events {
//!             if let Event::ContentDelta(text) = &event {
//!                 print!("{text}");
//!             }
//!             reply.push(&event);
//!         }
//!     };
//!     for piece in session.generate(&mut sampler, GenerateOptions { max_tokens: Some(16), ..Default::default() })? {
//!         show(parser.push_token(model.tokenizer()?, piece?.token)?);
//!     }
//!     show(parser.finish());
//!     messages.push(reply.to_message());
//! }
//! # assert_eq!(messages.len(), 4);
//! # Ok::<(), dsv4::Error>(())
//! ```
//!
//! # Where what is
//!
//! * **Several sessions.** Any number of them on one engine, each used by one thread at a time. Calls that wait at the same
//!   time go through the model together, with no thread of the library's own: [`CallOptions`] has priority and time limit.
//!   Programs with a loop of their own [submit](Session::submit) calls instead, see [`Pending`].
//! * **Beginnings that prompts share** are computed once: the engine finds them. [`Session::fork`] shares a whole timeline,
//!   [`Session::truncate`] goes back in one, and [`SessionOptions::rollback`] makes that free for the last tokens.
//! * **Cancelling.** A [`CancelToken`] from any thread, a time limit, or `Break` from the progress of
//!   [`Session::feed_with`], [`Session::save_with_progress`] and [`Session::restore_with_progress`].
//! * **Keeping sessions.** [`Session::save`] and [`Session::restore`], bit for bit; [`SessionFile`] looks at a file. The
//!   [tiers](EngineOptions::tiers) keep reusable beginnings in host memory and on disk.
//! * **Memory.** [`cache::CachePlan`] says what fits before anything is loaded; [`EngineOptions::cache_bytes`] is the limit,
//!   [`WhenFull`] what happens at it. [`Engine::cache_stats`] and [`Engine::metrics`] have the figures.
//! * **Judging a model.** [`session::eval`]: perplexity, and recall of what stands far back.
//! * **GPUs.** [`DeviceChoice::Cuda`]; [`backend::cuda_devices`] lists them, or says why there are none.
//!
//! # Errors and panics
//!
//! Every fallible call returns an [`Error`]: a [kind](ErrorKind) to branch on and a message that names the file, key or
//! value at fault. After an error an object is as its call's documentation says, and usable. The library does not panic on
//! any input; a panic is a defect of it. It never prints, exits or handles signals: messages go to [`tracing`].
//!
//! Nothing here needs `unsafe`. Below the objects in the table, the modules [`weights`], [`tensor`], [`model`], [`cache`] and
//! [`backend`] show the parts that they are made of, for those who look inside; what they have may change with any version.
//! [`ffi`] is the C API.
//!
//! How the crate is built up, and the rules its parts keep, is in `ARCHITECTURE.md`.

#[doc(hidden)]
pub mod alloc;
pub mod backend;
pub mod cache;
pub mod chat;
pub mod engine;
pub mod error;
pub mod ffi;
#[doc(hidden)]
pub mod file;
pub mod model;
pub mod sampler;
pub mod session;
pub mod tensor;
pub mod tokenizer;
pub mod weights;

pub use cache::{CheckpointPolicy, KvFormat};
#[doc(hidden)]
pub use engine::research;
pub use engine::{
    DegradedMode, DeviceChoice, Engine, EngineMetrics, EngineOptions, Histogram, SessionMetrics, WhenFull,
};
pub use error::{Error, ErrorKind, Result};
pub use model::{Model, Numerics};
pub use sampler::{Sampler, SamplerOptions};
pub use session::{
    CallOptions, CancelToken, Event, FileProgress, FileStage, Finish, GenerateOptions, Generation, Pending, Piece,
    Progress, SaveOptions, Saved, Session, SessionFile, SessionFileInfo, SessionOptions,
};
pub use tokenizer::{Markup, Tokenizer};

/// Index of a token in the model's vocabulary (row of the embedding, column of the logits).
pub type TokenId = u32;
