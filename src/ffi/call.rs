//! Calls of many sessions
//!
//! Calls of several threads at the same time go through the model together; one of the threads does the work for all. How
//! a session's calls are treated among those of others, and what they do when the cache is full, is set here.

use std::time::Duration;

use super::args::{Options, SizedStruct, choice, count, flag, init_options, object, options};
use super::guard::{guard, guard_value};
use super::session::dsv4_session;
use super::status::{dsv4_error, dsv4_status};
use crate::engine::WhenFull;
use crate::session::CallOptions;

/// What a call does for which the cache has no room. In any case what no session uses makes room first, and with
/// `session_tier_bytes` in the engine's options, sessions that are idle give their pages up for a while.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum dsv4_when_full {
    /// In call options, as the engine's options say; there, as `EVICT`. The default.
    Default = 0,
    /// It takes what there is and ends with `NO_BLOCKS` when nothing is left; the chunks that were complete stay.
    Evict = 1,
    /// A prompt is compared with the room before it begins, and refused whole with `NO_BLOCKS` and the counts.
    Refuse = 2,
    /// A prompt waits until there is room for all of it, and any call waits that needs more than there is: in order of
    /// priority and age, until room is made, or a cancel or the time limit ends it. Sessions that are idle may hold the
    /// room: if one thread owns them all, give a time limit. If all sessions wait for each other, or a call needs more than
    /// the whole cache, it is `NO_BLOCKS`.
    Wait = 3,
}

pub(super) const WHEN_FULL: [(dsv4_when_full, Option<WhenFull>); 4] = [
    (dsv4_when_full::Default, None),
    (dsv4_when_full::Evict, Some(WhenFull::Evict)),
    (dsv4_when_full::Refuse, Some(WhenFull::Refuse)),
    (dsv4_when_full::Wait, Some(WhenFull::Wait)),
];

/// How a session's calls are treated. Fill with `dsv4_call_options_init`, then change what you like.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dsv4_call_options {
    /// `sizeof(dsv4_call_options)`.
    pub size: usize,
    /// Most milliseconds that one call may take, from its beginning; one that takes longer ends with `CANCELLED` within one
    /// chunk, and what was complete stays. Each token of a generation is a call. 0, the default, is no limit.
    pub time_limit_ms: u64,
    /// Tokens that are expected behind a prompt: with `REFUSE` and `WAIT`, room is asked for these too before the prompt
    /// begins, and kept for the session. 0 is the default.
    pub reserve: u64,
    /// Higher goes first where not all fit into a step; nobody waits for ever. 0 is the default.
    pub priority: i32,
    /// A `dsv4_when_full`.
    pub when_full: i32,
    /// 1: the calling thread does no work for the model, but waits for others, for threads with little stack or much
    /// priority. Something must work then: calls of other sessions, or a thread in `dsv4_engine_step`. 0 is the default.
    pub waits_only: i32,
    /// 0.
    pub reserved: i32,
}

// SAFETY: `repr(C)`, `size` first, plain fields without padding.
unsafe impl SizedStruct for dsv4_call_options {
    const NAME: &'static str = "dsv4_call_options";
}

impl Options for dsv4_call_options {
    fn defaults() -> Self {
        Self {
            size: size_of::<Self>(),
            time_limit_ms: 0,
            reserve: 0,
            priority: 0,
            when_full: dsv4_when_full::Default as i32,
            waits_only: 0,
            reserved: 0,
        }
    }
}

/// Sets every default in `options`, a struct of `size` bytes. Use `dsv4_call_options_init`, which passes the size as your
/// header has it. `options` may be NULL; then nothing happens.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dsv4_call_options_init_sized(options: *mut dsv4_call_options, size: usize) {
    guard_value("dsv4_call_options_init_sized", (), || {
        // SAFETY: NULL or `size` bytes by the header's contract.
        unsafe { init_options(options, size) }
    });
}

/// How the session's calls are treated from now on. `options` may be NULL, which is all defaults.
///
/// Errors: `INVALID_ARGUMENT` for an option out of range; `BUSY`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_session_set_call_options(
    session: *mut dsv4_session,
    options: *const dsv4_call_options,
    err: *mut dsv4_error,
) -> dsv4_status {
    guard("dsv4_session_set_call_options", err, || {
        // SAFETY: by the header's contract.
        let mut session = unsafe { object(session, "session") }?.exclusive.get()?;
        // SAFETY: as above.
        let options = unsafe { self::options(options) }?;
        super::model::reserved(options.reserved)?;
        session.set_call_options(CallOptions {
            priority: options.priority,
            time_limit: (options.time_limit_ms > 0).then(|| Duration::from_millis(options.time_limit_ms)),
            waits_only: flag(options.waits_only, "waits_only")?,
            when_full: choice(options.when_full, "when_full", &WHEN_FULL, |w| w as i32)?,
            reserve: count(options.reserve, "reserve")?,
        });
        Ok(())
    })
}
