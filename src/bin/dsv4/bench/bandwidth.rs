//! The share of the memory bandwidth that decoding reaches.

#![forbid(unsafe_code)]

use std::fmt;
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use dsv4::Model;
use dsv4::weights::Tensor;
use serde_json::{Value, json};

use super::{Comparison, spread};
use crate::output;

/// Bytes that a thread takes at a time.
const PIECE: usize = 1 << 20;

/// Sums and decoding, measured in turns.
pub(super) struct Bandwidth {
    /// Bytes of weights that one decoded token reads.
    pub(super) bytes: u64,
    /// Tokens of one repetition of decoding.
    pub(super) tokens: usize,
    threads: usize,
    /// Seconds of each sum over `bytes` (less the table rows).
    pub(super) sum_seconds: Vec<f64>,
    /// Seconds of each repetition of decoding.
    pub(super) decode_seconds: Vec<f64>,
}

impl Bandwidth {
    pub(super) fn new(model: &Model, threads: usize, tokens: usize) -> Self {
        let bytes = model.decode_reads(0).bytes();
        Self { bytes, tokens, threads, sum_seconds: Vec::new(), decode_seconds: Vec::new() }
    }

    /// Seconds of one sum; each round takes other experts, as tokens do.
    pub(super) fn sum(&self, model: &Model, round: usize) -> f64 {
        let reads = model.decode_reads(round * model.config().num_experts_per_tok);
        let start = Instant::now();
        black_box(sum_bytes(&reads.tensors, self.threads));
        start.elapsed().as_secs_f64()
    }

    /// GB/s of the fastest sum: what this machine can do.
    fn sum_rate(&self) -> f64 {
        self.bytes as f64 / spread(&self.sum_seconds).1.max(1e-9) / 1e9
    }

    /// GB/s of the median repetition of decoding.
    fn decode_rate(&self) -> f64 {
        (self.bytes * self.tokens as u64) as f64 / spread(&self.decode_seconds).0.max(1e-9) / 1e9
    }
}

impl Comparison for Bandwidth {
    fn as_json(&self) -> Value {
        json!({
            "bytes_per_token": self.bytes,
            "sum_gb_per_second": self.sum_rate(),
            "decode_gb_per_second": self.decode_rate(),
            "ratio": self.decode_rate() / self.sum_rate(),
            "sum_seconds": self.sum_seconds,
            "decode_seconds": self.decode_seconds,
        })
    }
}

impl fmt::Display for Bandwidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (decode, sum) = (self.decode_rate(), self.sum_rate());
        write!(
            f,
            "bandwidth: a token reads {}; decoding {} GB/s, plain sum {} GB/s: {:.0} %",
            output::size(self.bytes),
            output::rate(decode),
            output::rate(sum),
            100.0 * decode / sum
        )
    }
}

/// Sum of all bytes taken as 64-bit numbers; threads take pieces as they come.
pub(super) fn sum_bytes(tensors: &[Tensor], threads: usize) -> u64 {
    let pieces: Vec<&[u8]> = tensors.iter().flat_map(|tensor| tensor.bytes().chunks(PIECE)).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut sum = 0u64;
        while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            sum = sum.wrapping_add(sum_piece(piece));
        }
        sum
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let own = work();
        workers.into_iter().fold(own, |sum, worker| sum.wrapping_add(worker.join().unwrap_or_default()))
    })
}

/// Eight independent sums, so that the compiler can use wide registers.
fn sum_piece(bytes: &[u8]) -> u64 {
    let mut lanes = [0u64; 8];
    let blocks = bytes.chunks_exact(64);
    let rest = blocks.remainder().iter().fold(0u64, |sum, &b| sum + u64::from(b));
    for block in blocks {
        for (lane, word) in lanes.iter_mut().zip(block.chunks_exact(8)) {
            let word: [u8; 8] = word.try_into().expect("chunks of 8 bytes");
            *lane = lane.wrapping_add(u64::from_le_bytes(word));
        }
    }
    lanes.into_iter().fold(rest, u64::wrapping_add)
}
