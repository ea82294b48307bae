//! Checks of attention: both ways of cutting it, all head counts, pages far away.

use super::lab::{Lab, different, different_bits, distance};
use super::world::{Step, Table, World, yarn_rotations};
use crate::backend::cpu::attention::{Attention as CpuAttention, Entries as CpuEntries, attend as cpu_attend};
use crate::backend::cpu::indexer::Selection;
use crate::backend::cuda::memory::{Arena, Buffer};
use crate::backend::cuda::ops::{
    self, Attention, AttentionKernel, AttentionPath, Entries, Group, HEAD_DIM, INDEX_DIM, Pages, ROPE_DIM, ROW_BYTES,
    Scores, Sequence,
};
use crate::error::Result;
use crate::model::config::LayerKind;
use crate::tensor::format::{bf16_value, e4m3_round_trip};

pub(super) fn attend(lab: &mut Lab<'_>) -> Result<()> {
    let prefill: &[(usize, usize)] = if lab.small { &[(0, 3), (130, 2)] } else { &[(0, 5), (100, 40), (700, 3)] };
    let decode: &[(usize, usize)] =
        if lab.small { &[(0, 1), (300, 1)] } else { &[(0, 1), (126, 1), (127, 1), (128, 1), (515, 1), (3000, 1)] };
    let head_counts: &[usize] = if lab.small { &[4, 64] } else { &[4, 8, 16, 24, 64, 128] };
    for kind in [LayerKind::Window, LayerKind::C4a, LayerKind::C128a] {
        for (window, parts) in [(128, prefill), (128, decode), (16, prefill)] {
            for &heads in head_counts {
                lab.clear()?;
                attend_case(lab, kind, window, parts, heads, 96)?;
            }
            lab.clear()?;
            attend_alone(lab, kind, window, parts, 96)?;
        }
    }
    // many tiles, so that decode adds up runs
    let long: &[(LayerKind, usize)] = if lab.small {
        &[(LayerKind::C4a, 1700)]
    } else {
        &[(LayerKind::C4a, 1700), (LayerKind::C4a, 3003), (LayerKind::C128a, 20_000)]
    };
    for &(kind, position) in long {
        let head_counts: &[usize] = if lab.small { &[64] } else { &[8, 24, 64, 128] };
        for &heads in head_counts {
            lab.clear()?;
            attend_case(lab, kind, 128, &[(position, 1), (200, 2)], heads, 700)?;
        }
        lab.clear()?;
        attend_alone(lab, kind, 128, &[(position, 1)], 700)?;
    }
    Ok(())
}

/// A few of the same: whether the epilogue has the bits of separate kernels.
pub(super) fn output(lab: &mut Lab<'_>) -> Result<()> {
    for (kind, parts) in
        [(LayerKind::C4a, &[(100, 9), (515, 1)][..]), (LayerKind::C4a, &[(1700, 1)]), (LayerKind::Window, &[(7, 1)])]
    {
        lab.clear()?;
        attend_case(lab, kind, 128, parts, 64, 512)?;
    }
    Ok(())
}

/// The kernels that the device can run, each with a word for reports.
fn kernels(lab: &Lab<'_>) -> Vec<(AttentionKernel, &'static str)> {
    let mut all = vec![(AttentionKernel::Portable, "")];
    if ops::hopper_kernels(lab.gpu) {
        all.push((AttentionKernel::Hopper, ", Hopper"));
    }
    all
}

/// Pitfall 50: pages beyond 4 GiB, whose offsets and whose ids times their bytes do not fit 32 bits, are found: the bits
/// are those of the same pages near the beginning.
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
            highest: None,
            first_row: 0,
            pitch: visible,
            sequences: 1,
            heads,
            visible,
            stepwise: true,
            bad: None,
        };
        ops::scores(&lab.stream, &a)?;
        let mut all = lab.get(&scores)?;
        if ops::hopper_index(lab.gpu, true, 1) {
            let (scores, highest) = (lab.output::<f32>(visible)?, lab.output(ops::highest_len(visible))?);
            ops::scores(&lab.stream, &Scores { scores: &scores, highest: Some(&highest), ..a })?;
            all.extend(lab.get(&scores)?);
        }
        results.push((lab.get(&out)?, all));
    }
    let wrong = different(&results[1].0, &results[0].0) + different_bits(&results[1].1, &results[0].1);
    let empty = results[0].1.iter().filter(|v| v.is_nan()).count() as f64;
    lab.report("pages beyond 4 GiB", "attention and index scores", wrong + empty, 0.0);
    Ok(())
}

/// A query alone has the bits that it has among many, though the blocks are smaller or fewer share its runs.
fn attend_alone(
    lab: &mut Lab<'_>,
    kind: LayerKind,
    window: usize,
    parts: &[(usize, usize)],
    most_entries: usize,
) -> Result<()> {
    for (kernel, name) in kernels(lab) {
        attend_alone_by(lab, kind, window, parts, most_entries, kernel, name)?;
    }
    Ok(())
}

fn attend_alone_by(
    lab: &mut Lab<'_>,
    kind: LayerKind,
    window: usize,
    parts: &[(usize, usize)],
    most_entries: usize,
    kernel: AttentionKernel,
    name: &str,
) -> Result<()> {
    lab.clear()?;
    let heads = 64;
    let world = World::new(lab, kind, window, parts)?;
    let (ring, pages) = (world.ring.put(lab)?, world.entries.put(lab)?);
    let sink = lab.normal(heads, 1.0);
    let d_sink = lab.put(&sink)?;
    let last = parts.len() - 1;
    let q = lab.normal_bf16(heads * HEAD_DIM, 1.5);
    let counts: &[usize] = if lab.small { &[1, 40] } else { &[1, 50, 100] };
    let mut results: Vec<Vec<u16>> = Vec::new();
    // the last sequence's last row: once, and many times in one launch; its window rows before it are in the ring then
    let (start, rows) = parts[last];
    let position = start + rows - 1;
    let row_bytes = &world.staged[world.staged.len() - ROW_BYTES..];
    for &count in counts {
        let list: Vec<Sequence> = (0..count as u32)
            .map(|first_row| Sequence { start: position as u32, first_row, rows: 1, unused: 0 })
            .collect();
        let table = |t: &Table| -> Vec<u32> { t.ids[last * t.pitch..][..t.pitch].repeat(count) };
        let (ring_ids, entry_ids) = (lab.put(&table(&world.ring))?, lab.put(&table(&world.entries))?);
        let (d_q, staged) = (lab.put_bf16(&q.repeat(count))?, lab.put(&row_bytes.repeat(count))?);
        let step = Step::new(lab, &vec![(position, 1); count])?;
        let visible = (position + 1) / 4;
        let width = visible.clamp(1, most_entries);
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
            ops::attend_by(&lab.stream, &a, kernel)?;
            results.push(lab.get(&out)?);
        }
    }
    let (alone, many) = results.split_at(2);
    let mut wrong = 0.0;
    for (i, among) in many.iter().enumerate() {
        wrong += different(&among[among.len() - heads * HEAD_DIM..], &alone[i % 2]);
    }
    lab.report(
        "attend, alone = among many",
        format!("{kind:?}, position {position}, window {window}{name}"),
        wrong,
        0.0,
    );
    Ok(())
}

fn attend_case(
    lab: &mut Lab<'_>,
    kind: LayerKind,
    window: usize,
    parts: &[(usize, usize)],
    heads: usize,
    width: usize,
) -> Result<()> {
    let step = Step::new(lab, parts)?;
    let world = World::new(lab, kind, window, parts)?;
    let rows = step.len();
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
    let unturned = lab.put(&vec![[1.0, 0.0]; rows * ROPE_DIM / 2])?;
    // the kernels for Hopper write whole blocks of 64 heads
    let (part_out, part_sums) =
        (lab.output(rows * 32 * heads.next_multiple_of(64) * HEAD_DIM)?, lab.output(rows * 32 * heads)?);
    let most_keys = step.rows.iter().map(|r| r.1 + 1).max().unwrap_or(0) + window;
    for ((kernel, name), split) in kernels(lab).into_iter().flat_map(|k| [(k, false), (k, true)]) {
        let mut plain: Vec<f32> = Vec::new();
        // the last: without rotation, which separate kernels then do, and the rounding
        for (quantise, apart) in [(false, false), (true, false), (false, true)] {
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
                turns: if apart { &unturned } else { &turns },
                sequence: &step.d_sequence,
                sequences: &step.d_sequences,
                staged: &d_staged,
                ring: world.ring.pages(&ring),
                entries,
                window,
                quantise,
                path,
            };
            ops::attend_by(&lab.stream, &a, kernel)?;
            if apart {
                ops::unfused::round_output(&lab.stream, &out, &turns, heads)?;
            }
            let got: Vec<f32> = lab.get(&out)?.into_iter().map(bf16_value).collect();
            let shape = format!(
                "{kind:?}, {rows} rows, {heads} heads, window {window}{}{name}",
                if split { ", split" } else { "" }
            );
            if apart {
                lab.report("attend = separate kernels", &shape, different_bits(&got, &plain), 0.0);
            } else if quantise {
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
