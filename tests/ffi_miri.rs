//! Guard, handles, options and errors of the C API on a small model in memory, without pool or tokenizer, so that Miri can
//! check every pointer: `.ci/miri`. The arithmetic of one token takes Miri four minutes, so it is left out there, except
//! with `DSV4_MIRI_FULL` in the environment; an ordinary test run has it.

#[path = "common/safetensors_writer.rs"]
mod safetensors_writer;
#[path = "common/tiny_checkpoint.rs"]
#[expect(dead_code, reason = "the tests of checkpoint reading use the rest")]
mod tiny_checkpoint;

use std::ffi::{CStr, c_char, c_void};
use std::mem::zeroed;
use std::path::PathBuf;
use std::ptr::{null, null_mut};
use std::{env, slice};

use dsv4::Model;
use dsv4::ffi::engine::*;
use dsv4::ffi::model::*;
use dsv4::ffi::sampler::*;
use dsv4::ffi::session::*;
use dsv4::ffi::status::*;
use dsv4::ffi::testing::{model_handle, panic_in};
use dsv4::model::config::Config;
use dsv4::weights::Checkpoint;
use tiny_checkpoint::{Tiny, VOCAB};

/// All in one test: a panic is armed for the whole process, and one model is enough.
#[test]
fn objects_live_and_die_soundly() {
    let model = tiny_model();
    let engine = engine(model);
    options_of_every_version(model);
    if !cfg!(miri) || env::var_os("DSV4_MIRI_FULL").is_some() {
        a_session_feeds_and_lends_its_logits(engine);
    }
    if !cfg!(miri) {
        a_callback_cancels(engine);
        feeding_all_fills_every_row(engine);
    }
    a_sampler_samples();
    a_panic_poisons_only_its_object(engine);
    outputs_are_written_as_far_as_the_caller_knows_them(model, engine);
    // SAFETY: not used any more.
    unsafe { dsv4_model_free(model) };
    // SAFETY: as above; the engine outlived the model.
    unsafe { dsv4_engine_free(engine) };
}

fn options_of_every_version(model: *const dsv4_model) {
    let mut err = Error::new();
    let mut out = null_mut();
    // what a later version would pass: one more word than this one knows
    let newer = |tail: u64| {
        let mut words = vec![0u64; size_of::<dsv4_engine_options>() / 8 + 1];
        // SAFETY: the memory has that many bytes.
        unsafe { dsv4_engine_options_init_sized(words.as_mut_ptr().cast(), 8 * words.len()) };
        let last = words.len() - 1;
        (words[3], words[last]) = (1 | 16 << 32, tail);
        words
    };
    for (words, wanted) in [
        (vec![32u64, 0, 0, 1 | 16 << 32], dsv4_status::Ok),
        (vec![16, 0], dsv4_status::Ok),
        (vec![8], dsv4_status::Ok),
        (newer(0), dsv4_status::Ok),
        (newer(1 << 56), dsv4_status::InvalidArgument),
        (vec![0], dsv4_status::InvalidArgument),
        (vec![u64::MAX], dsv4_status::InvalidArgument),
    ] {
        // threads are 0 in the shorter ones, which would start a pool; the engine is not made then
        let is_short = words[0] < 32;
        if is_short && wanted == dsv4_status::Ok {
            continue;
        }
        // SAFETY: the options have as many bytes as they say, or a size that is refused before they are read.
        let status = unsafe { dsv4_engine_new(model, words.as_ptr().cast(), &raw mut out, &raw mut err.0) };
        assert_eq!(status, wanted, "{words:?}: {}", err.message());
        assert_eq!(out.is_null(), wanted != dsv4_status::Ok);
        // SAFETY: NULL, or made just now.
        unsafe { dsv4_engine_free(out) };
    }
    for size in [8, 16, 24, 32, 40] {
        let mut words = vec![7u64; size / 8];
        // SAFETY: the memory has `size` bytes.
        unsafe { dsv4_engine_options_init_sized(words.as_mut_ptr().cast(), size) };
        assert_eq!(words[0], size as u64);
    }
}

fn a_session_feeds_and_lends_its_logits(engine: *const dsv4_engine) {
    let mut err = Error::new();
    let session = session(engine);
    let (mut logits, mut n) = (null(), 0);
    // SAFETY: valid arguments.
    let status = unsafe { dsv4_session_logits(session, &raw mut logits, &raw mut n, &raw mut err.0) };
    assert_eq!((status, logits, n), (dsv4_status::InvalidArgument, null(), 0));
    let mut calls = 0;
    let progress = Progress { session, calls: &raw mut calls };
    // SAFETY: valid arguments.
    let status = unsafe {
        dsv4_session_feed(
            session,
            [1u32].as_ptr(),
            1,
            Some(on_progress),
            (&raw const progress).cast_mut().cast(),
            null_mut(),
        )
    };
    assert_eq!((status, calls), (dsv4_status::Ok, 1));
    // SAFETY: as above.
    let status = unsafe { dsv4_session_logits(session, &raw mut logits, &raw mut n, &raw mut err.0) };
    assert_eq!((status, n), (dsv4_status::Ok, VOCAB), "{}", err.message());
    // questions between do not invalidate the pointer
    // SAFETY: a struct of numbers.
    let mut info: dsv4_session_info = unsafe { zeroed() };
    info.size = size_of::<dsv4_session_info>();
    // SAFETY: valid arguments.
    assert_eq!(unsafe { dsv4_session_get_info(session, &raw mut info, null_mut()) }, dsv4_status::Ok);
    assert_eq!((info.position, info.has_logits), (1, 1));
    // SAFETY: the logits live until the next feed.
    let logits = unsafe { slice::from_raw_parts(logits, n) };
    assert!(logits.iter().all(|logit| logit.is_finite()));
    // SAFETY: not used any more.
    unsafe { dsv4_session_free(session) };
}

fn a_sampler_samples() {
    let mut err = Error::new();
    let logits = [0.5f32, 1.0, -2.0];
    let mut sampler = null_mut();
    // SAFETY: valid arguments.
    let status = unsafe { dsv4_sampler_new(null(), &raw mut sampler, &raw mut err.0) };
    assert_eq!(status, dsv4_status::Ok, "{}", err.message());
    let mut token = u32::MAX;
    // SAFETY: valid arguments.
    let status = unsafe { dsv4_sampler_sample(sampler, logits.as_ptr(), logits.len(), &raw mut token, &raw mut err.0) };
    assert!(status == dsv4_status::Ok && (token as usize) < logits.len(), "{}", err.message());
    // SAFETY: not used any more.
    unsafe { dsv4_sampler_free(sampler) };
}

/// What the callback below gets.
struct Progress {
    session: *mut dsv4_session,
    calls: *mut i32,
}

extern "C" fn on_progress(progress: *mut c_void, _: usize, _: usize) -> i32 {
    // SAFETY: the tests pass this struct.
    let progress = unsafe { &*progress.cast::<Progress>() };
    // SAFETY: valid arguments.
    let status = unsafe { dsv4_session_clear(progress.session, null_mut()) };
    assert_eq!(status, dsv4_status::Busy);
    // SAFETY: it outlives the call.
    unsafe { *progress.calls += 1 };
    1
}

fn feeding_all_fills_every_row(engine: *const dsv4_engine) {
    let session = session(engine);
    let mut err = Error::new();
    let mut rows = vec![9.0f32; 2 * VOCAB];
    let tokens = [3u32, 4];
    // SAFETY: valid arguments.
    let status =
        unsafe { dsv4_session_feed_all(session, tokens.as_ptr(), 2, rows.as_mut_ptr(), rows.len(), &raw mut err.0) };
    assert_eq!(status, dsv4_status::Ok, "{}", err.message());
    assert!(rows.iter().all(|logit| logit.is_finite() && *logit != 9.0));
    // SAFETY: not used any more.
    unsafe { dsv4_session_free(session) };
}

fn a_callback_cancels(engine: *const dsv4_engine) {
    let session = session(engine);
    let mut err = Error::new();
    let mut calls = 0;
    let progress = Progress { session, calls: &raw mut calls };
    let (tokens, userdata) = ([1u32, 2, 3], (&raw const progress).cast_mut().cast());
    // SAFETY: valid arguments.
    let status = unsafe { dsv4_session_feed(session, tokens.as_ptr(), 3, Some(on_progress), userdata, &raw mut err.0) };
    assert_eq!((status, calls), (dsv4_status::Cancelled, 1));
    assert!(err.message().contains("1 of 3"), "{}", err.message());
    // SAFETY: not used any more.
    unsafe { dsv4_session_free(session) };
}

fn a_panic_poisons_only_its_object(engine: *const dsv4_engine) {
    let (broken, other) = (session(engine), session(engine));
    let mut err = Error::new();
    panic_in("dsv4_session_clear");
    // SAFETY: valid arguments.
    assert_eq!(unsafe { dsv4_session_clear(broken, &raw mut err.0) }, dsv4_status::Panic);
    assert!(err.message().contains("injected by a test"), "{}", err.message());
    // SAFETY: as above.
    assert_eq!(unsafe { dsv4_session_clear(broken, &raw mut err.0) }, dsv4_status::Poisoned);
    // SAFETY: as above.
    assert_eq!(unsafe { dsv4_session_clear(other, &raw mut err.0) }, dsv4_status::Ok);
    for session in [broken, other] {
        // SAFETY: not used any more.
        unsafe { dsv4_session_free(session) };
    }
}

fn outputs_are_written_as_far_as_the_caller_knows_them(model: *const dsv4_model, engine: *const dsv4_engine) {
    let mut short = [16u64, 7];
    // SAFETY: the struct has as many bytes as it says.
    let status = unsafe { dsv4_model_get_info(model, short.as_mut_ptr().cast(), null_mut()) };
    assert_eq!(status, dsv4_status::Ok);
    assert!(short[0] == 16 && short[1] > 1000);
    let mut long = [7u64; 64];
    long[0] = 512;
    // SAFETY: as above.
    let status = unsafe { dsv4_engine_get_info(engine, long.as_mut_ptr().cast(), null_mut()) };
    assert_eq!((status, long[63]), (dsv4_status::Ok, 0));
    let mut path = null();
    // SAFETY: valid arguments.
    assert_eq!(unsafe { dsv4_model_path(model, &raw mut path, null_mut()) }, dsv4_status::Ok);
    // SAFETY: it ends with a NUL and lives as long as the model.
    assert_eq!(unsafe { CStr::from_ptr(path) }, c"in memory");
}

fn tiny_model() -> *mut dsv4_model {
    let mut tiny = Tiny::new();
    // one layer is enough; the second entry is the draft block's
    tiny.tensors.retain(|tensor| !tensor.0.starts_with("layers.1.") && !tensor.0.starts_with("layers.2."));
    tiny.config["num_hidden_layers"] = 1.into();
    tiny.config["compress_ratios"] = vec![0, 0].into();
    let entries: Vec<_> =
        tiny.tensors.iter().map(|(n, d, s, b)| (n.as_str(), *d, s.as_slice(), b.as_slice())).collect();
    // whole slices, because Miri runs a loop over bytes for minutes
    let data = entries.iter().map(|entry| entry.3).collect::<Vec<_>>().concat();
    let file = safetensors_writer::bytes(&safetensors_writer::header(&entries), &data);
    let config = Config::from_json(&tiny.config.to_string()).expect("a valid config");
    let checkpoint = Checkpoint::from_bytes("in memory", file).expect("a valid checkpoint");
    let model = Model::from_parts(PathBuf::from("in memory"), config, checkpoint).expect("they fit");
    model_handle(model).expect("the path has no NUL")
}

fn engine(model: *const dsv4_model) -> *mut dsv4_engine {
    let mut err = Error::new();
    let mut engine = null_mut();
    // SAFETY: a struct of numbers and NULL.
    let mut options: dsv4_engine_options = unsafe { zeroed() };
    // SAFETY: the memory has that size.
    unsafe { dsv4_engine_options_init_sized(&raw mut options, size_of::<dsv4_engine_options>()) };
    options.threads = 1;
    options.prefill_chunk = 1;
    // the fewest operations
    options.numerics = dsv4_numerics::Exact as i32;
    // SAFETY: valid arguments.
    let status = unsafe { dsv4_engine_new(model, &raw const options, &raw mut engine, &raw mut err.0) };
    assert_eq!(status, dsv4_status::Ok, "{}", err.message());
    engine
}

fn session(engine: *const dsv4_engine) -> *mut dsv4_session {
    let mut err = Error::new();
    let mut session = null_mut();
    // SAFETY: valid arguments.
    let status = unsafe { dsv4_session_new(engine, null(), &raw mut session, &raw mut err.0) };
    assert_eq!(status, dsv4_status::Ok, "{}", err.message());
    session
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
