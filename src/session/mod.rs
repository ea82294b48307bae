//! A session: one token timeline with its cache, fed and sampled by one thread at a time.
#![forbid(unsafe_code)]

mod cancel;
pub mod eval;
mod generate;
mod stop;

use std::ops::ControlFlow;
use std::sync::Arc;

use crate::TokenId;
use crate::alloc;
use crate::cache::{CacheBytes, SequenceCache};
use crate::engine::Engine;
use crate::error::{Error, ErrorKind, Result, bail};
use crate::model::deepseek_v4::LogitRows;

pub use cancel::CancelToken;
pub(crate) use generate::Decoding;
pub use generate::{Finish, GenerateOptions, Generation, Piece};
pub use stop::{Step, StopConditions, StopMatcher, StopReason};

/// Options of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionOptions {
    /// Most tokens the session can hold, prompt and output together; 0 takes the model's
    /// `max_position_embeddings`. Memory for the context is taken as it fills.
    pub context: usize,
}

impl Default for SessionOptions {
    fn default() -> Self {
        Self { context: 0 }
    }
}

/// How far a call to [`Session::feed_with`] has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Tokens of this call that are in the session.
    pub done: usize,
    /// Tokens of this call.
    pub total: usize,
}

/// One token timeline.
///
/// ```no_run
/// use dsv4::{Engine, EngineOptions, Markup, Model, Session, SessionOptions};
/// let engine = Engine::new(&Model::open("examples/models/tiny-v4")?, EngineOptions::default())?;
/// let mut session = Session::new(&engine, SessionOptions::default())?;
/// session.feed(&engine.model().tokenizer()?.encode("Once upon a time", Markup::Text)?)?;
/// let logits = session.logits().expect("something was fed");
/// # Ok::<(), dsv4::Error>(())
/// ```
pub struct Session {
    engine: Arc<Engine>,
    cache: SequenceCache,
    context: usize,
    tokens: Vec<TokenId>,
    /// Logits behind the last token; empty before the first.
    logits: Vec<f32>,
    cancel: CancelToken,
}

impl Session {
    /// An empty session on `engine`.
    ///
    /// # Errors
    /// `InvalidArgument` if the context is longer than the model's, `OutOfMemory` for its fixed memory.
    pub fn new(engine: &Arc<Engine>, options: SessionOptions) -> Result<Self> {
        let longest = engine.model().config().max_position_embeddings;
        if options.context > longest {
            bail!(InvalidArgument, "context is {}; the model's max_position_embeddings is {longest}", options.context);
        }
        let context = if options.context == 0 { longest } else { options.context };
        Ok(Self {
            cache: engine.new_cache()?,
            engine: Arc::clone(engine),
            context,
            tokens: Vec::new(),
            logits: Vec::new(),
            cancel: CancelToken::new(),
        })
    }

    /// Appends `tokens` and computes the logits behind the last one. No tokens is no work and no error.
    ///
    /// # Errors
    /// `InvalidArgument` for an id outside the vocabulary, `ContextFull` if they do not all fit (then nothing is fed),
    /// `Cancelled` (what was fed so far stays, see [`Session::position`]), `OutOfMemory`, `Numeric`, `Io`. After any
    /// error the session is consistent and can go on.
    pub fn feed(&mut self, tokens: &[TokenId]) -> Result<()> {
        self.feed_with(tokens, &mut |_| ControlFlow::Continue(()))
    }

    /// As [`Session::feed`], calling `progress` after each chunk, on this thread; `Break` cancels.
    pub fn feed_with(
        &mut self,
        tokens: &[TokenId],
        progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<()> {
        self.run(tokens, LogitRows::Last, progress, &mut |_, _| Ok(()))
    }

    /// As [`Session::feed`], handing out the logits of every token: `sink(position, logits)`.
    pub fn feed_all(&mut self, tokens: &[TokenId], sink: &mut dyn FnMut(usize, &[f32]) -> Result<()>) -> Result<()> {
        self.run(tokens, LogitRows::All, &mut |_| ControlFlow::Continue(()), sink)
    }

    fn run(
        &mut self,
        tokens: &[TokenId],
        rows: LogitRows,
        progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
        sink: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let vocab = self.engine.model().config().vocab_size;
        if let Some(i) = tokens.iter().position(|&t| t as usize >= vocab) {
            bail!(InvalidArgument, "token {i} has id {}; the vocabulary has {vocab} ids", tokens[i]);
        }
        if tokens.len() > self.remaining() {
            bail!(
                ContextFull,
                "{} tokens do not fit: {} of {} are used; nothing was fed",
                tokens.len(),
                self.position(),
                self.context
            );
        }
        alloc::reserve("session tokens", &mut self.tokens, tokens.len())?;
        let chunk = self.engine.options().prefill_chunk;
        let mut done = 0;
        while done < tokens.len() {
            let part = &tokens[done..(done + chunk).min(tokens.len())];
            let last = done + part.len() == tokens.len();
            let wanted = if rows == LogitRows::Last && !last { LogitRows::None } else { rows };
            let cancel = &self.cancel;
            let logits = self.engine.step(&mut self.cache, part, wanted, &mut |_| cancel.check())?;
            self.tokens.extend_from_slice(part);
            done += part.len();
            // until the call is complete the session's logits would be those of an older token
            self.logits.clear();
            if rows == LogitRows::All {
                let first = self.position() - part.len();
                for (i, row) in logits.chunks_exact(vocab).enumerate() {
                    sink(first + i, row)?;
                }
            }
            if last {
                self.keep_last(logits, vocab);
            }
            if progress(Progress { done, total: tokens.len() }).is_break() && !last {
                return Err(cancelled(done, tokens.len()));
            }
        }
        Ok(())
    }

    fn keep_last(&mut self, mut logits: Vec<f32>, vocab: usize) {
        let start = logits.len() - vocab;
        logits.drain(..start);
        self.logits = logits;
    }

    /// Logits `[vocab]` behind the last token, before softmax. `None` before the first token, and after a `feed` that
    /// stopped half-way (feed on to get them).
    pub fn logits(&self) -> Option<&[f32]> {
        if self.logits.is_empty() { None } else { Some(&self.logits) }
    }

    /// Number of tokens in the session.
    pub fn position(&self) -> usize {
        self.tokens.len()
    }

    /// The tokens in the session.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Most tokens the session can hold.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Tokens that still fit.
    pub fn remaining(&self) -> usize {
        self.context - self.tokens.len()
    }

    /// Empties the session; its memory is kept for reuse.
    pub fn clear(&mut self) {
        self.cache.clear();
        self.tokens.clear();
        self.logits.clear();
    }

    /// A handle that cancels this session's running call, or its next one, from any thread.
    pub fn cancel_token(&self) -> CancelToken {
        self.cancel.clone()
    }

    /// The engine it runs on.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// Bytes of cache memory it holds.
    pub fn cache_bytes(&self) -> CacheBytes {
        self.cache.bytes()
    }
}

fn cancelled(done: usize, total: usize) -> Error {
    Error::new(ErrorKind::Cancelled, format!("cancelled after {done} of {total} tokens, which stay in the session"))
}
