//! Speed of the CPU products against yardsticks timed in the same run: decode against a plain sum over the same bytes,
//! prefill against `matrixmultiply::sgemm` of the same shape, attention against back-to-back fused multiply-adds.
//!
//! `cargo bench --bench linear -- [--json] [--threads N] [--reps N] [--only WORD]`. The yardstick and ours alternate and
//! the table shows medians, so that other load on the machine hits both; the ratio is what counts.
#![expect(clippy::print_stdout, reason = "the table is what a benchmark is for")]

use std::hint::black_box;
use std::time::Instant;

use dsv4::backend::cpu::Pool;
use dsv4::backend::cpu::linear::{self, Job, Scratch};
use dsv4::backend::cpu::simd::{self, Simd};
use dsv4::tensor::format::e4m3_round_trip;
use dsv4::tensor::{MatrixFormat, MatrixRef, Scales};
use rayon::prelude::*;

struct Options {
    json: bool,
    threads: usize,
    reps: usize,
    only: String,
}

fn main() {
    let options = options();
    let sum_pool = rayon::ThreadPoolBuilder::new().num_threads(options.threads).build().expect("threads");
    let pool = Pool::new(options.threads).expect("threads");
    let simd = Simd::detect();
    let mut table = Table { rows: Vec::new(), json: options.json };
    if !options.json {
        println!("{} threads, {}, {} repetitions", options.threads, simd.level(), options.reps);
    }
    let wants = |what: &str| what.contains(&options.only);
    for shape in decode_shapes().into_iter().filter(|s| wants(&format!("decode {}", s.name))) {
        decode(&shape, &sum_pool, &pool, simd, &options, &mut table);
    }
    for shape in prefill_shapes().into_iter().filter(|s| wants(&format!("prefill {}", s.name))) {
        prefill(&shape, &pool, simd, &options, &mut table);
    }
    if wants("attention") {
        attention(simd, &options, &mut table);
    }
    table.finish();
}

fn options() -> Options {
    let mut options = Options { json: false, threads: 2, reps: 9, only: String::new() };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut number = || args.next().and_then(|n| n.parse().ok()).expect("a number after the option");
        match arg.as_str() {
            "--json" => options.json = true,
            "--threads" => options.threads = number(),
            "--reps" => options.reps = number(),
            "--only" => options.only = args.next().unwrap_or_default(),
            _ => {} // cargo's own, such as --bench
        }
    }
    options
}

struct Shape {
    name: &'static str,
    format: MatrixFormat,
    rows: usize,
    cols: usize,
    tokens: usize,
    /// Matrices in one call.
    jobs: usize,
    /// Whether inputs are rounded to E4M3.
    quantised: bool,
}

fn shape(name: &'static str, format: MatrixFormat, rows: usize, cols: usize, tokens: usize, jobs: usize) -> Shape {
    let quantised = matches!(format, MatrixFormat::E4m3 | MatrixFormat::E2m1);
    Shape { name, format, rows, cols, tokens, jobs, quantised }
}

fn decode_shapes() -> Vec<Shape> {
    use MatrixFormat::{Bf16, E2m1, E4m3, F32};
    vec![
        shape("E4M3 4096x4096", E4m3, 4096, 4096, 1, 1),
        shape("E4M3 32768x1024", E4m3, 32768, 1024, 1, 1),
        shape("E4M3 1024x4096", E4m3, 1024, 4096, 1, 1),
        shape("E2M1 12 of 2048x4096", E2m1, 2048, 4096, 1, 12),
        shape("E2M1 6 of 4096x2048", E2m1, 4096, 2048, 1, 6),
        Shape { quantised: false, ..shape("E2M1 12 of 2048x4096 float", E2m1, 2048, 4096, 1, 12) },
        shape("BF16 8192x4096", Bf16, 8192, 4096, 1, 1),
        shape("F32 4096x4096", F32, 4096, 4096, 1, 1),
        shape("E4M3 4096x4096 x2", E4m3, 4096, 4096, 2, 1),
        shape("E4M3 4096x4096 x4", E4m3, 4096, 4096, 4, 1),
        shape("E4M3 4096x4096 x8", E4m3, 4096, 4096, 8, 1),
        shape("BF16 8192x4096 x2", Bf16, 8192, 4096, 2, 1),
        shape("BF16 8192x4096 x4", Bf16, 8192, 4096, 4, 1),
        shape("BF16 8192x4096 x8", Bf16, 8192, 4096, 8, 1),
        shape("F32 24x16384 x8", F32, 24, 16384, 8, 1),
        shape("E2M1 12 of 2048x4096 x2", E2m1, 2048, 4096, 2, 12),
        shape("E2M1 12 of 2048x4096 x4", E2m1, 2048, 4096, 4, 12),
    ]
}

fn prefill_shapes() -> Vec<Shape> {
    use MatrixFormat::{Bf16, E2m1, E4m3, F32};
    vec![
        shape("E4M3 4096x4096", E4m3, 4096, 4096, 512, 1),
        shape("E4M3 32768x1024", E4m3, 32768, 1024, 512, 1),
        shape("E2M1 2048x4096", E2m1, 2048, 4096, 192, 1),
        shape("E2M1 4096x2048", E2m1, 4096, 2048, 192, 1),
        shape("BF16 1024x4096", Bf16, 1024, 4096, 512, 1),
        shape("F32 24x16384", F32, 24, 16384, 512, 1),
    ]
}

/// Weights of one matrix in random bytes that are finite numbers of a usual size.
struct Weights {
    data: Vec<u8>,
    scales: Vec<u8>,
}

impl Weights {
    fn new(shape: &Shape, seed: u64) -> Self {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 24) as u32
        };
        let elements = shape.rows * shape.cols;
        let (data, scales) = match shape.format {
            MatrixFormat::E4m3 => ((0..elements).map(|_| (next() & 0xBF) as u8).collect(), elements / (128 * 128)),
            MatrixFormat::E2m1 => ((0..elements / 2).map(|_| next() as u8).collect(), elements / 32),
            MatrixFormat::Bf16 => {
                ((0..elements).flat_map(|_| ((next() & 0x80FF | 0x3F00) as u16).to_le_bytes()).collect(), 0)
            }
            MatrixFormat::F32 => {
                ((0..elements).flat_map(|_| (next() & 0x80FF_FFFF | 0x3F00_0000).to_le_bytes()).collect(), 0)
            }
        };
        Self { data, scales: (0..scales.max(1)).map(|_| 118 + (next() % 5) as u8).collect() }
    }

    fn view(&self, shape: &Shape) -> MatrixRef<'_> {
        let quantised = matches!(shape.format, MatrixFormat::E4m3 | MatrixFormat::E2m1);
        let scales = if quantised { Scales::E8m0(&self.scales) } else { Scales::None };
        let Shape { format, rows, cols, .. } = *shape;
        MatrixRef { format, rows, cols, data: &self.data, scales, first_row: 0, round_to_bf16: false }
    }
}

/// All matrices of a shape once, several times over if need be to exceed the caches, at gigabytes a second.
fn decode(shape: &Shape, pool: &rayon::ThreadPool, ours_pool: &Pool, simd: Simd, options: &Options, table: &mut Table) {
    let bytes =
        shape.rows * MatrixRef { rows: 1, ..Weights::new(&Shape { rows: 128, ..*shape }, 1).view(shape) }.row_bytes();
    let calls = (256usize << 20).div_ceil(bytes * shape.jobs);
    let weights: Vec<Weights> = (0..calls * shape.jobs).map(|i| Weights::new(shape, i as u64 + 1)).collect();
    let mut inputs: Vec<Vec<f32>> = (0..shape.jobs).map(|i| floats(shape.tokens * shape.cols, i as u32)).collect();
    if shape.quantised {
        inputs.iter_mut().for_each(|x| e4m3_round_trip(x, 128));
    }
    let mut outputs = vec![vec![0.0; shape.tokens * shape.rows]; shape.jobs];
    let mut scratch = Scratch::default();
    let (mut plain, mut ours) = (Vec::new(), Vec::new());
    for _ in 0..options.reps {
        plain.push(seconds(|| {
            for w in &weights {
                black_box(plain_sum(pool, &w.data, options.threads));
            }
        }));
        ours.push(seconds(|| {
            ours_pool.enter(|| {
                for call in weights.chunks(shape.jobs) {
                    let jobs = call.iter().zip(&inputs).zip(&mut outputs);
                    let mut jobs: Vec<Job<'_>> = jobs.map(|((w, x), y)| Job::new(w.view(shape), x, y)).collect();
                    linear::run(ours_pool, simd, &mut scratch, &mut jobs).expect("valid jobs");
                }
            });
        }));
    }
    let total = (bytes * weights.len()) as f64 * 1e-9;
    table.row("decode", shape.name, "GB/s", total / median(&mut plain), total / median(&mut ours));
}

/// What reading costs: 64-bit additions over all bytes, one contiguous part a thread.
fn plain_sum(pool: &rayon::ThreadPool, bytes: &[u8], threads: usize) -> u64 {
    let part = bytes.len().div_ceil(threads).next_multiple_of(256);
    pool.install(|| bytes.par_chunks(part).map(sum_part).reduce(|| 0, u64::wrapping_add))
}

fn sum_part(bytes: &[u8]) -> u64 {
    let mut sums = [0u64; 32];
    for chunk in bytes.as_chunks::<256>().0 {
        for (sum, word) in sums.iter_mut().zip(chunk.as_chunks::<8>().0) {
            *sum = sum.wrapping_add(u64::from_le_bytes(*word));
        }
    }
    sums.iter().fold(0, |a, b| a.wrapping_add(*b))
}

fn prefill(shape: &Shape, pool: &Pool, simd: Simd, options: &Options, table: &mut Table) {
    let Shape { rows, cols, tokens, .. } = *shape;
    let weights = Weights::new(shape, 1);
    let plain_weights = floats(rows * cols, 2);
    let input = floats(tokens * cols, 3);
    let mut output = vec![0.0; tokens * rows];
    let mut scratch = Scratch::default();
    let (mut plain, mut ours) = (Vec::new(), Vec::new());
    for _ in 0..options.reps {
        let y = &mut output;
        plain.push(seconds(|| {
            let (m, k, n) = (tokens, cols, rows);
            let (x, w) = (input.as_ptr(), plain_weights.as_ptr());
            // SAFETY: x is [m, k], w [n, k] read as its transpose, y [m, n], all dense.
            unsafe {
                matrixmultiply::sgemm(
                    m,
                    k,
                    n,
                    1.0,
                    x,
                    k as isize,
                    1,
                    w,
                    1,
                    k as isize,
                    0.0,
                    y.as_mut_ptr(),
                    n as isize,
                    1,
                );
            }
        }));
        ours.push(seconds(|| {
            pool.enter(|| {
                let mut jobs = [Job::new(weights.view(shape), &input, &mut output)];
                linear::run(pool, simd, &mut scratch, &mut jobs).expect("valid job");
            });
        }));
    }
    let gflop = 2e-9 * (rows * cols * tokens) as f64;
    let name = format!("{} x{tokens}", shape.name);
    table.row("prefill", &name, "GFLOP/s", gflop / median(&mut plain), gflop / median(&mut ours));
}

/// One thread: the inner kernels of attention at V4's head size.
fn attention(simd: Simd, options: &Options, table: &mut Table) {
    let (keys, dim) = (64, 512);
    for heads in [8, 32, 64] {
        let (q, k) = (floats(heads * dim, 1), floats(keys * dim, 2));
        let (p, fade) = (floats(heads * keys, 3), vec![1.0; heads]);
        let mut out = vec![0.0; heads * keys];
        let mut acc = vec![0.0; heads * dim];
        let rounds = 4096 / heads;
        let flop = 2e-9 * (heads * keys * dim * rounds) as f64;
        let (mut peak, mut score, mut weigh) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..options.reps {
            peak.push(peak_gflops());
            score.push(
                flop / seconds(|| (0..rounds).for_each(|_| simd::scores(simd, &q, &k, dim, black_box(&mut out)))),
            );
            weigh.push(
                flop / seconds(|| {
                    (0..rounds).for_each(|_| simd::accumulate(simd, &fade, &p, &k, dim, black_box(&mut acc)));
                }),
            );
        }
        let peak = median(&mut peak);
        table.row("attention", &format!("scores, {heads} heads"), "GFLOP/s", peak, median(&mut score));
        table.row("attention", &format!("accumulate, {heads} heads"), "GFLOP/s", peak, median(&mut weigh));
    }
    let x: Vec<f32> = floats(4096, 4).iter().map(|v| v * 20.0).collect();
    let mut y = x.clone();
    let (mut copy, mut exps) = (Vec::new(), Vec::new());
    for _ in 0..options.reps {
        let values = 4096.0 * 256e-9;
        copy.push(
            values
                / seconds(|| {
                    for _ in 0..256 {
                        y.iter_mut().zip(&x).for_each(|(y, x)| *y = x.exp());
                        black_box(&mut y);
                    }
                }),
        );
        exps.push(
            values
                / seconds(|| {
                    for _ in 0..256 {
                        y.copy_from_slice(&x);
                        simd::exp(simd, black_box(&mut y));
                    }
                }),
        );
    }
    table.row("attention", "exp against std", "G/s", median(&mut copy), median(&mut exps));
}

/// Fused multiply-adds of one thread with nothing to wait for.
fn peak_gflops() -> f64 {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma")]
        fn chains(x: &mut [[f32; 8]; 12], rounds: usize) {
            for _ in 0..rounds {
                for chain in x.iter_mut() {
                    for lane in chain {
                        *lane = lane.mul_add(0.999, 1e-3);
                    }
                }
            }
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            let mut x = black_box([[1.0; 8]; 12]);
            // SAFETY: the features were just found.
            let time = seconds(|| unsafe { chains(&mut x, 1_000_000) });
            black_box(x);
            return 2.0 * 96.0 * 1e-3 / time;
        }
    }
    f64::NAN
}

fn floats(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn seconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

struct Table {
    rows: Vec<serde_json::Value>,
    json: bool,
}

impl Table {
    fn row(&mut self, group: &str, name: &str, unit: &str, yardstick: f64, ours: f64) {
        let ratio = ours / yardstick;
        if !self.json {
            println!("{group:10} {name:28} {yardstick:8.2} {ours:8.2} {unit:8} ratio {ratio:.3}");
        }
        self.rows.push(serde_json::json!({
            "group": group, "name": name, "unit": unit, "yardstick": yardstick, "ours": ours, "ratio": ratio
        }));
    }

    fn finish(self) {
        if self.json {
            println!("{}", serde_json::Value::from(self.rows));
        }
    }
}
