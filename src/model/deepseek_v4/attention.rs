//! The attention half of a layer (reference `inference/model.py`).
#![forbid(unsafe_code)]

use crate::alloc;
use crate::backend::cpu::attention::{Attention, Entries, attend};
use crate::backend::cpu::compressor::Compressor;
use crate::backend::cpu::indexer::{Queries, Selection, hadamard, scores, select};
use crate::backend::cpu::linear::Job;
use crate::backend::cpu::norm::{head_norm, rms_norm, store_bf16};
use crate::backend::cpu::rope::Rotations;
use crate::cache::StagedLayer;
use crate::error::{ErrorKind, Result};
use crate::model::config::LayerKind;
use crate::model::weights::{AttentionWeights, CompressorWeights, IndexerWeights, Matrix};
use crate::tensor::format::{e2m1_round_trip, e4m3_round_trip};

use super::{Probe, Segment, StepContext, Trunk};

/// Values per E4M3 scale in linear inputs and in the served attention output.
pub(super) const ACT_BLOCK: usize = 128;
/// Values per E4M3 scale in KV rows.
const KV_BLOCK: usize = 64;

/// Products with the normalised input of the attention half, `[rows, ..]` each; those a layer lacks are empty.
#[derive(Default)]
struct Projections {
    q_lora: Vec<f32>,
    kv: Vec<f32>,
    main: Compression,
    index: Compression,
    index_weights: Vec<f32>,
}

/// Value and gate rows of one compressor, float32.
#[derive(Default)]
struct Compression {
    u: Vec<f32>,
    g: Vec<f32>,
}

/// Where a compressor's entries go.
#[derive(Clone, Copy, PartialEq, Eq)]
enum EntryKind {
    Main,
    Index,
}

impl Trunk<'_> {
    /// Streams `[rows, streams, D]` after the attention sub-layer.
    pub(super) fn attention_half(
        &self,
        layer: usize,
        x: &[f32],
        step: &StepContext,
        segments: &mut [Segment<'_>],
        probe: &mut Probe,
    ) -> Result<Vec<f32>> {
        let w = &self.weights.layers[layer];
        let (input, mixes) = self.enter(x, &w.hc_attn, w.attn_norm.values())?;
        let y = self.attention(layer, &input, step, segments, probe)?;
        self.leave(&y, x, &mixes)
    }

    fn attention(
        &self,
        layer: usize,
        x: &[f32],
        step: &StepContext,
        segments: &mut [Segment<'_>],
        probe: &mut Probe,
    ) -> Result<Vec<f32>> {
        let c = self.config;
        let (kind, w, rows) = (c.layers[layer], &self.weights.layers[layer].attn, step.rows());
        let rotations = step.rotations(kind);

        let mut p = self.project_input(w, x, rows)?;
        let q_lora = self.normalise_rows(&p.q_lora, w.q_norm.values())?;
        self.stage_window(layer, w, &mut p.kv, rotations, step, segments, probe)?;
        let (q, index_q) = self.project_queries(w, &q_lora, rotations, rows)?;
        probe.record(layer, "q", &[rows, c.num_attention_heads, c.head_dim], &q);

        if let Some(compressor) = &w.compressor {
            self.stage_entries(layer, compressor, &p.main, EntryKind::Main, step, segments)?;
        }
        let mut selections: Vec<Option<Selection>> = alloc::with_capacity("selections", segments.len())?;
        selections.resize_with(segments.len(), || None);
        if let Some(indexer) = &w.indexer {
            self.stage_entries(layer, &indexer.compressor, &p.index, EntryKind::Index, step, segments)?;
            for (s, selection) in selections.iter_mut().enumerate() {
                *selection = Some(self.choose_entries(layer, s, &index_q, &p.index_weights, step, segments, probe)?);
            }
        }

        let width = c.num_attention_heads * c.head_dim;
        let mut o = alloc::vec_f32("attention output", rows * width)?;
        for (s, segment) in segments.iter().enumerate() {
            let range = step.bounds[s] * width..step.bounds[s + 1] * width;
            let params = Attention {
                heads: c.num_attention_heads,
                dim: c.head_dim,
                start: segment.staged.start,
                sink: w.sink.finite()?,
                weights_bf16: self.rounding.attention_bf16,
                bf16: self.rounding.bf16,
            };
            let entries = match (kind, &selections[s]) {
                (LayerKind::C4a, Some(selection)) => Entries::Selected(selection),
                (LayerKind::C128a, _) => Entries::All { ratio: LayerKind::C128a.ratio() },
                _ => Entries::None,
            };
            let view = segment.cache.view(layer, &segment.staged);
            attend(self.cpu, params, &q[range.clone()], view, entries, &mut o[range])?;
        }
        drop(q);
        probe.record(layer, "o", &[rows, c.num_attention_heads, c.head_dim], &o);
        let y = self.project_output(w, o, rotations, rows)?;
        probe.record(layer, "attn_out", &[rows, c.hidden_size], &y);
        Ok(y)
    }

    /// Everything that is a product with the sub-layer's input, in one parallel region.
    fn project_input(&self, w: &AttentionWeights, x: &[f32], rows: usize) -> Result<Projections> {
        let quantised = self.quantised(x)?;
        let xq = quantised.as_deref().unwrap_or(x);
        let output = |m: &Matrix| alloc::vec_f32("attention projection", rows * m.rows());
        let mut p = Projections { q_lora: output(&w.wq_a)?, kv: output(&w.wkv)?, ..Default::default() };
        if let Some(m) = &w.compressor {
            p.main = Compression { u: output(&m.wkv)?, g: output(&m.wgate)? };
        }
        if let Some(i) = &w.indexer {
            p.index = Compression { u: output(&i.compressor.wkv)?, g: output(&i.compressor.wgate)? };
            p.index_weights = output(&i.weights_proj)?;
        }
        let mut jobs = vec![Job::new(w.wq_a.ready()?, xq, &mut p.q_lora), Job::new(w.wkv.ready()?, xq, &mut p.kv)];
        if let Some(m) = &w.compressor {
            jobs.push(Job::new(m.wkv.ready()?, x, &mut p.main.u));
            jobs.push(Job::new(m.wgate.ready()?, x, &mut p.main.g));
        }
        if let Some(i) = &w.indexer {
            jobs.push(Job::new(i.compressor.wkv.ready()?, x, &mut p.index.u));
            jobs.push(Job::new(i.compressor.wgate.ready()?, x, &mut p.index.g));
            jobs.push(Job::new(i.weights_proj.ready()?, x, &mut p.index_weights));
        }
        self.cpu.linear(&mut jobs)?;
        for stored in [&mut p.q_lora, &mut p.kv, &mut p.index_weights] {
            store_bf16(stored, self.rounding.bf16);
        }
        if let Some(i) = &w.indexer {
            self.scale_index_weights(i, &mut p.index_weights);
        }
        Ok(p)
    }

    /// Multiplies the head weights by `index_head_dim^-0.5 * heads^-0.5`: a second rounding, as the official code has.
    fn scale_index_weights(&self, indexer: &IndexerWeights, weights: &mut [f32]) {
        let heads = indexer.weights_proj.rows() as f64;
        let scale = (1.0 / (self.config.index_head_dim as f64 * heads).sqrt()) as f32;
        weights.iter_mut().for_each(|v| *v *= scale);
        store_bf16(weights, self.rounding.bf16);
    }

    /// Queries of the layer `[rows, heads, head_dim]` and of its indexer `[rows, index heads, index_head_dim]`.
    fn project_queries(
        &self,
        w: &AttentionWeights,
        q_lora: &[f32],
        rotations: &Rotations,
        rows: usize,
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        let c = self.config;
        let quantised = self.quantised(q_lora)?;
        let input = quantised.as_deref().unwrap_or(q_lora);
        let mut q = alloc::vec_f32("queries", rows * w.wq_b.rows())?;
        let mut index_q = Vec::new();
        let mut jobs = vec![Job::new(w.wq_b.ready()?, input, &mut q)];
        if let Some(i) = &w.indexer {
            index_q = alloc::vec_f32("index queries", rows * i.wq_b.rows())?;
            jobs.push(Job::new(i.wq_b.ready()?, input, &mut index_q));
        }
        self.cpu.linear(&mut jobs)?;
        let r = self.rounding;
        self.cpu.pool.chunks(&mut q, w.wq_b.rows(), |row, heads| {
            for head in heads.chunks_exact_mut(c.head_dim) {
                store_bf16(head, r.bf16);
                head_norm(head, c.rms_norm_eps, r.bf16);
                rotations.rotate(row, head, r.bf16);
            }
            Ok(())
        })?;
        if let Some(i) = &w.indexer {
            self.cpu.pool.chunks(&mut index_q, i.wq_b.rows(), |row, heads| {
                for head in heads.chunks_exact_mut(c.index_head_dim) {
                    store_bf16(head, r.bf16);
                    rotations.rotate(row, head, r.bf16);
                    self.index_vector(head, r.index_query_fp4);
                }
                Ok(())
            })?;
        }
        Ok((q, index_q))
    }

    /// Hadamard rotation and FP4 rounding of an index vector, where the numerics have them.
    fn index_vector(&self, v: &mut [f32], fp4: bool) {
        if self.rounding.index_rotate {
            hadamard(v);
            store_bf16(v, self.rounding.bf16);
        }
        if fp4 {
            e2m1_round_trip(v);
            store_bf16(v, self.rounding.bf16);
        }
    }

    /// Norm, rotation and quantisation of the rows' own KV, into the staged window.
    #[expect(clippy::too_many_arguments, reason = "one stage of a layer over all segments")]
    fn stage_window(
        &self,
        layer: usize,
        w: &AttentionWeights,
        kv: &mut [f32],
        rotations: &Rotations,
        step: &StepContext,
        segments: &mut [Segment<'_>],
        probe: &mut Probe,
    ) -> Result<()> {
        let c = self.config;
        let dim = c.head_dim;
        let normed = self.normalise_rows(kv, w.kv_norm.values())?;
        kv.copy_from_slice(&normed);
        self.cpu.pool.chunks(kv, dim, |row, kv| {
            rotations.rotate(row, kv, self.rounding.bf16);
            self.kv_row(kv);
            Ok(())
        })?;
        probe.record(layer, "kv", &[step.rows(), dim], kv);
        for (s, segment) in segments.iter_mut().enumerate() {
            let layout = segment.cache.layout();
            let rows = kv[step.bounds[s] * dim..step.bounds[s + 1] * dim].chunks_exact(dim);
            let staged = &mut segment.staged.layers[layer].rows;
            for (row, out) in rows.zip(staged.chunks_exact_mut(layout.row_bytes())) {
                layout.encode_row(row, out);
            }
        }
        Ok(())
    }

    /// FP8 rounding of a KV row's non-rotary values, where the numerics have it.
    fn kv_row(&self, row: &mut [f32]) {
        if self.rounding.kv_fp8 {
            let nope = row.len() - self.config.qk_rope_head_dim;
            e4m3_round_trip(&mut row[..nope], KV_BLOCK);
            store_bf16(&mut row[..nope], self.rounding.bf16);
        }
    }

    /// Feeds the step's rows to a compressor and stages the entries they complete.
    fn stage_entries(
        &self,
        layer: usize,
        w: &CompressorWeights,
        rows: &Compression,
        entry: EntryKind,
        step: &StepContext,
        segments: &mut [Segment<'_>],
    ) -> Result<()> {
        let kind = self.config.layers[layer];
        let (ratio, dim) = (kind.ratio(), w.norm.values().len());
        let (ape, width) = (w.ape.values(), w.wkv.rows());
        let mut gate = alloc::vec_f32("compressor gate", width)?;
        let mut normed = alloc::vec_f32("compressed entry", dim)?;
        for (s, segment) in segments.iter_mut().enumerate() {
            let layout = segment.cache.layout();
            let rotations = step.entry_rotations(s, kind);
            let first_entry = segment.staged.start / ratio;
            let kept_from = segment.staged.kept_from();
            let StagedLayer { entries, keys, main_state, index_state, main_before, index_before, .. } =
                &mut segment.staged.layers[layer];
            let (state, before, out) = match entry {
                EntryKind::Main => (main_state, main_before, entries),
                EntryKind::Index => (index_state, index_before, keys),
            };
            let mut emit = |j: usize, values: &mut [f32]| {
                store_bf16(values, self.rounding.bf16);
                rms_norm(values, w.norm.values(), self.config.rms_norm_eps, self.rounding.bf16, &mut normed);
                rotations.rotate(j - first_entry, &mut normed, self.rounding.bf16);
                let at = out.len();
                match entry {
                    EntryKind::Main => {
                        self.kv_row(&mut normed);
                        out.resize(at + layout.row_bytes(), 0);
                        layout.encode_row(&normed, &mut out[at..]);
                    }
                    EntryKind::Index => {
                        self.index_vector(&mut normed, self.rounding.index_key_fp4);
                        out.resize(at + layout.key_bytes(), 0);
                        layout.encode_key(&normed, &mut out[at..]);
                    }
                }
            };
            for (i, row) in (step.bounds[s]..step.bounds[s + 1]).enumerate() {
                let position = segment.staged.start + i;
                if i >= kept_from {
                    before.extend_from_slice(state);
                }
                let u = &rows.u[row * width..(row + 1) * width];
                let g = &rows.g[row * width..(row + 1) * width];
                let ape = &ape[position % ratio * width..][..width];
                for ((gate, g), a) in gate.iter_mut().zip(g).zip(ape) {
                    *gate = g + a;
                }
                let mut compressor = match kind {
                    LayerKind::C4a => Compressor::Overlap { dim, state },
                    _ => Compressor::Online { dim, ratio, state },
                };
                compressor.take(position, u, &gate, &mut emit);
            }
        }
        Ok(())
    }

    /// The indexer's choice for the rows of segment `s`.
    #[expect(clippy::too_many_arguments, reason = "one stage of a layer over one segment")]
    fn choose_entries(
        &self,
        layer: usize,
        s: usize,
        index_q: &[f32],
        index_weights: &[f32],
        step: &StepContext,
        segments: &[Segment<'_>],
        probe: &mut Probe,
    ) -> Result<Selection> {
        let c = self.config;
        let (rows, heads) = (step.bounds[s]..step.bounds[s + 1], c.index_n_heads);
        let width = heads * c.index_head_dim;
        let queries = Queries {
            q: &index_q[rows.start * width..rows.end * width],
            weights: &index_weights[rows.start * heads..rows.end * heads],
            heads,
            dim: c.index_head_dim,
            start: segments[s].staged.start,
            bf16: self.rounding.bf16,
        };
        let view = segments[s].cache.view(layer, &segments[s].staged);
        let chosen = select(self.cpu, &queries, view, c.index_topk);
        let selection = chosen.map_err(|e| match e.kind() {
            ErrorKind::Numeric => e.context(format_args!("layer {layer}")),
            _ => e,
        })?;
        if probe.is_on() {
            record_selection(layer, &selection, rows.len(), probe);
            let all = scores(self.cpu, &queries, view, 0, rows.len())?;
            let widest = all.last().map_or(0, Vec::len);
            let mut flat = vec![f32::NEG_INFINITY; rows.len() * widest];
            for (row, values) in all.iter().enumerate() {
                flat[row * widest..][..values.len()].copy_from_slice(values);
            }
            probe.record(layer, "scores", &[rows.len(), widest], &flat);
        }
        Ok(selection)
    }

    /// Inverse rotation, grouped `wo_a`, `wo_b`: `[rows, D]`.
    fn project_output(
        &self,
        w: &AttentionWeights,
        o: Vec<f32>,
        rotations: &Rotations,
        rows: usize,
    ) -> Result<Vec<f32>> {
        let (c, r) = (self.config, self.rounding);
        let (groups, rank) = (c.o_groups, c.o_lora_rank);
        let width = c.num_attention_heads * c.head_dim;
        let group_width = width / groups;
        // group-major [groups, rows, group_width], so that each group's input is one matrix
        let mut grouped = alloc::vec_f32("grouped attention output", rows * width)?;
        self.cpu.pool.chunks(&mut grouped, group_width, |task, out| {
            let (group, row) = (task / rows, task % rows);
            out.copy_from_slice(&o[row * width + group * group_width..][..group_width]);
            out.chunks_exact_mut(c.head_dim).for_each(|head| rotations.rotate_back(row, head, r.bf16));
            if r.output_fp8 {
                e4m3_round_trip(out, ACT_BLOCK);
            }
            Ok(())
        })?;
        drop(o);
        let mut low = alloc::vec_f32("low-rank attention output", rows * groups * rank)?;
        let mut wo_a = w.wo_a.ready()?;
        wo_a.round_to_bf16 = r.bf16;
        let mut jobs = alloc::with_capacity("output projection jobs", groups)?;
        for (group, output) in low.chunks_exact_mut(rows * rank).enumerate() {
            let input = &grouped[group * rows * group_width..][..rows * group_width];
            jobs.push(Job::new(wo_a.band(group * rank, rank), input, output));
        }
        self.cpu.linear(&mut jobs)?;
        drop(jobs);
        drop(grouped);
        let mut joined = alloc::vec_f32("joined attention output", rows * groups * rank)?;
        self.cpu.pool.chunks(&mut joined, groups * rank, |row, out| {
            for (group, out) in out.chunks_exact_mut(rank).enumerate() {
                out.copy_from_slice(&low[(group * rows + row) * rank..][..rank]);
            }
            store_bf16(out, r.bf16);
            if r.act_fp8 {
                e4m3_round_trip(out, ACT_BLOCK);
            }
            Ok(())
        })?;
        let mut y = alloc::vec_f32("attention sub-layer output", rows * c.hidden_size)?;
        self.cpu.linear(&mut [Job::new(w.wo_b.ready()?, &joined, &mut y)])?;
        store_bf16(&mut y, r.bf16);
        Ok(y)
    }

    /// Rms norm of each row.
    fn normalise_rows(&self, x: &[f32], weight: &[f32]) -> Result<Vec<f32>> {
        let mut out = alloc::vec_f32("normalised rows", x.len())?;
        let width = weight.len();
        for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            rms_norm(x, weight, self.config.rms_norm_eps, self.rounding.bf16, out);
        }
        Ok(out)
    }

    /// A copy of `x` rounded as the input of quantised linears, or `None` where the numerics leave it alone.
    pub(super) fn quantised(&self, x: &[f32]) -> Result<Option<Vec<f32>>> {
        if !self.rounding.act_fp8 {
            return Ok(None);
        }
        let mut copy = alloc::copied("quantised activations", x)?;
        self.cpu.pool.chunks(&mut copy, 32 * ACT_BLOCK, |_, values| {
            e4m3_round_trip(values, ACT_BLOCK);
            Ok(())
        })?;
        Ok(Some(copy))
    }
}

fn record_selection(layer: usize, selection: &Selection, rows: usize, probe: &mut Probe) {
    let mut flat = vec![-1.0; rows * selection.width];
    for row in 0..rows {
        for (out, &j) in flat[row * selection.width..].iter_mut().zip(selection.row(row)) {
            *out = j as f32;
        }
    }
    probe.record(layer, "selected", &[rows, selection.width], &flat);
}
