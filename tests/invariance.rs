//! Logits depend on the tokens alone: bit-identical whatever the prefill chunks, the thread count, and what else the
//! engine has done or does meanwhile.
#![forbid(unsafe_code)]

mod common;

use common::golden::{self, Golden};
use common::subject;
use dsv4::{EngineOptions, Numerics};
use proptest::prelude::*;
use std::path::{Path, PathBuf};

/// More than four windows of the nano models and two entries of ratio 128.
const LENGTH: usize = 300;

fn nano(name: &str) -> Golden {
    Golden::open(&golden::committed().join(name))
}

/// Tokens beyond those of the golden: its sequence again and again.
fn tokens(golden: &Golden, n: usize) -> Vec<u32> {
    golden.tokens("A").into_iter().cycle().take(n).collect()
}

/// Logits of all positions as bits, fed in calls of the given sizes (the last one repeats).
fn fed(folder: &Path, options: EngineOptions, tokens: &[u32], sizes: &[usize]) -> Vec<u32> {
    let engine = subject::engine_with(folder, options);
    let mut session = subject::session(&engine, tokens.len());
    let (mut bits, mut at, mut sizes) = (Vec::new(), 0, sizes.iter());
    let mut size = 1;
    while at < tokens.len() {
        size = sizes.next().map_or(size, |&s| s);
        let end = tokens.len().min(at + size);
        session
            .feed_all(&tokens[at..end], &mut |_, logits| {
                bits.extend(logits.iter().map(|x| x.to_bits()));
                Ok(())
            })
            .expect("the tokens are fed");
        at = end;
    }
    bits
}

fn options(numerics: Numerics, threads: usize, prefill_chunk: usize) -> EngineOptions {
    EngineOptions { numerics, threads, prefill_chunk, ..EngineOptions::default() }
}

/// The engine's own chunks, in every mode.
fn check_chunks(name: &str, numerics: Numerics) {
    let golden = nano(name);
    let (folder, tokens) = (golden.runnable(), tokens(&golden, LENGTH));
    let whole = fed(&folder, options(numerics, 1, LENGTH), &tokens, &[LENGTH]);
    assert!(whole.len() > LENGTH * 100, "logits of every position");
    for chunk in [1, 2, 3, 127, 128, 129, 256, 512] {
        let cut = fed(&folder, options(numerics, 2, chunk), &tokens, &[LENGTH]);
        assert!(cut == whole, "{name} {numerics}: chunks of {chunk} differ from the whole");
    }
}

/// Pitfall 36, as those below.
#[test]
fn chunks_of_any_size_give_the_same_logits_in_reference() {
    check_chunks("nano-flash", Numerics::Reference);
    check_chunks("nano-pro", Numerics::Reference);
}

#[test]
fn chunks_of_any_size_give_the_same_logits_in_served() {
    check_chunks("nano-flash", Numerics::Served);
}

#[test]
fn chunks_of_any_size_give_the_same_logits_in_kvquant() {
    check_chunks("nano-flash", Numerics::Kvquant);
}

#[test]
fn chunks_of_any_size_give_the_same_logits_in_exact() {
    check_chunks("nano-flash", Numerics::Exact);
    check_chunks("nano-base", Numerics::Exact);
}

#[test]
fn thread_counts_give_the_same_logits() {
    for name in ["nano-flash", "nano-pro", "nano-base", "nano-dspark"] {
        let golden = nano(name);
        let (folder, tokens) = (golden.runnable(), tokens(&golden, 200));
        for numerics in Numerics::ALL {
            let [one, two, three] = [1, 2, 3].map(|n| fed(&folder, options(numerics, n, 64), &tokens, &[150, 1]));
            assert!(one == two && one == three, "{name} {numerics}: thread counts differ");
        }
    }
}

/// The trained model: heads of 512, real selections, prompts longer than its window.
#[test]
fn the_trained_model_is_invariant_too() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("examples/models/tiny-v4");
    let tokens = tokens(&nano("tiny-v4"), 384);
    for numerics in [Numerics::Reference, Numerics::Exact] {
        let whole = fed(&folder, options(numerics, 1, 512), &tokens, &[512]);
        for (threads, chunk, sizes) in [(2, 128, [512, 512]), (2, 129, [77, 64]), (3, 64, [383, 1])] {
            let cut = fed(&folder, options(numerics, threads, chunk), &tokens, &sizes);
            assert!(cut == whole, "{numerics}: {threads} threads, chunks of {chunk}, calls of {sizes:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_splits_give_the_same_logits(
        sizes in prop::collection::vec(prop_oneof![Just(1_usize), 2..9_usize, 60..70_usize, 100..300_usize], 1..12),
        chunk in prop_oneof![Just(1_usize), 2..140_usize],
        threads in 1..4_usize,
        length in 1..260_usize,
        mode in 0..4_usize,
        model in 0..3_usize,
    ) {
        let golden = nano(["nano-flash", "nano-pro", "nano-base"][model]);
        let (folder, tokens) = (golden.runnable(), tokens(&golden, length));
        let numerics = Numerics::ALL[mode];
        let whole = fed(&folder, options(numerics, 1, length), &tokens, &[length]);
        let cut = fed(&folder, options(numerics, threads, chunk), &tokens, &sizes);
        prop_assert!(cut == whole);
    }
}

#[test]
#[ignore = "minutes: many random splits of long prompts; part of .ci/full"]
fn many_random_splits_of_long_prompts_give_the_same_logits() {
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 150,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let splits = (prop::collection::vec(1..400_usize, 1..20), 1..300_usize, 1..4_usize, 1..900_usize, 0..4_usize);
    let golden = nano("nano-flash");
    let folder = golden.runnable();
    runner
        .run(&splits, |(sizes, chunk, threads, length, mode)| {
            let (numerics, tokens) = (Numerics::ALL[mode], tokens(&golden, length));
            let whole = fed(&folder, options(numerics, 1, length), &tokens, &[length]);
            prop_assert!(fed(&folder, options(numerics, threads, chunk), &tokens, &sizes) == whole);
            Ok(())
        })
        .expect("every split gives the same logits");
}

#[test]
fn interleaved_sessions_do_not_touch_each_other() {
    let golden = nano("nano-flash");
    let folder = golden.runnable();
    let a = tokens(&golden, 180);
    let b: Vec<u32> = a.iter().rev().copied().collect();
    for numerics in Numerics::ALL {
        let engine = subject::engine(&folder, numerics);
        let (mut first, mut second) = (subject::session(&engine, 180), subject::session(&engine, 180));
        for (a, b) in a.chunks(7).zip(b.chunks(7)) {
            first.feed(a).expect("fed");
            second.feed(b).expect("fed");
        }
        assert_eq!(subject::logits(&first), subject::last_logits(&engine, &a), "{numerics}");
        assert_eq!(subject::logits(&second), subject::last_logits(&engine, &b), "{numerics}");
        assert_ne!(subject::logits(&first), subject::logits(&second), "{numerics}: other tokens, other logits");
    }
}

/// The official code never resets its compressor state, so that a short prompt inherits the last one's tail.
#[test]
fn a_session_starts_clean_after_another() {
    let golden = nano("nano-flash");
    let folder = golden.runnable();
    let tokens = tokens(&golden, 131);
    for numerics in [Numerics::Reference, Numerics::Exact] {
        let fresh = (1..=9).map(|n| subject::last_logits(&subject::engine(&folder, numerics), &tokens[..n]));
        let fresh: Vec<Vec<f32>> = fresh.collect();
        let used = subject::engine(&folder, numerics);
        for (n, fresh) in fresh.iter().enumerate() {
            subject::last_logits(&used, &tokens);
            assert_eq!(&subject::last_logits(&used, &tokens[..n + 1]), fresh, "{numerics}: prompt of {} tokens", n + 1);
        }
    }
}
