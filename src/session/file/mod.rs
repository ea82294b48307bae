//! Session files: one session saved to one file, and back.
//!
//! A session is saved as its full blocks (each with its 256 tokens), and a *state part*: the partial block, windows and
//! compressor states, the logits, and the tokens behind the last full block. Saving again to a file that holds a
//! beginning of the session appends the new blocks and a new state part; blocks are never written twice.
//!
//! The state part costs the same however little was added (about 5.6 MB for V4-Flash, as much as 1,600 tokens of blocks).
//! So that frequent saves do not write much more than the session is large, a save that would make the file more than
//! twice as large as a fresh one appends the new tokens alone: they are *pending*, and restoring computes them again.
//! Hence, while a session grows, all bytes ever written for it are at most twice its size, and a state part is written
//! about every 1,600 tokens at the latest. A save that cannot keep the bound even so writes the file anew.
//!
//! Reading and writing of the file's frame is [`crate::cache::file`].
#![forbid(unsafe_code)]

mod image;
mod info;
mod load;
mod watch;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use crate::TokenId;
use crate::alloc;
use crate::cache::{BLOCK_TOKENS, PrefixKey};
use crate::engine::{Engine, Stop};
use crate::error::{Result, bail};

use super::{Progress, Session, SessionOptions};

use watch::Watch;

pub use info::{SessionFile, SessionFileInfo};
pub use watch::{FileProgress, FileStage};

/// Kinds of the sections of a session file.
mod kind {
    /// Where the state stands: one number.
    pub(super) const POSITION: u32 = 1;
    /// The tokens and rows of one full block; as many as there are, in order.
    pub(super) const BLOCK: u32 = 2;
    /// Rows of the partial block; absent where the position is a block's end.
    pub(super) const TAIL: u32 = 3;
    /// Windows and compressor states.
    pub(super) const STATE: u32 = 4;
    /// Logits behind the token at the position; absent in a session without.
    pub(super) const LOGITS: u32 = 5;
    /// Tokens behind the last full block below the position; several sections follow each other.
    pub(super) const TOKENS: u32 = 6;
    /// Those that this version knows.
    pub(super) const ALL: [u32; 6] = [POSITION, BLOCK, TAIL, STATE, LOGITS, TOKENS];
}

/// Bytes of the tokens in a full block's section.
const BLOCK_TOKEN_BYTES: u64 = 4 * BLOCK_TOKENS as u64;

/// How a session is saved.
///
/// ```
/// # use dsv4::{Engine, EngineOptions, Model, Session, SessionOptions};
/// # let engine = Engine::new(&Model::open("examples/models/tiny-v4")?, EngineOptions::default())?;
/// # let mut session = Session::new(&engine, SessionOptions::default())?;
/// use dsv4::SaveOptions;
/// session.feed(&[300; 40])?;
/// # let file = std::env::temp_dir().join(format!("dsv4-doc-complete-{}", std::process::id()));
/// let saved = session.save_with(&file, SaveOptions { complete: true })?;
/// assert_eq!(saved.pending, 0); // nothing to compute when it is restored
/// println!("wrote {} bytes", saved.written);
/// # std::fs::remove_file(file).expect("it was made");
/// # Ok::<(), dsv4::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SaveOptions {
    /// Write everything, so that restoring computes nothing, at the price of writing more where saves are frequent. For
    /// the last save before the end.
    pub complete: bool,
}

/// What a save did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Saved {
    /// Bytes written by this save; 0 if the file held the session already.
    pub written: u64,
    /// Bytes of the file now.
    pub file_bytes: u64,
    /// Tokens of the session that restoring will compute again.
    pub pending: usize,
}

impl Session {
    /// Saves the session to the file at `path`: a new one, or an addition to one that holds a beginning of this session.
    /// Whatever happens, the file is the old save or the new one, whole. A file of another session or model, a damaged one
    /// and an empty one are replaced; what is not dsv4's, or only newer versions can read, is not.
    ///
    /// Over the life of a session that grows, at most twice its size is written, however often it is saved (every few
    /// tokens at most). To keep that, a save soon after another may leave tokens to be computed again by
    /// [`Session::restore`]: see [`Saved::pending`] and [`SaveOptions::complete`].
    ///
    /// ```
    /// # use dsv4::{Engine, EngineOptions, Model, Session, SessionOptions};
    /// # let engine = Engine::new(&Model::open("examples/models/tiny-v4")?, EngineOptions::default())?;
    /// # let mut session = Session::new(&engine, SessionOptions::default())?;
    /// session.feed(&[300, 301, 302])?;
    /// # let file = std::env::temp_dir().join(format!("dsv4-doc-save-{}", std::process::id()));
    /// session.save(&file)?;
    /// let again = Session::restore(&engine, &file, SessionOptions::default())?;
    /// assert_eq!(again.logits(), session.logits());
    /// # std::fs::remove_file(file).expect("it was made");
    /// # Ok::<(), dsv4::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Io` and `NotFound` from the file system (disk full, permissions, no such folder), `InvalidArgument` if something
    /// other than a file, or a file that is not dsv4's, is at `path`, `Unsupported` if a file of a newer version or of the
    /// other byte order is, `Busy` during another save to the same file, `OutOfMemory`, `Cancelled` by the session's [`CancelToken`](crate::CancelToken)
    /// or time limit. After any of them the old file is as it was.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<Saved> {
        self.save_with(path, SaveOptions::default())
    }

    /// As [`Session::save`], with options.
    ///
    /// # Errors
    /// As [`Session::save`].
    pub fn save_with(&self, path: impl AsRef<Path>, options: SaveOptions) -> Result<Saved> {
        self.save_with_progress(path, options, &mut |_| ControlFlow::Continue(()))
    }

    /// As [`Session::save_with`], calling `progress` at the beginning and after each part of a few megabytes, on this thread;
    /// `Break` cancels, also the last time. A save that has nothing to write does not call it.
    ///
    /// A [`CancelToken`](crate::CancelToken) of the session and the time limit of its
    /// [`CallOptions`](crate::CallOptions) end any save in the same way: the old file stays, and the session is as it was.
    ///
    /// ```
    /// use std::ops::ControlFlow;
    /// # use dsv4::{Engine, EngineOptions, ErrorKind, Model, SaveOptions, Session, SessionOptions};
    /// # let engine = Engine::new(&Model::open("examples/models/tiny-v4")?, EngineOptions::default())?;
    /// # let mut session = Session::new(&engine, SessionOptions::default())?;
    /// # session.feed(&[1, 2, 3])?;
    /// # let file = std::env::temp_dir().join(format!("dsv4-doc-watched-{}", std::process::id()));
    /// let result = session.save_with_progress(&file, SaveOptions::default(), &mut |now| {
    ///     if 2 * now.done < now.total { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    /// });
    /// assert_eq!(result.unwrap_err().kind(), ErrorKind::Cancelled);
    /// assert!(!file.exists());
    /// # Ok::<(), dsv4::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Session::save`]; `Cancelled`.
    pub fn save_with_progress(
        &self,
        path: impl AsRef<Path>,
        options: SaveOptions,
        progress: &mut dyn FnMut(FileProgress) -> ControlFlow<()>,
    ) -> Result<Saved> {
        let stop = self.stop(Instant::now());
        let _pin = self.ready()?;
        let (identity, logits) = (self.engine.identity(), self.logits.get(&self.engine)?);
        // a share of the sequence: its own stays free for whoever looks at it meanwhile, `progress` too
        let cache = self.cache.sequence().fork()?;
        image::Image { identity: &identity, tokens: &self.tokens, cache: &cache, logits }.save(
            path.as_ref(),
            options.complete,
            &mut Watch { progress, stop },
        )
    }

    /// The session in the file at `path`, on `engine`, with logits and cache bit for bit as they were saved. Blocks that the
    /// engine has already are shared. Other prompts can reuse its blocks up to a checkpoint: at its end, if that is a
    /// multiple of 256, and at the next ends of blocks that it comes to. Checkpoints at earlier places are not in the file;
    /// the cache's tiers keep those ([`EngineOptions::tiers`](crate::EngineOptions::tiers)).
    ///
    /// Everything in the file is checked before any cache memory is taken.
    ///
    /// # Errors
    /// `NotFound` and `Io`; `Corrupt` for a damaged or truncated file, `Unsupported` for one of a newer version or of the
    /// other byte order, `Mismatch` for one of another model (see [`Model::fingerprint`](crate::Model::fingerprint)),
    /// numerics or cache format; `ContextFull` if the session is longer than the options' context; `NoBlocks`, `OutOfMemory`; and for pending tokens those of [`Session::feed`].
    pub fn restore(engine: &Arc<Engine>, path: impl AsRef<Path>, options: SessionOptions) -> Result<Self> {
        Self::restore_with_progress(engine, path, options, &mut |_| ControlFlow::Continue(()))
    }

    /// As [`Session::restore`], calling `progress` at the beginning of each [`FileStage`], after each part of a few megabytes,
    /// and after each chunk of tokens that are computed, on this thread. `Break` cancels, also the last time: there is no
    /// session then, and its memory is free or can be taken. To cancel from another thread, have `progress` look at something
    /// that the other one sets.
    ///
    /// ```
    /// use std::ops::ControlFlow;
    /// use dsv4::FileStage;
    /// # use dsv4::{Engine, EngineOptions, Model, Session, SessionOptions};
    /// # let engine = Engine::new(&Model::open("examples/models/tiny-v4")?, EngineOptions::default())?;
    /// # let mut session = Session::new(&engine, SessionOptions::default())?;
    /// # session.feed(&[1, 2, 3])?;
    /// # let file = std::env::temp_dir().join(format!("dsv4-doc-restored-{}", std::process::id()));
    /// # session.save(&file)?;
    /// let mut checked = 0;
    /// let restored = Session::restore_with_progress(&engine, &file, SessionOptions::default(), &mut |now| {
    ///     if now.stage == FileStage::Check {
    ///         checked = now.done; // of now.total bytes
    ///     }
    ///     ControlFlow::Continue(())
    /// })?;
    /// assert!(checked > 0);
    /// assert_eq!(restored.tokens(), session.tokens());
    /// # std::fs::remove_file(file).expect("it was made");
    /// # Ok::<(), dsv4::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Session::restore`]; `Cancelled`.
    pub fn restore_with_progress(
        engine: &Arc<Engine>,
        path: impl AsRef<Path>,
        options: SessionOptions,
        progress: &mut dyn FnMut(FileProgress) -> ControlFlow<()>,
    ) -> Result<Self> {
        let mut watch = Watch { progress, stop: Stop::default() };
        let (path, context) = (path.as_ref(), options.context(engine)?);
        let file = load::File::open(path, &engine.identity(), &mut watch)?;
        let total = file.total();
        if total > context {
            bail!(ContextFull, "{}: holds {total} tokens; the context is {context}", path.display());
        }
        let mut loaded = engine.find_room(|| file.load(engine.cache(), options.rollback, &mut watch))?;
        let position = loaded.cache.len();
        let pending = alloc::copied("session tokens", &loaded.tokens[position..])?;
        loaded.tokens.truncate(position);
        let mut session = Self::over(engine, context, engine.slot(loaded.cache), options.rollback);
        let _pin = session.cache.pin();
        session.tokens = loaded.tokens;
        session.reused = position as u64;
        session.logits = loaded.logits.into();
        session.set_mark();
        session.publish(position, position, false)?;
        // no tokens is no work
        session.compute(&pending, &mut watch)?;
        Ok(session)
    }

    /// Feeds the tokens that a file has without their rows.
    fn compute(&mut self, pending: &[TokenId], watch: &mut Watch<'_>) -> Result<()> {
        let mut stopped = Ok(());
        let fed = self.feed_with(pending, &mut |Progress { done, total }| {
            stopped = watch.report(FileStage::Compute, done as u64, total as u64);
            if stopped.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        // a feed whose last chunk was complete does not mind
        stopped.and(fed)
    }
}

/// The tokens of full block `i`.
fn block_tokens(tokens: &[u32], i: usize) -> &[u32] {
    &tokens[i * BLOCK_TOKENS..(i + 1) * BLOCK_TOKENS]
}

/// Key of the block behind `keys`.
fn next_key(root: PrefixKey, last: Option<PrefixKey>, tokens: &[u32]) -> PrefixKey {
    last.unwrap_or(root).extend(tokens)
}
