//! Checks of what knows sequences and pages: insertion, compressors, indexer, attention.

use std::sync::Arc;

use super::dense::YARN;
use super::lab::{Lab, different, different_bits, distance};
use crate::backend::cpu::attention::{Attention as CpuAttention, Entries as CpuEntries, attend as cpu_attend};
use crate::backend::cpu::compressor::Compressor as CpuCompressor;
use crate::backend::cpu::indexer::{Queries, Selection, hadamard, scores as cpu_scores, select};
use crate::backend::cpu::norm::{head_norm, rms_norm, store_bf16};
use crate::backend::cpu::rope::{Rotations, frequencies};
use crate::backend::cuda::memory::{Arena, Buffer};
use crate::backend::cuda::ops::{
    self, Attention, AttentionPath, Compress, Compressor, Entries, GROUP_ROWS, Group, HEAD_DIM, INDEX_DIM, IndexQuery,
    Insert, KEY_BYTES, Pages, ROW_BYTES, Scores, Sequence, TopK,
};
use crate::cache::{CacheLayout, CacheManager, CacheOptions, KvFormat, LayerLayout, SequenceCache, Staged};
use crate::error::Result;
use crate::model::config::LayerKind;
use crate::tensor::format::{bf16_value, e2m1_round_trip, e4m3_round_trip};

const EPS: f32 = 1e-6;
/// A few results go to the bf16 neighbour where float32 sums have another order.
const NEIGHBOURS: f64 = 5e-4;
/// The same, where the neighbour may be one of E4M3 (2^-4) or E2M1 (2^-2) instead.
const CODES: f64 = 2e-2;
const WIDE: usize = 64 * ROW_BYTES;
const INDEX: usize = 64 * KEY_BYTES;
const NARROW: usize = 2 * ROW_BYTES;

fn layout(kind: LayerKind, window: usize) -> CacheLayout {
    let state = |c: Compressor| c.state_len();
    let (main_state, index_state) = match kind {
        LayerKind::Window => (0, 0),
        LayerKind::C4a => (state(Compressor::Main4), state(Compressor::Index4)),
        LayerKind::C128a => (state(Compressor::Main128), 0),
    };
    CacheLayout {
        format: KvFormat::Fp8,
        head_dim: HEAD_DIM,
        rope_dim: 64,
        index_dim: INDEX_DIM,
        window,
        layers: vec![LayerLayout { kind, main_state, index_state }],
    }
}

/// Pages of several sequences at scattered places of one bucket; unused memory is poison.
struct Table {
    memory: Vec<u8>,
    ids: Vec<u32>,
    pitch: usize,
    page_bytes: usize,
}

impl Table {
    fn new(lab: &mut Lab<'_>, sequences: usize, pitch: usize, page_bytes: usize) -> Self {
        let count = 2 * sequences * pitch + 3;
        let mut all: Vec<u32> = (0..count as u32).collect();
        for i in 0..sequences * pitch {
            let other = i + lab.below(count - i);
            all.swap(i, other);
        }
        Self { memory: vec![0xFF; count * page_bytes], ids: all[..sequences * pitch].to_vec(), pitch, page_bytes }
    }

    fn at(&self, sequence: usize, page: usize) -> usize {
        self.ids[sequence * self.pitch + page] as usize * self.page_bytes
    }

    fn set(&mut self, sequence: usize, j: usize, per_page: usize, bytes: &[u8]) {
        let at = self.at(sequence, j / per_page) + j % per_page * bytes.len();
        self.memory[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn get(&self, sequence: usize, j: usize, per_page: usize, len: usize) -> &[u8] {
        &self.memory[self.at(sequence, j / per_page) + j % per_page * len..][..len]
    }

    fn set_floats(&mut self, sequence: usize, values: &[f32]) {
        for (page, part) in values.chunks(self.page_bytes / 4).enumerate() {
            let at = self.at(sequence, page);
            for (bytes, v) in self.memory[at..].chunks_exact_mut(4).zip(part) {
                bytes.copy_from_slice(&v.to_le_bytes());
            }
        }
    }

    fn floats(&self, sequence: usize, len: usize) -> Vec<f32> {
        let per_page = self.page_bytes / 4;
        (0..len)
            .map(|i| {
                let at = self.at(sequence, i / per_page) + i % per_page * 4;
                f32::from_le_bytes(std::array::from_fn(|b| self.memory[at + b]))
            })
            .collect()
    }

    fn put(&self, lab: &mut Lab<'_>) -> Result<(Buffer<u8>, Buffer<u32>)> {
        Ok((lab.put(&self.memory)?, lab.put(&self.ids)?))
    }

    fn pages<'a>(&self, on_device: &'a (Buffer<u8>, Buffer<u32>)) -> Pages<'a> {
        Pages { memory: &on_device.0, ids: &on_device.1, pitch: self.pitch, page_bytes: self.page_bytes }
    }
}

/// Rows of several sequences.
struct Step {
    sequences: Vec<Sequence>,
    /// Sequence and position of each row.
    rows: Vec<(usize, usize)>,
    d_sequence: Buffer<u32>,
    d_sequences: Buffer<Sequence>,
    d_positions: Buffer<u32>,
    turns: Buffer<[f32; 2]>,
}

impl Step {
    /// `(start, rows)` of each sequence.
    fn new(lab: &mut Lab<'_>, parts: &[(usize, usize)]) -> Result<Self> {
        let (mut sequences, mut rows) = (Vec::new(), Vec::new());
        for (s, &(start, count)) in parts.iter().enumerate() {
            let first_row = rows.len() as u32;
            sequences.push(Sequence { start: start as u32, first_row, rows: count as u32, unused: 0 });
            rows.extend((start..start + count).map(|p| (s, p)));
        }
        let d_sequence = lab.put(&rows.iter().map(|r| r.0 as u32).collect::<Vec<_>>())?;
        let d_sequences = lab.put(&sequences)?;
        let d_positions = lab.put(&rows.iter().map(|r| r.1 as u32).collect::<Vec<_>>())?;
        let turns = lab.output(4 * rows.len() * 32)?;
        let (plain, yarn) =
            (lab.put(&frequencies(64, 10_000.0, None))?, lab.put(&frequencies(64, 160_000.0, Some(&YARN)))?);
        ops::rotations(&lab.stream, &d_positions, &plain, &yarn, &turns)?;
        Ok(Self { sequences, rows, d_sequence, d_sequences, d_positions, turns })
    }

    fn len(&self) -> usize {
        self.rows.len()
    }

    /// Table 0 to 3 of [`ops::rotations`].
    fn turns(&self, table: usize) -> Result<Buffer<[f32; 2]>> {
        let n = self.len() * 32;
        self.turns.slice(table * n..(table + 1) * n)
    }
}

fn yarn_rotations(positions: &[usize]) -> Result<Rotations> {
    Rotations::new(&frequencies(64, 160_000.0, Some(&YARN)), positions.iter().copied())
}

pub(super) fn insert(lab: &mut Lab<'_>) -> Result<()> {
    let layout = layout(LayerKind::Window, 128);
    for (parts, heads) in [(&[(0, 1)][..], 4), (&[(5, 3), (1_048_570, 4)], 64), (&[(126, 9)], 24), (&[(7, 2)], 128)] {
        let step = Step::new(lab, parts)?;
        let positions: Vec<usize> = step.rows.iter().map(|r| r.1).collect();
        let rotations = yarn_rotations(&positions)?;
        let rows = step.len();
        let q = lab.normal_bf16(rows * heads * HEAD_DIM, 2.0);
        let kv = lab.normal_bf16(rows * HEAD_DIM, 1.0);
        let norm = lab.around_one(HEAD_DIM);
        let (d_kv, d_norm, turns) = (lab.put_bf16(&kv)?, lab.put(&norm)?, step.turns(1)?);
        for stepwise in [true, false] {
            let d_q = lab.put_bf16(&q)?;
            let staged = lab.output(rows * ROW_BYTES)?;
            let a =
                Insert { q: &d_q, kv: &d_kv, norm: &d_norm, turns: &turns, staged: &staged, heads, eps: EPS, stepwise };
            ops::insert(&lab.stream, &a)?;
            let mut want = q.clone();
            for (i, head) in want.chunks_exact_mut(HEAD_DIM).enumerate() {
                head_norm(head, EPS, stepwise);
                store_bf16(head, true);
                rotations.rotate(i / heads, head, true);
            }
            let shape = format!("{rows} rows, {heads} heads{}", if stepwise { ", stepwise" } else { "" });
            let got = lab.get_bf16(&d_q)?;
            // the scale itself is rounded to bf16 in steps: where its float32 sum goes the other way, a head is 2^-8 off
            lab.report("insert, queries", &shape, distance(&got, &want), if stepwise { 3e-3 } else { NEIGHBOURS });
            let (mut want, mut got) = (vec![0.0; rows * HEAD_DIM], vec![0.0; rows * HEAD_DIM]);
            let bytes = lab.get(&staged)?;
            for r in 0..rows {
                let row = &mut want[r * HEAD_DIM..][..HEAD_DIM];
                rms_norm(&kv[r * HEAD_DIM..][..HEAD_DIM], &norm, EPS, true, row);
                rotations.rotate(r, row, true);
                e4m3_round_trip(&mut row[..448], 64);
                layout.decode_row(&bytes[r * ROW_BYTES..][..ROW_BYTES], &mut got[r * HEAD_DIM..][..HEAD_DIM]);
            }
            lab.report("insert, window rows", &shape, distance(&got, &want), CODES);
        }
    }
    commit(lab)
}

/// The last rows of each sequence reach their ring slots and nothing else changes.
fn commit(lab: &mut Lab<'_>) -> Result<()> {
    for (window, parts) in [(128usize, &[(0, 1), (120, 300), (700, 128)][..]), (16, &[(3, 20), (100, 1)])] {
        let step = Step::new(lab, parts)?;
        let staged = lab.bytes(step.len() * ROW_BYTES);
        let mut ring = Table::new(lab, parts.len(), window.div_ceil(64), WIDE);
        let on_device = ring.put(lab)?;
        let d_staged = lab.put(&staged)?;
        ops::window_commit(&lab.stream, &d_staged, &ring.pages(&on_device), &step.d_sequences, window)?;
        for (row, &(s, position)) in step.rows.iter().enumerate() {
            ring.set(s, position % window, 64, &staged[row * ROW_BYTES..][..ROW_BYTES]);
        }
        let got = lab.get(&on_device.0)?;
        let wrong = got.iter().zip(&ring.memory).filter(|(g, w)| g != w).count();
        lab.report("window_commit", format!("window {window}, {} sequences", parts.len()), wrong as f64, 0.0);
    }
    Ok(())
}

/// Finishes an entry as the trunk does.
fn finish_entry(kind: Compressor, norm: &[f32], entry: usize, values: &mut [f32]) -> Result<Vec<f32>> {
    store_bf16(values, true);
    let mut out = vec![0.0; values.len()];
    rms_norm(values, norm, EPS, true, &mut out);
    yarn_rotations(&[entry * kind.ratio()])?.rotate(0, &mut out, true);
    if kind == Compressor::Index4 {
        hadamard(&mut out);
        store_bf16(&mut out, true);
        e2m1_round_trip(&mut out);
    } else {
        e4m3_round_trip(&mut out[..448], 64);
    }
    Ok(out)
}

fn empty_state(kind: Compressor) -> Vec<f32> {
    let (dim, mut state) = (kind.dim(), vec![0.0; kind.state_len()]);
    if kind == Compressor::Main128 {
        state[..dim].fill(f32::NEG_INFINITY);
    } else {
        state[4 * dim..8 * dim].fill(f32::NEG_INFINITY);
        state[16 * dim..].fill(f32::NEG_INFINITY);
    }
    state
}

pub(super) fn compress(lab: &mut Lab<'_>) -> Result<()> {
    for kind in [Compressor::Main4, Compressor::Index4, Compressor::Main128] {
        lab.clear()?;
        run_compressor(lab, kind)?;
    }
    Ok(())
}

/// Two sequences in steps of many lengths, as prefill chunks and as single tokens.
fn run_compressor(lab: &mut Lab<'_>, kind: Compressor) -> Result<()> {
    let lengths: &[[usize; 2]] = match (lab.small, kind) {
        (true, _) => &[[3, 4], [1, 1], [9, 130]],
        (false, Compressor::Main128) => &[[3, 128], [124, 1], [1, 260], [1, 126], [300, 2], [1, 1], [85, 127]],
        (false, _) => &[[1, 3], [1, 1], [1, 2], [1, 1], [2, 1], [3, 5], [70, 4], [1, 1], [6, 7], [1, 129], [3, 1]],
    };
    let (width, dim, ratio, layout) = (kind.width(), kind.dim(), kind.ratio(), layout(LayerKind::Window, 128));
    let total: usize = lengths.iter().map(|l| l.iter().sum::<usize>()).sum();
    let (ape, norm) = (lab.normal(ratio * width, 1.0), lab.around_one(dim));
    let (d_ape, d_norm) = (lab.put(&ape)?, lab.put(&norm)?);
    let state_pages = (4 * kind.state_len()).div_ceil(kind.page_bytes());
    let entries = Table::new(lab, 2, (total / ratio + 1).div_ceil(kind.per_page()), kind.page_bytes());
    let d_entries = entries.put(lab)?;
    let mut states =
        [Table::new(lab, 2, state_pages, kind.page_bytes()), Table::new(lab, 2, state_pages, kind.page_bytes())];
    let mut cpu_states = [empty_state(kind), empty_state(kind)];
    for (s, state) in cpu_states.iter().enumerate() {
        states[0].set_floats(s, state);
    }
    let d_states = [states[0].put(lab)?, states[1].put(lab)?];
    let (mut starts, mut want) = ([0, 0], Vec::new());
    let (mut worst_state, mut infinities) = (0.0f64, 0.0);
    for (n, lengths) in lengths.iter().enumerate() {
        let step = Step::new(lab, &[(starts[0], lengths[0]), (starts[1], lengths[1])])?;
        let (u, g) = (lab.normal(step.len() * width, 1.0), lab.normal(step.len() * width, 2.0));
        let (d_u, d_g) = (lab.put(&u)?, lab.put(&g)?);
        let turns = step.turns(if ratio == 4 { 2 } else { 3 })?;
        let a = Compress {
            kind,
            values: &d_u,
            gates: &d_g,
            ape: &d_ape,
            norm: &d_norm,
            turns: &turns,
            sequence: &step.d_sequence,
            sequences: &step.d_sequences,
            entries: entries.pages(&d_entries),
            state: states[n % 2].pages(&d_states[n % 2]),
            fresh: states[1 - n % 2].pages(&d_states[1 - n % 2]),
            eps: EPS,
        };
        ops::compress(&lab.stream, &a)?;
        for (row, &(s, position)) in step.rows.iter().enumerate() {
            let ape = &ape[position % ratio * width..][..width];
            let gate: Vec<f32> = g[row * width..][..width].iter().zip(ape).map(|(g, a)| g + a).collect();
            let state = &mut cpu_states[s];
            let mut compressor = match ratio {
                4 => CpuCompressor::Overlap { dim, state },
                _ => CpuCompressor::Online { dim, ratio, state },
            };
            let mut emitted = Vec::new();
            compressor.take(position, &u[row * width..][..width], &gate, &mut |j, v| emitted.push((j, v.to_vec())));
            for (j, mut values) in emitted {
                want.push((s, j, finish_entry(kind, &norm, j, &mut values)?));
            }
        }
        states[1 - n % 2].memory = lab.get(&d_states[1 - n % 2].0)?;
        for (s, want) in cpu_states.iter().enumerate() {
            let got = states[1 - n % 2].floats(s, kind.state_len());
            let finite = |v: &[f32]| v.iter().map(|x| if x.is_infinite() { 0.0 } else { *x }).collect::<Vec<_>>();
            infinities += got.iter().zip(want).filter(|(g, w)| g.is_infinite() != w.is_infinite()).count() as f64;
            worst_state = worst_state.max(distance(&finite(&got), &finite(want)));
        }
        starts = [starts[0] + lengths[0], starts[1] + lengths[1]];
    }
    let shape = format!("{kind:?}, {} steps to {} and {}", lengths.len(), starts[0], starts[1]);
    lab.report("compress, state", &shape, worst_state + infinities, 1e-6);
    let memory = lab.get(&d_entries.0)?;
    let stored = Table { memory, ..entries };
    let bytes = kind.page_bytes() / kind.per_page();
    let (mut got, mut flat) = (Vec::new(), Vec::new());
    for (s, j, values) in &want {
        let mut row = vec![0.0; dim];
        let stored = stored.get(*s, *j, kind.per_page(), bytes);
        if kind == Compressor::Index4 {
            layout.decode_key(stored, &mut row);
        } else {
            layout.decode_row(stored, &mut row);
        }
        got.extend(row);
        flat.extend(values);
    }
    lab.report("compress, entries", format!("{shape}, {} entries", want.len()), distance(&got, &flat), CODES);
    Ok(())
}

/// A sequence with random rows, entries and keys, in the CPU's cache.
struct Scene {
    cache: SequenceCache,
    staged: Staged,
}

/// Builds the same random cache on both sides: CPU sequences, and pages of ring, entries and keys, and the staged rows.
struct World {
    scenes: Vec<Scene>,
    ring: Table,
    entries: Table,
    keys: Table,
    staged: Vec<u8>,
}

impl World {
    fn new(lab: &mut Lab<'_>, kind: LayerKind, window: usize, parts: &[(usize, usize)]) -> Result<Self> {
        let layout = layout(kind, window);
        let manager: Arc<CacheManager> =
            CacheManager::new(layout.clone(), CacheOptions { poison: true, ..CacheOptions::PRIVATE }, b"");
        let most = parts.iter().map(|p| p.0 + p.1).max().unwrap_or(0);
        let (per_page, page_bytes) = if kind == LayerKind::C128a { (2, NARROW) } else { (64, WIDE) };
        let ratio = kind.ratio().max(1);
        let mut world = Self {
            scenes: Vec::new(),
            ring: Table::new(lab, parts.len(), window.div_ceil(64), WIDE),
            entries: Table::new(lab, parts.len(), (most / ratio + 1).div_ceil(per_page), page_bytes),
            keys: Table::new(lab, parts.len(), (most / ratio + 1).div_ceil(64), INDEX),
            staged: Vec::new(),
        };
        for (s, &(start, rows)) in parts.iter().enumerate() {
            let mut cache = SequenceCache::new(&manager, 0)?;
            let mut staged = None;
            for (first, count) in [(0, start), (start, rows)] {
                if let Some(staged) = staged.take() {
                    cache.commit(staged);
                }
                let mut part = cache.stage(count)?;
                let layer = &mut part.layers[0];
                for (i, out) in layer.rows.chunks_exact_mut(ROW_BYTES).enumerate() {
                    layout.encode_row(&lab.normal(HEAD_DIM, 1.0), out);
                    let position = first + i;
                    if position < start {
                        world.ring.set(s, position % window, 64, out);
                    } else {
                        world.staged.extend_from_slice(out);
                    }
                }
                if kind != LayerKind::Window {
                    for j in first / ratio..(first + count) / ratio {
                        let mut row = vec![0; ROW_BYTES];
                        layout.encode_row(&lab.normal(HEAD_DIM, 1.0), &mut row);
                        world.entries.set(s, j, per_page, &row);
                        layer.entries.extend(row);
                        if kind == LayerKind::C4a {
                            let mut key = vec![0; KEY_BYTES];
                            layout.encode_key(&lab.normal(INDEX_DIM, 1.0), &mut key);
                            world.keys.set(s, j, 64, &key);
                            layer.keys.extend(key);
                        }
                    }
                }
                staged = Some(part);
            }
            let staged = staged.expect("the loop ran");
            world.scenes.push(Scene { cache, staged });
        }
        Ok(world)
    }
}

pub(super) fn indexer(lab: &mut Lab<'_>) -> Result<()> {
    let cases: &[(&[(usize, usize)], usize)] = if lab.small {
        &[(&[(3, 1), (40, 9)], 8)]
    } else {
        &[(&[(3, 1), (4, 1), (1023, 1)], 64), (&[(0, 37), (2000, 50)], 64), (&[(500, 20)], 8), (&[(129, 17)], 16)]
    };
    for &(parts, heads) in cases {
        lab.clear()?;
        let step = Step::new(lab, parts)?;
        let world = World::new(lab, LayerKind::C4a, 128, parts)?;
        let rows = step.len();
        let q = lab.normal_bf16(rows * heads * INDEX_DIM, 1.0);
        let weights = lab.normal_bf16(rows * heads, 1.0);
        let turns = step.turns(1)?;
        for fp4 in [true, false] {
            let (d_q, d_weights) = (lab.put_bf16(&q)?, lab.put_bf16(&weights)?);
            ops::index_query(&lab.stream, &IndexQuery { q: &d_q, weights: &d_weights, turns: &turns, heads, fp4 })?;
            let rotations = yarn_rotations(&step.rows.iter().map(|r| r.1).collect::<Vec<_>>())?;
            let mut want = q.clone();
            for (i, head) in want.chunks_exact_mut(INDEX_DIM).enumerate() {
                rotations.rotate(i / heads, head, true);
                hadamard(head);
                store_bf16(head, true);
                if fp4 {
                    e2m1_round_trip(head);
                }
            }
            let mut want_weights = weights.clone();
            let factor = (1.0 / ((INDEX_DIM * heads) as f64).sqrt()) as f32;
            want_weights.iter_mut().for_each(|w| *w *= factor);
            store_bf16(&mut want_weights, true);
            let shape = format!("{rows} rows, {heads} heads{}", if fp4 { "" } else { ", not rounded" });
            let (got_q, got_weights) = (lab.get_bf16(&d_q)?, lab.get_bf16(&d_weights)?);
            lab.report("index_query", &shape, distance(&got_q, &want), if fp4 { CODES } else { NEIGHBOURS });
            lab.report("index_query, weights", &shape, different_bits(&got_weights, &want_weights), 0.0);
            score_rows(lab, &step, &world, heads, fp4, (&d_q, &d_weights), (&got_q, &got_weights))?;
        }
    }
    Ok(())
}

fn score_rows(
    lab: &mut Lab<'_>,
    step: &Step,
    world: &World,
    heads: usize,
    stepwise: bool,
    device: (&Buffer<u16>, &Buffer<u16>),
    host: (&[f32], &[f32]),
) -> Result<()> {
    let (rows, k) = (step.len(), 64);
    let mut groups = Vec::new();
    for (s, sequence) in step.sequences.iter().enumerate() {
        for first in (0..sequence.rows).step_by(GROUP_ROWS) {
            let (first_row, position) = (sequence.first_row + first, sequence.start + first);
            let rows = (sequence.rows - first).min(GROUP_ROWS as u32);
            groups.push(Group { sequence: s as u32, first_row, rows, position });
        }
    }
    let visible = step.rows.iter().map(|r| (r.1 + 1) / 4).max().unwrap_or(0);
    let pitch = visible + 5;
    let (keys, d_groups) = (world.keys.put(lab)?, lab.put(&groups)?);
    let scores = lab.output(rows * pitch)?;
    let a = Scores {
        q: device.0,
        weights: device.1,
        groups: &d_groups,
        keys: world.keys.pages(&keys),
        scores: &scores,
        first_row: 0,
        pitch,
        sequences: world.scenes.len(),
        heads,
        visible,
        stepwise,
    };
    ops::scores(&lab.stream, &a)?;
    let (ids, counts) = (lab.output(rows * k)?, lab.output(rows)?);
    let (positions, parts) = (Some((&step.d_positions, 4)), None);
    ops::top_k(&lab.stream, &TopK { scores: &scores, pitch, positions, ids: &ids, counts: &counts, k, parts })?;
    let (got, got_ids, got_counts) = (lab.get(&scores)?, lab.get(&ids)?, lab.get(&counts)?);

    let (mut flat_got, mut flat_want, mut chosen, mut missing, mut written) = (Vec::new(), Vec::new(), 0, 0, 0);
    for (scene, sequence) in world.scenes.iter().zip(&step.sequences) {
        let (first, n) = (sequence.first_row as usize, sequence.rows as usize);
        let queries = Queries {
            q: &host.0[first * heads * INDEX_DIM..][..n * heads * INDEX_DIM],
            weights: &host.1[first * heads..][..n * heads],
            heads,
            dim: INDEX_DIM,
            start: sequence.start as usize,
            bf16: stepwise,
        };
        let view = scene.cache.view(0, &scene.staged);
        let selection = select(lab.cpu, &queries, view, k)?;
        for (i, want) in cpu_scores(lab.cpu, &queries, view, 0, n)?.into_iter().enumerate() {
            let row = first + i;
            flat_got.extend(&got[row * pitch..][..want.len()]);
            written += got[row * pitch + want.len()..(row + 1) * pitch].iter().filter(|v| !v.is_nan()).count();
            let mine = &got_ids[row * k..][..got_counts[row] as usize];
            chosen += mine.len();
            missing += selection.row(i).iter().filter(|id| !mine.contains(id)).count();
            missing += mine.len().abs_diff(selection.row(i).len());
            flat_want.extend(want);
        }
    }
    let shape = format!("{rows} rows, {heads} heads, {visible} keys{}", if stepwise { "" } else { ", not rounded" });
    // each of the sums of products is rounded to bf16 where the official code does, and heads are added in another order
    lab.report("index_scores", &shape, distance(&flat_got, &flat_want), if stepwise { 2e-3 } else { 1e-5 });
    lab.report("index_scores, unseen keys", &shape, written as f64, 0.0);
    // scores that differ by a rounding change places near the last chosen one
    lab.report("top_k of scores, not shared", &shape, missing as f64 / chosen.max(1) as f64, 2e-2);
    Ok(())
}

pub(super) fn attend(lab: &mut Lab<'_>) -> Result<()> {
    let prefill: &[(usize, usize)] = if lab.small { &[(0, 3), (130, 2)] } else { &[(0, 5), (100, 40), (700, 3)] };
    let decode: &[(usize, usize)] =
        if lab.small { &[(0, 1), (300, 1)] } else { &[(0, 1), (126, 1), (127, 1), (128, 1), (515, 1), (3000, 1)] };
    let head_counts: &[usize] = if lab.small { &[4, 64] } else { &[4, 8, 16, 24, 64, 128] };
    for kind in [LayerKind::Window, LayerKind::C4a, LayerKind::C128a] {
        for (window, parts) in [(128, prefill), (128, decode), (16, prefill)] {
            for &heads in head_counts {
                lab.clear()?;
                attend_case(lab, kind, window, parts, heads)?;
            }
            lab.clear()?;
            attend_alone(lab, kind, window, parts)?;
        }
    }
    Ok(())
}

/// Pages beyond 4 GiB, whose offsets and whose ids times their bytes do not fit 32 bits, are found: the bits are those of
/// the same pages near the beginning.
pub(super) fn far_pages(lab: &mut Lab<'_>) -> Result<()> {
    const FAR: usize = 5 << 30;
    let (heads, position, width, window) = (64, 700, 96, 128);
    lab.clear()?;
    if lab.small || lab.gpu.memory()?.0 < (FAR + (1 << 30)) as u64 {
        return Ok(());
    }
    let world = World::new(lab, LayerKind::C4a, window, &[(position, 1)])?;
    let step = Step::new(lab, &[(position, 1)])?;
    let (q, sink) = (lab.normal_bf16(heads * HEAD_DIM, 1.5), lab.normal(heads, 1.0));
    let (index_q, index_weights) = (lab.normal_bf16(heads * INDEX_DIM, 1.0), lab.normal_bf16(heads, 1.0));
    let (d_q, d_sink, turns, d_staged) = (lab.put_bf16(&q)?, lab.put(&sink)?, step.turns(1)?, lab.put(&world.staged)?);
    let (d_index_q, d_weights) = (lab.put_bf16(&index_q)?, lab.put_bf16(&index_weights)?);
    let ids: Vec<u32> = (0..width as u32).collect();
    let (d_ids, d_counts) = (lab.put(&ids)?, lab.put(&[width as u32])?);
    let visible = (position + 1) / 4;
    let groups = lab.put(&[Group { sequence: 0, first_row: 0, rows: 1, position: position as u32 }])?;

    let mut arena = Arena::new(lab.gpu, FAR as u64 + 4096)?;
    let mut results = Vec::new();
    for far in [false, true] {
        arena.restart();
        // one bucket after the other would not fit: each lies over the whole memory, at pages of its own
        let whole = arena.take::<u8>("far pages", FAR)?;
        let mut place = |table: &Table, slot: usize| -> Result<(Buffer<u8>, Buffer<u32>)> {
            let memory = whole.slice(0..FAR / table.page_bytes * table.page_bytes)?;
            let base = if far { (FAR - (256 << 20)) / table.page_bytes } else { 0 };
            let first = base + slot * (64 << 20) / table.page_bytes;
            let mut ids = Vec::new();
            for page in 0..table.pitch {
                let id = first + page * 3;
                let from = table.at(0, page);
                let to = memory.slice(id * table.page_bytes..(id + 1) * table.page_bytes)?;
                lab.stream.write(&to, &table.memory[from..from + table.page_bytes])?;
                ids.push(id as u32);
            }
            Ok((memory, lab.put(&ids)?))
        };
        let (ring, pages, keys) = (place(&world.ring, 0)?, place(&world.entries, 1)?, place(&world.keys, 2)?);
        let out = lab.output::<u16>(heads * HEAD_DIM)?;
        let (ids, counts) = (&d_ids, &d_counts);
        let a = Attention {
            q: &d_q,
            out: &out,
            sink: &d_sink,
            turns: &turns,
            sequence: &step.d_sequence,
            sequences: &step.d_sequences,
            staged: &d_staged,
            ring: world.ring.pages(&ring),
            entries: Entries::Selected { pages: world.entries.pages(&pages), ids, counts, width },
            window,
            quantise: false,
            path: AttentionPath::Whole,
        };
        ops::attend(&lab.stream, &a)?;
        let scores = lab.output::<f32>(visible)?;
        let a = Scores {
            q: &d_index_q,
            weights: &d_weights,
            groups: &groups,
            keys: world.keys.pages(&keys),
            scores: &scores,
            first_row: 0,
            pitch: visible,
            sequences: 1,
            heads,
            visible,
            stepwise: true,
        };
        ops::scores(&lab.stream, &a)?;
        results.push((lab.get(&out)?, lab.get(&scores)?));
    }
    let wrong = different(&results[1].0, &results[0].0) + different_bits(&results[1].1, &results[0].1);
    let empty = results[0].1.iter().filter(|v| v.is_nan()).count() as f64;
    lab.report("pages beyond 4 GiB", "attention and index scores", wrong + empty, 0.0);
    Ok(())
}

/// A query alone has the bits that it has among many, though the blocks are smaller.
fn attend_alone(lab: &mut Lab<'_>, kind: LayerKind, window: usize, parts: &[(usize, usize)]) -> Result<()> {
    let heads = 64;
    let world = World::new(lab, kind, window, parts)?;
    let (ring, pages) = (world.ring.put(lab)?, world.entries.put(lab)?);
    let sink = lab.normal(heads, 1.0);
    let d_sink = lab.put(&sink)?;
    let last = parts.len() - 1;
    let q = lab.normal_bf16(heads * HEAD_DIM, 1.5);
    let repeats = 40;
    let mut results: Vec<Vec<u16>> = Vec::new();
    // the last sequence's last row: once, and 40 times in one launch; its window rows before it are in the ring then
    let (start, rows) = parts[last];
    let position = start + rows - 1;
    let row_bytes = &world.staged[world.staged.len() - ROW_BYTES..];
    for count in [1, repeats] {
        let list: Vec<Sequence> = (0..count as u32)
            .map(|first_row| Sequence { start: position as u32, first_row, rows: 1, unused: 0 })
            .collect();
        let table = |t: &Table| -> Vec<u32> { t.ids[last * t.pitch..][..t.pitch].repeat(count) };
        let (ring_ids, entry_ids) = (lab.put(&table(&world.ring))?, lab.put(&table(&world.entries))?);
        let (d_q, staged) = (lab.put_bf16(&q.repeat(count))?, lab.put(&row_bytes.repeat(count))?);
        let step = Step::new(lab, &vec![(position, 1); count])?;
        let visible = (position + 1) / 4;
        let width = visible.clamp(1, 96);
        let ids: Vec<u32> = (0..width as u32).collect::<Vec<_>>().repeat(count);
        let (d_ids, d_counts) = (lab.put(&ids)?, lab.put(&vec![visible.min(width) as u32; count])?);
        let d_list = lab.put(&list)?;
        let out = lab.output::<u16>(count * heads * HEAD_DIM)?;
        let (part_out, part_sums) = (lab.output(count * 32 * heads * HEAD_DIM)?, lab.output(count * 32 * heads)?);
        let ring_pages = Pages { ids: &ring_ids, ..world.ring.pages(&ring) };
        let entry_pages = Pages { ids: &entry_ids, ..world.entries.pages(&pages) };
        let turns = step.turns(1)?;
        for split in [false, true] {
            let entries = match kind {
                LayerKind::Window => Entries::None,
                LayerKind::C4a => Entries::Selected { pages: entry_pages, ids: &d_ids, counts: &d_counts, width },
                LayerKind::C128a => Entries::All { pages: entry_pages },
            };
            let most_keys = window + position + 1;
            let path = if split {
                AttentionPath::Split { most_keys, out: &part_out, sums: &part_sums }
            } else {
                AttentionPath::Whole
            };
            let a = Attention {
                q: &d_q,
                out: &out,
                sink: &d_sink,
                turns: &turns,
                sequence: &step.d_sequence,
                sequences: &d_list,
                staged: &staged,
                ring: ring_pages,
                entries,
                window,
                quantise: false,
                path,
            };
            ops::attend(&lab.stream, &a)?;
            results.push(lab.get(&out)?);
        }
    }
    let alone = results[..2].concat();
    let among: Vec<u16> = results[2..].iter().flat_map(|r| &r[r.len() - heads * HEAD_DIM..]).copied().collect();
    let wrong = different(&among, &alone);
    lab.report("attend, alone = among 40", format!("{kind:?}, position {position}, window {window}"), wrong, 0.0);
    Ok(())
}

fn attend_case(
    lab: &mut Lab<'_>,
    kind: LayerKind,
    window: usize,
    parts: &[(usize, usize)],
    heads: usize,
) -> Result<()> {
    let step = Step::new(lab, parts)?;
    let world = World::new(lab, kind, window, parts)?;
    let (rows, width) = (step.len(), 96);
    // sharp enough that some keys dominate
    let q = lab.normal_bf16(rows * heads * HEAD_DIM, 1.5);
    let sink = lab.normal(heads, 1.0);
    let mut selections: Vec<Selection> = Vec::new();
    let (mut ids, mut counts) = (vec![u32::MAX; rows * width], Vec::new());
    for sequence in &step.sequences {
        let mut selection = Selection { width, ids: Vec::new(), counts: Vec::new() };
        for i in 0..sequence.rows {
            let visible = (sequence.start + i + 1) as usize / 4;
            let mut all: Vec<u32> = (0..visible as u32).collect();
            while all.len() > width {
                let at = lab.below(all.len());
                all.swap_remove(at);
            }
            all.sort_unstable();
            ids[counts.len() * width..][..all.len()].copy_from_slice(&all);
            counts.push(all.len() as u32);
            selection.counts.push(all.len() as u32);
            all.resize(width, 0);
            selection.ids.extend(all);
        }
        selections.push(selection);
    }

    let mut want = vec![0.0; rows * heads * HEAD_DIM];
    for ((scene, sequence), selection) in world.scenes.iter().zip(&step.sequences).zip(&selections) {
        let range = sequence.first_row as usize * heads * HEAD_DIM
            ..(sequence.first_row + sequence.rows) as usize * heads * HEAD_DIM;
        let a = CpuAttention {
            heads,
            dim: HEAD_DIM,
            start: sequence.start as usize,
            sink: &sink,
            weights_bf16: true,
            bf16: true,
        };
        let entries = match kind {
            LayerKind::Window => CpuEntries::None,
            LayerKind::C4a => CpuEntries::Selected(selection),
            LayerKind::C128a => CpuEntries::All { ratio: 128 },
        };
        let view = scene.cache.view(0, &scene.staged);
        cpu_attend(lab.cpu, a, &q[range.clone()], view, entries, &mut want[range])?;
    }
    let rotations = yarn_rotations(&step.rows.iter().map(|r| r.1).collect::<Vec<_>>())?;
    for (i, head) in want.chunks_exact_mut(HEAD_DIM).enumerate() {
        rotations.rotate_back(i / heads, head, true);
    }

    let (d_q, d_sink, turns) = (lab.put_bf16(&q)?, lab.put(&sink)?, step.turns(1)?);
    let (d_ids, d_counts, d_staged) = (lab.put(&ids)?, lab.put(&counts)?, lab.put(&world.staged)?);
    let (ring, pages) = (world.ring.put(lab)?, world.entries.put(lab)?);
    let (part_out, part_sums) = (lab.output(rows * 32 * heads * HEAD_DIM)?, lab.output(rows * 32 * heads)?);
    let most_keys = step.rows.iter().map(|r| r.1 + 1).max().unwrap_or(0) + window;
    for split in [false, true] {
        let mut plain: Vec<f32> = Vec::new();
        for quantise in [false, true] {
            let out = lab.output(rows * heads * HEAD_DIM)?;
            let entries = match kind {
                LayerKind::Window => Entries::None,
                LayerKind::C4a => {
                    Entries::Selected { pages: world.entries.pages(&pages), ids: &d_ids, counts: &d_counts, width }
                }
                LayerKind::C128a => Entries::All { pages: world.entries.pages(&pages) },
            };
            let path = if split {
                AttentionPath::Split { most_keys, out: &part_out, sums: &part_sums }
            } else {
                AttentionPath::Whole
            };
            let a = Attention {
                q: &d_q,
                out: &out,
                sink: &d_sink,
                turns: &turns,
                sequence: &step.d_sequence,
                sequences: &step.d_sequences,
                staged: &d_staged,
                ring: world.ring.pages(&ring),
                entries,
                window,
                quantise,
                path,
            };
            ops::attend(&lab.stream, &a)?;
            let got: Vec<f32> = lab.get(&out)?.into_iter().map(bf16_value).collect();
            let shape =
                format!("{kind:?}, {rows} rows, {heads} heads, window {window}{}", if split { ", split" } else { "" });
            if quantise {
                e4m3_round_trip(&mut plain, 128);
                lab.report("attend, E4M3 output", &shape, different_bits(&got, &plain), 0.0);
            } else {
                // weights are rounded to bf16 against another running maximum: 2^-9 each, independent
                lab.report("attend", &shape, distance(&got, &want), 4e-3);
                plain = got;
            }
        }
    }
    Ok(())
}
