//! The C API from several threads, and after `fork()`.
#![cfg(unix)]

#[path = "common/at_end.rs"]
#[allow(unreachable_pub, reason = "several test binaries use it")]
mod at_end;

use std::ffi::{CStr, CString, c_void};
use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use at_end::AtEnd;
use dsv4::ffi::cache::*;
use dsv4::ffi::call::*;
use dsv4::ffi::engine::*;
use dsv4::ffi::metrics::*;
use dsv4::ffi::model::*;
use dsv4::ffi::request::*;
use dsv4::ffi::session::*;
use dsv4::ffi::status::*;

const OK: dsv4_status = dsv4_status::Ok;

/// Pointers for several threads.
#[derive(Clone, Copy)]
struct Handles {
    model: *mut dsv4_model,
    engine: *mut dsv4_engine,
    session: *mut dsv4_session,
}

// SAFETY: the API says which calls may come from several threads; that is what is tested.
unsafe impl Send for Handles {}
// SAFETY: as above.
unsafe impl Sync for Handles {}

impl Handles {
    fn new() -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models/tiny-v4");
        let path = CString::new(path.to_str().expect("a UTF-8 path")).expect("no NUL");
        let (mut model, mut engine) = (null_mut(), null_mut());
        // SAFETY: valid arguments, here and in all calls below.
        assert_eq!(unsafe { dsv4_model_open(path.as_ptr(), null(), &raw mut model, null_mut()) }, OK);
        // SAFETY: as above.
        assert_eq!(unsafe { dsv4_engine_new(model, null(), &raw mut engine, null_mut()) }, OK);
        Self { model, engine, session: new_session(engine) }
    }

    fn free(self) {
        // SAFETY: not used any more.
        unsafe { dsv4_session_free(self.session) };
        // SAFETY: not used any more.
        unsafe { dsv4_engine_free(self.engine) };
        // SAFETY: not used any more.
        unsafe { dsv4_model_free(self.model) };
    }
}

fn new_session(engine: *const dsv4_engine) -> *mut dsv4_session {
    let mut session = null_mut();
    // SAFETY: as above.
    assert_eq!(unsafe { dsv4_session_new(engine, null(), &raw mut session, null_mut()) }, OK);
    session
}

fn feed(
    session: *mut dsv4_session,
    tokens: &[u32],
    progress: dsv4_progress_callback,
    userdata: *mut c_void,
) -> dsv4_status {
    // SAFETY: as above.
    unsafe { dsv4_session_feed(session, tokens.as_ptr(), tokens.len(), progress, userdata, null_mut()) }
}

unsafe extern "C" fn meet_twice(barrier: *mut c_void, _: usize, _: usize) -> i32 {
    // SAFETY: the barrier of the test below, which outlives the call.
    let barrier = unsafe { &*barrier.cast::<Barrier>() };
    barrier.wait();
    barrier.wait();
    0
}

/// Pitfall 74.
#[test]
fn a_second_thread_on_a_session_is_told_busy_and_nothing_else_happens() {
    let handles = Handles::new();
    let barrier = Barrier::new(2);
    thread::scope(|scope| {
        let (handles, barrier) = (&handles, &barrier);
        scope.spawn(move || {
            let userdata = (&raw const *barrier).cast_mut().cast();
            assert_eq!(feed(handles.session, &[5; 20], Some(meet_twice), userdata), OK);
        });
        barrier.wait();
        assert_eq!(feed(handles.session, &[6; 20], None, null_mut()), dsv4_status::Busy);
        // SAFETY: as above.
        assert_eq!(unsafe { dsv4_session_clear(handles.session, null_mut()) }, dsv4_status::Busy);
        // SAFETY: as above.
        let options = unsafe { dsv4_session_set_call_options(handles.session, null(), null_mut()) };
        assert_eq!(options, dsv4_status::Busy);
        // another session of the engine is none of their business
        let other = new_session(handles.engine);
        assert_eq!(feed(other, &[7; 20], None, null_mut()), OK);
        // SAFETY: not used any more.
        unsafe { dsv4_session_free(other) };
        barrier.wait();
    });
    let (mut tokens, mut n) = (null(), 0);
    // SAFETY: as above.
    assert_eq!(unsafe { dsv4_session_tokens(handles.session, &raw mut tokens, &raw mut n, null_mut()) }, OK);
    // SAFETY: the library says so.
    assert_eq!(unsafe { std::slice::from_raw_parts(tokens, n) }, [5; 20]);
    handles.free();
}

unsafe extern "C" fn step_within(engine: *mut c_void, _: usize, _: usize) -> i32 {
    let mut worked = 2;
    // SAFETY: the engine of the test below, which outlives the call.
    assert_eq!(unsafe { dsv4_engine_step(engine.cast(), &raw mut worked, null_mut()) }, OK);
    i32::from(worked > 1)
}

/// The handles of model and engine are freed while their sessions live on, callbacks run steps, and others read figures.
#[test]
fn figures_are_read_and_steps_are_run_in_callbacks_while_sessions_come_and_go() {
    let handles = Handles::new();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let (shared, done) = (&handles, &done);
        for _ in 0..2 {
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    // SAFETY: a struct of numbers.
                    let mut metrics: dsv4_engine_metrics = unsafe { std::mem::zeroed() };
                    metrics.size = size_of::<dsv4_engine_metrics>();
                    // SAFETY: as above.
                    assert_eq!(unsafe { dsv4_engine_get_metrics(shared.engine, &raw mut metrics, null_mut()) }, OK);
                    assert!(metrics.sessions >= 1, "its own");
                    let (mut text, mut len) = (vec![0; 1 << 16], 0);
                    let (ptr, capacity) = (text.as_mut_ptr(), text.len());
                    // SAFETY: as above.
                    let status =
                        unsafe { dsv4_engine_metrics_text(shared.engine, ptr, capacity, &raw mut len, null_mut()) };
                    assert!(status == OK && len > 1000 && text[len] == 0);
                }
            });
        }
        let workers: Vec<_> = (0..3)
            .map(|i| {
                scope.spawn(move || {
                    for round in 0..2 {
                        let session = new_session(shared.engine);
                        let prompt = [10 * i + round; 300];
                        let status = feed(session, &prompt, Some(step_within), shared.engine.cast());
                        assert_eq!(status, OK);
                        // SAFETY: not used any more.
                        unsafe { dsv4_session_free(session) };
                    }
                })
            })
            .collect();
        let _done = AtEnd(done);
        workers.into_iter().for_each(|worker| worker.join().expect("each of its calls succeeds"));
    });
    // SAFETY: not used any more.
    unsafe { dsv4_model_free(handles.model) };
    // SAFETY: not used any more.
    unsafe { dsv4_engine_free(handles.engine) };
    assert_eq!(feed(handles.session, &[5; 300], None, null_mut()), OK);
    // SAFETY: a struct of numbers.
    let mut metrics: dsv4_session_metrics = unsafe { std::mem::zeroed() };
    for (size, expected) in [(0, dsv4_status::InvalidArgument), (usize::MAX, dsv4_status::InvalidArgument)] {
        metrics.size = size;
        // SAFETY: as above.
        assert_eq!(unsafe { dsv4_session_get_metrics(handles.session, &raw mut metrics, null_mut()) }, expected);
    }
    metrics.size = size_of::<dsv4_session_metrics>();
    // SAFETY: as above.
    assert_eq!(unsafe { dsv4_session_get_metrics(handles.session, &raw mut metrics, null_mut()) }, OK);
    assert_eq!(metrics.prefill_tokens, 300);
    // SAFETY: not used any more.
    unsafe { dsv4_session_free(handles.session) };
}

fn event_of(request: *mut dsv4_request, timeout_ms: u64) -> (dsv4_status, dsv4_request_event) {
    // SAFETY: a struct of numbers and NULL.
    let mut event: dsv4_request_event = unsafe { std::mem::zeroed() };
    event.size = size_of::<dsv4_request_event>();
    // SAFETY: as above.
    let status = unsafe { dsv4_request_wait(request, timeout_ms, &raw mut event, null_mut()) };
    (status, event)
}

fn submit(session: *mut dsv4_session, tokens: &[u32]) -> (dsv4_status, *mut dsv4_request) {
    let mut request = null_mut();
    // SAFETY: as above.
    let status =
        unsafe { dsv4_session_submit_feed(session, tokens.as_ptr(), tokens.len(), &raw mut request, null_mut()) };
    (status, request)
}

/// Pitfall 77: nothing is serialised by the caller. Sixteen threads open, feed, submit, step, cancel and close at once; under
/// the thread sanitizer in `.ci/full`.
#[test]
fn sixteen_threads_open_step_cancel_and_close_without_a_lock_of_their_own() {
    const THREADS: usize = 16;
    let handles = Handles::new();
    thread::scope(|scope| {
        let shared = &handles;
        for i in 0..THREADS {
            scope.spawn(move || {
                for round in 0..3 {
                    let (session, prompt) = (new_session(shared.engine), [(20 * i + round) as u32; 40]);
                    let is_cancelled = (i + round) % 4 == 0;
                    if is_cancelled {
                        // SAFETY: as above.
                        assert_eq!(unsafe { dsv4_session_cancel(session, null_mut()) }, OK);
                    }
                    let fed = feed(session, &prompt, None, null_mut());
                    assert_eq!(fed, if is_cancelled { dsv4_status::Cancelled } else { OK });
                    let (status, request) = submit(session, &prompt);
                    assert_eq!(status, OK);
                    let mut worked = 0;
                    // SAFETY: as above.
                    assert_eq!(unsafe { dsv4_engine_step(shared.engine, &raw mut worked, null_mut()) }, OK);
                    if (i + round) % 3 > 0 {
                        let (status, mut event) = event_of(request, u64::MAX);
                        while event.kind == dsv4_request_event_kind::Progress as i32 {
                            event = event_of(request, u64::MAX).1;
                        }
                        assert_eq!((status, event.kind, event.status), (OK, dsv4_request_event_kind::End as i32, 0));
                    }
                    // SAFETY: not used any more.
                    unsafe { dsv4_request_free(request) };
                    assert_eq!(feed(session, &prompt[..2], None, null_mut()), OK);
                    // SAFETY: not used any more.
                    unsafe { dsv4_session_free(session) };
                }
            });
        }
    });
    // SAFETY: a struct of numbers.
    let mut metrics: dsv4_engine_metrics = unsafe { std::mem::zeroed() };
    metrics.size = size_of::<dsv4_engine_metrics>();
    // SAFETY: as above.
    assert_eq!(unsafe { dsv4_engine_get_metrics(handles.engine, &raw mut metrics, null_mut()) }, OK);
    assert_eq!((metrics.sessions, metrics.waiting_calls), (1, 0));
    handles.free();
}

/// What the child of a fork does with everything it inherited; 0 if each call said so at once.
fn child(handles: Handles, request: *mut dsv4_request) -> i32 {
    let mut err = dsv4_error { size: 0, code: OK, message: [0; DSV4_ERROR_MESSAGE_SIZE] };
    let inherited = dsv4_status::Unavailable;
    // SAFETY: as above.
    if unsafe { dsv4_session_feed(handles.session, [5].as_ptr(), 1, None, null_mut(), &raw mut err) } != inherited {
        return 1;
    }
    // SAFETY: the library ends every message with a NUL.
    let message = unsafe { CStr::from_ptr(err.message.as_ptr()) };
    if !message.to_string_lossy().contains("fork") {
        return 2;
    }
    let (mut other, mut worked) = (null_mut(), 0);
    // SAFETY: as above.
    let fork = unsafe { dsv4_session_fork(handles.session, &raw mut other, null_mut()) };
    // SAFETY: as above.
    let new = unsafe { dsv4_session_new(handles.engine, null(), &raw mut other, null_mut()) };
    // SAFETY: as above.
    let clear = unsafe { dsv4_session_clear(handles.session, null_mut()) };
    // SAFETY: as above.
    let step = unsafe { dsv4_engine_step(handles.engine, &raw mut worked, null_mut()) };
    // SAFETY: as above.
    let flush = unsafe { dsv4_engine_flush_cache(handles.engine, null_mut()) };
    // SAFETY: a struct of numbers.
    let mut metrics: dsv4_engine_metrics = unsafe { std::mem::zeroed() };
    metrics.size = size_of::<dsv4_engine_metrics>();
    // SAFETY: as above.
    let figures = unsafe { dsv4_engine_get_metrics(handles.engine, &raw mut metrics, null_mut()) };
    if [fork, new, clear, step, flush, figures] != [inherited; 6] {
        return 3;
    }
    let mut fd = 0;
    // SAFETY: as above.
    let wake = unsafe { dsv4_engine_wake_fd(handles.engine, &raw mut fd, null_mut()) };
    if [wake, submit(handles.session, &[5]).0, event_of(request, u64::MAX).0] != [inherited; 3] {
        return 4;
    }
    // SAFETY: not used any more.
    unsafe { dsv4_request_free(request) };
    handles.free();
    0
}

#[test]
fn after_a_fork_the_parent_goes_on_and_the_child_gets_a_status_and_never_hangs() {
    let handles = Handles::new();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let (shared, done) = (&handles, &done);
        // a thread in the middle of everything while the process forks
        let worker = scope.spawn(move || {
            let session = new_session(shared.engine);
            while !done.load(Ordering::Relaxed) {
                assert_eq!(feed(session, &[9; 40], None, null_mut()), OK);
                // SAFETY: as above.
                assert_eq!(unsafe { dsv4_session_clear(session, null_mut()) }, OK);
            }
            // SAFETY: not used any more.
            unsafe { dsv4_session_free(session) };
        });
        let at_end = AtEnd(done);
        // and a request that the worker's steps take along
        let submitted = new_session(shared.engine);
        let (status, request) = submit(submitted, &[6; 60]);
        assert_eq!(status, OK);
        for round in 0..10 {
            thread::sleep(Duration::from_millis(3 + 2 * round));
            // SAFETY: the child calls nothing but the library and `_exit`.
            let pid = unsafe { libc::fork() };
            assert!(pid >= 0, "fork");
            if pid == 0 {
                let code = child(*shared, request);
                // SAFETY: ends the child without running anything of the parent's.
                unsafe { libc::_exit(code) };
            }
            assert_eq!(wait(pid), Some(0), "round {round}");
        }
        while event_of(request, u64::MAX).1.kind != dsv4_request_event_kind::End as i32 {}
        // SAFETY: not used any more.
        unsafe { dsv4_request_free(request) };
        // SAFETY: not used any more.
        unsafe { dsv4_session_free(submitted) };
        drop(at_end);
        worker.join().expect("the parent's thread went on");
    });
    assert_eq!(feed(handles.session, &[5; 30], None, null_mut()), OK);
    handles.free();
}

/// How process `pid` exits; `None` if it does not, or not by itself, and then it is ended.
fn wait(pid: libc::pid_t) -> Option<i32> {
    let (start, mut status) = (Instant::now(), 0);
    while start.elapsed() < Duration::from_secs(20) {
        // SAFETY: a child of ours and a local.
        if unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) } == pid {
            return libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status));
        }
        thread::sleep(Duration::from_millis(2));
    }
    // SAFETY: a child of ours.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    // SAFETY: as above.
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    None
}
