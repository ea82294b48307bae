//! Routed experts in less host memory than they need: the same logits, bit for bit, as where all are mapped.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a failed call is a failed test")]

mod common;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier};
use std::thread;

use common::golden::{self, Golden};
use common::subject;
use dsv4::weights::PoolStats;
use dsv4::{Engine, EngineOptions, ErrorKind, Model};

/// A trained model with experts in FP4 and two layers with hash routing, one with experts in FP8 and float32 scales, and
/// one that chooses six of eight.
fn models() -> [PathBuf; 3] {
    let nano = |name: &str| Golden::open(&golden::committed().join(name)).runnable();
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models/tiny-v4");
    [tiny, nano("nano-base"), nano("nano-pro")]
}

/// Bytes of a frame, experts of a token, and experts of all layers.
fn sizes(folder: &Path) -> (u64, u64, u64) {
    let model = Model::open(folder).unwrap();
    let config = model.config();
    let (top_k, count) = (config.num_experts_per_tok, config.n_routed_experts * config.num_hidden_layers);
    let refused = Engine::new(&model, EngineOptions { host_bytes: 1, ..EngineOptions::default() }).err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    let numbers = refused.message().split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok());
    let numbers: Vec<u64> = numbers.collect();
    let [1, k, least, frame, n, all, 0] = numbers[..] else { panic!("{refused}") };
    assert!(k == top_k as u64 && n == count as u64 && least == k * frame, "{refused}");
    assert!(frame < all && all <= n * frame, "{refused}");
    (frame, k, n)
}

/// Budgets by name: the least, and parts of all frames. Frames are larger than these small experts, so all fit in fewer.
fn budgets(folder: &Path) -> [(&'static str, u64); 5] {
    let (frame, least, all) = sizes(folder);
    let part = |n: u64| n.max(least) * frame;
    [
        ("the least", part(least)),
        ("10 %", part(all / 10)),
        ("50 %", part(all / 2)),
        ("60 %", part(all * 3 / 5)),
        ("100 %", part(all)),
    ]
}

fn engine(folder: &Path, host_bytes: u64, threads: usize, prefill_chunk: usize) -> Arc<Engine> {
    let options = EngineOptions { host_bytes, threads, prefill_chunk, ..EngineOptions::default() };
    Engine::new(&Model::open(folder).unwrap(), options).unwrap()
}

fn tokens(engine: &Engine, seed: u32, n: u32) -> Vec<u32> {
    let vocab = engine.model().config().vocab_size as u32;
    (0..n).map(|i| (seed * 7919 + i * i * 31 + i * 17) % vocab).collect()
}

/// Logits of a prompt's tokens and of tokens behind it, one at a time, as bits.
fn run(engine: &Arc<Engine>, seed: u32) -> Vec<u32> {
    let mut session = subject::session(engine, 512);
    let tokens = tokens(engine, seed, 170);
    let mut bits = Vec::new();
    let mut see = |_: usize, logits: &[f32]| {
        bits.extend(logits.iter().map(|x| x.to_bits()));
        Ok(())
    };
    session.feed_all(&tokens[..150], &mut see).unwrap();
    tokens[150..].iter().for_each(|&token| session.feed_all(&[token], &mut see).unwrap());
    bits
}

#[test]
fn every_budget_has_the_logits_of_the_mapped_experts() {
    for folder in models() {
        let want = run(&engine(&folder, 0, 1, 256), 1);
        for (name, budget) in budgets(&folder) {
            for (threads, chunk) in [(1, 256), (2, 40)] {
                let engine = engine(&folder, budget, threads, chunk);
                let got = run(&engine, 1);
                assert!(got == want, "{}: {name}, {threads} threads, chunks of {chunk}", folder.display());
                let PoolStats { hits, misses, read_bytes, frame_bytes, .. } = engine.metrics().host_experts;
                if name == "100 %" {
                    assert_eq!((hits, misses, read_bytes, frame_bytes), (0, 0, 0, 0), "all fit: they are mapped");
                } else {
                    assert!(misses > 0 && read_bytes > 0 && frame_bytes <= budget);
                    assert!(hits > 0 || name == "the least");
                }
            }
        }
    }
}

#[test]
fn more_memory_means_fewer_reads() {
    let [folder, ..] = models();
    let read = budgets(&folder).map(|(_, budget)| {
        let engine = engine(&folder, budget, 2, 256);
        run(&engine, 3);
        engine.metrics().host_experts.read_bytes
    });
    assert!(read.is_sorted_by(|few, many| few > many), "{read:?}");
}

#[test]
fn experts_that_follow_from_token_ids_are_read_ahead() {
    let [folder, ..] = models();
    let (frame, ..) = sizes(&folder);
    let engine = engine(&folder, 24 * frame, 2, 256);
    let mut session = subject::session(&engine, 512);
    for token in tokens(&engine, 5, 60) {
        session.feed(&[token]).unwrap();
    }
    let stats = engine.metrics().host_experts;
    assert!(stats.read_ahead > 0, "{stats:?}");
    let text = engine.metrics().to_prometheus();
    for (name, value) in [
        ("dsv4_host_expert_hits_total", stats.hits),
        ("dsv4_host_expert_misses_total", stats.misses),
        ("dsv4_host_expert_read_ahead_total", stats.read_ahead),
        ("dsv4_host_expert_read_bytes_total", stats.read_bytes),
        ("dsv4_host_expert_bytes", stats.frame_bytes),
    ] {
        assert!(text.contains(&format!("\n{name} {value}\n")), "{name}");
    }
    // of 60 tokens with two experts in each of six layers
    assert_eq!(stats.hits + stats.misses, 60 * 2 * 6);
}

#[test]
fn many_sessions_at_once_have_their_logits() {
    let [folder, ..] = models();
    let mapped = engine(&folder, 0, 2, 256);
    let want: Vec<Vec<u32>> = (0..6).map(|seed| run(&mapped, seed)).collect();
    for (name, budget) in budgets(&folder) {
        let engine = engine(&folder, budget, 2, 64);
        let start = Barrier::new(want.len());
        thread::scope(|scope| {
            for (seed, want) in want.iter().enumerate() {
                let (engine, start) = (&engine, &start);
                scope.spawn(move || {
                    start.wait();
                    assert!(run(engine, seed as u32) == *want, "{name}: session {seed}");
                });
            }
        });
    }
}
