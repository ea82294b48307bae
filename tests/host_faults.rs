//! Disks that fail under experts that are read when they are needed. A binary of its own: the injected failure is
//! process-wide.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a failed call is a failed test")]

use std::fs::{self, OpenOptions};
use std::path::Path;
use std::sync::Arc;

use dsv4::weights::fail_nth_read;
use dsv4::{Engine, EngineOptions, ErrorKind, Model, Session, SessionOptions};

/// Room for two of 48 experts.
const LEAST: u64 = 80_000;

fn engine(folder: &Path, host_bytes: u64) -> Arc<Engine> {
    let options = EngineOptions { host_bytes, threads: 2, prefill_chunk: 64, ..EngineOptions::default() };
    Engine::new(&Model::open(folder).unwrap(), options).unwrap()
}

fn tiny() -> &'static Path {
    Path::new("examples/models/tiny-v4")
}

fn tokens() -> Vec<u32> {
    (0..100).map(|i| 300 + i * 7 % 64).collect()
}

fn session(engine: &Arc<Engine>) -> Session {
    Session::new(engine, SessionOptions::default()).unwrap()
}

#[test]
fn a_read_error_is_told_with_file_tensor_and_bytes_and_the_session_goes_on() {
    let lock = fail_nth_read(0);
    let mut undisturbed = session(&engine(tiny(), 0));
    undisturbed.feed(&tokens()).unwrap();
    let want = undisturbed.logits().unwrap().to_vec();
    drop(lock);
    let engine = engine(tiny(), LEAST);
    let mut failures = 0;
    for nth in (1..40).chain((40..).step_by(17)) {
        let mut session = session(&engine);
        let armed = fail_nth_read(nth);
        let result = session.feed(&tokens());
        let fired = armed.fired();
        drop(armed);
        if !fired {
            break;
        }
        // of a read ahead that failed, nobody knows; what it was to bring is read again
        if let Err(error) = result {
            failures += 1;
            assert_eq!(error.kind(), ErrorKind::Io, "{error}");
            for part in
                ["tiny-v4/model-0000", ".safetensors", "tensor layers.", ".ffn.experts.", "bytes at ", "injected"]
            {
                assert!(error.message().contains(part), "{part:?} is not in: {error}");
            }
            assert_eq!(session.position() % 64, 0, "whole chunks are in the session");
            session.feed(&tokens()[session.position()..]).unwrap();
        }
        assert!(session.logits().unwrap() == want, "after read {nth}");
    }
    assert!(failures > 30, "only {failures} calls failed");
}

#[test]
fn a_shard_that_shrinks_between_steps_is_an_error_and_with_its_bytes_the_session_goes_on() {
    let _lock = fail_nth_read(0);
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(tiny()).unwrap().map(Result::unwrap).filter(|e| e.file_type().unwrap().is_file()) {
        fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    for host_bytes in [0, LEAST] {
        let engine = engine(dir.path(), host_bytes);
        let mut session = session(&engine);
        session.feed(&tokens()[..50]).unwrap();
        let path = dir.path().join("model-00002-of-00003.safetensors");
        let bytes = fs::read(&path).unwrap();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(bytes.len() as u64 - 1).unwrap();
        let error = session.feed(&tokens()[50..]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        let sizes = [bytes.len() - 1, bytes.len()].map(|n| n.to_string());
        assert!(sizes.iter().all(|size| error.message().contains(size)), "{error}");
        assert!(error.message().contains("model-00002-of-00003.safetensors"), "{error}");
        assert_eq!(session.position(), 50);
        // the same file again, whose mapping is whole then
        let mut file = OpenOptions::new().write(true).open(&path).unwrap();
        std::io::Write::write_all(&mut file, &bytes).unwrap();
        session.feed(&tokens()[50..]).unwrap();
        assert_eq!(session.position(), 100);
    }
}
