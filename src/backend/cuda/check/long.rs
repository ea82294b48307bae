//! Checks behind long contexts: around 2^16 tokens and 2^16 entries, and at the end of a million tokens.

use std::cmp::Ordering;
use std::sync::Arc;

use super::lab::{Lab, different, distance};
use super::world::{INDEX, NARROW, Scene, Step, Table, WIDE, World, layout};
use crate::backend::cpu::attention::{Attention as CpuAttention, Entries as CpuEntries, attend as cpu_attend};
use crate::backend::cpu::indexer::{Queries, Selection, scores as cpu_scores};
use crate::backend::cuda::memory::Buffer;
use crate::backend::cuda::ops::{
    self, Attention, AttentionPath, Entries, Group, HEAD_DIM, INDEX_DIM, KEY_BYTES, ROW_BYTES, Scores, TopK,
};
use crate::cache::{BLOCK_TOKENS, CacheManager, CacheOptions, SequenceCache};
use crate::error::Result;
use crate::model::config::LayerKind;
use crate::tensor::format::bf16_value;

/// First positions and rows of the steps.
const STEPS: [(usize, usize); 3] = [(65_530, 9), (262_141, 9), (1_048_570, 6)];
/// Different rows and keys, which come again and again: no multiple of a power of two, so that one at a wrong place shows.
const BANK: usize = 1021;

/// Pitfalls 50, 51, 56: index scores, the choice and attention against the CPU's.
pub(super) fn long_context(lab: &mut Lab<'_>) -> Result<()> {
    if lab.small {
        return Ok(());
    }
    for part in STEPS {
        for kind in [LayerKind::C4a, LayerKind::C128a] {
            lab.clear()?;
            let (step, world) = (Step::new(lab, &[part])?, World::long(lab, kind, part)?);
            let selection = match kind {
                LayerKind::C4a => Some(choose(lab, &step, &world)?),
                _ => None,
            };
            attend(lab, &step, &world, kind, selection.as_ref())?;
        }
    }
    Ok(())
}

impl World {
    /// One sequence with a window of 128 and a step of `rows` tokens behind `start`.
    fn long(lab: &mut Lab<'_>, kind: LayerKind, (start, rows): (usize, usize)) -> Result<Self> {
        let layout = layout(kind, 128);
        let manager: Arc<CacheManager> = CacheManager::new(layout.clone(), CacheOptions::PRIVATE, b"");
        let (ratio, end) = (kind.ratio(), start + rows);
        let (per_page, page_bytes) = if kind == LayerKind::C128a { (2, NARROW) } else { (64, WIDE) };
        let mut world = Self {
            scenes: Vec::new(),
            ring: Table::new(lab, 1, 2, WIDE),
            entries: Table::new(lab, 1, (end / ratio + 1).div_ceil(per_page), page_bytes),
            keys: Table::new(lab, 1, (end / ratio + 1).div_ceil(64), INDEX),
            staged: Vec::new(),
        };
        let (mut row_bank, mut key_bank) = (vec![0; BANK * ROW_BYTES], vec![0; BANK * KEY_BYTES]);
        for row in row_bank.chunks_exact_mut(ROW_BYTES) {
            layout.encode_row(&lab.normal(HEAD_DIM, 1.0), row);
        }
        for key in key_bank.chunks_exact_mut(KEY_BYTES) {
            layout.encode_key(&lab.normal(INDEX_DIM, 1.0), key);
        }
        let row = |i: usize| &row_bank[i % BANK * ROW_BYTES..][..ROW_BYTES];
        let key = |j: usize| &key_bank[j % BANK * KEY_BYTES..][..KEY_BYTES];
        let mut cache = SequenceCache::new(&manager, 0)?;
        let mut first = 0;
        loop {
            let count = if first < start { BLOCK_TOKENS.min(start - first) } else { rows };
            let mut part = cache.stage(count)?;
            let layer = &mut part.layers[0];
            for (position, out) in (first..).zip(layer.rows.chunks_exact_mut(ROW_BYTES)) {
                out.copy_from_slice(row(position + 500));
                if position < start {
                    world.ring.set(0, position % 128, 64, out);
                } else {
                    world.staged.extend_from_slice(out);
                }
            }
            for j in first / ratio..(first + count) / ratio {
                world.entries.set(0, j, per_page, row(j));
                layer.entries.extend_from_slice(row(j));
                if kind == LayerKind::C4a {
                    world.keys.set(0, j, 64, key(j));
                    layer.keys.extend_from_slice(key(j));
                }
            }
            if first == start {
                world.scenes.push(Scene { cache, staged: part });
                return Ok(world);
            }
            cache.commit(part);
            first += count;
        }
    }
}

/// Checks the scores of all entries and the 512 best of each row; those that are best by the device's scores.
fn choose(lab: &mut Lab<'_>, step: &Step, world: &World) -> Result<Selection> {
    let (heads, rows, k) = (16, step.len(), 512);
    let position = step.sequences[0].start;
    let visible = (position as usize + rows) / 4;
    let pitch = visible + 5;
    let (q, weights) = (lab.normal_bf16(rows * heads * INDEX_DIM, 1.0), lab.normal_bf16(rows * heads, 1.0));
    let groups = lab.put(&[Group { sequence: 0, first_row: 0, rows: rows as u32, position }])?;
    let (d_q, d_weights, keys) = (lab.put_bf16(&q)?, lab.put_bf16(&weights)?, world.keys.put(lab)?);
    let (scores, bad) = (lab.output(rows * pitch)?, lab.put(&[0u32])?);
    let a = Scores {
        q: &d_q,
        weights: &d_weights,
        groups: &groups,
        keys: world.keys.pages(&keys),
        scores: &scores,
        highest: None,
        first_row: 0,
        pitch,
        sequences: 1,
        heads,
        visible,
        stepwise: true,
        bad: Some(&bad),
    };
    ops::scores(&lab.stream, &a)?;
    let candidates = rows * ops::top_k_parts(pitch, k);
    let (ids, counts) = (lab.output(rows * k)?, lab.output(rows)?);
    let (values, places) = (lab.output(candidates)?, lab.output(candidates)?);
    let (positions, parts) = (Some((&step.d_positions, 4)), Some((&values, &places)));
    ops::top_k(
        &lab.stream,
        &TopK { scores: &scores, pitch, positions, ids: &ids, counts: &counts, k, parts, highest: None },
    )?;

    let (got, ids, counts) = (lab.get(&scores)?, lab.get(&ids)?, lab.get(&counts)?);
    let (start, dim) = (position as usize, INDEX_DIM);
    let queries = Queries { q: &q, weights: &weights, heads, dim, start, bf16: true };
    let scene = &world.scenes[0];
    let want = cpu_scores(lab.cpu, &queries, scene.cache.view(0, &scene.staged), 0, rows)?;
    let (mut flat, mut unseen, mut wrong) = (Vec::new(), 0, f64::from(lab.get(&bad)?[0]));
    let mut selection = Selection { width: k, ids: Vec::new(), counts: vec![k as u32; rows] };
    for (r, want) in want.iter().enumerate() {
        let (seen, rest) = got[r * pitch..(r + 1) * pitch].split_at(want.len());
        unseen += rest.iter().filter(|v| !v.is_nan()).count();
        let mut order: Vec<u32> = (0..seen.len() as u32).collect();
        let value = |i: u32| seen[i as usize];
        order.sort_by(|&a, &b| value(b).partial_cmp(&value(a)).unwrap_or(Ordering::Equal).then(a.cmp(&b)));
        order.truncate(k);
        order.sort_unstable();
        wrong += different(&ids[r * k..(r + 1) * k], &order) + f64::from(counts[r].abs_diff(k as u32));
        selection.ids.extend(order);
        flat.extend_from_slice(seen);
    }
    let shape = format!("{rows} rows behind {start} tokens");
    // as in the checks of short contexts
    lab.report("index_scores, long context", &shape, distance(&flat, &want.concat()), 2e-3);
    lab.report("index_scores, unseen keys", &shape, unseen as f64, 0.0);
    lab.report("top_k, long context", &shape, wrong, 0.0);
    Ok(selection)
}

/// Both ways of cutting it, of all entries of ratio 128 or of the chosen ones.
fn attend(lab: &mut Lab<'_>, step: &Step, world: &World, kind: LayerKind, selection: Option<&Selection>) -> Result<()> {
    let (heads, rows, start) = (64, step.len(), step.sequences[0].start as usize);
    let (q, sink) = (lab.normal_bf16(rows * heads * HEAD_DIM, 1.5), lab.normal(heads, 1.0));
    let a = CpuAttention { heads, dim: HEAD_DIM, start, sink: &sink, weights_bf16: true, bf16: true };
    let entries = selection.map_or(CpuEntries::All { ratio: 128 }, CpuEntries::Selected);
    let scene = &world.scenes[0];
    let mut want = vec![0.0; rows * heads * HEAD_DIM];
    cpu_attend(lab.cpu, a, &q, scene.cache.view(0, &scene.staged), entries, &mut want)?;
    let positions: Vec<usize> = step.rows.iter().map(|r| r.1).collect();
    let rotations = super::world::yarn_rotations(&positions)?;
    for (i, head) in want.chunks_exact_mut(HEAD_DIM).enumerate() {
        rotations.rotate_back(i / heads, head, true);
    }

    let (d_q, d_sink, turns, staged) = (lab.put_bf16(&q)?, lab.put(&sink)?, step.turns(1)?, lab.put(&world.staged)?);
    let (ring, pages) = (world.ring.put(lab)?, world.entries.put(lab)?);
    let chosen: Option<(Buffer<u32>, Buffer<u32>)> = match selection {
        Some(selection) => Some((lab.put(&selection.ids)?, lab.put(&selection.counts)?)),
        None => None,
    };
    let (part_out, part_sums) = (lab.output(rows * 32 * heads * HEAD_DIM)?, lab.output(rows * 32 * heads)?);
    for split in [false, true] {
        let pages = world.entries.pages(&pages);
        let (entries, count) = match (&chosen, selection) {
            (Some((ids, counts)), Some(Selection { width, .. })) => {
                (Entries::Selected { pages, ids, counts, width: *width }, *width)
            }
            _ => (Entries::All { pages }, (start + rows) / 128),
        };
        let path = if split {
            AttentionPath::Split { most_keys: 128 + count, out: &part_out, sums: &part_sums }
        } else {
            AttentionPath::Whole
        };
        let out = lab.output(rows * heads * HEAD_DIM)?;
        let a = Attention {
            q: &d_q,
            out: &out,
            sink: &d_sink,
            turns: &turns,
            sequence: &step.d_sequence,
            sequences: &step.d_sequences,
            staged: &staged,
            ring: world.ring.pages(&ring),
            entries,
            window: 128,
            quantise: false,
            path,
        };
        ops::attend(&lab.stream, &a)?;
        let got: Vec<f32> = lab.get(&out)?.into_iter().map(bf16_value).collect();
        let shape = format!("{kind:?}, {rows} rows behind {start} tokens{}", if split { ", split" } else { "" });
        // as in the checks of short contexts
        lab.report("attend, long context", shape, distance(&got, &want), 4e-3);
    }
    Ok(())
}
