//! Refused allocations while a checkpoint is opened. A binary of its own: the injected failure is process-wide.

#![allow(clippy::unwrap_used, reason = "a failed call is a failed test")]

#[path = "common/safetensors_writer.rs"]
mod safetensors_writer;
#[path = "common/tiny_checkpoint.rs"]
mod tiny_checkpoint;

use std::path::Path;

use dsv4::alloc;
use dsv4::error::{ErrorKind, Result};
use dsv4::model::config::Config;
use dsv4::model::weights::Weights;
use dsv4::weights::Checkpoint;

fn load(dir: &Path) -> Result<()> {
    let config = Config::from_file(&dir.join("config.json"))?;
    let checkpoint = Checkpoint::open(dir)?;
    Weights::resolve(&config, &checkpoint)?.prepare()
}

/// Pitfall 67.
#[test]
fn each_refused_request_while_opening_is_out_of_memory_with_bytes() {
    let tiny = tiny_checkpoint::Tiny::new();
    let (sharded, single) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    tiny.write_sharded(sharded.path());
    tiny.write_single(single.path());
    let mut refused = 0;
    loop {
        let guard = alloc::fail_nth(refused + 1);
        let result = load(sharded.path()).and_then(|()| load(single.path()));
        if !guard.fired() {
            result.unwrap();
            break;
        }
        let error = result.expect_err("a refused request is an error");
        assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
        assert!(error.message().contains(" bytes for "), "{error}");
        refused += 1;
    }
    assert!(refused > 120, "only {refused} requests went through the fallible allocator");
}

#[test]
fn only_the_nth_request_is_refused_and_dropping_disarms() {
    let guard = alloc::fail_nth(2);
    assert_eq!(alloc::vec_f32("a", 3).unwrap(), [0.0; 3]);
    let error = alloc::zeroed::<u64>("the second", 5).unwrap_err();
    assert_eq!((error.kind(), error.message()), (ErrorKind::OutOfMemory, "cannot allocate 40 bytes for the second"));
    assert!(guard.fired());
    assert!(alloc::with_capacity::<u8>("c", 9).unwrap().capacity() >= 9);
    drop(guard);
    let guard = alloc::fail_nth(1);
    assert!(!guard.fired());
    drop(guard);
    let _lock = alloc::fail_nth(0);
    alloc::vec_f32("disarmed", 1).unwrap();
}

#[test]
fn request_of_another_thread_is_refused_too() {
    let guard = alloc::fail_nth(1);
    let result = std::thread::spawn(|| alloc::vec_f32("a worker's tile", 8)).join().unwrap();
    assert_eq!(result.unwrap_err().kind(), ErrorKind::OutOfMemory);
    assert!(guard.fired());
}

#[test]
fn absurd_requests_are_refused_without_a_guard() {
    let _lock = alloc::fail_nth(0);
    for n in [usize::MAX, usize::MAX / 4, 1 << 60] {
        let error = alloc::vec_f32("too much", n).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    }
}
