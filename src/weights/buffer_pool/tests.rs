use std::fs::{self, OpenOptions};
use std::path::Path;

use super::*;
use crate::weights::Checkpoint;

/// The experts of a small model: layers, experts of each, and their tensors.
const LAYERS: usize = 6;
const EXPERTS: usize = 8;
const MATRICES: [&str; 6] = ["w1.weight", "w1.scale", "w2.weight", "w2.scale", "w3.weight", "w3.scale"];

fn tensors(checkpoint: &Checkpoint) -> Vec<Tensor> {
    let experts = (0..LAYERS).flat_map(|layer| (0..EXPERTS).map(move |expert| (layer, expert)));
    let names = experts.flat_map(|(l, e)| MATRICES.map(|matrix| format!("layers.{l}.ffn.experts.{e}.{matrix}")));
    names.map(|name| checkpoint.tensor(&name).unwrap()).collect()
}

fn pool(checkpoint: &Checkpoint, frames: usize) -> BufferPool {
    let pieces = Pieces::new(tensors(checkpoint), MATRICES.len(), EXPERTS).unwrap();
    BufferPool::new(pieces, frames).unwrap()
}

/// A copy of the model that may be spoiled.
fn copy(of: &Path) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(of).unwrap().map(Result::unwrap).filter(|e| e.file_type().unwrap().is_file()) {
        fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    dir
}

fn model() -> &'static Path {
    Path::new("examples/models/tiny-v4")
}

#[test]
fn every_member_comes_once_with_the_bytes_of_the_file_whoever_else_asks() {
    let checkpoint = Checkpoint::open(model()).unwrap();
    let want = tensors(&checkpoint);
    for frames in [1, 2, 5, 20, LAYERS * EXPERTS] {
        let pool = pool(&checkpoint, frames);
        thread::scope(|scope| {
            for thread in 0..3_usize {
                let (pool, want) = (&pool, &want);
                scope.spawn(move || {
                    for round in 0..60 {
                        let (layer, step) = ((round + thread) % LAYERS, 1 + (round * 7 + thread) % 4);
                        let members: Vec<usize> = (round % 3..EXPERTS).step_by(step).collect();
                        pool.expect((layer + 1) % LAYERS, &[thread, thread + 2, thread + 4]);
                        let mut seen = Vec::new();
                        let work = &mut |ready: &[Ready]| {
                            assert!(ready.is_sorted_by_key(|&(member, _)| member) && ready.len() <= frames);
                            for (member, loaded) in ready {
                                let first = (layer * EXPERTS + member) * MATRICES.len();
                                let is_same = |i: usize| loaded.bytes(i) == want[first + i].bytes();
                                assert!((0..MATRICES.len()).all(is_same), "layer {layer}, expert {member}");
                                seen.push(*member);
                            }
                            Ok(())
                        };
                        pool.fetch(layer, &members, work).unwrap();
                        seen.sort_unstable();
                        assert_eq!(seen, members);
                    }
                });
            }
        });
        let stats = pool.stats();
        assert_eq!(stats.frames, frames as u64);
        assert!(stats.misses > 0 && stats.used_frames <= stats.frames);
        let experts = stats.read_bytes * stats.frames / stats.frame_bytes;
        assert!(experts <= stats.misses + stats.read_ahead, "{stats:?}");
        if frames == LAYERS * EXPERTS {
            assert!(experts <= frames as u64, "each is read once: {stats:?}");
        }
    }
}

#[test]
fn work_that_fails_leaves_nothing_pinned() {
    let checkpoint = Checkpoint::open(model()).unwrap();
    let pool = pool(&checkpoint, 2);
    let all: Vec<usize> = (0..EXPERTS).collect();
    let mut calls = 0;
    let result = pool.fetch(0, &all, &mut |_| {
        calls += 1;
        if calls == 2 { Err(Error::new(ErrorKind::Cancelled, "enough")) } else { Ok(()) }
    });
    assert_eq!(result.unwrap_err().message(), "enough");
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        pool.fetch(1, &all, &mut |ready| {
            assert!(ready.is_empty(), "the first that come");
            Ok(())
        })
    }));
    assert!(panicked.is_err());
    let mut count = 0;
    pool.fetch(2, &all, &mut |ready| {
        count += ready.len();
        Ok(())
    })
    .unwrap();
    assert_eq!(count, EXPERTS);
}

#[test]
fn a_file_that_shrank_is_an_error_with_file_tensor_and_sizes_and_one_that_was_replaced_is_read_on() {
    let dir = copy(model());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let pool = pool(&checkpoint, 2);
    let all: Vec<usize> = (0..EXPERTS).collect();
    let fetch = |layer| pool.fetch(layer, &all, &mut |_| Ok(()));
    // of all tensors of layer 3 the one that ends last in its file
    let tensors = &tensors(&checkpoint)[3 * EXPERTS * MATRICES.len()..][..EXPERTS * MATRICES.len()];
    let last = tensors.iter().max_by_key(|tensor| (tensor.shard().path(), tensor.file_range().end)).unwrap();
    let (path, whole) = (last.shard().path().to_owned(), last.shard().declared_bytes());
    let bytes = fs::read(&path).unwrap();
    let cut = last.file_range().end - 1;
    OpenOptions::new().write(true).open(&path).unwrap().set_len(cut).unwrap();
    let error = fetch(3).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    let numbers = [last.byte_len() as u64, last.file_range().start, cut, whole].map(|n| n.to_string());
    for part in [last.name(), path.to_str().unwrap()].into_iter().chain(numbers.iter().map(String::as_str)) {
        assert!(error.message().contains(part), "{part} is not in: {error}");
    }
    // what was in front of the cut is there, and with the bytes all is
    fs::write(&path, &bytes).unwrap();
    fetch(3).unwrap();

    fs::remove_file(&path).unwrap();
    fs::write(&path, vec![0; bytes.len()]).unwrap();
    pool.fetch(3, &all, &mut |ready| {
        for (member, loaded) in ready {
            assert_eq!(loaded.bytes(4), tensors[member * MATRICES.len() + 4].bytes(), "still the old file");
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn frames_that_cannot_be_had_are_an_error_with_their_bytes() {
    let checkpoint = Checkpoint::open(model()).unwrap();
    let pieces = Pieces::new(tensors(&checkpoint), MATRICES.len(), EXPERTS).unwrap();
    let bytes = pieces.frame_bytes();
    let frames = isize::MAX as usize / bytes;
    let error = BufferPool::new(pieces, frames).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    assert!(error.message().contains(&(frames * bytes).to_string()), "{error}");
}
