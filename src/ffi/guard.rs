//! The fence around every exported function: no panic leaves the library and none is printed.
//!
//! Invariant: the body of every `extern "C"` function runs inside [`guard`] or [`guard_value`]. The panic hook that is
//! installed with the first call is silent inside the fence and on the engine's worker threads, and passes every other
//! panic on to the hook that was there before, so the host program's own panics look as ever.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{self, AssertUnwindSafe, PanicHookInfo};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, Once, PoisonError};

use super::status::{Fault, dsv4_error, dsv4_status, report};

thread_local! {
    /// Whether this thread is inside the fence.
    static FENCED: Cell<bool> = const { Cell::new(false) };
    /// Where the panic under way happened.
    static PANIC_PLACE: RefCell<Option<String>> = const { RefCell::new(None) };
    /// Test hook: the current call panics at its next [`injection_point`].
    static INJECTED: Cell<bool> = const { Cell::new(false) };
}

/// Test hook: whether any thread waits for an injected panic, so that calls need not look further.
static ARMED: AtomicBool = AtomicBool::new(false);
/// Test hook: the function that is to panic.
static ARMED_FUNCTION: Mutex<Option<&'static str>> = Mutex::new(None);

/// Runs `body`; its error, or a panic, becomes a status and a message in the caller's `err`.
pub(super) fn guard(
    function: &'static str,
    err: *mut dsv4_error,
    body: impl FnOnce() -> Result<(), Fault>,
) -> dsv4_status {
    let fault = match fenced(function, body) {
        Ok(Ok(())) => Fault { status: dsv4_status::Ok, message: String::new() },
        Ok(Err(fault)) => fault,
        Err(message) => Fault { status: dsv4_status::Panic, message },
    };
    // SAFETY: the caller of an exported function passes NULL or a valid error.
    unsafe { report(err, fault.status, &fault.message) };
    fault.status
}

/// Runs the body of a function that cannot report errors; `after_panic` is its documented value after a panic.
pub(super) fn guard_value<T>(function: &'static str, after_panic: T, body: impl FnOnce() -> T) -> T {
    fenced(function, body).unwrap_or(after_panic)
}

/// Runs a callback of the host outside the fence.
pub(super) fn unfenced<T>(callback: impl FnOnce() -> T) -> T {
    let _restore = Fence::set(false);
    callback()
}

/// Where an injected panic happens: behind the conversion of an argument. The first argument of a method is its object,
/// so that the object is in use when the panic comes.
pub(super) fn injection_point() {
    if INJECTED.replace(false) {
        panic!("injected by a test");
    }
}

/// Test hook: the next call of `function`, on any thread, panics inside.
pub(super) fn arm(function: &'static str) {
    *ARMED_FUNCTION.lock().unwrap_or_else(PoisonError::into_inner) = Some(function);
    ARMED.store(true, Ordering::SeqCst);
}

fn fenced<T>(function: &'static str, body: impl FnOnce() -> T) -> Result<T, String> {
    install_hook();
    let _restore = Fence::set(true);
    let result = panic::catch_unwind(AssertUnwindSafe(|| {
        if ARMED.load(Ordering::Relaxed) {
            take_armed(function);
        }
        let value = body();
        injection_point();
        value
    }));
    result.map_err(|payload| {
        let message = describe(function, payload);
        // the log's own code is the last that could panic, and there is nobody left to tell
        panic::catch_unwind(|| tracing::error!("{message}")).unwrap_or_else(std::mem::forget);
        message
    })
}

fn take_armed(function: &'static str) {
    let mut armed = ARMED_FUNCTION.lock().unwrap_or_else(PoisonError::into_inner);
    if *armed == Some(function) {
        *armed = None;
        ARMED.store(false, Ordering::SeqCst);
        INJECTED.set(true);
    }
}

fn describe(function: &str, payload: Box<dyn Any + Send>) -> String {
    let place = PANIC_PLACE.with(|place| place.try_borrow_mut().ok().and_then(|mut place| place.take()));
    let place = place.map(|place| format!(" at {place}")).unwrap_or_default();
    let text = match payload.downcast::<String>() {
        Ok(text) => *text,
        Err(payload) => match payload.downcast::<&'static str>() {
            Ok(text) => (*text).to_owned(),
            Err(payload) => {
                // dropping a foreign value could panic again
                std::mem::forget(payload);
                "no text".to_owned()
            }
        },
    };
    format!("{function}: panic{place}: {text}; this is a defect of the library, and the object can only be freed")
}

/// Sets the thread's fence and puts it back when dropped, so that calls may nest through callbacks.
struct Fence {
    before: bool,
}

impl Fence {
    fn set(inside: bool) -> Self {
        Self { before: FENCED.replace(inside) }
    }
}

impl Drop for Fence {
    fn drop(&mut self) {
        FENCED.set(self.before);
    }
}

fn install_hook() {
    static HOOK: Once = Once::new();
    // a panicking thread must not change the hook; a later call does it
    if HOOK.is_completed() || std::thread::panicking() {
        return;
    }
    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| if is_ours() { keep_place(info) } else { before(info) }));
    });
}

/// Whether the current thread runs code of the library: inside the fence, or as a worker of an engine.
fn is_ours() -> bool {
    FENCED.get() || std::thread::current().name().is_some_and(|name| name.starts_with("dsv4-"))
}

fn keep_place(info: &PanicHookInfo<'_>) {
    let place = info.location().map(ToString::to_string);
    // a thread that is ending, or a panic within this very line, only loses the place
    let _ = PANIC_PLACE.try_with(|kept| kept.try_borrow_mut().map(|mut kept| *kept = place));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_status_with_place_and_text() {
        let mut err = dsv4_error { size: 0, code: dsv4_status::Ok, message: [0; 1000] };
        let status = guard("dsv4_test", &raw mut err, || panic!("index {} of 3", 7));
        assert_eq!((status, err.code), (dsv4_status::Panic, dsv4_status::Panic));
        // SAFETY: `guard` ends the message with a NUL.
        let text = unsafe { std::ffi::CStr::from_ptr(err.message.as_ptr()) }.to_str().unwrap();
        assert!(text.starts_with("dsv4_test: panic at src/ffi/guard.rs:"), "{text}");
        assert!(text.contains("index 7 of 3"), "{text}");
    }

    #[test]
    fn a_panic_with_a_foreign_payload_is_stopped_too() {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("the payload panics when it is dropped");
            }
        }
        assert_eq!(guard_value("dsv4_test", 5, || panic::panic_any(Bomb)), 5);
    }

    #[test]
    fn the_fence_is_open_during_callbacks_and_closed_after_them() {
        guard_value("dsv4_test", (), || {
            assert!(FENCED.get());
            unfenced(|| {
                assert!(!FENCED.get());
                guard_value("dsv4_test", (), || assert!(FENCED.get()));
                assert!(!FENCED.get());
            });
            assert!(FENCED.get());
        });
        assert!(!FENCED.get());
    }
}
