//! Random data, poisoned device memory and error measures.

use super::Check;
use crate::backend::cpu::Cpu;
use crate::backend::cpu::linear::Job;
use crate::backend::cuda::device::Gpu;
use crate::backend::cuda::memory::{Arena, Buffer, Plain};
use crate::backend::cuda::ops;
use crate::backend::cuda::stream::Stream;
use crate::error::{ErrorKind, Result, bail};
use crate::tensor::format::{bf16_bits, bf16_value, round_bf16};
use crate::tensor::{MatrixFormat, MatrixRef, Scales};

/// Device memory of one group of checks.
const BYTES: u64 = 768 << 20;

/// One group of checks at work.
pub(super) struct Lab<'a> {
    pub(super) stream: Stream,
    pub(super) cpu: &'a Cpu,
    pub(super) small: bool,
    pub(super) gpu: &'a Gpu,
    pub(super) arena: Arena,
    seed: u64,
    state: u64,
    seen: &'a mut dyn FnMut(&Check),
}

impl<'a> Lab<'a> {
    pub(super) fn new(
        gpu: &'a Gpu,
        cpu: &'a Cpu,
        seed: u64,
        small: bool,
        seen: &'a mut dyn FnMut(&Check),
    ) -> Result<Self> {
        let stream = Stream::new(gpu)?;
        let arena = poisoned(gpu, &stream, small)?;
        Ok(Self { stream, cpu, small, arena, gpu, seed, state: seed ^ 0x9E37_79B9_7F4A_7C15, seen })
    }

    /// Fresh, poisoned memory for the next check.
    pub(super) fn clear(&mut self) -> Result<()> {
        self.stream.synchronize()?;
        // the old arena goes first: together they might not fit
        self.arena = Arena::counting();
        self.arena = poisoned(self.gpu, &self.stream, self.small)?;
        Ok(())
    }

    pub(super) fn report(&mut self, op: &'static str, shape: impl Into<String>, error: f64, limit: f64) {
        (self.seen)(&Check { op, shape: shape.into(), error, limit, seed: self.seed });
    }

    // ---- random data ----

    pub(super) fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.bits() % n.max(1) as u64) as usize
    }

    pub(super) fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Normal numbers of the given size.
    pub(super) fn normal(&mut self, len: usize, size: f32) -> Vec<f32> {
        (0..len)
            .map(|_| {
                let (a, b) = (self.uniform().max(1e-7), self.uniform());
                (-2.0 * a.ln()).sqrt() * (std::f32::consts::TAU * b).cos() * size
            })
            .collect()
    }

    /// The same, as bfloat16 values.
    pub(super) fn normal_bf16(&mut self, len: usize, size: f32) -> Vec<f32> {
        let mut values = self.normal(len, size);
        values.iter_mut().for_each(|v| *v = round_bf16(*v));
        values
    }

    /// Numbers around one, as norm weights are.
    pub(super) fn around_one(&mut self, len: usize) -> Vec<f32> {
        let mut values = self.normal_bf16(len, 0.2);
        values.iter_mut().for_each(|v| *v = round_bf16(*v + 1.0));
        values
    }

    /// Finite E4M3 codes.
    pub(super) fn e4m3(&mut self, len: usize) -> Vec<u8> {
        (0..len)
            .map(|_| {
                let code = self.bits() as u8;
                if code & 0x7F == 0x7F { code ^ 1 } else { code }
            })
            .collect()
    }

    /// E8M0 codes of scales between 2^-10 and 2^-3.
    pub(super) fn e8m0(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| (117 + self.below(8)) as u8).collect()
    }

    pub(super) fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.bits() as u8).collect()
    }

    // ---- device memory ----

    pub(super) fn put<T: Plain>(&mut self, values: &[T]) -> Result<Buffer<T>> {
        let buffer = self.arena.take("a check", values.len())?;
        self.stream.write(&buffer, values)?;
        Ok(buffer)
    }

    pub(super) fn put_bf16(&mut self, values: &[f32]) -> Result<Buffer<u16>> {
        let bits: Vec<u16> = values.iter().map(|&v| bf16_bits(v)).collect();
        self.put(&bits)
    }

    /// An output: poisoned until it is written.
    pub(super) fn output<T: Plain>(&mut self, len: usize) -> Result<Buffer<T>> {
        self.arena.take("a check", len)
    }

    pub(super) fn get<T: Plain + Default>(&self, buffer: &Buffer<T>) -> Result<Vec<T>> {
        self.stream.read(buffer)
    }

    pub(super) fn get_bf16(&self, buffer: &Buffer<u16>) -> Result<Vec<f32>> {
        Ok(self.get(buffer)?.into_iter().map(bf16_value).collect())
    }

    /// The CPU's product, float32 `[tokens, rows]`.
    pub(super) fn cpu_product(&self, weight: MatrixRef<'_>, x: &[f32]) -> Result<Vec<f32>> {
        let mut y = vec![0.0; x.len() / weight.cols * weight.rows];
        self.cpu.linear(&mut [Job::new(weight, x, &mut y)])?;
        Ok(y)
    }

    /// A planted illegal access: the error names the kernel, later calls are refused with it, and freeing works.
    pub(super) fn fault(&mut self) -> Result<()> {
        let x: Buffer<u16> = self.output(128)?;
        let elsewhere = x.at_bad_address();
        let first = ops::quantise(&self.stream, &elsewhere, &x);
        let names_kernel =
            matches!(&first, Err(e) if e.kind() == ErrorKind::Poisoned && e.message().contains("quantise"));
        let second = ops::quantise(&self.stream, &x, &x);
        let stays = matches!(&second, Err(e) if e.kind() == ErrorKind::Poisoned && e.message().contains("quantise"));
        self.report("fault", "names its kernel and stays", f64::from(u8::from(!(names_kernel && stays))), 0.0);
        match first {
            Ok(()) => bail!(Unsupported, "the planted fault was not noticed"),
            Err(_) => Ok(()),
        }
    }
}

fn poisoned(gpu: &Gpu, stream: &Stream, small: bool) -> Result<Arena> {
    let bytes = if small { BYTES / 3 } else { BYTES };
    let mut arena = Arena::new(gpu, bytes)?;
    let all: Buffer<u8> = arena.take("a check", bytes as usize)?;
    stream.fill(&all, 0xFF)?;
    arena.restart();
    Ok(arena)
}

/// A view of random E4M3 or bf16 weights.
pub(super) fn matrix<'a>(
    format: MatrixFormat,
    rows: usize,
    cols: usize,
    data: &'a [u8],
    scales: Scales<'a>,
) -> MatrixRef<'a> {
    MatrixRef { format, rows, cols, data, scales, first_row: 0, round_to_bf16: false }
}

/// `|got - want| / |want|`; infinite if anything is NaN or the lengths differ.
pub(super) fn distance(got: &[f32], want: &[f32]) -> f64 {
    if got.len() != want.len() {
        return f64::INFINITY;
    }
    let (mut difference, mut size) = (0.0f64, 0.0f64);
    for (&g, &w) in got.iter().zip(want) {
        difference += (f64::from(g) - f64::from(w)).powi(2);
        size += f64::from(w).powi(2);
    }
    let error = (difference / size.max(1e-60)).sqrt();
    if error.is_nan() { f64::INFINITY } else { error }
}

/// Number of values that differ.
pub(super) fn different<T: PartialEq>(got: &[T], want: &[T]) -> f64 {
    if got.len() != want.len() {
        return f64::INFINITY;
    }
    got.iter().zip(want).filter(|(g, w)| g != w).count() as f64
}

/// Number of floats whose bits differ.
pub(super) fn different_bits(got: &[f32], want: &[f32]) -> f64 {
    let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    different(&bits(got), &bits(want))
}
