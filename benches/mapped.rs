//! Decoding against a plain read, on the mapped bytes of a real checkpoint: how much of the memory bandwidth do products
//! with one token reach, for the FP8 linears and for the routed experts each?
//!
//! `cargo bench --bench mapped -- MODEL [--threads N] [--reps N]`. MODEL is best a slice of true dimensions. Ours and the
//! plain sum over the same bytes alternate within one run; the medians' ratio is what counts.

#![allow(clippy::print_stdout, reason = "a benchmark's output")]

use std::hint::black_box;
use std::time::Instant;

use dsv4::Model;
use dsv4::backend::cpu::Pool;
use dsv4::backend::cpu::linear::{self, Job, Scratch};
use dsv4::backend::cpu::simd::Simd;
use dsv4::model::weights::Matrix;
use dsv4::tensor::format::e4m3_round_trip;

/// Products that run in one parallel region, as a step has them.
type Region<'a> = Vec<&'a Matrix>;

fn main() {
    let (mut model, mut threads, mut reps) = (None, 2, 7);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut number = || args.next().and_then(|n| n.parse().ok()).expect("a number after the option");
        match arg.as_str() {
            "--threads" => threads = number(),
            "--reps" => reps = number(),
            other if !other.starts_with("--") => model = Some(arg),
            _ => {} // cargo's own, such as --bench
        }
    }
    let Some(path) = model else {
        println!("skipped: cargo bench --bench mapped -- MODEL needs a checkpoint folder");
        return;
    };
    let model = Model::open(&path).expect("a checkpoint");
    let pool = Pool::new(threads).expect("threads");
    println!("{path}: {threads} threads, {}, {reps} repetitions", Simd::detect().level());
    let layers = &model.weights().layers;
    let mut dense: Vec<Region<'_>> = Vec::new();
    let mut experts: Vec<Region<'_>> = Vec::new();
    for layer in layers {
        let (a, f) = (&layer.attn, &layer.ffn);
        dense.extend([vec![&a.wq_a, &a.wkv], vec![&a.wq_b], vec![&a.wo_b], vec![&f.shared.w1, &f.shared.w3]]);
        dense.push(vec![&f.shared.w2]);
        for six in f.experts.chunks(model.config().num_experts_per_tok) {
            experts.push(six.iter().flat_map(|e| [&e.w1, &e.w3]).collect());
            experts.push(six.iter().map(|e| &e.w2).collect());
        }
    }
    measure("FP8 linears", &pool, &dense, reps);
    measure("routed experts", &pool, &experts, reps);
}

fn measure(name: &str, pool: &Pool, regions: &[Region<'_>], reps: usize) {
    let all: Vec<&Matrix> = regions.iter().flatten().copied().collect();
    let bytes: usize = all.iter().map(|m| m.byte_len()).sum();
    let widest = all.iter().map(|m| m.cols()).max().unwrap_or(0);
    // as a step has it: roughly normal, rounded to E4M3
    let wave = |i: usize, step: f32| (i as f32 * step).sin();
    let mut input: Vec<f32> =
        (0..widest).map(|i| wave(i, 0.37) + wave(i, 1.9) + wave(i, 2.3) + wave(i, 0.71)).collect();
    e4m3_round_trip(&mut input, 128);
    let mut scratch = Scratch::default();
    let (mut plain, mut ours) = (Vec::new(), Vec::new());
    let all_ready = all.iter().all(|m| m.ready().is_ok());
    assert!(all_ready, "the weights can be read");
    for _ in 0..reps {
        plain.push(seconds(|| black_box(sum(pool, &all))));
        ours.push(seconds(|| {
            pool.enter(|| {
                for region in regions {
                    let mut outputs: Vec<Vec<f32>> = region.iter().map(|m| vec![0.0; m.rows()]).collect();
                    let jobs = region.iter().zip(&mut outputs);
                    let mut jobs: Vec<Job<'_>> = jobs.map(|(m, y)| Job::new(m.view(), &input[..m.cols()], y)).collect();
                    linear::run(pool, Simd::detect(), &mut scratch, &mut jobs).expect("valid jobs");
                    black_box(&outputs);
                }
            });
        }));
    }
    let rate = |times: &mut Vec<f64>| {
        times.sort_by(f64::total_cmp);
        bytes as f64 * 1e-9 / times[times.len() / 2]
    };
    let (plain, ours) = (rate(&mut plain), rate(&mut ours));
    println!(
        "{name:15} {:.2} GB  plain sum {plain:6.2} GB/s  ours {ours:6.2} GB/s  ratio {:.2}",
        bytes as f64 * 1e-9,
        ours / plain
    );
}

/// What reading costs: 64-bit additions over every byte, in pieces that the threads share.
fn sum(pool: &Pool, matrices: &[&Matrix]) -> u64 {
    let mut pieces: Vec<&[u8]> = Vec::new();
    for m in matrices {
        pieces.extend(m.tensor().bytes().chunks(1 << 20));
        pieces.extend(m.scale().map(dsv4::weights::Tensor::bytes));
    }
    let mut sums = vec![0u64; pool.threads()];
    pool.share(&mut sums, &mut pieces, |piece, sum| *sum = sum.wrapping_add(sum_piece(piece)));
    sums.iter().fold(0, |a, b| a.wrapping_add(*b))
}

fn sum_piece(bytes: &[u8]) -> u64 {
    let mut sums = [0u64; 32];
    for chunk in bytes.as_chunks::<256>().0 {
        for (sum, word) in sums.iter_mut().zip(chunk.as_chunks::<8>().0) {
            *sum = sum.wrapping_add(u64::from_le_bytes(*word));
        }
    }
    sums.iter().fold(0, |a, b| a.wrapping_add(*b))
}

fn seconds<R>(f: impl FnOnce() -> R) -> f64 {
    let start = Instant::now();
    f();
    start.elapsed().as_secs_f64()
}
