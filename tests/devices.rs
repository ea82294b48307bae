//! A device against the CPU on a model: half layer by half layer, which decides, and end to end. Needs a GPU:
//! `DSV4_TEST_DEVICE=cuda` runs it, `DSV4_TEST_MODEL` chooses the model (else the trained one of this repository and its
//! held-out passages; a model without passages gets random tokens).
#![forbid(unsafe_code)]
#![expect(clippy::print_stderr, reason = "the measured figures belong in the test log")]

mod common;

use common::long::{self, ENDS};
use common::metrics::{argmax, logsumexp};
use common::{shared, subject};
use dsv4::research;
use dsv4::{DeviceChoice, Engine, EngineOptions, Markup, Model, Numerics};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Tokens that go through the model at once.
const CHUNK: usize = 512;
/// Tokens of a model without passages.
const RANDOM: usize = 600;
fn folder() -> PathBuf {
    std::env::var_os("DSV4_TEST_MODEL")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models/tiny-v4"), PathBuf::from)
}

/// The model on the CPU and on the device.
fn pair(test: &str, numerics: Numerics) -> Option<[Arc<Engine>; 2]> {
    let Some(device) = subject::device() else {
        shared::say(&format!("SKIPPED {test}: no device (set DSV4_TEST_DEVICE)"));
        return None;
    };
    let model = Model::open(folder()).expect("the model opens");
    let options = |device, cache_bytes| EngineOptions {
        numerics,
        device,
        cache_bytes,
        prefill_chunk: CHUNK,
        ..EngineOptions::default()
    };
    let engine = |options| Engine::new(&model, options).expect("an engine");
    Some([engine(options(DeviceChoice::Cpu, 0)), engine(options(device, 2 << 30))])
}

/// The held-out passages as tokens, or random ones.
fn texts(model: &Model) -> Vec<Vec<u32>> {
    let passages = folder().join("passages");
    if !passages.is_dir() {
        let vocab = model.config().vocab_size as u64;
        let next = |i: u64| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20) % vocab;
        return vec![(1..=RANDOM as u64).map(|i| next(i) as u32).collect()];
    }
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(passages).expect("passages").map(|entry| entry.expect("a file").path()).collect();
    files.push(folder().join("eval.txt"));
    files.sort();
    let tokenizer = model.tokenizer().expect("a tokenizer");
    let text = |file: &PathBuf| {
        let text = std::fs::read_to_string(file).expect("a passage");
        let mut tokens = vec![model.config().bos_token_id];
        tokens.extend(tokenizer.encode(&text, Markup::Text).expect("it is encoded"));
        tokens.truncate(4001);
        tokens
    };
    files.iter().map(text).collect()
}

fn check_half_layers(test: &str, numerics: Numerics) {
    let Some(device) = subject::device() else {
        return shared::say(&format!("SKIPPED {test}: no device (set DSV4_TEST_DEVICE)"));
    };
    let model = Model::open(folder()).expect("the model opens");
    let halves = research::compare_halves(&model, device, numerics, &texts(&model)).expect("both compute");
    halves.layers.iter().for_each(|half| eprintln!("{numerics} {half:?}"));
    eprintln!("{numerics}: {} of {} routes differ", halves.other_routes, halves.routes);
    let failed: Vec<_> = halves.layers.iter().filter(|half| !half.passed()).collect();
    assert!(halves.passed(), "half layers beyond the rule: {failed:#?}");
}

#[test]
fn half_layers_in_reference_numerics_are_those_of_the_cpu() {
    check_half_layers("half layers, reference", Numerics::Reference);
}

#[test]
fn half_layers_in_served_numerics_are_those_of_the_cpu() {
    check_half_layers("half layers, served", Numerics::Served);
}

/// Divergence in nats of one row of logits from another.
fn divergence_of(want: &[f32], got: &[f32]) -> f64 {
    let (p, q) = (logsumexp(want), logsumexp(got));
    let terms = want.iter().zip(got).map(|(&a, &b)| {
        let (ln_p, ln_q) = (f64::from(a) - p, f64::from(b) - q);
        ln_p.exp() * (ln_p - ln_q)
    });
    terms.sum()
}

/// Mean divergence in nats and the losses, over all passages.
fn check_end_to_end(test: &str, numerics: Numerics, most: f64) {
    let Some([cpu, device]) = pair(test, numerics) else { return };
    let (mut divergence, mut losses, mut count, mut other_choices) = (0.0, [0.0, 0.0], 0, 0);
    for text in texts(cpu.model()) {
        let [want, got, again] = [&cpu, &device, &device].map(|engine| subject::all_logits(engine, &text));
        assert!(got == again, "two runs on the device differ");
        for (position, (want, got)) in want.iter().zip(&got).enumerate() {
            let (p, q) = (logsumexp(want), logsumexp(got));
            divergence += divergence_of(want, got);
            other_choices += usize::from(argmax(want) != argmax(got));
            count += 1;
            if let Some(&next) = text.get(position + 1) {
                losses[0] += p - f64::from(want[next as usize]);
                losses[1] += q - f64::from(got[next as usize]);
            }
        }
    }
    let [cpu_loss, device_loss] = losses.map(|loss| loss / count as f64);
    let perplexity = (device_loss - cpu_loss).exp() - 1.0;
    let divergence = divergence / count as f64;
    eprintln!(
        "{numerics}, {count} tokens: mean divergence {divergence:.2e} nats, perplexity {:.4} on the CPU, {:+.3} % on the \
         device, {other_choices} other likeliest tokens",
        cpu_loss.exp(),
        100.0 * perplexity
    );
    assert!(divergence <= most, "{numerics}: {divergence} nats");
    assert!(perplexity.abs() <= 3e-3, "{numerics}: perplexity {perplexity:+}");
}

#[test]
fn reference_logits_are_close_to_those_of_the_cpu() {
    check_end_to_end("end to end, reference", Numerics::Reference, 2e-2);
}

#[test]
fn kvquant_logits_are_close_to_those_of_the_cpu() {
    check_end_to_end("end to end, kvquant", Numerics::Kvquant, 2e-3);
}

/// Pitfall 59.
#[test]
fn a_prompt_alone_has_the_logits_that_it_has_among_eight() {
    let Some([_, device]) = pair("alone and among eight", Numerics::Reference) else { return };
    let text = texts(device.model()).swap_remove(0);
    let lengths = [60, 9, 17, 33, 61, 128, 90, 15];
    let prompts: Vec<&[u32]> = lengths.iter().enumerate().map(|(i, &n)| &text[i * 17..i * 17 + n]).collect();
    let together = research::batch(&device, &prompts).expect("the batch runs");
    let mut different = 0;
    for (prompt, together) in prompts.iter().zip(&together) {
        let alone = research::batch(&device, &[prompt]).expect("the batch runs").swap_remove(0);
        different += alone.iter().zip(together).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    }
    let all = together.iter().map(Vec::len).sum::<usize>();
    eprintln!("{different} of {all} logits differ between a prompt alone and among eight");
    assert_eq!(different, 0, "of {all} logits");
}

/// Pitfalls 50, 51: around 2^16 tokens and 2^16 entries, and at the end of a million tokens.
fn check_far_out(test: &str, numerics: Numerics, most: f64) {
    let Some(device) = subject::device() else {
        shared::say(&format!("SKIPPED {test}: no device (set DSV4_TEST_DEVICE)"));
        return;
    };
    let folder = subject::with_context(1 << 20);
    let model = Model::open(folder.path()).expect("the model opens");
    let engines = [(DeviceChoice::Cpu, 0), (device, 1 << 30)].map(|(device, cache_bytes)| {
        let options = EngineOptions { numerics, device, cache_bytes, prefill_chunk: 64, ..EngineOptions::default() };
        Engine::new(&model, options).expect("an engine")
    });
    for end in ENDS {
        let [want, got] = engines.each_ref().map(|engine| {
            let mut timing = long::behind(engine, end);
            let ids = long::tokens(4000, 256);
            // up to the last four tokens, then those one by one: the end lies behind them, and others follow it
            let (chunks, rest) = ids.split_at(252);
            let mut rows: Vec<Vec<f32>> = chunks.chunks(12).map(|ids| timing.step(ids).expect("a step")).collect();
            rows.extend(rest.iter().map(|&id| timing.step(&[id]).expect("a step")));
            if end < 1 << 20 {
                rows.extend(long::tokens(5000, 8).into_iter().map(|id| timing.step(&[id]).expect("a step")));
            }
            rows
        });
        let mut divergences: Vec<f64> = want.iter().zip(&got).map(|(want, got)| divergence_of(want, got)).collect();
        divergences.sort_by(f64::total_cmp);
        let median = divergences[divergences.len() / 2];
        eprintln!(
            "{numerics}, up to {end} tokens: median divergence {median:.2e} nats, largest {:.2e}",
            divergences[divergences.len() - 1]
        );
        // a near tie among entries takes all copies of one or of the other, so single rows may be far off
        assert!(median <= most, "{numerics}, {end} tokens: {median} nats");
    }
}

#[test]
fn reference_logits_are_close_to_those_of_the_cpu_up_to_a_million_tokens() {
    check_far_out("far out, reference", Numerics::Reference, 2e-2);
}

#[test]
fn kvquant_logits_are_close_to_those_of_the_cpu_up_to_a_million_tokens() {
    check_far_out("far out, kvquant", Numerics::Kvquant, 2e-3);
}

/// Pitfall 103: a real driver that hides its devices, in a process of its own.
#[test]
fn without_visible_devices_there_is_a_reason_and_the_cpu_works() {
    let test = "without_visible_devices_there_is_a_reason_and_the_cpu_works";
    if subject::device().is_none() {
        shared::say(&format!("SKIPPED {test}: no device (set DSV4_TEST_DEVICE)"));
        return;
    }
    if std::env::var("CUDA_VISIBLE_DEVICES").is_ok_and(|devices| devices.is_empty()) {
        let error = dsv4::backend::cuda_devices().expect_err("no device is visible");
        assert_eq!(error.kind(), dsv4::ErrorKind::Unavailable);
        assert!(error.message().contains("device"), "{error}");
        let model = Model::open(folder()).expect("the model opens");
        let engine = |device| Engine::new(&model, EngineOptions { device, ..EngineOptions::default() });
        assert!(engine(DeviceChoice::Cuda(0)).is_err());
        engine(DeviceChoice::Cpu).expect("the CPU works all the same");
        return;
    }
    let mut child = std::process::Command::new(std::env::current_exe().expect("this test"));
    let output = child.args(["--exact", test]).env("CUDA_VISIBLE_DEVICES", "").output().expect("it runs");
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}
