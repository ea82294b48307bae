//! Event loops
//!
//! Calls that return at once, for programs with a loop of their own. A submitted call does the same as one that waits, with
//! the same results, options, cancels and time limits, and shares steps with all others; but nobody waits in it. The work is
//! done in `dsv4_engine_step`, which the loop calls when a descriptor can be read, and by threads that wait in calls of other
//! sessions. One thread's loop, with any number of requests:
//!
//! ```c
//! while (requests_left > 0) {
//!     poll(&wake, 1, -1);                      // or epoll, kqueue, libuv, glib; among whatever else there is
//!     if (dsv4_engine_step(engine, &worked, &err) != DSV4_STATUS_OK) return;   // one step for all of them
//!     for (each request) {
//!         dsv4_request_event event = {0};
//!         event.size = sizeof event;
//!         while (dsv4_request_poll(request, &event, &err) == DSV4_STATUS_OK && event.kind != DSV4_REQUEST_EVENT_KIND_NONE)
//!             on_event(request, &event);         // a token, the end, ...
//!     }
//! }
//! ```
//!
//! While a request runs, its session, and a generation's sampler, are `BUSY`; they can be used again when the request has
//! told its end, or is freed. `dsv4_session_cancel` works all the time.

use std::ffi::c_char;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use super::args::{Out, OutStruct, SizedStruct, c_bytes, free_own, object, options, slice};
use super::engine::dsv4_engine;
use super::generate::{dsv4_finish, dsv4_generation_options, number, read};
use super::guard::{guard, guard_value};
use super::handle::Exclusive;
use super::sampler::dsv4_sampler;
use super::session::dsv4_session;
use super::status::{Fault, dsv4_error, dsv4_status};
use crate::alloc;
use crate::engine::Engine;
use crate::error::Result;
use crate::sampler::Sampler;
use crate::session::{Decoding, Event, Pending, Session};

/// A submitted call. One thread at a time.
pub struct dsv4_request {
    exclusive: Exclusive<Submitted>,
}

/// What is new with a request.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum dsv4_request_event_kind {
    /// Nothing.
    None = 0,
    /// `done` of the `total` tokens of a prompt are in the session. Only the last such news is kept.
    Progress = 1,
    /// A token was generated, with the text that became certain with it.
    Piece = 2,
    /// The request is over: with `status` and, if that is no error, a generation's `finish`. The last news; session and
    /// sampler are free again.
    End = 3,
}

/// News of a request. Set `size` to `sizeof(dsv4_request_event)` before the call that fills it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dsv4_request_event {
    /// `sizeof(dsv4_request_event)`.
    pub size: usize,
    /// `text_len` bytes of UTF-8 and a final NUL, valid until the next call with this request: a piece's text, as in
    /// `dsv4_piece`; at the end, the message of an error. Otherwise empty.
    pub text: *const c_char,
    /// Bytes of `text`, without the NUL.
    pub text_len: usize,
    /// Of a prompt: tokens that are in the session.
    pub done: u64,
    /// Of a prompt: all its tokens.
    pub total: u64,
    /// A `dsv4_request_event_kind`.
    pub kind: i32,
    /// Of a piece: the token. A stop token is reported too.
    pub token: u32,
    /// At the end of a generation: a `dsv4_finish`; otherwise `NONE`.
    pub finish: i32,
    /// See `dsv4_finish`; otherwise 0.
    pub finish_value: u32,
    /// At the end: the `dsv4_status` that a call which waits would have returned; otherwise 0.
    pub status: i32,
    /// 0.
    pub reserved: i32,
}

// SAFETY: `repr(C)`, `size` first, plain fields without padding.
unsafe impl SizedStruct for dsv4_request_event {
    const NAME: &'static str = "dsv4_request_event";
}

/// Submits a `dsv4_session_feed` and returns at once: nothing is computed or checked yet, and what is wrong with the tokens
/// is told at the end. The tokens are copied. `*out` receives the request, to be freed with `dsv4_request_free`.
///
/// Errors: `BUSY`; `OUT_OF_MEMORY`; `UNAVAILABLE` in a fork of the process.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_session_submit_feed(
    session: *mut dsv4_session,
    tokens: *const u32,
    n_tokens: usize,
    out: *mut *mut dsv4_request,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let out = unsafe { Out::new(out, "out") };
    guard("dsv4_session_submit_feed", err, || {
        // SAFETY: as above.
        let session = unsafe { object(session, "session") }?;
        let using = session.exclusive.get()?;
        // SAFETY: as above.
        let tokens = unsafe { slice(tokens, n_tokens, "tokens") }?;
        out.check()?;
        let tokens = alloc::copied("tokens of a request", tokens)?;
        let submitted = Submitted::new(using.lend().submit(tokens), &session.exclusive, None);
        out.give(dsv4_request { exclusive: Exclusive::new("the request", submitted).bound() });
        Ok(())
    })
}

/// Submits a `dsv4_session_generate` to its end and returns at once; each piece is an event. `options` may be NULL. `*out`
/// receives the request, to be freed with `dsv4_request_free`.
///
/// Errors: as `dsv4_generation_new`; `BUSY`; `UNAVAILABLE` in a fork of the process.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_session_submit_generate(
    session: *mut dsv4_session,
    sampler: *mut dsv4_sampler,
    options: *const dsv4_generation_options,
    out: *mut *mut dsv4_request,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let out = unsafe { Out::new(out, "out") };
    guard("dsv4_session_submit_generate", err, || {
        // SAFETY: as above.
        let session = unsafe { object(session, "session") }?;
        let using = session.exclusive.get()?;
        // SAFETY: as above.
        let sampler = unsafe { object(sampler, "sampler") }?;
        let sampling = sampler.exclusive.get()?;
        // SAFETY: as above.
        let options = unsafe { self::options(options) }?;
        out.check()?;
        // SAFETY: as above; the arrays are read during this call only.
        let decoding = Decoding::new(&using, unsafe { read(&options) }?)?;
        let pending = Pending::generate(using.lend(), sampling.lend(), Ok(decoding));
        let submitted = Submitted::new(pending, &session.exclusive, Some(&sampler.exclusive));
        out.give(dsv4_request { exclusive: Exclusive::new("the request", submitted).bound() });
        Ok(())
    })
}

/// The oldest news that was not fetched; of kind `NONE` if there is none now. Does no work and does not wait.
///
/// Errors: `BUSY`; `OUT_OF_MEMORY` for the text (call it again); `UNAVAILABLE` in a fork of the process. What goes wrong
/// with the request itself is told by its end.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_request_poll(
    request: *mut dsv4_request,
    event: *mut dsv4_request_event,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let event = unsafe { OutStruct::new(event, "event") };
    guard("dsv4_request_poll", err, || {
        // SAFETY: as above.
        let mut submitted = unsafe { object(request, "request") }?.exclusive.get()?;
        event.check()?;
        event.set(submitted.tell(Pending::poll)?);
        Ok(())
    })
}

/// As `dsv4_request_poll`, but works, for all who wait, or waits until there is news: for `timeout_ms` milliseconds at most,
/// or without end if that is `UINT64_MAX`. A step that has begun is completed.
///
/// Errors: as `dsv4_request_poll`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_request_wait(
    request: *mut dsv4_request,
    timeout_ms: u64,
    event: *mut dsv4_request_event,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let event = unsafe { OutStruct::new(event, "event") };
    guard("dsv4_request_wait", err, || {
        // SAFETY: as above.
        let mut submitted = unsafe { object(request, "request") }?.exclusive.get()?;
        event.check()?;
        let limit = (timeout_ms < u64::MAX).then(|| Duration::from_millis(timeout_ms));
        event.set(submitted.tell(|pending| pending.wait(limit))?);
        Ok(())
    })
}

/// Frees a request. One that is not over is cancelled first: the session keeps what was complete, and can be used. If
/// another thread has it in a step at this moment, the end of that step is waited for. `request` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dsv4_request_free(request: *mut dsv4_request) {
    guard_value("dsv4_request_free", (), || {
        // SAFETY: NULL or an object that nobody uses any more, by the header's contract.
        unsafe { free_own(request, |request| request.exclusive.is_inherited()) }
    });
}

/// Has requests go on, and runs one step of what they and calls with `waits_only` wait for, on this thread. `*worked`
/// receives 1 if there was something to do and 0 if not, or if another thread is at it already.
///
/// Errors: `UNAVAILABLE` in a fork of the process. What goes wrong in the step is told to the calls in it.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_engine_step(
    engine: *const dsv4_engine,
    worked: *mut i32,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let worked = unsafe { Out::new(worked, "worked") };
    guard("dsv4_engine_step", err, || {
        // SAFETY: as above.
        let engine = unsafe { object(engine, "engine") }?.get()?;
        worked.check()?;
        worked.set(i32::from(engine.run_waiting_step()));
        Ok(())
    })
}

/// A descriptor that can be read, as `poll` and `epoll` mean it, while `dsv4_engine_step` has something to do or has left
/// news with requests. It is for waiting only, belongs to the engine, and lives as long as the engine and its sessions. One
/// loop uses it: a step takes the signal back, so a second loop might miss it.
///
/// Errors: `UNSUPPORTED` where descriptors are none (Windows): use `dsv4_request_wait`, or steps in an idle handler; `IO` if
/// the system gives none; `UNAVAILABLE` in a fork of the process.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_engine_wake_fd(
    engine: *const dsv4_engine,
    fd: *mut i32,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let fd = unsafe { Out::new(fd, "fd") };
    guard("dsv4_engine_wake_fd", err, || {
        // SAFETY: as above.
        let engine = unsafe { object(engine, "engine") }?.get()?;
        fd.check()?;
        fd.set(descriptor(&engine)?);
        Ok(())
    })
}

#[cfg(unix)]
fn descriptor(engine: &Engine) -> Result<i32> {
    engine.wake_fd()
}

#[cfg(not(unix))]
fn descriptor(_: &Engine) -> Result<i32> {
    crate::error::bail!(Unsupported, "there is no descriptor to wait for on this system")
}

/// A pending call and the handles that lent it what it has.
struct Submitted {
    pending: Pending,
    session: Arc<Exclusive<Session>>,
    sampler: Option<Arc<Exclusive<Sampler>>>,
    /// Whether they have it back.
    has_ended: bool,
    /// What the next call gives, if the memory for its text was refused to the last one.
    unsent: Option<Event>,
    /// Text of the last event, and a NUL.
    text: Vec<u8>,
}

impl Submitted {
    fn new(pending: Pending, session: &Arc<Exclusive<Session>>, sampler: Option<&Arc<Exclusive<Sampler>>>) -> Self {
        let (session, sampler) = (Arc::clone(session), sampler.map(Arc::clone));
        Self { pending, session, sampler, has_ended: false, unsent: None, text: vec![0] }
    }

    /// The event for C: one that could not be told to the last call, or what `fetch` finds.
    fn tell(&mut self, fetch: impl FnOnce(&mut Pending) -> Option<Event>) -> Result<dsv4_request_event> {
        let mut event = dsv4_request_event {
            size: size_of::<dsv4_request_event>(),
            text: ptr::null(),
            text_len: 0,
            done: 0,
            total: 0,
            kind: dsv4_request_event_kind::None as i32,
            token: 0,
            finish: dsv4_finish::None as i32,
            finish_value: 0,
            status: dsv4_status::Ok as i32,
            reserved: 0,
        };
        let news = self.unsent.take().or_else(|| fetch(&mut self.pending));
        let text = match &news {
            Some(Event::Piece(piece)) => c_bytes(&piece.text),
            Some(Event::End(Err(error))) => c_bytes(error.message()),
            _ => Ok(vec![0]),
        };
        self.text = text.inspect_err(|_| self.unsent.clone_from(&news))?;
        match news {
            None => {}
            Some(Event::Progress(progress)) => {
                event.kind = dsv4_request_event_kind::Progress as i32;
                (event.done, event.total) = (progress.done as u64, progress.total as u64);
            }
            Some(Event::Piece(piece)) => {
                event.kind = dsv4_request_event_kind::Piece as i32;
                event.token = piece.token;
            }
            Some(Event::End(result)) => {
                event.kind = dsv4_request_event_kind::End as i32;
                match result {
                    Ok(finish) => {
                        let (finish, value) = number(finish);
                        (event.finish, event.finish_value) = (finish as i32, value);
                    }
                    Err(error) => event.status = Fault::from(error).status as i32,
                }
                self.give_back();
            }
        }
        (event.text, event.text_len) = (self.text.as_ptr().cast(), self.text.len() - 1);
        Ok(event)
    }

    /// Gives the handles what the call had, as it is now.
    fn give_back(&mut self) {
        if std::mem::replace(&mut self.has_ended, true) {
            return;
        }
        let (session, sampler) = self.pending.take_parts().map_or((None, None), |(session, s)| (Some(session), s));
        self.session.give_back(session);
        if let Some(handle) = &self.sampler {
            handle.give_back(sampler);
        }
    }
}

impl Drop for Submitted {
    fn drop(&mut self) {
        self.give_back();
    }
}
