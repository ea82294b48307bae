//! What a callback may do with the session it is called for, and cancels that come too late.

use std::ffi::{CString, c_void};
use std::mem::zeroed;
use std::path::Path;
use std::ptr::{null, null_mut};

use dsv4::ffi::cache::*;
use dsv4::ffi::engine::*;
use dsv4::ffi::generate::*;
use dsv4::ffi::model::*;
use dsv4::ffi::sampler::*;
use dsv4::ffi::session::*;
use dsv4::ffi::status::*;

const OK: dsv4_status = dsv4_status::Ok;

fn session() -> *mut dsv4_session {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models/tiny-v4");
    let path = CString::new(path.to_str().expect("a UTF-8 path")).expect("no NUL");
    let (mut model, mut engine, mut session) = (null_mut(), null_mut(), null_mut());
    // SAFETY: valid arguments, here and in all calls below.
    assert_eq!(unsafe { dsv4_model_open(path.as_ptr(), null(), &raw mut model, null_mut()) }, OK);
    // SAFETY: as above.
    assert_eq!(unsafe { dsv4_engine_new(model, null(), &raw mut engine, null_mut()) }, OK);
    // SAFETY: as above.
    assert_eq!(unsafe { dsv4_session_new(engine, null(), &raw mut session, null_mut()) }, OK);
    // SAFETY: not used any more.
    unsafe { dsv4_engine_free(engine) };
    // SAFETY: not used any more.
    unsafe { dsv4_model_free(model) };
    session
}

fn feed(session: *mut dsv4_session, tokens: &[u32]) -> dsv4_status {
    // SAFETY: as above.
    unsafe { dsv4_session_feed(session, tokens.as_ptr(), tokens.len(), None, null_mut(), null_mut()) }
}

fn position(session: *mut dsv4_session) -> u64 {
    // SAFETY: a struct of numbers.
    let mut info: dsv4_session_info = unsafe { zeroed() };
    info.size = size_of::<dsv4_session_info>();
    // SAFETY: as above.
    assert_eq!(unsafe { dsv4_session_get_info(session, &raw mut info, null_mut()) }, OK);
    info.position
}

/// Tries everything on the session of the generation that it is called for.
unsafe extern "C" fn meddle(session: *mut c_void, _: *const dsv4_piece) -> i32 {
    let session = session.cast::<dsv4_session>();
    let (mut logits, mut tokens, mut n) = (null(), null(), 0);
    position(session);
    // SAFETY: as above.
    assert_eq!(unsafe { dsv4_session_logits(session, &raw mut logits, &raw mut n, null_mut()) }, OK);
    // SAFETY: as above.
    assert_eq!(unsafe { dsv4_session_tokens(session, &raw mut tokens, &raw mut n, null_mut()) }, OK);
    // SAFETY: a struct of numbers.
    let mut cache: dsv4_cache_info = unsafe { zeroed() };
    cache.size = size_of::<dsv4_cache_info>();
    // SAFETY: as above.
    assert_eq!(unsafe { dsv4_session_get_cache_info(session, &raw mut cache, null_mut()) }, OK);

    assert_eq!(feed(session, &[5]), dsv4_status::Busy);
    // SAFETY: as above.
    assert_eq!(unsafe { dsv4_session_clear(session, null_mut()) }, dsv4_status::Busy);
    // SAFETY: as above.
    let all = unsafe { dsv4_session_feed_all(session, null(), 0, null_mut(), 0, null_mut()) };
    assert_eq!(all, dsv4_status::Busy);
    let (mut sampler, mut generation, mut finish) = (null_mut(), null_mut(), 0);
    // SAFETY: as above.
    assert_eq!(unsafe { dsv4_sampler_new(null(), &raw mut sampler, null_mut()) }, OK);
    // SAFETY: as above.
    let another = unsafe { dsv4_generation_new(session, sampler, null(), &raw mut generation, null_mut()) };
    assert_eq!(another, dsv4_status::Busy);
    // SAFETY: as above.
    let nested =
        unsafe { dsv4_session_generate(session, sampler, null(), None, null_mut(), &raw mut finish, null_mut()) };
    assert_eq!(nested, dsv4_status::Busy);
    // SAFETY: not used any more.
    unsafe { dsv4_sampler_free(sampler) };
    0
}

/// Pitfall 107.
#[test]
fn a_piece_callback_may_read_its_session_and_nothing_else() {
    let session = session();
    assert_eq!(feed(session, &[0, 300, 301]), OK);
    let (mut sampler, mut finish) = (null_mut(), 0);
    // SAFETY: as above.
    assert_eq!(unsafe { dsv4_sampler_new(null(), &raw mut sampler, null_mut()) }, OK);
    // SAFETY: a struct of numbers and NULL.
    let mut options: dsv4_generation_options = unsafe { zeroed() };
    // SAFETY: the memory has that size.
    unsafe { dsv4_generation_options_init_sized(&raw mut options, size_of::<dsv4_generation_options>()) };
    (options.max_tokens, options.ignore_eos) = (3, 1);
    // SAFETY: as above.
    let status = unsafe {
        dsv4_session_generate(
            session,
            sampler,
            &raw const options,
            Some(meddle),
            session.cast(),
            &raw mut finish,
            null_mut(),
        )
    };
    assert_eq!((status, finish), (OK, dsv4_finish::MaxTokens as i32));
    assert_eq!(position(session), 5, "the generation went on undisturbed");
    assert_eq!(feed(session, &[5]), OK, "free again afterwards");
    // SAFETY: not used any more.
    unsafe { dsv4_sampler_free(sampler) };
    // SAFETY: not used any more.
    unsafe { dsv4_session_free(session) };
}

#[test]
fn a_cancel_that_came_too_late_is_taken_back_by_clear() {
    let session = session();
    assert_eq!(feed(session, &[0, 300]), OK);
    // SAFETY: as above.
    assert_eq!(unsafe { dsv4_session_cancel(session, null_mut()) }, OK);
    assert_eq!(feed(session, &[301]), dsv4_status::Cancelled);
    // SAFETY: as above.
    assert_eq!(unsafe { dsv4_session_cancel(session, null_mut()) }, OK);
    // SAFETY: as above.
    assert_eq!(unsafe { dsv4_session_clear(session, null_mut()) }, OK);
    assert_eq!(feed(session, &[0, 300, 301]), OK);
    // SAFETY: not used any more.
    unsafe { dsv4_session_free(session) };
}
