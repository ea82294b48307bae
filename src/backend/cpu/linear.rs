//! Products `y = W x` of weights in checkpoint storage with float32 inputs, for one token or many, on the engine's pool.
//!
//! Invariant: an output's bits depend on its weight row, its input row and the [`Simd`] level alone; not on the number of
//! tokens, the other jobs of the call, the number of threads, or how rows are split over them. Sums are float32, in an
//! order that [`super::simd`] fixes. Nothing is rounded to bf16 here, and no activation is quantised: callers do both.
//!
//! Tokens whose values were rounded to E4M3, as quantised numerics do, meet E2M1 weights in integers where the level has a
//! kernel for that, alone or a few together: faster, same bits. They are recognised by their values, so callers need not say
//! how an input came about. For a few tokens other weights are decoded in registers, for more to memory.
//!
//! Inputs are first brought into the column order in which the weights decode (once per input and storage, however many
//! jobs share it). For E4M3 the tile scales go into a copy of the input, made per band of 128 rows, with the largest
//! scale of the band set apart so that scales of any size work. Inputs of E4M3 products must stay below `2^47`, and
//! single products below `2^-86` of the band's largest scale lose bits to the subnormal range.
#![forbid(unsafe_code)]

mod input;

use super::Pool;
use super::simd::{
    Block, DIGIT_TOKENS, DigitDots, Digits, Dots, Few, FewDigitDots, K_BLOCK, Rows, Simd, Storage, TOKEN_BLOCK, scale,
};
use crate::error::{Error, Result, bail};
use crate::tensor::format::e8m0_value;
use crate::tensor::{MatrixFormat, MatrixRef, Scales};
use input::{Input, prepare};

/// One product; several run in one parallel region, so that small matrices share it.
#[derive(Debug)]
pub struct Job<'a> {
    /// The weights `[rows, cols]`.
    pub weight: MatrixRef<'a>,
    /// Inputs of all tokens: token `t` is `input[t * input_stride..][..cols]`.
    pub input: &'a [f32],
    /// Floats from one token's input to the next; `cols` when they are dense.
    pub input_stride: usize,
    /// `[tokens, rows]`, overwritten; its length gives the number of tokens.
    pub output: &'a mut [f32],
}

impl<'a> Job<'a> {
    /// A product with dense inputs `[tokens, cols]`.
    pub fn new(weight: MatrixRef<'a>, input: &'a [f32], output: &'a mut [f32]) -> Self {
        Self { weight, input, input_stride: weight.cols, output }
    }
}

/// Memory that calls of [`run`] need besides their arguments. It grows to what the largest call needs and is then reused.
#[derive(Debug, Default)]
pub struct Scratch {
    prepared: Vec<f32>,
    digits: Vec<Digits>,
    workers: Vec<Worker>,
}

/// One thread's share of the scratch.
#[derive(Debug, Default)]
struct Worker {
    scaled: Vec<f32>,
    block: Vec<f32>,
}

/// Runs all `jobs`.
///
/// # Errors
/// `InvalidArgument` if a job's slices do not fit its shape; `OutOfMemory` if the scratch cannot grow. Outputs are
/// written only on success.
pub fn run(pool: &Pool, simd: Simd, scratch: &mut Scratch, jobs: &mut [Job<'_>]) -> Result<()> {
    let (mut plans, mut parts) = (Vec::new(), Vec::new());
    reserve(&mut parts, jobs.len(), "the products of a step")?;
    let mut inputs: Vec<Input<'_>> = Vec::new();
    let (mut prepared_len, mut digits_len) = (0, 0);
    for (number, job) in jobs.iter().enumerate() {
        let tokens = check(job)?;
        let part = if is_by_token(job, tokens, simd) { 1 } else { tokens.max(1) };
        parts.push(part);
        reserve(&mut plans, tokens.div_ceil(part), "the products of a step")?;
        for first in (0..tokens).step_by(part) {
            let input = Input::new(job, first..first + part, simd, prepared_len, digits_len);
            let known = inputs.iter().rev().find(|known| known.is_same(&input)).copied();
            plans.push(Plan { job: number, weight: job.weight, input: known.unwrap_or(input), tokens: part });
            if known.is_none() {
                reserve(&mut inputs, 1, "the inputs of a step")?;
                inputs.push(input);
                prepared_len += input.prepared_len().next_multiple_of(ALIGNED);
                digits_len += input.digits;
            }
        }
    }

    let threads = pool.threads();
    let bands = Bands::new(&plans, threads);
    scratch.fit(&plans, prepared_len, digits_len, threads, simd)?;
    let Scratch { prepared, digits, workers } = scratch;
    let (prepared, digits) = (aligned(prepared, prepared_len), &mut digits[..digits_len]);
    prepare(pool, simd, &inputs, prepared, digits, workers)?;

    let (prepared, digits) = (&*prepared, &*digits);
    let outputs = jobs.iter_mut().zip(&parts).flat_map(|(job, &part)| job.output.chunks_mut(part * job.weight.rows));
    let mut slices = bands.split_outputs(&plans, outputs)?;
    let mut units = bands.units(&plans, &mut slices)?;
    let workers = if bands.is_small(&plans) { &mut workers[..1] } else { &mut workers[..] };
    let mut groups = Vec::new();
    reserve(&mut groups, units.len(), "the units of a step")?;
    groups.extend(units.chunk_by_mut(Unit::are_tokens_of_a_band));
    pool.share(workers, &mut groups, |units, worker| run_units(units, simd, prepared, digits, worker));
    Ok(())
}

/// A job that has been checked, or one token of it.
#[derive(Clone, Copy)]
struct Plan<'a> {
    job: usize,
    weight: MatrixRef<'a>,
    input: Input<'a>,
    tokens: usize,
}

impl Plan<'_> {
    fn storage(&self) -> Storage {
        storage(&self.weight)
    }
}

/// Most tokens for which decoding weights to memory does not pay: [`Few`] decodes in registers, once for up to four
/// tokens. To float32 an E2M1 weight takes as long as three or four products with it in integers, and products in float32
/// are not much faster, so quantised tokens meet those in integers ([`FewDigitDots`]).
const FEW: usize = 12;

/// Whether the job's few tokens are plans of their own, for products in integers: they look as if they were rounded to E4M3.
fn is_by_token(job: &Job<'_>, tokens: usize, simd: Simd) -> bool {
    // three bits behind the first, times a power of two
    let is_rounded = |x: &f32| x.to_bits() & 0x000F_FFFF == 0;
    let is_few = (2..=FEW).contains(&tokens) && storage(&job.weight) == Storage::E2m1 && simd.takes_digits();
    is_few && (0..tokens).all(|t| job.input[t * job.input_stride..][..job.weight.cols].iter().all(is_rounded))
}

fn storage(weight: &MatrixRef<'_>) -> Storage {
    match (weight.format, weight.scales) {
        (MatrixFormat::E4m3, Scales::F32(_)) if weight.round_to_bf16 => Storage::E4m3Rounded,
        // an E4M3 value times a power of two is a bfloat16 as it is
        (MatrixFormat::E4m3, _) => Storage::E4m3,
        (MatrixFormat::E2m1, _) => Storage::E2m1,
        (MatrixFormat::Bf16, _) => Storage::Bf16,
        (MatrixFormat::F32, _) => Storage::F32,
    }
}

/// Number of tokens of a job whose slices fit its shape.
fn check(job: &Job<'_>) -> Result<usize> {
    let MatrixRef { format, rows, cols, data, scales, first_row, .. } = job.weight;
    if rows == 0 || cols == 0 {
        bail!(InvalidArgument, "weight matrix of {rows} x {cols}");
    }
    if data.len() != rows * job.weight.row_bytes() {
        bail!(InvalidArgument, "{} bytes of weights for {rows} x {cols} {format:?}", data.len());
    }
    let (multiple, fits) = match (format, scales) {
        (MatrixFormat::E4m3, Scales::E8m0(s)) => (128, s.len() >= (first_row + rows).div_ceil(128) * (cols / 128)),
        (MatrixFormat::E4m3, Scales::F32(s)) => (128, s.len() >= (first_row + rows).div_ceil(128) * (cols / 128) * 4),
        (MatrixFormat::E2m1, Scales::E8m0(s)) => (32, s.len() == rows * (cols / 32)),
        (MatrixFormat::Bf16 | MatrixFormat::F32, Scales::None) => (1, true),
        _ => (1, false),
    };
    if cols % multiple != 0 {
        bail!(InvalidArgument, "{cols} columns of {format:?} weights, not a multiple of {multiple}");
    }
    if !fits {
        bail!(
            InvalidArgument,
            "scales of {rows} x {cols} {format:?} weights from row {first_row} have a wrong kind or size"
        );
    }
    let tokens = job.output.len() / rows;
    if job.output.len() != tokens * rows {
        bail!(InvalidArgument, "output of {} values for {rows} rows", job.output.len());
    }
    let needed = if tokens == 0 { 0 } else { (tokens - 1) * job.input_stride + cols };
    if job.input_stride < cols || job.input.len() < needed {
        bail!(
            InvalidArgument,
            "input of {} values with stride {} for {tokens} tokens of {cols} columns",
            job.input.len(),
            job.input_stride
        );
    }
    Ok(tokens)
}

/// Rows that a unit of work takes of each job.
struct Bands {
    rows: usize,
}

impl Bands {
    /// Small enough that every thread gets several units, large enough that a unit's own preparations vanish.
    fn new(plans: &[Plan<'_>], threads: usize) -> Self {
        let least = if plans.iter().all(|p| p.tokens == 1) { 16 } else { 32 };
        // products in integers prepare nothing a unit; more of them end more nearly together
        let each = if plans.iter().all(|p| p.input.digits > 0) { 16 } else { 8 };
        let units = |rows: usize| {
            plans.iter().map(|p| p.weight.rows.div_ceil(rows) * p.tokens.div_ceil(TOKEN_BLOCK)).sum::<usize>()
        };
        let mut rows = 128;
        while rows > least && threads > 1 && units(rows) < each * threads {
            rows /= 2;
        }
        Self { rows }
    }

    /// Whether waking other threads would take longer than the work.
    fn is_small(&self, plans: &[Plan<'_>]) -> bool {
        plans.iter().map(|p| p.weight.data.len() * p.tokens).sum::<usize>() < 32 << 10
    }

    /// The bands `(first row, rows)` of a job; each lies within one tile of 128 stored rows.
    fn of(&self, plan: &Plan<'_>) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (total, offset, unit) = (plan.weight.rows, plan.weight.first_row, self.rows);
        let mut first = 0;
        std::iter::from_fn(move || {
            let rows = (unit - (offset + first) % unit).min(total - first);
            let band = (first, rows);
            first += rows;
            (rows > 0).then_some(band)
        })
    }

    /// For each unit, in order, one slice of the output a token.
    fn split_outputs<'o>(
        &self,
        plans: &[Plan<'_>],
        outputs: impl Iterator<Item = &'o mut [f32]>,
    ) -> Result<Vec<&'o mut [f32]>> {
        let mut slices = Vec::new();
        let mut rest: Vec<&mut [f32]> = Vec::new();
        for (plan, output) in plans.iter().zip(outputs) {
            rest.clear();
            reserve(&mut rest, plan.tokens, "the output rows of a step")?;
            rest.extend(output.chunks_mut(plan.weight.rows));
            for (_, rows) in self.of(plan) {
                reserve(&mut slices, plan.tokens, "the output slices of a step")?;
                for token in &mut rest {
                    let (band, after) = std::mem::take(token).split_at_mut(rows);
                    slices.push(band);
                    *token = after;
                }
            }
        }
        Ok(slices)
    }

    /// All units; those that read the same weights follow each other.
    fn units<'u, 'o>(&self, plans: &[Plan<'u>], slices: &'u mut [&'o mut [f32]]) -> Result<Vec<Unit<'u, 'o>>> {
        let mut units = Vec::new();
        let mut slices = slices;
        for plan in plans {
            for (first_row, rows) in self.of(plan) {
                reserve(&mut units, plan.tokens.div_ceil(TOKEN_BLOCK), "the units of a step")?;
                for first_token in (0..plan.tokens).step_by(TOKEN_BLOCK) {
                    let tokens = TOKEN_BLOCK.min(plan.tokens - first_token);
                    let (output, after) = slices.split_at_mut(tokens);
                    slices = after;
                    units.push(Unit { plan: *plan, first_row, rows, first_token, output });
                }
            }
        }
        // a job's tokens that are plans of their own meet each band together
        units.sort_by_key(|unit| (unit.plan.job, unit.first_row));
        Ok(units)
    }
}

/// A band of rows times a block of tokens.
struct Unit<'u, 'o> {
    plan: Plan<'u>,
    first_row: usize,
    rows: usize,
    first_token: usize,
    /// `[rows]` a token.
    output: &'u mut [&'o mut [f32]],
}

/// Runs a unit, or those of a band's tokens that are plans of their own.
fn run_units(units: &mut [Unit<'_, '_>], simd: Simd, prepared: &[f32], digits: &[Digits], worker: &mut Worker) {
    let exact = |unit: &Unit<'_, '_>| DigitDots::takes(unit.plan.input.own_digits(digits));
    if units.len() == 1 || !units.iter().all(exact) {
        return units.iter_mut().for_each(|unit| unit.run(simd, prepared, digits, worker));
    }
    let mut rest = units;
    for passes in (1..=rest.len().div_ceil(DIGIT_TOKENS)).rev() {
        let count = rest.len().div_ceil(passes);
        let (units, after) = std::mem::take(&mut rest).split_at_mut(count);
        rest = after;
        match units {
            [a, b, c, d] => together([a, b, c, d], simd, prepared, digits, worker),
            [a, b, c] => together([a, b, c], simd, prepared, digits, worker),
            [a, b] => together([a, b], simd, prepared, digits, worker),
            units => units.iter_mut().for_each(|unit| unit.run(simd, prepared, digits, worker)),
        }
    }
}

/// Tokens whose inputs are there in digits, with one band.
fn together<const T: usize>(
    units: [&mut Unit<'_, '_>; T],
    simd: Simd,
    prepared: &[f32],
    digits: &[Digits],
    worker: &mut Worker,
) {
    let dots = units.map(|unit| {
        let Plan { weight, input, .. } = unit.plan;
        let weights = e2m1_rows(&weight.band(unit.first_row, unit.rows));
        let x = &prepared[input.offset..][..input.prepared_len()];
        DigitDots { dots: Dots { weights, x, out: &mut *unit.output[0] }, digits: input.own_digits(digits) }
    });
    FewDigitDots { dots, scratch: aligned(&mut worker.block, FewDigitDots::<T>::SCRATCH) }.run(simd);
}

/// A band of E2M1 weights as the kernels take it.
fn e2m1_rows<'a>(band: &MatrixRef<'a>) -> Rows<'a> {
    let Scales::E8m0(scales) = band.scales else { unreachable!("checked with the job") };
    Rows { storage: Storage::E2m1, rows: band.rows, cols: band.cols, data: band.data, scales, factors: [1.0, 1.0] }
}

impl Unit<'_, '_> {
    /// Whether both are tokens of one job that are plans of their own, at the same band.
    fn are_tokens_of_a_band(&self, other: &Self) -> bool {
        let is_same = (self.plan.job, self.first_row) == (other.plan.job, other.first_row);
        is_same && self.plan.tokens == 1
    }

    fn run(&mut self, simd: Simd, prepared: &[f32], digits: &[Digits], worker: &mut Worker) {
        let Plan { weight, input, tokens: all_tokens, .. } = self.plan;
        let storage = self.plan.storage();
        let tokens = self.output.len();
        let band = weight.band(self.first_row, self.rows);
        let tile = band.first_row / 128 * (weight.cols / 128);
        let (scales, factors) = match (storage, band.scales) {
            (Storage::E2m1, Scales::E8m0(s)) => (s, [1.0, 1.0]),
            (Storage::E4m3Rounded, Scales::F32(s)) => (&s[4 * tile..][..weight.cols / 128 * 4], [1.0, 1.0]),
            _ => (&[][..], [1.0, 1.0]),
        };
        let mut rows = Rows { storage, rows: self.rows, cols: weight.cols, data: band.data, scales, factors };

        let mut x = &prepared[input.offset..][..input.prepared_len()];
        let mut x_stride = all_tokens * K_BLOCK;
        let mut first_token = self.first_token;
        if storage == Storage::E4m3 {
            let tile_scale = |i: usize| match band.scales {
                Scales::E8m0(s) => e8m0_value(s[tile + i]),
                Scales::F32(s) => f32::from_le_bytes(std::array::from_fn(|b| s[4 * (tile + i) + b])),
                Scales::None => 1.0,
            };
            let largest = (0..weight.cols / 128).map(tile_scale).fold(0.0, largest_power);
            rows.factors = [E4M3_RESCALE, largest];
            let input_scale = f64::from(simd.e4m3_exponent() as i32 - E4M3_PRODUCTS).exp2();
            // exact for powers of two; float64 so that the quotient's range cannot matter
            let factor = |i: usize| (f64::from(tile_scale(i)) / f64::from(largest) * input_scale) as f32;
            let scaled = aligned(&mut worker.scaled, tokens * weight.cols);
            if input.interleaved {
                for share in Few::shares(tokens) {
                    let (all, tile) = (share.start * weight.cols..share.end * weight.cols, 128 * share.len());
                    let tiles = x[all.clone()].chunks(tile).zip(scaled[all].chunks_mut(tile));
                    tiles.enumerate().for_each(|(i, (from, to))| scale(simd, from, factor(i), to));
                }
            } else {
                for (b, first_col) in (0..weight.cols).step_by(K_BLOCK).enumerate() {
                    let width = K_BLOCK.min(weight.cols - first_col);
                    let from = &x[b * x_stride + first_token * width..][..tokens * width];
                    let to = &mut scaled[b * tokens * K_BLOCK..][..tokens * width];
                    for (from, to) in from.chunks(width).zip(to.chunks_mut(width)) {
                        for (i, (from, to)) in from.chunks(128).zip(to.chunks_mut(128)).enumerate() {
                            scale(simd, from, factor(first_col / 128 + i), to);
                        }
                    }
                }
            }
            (x, x_stride, first_token) = (scaled, tokens * K_BLOCK, 0);
        }

        if all_tokens == 1 && storage != Storage::E4m3Rounded {
            let dots = Dots { weights: rows, x, out: self.output[0] };
            let digits = input.own_digits(digits);
            return if DigitDots::takes(digits) { DigitDots { dots, digits }.run(simd) } else { dots.run(simd) };
        }
        if input.interleaved {
            return Few { weights: rows, x, out: self.output }.run(simd);
        }
        let scratch = aligned(&mut worker.block, Block::scratch(simd));
        Block { weights: rows, x, x_stride, first_token, out: self.output, scratch }.run(simd);
    }
}

/// Products with E4M3 weights are kept at two to the minus this times their value, far from both ends of the range: inputs
/// are multiplied by what decoding lacks to that.
const E4M3_PRODUCTS: i32 = 40;
/// The way back.
const E4M3_RESCALE: f32 = (1_u64 << E4M3_PRODUCTS) as f32;

/// The largest power of two not above the finite magnitudes seen so far; 1 if there is none but zeros.
fn largest_power(so_far: f32, scale: f32) -> f32 {
    let scale = scale.abs();
    if !scale.is_finite() || scale <= so_far {
        return so_far;
    }
    let bits = scale.to_bits();
    let normal = f32::from_bits(bits & 0x7F80_0000);
    if normal > 0.0 { normal } else { f32::from_bits(1 << bits.ilog2()) }
}

impl Scratch {
    fn fit(&mut self, plans: &[Plan<'_>], prepared: usize, digits: usize, threads: usize, simd: Simd) -> Result<()> {
        grow(&mut self.prepared, prepared, "prepared inputs")?;
        if self.digits.len() < digits {
            let more = digits - self.digits.len();
            reserve(&mut self.digits, more, "inputs in digits")?;
            self.digits.resize(digits, Digits::ZERO);
        }
        let threads = threads.max(1);
        if self.workers.len() < threads {
            let more = threads - self.workers.len();
            reserve(&mut self.workers, more, "the threads' scratch")?;
            self.workers.resize_with(threads, Worker::default);
        }
        let scaled = |p: &Plan<'_>| p.tokens.min(TOKEN_BLOCK) * p.input.padded;
        let scaled = plans.iter().filter(|p| p.storage() == Storage::E4m3).map(scaled).max().unwrap_or(0);
        let is_alone = plans.windows(2).all(|p| p[0].job != p[1].job) && plans.iter().all(|p| p.tokens <= 1);
        let blocked = !is_alone || plans.iter().any(|p| p.storage() == Storage::E4m3Rounded);
        let block = if blocked { Block::scratch(simd) } else { 0 };
        for worker in &mut self.workers {
            grow(&mut worker.scaled, scaled, "scaled inputs")?;
            grow(&mut worker.block, block, "decoded weights")?;
        }
        Ok(())
    }
}

/// Floats of a cache line, to which scratch is aligned.
const ALIGNED: usize = 16;

/// Makes room for `len` aligned floats.
fn grow(buffer: &mut Vec<f32>, len: usize, what: &str) -> Result<()> {
    if len > 0 && buffer.len() < len + ALIGNED {
        let more = len + ALIGNED - buffer.len();
        reserve(buffer, more, what)?;
        buffer.resize(len + ALIGNED, 0.0);
    }
    Ok(())
}

/// The first `len` floats of a grown buffer that start at a cache line.
fn aligned(buffer: &mut [f32], len: usize) -> &mut [f32] {
    if len == 0 {
        return &mut [];
    }
    let skip = buffer.as_ptr().align_offset(ALIGNED * size_of::<f32>()).min(ALIGNED);
    &mut buffer[skip..][..len]
}

/// Room for `more` elements, or `OutOfMemory`.
fn reserve<T>(buffer: &mut Vec<T>, more: usize, what: &str) -> Result<()> {
    let bytes = (buffer.len() + more) as u64 * size_of::<T>() as u64;
    buffer.try_reserve(more).map_err(|_| Error::out_of_memory(what, bytes))
}

#[cfg(test)]
mod tests;
