//! Checks of what knows sequences and pages: insertion, compressors, indexer.

use super::lab::{Lab, different, different_bits, distance};
use super::world::{Step, Table, WIDE, World, layout, yarn_rotations};
use crate::backend::cpu::compressor::Compressor as CpuCompressor;
use crate::backend::cpu::indexer::{Queries, hadamard, scores as cpu_scores, select};
use crate::backend::cpu::norm::{head_norm, rms_norm, store_bf16};
use crate::backend::cuda::memory::{Arena, Buffer};
use crate::backend::cuda::ops::{
    self, Compress, Compressor, GROUP_ROWS, Group, HEAD_DIM, INDEX_DIM, IndexQuery, Insert, Pages, ROW_BYTES, Scores,
    Sequence, TopK, WindowCommit,
};
use crate::error::Result;
use crate::model::config::LayerKind;
use crate::tensor::format::{e2m1_round_trip, e4m3_round_trip};

const EPS: f32 = 1e-6;
/// A few results go to the bf16 neighbour where float32 sums have another order.
const NEIGHBOURS: f64 = 5e-4;
/// The same, where the neighbour may be one of E4M3 (2^-4) or E2M1 (2^-2) instead.
const CODES: f64 = 2e-2;

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
            let (apart_q, apart_kv, apart) = (lab.put_bf16(&q)?, lab.put_bf16(&kv)?, lab.output(rows * ROW_BYTES)?);
            ops::unfused::insert(&lab.stream, &Insert { q: &apart_q, kv: &apart_kv, staged: &apart, ..a })?;
            let mut want = q.clone();
            for (i, head) in want.chunks_exact_mut(HEAD_DIM).enumerate() {
                head_norm(head, EPS, stepwise);
                store_bf16(head, true);
                rotations.rotate(i / heads, head, true);
            }
            let shape = format!("{rows} rows, {heads} heads{}", if stepwise { ", stepwise" } else { "" });
            let wrong =
                different(&lab.get(&apart_q)?, &lab.get(&d_q)?) + different(&lab.get(&apart)?, &lab.get(&staged)?);
            lab.report("insert = separate kernels", &shape, wrong, 0.0);
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

/// The last rows of each sequence and layer reach their ring slots and nothing else changes; nothing does after a bad step.
fn commit(lab: &mut Lab<'_>) -> Result<()> {
    let layers = 3;
    for (window, parts) in [(128usize, &[(0, 1), (120, 300), (700, 128)][..]), (16, &[(3, 20), (100, 1)])] {
        let step = Step::new(lab, parts)?;
        let staged = lab.bytes(layers * step.len() * ROW_BYTES);
        let mut rings = Table::new(lab, layers * parts.len(), window.div_ceil(64), WIDE);
        let on_device = rings.put(lab)?;
        let d_staged = lab.put(&staged)?;
        for bad in [1, 0] {
            let flag = lab.put(&[bad])?;
            let a = WindowCommit {
                staged: &d_staged,
                ring: rings.pages(&on_device),
                layers,
                sequences: &step.d_sequences,
                bad: &flag,
                window,
                most_rows: step.len(),
            };
            ops::window_commit(&lab.stream, &a)?;
            for (i, row) in staged.chunks_exact(ROW_BYTES).enumerate().filter(|_| bad == 0) {
                let (layer, (s, position)) = (i / step.len(), step.rows[i % step.len()]);
                rings.set(layer * parts.len() + s, position % window, 64, row);
            }
            let got = lab.get(&on_device.0)?;
            let wrong = got.iter().zip(&rings.memory).filter(|(g, w)| g != w).count();
            let shape = format!("window {window}, {} sequences{}", parts.len(), if bad == 0 { "" } else { ", bad" });
            lab.report("window_commit", shape, wrong as f64, 0.0);
        }
    }
    Ok(())
}

/// The flag is raised by one value that is not finite, wherever it is, and by nothing else.
pub(super) fn watch(lab: &mut Lab<'_>) -> Result<()> {
    let values = lab.normal_bf16(8 * 1001 + 6, 1e30);
    for (at, planted) in
        [(None, 0.0), (Some(0), f32::NAN), (Some(8013), f32::INFINITY), (Some(4097), f32::NEG_INFINITY)]
    {
        let mut values = values.clone();
        if let Some(at) = at {
            values[at] = planted;
        }
        let (x, flag) = (lab.put_bf16(&values)?, lab.put(&[0u32])?);
        ops::watch(&lab.stream, &x, &flag)?;
        let flag_f32 = lab.put(&[0u32])?;
        let x = lab.put(&values)?;
        ops::watch_f32(&lab.stream, &x, &flag_f32)?;
        let want = u32::from(at.is_some());
        let wrong = (lab.get(&flag)?[0] != want) as u32 + (lab.get(&flag_f32)?[0] != want) as u32;
        lab.report("watch", format!("{planted} at {at:?}"), f64::from(wrong), 0.0);
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
        lab.clear()?;
        rest(lab, kind)?;
    }
    Ok(())
}

/// An idle row writes nothing, whatever pages its tables would say.
fn rest(lab: &mut Lab<'_>, kind: Compressor) -> Result<()> {
    let (width, dim, ratio) = (kind.width(), kind.dim(), kind.ratio());
    let step = Step::new(lab, &[(0, 1)])?;
    let idle = lab.put(&[Sequence { start: 0, first_row: 0, rows: 0, unused: 0 }])?;
    let state_pages = (4 * kind.state_len()).div_ceil(kind.page_bytes());
    let pages = Table::new(lab, 1, state_pages, kind.page_bytes());
    let (on_device, before) = (pages.put(lab)?, pages.memory.clone());
    let (values, ape, norm) = (lab.normal(width, 1.0), lab.normal(ratio * width, 1.0), lab.around_one(dim));
    let (values, ape, norm) = (lab.put(&values)?, lab.put(&ape)?, lab.put(&norm)?);
    let a = Compress {
        kind,
        values: &values,
        gates: &values,
        ape: &ape,
        norm: &norm,
        turns: &step.turns(if ratio == 4 { 2 } else { 3 })?,
        sequence: &step.d_sequence,
        sequences: &idle,
        entries: pages.pages(&on_device),
        state: pages.pages(&on_device),
        fresh: pages.pages(&on_device),
        eps: EPS,
    };
    ops::compress(&lab.stream, &a)?;
    let wrong = different(&lab.get(&on_device.0)?, &before);
    lab.report("compress, idle row", format!("{kind:?}"), wrong, 0.0);
    Ok(())
}

/// Pitfall 50: what is written to pages beyond 4 GiB (entries, keys, states, window rows) arrives there with the bytes that
/// it has in pages at the beginning.
pub(super) fn far_writes(lab: &mut Lab<'_>) -> Result<()> {
    const FAR: usize = 5 << 30;
    lab.clear()?;
    if lab.small || lab.gpu.memory()?.0 < (FAR + (1 << 30)) as u64 {
        return Ok(());
    }
    let (start, rows) = (1_048_064, 260);
    let step = Step::new(lab, &[(start, rows)])?;
    let staged = lab.bytes(rows * ROW_BYTES);
    let (d_staged, good) = (lab.put(&staged)?, lab.put(&[0u32])?);
    let mut arena = Arena::new(lab.gpu, FAR as u64 + 4096)?;
    let whole = arena.take::<u8>("far pages", FAR)?;
    for kind in [Compressor::Main4, Compressor::Index4, Compressor::Main128] {
        let (width, dim, ratio, bytes) = (kind.width(), kind.dim(), kind.ratio(), kind.page_bytes());
        let (ape, norm) = (lab.normal(ratio * width, 1.0), lab.around_one(dim));
        let (u, g) = (lab.normal(rows * width, 1.0), lab.normal(rows * width, 2.0));
        let (ape, norm, u, g) = (lab.put(&ape)?, lab.put(&norm)?, lab.put(&u)?, lab.put(&g)?);
        let turns = step.turns(if ratio == 4 { 2 } else { 3 })?;
        let state_pages = (4 * kind.state_len()).div_ceil(bytes);
        let mut results = Vec::new();
        for far in [false, true] {
            // pages of one kind lie between those of the others
            let memory = whole.slice(0..FAR / bytes * bytes)?;
            let first = if far { (FAR - (64 << 20)) / bytes } else { 0 };
            let page = |i: usize| memory.slice((first + i) * bytes..(first + i + 1) * bytes);
            let table = |slot: usize, count: usize| (0..count).map(move |i| (first + 4 * i + slot) as u32);
            // the table of entries says where their first pages would be, too, but only the last are written
            let pitch = (start + rows) / ratio / kind.per_page() + 1;
            let last = start / ratio / kind.per_page();
            let entries: Vec<u32> = (0..last).map(|_| 0).chain(table(0, pitch - last)).collect();
            let ids = [entries, table(1, state_pages).collect(), table(2, state_pages).collect()];
            let used = 4 * state_pages.max(pitch - last).max(2);
            for i in 0..used {
                lab.stream.fill(&page(i)?, 0x5A)?;
            }
            for (i, part) in empty_state(kind).chunks(bytes / 4).enumerate() {
                let part: Vec<u8> = part.iter().flat_map(|v| v.to_le_bytes()).collect();
                lab.stream.write(&page(4 * i + 1)?.slice(0..part.len())?, &part)?;
            }
            let d_ids = [lab.put(&ids[0])?, lab.put(&ids[1])?, lab.put(&ids[2])?];
            let pages = |i: usize| Pages { memory: &memory, ids: &d_ids[i], pitch: ids[i].len(), page_bytes: bytes };
            let a = Compress {
                kind,
                values: &u,
                gates: &g,
                ape: &ape,
                norm: &norm,
                turns: &turns,
                sequence: &step.d_sequence,
                sequences: &step.d_sequences,
                entries: pages(0),
                state: pages(1),
                fresh: pages(2),
                eps: EPS,
            };
            ops::compress(&lab.stream, &a)?;
            if kind == Compressor::Main4 {
                let ring: Vec<u32> = table(3, 2).collect();
                let ring = lab.put(&ring)?;
                let ring = Pages { memory: &memory, ids: &ring, pitch: 2, page_bytes: bytes };
                let (layers, window, bad, most_rows) = (1, 128, &good, rows);
                let sequences = &step.d_sequences;
                let a = WindowCommit { staged: &d_staged, ring, layers, sequences, bad, window, most_rows };
                ops::window_commit(&lab.stream, &a)?;
            }
            results.push((0..used).map(|i| lab.get(&page(i)?)).collect::<Result<Vec<_>>>()?.concat());
        }
        let untouched = results[0][..bytes].iter().all(|&byte| byte == 0x5A);
        let wrong = different(&results[1], &results[0]) + f64::from(u8::from(untouched));
        lab.report("writes beyond 4 GiB", format!("{kind:?}, behind {start} tokens"), wrong, 0.0);
    }
    Ok(())
}

/// Two sequences in steps of many lengths, as prefill chunks and as single tokens.
fn run_compressor(lab: &mut Lab<'_>, kind: Compressor) -> Result<()> {
    let lengths: &[[usize; 2]] = match (lab.small, kind) {
        (true, _) => &[[3, 4], [1, 1], [9, 130]],
        (false, Compressor::Main128) => {
            &[[3, 128], [124, 1], [1, 260], [1, 126], [300, 2], [1, 1], [85, 127], [700, 515]]
        }
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
    // the same by separate kernels
    let apart_entries = entries.put(lab)?;
    let apart_states = [states[0].put(lab)?, states[1].put(lab)?];
    let mut wrong = 0.0;
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
        let completes = |row: &u32| step.rows[*row as usize].1 % ratio == ratio - 1;
        let chosen: Vec<u32> = (0..step.len() as u32).filter(completes).collect();
        let (chosen, pooled) = (lab.put(&chosen)?, lab.output(step.len() * dim)?);
        let apart = Compress {
            entries: entries.pages(&apart_entries),
            state: states[n % 2].pages(&apart_states[n % 2]),
            fresh: states[1 - n % 2].pages(&apart_states[1 - n % 2]),
            ..a
        };
        ops::unfused::compress(&lab.stream, &apart, &chosen, &pooled)?;
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
        wrong += different(&lab.get(&apart_states[1 - n % 2].0)?, &states[1 - n % 2].memory);
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
    wrong += different(&lab.get(&apart_entries.0)?, &memory);
    lab.report("compress = separate kernels", &shape, wrong, 0.0);
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
    let (scores, bad) = (lab.output(rows * pitch)?, lab.put(&[0u32])?);
    let a = Scores {
        q: device.0,
        weights: device.1,
        groups: &d_groups,
        keys: world.keys.pages(&keys),
        scores: &scores,
        highest: None,
        first_row: 0,
        pitch,
        sequences: world.scenes.len(),
        heads,
        visible,
        stepwise,
        bad: Some(&bad),
    };
    ops::scores(&lab.stream, &a)?;
    let seen = lab.get(&bad)?[0];
    let mut wrong = (seen != 0) as u32;
    for planted in [f32::NAN, f32::INFINITY] {
        let mut spoiled = lab.get_bf16(device.1)?;
        spoiled[(rows - 1) * heads] = planted;
        let (weights, scores, bad) = (lab.put_bf16(&spoiled)?, lab.output(rows * pitch)?, lab.put(&[0u32])?);
        ops::scores(&lab.stream, &Scores { weights: &weights, scores: &scores, bad: Some(&bad), ..a })?;
        wrong += (lab.get(&bad)?[0] == 0) as u32;
    }
    lab.report("index_scores, not finite", format!("{rows} rows, {heads} heads"), f64::from(wrong), 0.0);
    let (ids, counts) = (lab.output(rows * k)?, lab.output(rows)?);
    let (positions, parts) = (Some((&step.d_positions, 4)), None);
    ops::top_k(
        &lab.stream,
        &TopK { scores: &scores, pitch, positions, ids: &ids, counts: &counts, k, parts, highest: None },
    )?;
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
            // a count that was not written must show as a failure, not end the test
            let mine = &got_ids[row * k..][..k.min(got_counts[row] as usize)];
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
    if ops::hopper_index(lab.gpu, stepwise, k) {
        score_hopper(lab, step, &a, &groups, &got, k)?;
    }
    Ok(())
}

/// The kernels for Hopper against the portable ones' scores; each row alone against its group; the choice against that of
/// the portable kernel among the same scores.
fn score_hopper(
    lab: &mut Lab<'_>,
    step: &Step,
    a: &Scores<'_>,
    groups: &[Group],
    portable: &[f32],
    k: usize,
) -> Result<()> {
    let (rows, pitch) = (step.len(), a.pitch);
    let alone: Vec<Group> = groups
        .iter()
        .flat_map(|g| {
            (0..g.rows).map(|i| Group { first_row: g.first_row + i, rows: 1, position: g.position + i, ..*g })
        })
        .collect();
    let d_alone = lab.put(&alone)?;
    let mut runs = Vec::new();
    for groups in [a.groups, &d_alone] {
        let (scores, bad) = (lab.output::<f32>(rows * pitch)?, lab.put(&[0u32])?);
        let highest = lab.output::<u16>(rows * ops::highest_len(pitch))?;
        let a = Scores { groups, scores: &scores, bad: Some(&bad), highest: Some(&highest), ..*a };
        ops::scores(&lab.stream, &a)?;
        let mut wrong = f64::from(lab.get(&bad)?[0]);
        for planted in [f32::NAN, f32::INFINITY] {
            let mut spoiled = lab.get_bf16(a.weights)?;
            spoiled[(rows - 1) * a.heads] = planted;
            let (weights, scores, bad) = (lab.put_bf16(&spoiled)?, lab.output(rows * pitch)?, lab.put(&[0u32])?);
            let highest = lab.output(rows * ops::highest_len(pitch))?;
            let a = Scores { weights: &weights, scores: &scores, highest: Some(&highest), bad: Some(&bad), ..a };
            ops::scores(&lab.stream, &a)?;
            wrong += f64::from(u8::from(lab.get(&bad)?[0] == 0));
        }
        lab.report("index_scores by Hopper, not finite", format!("{rows} rows"), wrong, 0.0);
        runs.push((scores, highest));
    }
    let (got, one) = (lab.get(&runs[0].0)?, lab.get(&runs[1].0)?);
    let shape = format!("{rows} rows, {} heads, {} keys", a.heads, a.visible);
    let seen = |v: &[f32]| v.iter().filter(|v| !v.is_nan()).copied().collect::<Vec<_>>();
    let unseen = got.iter().zip(portable).filter(|(g, w)| g.is_nan() != w.is_nan()).count();
    lab.report("index_scores by Hopper, unseen keys", &shape, unseen as f64, 0.0);
    if unseen == 0 {
        // sums of E2M1 products are exact in float32, hardly ever not in the accumulators of 8-bit products
        lab.report("index_scores by Hopper", &shape, distance(&seen(&got), &seen(portable)), 1e-3);
    }
    lab.report("index_scores by Hopper, rows alone", &shape, different_bits(&one, &got), 0.0);
    let (ids, counts) = (lab.output(rows * k)?, lab.output(rows)?);
    let (want_ids, want_counts) = (lab.output(rows * k)?, lab.output(rows)?);
    let (scores, positions) = (&runs[0].0, Some((&step.d_positions, 4)));
    let b = TopK { scores, pitch, positions, ids: &want_ids, counts: &want_counts, k, parts: None, highest: None };
    ops::top_k(&lab.stream, &b)?;
    ops::top_k(&lab.stream, &TopK { ids: &ids, counts: &counts, highest: Some(&runs[0].1), ..b })?;
    let mut wrong = different(&lab.get(&counts)?, &lab.get(&want_counts)?);
    let (ids, want_ids) = (lab.get(&ids)?, lab.get(&want_ids)?);
    for (row, &count) in lab.get(&want_counts)?.iter().enumerate() {
        let chosen = row * k..row * k + (count as usize).min(k);
        wrong += different(&ids[chosen.clone()], &want_ids[chosen]);
    }
    lab.report("top_k by Hopper", &shape, wrong, 0.0);
    Ok(())
}
