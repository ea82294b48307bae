//! Where positions stop fitting 16 bits, where numbers of entries do, and at the end of a million tokens: on the trained
//! model, whose pages are copied to get there. `DSV4_TEST_DEVICE` runs it on a device.
#![forbid(unsafe_code)]

mod common;

use common::long::{ENDS, VOCAB, behind, tokens};
use common::{shared, subject};
use dsv4::{Engine, EngineOptions};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// One long context at a time: they are large, and the peak of memory is the process's.
static ONE: Mutex<()> = Mutex::new(());

fn engine(folder: &Path) -> Arc<Engine> {
    let options = EngineOptions { threads: 2, prefill_chunk: 64, cache_bytes: 1 << 30, ..EngineOptions::default() };
    subject::engine_with(folder, options)
}

/// Tokens around `end`, fed at once, in two parts and one by one.
fn check_around(ends: &[usize]) {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let model = subject::with_context(1 << 20);
    let engine = engine(model.path());
    for &end in ends {
        let mut before = behind(&engine, end);
        tokens(4000, 252).chunks(63).for_each(|ids| drop(before.step(ids).expect("up to the last four")));
        // positions end - 4 to end + 3, and to end - 1 where the model's context ends
        let ids = tokens(5000, if end == 1 << 20 { 4 } else { 8 });
        let fed = |sizes: &[usize]| {
            let (mut timing, mut at, mut logits) = (before.fork().expect("a fork"), 0, Vec::new());
            for size in sizes.iter().copied().cycle() {
                logits = timing.step(&ids[at..ids.len().min(at + size)]).expect("a step");
                at += size;
                if at >= ids.len() {
                    break;
                }
            }
            assert_eq!(timing.position(), end - 4 + ids.len());
            logits.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        let whole = fed(&[8]);
        assert_eq!(whole.len(), VOCAB as usize);
        assert!(fed(&[1]) == whole, "one by one, around {end} tokens");
        assert!(fed(&[3, 5]) == whole, "in parts, around {end} tokens");
        // a token of the middle counts: the comparison would notice another context
        let mut other = before.fork().expect("a fork");
        other.step(&ids[1..]).expect("a step");
        assert_ne!(whole, other.step(&ids[..1]).expect("a step").into_iter().map(f32::to_bits).collect::<Vec<_>>());
    }
}

/// Pitfalls 51, 60, 61, 62: behind 2^16 tokens, and behind 2^16 entries.
#[test]
fn tokens_at_once_and_one_by_one_have_the_same_logits_at_the_ends_of_number_ranges() {
    check_around(&ENDS[..2]);
}

/// Pitfalls 51, 60, 61, 62: up to position 1,048,575.
#[test]
#[ignore = "minutes on few cores: part of .ci/full and .ci/gpu"]
fn tokens_at_once_and_one_by_one_have_the_same_logits_at_the_end_of_the_longest_context() {
    check_around(&ENDS[2..]);
}

/// Pitfall 65: index scores are held for a few queries at a time, not for the chunk: 64 rows of 65,536 would take 17 MB.
#[test]
fn a_chunk_behind_a_long_context_takes_no_scores_for_all_of_its_rows() {
    let test = "a_chunk_behind_a_long_context_takes_no_scores_for_all_of_its_rows";
    if subject::device().is_some() || !cfg!(target_os = "linux") {
        shared::say(&format!("SKIPPED {test}: memory of the process is measured, on Linux"));
        return;
    }
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let model = subject::with_context(1 << 20);
    let engine = engine(model.path());
    let mut taken = [1 << 13, 1 << 18].map(|end| {
        let mut timing = behind(&engine, end);
        // what every chunk takes
        timing.step(&tokens(6000, 64)).expect("a step");
        std::fs::write("/proc/self/clear_refs", "5").expect("the peak begins anew");
        let before = peak();
        timing.step(&tokens(7000, 64)).expect("a step");
        peak() - before
    });
    shared::say(&format!("{test}: {} and {} KiB", taken[0], taken[1]));
    taken[1] -= taken[0];
    assert!(taken[1] < 10 << 10, "{} KiB more behind 262,144 tokens", taken[1]);
}

/// The most memory of this process since it was last reset, in KiB.
fn peak() -> i64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("a status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}
