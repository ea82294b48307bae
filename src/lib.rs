//! DeepSeek-V4 inside your own process.
//!
//! Open an official checkpoint folder, make an engine on it, feed a session and sample: no daemon, no Python, no
//! conversion, no second copy of the weights. The same objects, under the same names, are the C API (`include/dsv4.h`).
//!
//! | object | what it is |
//! |---|---|
//! | [`Model`] | config, tokenizer and memory-mapped weights of one folder; shared, immutable |
//! | [`Engine`] | a model on a device: numerics, threads, cache format |
//! | [`Session`] | one token timeline with its cache |
//! | [`Sampler`] | logits to a token, deterministic for a seed |
//! | [`chat`] | messages to prompt tokens, output tokens to events |
//!
//! ```no_run
//! use dsv4::{Engine, EngineOptions, GenerateOptions, Markup, Model, Sampler, SamplerOptions, Session, SessionOptions};
//!
//! let model = Model::open("examples/models/tiny-v4")?;
//! let engine = Engine::new(&model, EngineOptions::default())?;
//! let mut session = Session::new(&engine, SessionOptions::default())?;
//! let mut sampler = Sampler::new(SamplerOptions::default())?;
//! let mut prompt = vec![model.config().bos_token_id];
//! prompt.extend(model.tokenizer()?.encode("Once upon a time", Markup::Text)?);
//! session.feed(&prompt)?;
//! for piece in session.generate(&mut sampler, GenerateOptions { max_tokens: Some(100), ..Default::default() })? {
//!     print!("{}", piece?.text);
//! }
//! # Ok::<(), dsv4::Error>(())
//! ```
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
