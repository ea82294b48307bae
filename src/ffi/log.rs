//! Log
//!
//! The library never writes to stdout or stderr. What it has to say goes to one callback, if there is one.

use std::cell::Cell;
use std::ffi::{CString, c_char, c_void};
use std::fmt::{self, Write};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{PoisonError, RwLock};

use once_cell::sync::OnceCell;
use tracing::field::{Field, Visit};
use tracing::span;
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber};

use super::args::choice;
use super::guard::{guard, injection_point, unfenced};
use super::status::{dsv4_error, dsv4_status};
use crate::error::{Error, ErrorKind, Result, bail};

/// How important a message is.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum dsv4_log_level {
    /// No messages.
    Off = 0,
    /// Something failed that no call reports, or a defect of the library.
    Error = 1,
    /// Something is odd, and the library goes on.
    Warn = 2,
    /// What was opened and how it runs: a few lines per model and engine.
    Info = 3,
    /// For bug reports.
    Debug = 4,
    /// For developers of the library.
    Trace = 5,
}

/// Receives log messages. `message` is UTF-8 that ends with a NUL and is valid during the call only.
///
/// It may be called from any thread, also from several at once. It must return (no `longjmp`, no C++ exception). It may
/// call functions of the library, but not `dsv4_log_set`; what those log while it runs is dropped.
pub type dsv4_log_callback =
    Option<unsafe extern "C" fn(userdata: *mut c_void, level: dsv4_log_level, message: *const c_char)>;

/// Sends messages up to `level` (a `dsv4_log_level`) to `callback`, from all objects of the process. A new call replaces
/// the callback; when it returns, the old one is not running any more and will not be called again. `callback` may be
/// NULL, which ends the log, and `userdata` may be NULL.
///
/// Errors: `INVALID_ARGUMENT` for an unknown level; `BUSY` when called from within a log callback; `UNAVAILABLE` if the
/// host is a Rust program with a `tracing` subscriber of its own, which gets the messages already.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_log_set(
    level: i32,
    callback: dsv4_log_callback,
    userdata: *mut c_void,
    err: *mut dsv4_error,
) -> dsv4_status {
    guard("dsv4_log_set", err, || {
        injection_point();
        let level = choice(level, "level", &LEVELS, |level| level as i32)?;
        Ok(set(callback.map(|function| Sink { function, userdata }), level)?)
    })
}

const LEVELS: [(dsv4_log_level, dsv4_log_level); 6] = [
    (dsv4_log_level::Off, dsv4_log_level::Off),
    (dsv4_log_level::Error, dsv4_log_level::Error),
    (dsv4_log_level::Warn, dsv4_log_level::Warn),
    (dsv4_log_level::Info, dsv4_log_level::Info),
    (dsv4_log_level::Debug, dsv4_log_level::Debug),
    (dsv4_log_level::Trace, dsv4_log_level::Trace),
];

/// Where messages go. Held for reading while the callback runs, so that it can only be replaced between calls.
static SINK: RwLock<Option<Sink>> = RwLock::new(None);
/// The largest level that is wanted, by number; 0 without a sink.
static LEVEL: AtomicI32 = AtomicI32::new(0);

thread_local! {
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

struct Sink {
    function: unsafe extern "C" fn(*mut c_void, dsv4_log_level, *const c_char),
    userdata: *mut c_void,
}

// SAFETY: the documentation of the callback says that it is called from any thread.
unsafe impl Send for Sink {}
// SAFETY: as above, also from several threads at once.
unsafe impl Sync for Sink {}

fn set(sink: Option<Sink>, level: dsv4_log_level) -> Result<()> {
    if IN_CALLBACK.get() {
        bail!(Busy, "the log cannot be changed from within its own callback");
    }
    if sink.is_some() {
        subscribe()?;
    }
    let level = if sink.is_some() { level as i32 } else { 0 };
    let mut current = SINK.write().unwrap_or_else(PoisonError::into_inner);
    *current = sink;
    LEVEL.store(level, Ordering::Relaxed);
    Ok(())
}

/// Connects the library's `tracing` events to the sink, once in the life of the process.
fn subscribe() -> Result<()> {
    static SUBSCRIBED: OnceCell<()> = OnceCell::new();
    SUBSCRIBED
        .get_or_try_init(|| tracing::subscriber::set_global_default(Subscription))
        .map_err(|_| {
            Error::new(ErrorKind::Unavailable, "the program has a tracing subscriber, which gets the messages")
        })
        .copied()
}

/// Forwards events of this crate; spans mean nothing to it.
struct Subscription;

impl Subscriber for Subscription {
    // never cached, because the level changes
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        Interest::sometimes()
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let crate_name = metadata.target().split("::").next();
        crate_name == Some("dsv4") && level_of(metadata) as i32 <= LEVEL.load(Ordering::Relaxed)
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        deliver(level_of(event.metadata()), &(line.message + &line.fields));
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

fn level_of(metadata: &Metadata<'_>) -> dsv4_log_level {
    match *metadata.level() {
        Level::ERROR => dsv4_log_level::Error,
        Level::WARN => dsv4_log_level::Warn,
        Level::INFO => dsv4_log_level::Info,
        Level::DEBUG => dsv4_log_level::Debug,
        Level::TRACE => dsv4_log_level::Trace,
    }
}

fn deliver(level: dsv4_log_level, message: &str) {
    if IN_CALLBACK.replace(true) {
        return;
    }
    let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
    let sink = SINK.read().unwrap_or_else(PoisonError::into_inner);
    if let Some(Sink { function, userdata }) = &*sink {
        // SAFETY: the host gave function and userdata to be called so, from any thread, until they are replaced.
        unfenced(|| unsafe { function(*userdata, level, message.as_ptr()) });
    }
    drop(sink);
    IN_CALLBACK.set(false);
}

/// `message key=value key=value` of one event.
#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // writing to a String cannot fail
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}
