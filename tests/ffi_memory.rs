//! Memory that is refused, request by request, through the C API: always `OUT_OF_MEMORY`, never a dead host, and the same
//! objects go on afterwards with the same results.

use std::ffi::{CStr, CString, c_char};
use std::mem::zeroed;
use std::path::Path;
use std::ptr::{null, null_mut};
use std::slice;

use dsv4::alloc::fail_nth;
use dsv4::ffi::engine::*;
use dsv4::ffi::generate::*;
use dsv4::ffi::model::*;
use dsv4::ffi::sampler::*;
use dsv4::ffi::session::*;
use dsv4::ffi::session_file::*;
use dsv4::ffi::status::*;

/// More than one chunk, and more than the shortest compression group.
const PROMPT: [u32; 7] = [301, 302, 303, 304, 305, 306, 307];

/// Pitfall 67.
#[test]
fn any_refused_request_is_out_of_memory_and_everything_goes_on() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models/tiny-v4");
    let path = CString::new(path.to_str().expect("a UTF-8 path")).expect("no NUL");

    let mut model = null_mut();
    // SAFETY: valid arguments, here and in all calls below.
    let refused =
        until_it_succeeds("open", |err| unsafe { dsv4_model_open(path.as_ptr(), null(), &raw mut model, err) });
    assert!(refused > 2, "opening made {refused} requests");

    // SAFETY: a struct of numbers and NULL.
    let mut options: dsv4_engine_options = unsafe { zeroed() };
    // SAFETY: the memory has that size.
    unsafe { dsv4_engine_options_init_sized(&raw mut options, size_of::<dsv4_engine_options>()) };
    options.threads = 1;
    options.prefill_chunk = 4;
    let mut engine = null_mut();
    // SAFETY: as above.
    until_it_succeeds("engine", |err| unsafe { dsv4_engine_new(model, &raw const options, &raw mut engine, err) });

    let mut session = null_mut();
    // SAFETY: as above.
    let refused =
        until_it_succeeds("session", |err| unsafe { dsv4_session_new(engine, null(), &raw mut session, err) });
    assert!(refused > 6, "a session made {refused} requests");

    let mut other = null_mut();
    // SAFETY: as above.
    assert_eq!(unsafe { dsv4_session_new(engine, null(), &raw mut other, null_mut()) }, dsv4_status::Ok);
    feed(other, &PROMPT);
    let wanted = logits(other);

    // each failure may leave complete chunks; feeding the rest must give what an undisturbed session gives
    let mut refused = 0;
    loop {
        refused += 1;
        // SAFETY: as above.
        assert_eq!(unsafe { dsv4_session_clear(session, null_mut()) }, dsv4_status::Ok);
        let mut err = Error::new();
        let injection = fail_nth(refused);
        // SAFETY: as above.
        let status =
            unsafe { dsv4_session_feed(session, PROMPT.as_ptr(), PROMPT.len(), None, null_mut(), &raw mut err.0) };
        let has_fired = injection.fired();
        drop(injection);
        if !has_fired {
            assert_eq!(status, dsv4_status::Ok, "{}", err.message());
            break;
        }
        assert_eq!(status, dsv4_status::OutOfMemory, "request {refused}: {}", err.message());
        assert!(err.message().starts_with("cannot allocate "), "{}", err.message());
        let held = position(session);
        assert!(held == 0 || held == 4, "whole chunks only: {held}");
        feed(session, &PROMPT[held..]);
        assert_eq!(logits(session), wanted, "after request {refused} was refused");
    }
    assert!(refused > 20, "feeding made {refused} requests");

    // a refused save leaves the old file, a refused restore nothing
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("a.session");
    let file = CString::new(file.to_str().expect("a UTF-8 path")).expect("no NUL");
    // SAFETY: as above.
    let refused = until_it_succeeds("save", |err| unsafe { dsv4_session_save(session, file.as_ptr(), 1, err) });
    assert!(refused > 2, "saving made {refused} requests");
    let mut restored = null_mut();
    // SAFETY: as above.
    let refused = until_it_succeeds("restore", |err| unsafe {
        dsv4_session_restore(engine, file.as_ptr(), null(), &raw mut restored, err)
    });
    assert!(refused > 10, "restoring made {refused} requests");
    assert_eq!(logits(restored), wanted);
    // SAFETY: not used any more.
    unsafe { dsv4_session_free(restored) };

    let mut sampler = null_mut();
    // SAFETY: as above.
    until_it_succeeds("sampler", |err| unsafe { dsv4_sampler_new(null(), &raw mut sampler, err) });
    let mut generation = null_mut();
    // SAFETY: as above.
    until_it_succeeds("generation", |err| unsafe {
        dsv4_generation_new(session, sampler, null(), &raw mut generation, err)
    });
    // a piece that failed is asked for again; nothing is lost or doubled
    let mut undisturbed = null_mut();
    let mut other_sampler = null_mut();
    // SAFETY: as above.
    assert_eq!(unsafe { dsv4_sampler_new(null(), &raw mut other_sampler, null_mut()) }, dsv4_status::Ok);
    // SAFETY: as above.
    let status = unsafe { dsv4_generation_new(other, other_sampler, null(), &raw mut undisturbed, null_mut()) };
    assert_eq!(status, dsv4_status::Ok);
    for i in 0..4 {
        let (mut piece, mut wanted) = (empty_piece(), empty_piece());
        // SAFETY: as above.
        until_it_succeeds("next", |err| unsafe { dsv4_generation_next(generation, &raw mut piece, err) });
        // SAFETY: as above.
        assert_eq!(unsafe { dsv4_generation_next(undisturbed, &raw mut wanted, null_mut()) }, dsv4_status::Ok);
        assert_eq!(piece.token, wanted.token, "token {i}");
    }

    // SAFETY: not used any more, in all of these.
    unsafe {
        dsv4_generation_free(generation);
        dsv4_generation_free(undisturbed);
        dsv4_sampler_free(sampler);
        dsv4_sampler_free(other_sampler);
        dsv4_session_free(session);
        dsv4_session_free(other);
        dsv4_engine_free(engine);
        dsv4_model_free(model);
    }
}

/// Refuses the first request, then the second and so on, until the call does not get that far. Returns how many were
/// refused.
fn until_it_succeeds(what: &str, mut call: impl FnMut(*mut dsv4_error) -> dsv4_status) -> u64 {
    for n in 1.. {
        let mut err = Error::new();
        let injection = fail_nth(n);
        let status = call(&raw mut err.0);
        if !injection.fired() {
            assert_eq!(status, dsv4_status::Ok, "{what}: {}", err.message());
            return n - 1;
        }
        assert_eq!(status, dsv4_status::OutOfMemory, "{what}, request {n}: {}", err.message());
        assert_eq!(err.0.code, dsv4_status::OutOfMemory);
    }
    unreachable!("the numbers do not end")
}

fn feed(session: *mut dsv4_session, tokens: &[u32]) {
    let mut err = Error::new();
    // SAFETY: valid arguments.
    let status = unsafe { dsv4_session_feed(session, tokens.as_ptr(), tokens.len(), None, null_mut(), &raw mut err.0) };
    assert_eq!(status, dsv4_status::Ok, "{}", err.message());
}

fn logits(session: *mut dsv4_session) -> Vec<f32> {
    let (mut logits, mut n) = (null(), 0);
    // SAFETY: valid arguments.
    let status = unsafe { dsv4_session_logits(session, &raw mut logits, &raw mut n, null_mut()) };
    assert_eq!(status, dsv4_status::Ok);
    // SAFETY: they live until the next feed.
    unsafe { slice::from_raw_parts(logits, n) }.to_vec()
}

fn position(session: *mut dsv4_session) -> usize {
    // SAFETY: a struct of numbers.
    let mut info: dsv4_session_info = unsafe { zeroed() };
    info.size = size_of::<dsv4_session_info>();
    // SAFETY: valid arguments.
    assert_eq!(unsafe { dsv4_session_get_info(session, &raw mut info, null_mut()) }, dsv4_status::Ok);
    info.position as usize
}

fn empty_piece() -> dsv4_piece {
    // SAFETY: a struct of numbers and NULL.
    let mut piece: dsv4_piece = unsafe { zeroed() };
    piece.size = size_of::<dsv4_piece>();
    piece
}

/// The caller's error.
struct Error(dsv4_error);

impl Error {
    fn new() -> Self {
        Self(dsv4_error { size: 0, code: dsv4_status::Ok, message: [0 as c_char; DSV4_ERROR_MESSAGE_SIZE] })
    }

    fn message(&self) -> &str {
        // SAFETY: the library ends every message with a NUL.
        unsafe { CStr::from_ptr(self.0.message.as_ptr()) }.to_str().expect("messages are UTF-8")
    }
}
