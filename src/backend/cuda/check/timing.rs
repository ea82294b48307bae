//! How fast the operations are on the shapes of V4-Flash: graph replays over rotating buffers larger than the L2 cache,
//! medians; random data throughout.

use std::fmt;

use super::fusions;
use crate::backend::cuda::device::Gpu;
use crate::backend::cuda::memory::{Arena, Buffer, Plain};
use crate::backend::cuda::ops::{
    self, Attention, AttentionPath, Entries, ExpertFormat, Experts, Finish, GROUP_ROWS, Group, Grouping, HEAD_DIM,
    INDEX_DIM, Job, KEY_BYTES, MIX_FLOATS, Output, Pages, Product, Project, ROW_BYTES, STREAMS, Sample, Scores,
    Sequence, Swiglu, TopK, Weight,
};
use crate::backend::cuda::stream::{Event, Stream};
use crate::error::Result;
use crate::sampler::{Sampler, SamplerOptions};
use crate::tensor::format::bf16_bits;

const D: usize = 4096;
pub(super) const HEADS: usize = 64;
const REPLAYS: usize = 9;
/// Bytes of the random block that buffers are filled from.
const RANDOM: usize = 64 << 20;

/// Time of one operation.
#[derive(Clone, Debug)]
pub struct Timing {
    /// The operation and its sizes.
    pub op: String,
    /// Microseconds of one call.
    pub micros: f64,
    /// Bytes that must move.
    pub bytes: f64,
    /// Floating-point operations that must be done; 0 where bytes decide.
    pub flops: f64,
    /// Microseconds of the same work in separate kernels, for fused operations.
    pub apart: Option<f64>,
}

impl fmt::Display for Timing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { op, micros, bytes, flops, apart } = self;
        write!(f, "{op:46} {micros:9.2} us {:8.0} GB/s", bytes / micros / 1e3)?;
        if *flops > 0.0 {
            write!(f, " {:7.1} TFLOP/s", flops / micros / 1e6)?;
        }
        apart.map_or(Ok(()), |apart| write!(f, ", in separate kernels {apart:.2} us, {:.2} times", apart / micros))
    }
}

pub(super) struct Bench<'a> {
    pub(super) stream: Stream,
    gpu: &'a Gpu,
    arena: Arena,
    random: Buffer<u8>,
    floats: Buffer<u8>,
    rows: Buffer<u8>,
    seen: &'a mut dyn FnMut(&Timing),
}

/// Bytes of the random KV rows that pages are filled from: whole pages.
const RANDOM_ROWS: usize = 1700 * 64 * ROW_BYTES;

/// Times the operations and tells `seen` each as it comes; `only` filters by group.
///
/// # Errors
/// As opening the device; `OutOfMemory` below some 12 GB of free device memory.
pub fn timings(device: u32, only: Option<&str>, seen: &mut dyn FnMut(&Timing)) -> Result<()> {
    type Run = fn(&mut Bench<'_>) -> Result<()>;
    let groups: [(&str, Run); 9] = [
        ("linear", linear),
        ("experts", experts),
        ("hyper", hyper),
        ("fusion: insert", fusions::insert),
        ("fusion: compress", fusions::compress),
        ("fusion: attention's output", fusions::output),
        ("indexer", indexer),
        ("attend", attend),
        ("sample", sample),
    ];
    let gpu = Gpu::open(device)?;
    for (name, run) in groups {
        if only.is_none_or(|only| name.contains(only)) {
            let mut bench = Bench::new(&gpu, seen)?;
            run(&mut bench).map_err(|e| e.context(name))?;
        }
    }
    Ok(())
}

impl<'a> Bench<'a> {
    fn new(gpu: &'a Gpu, seen: &'a mut dyn FnMut(&Timing)) -> Result<Self> {
        let stream = Stream::new(gpu)?;
        let mut arena = Arena::new(gpu, 12 << 30)?;
        let (random, floats) = (arena.take("random bytes", RANDOM)?, arena.take("random floats", RANDOM)?);
        let rows = arena.take("random rows", RANDOM_ROWS)?;
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u32
        };
        // no byte is a NaN of E4M3, and bytes as E8M0 scales are near one
        let bytes: Vec<u8> = (0..RANDOM).map(|_| (next() as u8) & 0xF7).collect();
        stream.write(&random, &bytes)?;
        let values: Vec<u8> =
            (0..RANDOM / 2).flat_map(|_| bf16_bits(next() as f32 / (1u32 << 30) as f32 - 1.0).to_le_bytes()).collect();
        stream.write(&floats, &values)?;
        // values near one, as those of a cache: codes, rotary values, scales
        let mut kv: Vec<u8> = (0..RANDOM_ROWS).map(|_| (next() as u8) & 0xF7).collect();
        for row in kv.chunks_exact_mut(ROW_BYTES) {
            for value in row[448..576].chunks_exact_mut(2) {
                value.copy_from_slice(&bf16_bits(next() as f32 / (1u32 << 30) as f32 - 1.0).to_le_bytes());
            }
            for scale in &mut row[576..] {
                *scale = 117 + (next() % 4) as u8;
            }
        }
        stream.write(&rows, &kv)?;
        Ok(Self { stream, gpu, arena, random, floats, rows, seen })
    }

    /// Gives all buffers but the random ones back.
    pub(super) fn restart(&mut self) -> Result<()> {
        self.arena.restart();
        self.random = self.arena.take("random bytes", RANDOM)?;
        self.floats = self.arena.take("random floats", RANDOM)?;
        self.rows = self.arena.take("random rows", RANDOM_ROWS)?;
        Ok(())
    }

    pub(super) fn fill<T: Plain>(&mut self, len: usize, from: &Buffer<u8>) -> Result<Buffer<T>> {
        let buffer = self.arena.take::<T>("a benchmark", len)?;
        let bytes = buffer.as_bytes();
        for first in (0..bytes.len()).step_by(from.len()) {
            let n = from.len().min(bytes.len() - first);
            self.stream.copy(&from.slice(0..n)?, &bytes.slice(first..first + n)?)?;
        }
        Ok(buffer)
    }

    fn codes(&mut self, len: usize) -> Result<Buffer<u8>> {
        let from = self.random.clone();
        self.fill(len, &from)
    }

    fn scales(&mut self, len: usize) -> Result<Buffer<u8>> {
        let buffer = self.arena.take::<u8>("a benchmark", len)?;
        self.stream.fill(&buffer, 120)?;
        Ok(buffer)
    }

    pub(super) fn bf16(&mut self, len: usize) -> Result<Buffer<u16>> {
        let from = self.floats.clone();
        self.fill(len, &from)
    }

    pub(super) fn put<T: Plain>(&mut self, values: &[T]) -> Result<Buffer<T>> {
        let buffer = self.arena.take("a benchmark", values.len())?;
        self.stream.write(&buffer, values)?;
        Ok(buffer)
    }

    /// float32 values between -1 and 1.
    pub(super) fn f32(&mut self, len: usize) -> Result<Buffer<f32>> {
        let mut state = len as u64;
        let values: Vec<f32> = (0..len.min(1 << 20))
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
            })
            .collect();
        let buffer = self.arena.take::<f32>("a benchmark", len)?;
        for first in (0..len).step_by(values.len().max(1)) {
            let n = values.len().min(len - first);
            self.stream.write(&buffer.slice(first..first + n)?, &values[..n])?;
        }
        Ok(buffer)
    }

    pub(super) fn out<T: Plain>(&mut self, len: usize) -> Result<Buffer<T>> {
        self.arena.take("a benchmark", len)
    }

    /// Median time of `calls` calls in one graph, divided by their number.
    pub(super) fn time(
        &mut self,
        op: String,
        bytes: f64,
        flops: f64,
        calls: usize,
        call: impl Fn(&Stream, usize) -> Result<()>,
    ) -> Result<()> {
        let [micros] = self.medians(calls, [&call])?;
        (self.seen)(&Timing { op, micros, bytes, flops, apart: None });
        Ok(())
    }

    /// Reports a fused operation, `[itself, in separate kernels]`.
    pub(super) fn compare(&mut self, op: String, bytes: f64, [micros, apart]: [f64; 2]) {
        (self.seen)(&Timing { op, micros, bytes, flops: 0.0, apart: Some(apart) });
    }

    /// The same for several ways to do something, whose replays take turns.
    pub(super) fn medians<const N: usize>(&self, calls: usize, ways: [Way<'_>; N]) -> Result<[f64; N]> {
        let mut graphs = Vec::new();
        for way in ways {
            way(&self.stream, 0)?;
            self.stream.synchronize()?;
            graphs.push(self.stream.capture(|| (0..calls).try_for_each(|i| way(&self.stream, i)))?);
        }
        let (start, end) = (Event::new(self.gpu)?, Event::new(self.gpu)?);
        let mut times = [(); N].map(|()| Vec::new());
        for i in 0..REPLAYS + 2 {
            for (graph, times) in graphs.iter().zip(&mut times) {
                self.stream.record(&start)?;
                self.stream.replay(graph)?;
                self.stream.record(&end)?;
                end.synchronize()?;
                if i >= 2 {
                    times.push(end.micros_since(&start)? / calls as f64);
                }
            }
        }
        Ok(times.map(|mut times| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        }))
    }
}

/// One way to do something: queues call `i`.
pub(super) type Way<'a> = &'a dyn Fn(&Stream, usize) -> Result<()>;

impl Bench<'_> {
    /// Copies of a buffer of `bytes` bytes that together exceed the L2 cache several times.
    pub(super) fn copies(&self, bytes: usize) -> usize {
        (6 * self.gpu.limits().l2_bytes as usize).div_ceil(bytes).clamp(2, 64)
    }
}

fn linear(b: &mut Bench<'_>) -> Result<()> {
    let shapes = [
        ("wq_b", 32768, 1024),
        ("wo_b", 4096, 8192),
        ("shared gate+up", 4096, 4096),
        ("wq_a", 1024, 4096),
        ("compressor bf16", 2048, 4096),
        ("head bf16", 129_280, 4096),
    ];
    for (name, rows, cols) in shapes {
        let is_bf16 = name.contains("bf16");
        let size = rows * cols * if is_bf16 { 2 } else { 1 };
        let n = b.copies(size).min(16);
        let mut weights = Vec::new();
        for _ in 0..n {
            weights.push(if is_bf16 {
                Weight::Bf16(b.bf16(rows * cols)?)
            } else {
                Weight::E4m3 { data: b.codes(rows * cols)?, scales: b.scales(rows.div_ceil(128) * cols / 128)? }
            });
        }
        for tokens in [1, 8, 16, 64, 256, 4096] {
            if rows > 100_000 && tokens > 64 {
                continue;
            }
            let x = b.bf16(tokens * cols)?;
            let y = b.out::<u16>(tokens * rows)?;
            let len = if tokens > 64 { ops::images_len(cols, tokens) } else { ops::workspace_len(rows, cols, tokens) };
            let workspace = b.out::<f32>(len)?;
            let flops = 2.0 * (rows * cols * tokens) as f64;
            let bytes = (size + 2 * tokens * (rows + cols)) as f64;
            b.time(format!("linear {name} {rows}x{cols}, {tokens} tokens"), bytes, flops, n, |stream, i| {
                let y = Output::Bf16(y.clone());
                let job =
                    Job { weight: &weights[i], first_row: 0, rows, cols, x: &x, x_stride: cols, y, y_stride: rows };
                ops::linear(stream, &[job], tokens, Some(&workspace))
            })?;
            if tokens <= 64 || !ops::has_chains(b.gpu) {
                continue;
            }
            b.time(format!("prompt {name} {rows}x{cols}, {tokens} tokens"), bytes, flops, n, |stream, i| {
                let y = Output::Bf16(y.clone());
                let job =
                    Job { weight: &weights[i], first_row: 0, rows, cols, x: &x, x_stride: cols, y, y_stride: rows };
                ops::linear_chain(stream, &[job], tokens, &workspace)
            })?;
        }
        b.restart()?;
    }
    Ok(())
}

fn experts(b: &mut Bench<'_>) -> Result<()> {
    let (experts, top_k, inter) = (256usize, 6, 2048);
    let bank = |b: &mut Bench<'_>, rows: usize, cols: usize| -> Result<(Buffer<u64>, Buffer<u64>)> {
        let data = b.codes(experts * rows * cols / 2)?;
        let scales = b.scales(experts * rows * cols / 32)?;
        let at = |buffer: &Buffer<u8>, each: usize| -> Vec<u64> {
            (0..experts).map(|e| buffer.address() + (e * each) as u64).collect()
        };
        let (data, scales) = (at(&data, rows * cols / 2), at(&scales, rows * cols / 32));
        Ok((b.put(&data)?, b.put(&scales)?))
    };
    let (w1, w3, w2) = (bank(b, inter, D)?, bank(b, inter, D)?, bank(b, D, inter)?);
    for tokens in [1usize, 8, 64, 256, 4096, 8192] {
        let rounds = if tokens == 1 { 12 } else { 2 };
        let places = tokens * top_k;
        let mut groupings = Vec::new();
        let mut touched = 0;
        for round in 0..rounds {
            let ids: Vec<u32> =
                (0..places).map(|i| ((i / top_k * 37 + i % top_k * 41 + round * 17) % experts) as u32).collect();
            let mut sorted = ids.clone();
            sorted.sort_unstable();
            sorted.dedup();
            touched = sorted.len();
            let ids = b.put(&ids)?;
            groupings.push(Grouping::new(&mut b.arena, ids, experts)?);
        }
        let x = b.bf16(tokens * D)?;
        let (up, act, down) = (b.out(places * 2 * inter)?, b.out(places * inter)?, b.out(places * D)?);
        let (shared, y) = (b.bf16(tokens * D)?, b.out(tokens * D)?);
        let weights = b.f32(places)?;
        let workspace = b.out(groupings[0].images_len(D))?;
        let size = (touched * 3 * inter * D) as f64 * (0.5 + 1.0 / 32.0);
        let flops = 6.0 * (places * inter * D) as f64;
        for g in &groupings {
            ops::group(&b.stream, g)?;
        }
        let up_call = |stream: &Stream, g: &Grouping| {
            let matrices = [Experts { data: &w1.0, scales: &w1.1 }, Experts { data: &w3.0, scales: &w3.1 }];
            let (rows, cols, format) = (inter, D, ExpertFormat::E2m1);
            let a = Product { matrices: &matrices, rows, cols, format, x: &x, top_k: Some(top_k), y: &up, tokens };
            ops::expert_product(stream, g, &a, Some(&workspace), None)
        };
        let down_call = |stream: &Stream, g: &Grouping| {
            let matrices = [Experts { data: &w2.0, scales: &w2.1 }];
            let (rows, cols, format) = (D, inter, ExpertFormat::E2m1);
            let a = Product { matrices: &matrices, rows, cols, format, x: &act, top_k: None, y: &down, tokens };
            ops::expert_product(stream, g, &a, Some(&workspace), None)
        };
        let name = format!("{tokens} tokens, {touched} experts");
        b.time(format!("experts gate+up, {name}"), size * 2.0 / 3.0, flops * 2.0 / 3.0, rounds, |stream, i| {
            up_call(stream, &groupings[i])
        })?;
        b.time(format!("experts down, {name}"), size / 3.0, flops / 3.0, rounds, |stream, i| {
            down_call(stream, &groupings[i])
        })?;
        if tokens > 64 {
            let prompts = groupings.iter().map(|g| g.part(0..places, true)).collect::<Result<Vec<_>>>()?;
            b.time(format!("prompt gate+up, {name}"), size * 2.0 / 3.0, flops * 2.0 / 3.0, rounds, |stream, i| {
                up_call(stream, &prompts[i])
            })?;
            b.time(format!("prompt down, {name}"), size / 3.0, flops / 3.0, rounds, |stream, i| {
                down_call(stream, &prompts[i])
            })?;
        }
        b.time(format!("experts all 5 launches, {name}"), size, flops, rounds, |stream, i| {
            let g = &groupings[i];
            ops::group(stream, g)?;
            up_call(stream, g)?;
            let (routed, routes) = (Some((&up, &act)), (&weights, &g.order));
            let swiglu = Swiglu { routed, routes, shared: None, width: inter, limit: 10.0, quantise: true };
            ops::swiglu(stream, &swiglu)?;
            down_call(stream, g)?;
            ops::combine(stream, &down, &shared, (&g.places, &g.used()?), &y, D)
        })?;
    }
    Ok(())
}

fn hyper(b: &mut Bench<'_>) -> Result<()> {
    for tokens in [1, 8, 64, 4096] {
        let n = b.copies(tokens * STREAMS * D * 2).min(24);
        let basis = (0..n).map(|_| b.f32(24 * STREAMS * D)).collect::<Result<Vec<_>>>()?;
        let (x, y) = (b.bf16(tokens * STREAMS * D)?, b.bf16(tokens * D)?);
        let mixes = b.f32(tokens * MIX_FLOATS)?;
        let (streams, parts) = (b.out(tokens * STREAMS * D)?, b.out(ops::parts_len(tokens, D))?);
        let (scale, base, norm) = (b.f32(3)?, b.f32(24)?, b.f32(D)?);
        let (new_mixes, out, quantised) = (b.out(tokens * MIX_FLOATS)?, b.out(tokens * D)?, b.out(tokens * D)?);
        let bytes = (tokens * D * 2 * (2 * STREAMS + 3) + 24 * STREAMS * D * 4) as f64;
        b.time(format!("hyper seam (2 launches), {tokens} tokens"), bytes, 0.0, n, |stream, i| {
            let expand = Some((&y, &mixes, &streams));
            ops::project(stream, &Project { x: &x, expand, basis: &basis[i], parts: &parts, width: D })?;
            let a = Finish {
                x: &streams,
                rows: None,
                parts: &parts,
                scale: &scale,
                base: &base,
                norm: &norm,
                mixes: Some(&new_mixes),
                out: &out,
                quantised: Some(&quantised),
                iterations: 20,
                hc_eps: 1e-6,
                norm_eps: 1e-6,
            };
            ops::finish(stream, &a)
        })?;
    }
    Ok(())
}

pub(super) fn turns(b: &mut Bench<'_>, rows: usize) -> Result<Buffer<[f32; 2]>> {
    b.put(&vec![[0.6, 0.8]; rows * 32])
}

/// A table of pages 0, 1, 2, .. of `sequences` sequences.
pub(super) struct Table {
    memory: Buffer<u8>,
    ids: Buffer<u32>,
    pitch: usize,
    page_bytes: usize,
}

impl Table {
    pub(super) fn new(b: &mut Bench<'_>, sequences: usize, pitch: usize, page_bytes: usize) -> Result<Self> {
        let count = sequences * pitch;
        // neighbouring entries lie apart, as they do in use
        let ids: Vec<u32> = (0..count).map(|i| ((i * 7919) % count) as u32).collect();
        let ids = if count.is_multiple_of(7919) { (0..count as u32).collect() } else { ids };
        let from = if page_bytes.is_multiple_of(ROW_BYTES) { b.rows.clone() } else { b.random.clone() };
        Ok(Self { memory: b.fill(count * page_bytes, &from)?, ids: b.put(&ids)?, pitch, page_bytes })
    }

    pub(super) fn pages(&self) -> Pages<'_> {
        Pages { memory: &self.memory, ids: &self.ids, pitch: self.pitch, page_bytes: self.page_bytes }
    }
}

fn indexer(b: &mut Bench<'_>) -> Result<()> {
    let decoding = [(1, 2048), (1, 16_384), (1, 65_536), (1, 262_144), (8, 262_144), (64, 16_384)];
    for (sequences, rows, keys) in decoding.into_iter().map(|(n, keys)| (n, 1, keys)).chain([(1, 512, 16_384)]) {
        let (heads, k, all) = (64, 512, sequences * rows);
        let (q, weights) = (b.bf16(all * heads * INDEX_DIM)?, b.bf16(all * heads)?);
        let start = (keys * 4 - rows) as u32;
        let mut groups = Vec::new();
        for s in 0..sequences as u32 {
            for first in (0..rows as u32).step_by(GROUP_ROWS) {
                let (first_row, rows) = (s * rows as u32 + first, rows.min(GROUP_ROWS) as u32);
                groups.push(Group { sequence: s, first_row, rows, position: start + first });
            }
        }
        let positions: Vec<u32> = (0..all).map(|row| start + (row % rows) as u32).collect();
        let (groups, positions) = (b.put(&groups)?, b.put(&positions)?);
        let n = b.copies(sequences * keys * KEY_BYTES).min(24);
        let tables = (0..n).map(|_| Table::new(b, sequences, keys / 64, 64 * KEY_BYTES)).collect::<Result<Vec<_>>>()?;
        let (scores, ids, counts) = (b.out(all * keys)?, b.out(all * k)?, b.out(all)?);
        let candidates = all * ops::top_k_parts(keys, k);
        let (values, places) = (b.out(candidates)?, b.out(candidates)?);
        let highest = b.out(all * ops::highest_len(keys))?;
        let by_hopper = ops::hopper_index(b.gpu, true, k).then_some(&highest);
        let bytes = (sequences * keys * KEY_BYTES + 4 * all * keys) as f64;
        let flops = (2 * all * keys * heads * INDEX_DIM) as f64;
        let shape = if rows == 1 { format!("{sequences} x {keys}") } else { format!("{rows} rows x {keys}") };
        let score = |stream: &Stream, i: usize, highest| {
            let a = Scores {
                q: &q,
                weights: &weights,
                groups: &groups,
                keys: tables[i].pages(),
                scores: &scores,
                highest,
                first_row: 0,
                pitch: keys,
                sequences,
                heads,
                visible: keys,
                stepwise: true,
                bad: None,
            };
            ops::scores(stream, &a)
        };
        let choose = |stream: &Stream, highest| {
            let (positions, parts) = (Some((&positions, 4)), Some((&values, &places)));
            let a = TopK { scores: &scores, pitch: keys, positions, ids: &ids, counts: &counts, k, parts, highest };
            ops::top_k(stream, &a)
        };
        // the kernels that the device uses, and the portable ones if those are others
        let kinds = [Some((by_hopper, "")), by_hopper.map(|_| (None, "portable "))];
        for (highest, name) in kinds.into_iter().flatten() {
            b.time(format!("{name}index_scores, {shape}"), bytes, flops, n, |s, i| score(s, i, highest))?;
            b.time(format!("{name}top_k {k}, {shape}"), (4 * all * keys) as f64, 0.0, 10, |s, _| choose(s, highest))?;
            b.time(format!("{name}index_scores and top_k {k}, {shape}"), bytes, flops, n, |s, i| {
                score(s, i, highest)?;
                choose(s, highest)
            })?;
        }
        b.restart()?;
    }
    Ok(())
}

fn attend(b: &mut Bench<'_>) -> Result<()> {
    // V4-Flash and V4-Pro
    for (heads, chosen) in [(64, 512), (128, 1024)] {
        for batch in [1, 8, 64, 128] {
            attend_case(b, "window", heads, batch, 1, 0, 0)?;
            attend_case(b, &format!("c4a {chosen}"), heads, batch, 1, 4, chosen)?;
            attend_case(b, "c128a 64k", heads, batch, 1, 128, 512)?;
            if batch <= 64 {
                attend_case(b, "c128a 1M", heads, batch, 1, 128, 8192)?;
            }
        }
        attend_case(b, &format!("c4a {chosen}, prefill"), heads, 1, 4096, 4, chosen)?;
    }
    attend_case(b, "window, prefill", 64, 1, 4096, 0, 0)
}

fn attend_case(
    b: &mut Bench<'_>,
    name: &str,
    heads: usize,
    batch: usize,
    per: usize,
    ratio: usize,
    keys: usize,
) -> Result<()> {
    let a = Queries::new(b, heads, batch, per, ratio, keys)?;
    let op = format!("attend {heads} heads, {name}, {} rows of {batch}", batch * per);
    b.time(op, a.bytes(), a.flops(), a.calls(), |stream, i| a.attend(stream, i, &a.turns, false))?;
    b.restart()
}

/// Queries with a window of 128 and `keys` entries: of 20,480 for ratio 4, all for ratio 128.
pub(super) struct Queries {
    pub(super) out: Buffer<u16>,
    pub(super) turns: Buffer<[f32; 2]>,
    ratio: usize,
    keys: usize,
    list: Buffer<Sequence>,
    sequence: Buffer<u32>,
    /// Of each call.
    ids: Vec<Buffer<u32>>,
    q: Vec<Buffer<u16>>,
    counts: Buffer<u32>,
    ring: Table,
    pages: Table,
    sink: Buffer<f32>,
    staged: Buffer<u8>,
    /// Workspace where keys are split.
    parts: Option<(Buffer<f32>, Buffer<[f32; 2]>)>,
}

impl Queries {
    pub(super) fn new(
        b: &mut Bench<'_>,
        heads: usize,
        batch: usize,
        per: usize,
        ratio: usize,
        keys: usize,
    ) -> Result<Self> {
        let rows = batch * per;
        let entries = if ratio == 4 { 20_480 } else { keys };
        let end = (ratio.max(1) * entries).max(128 + per);
        let start = end - per;
        let list: Vec<Sequence> = (0..batch)
            .map(|s| Sequence { start: start as u32, first_row: (s * per) as u32, rows: per as u32, unused: 0 })
            .collect();
        let sequence: Vec<u32> = (0..rows).map(|r| (r / per) as u32).collect();
        let chosen = if ratio == 4 { keys } else { 0 };
        let n = if per > 1 { 2 } else { 8 };
        let mut ids = Vec::new();
        for call in 0..n {
            // others for each query and call
            let id = |i: usize| ((i % chosen * 37 + i / chosen * 11 + call * 5003) % (start / 4)) as u32;
            ids.push(b.put(&(0..rows * chosen).map(id).collect::<Vec<_>>())?);
        }
        let (per_page, page_bytes) = if ratio == 128 { (2, 2 * ROW_BYTES) } else { (64, 64 * ROW_BYTES) };
        let split = rows * 32 * heads;
        let random = b.rows.clone();
        Ok(Self {
            list: b.put(&list)?,
            sequence: b.put(&sequence)?,
            ids,
            counts: b.put(&vec![chosen as u32; rows])?,
            ring: Table::new(b, batch, 2, 64 * ROW_BYTES)?,
            pages: Table::new(b, batch, (entries + 1).div_ceil(per_page).max(1), page_bytes)?,
            q: (0..n).map(|_| b.bf16(rows * heads * HEAD_DIM)).collect::<Result<Vec<_>>>()?,
            out: b.out(rows * heads * HEAD_DIM)?,
            sink: b.f32(heads)?,
            turns: turns(b, rows)?,
            staged: b.fill(rows * ROW_BYTES, &random)?,
            parts: if per == 1 { Some((b.out(split * HEAD_DIM)?, b.out(split)?)) } else { None },
            ratio,
            keys,
        })
    }

    /// Calls with queries of their own.
    pub(super) fn calls(&self) -> usize {
        self.q.len()
    }

    fn flops(&self) -> f64 {
        4.0 * (self.out.len() * (128 + self.keys)) as f64
    }

    pub(super) fn bytes(&self) -> f64 {
        (self.sequence.len() * (128 + self.keys) * ROW_BYTES + self.out.len() * 4) as f64
    }

    pub(super) fn attend(&self, stream: &Stream, i: usize, turns: &Buffer<[f32; 2]>, quantise: bool) -> Result<()> {
        let entries = match self.ratio {
            0 => Entries::None,
            4 => {
                let (pages, ids, counts) = (self.pages.pages(), &self.ids[i], &self.counts);
                Entries::Selected { pages, ids, counts, width: self.keys }
            }
            _ => Entries::All { pages: self.pages.pages() },
        };
        let most_keys = 128 + self.keys;
        let path = match &self.parts {
            Some((out, sums)) => AttentionPath::Split { most_keys, out, sums },
            None => AttentionPath::Whole,
        };
        let a = Attention {
            q: &self.q[i],
            out: &self.out,
            sink: &self.sink,
            turns,
            sequence: &self.sequence,
            sequences: &self.list,
            staged: &self.staged,
            ring: self.ring.pages(),
            entries,
            window: 128,
            quantise,
            path,
        };
        ops::attend(stream, &a)
    }
}

/// Choices among logits as of a text: many that hardly count, a few that do.
fn sample(b: &mut Bench<'_>) -> Result<()> {
    let (vocab, plain) = (129_280, SamplerOptions::default());
    let settings = [
        ("greedy", SamplerOptions::greedy()),
        ("plain", plain.clone()),
        ("top-p 0.95", SamplerOptions { top_p: 0.95, ..plain.clone() }),
        ("top-k 40, top-p 0.95", SamplerOptions { top_k: 40, top_p: 0.95, temperature: 0.7, ..plain }),
    ];
    for (name, options) in settings {
        for rows in [1, 64] {
            let mut values = vec![0.0f32; rows * vocab];
            let mut state = 1u64;
            for value in &mut values {
                for _ in 0..4 {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    *value += 3.0 * ((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0);
                }
                *value += if state >> 33 < 1 << 19 { 12.0 } else { 0.0 };
            }
            let logits = b.put(&values)?;
            let Some(draw) = Sampler::new(options.clone())?.draw(vocab) else { continue };
            let draws = (0..rows).map(|row| ops::draw_words(&draw, row, 0)).collect::<Result<Vec<_>>>()?;
            let (draws, edits, tokens) = (b.put(&draws)?, b.put(&[[0; 4]])?, b.out(rows)?);
            b.time(format!("sample {name}, {rows} x {vocab}"), (4 * rows * vocab) as f64, 0.0, 10, |stream, _| {
                ops::sample(stream, &Sample { logits: &logits, vocab, draws: &draws, edits: &edits, tokens: &tokens })
            })?;
            b.restart()?;
        }
    }
    Ok(())
}
