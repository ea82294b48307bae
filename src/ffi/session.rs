//! Session
//!
//! One token timeline with its cache. Feed it tokens, read the logits behind the last one, generate.
//!
//! One thread at a time: a second one gets `BUSY` and does not wait. `dsv4_session_cancel` is the exception. After any
//! error but `PANIC` the session is consistent and can go on.

use std::ffi::c_void;
use std::ops::ControlFlow;
use std::sync::Arc;

use super::args::{Options, Out, OutStruct, SizedStruct, count, free_own, init_options, object, options, slice};
use super::engine::dsv4_engine;
use super::guard::{guard, guard_value, unfenced};
use super::handle::Exclusive;
use super::status::{dsv4_error, dsv4_status};
use crate::error::{Error, ErrorKind, Result};
use crate::session::{CancelToken, Progress, Session, SessionOptions};

/// A session. One thread at a time.
pub struct dsv4_session {
    pub(super) exclusive: Arc<Exclusive<Session>>,
    cancel: CancelToken,
}

impl dsv4_session {
    pub(super) fn new(session: Session) -> Self {
        let cancel = session.cancel_token();
        Self { exclusive: Arc::new(Exclusive::new("the session", session).bound()), cancel }
    }
}

/// The Rust options behind those of C.
pub(super) fn read(options: &dsv4_session_options) -> Result<SessionOptions> {
    Ok(SessionOptions { context: count(options.context, "context")?, rollback: count(options.rollback, "rollback")? })
}

/// Options of a session. Fill with `dsv4_session_options_init`, then change what you like.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dsv4_session_options {
    /// `sizeof(dsv4_session_options)`.
    pub size: usize,
    /// Most tokens that the session can hold, prompt and output together; 0, the default, is the model's
    /// `max_position_embeddings`. Memory for the context is taken as it fills.
    pub context: u64,
    /// Tokens that `dsv4_session_truncate` can always take back without computing, for callers that try tokens out; at
    /// most 64. Each costs a copy of the compressor states and the logits (V4-Flash: about 2 MB). 0, the default: a
    /// truncation goes back to a checkpoint and computes from there. What may still be taken back is not offered to other
    /// prompts: of a call with at most `rollback + 1` tokens, the last `rollback` wait for later ones.
    pub rollback: u64,
}

// SAFETY: `repr(C)`, `size` first, plain fields without padding.
unsafe impl SizedStruct for dsv4_session_options {
    const NAME: &'static str = "dsv4_session_options";
}

impl Options for dsv4_session_options {
    fn defaults() -> Self {
        Self { size: size_of::<Self>(), context: 0, rollback: 0 }
    }
}

/// Where a session stands. Set `size` to `sizeof(dsv4_session_info)` before the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dsv4_session_info {
    /// `sizeof(dsv4_session_info)`.
    pub size: usize,
    /// Tokens in the session.
    pub position: u64,
    /// Most tokens that it can hold.
    pub context: u64,
    /// Tokens that still fit.
    pub remaining: u64,
    /// 1 if `dsv4_session_logits` has something to give, else 0.
    pub has_logits: i32,
    /// 0.
    pub reserved: i32,
    /// Tokens that were taken from the cache instead of computed, over the session's life: beginnings of prompts that the
    /// engine knew, and what was restored from a file.
    pub reused_tokens: u64,
}

// SAFETY: `repr(C)`, `size` first, plain fields without padding.
unsafe impl SizedStruct for dsv4_session_info {
    const NAME: &'static str = "dsv4_session_info";
}

/// Told on the calling thread, after each chunk of a `dsv4_session_feed`, that `done` of its `total` tokens are in the
/// session. Return 0 to go on; anything else cancels. It must return (no `longjmp`, no C++ exception), and the session
/// is `BUSY` for it, except for `dsv4_session_cancel`.
pub type dsv4_progress_callback = Option<unsafe extern "C" fn(userdata: *mut c_void, done: usize, total: usize) -> i32>;

/// Sets every default in `options`, a struct of `size` bytes. Use `dsv4_session_options_init`, which passes the size as
/// your header has it. `options` may be NULL; then nothing happens.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dsv4_session_options_init_sized(options: *mut dsv4_session_options, size: usize) {
    guard_value("dsv4_session_options_init_sized", (), || {
        // SAFETY: NULL or `size` bytes by the header's contract.
        unsafe { init_options(options, size) }
    });
}

/// Makes an empty session on `engine`. `options` may be NULL. `*out` receives the session, to be freed with
/// `dsv4_session_free`.
///
/// Errors: `INVALID_ARGUMENT` if the context is longer than the model's or `rollback` is above 64; `OUT_OF_MEMORY`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_session_new(
    engine: *const dsv4_engine,
    options: *const dsv4_session_options,
    out: *mut *mut dsv4_session,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let out = unsafe { Out::new(out, "out") };
    guard("dsv4_session_new", err, || {
        // SAFETY: as above.
        let engine = unsafe { object(engine, "engine") }?.get()?;
        // SAFETY: as above.
        let options = unsafe { self::options(options) }?;
        out.check()?;
        out.give(dsv4_session::new(Session::new(&engine, read(&options)?)?));
        Ok(())
    })
}

/// Frees a session and its cache. A generation that was started on it keeps what it needs. `session` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dsv4_session_free(session: *mut dsv4_session) {
    guard_value("dsv4_session_free", (), || {
        // SAFETY: NULL or an object that nobody uses any more, by the header's contract.
        unsafe { free_own(session, |session| session.exclusive.is_inherited()) }
    });
}

/// Appends `n_tokens` tokens and computes the logits behind the last one. No tokens is no work and no error. `progress`
/// may be NULL, and `userdata` may be NULL.
///
/// Errors: `INVALID_ARGUMENT` for an id outside the vocabulary and `CONTEXT_FULL` if the tokens do not all fit (nothing
/// is fed then); `CANCELLED`, `NO_BLOCKS`, `OUT_OF_MEMORY`, `NUMERIC`, `IO` (the chunks that were complete stay, see
/// `dsv4_session_info.position`, and there are no logits if there was one; feed the rest to go on).
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_session_feed(
    session: *mut dsv4_session,
    tokens: *const u32,
    n_tokens: usize,
    progress: dsv4_progress_callback,
    userdata: *mut c_void,
    err: *mut dsv4_error,
) -> dsv4_status {
    guard("dsv4_session_feed", err, || {
        // SAFETY: by the header's contract.
        let mut session = unsafe { object(session, "session") }?.exclusive.get()?;
        // SAFETY: as above.
        let tokens = unsafe { slice(tokens, n_tokens, "tokens") }?;
        session.feed_with(tokens, &mut |Progress { done, total }| {
            // SAFETY: the host gave function and userdata to be called so during this call.
            let stop = progress.is_some_and(|progress| unfenced(|| unsafe { progress(userdata, done, total) }) != 0);
            if stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        Ok(())
    })
}

/// As `dsv4_session_feed`, giving out the logits behind every token: row `i` of `logits`, an array `[n_tokens,
/// vocab_size]` with room for `capacity` values, belongs to `tokens[i]`.
///
/// Errors: as `dsv4_session_feed`; `INVALID_ARGUMENT` if `capacity` is too small. `logits` is zero then.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_session_feed_all(
    session: *mut dsv4_session,
    tokens: *const u32,
    n_tokens: usize,
    logits: *mut f32,
    capacity: usize,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or valid outputs by the header's contract.
    let rows = unsafe { super::args::Rows::new(logits, capacity, "logits") };
    guard("dsv4_session_feed_all", err, || {
        // SAFETY: by the header's contract.
        let mut session = unsafe { object(session, "session") }?.exclusive.get()?;
        // SAFETY: as above.
        let tokens = unsafe { slice(tokens, n_tokens, "tokens") }?;
        let vocab = session.engine().model().config().vocab_size;
        rows.check(n_tokens, vocab)?;
        let first = session.position();
        let fed = session.feed_all(tokens, &mut |position, row| {
            rows.set(position - first, row);
            Ok(())
        });
        fed.inspect_err(|_| rows.clear())?;
        Ok(())
    })
}

/// Logits behind the last token, before softmax, in place: `*logits` points to `*n` float32, one per token id, valid
/// until the next call with this session that is not a question (`get_info`, `logits`, `tokens`).
///
/// In a generation on a GPU the device chooses the tokens and keeps the logits: asking computes them again, bit for bit,
/// and the next token's come along.
///
/// Errors: `INVALID_ARGUMENT` if there are none: before the first token, and after a `feed` that stopped half-way; those of
/// a device that computes them.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_session_logits(
    session: *mut dsv4_session,
    logits: *mut *const f32,
    n: *mut usize,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let logits = unsafe { Out::new(logits, "logits") };
    // SAFETY: as above.
    let n = unsafe { Out::new(n, "n") };
    guard("dsv4_session_logits", err, || {
        // SAFETY: as above.
        let session = unsafe { object(session, "session") }?.exclusive.read()?;
        logits.check()?;
        n.check()?;
        let none = || Error::new(ErrorKind::InvalidArgument, "the session has no logits: feed it first");
        let row = session.try_logits()?.ok_or_else(none)?;
        logits.set(row.as_ptr());
        n.set(row.len());
        Ok(())
    })
}

/// The tokens in the session, in place: `*tokens` points to `*n` ids, valid as long as the logits are.
///
/// Errors: only `INVALID_ARGUMENT`, `BUSY` and `POISONED`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_session_tokens(
    session: *mut dsv4_session,
    tokens: *mut *const u32,
    n: *mut usize,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let tokens = unsafe { Out::new(tokens, "tokens") };
    // SAFETY: as above.
    let n = unsafe { Out::new(n, "n") };
    guard("dsv4_session_tokens", err, || {
        // SAFETY: as above.
        let session = unsafe { object(session, "session") }?.exclusive.read()?;
        tokens.check()?;
        n.check()?;
        tokens.set(session.tokens().as_ptr());
        n.set(session.tokens().len());
        Ok(())
    })
}

/// Where the session stands.
///
/// Errors: only `INVALID_ARGUMENT`, `BUSY` and `POISONED`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_session_get_info(
    session: *mut dsv4_session,
    info: *mut dsv4_session_info,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let info = unsafe { OutStruct::new(info, "info") };
    guard("dsv4_session_get_info", err, || {
        // SAFETY: as above.
        let session = unsafe { object(session, "session") }?.exclusive.read()?;
        info.check()?;
        info.set(dsv4_session_info {
            size: size_of::<dsv4_session_info>(),
            position: session.position() as u64,
            context: session.context() as u64,
            remaining: session.remaining() as u64,
            has_logits: i32::from(session.has_logits()),
            reserved: 0,
            reused_tokens: session.reused_tokens(),
        });
        Ok(())
    })
}

/// Empties the session, and takes back a cancel that no call has seen. Generations that were started on it end with an
/// error.
///
/// Errors: `BUSY`; `OUT_OF_MEMORY` and `NO_BLOCKS` if there is no room for an empty state of its own.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_session_clear(session: *mut dsv4_session, err: *mut dsv4_error) -> dsv4_status {
    guard("dsv4_session_clear", err, || {
        // SAFETY: by the header's contract.
        unsafe { object(session, "session") }?.exclusive.get()?.clear()?;
        Ok(())
    })
}

/// Makes a session with the same tokens and logits, for another continuation. `*out` receives it, to be freed with
/// `dsv4_session_free`. Nothing is copied but tokens and logits: the cache is shared until one of the two writes to it.
///
/// Errors: `BUSY`; `OUT_OF_MEMORY`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_session_fork(
    session: *mut dsv4_session,
    out: *mut *mut dsv4_session,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let out = unsafe { Out::new(out, "out") };
    guard("dsv4_session_fork", err, || {
        // SAFETY: as above.
        let session = unsafe { object(session, "session") }?.exclusive.get()?;
        out.check()?;
        out.give(dsv4_session::new(session.fork()?));
        Ok(())
    })
}

/// Goes back to the first `position` tokens, exactly. The last `rollback` tokens of the session's options, fed one at a
/// time, are taken back without computing; otherwise it starts from the nearest checkpoint below and computes the rest
/// again. The logits are then those behind token `position - 1`; at 0 there are none. Generations that were started on the
/// session end with an error.
///
/// Errors: `INVALID_ARGUMENT` if the session has fewer tokens; `BUSY`; those of `dsv4_session_feed`, after which the
/// session holds a beginning of the tokens that were wanted.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_session_truncate(
    session: *mut dsv4_session,
    position: u64,
    err: *mut dsv4_error,
) -> dsv4_status {
    guard("dsv4_session_truncate", err, || {
        // SAFETY: by the header's contract.
        let mut session = unsafe { object(session, "session") }?.exclusive.get()?;
        session.truncate(count(position, "position")?)?;
        Ok(())
    })
}

/// Goes back to what the session has in common with `tokens`, and says how many tokens that is in `*kept`; feed the rest
/// of `tokens` next. For conversations whose history is rendered anew each turn and may come out differently: what is the
/// same is not computed again, and if nothing differs, nothing changes.
///
/// Errors: `INVALID_ARGUMENT`; `BUSY`; those of `dsv4_session_truncate`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_session_keep_common(
    session: *mut dsv4_session,
    tokens: *const u32,
    n_tokens: usize,
    kept: *mut usize,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let kept = unsafe { Out::new(kept, "kept") };
    guard("dsv4_session_keep_common", err, || {
        // SAFETY: as above.
        let mut session = unsafe { object(session, "session") }?.exclusive.get()?;
        // SAFETY: as above.
        let tokens = unsafe { slice(tokens, n_tokens, "tokens") }?;
        kept.check()?;
        kept.set(session.keep_common(tokens)?);
        Ok(())
    })
}

/// Cancels the running call of this session, or its next one if none is running: it returns `CANCELLED` within the time
/// of one layer of one chunk, or of the chunk where other sessions' calls share it. From any thread, at any time before the
/// session is freed; it never waits. A cancel that comes when the call it was meant for has just ended counts for the next
/// one; `dsv4_session_reset_cancel` takes it back.
///
/// Errors: only `INVALID_ARGUMENT`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_session_cancel(session: *const dsv4_session, err: *mut dsv4_error) -> dsv4_status {
    guard("dsv4_session_cancel", err, || {
        // SAFETY: by the header's contract.
        unsafe { object(session, "session") }?.cancel.cancel();
        Ok(())
    })
}

/// Takes back a cancel that no call has seen. For a thread whose call has ended while another one may have cancelled it: when
/// that one is done, this leaves nothing behind for the next call.
///
/// Errors: only `INVALID_ARGUMENT`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_session_reset_cancel(session: *const dsv4_session, err: *mut dsv4_error) -> dsv4_status {
    guard("dsv4_session_reset_cancel", err, || {
        // SAFETY: by the header's contract.
        unsafe { object(session, "session") }?.cancel.reset();
        Ok(())
    })
}
