//! Logits depend on the tokens alone: bit-identical whatever the prefill chunks, the thread count, and what else the
//! engine has done or does meanwhile.
#![forbid(unsafe_code)]

mod common;

use common::golden::{self, Golden};
use common::subject;
use dsv4::cache::CheckpointPolicy;
use dsv4::research::{self, Lab, Probe};
use dsv4::{Engine, EngineOptions, Model, Numerics};
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

/// A prompt of each length, at once and up to its last token and then that one, ends as the row of a longer prompt does;
/// `goldens.rs` compares those rows with an oracle's.
fn check_lengths(lengths: impl Iterator<Item = usize>) {
    let golden = nano("nano-flash");
    let tokens = tokens(&golden, LENGTH);
    let options = EngineOptions { checkpoints: CheckpointPolicy::None, ..options(Numerics::Reference, 2, LENGTH) };
    let engine = subject::engine_with(&golden.runnable(), options);
    let rows = subject::all_logits(&engine, &tokens);
    for n in lengths {
        assert!(subject::last_logits(&engine, &tokens[..n]) == rows[n - 1], "a prompt of {n} tokens");
        if n > 1 {
            let mut session = subject::session(&engine, n);
            session.feed(&tokens[..n - 1]).expect("fed");
            session.feed(&tokens[n - 1..n]).expect("fed");
            assert!(subject::logits(&session) == rows[n - 1], "{} tokens and one", n - 1);
        }
    }
}

/// Pitfalls 55, 61, 64: every short length, and around the groups of 128 all remainders by 4, through layers of all kinds.
#[test]
fn a_prompt_of_any_length_ends_as_a_longer_one_passes_there() {
    check_lengths((1..=66).chain(125..=131).chain(253..=257));
}

/// Pitfalls 55, 61.
#[test]
#[ignore = "minutes: every length up to 300; part of .ci/full"]
fn a_prompt_of_every_length_ends_as_a_longer_one_passes_there() {
    check_lengths(1..=LENGTH);
}

/// Pitfalls 60, 62: wherever a prompt is resumed, the entries and keys of each layer, rotated at their positions, are those
/// of one call, and each token chooses the same entries.
#[test]
fn a_prompt_resumed_anywhere_has_the_entries_and_choices_of_one_call() {
    let golden = nano("nano-flash");
    let ids = tokens(&golden, LENGTH);
    let options = EngineOptions { batch_invariant: false, ..subject::on_device(options(Numerics::Reference, 2, 512)) };
    let engine = Engine::new(&Model::open(golden.runnable()).expect("a model"), options).expect("an engine");
    let layers = engine.model().config().num_hidden_layers;
    let embedded = Lab::new(&engine).expect("a lab").embed(&ids).expect("the embedding");
    let width = embedded.len() / LENGTH;
    let run = |layer: usize, sizes: &[usize]| {
        let (mut lab, mut at, mut chosen) = (Lab::new(&engine).expect("a lab"), 0, Vec::new());
        for &size in sizes.iter().chain(std::iter::repeat(sizes.last().expect("sizes"))) {
            let end = LENGTH.min(at + size);
            let mut probe = Probe::on();
            lab.run_layer(layer, &embedded[at * width..end * width], &ids[at..end], &mut probe).expect("it runs");
            if let Some(record) = probe.get(layer, "selected").filter(|record| !record.values.is_empty()) {
                for row in record.values.chunks(record.values.len() / record.shape[0]) {
                    let mut row: Vec<i64> = row.iter().map(|&id| id as i64).filter(|&id| id >= 0).collect();
                    row.sort_unstable();
                    chosen.push(row);
                }
            }
            at = end;
            if at == LENGTH {
                break;
            }
        }
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        // rows from before the first entry may have no record
        chosen.retain(|row| !row.is_empty());
        (bits(lab.entries(layer).expect("entries")), bits(lab.index_keys(layer).expect("keys")), chosen)
    };
    let mut choices = 0;
    for layer in 0..layers {
        let whole = run(layer, &[LENGTH]);
        choices += whole.2.iter().filter(|row| row.len() == engine.model().config().index_topk).count();
        for sizes in [&[1][..], &[1, LENGTH], &[4, LENGTH], &[100, LENGTH], &[128, LENGTH], &[129, LENGTH], &[3, 5, 7]]
        {
            assert!(run(layer, sizes) == whole, "layer {layer}: parts of {sizes:?}");
        }
    }
    assert!(choices > 400, "{choices} real choices");
}

/// Pitfall 59: what else is in the batch does not matter, were it the same.
#[test]
fn a_prompt_has_the_logits_that_it_has_among_eight_of_itself() {
    let golden = nano("nano-flash");
    // as users have it on a device, with either order of attention's sums
    let options = EngineOptions { batch_invariant: false, ..subject::on_device(options(Numerics::Reference, 2, 512)) };
    let engine = Engine::new(&Model::open(golden.runnable()).expect("a model"), options).expect("an engine");
    for length in [1, 7, 41, 60] {
        let prompt = tokens(&golden, length);
        let alone = research::batch(&engine, &[&prompt]).expect("the batch runs").swap_remove(0);
        for logits in research::batch(&engine, &[&prompt[..]; 8]).expect("the batch runs") {
            assert!(logits == alone, "{length} tokens");
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
    for numerics in subject::numerics(&Numerics::ALL) {
        let engine = subject::engine_with(&folder, options(numerics, 2, 512));
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
    for numerics in subject::numerics(&[Numerics::Reference, Numerics::Exact]) {
        let engine = || subject::engine_with(&folder, options(numerics, 2, 512));
        let fresh = (1..=9).map(|n| subject::last_logits(&engine(), &tokens[..n]));
        let fresh: Vec<Vec<f32>> = fresh.collect();
        let used = engine();
        for (n, fresh) in fresh.iter().enumerate() {
            subject::last_logits(&used, &tokens);
            assert_eq!(&subject::last_logits(&used, &tokens[..n + 1]), fresh, "{numerics}: prompt of {} tokens", n + 1);
        }
    }
}
