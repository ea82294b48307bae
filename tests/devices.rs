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
use dsv4::{DeviceChoice, Engine, EngineOptions, GenerateOptions, Markup, Model, Numerics};
use dsv4::{Sampler, SamplerOptions, Session};
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
    compare(&model, device, numerics, None, &texts(&model));
}

fn compare(
    model: &Arc<Model>,
    device: DeviceChoice,
    numerics: Numerics,
    gpu_experts: Option<usize>,
    texts: &[Vec<u32>],
) {
    let options = EngineOptions { device, numerics, gpu_experts, ..EngineOptions::default() };
    let halves = research::compare_halves(model, &options, texts).expect("both compute");
    halves.layers.iter().for_each(|half| eprintln!("{numerics} {half:?}"));
    eprintln!("{numerics}: {} of {} routes differ", halves.other_routes, halves.routes);
    let failed: Vec<_> = halves.layers.iter().filter(|half| !half.passed()).collect();
    assert!(halves.passed(), "half layers beyond the rule: {failed:#?}");
}

/// Wherever the experts are: none of them on the device, a few, half, all but one.
#[test]
fn half_layers_are_within_the_rule_with_any_number_of_experts_on_the_device() {
    let Some(device) = subject::device() else {
        return shared::say("SKIPPED half layers with experts on the host: no device (set DSV4_TEST_DEVICE)");
    };
    let model = Model::open(folder()).expect("the model opens");
    let (text, all) = (vec![texts(&model)[0][..RANDOM].to_vec()], model.config().n_routed_experts);
    for experts in [0, 1, 2, all / 2, all - 1] {
        compare(&model, device, Numerics::Reference, Some(experts), &text);
    }
}

/// A step on the device waits for the host in each layer; prompts, single tokens and several sequences.
#[test]
fn a_text_has_the_same_logits_up_to_rounding_wherever_the_experts_are() {
    let Some(device) = subject::device() else {
        return shared::say("SKIPPED logits with experts on the host: no device (set DSV4_TEST_DEVICE)");
    };
    let model = Model::open(folder()).expect("the model opens");
    let (text, all) = (texts(&model)[0][..RANDOM].to_vec(), model.config().n_routed_experts);
    let logits = |gpu_experts| {
        let numerics = Numerics::Kvquant;
        let options = EngineOptions { numerics, device, gpu_experts, cache_bytes: 1 << 30, ..EngineOptions::default() };
        let engine = Engine::new(&model, options).expect("an engine");
        let mut session = Session::new(&engine, dsv4::SessionOptions::default()).expect("a session");
        session.feed(&text[..text.len() - 40]).expect("a prompt");
        let mut all = Vec::new();
        for token in &text[text.len() - 40..] {
            session.feed(&[*token]).expect("a token");
            all.push(session.logits().expect("logits are kept").to_vec());
        }
        all
    };
    let whole = logits(None);
    for experts in [0, 1, all / 2] {
        let apart = logits(Some(experts));
        let mut sum = 0.0;
        for (one, other) in whole.iter().zip(&apart) {
            let (a, b) = (logsumexp(one), logsumexp(other));
            let terms = one.iter().zip(other).map(|(&x, &y)| {
                let (x, y) = (f64::from(x) - a, f64::from(y) - b);
                x.exp() * (x - y)
            });
            sum += terms.sum::<f64>();
        }
        let divergence = sum / whole.len() as f64;
        eprintln!("{experts} of {all} experts on the device: mean divergence {divergence:.2e} nats");
        assert!(divergence < 5e-3, "{experts} of {all} experts: {divergence} nats");
    }
}

/// Bytes in which the experts of a token have room, each with the pages that its tensors share with others.
fn bytes_of_a_token(model: &Model) -> u64 {
    let expert = &model.weights().layers[0].ffn.experts[0];
    let bytes: usize = [&expert.w1, &expert.w2, &expert.w3].map(|matrix| matrix.byte_len() + 4 * 4096).iter().sum();
    (bytes * model.config().num_experts_per_tok) as u64
}

/// The first step of a shape is launched kernel by kernel and answered in between; the second becomes a graph, in which the
/// device waits for the host, and later ones are that graph.
#[test]
fn a_graph_that_waits_for_the_host_has_the_bits_of_steps_that_are_answered_in_between() {
    let Some(device) = subject::device() else {
        return shared::say("SKIPPED graphs with experts on the host: no device (set DSV4_TEST_DEVICE)");
    };
    let model = Model::open(folder()).expect("the model opens");
    let (text, all) = (texts(&model)[0][..RANDOM].to_vec(), model.config().n_routed_experts);
    for gpu_experts in [0, 1, all / 2] {
        let options =
            EngineOptions { device, gpu_experts: Some(gpu_experts), cache_bytes: 1 << 30, ..EngineOptions::default() };
        let round = |engine: &Arc<Engine>| {
            let mut session = fed(engine, &text[..40]);
            text[40..44]
                .iter()
                .map(|&token| {
                    session.feed(&[token]).expect("a token");
                    subject::logits(&session).to_vec()
                })
                .collect::<Vec<_>>()
        };
        let engine = Engine::new(&model, options.clone()).expect("an engine");
        let first = round(&engine);
        assert!(first.iter().flatten().all(|logit| logit.is_finite()));
        // of the first round's tokens only the first one's step was launched plainly
        assert!((0..3).all(|_| round(&engine) == first), "{gpu_experts} of {all} experts on the device");
        let figures = research::HostFigures::of(&engine).expect("the host has experts");
        assert!(figures.layers > 0 && figures.experts > 0, "{figures:?}");

        // the same with room for the host's experts of a token only, which are read when they are needed
        let tight = Engine::new(&model, EngineOptions { host_bytes: bytes_of_a_token(&model), ..options });
        let tight = tight.expect("an engine");
        assert!((0..3).all(|_| round(&tight) == first), "{gpu_experts} of {all} experts on the device, others read");
        let read = tight.metrics().host_experts;
        assert!(read.misses > 0 && read.read_bytes > 0, "{read:?}");
    }
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
    let lengths = [60, 9, 17, 200, 61, 128, 5, 15];
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

/// A sequence of one new token has one order of sums, whatever is beside it: a prompt, or more sequences than attention
/// takes at once.
#[test]
fn a_decoding_row_has_its_logits_alone_beside_a_prompt_and_among_eighty() {
    let Some([_, device]) = pair("decoding rows beside others", Numerics::Reference) else { return };
    let text = texts(device.model()).swap_remove(0);
    let decoding: Vec<&[u32]> = (0..80).map(|i| &text[i * 3..i * 3 + 20 + i * 3]).collect();
    let prompt = &text[7..307];
    let beside = |texts: &[&[u32]], prompt: &[u32]| research::beside(&device, texts, prompt).expect("the step runs");
    let alone: Vec<Vec<f32>> = decoding.iter().map(|text| beside(&[text], &[]).swap_remove(0)).collect();
    let prompt_alone = beside(&[], prompt).swap_remove(0);
    let check = |what: &str, got: &[Vec<f32>], want: &[Vec<f32>]| {
        let different =
            |(a, b): (&Vec<f32>, &Vec<f32>)| a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        let count: usize = got.iter().zip(want).map(different).sum();
        eprintln!("{count} of {} logits of decoding rows differ {what}", got.iter().map(Vec::len).sum::<usize>());
        assert_eq!((count, got.len()), (0, want.len()), "{what}");
    };
    check("among eighty", &beside(&decoding, &[]), &alone);
    for count in [1, 2, 9, 80] {
        let mut got = beside(&decoding[..count], prompt);
        check(
            &format!("beside {count}: the prompt's own"),
            &[got.pop().expect("a row")],
            std::slice::from_ref(&prompt_alone),
        );
        check(&format!("beside a prompt, {count} of them"), &got, &alone[..count]);
    }
}

/// Settings of every kind that a device can follow.
fn settings() -> Vec<(&'static str, SamplerOptions)> {
    let plain = SamplerOptions { seed: 11, ..SamplerOptions::default() };
    let penalties = SamplerOptions {
        repetition_penalty: 1.2,
        presence_penalty: 0.2,
        frequency_penalty: 0.1,
        penalty_window: 50,
        ..plain.clone()
    };
    let bias: Vec<(u32, f32)> = (0..40).map(|id| (id * 7, if id % 3 == 0 { f32::NEG_INFINITY } else { 1.5 })).collect();
    vec![
        ("greedy", SamplerOptions::greedy()),
        ("plain", plain.clone()),
        ("temperature", SamplerOptions { temperature: 0.7, ..plain.clone() }),
        ("top-k", SamplerOptions { top_k: 20, ..plain.clone() }),
        ("top-p", SamplerOptions { top_p: 0.9, ..plain.clone() }),
        ("min-p", SamplerOptions { min_p: 0.1, temperature: 1.5, ..plain.clone() }),
        ("penalties", penalties.clone()),
        ("greedy with penalties", SamplerOptions { greedy: true, ..penalties.clone() }),
        ("bias", SamplerOptions { logit_bias: bias.clone(), ..plain }),
        (
            "all",
            SamplerOptions { temperature: 1.3, top_k: 50, top_p: 0.95, min_p: 0.01, logit_bias: bias, ..penalties },
        ),
    ]
}

/// Goes on from the session's logits: `count` tokens, chosen wherever the engine does that.
fn generated(session: &mut Session, sampler: &mut Sampler, count: u64) -> Vec<u32> {
    let options = GenerateOptions { max_tokens: Some(count), ignore_eos: true, ..GenerateOptions::default() };
    let pieces = session.generate(sampler, options).expect("a generation");
    pieces.map(|piece| piece.expect("a token").token).collect()
}

/// A session on `engine` that was fed `prompt`.
fn fed(engine: &Arc<Engine>, prompt: &[u32]) -> Session {
    let mut session = subject::session(engine, 2000);
    session.feed(prompt).expect("it is fed");
    session
}

#[test]
fn tokens_chosen_on_the_device_are_those_that_the_host_chooses_from_the_same_logits() {
    let Some([_, device]) = pair("tokens chosen on the device", Numerics::Reference) else { return };
    let text = texts(device.model()).swap_remove(0);
    for (name, options) in settings() {
        let before = research::choices(&device);
        let mut session = fed(&device, &text[..150]);
        let tokens = generated(&mut session, &mut Sampler::new(options.clone()).expect("a sampler"), 120);
        let chosen = research::choices(&device) - before;

        // fed by the caller, a session's logits come to the host
        let (mut host, mut other) = (fed(&device, &text[..150]), 0);
        let mut sampler = Sampler::new(options).expect("a sampler");
        for (i, &token) in tokens.iter().enumerate() {
            other += usize::from(sampler.sample(subject::logits(&host)).expect("a token") != token);
            sampler.accept(token).expect("it is counted");
            if i + 1 < tokens.len() {
                host.feed(&[token]).expect("it is fed");
            }
        }
        eprintln!("{name}: {chosen} of {} tokens chosen on the device, {other} others than the host's", tokens.len());
        assert_eq!(other, 0, "{name}");
        assert_eq!(chosen as usize, tokens.len() - 1, "{name}: the first comes from the prompt's logits");
        // the last token is in neither session; nobody had asked for these logits
        assert!(subject::logits(&session) == subject::logits(&host), "{name}: logits that stayed on the device");
        generated(&mut session, &mut Sampler::new(SamplerOptions::greedy()).expect("a sampler"), 2);
        assert_eq!(
            research::choices(&device) - before,
            chosen,
            "the host chooses what it feeds, and once it was asked"
        );
    }
}

#[test]
fn sessions_that_generate_together_choose_what_each_chooses_alone() {
    let Some([_, device]) = pair("sessions that generate together", Numerics::Reference) else { return };
    let text = texts(device.model()).swap_remove(0);
    // prompts apart, so that the sessions meet where each has one new token
    let started = |i: usize| fed(&device, &text[i * 10..i * 10 + 100 + 7 * i]);
    let run = |i: usize, options: &SamplerOptions, mut session: Session| {
        let mut sampler = Sampler::new(options.clone()).expect("a sampler");
        let mut tokens = generated(&mut session, &mut sampler, 20);
        // one in three looks at all logits, which come along then
        for _ in 0..20 {
            session.feed(&tokens[tokens.len() - 1..]).expect("it is fed");
            if i.is_multiple_of(3) {
                assert!(subject::logits(&session).iter().all(|logit| logit.is_finite()));
            }
            tokens.extend(generated(&mut session, &mut sampler, 2));
        }
        let fork = session.fork().expect("a fork");
        assert!(subject::logits(&fork) == subject::logits(&session), "a fork's logits");
        (tokens, subject::logits(&fork).to_vec())
    };
    let settings = settings();
    let alone: Vec<_> = settings.iter().enumerate().map(|(i, (_, options))| run(i, options, started(i))).collect();
    let sessions: Vec<Session> = (0..settings.len()).map(started).collect();
    let before = research::choices(&device);
    let together: Vec<_> = std::thread::scope(|scope| {
        let run = &run;
        let all = settings.iter().zip(sessions).enumerate();
        let threads: Vec<_> =
            all.map(|(i, ((_, options), session))| scope.spawn(move || run(i, options, session))).collect();
        threads.into_iter().map(|thread| thread.join().expect("it ends")).collect()
    });
    let chosen = research::choices(&device) - before;
    eprintln!("{chosen} tokens chosen on the device for {} sessions at once", settings.len());
    assert!(chosen > 10 * settings.len() as u64, "{chosen} choices");
    for ((name, _), (alone, together)) in settings.iter().zip(alone.iter().zip(&together)) {
        assert_eq!(alone.0, together.0, "{name}");
        assert!(alone.1 == together.1, "{name}: logits at the end");
    }
}

/// Pitfalls 50, 51: around 2^16 tokens and 2^16 entries, and at the end of a million tokens. A position or an entry that
/// wraps makes every row another one, nats away; copies of one block make many near ties, so rounding alone moves the median
/// to 2.4e-2 and 6.2e-3 nats (`reference`, `kvquant`) at 65,536 tokens on an H200, 6.6e-2 and 3.2e-2 at 1,048,576.
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
    check_far_out("far out, reference", Numerics::Reference, 1e-1);
}

#[test]
fn kvquant_logits_are_close_to_those_of_the_cpu_up_to_a_million_tokens() {
    check_far_out("far out, kvquant", Numerics::Kvquant, 1e-1);
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
