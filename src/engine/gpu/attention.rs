//! The attention half of a layer on the device: `model/deepseek_v4/attention.rs` with the backend's fused operations.

use super::rollback::kinds;
use super::scratch::Attention as Buffers;
use super::step::Run;
use super::tables::Kind;
use super::weights::{Attention as Weights, Compressor as CompressorWeights};
use crate::alloc;
use crate::backend::cuda::memory::Buffer;
use crate::backend::cuda::ops::{
    self, Attention, AttentionPath, Compress, Compressor, Entries, HEAD_DIM, INDEX_DIM, IndexQuery, Insert, Job,
    Output, ROPE_DIM, ROW_BYTES, RmsNorm, Scores, TopK, Weight,
};
use crate::backend::cuda::stream::Stream;
use crate::cache::Bucket;
use crate::error::Result;
use crate::model::config::LayerKind;

impl Run<'_> {
    /// `scratch.output` from `scratch.input` and its quantised copy.
    pub(super) fn attention(&self, layer: usize) -> Result<()> {
        let (w, b) = (&self.weights.layers[layer].attn, &self.scratch.attention);
        let kind = self.config.layers[layer];
        self.project_input(w, b, kind)?;
        let q_lora = self.normalise_queries(w, b)?;
        self.project_queries(w, b, q_lora)?;

        let turns = self.turns(usize::from(kind != LayerKind::Window))?;
        let staged = self.staged(layer)?;
        if w.indexer.is_some() {
            self.beside(|stream| self.choose(stream, layer, w, b, &turns))?;
        }
        let insert = Insert {
            q: &b.q,
            kv: &b.kv,
            norm: &w.kv_norm,
            turns: &turns,
            staged: &staged,
            heads: self.config.num_attention_heads,
            eps: self.config.rms_norm_eps,
            stepwise: self.rounding.bf16,
        };
        ops::insert(self.stream, &insert)?;
        if let Some(compressor) = &w.compressor {
            let which = if kind == LayerKind::C4a { Compressor::Main4 } else { Compressor::Main128 };
            self.compress(self.stream, layer, which, compressor, &b.main)?;
        }
        if w.indexer.is_some() {
            self.join()?;
        }
        self.attend(layer, w, b, &turns, &staged)?;
        self.project_output(w, b)
    }

    /// Queues `work` on the second stream, if there is one, behind what the first has queued.
    fn beside(&self, work: impl FnOnce(&Stream) -> Result<()>) -> Result<()> {
        let Some(side) = self.side else { return work(self.stream) };
        self.stream.record(&side.forked)?;
        side.stream.wait(&side.forked)?;
        let result = work(&side.stream);
        // also after an error: a capture must not end with a stream left out
        side.stream.record(&side.joined)?;
        result
    }

    /// The first stream waits for what was queued [beside](Self::beside) it.
    fn join(&self) -> Result<()> {
        self.side.map_or(Ok(()), |side| self.stream.wait(&side.joined))
    }

    /// Everything that is a product with the sub-layer's input, in one launch.
    fn project_input(&self, w: &Weights, b: &Buffers, kind: LayerKind) -> Result<()> {
        let (c, plain, quantised) = (self.config, &self.scratch.input, self.quantised_input());
        let d = c.hidden_size;
        let job = |weight, rows, x, y| Job { weight, first_row: 0, rows, cols: d, x, x_stride: d, y, y_stride: rows };
        let mut jobs = vec![
            job(&w.wq_a, c.q_lora_rank, quantised, Output::Bf16(b.q_lora[0].clone())),
            job(&w.wkv, HEAD_DIM, quantised, Output::Bf16(b.kv.clone())),
        ];
        let main = if kind == LayerKind::C4a { Compressor::Main4 } else { Compressor::Main128 };
        let index = w.indexer.as_ref().map(|i| (&i.compressor, &b.index, Compressor::Index4));
        for (m, [values, gates], which) in w.compressor.iter().map(|m| (m, &b.main, main)).chain(index) {
            for (weight, y) in [(&m.wkv, values), (&m.wgate, gates)] {
                let width = which.width();
                jobs.push(job(weight, width, plain, Output::F32(y.slice(0..self.rows * width)?)));
            }
        }
        if let Some(i) = &w.indexer {
            jobs.push(job(&i.weights_proj, c.index_n_heads, plain, Output::Bf16(b.index_weights.clone())));
        }
        self.products(&jobs)
    }

    /// Norm of the low-rank queries; what the query products take.
    fn normalise_queries<'b>(&self, w: &Weights, b: &'b Buffers) -> Result<&'b Buffer<u16>> {
        let [x, out, copy] = &b.q_lora;
        let quantised = self.rounding.act_fp8.then_some(copy);
        let (stride, eps) = (self.config.q_lora_rank, self.config.rms_norm_eps);
        ops::rms_norm(self.stream, &RmsNorm { x, stride, weight: &w.q_norm, out, quantised, eps })?;
        Ok(quantised.unwrap_or(out))
    }

    fn project_queries(&self, w: &Weights, b: &Buffers, x: &Buffer<u16>) -> Result<()> {
        let (c, cols) = (self.config, self.config.q_lora_rank);
        let job = |weight, rows, y: &Buffer<u16>| {
            let y = Output::Bf16(y.clone());
            Job { weight, first_row: 0, rows, cols, x, x_stride: cols, y, y_stride: rows }
        };
        let mut jobs = vec![job(&w.wq_b, c.num_attention_heads * HEAD_DIM, &b.q)];
        if let Some(i) = &w.indexer {
            jobs.push(job(&i.wq_b, c.index_n_heads * INDEX_DIM, &b.index_q));
        }
        self.products(&jobs)
    }

    /// Feeds the step's rows to a compressor.
    fn compress(
        &self,
        stream: &Stream,
        layer: usize,
        kind: Compressor,
        w: &CompressorWeights,
        [values, gates]: &[Buffer<f32>; 2],
    ) -> Result<()> {
        let [entries, state, fresh] = kinds(kind);
        let ids = |kind| self.tables.pages(layer, kind);
        let (entry_ids, state_ids, fresh_ids) = (ids(entries)?, ids(state)?, ids(fresh)?);
        let len = self.rows * kind.width();
        let compress = Compress {
            kind,
            values: &values.slice(0..len)?,
            gates: &gates.slice(0..len)?,
            ape: &w.ape,
            norm: &w.norm,
            turns: &self.entry_turns(self.config.layers[layer])?,
            sequence: &self.tables.sequence()?,
            sequences: &self.tables.sequences()?,
            entries: self.pages(layer, entries, &entry_ids),
            state: self.pages(layer, state, &state_ids),
            fresh: self.pages(layer, fresh, &fresh_ids),
            eps: self.config.rms_norm_eps,
        };
        ops::compress(stream, &compress)
    }

    /// Index keys of the step's rows, and the entries that each row attends to.
    fn choose(&self, stream: &Stream, layer: usize, w: &Weights, b: &Buffers, turns: &Buffer<[f32; 2]>) -> Result<()> {
        let Some(indexer) = &w.indexer else { return Ok(()) };
        let (c, t) = (self.config, self.tables.tables);
        self.compress(stream, layer, Compressor::Index4, &indexer.compressor, &b.index)?;
        let (heads, k) = (c.index_n_heads, c.index_topk);
        let fp4 = self.rounding.index_query_fp4;
        ops::index_query(stream, &IndexQuery { q: &b.index_q, weights: &b.index_weights, turns, heads, fp4 })?;
        let (pitch, rounded) = (t.visible(), fp4 && self.rounding.bf16);
        let by_hopper = ops::hopper_index(stream.gpu(), rounded, k);
        let key_ids = self.tables.pages(layer, Kind::Keys)?;
        let positions = self.tables.positions()?;
        for groups in t.slices(b.scores.len() / pitch) {
            let rows = t.rows_of(&groups);
            let scores = b.scores.slice(0..rows.len() * pitch)?;
            let highest = b.highest.slice(0..rows.len() * ops::highest_len(pitch))?;
            let highest = by_hopper.then_some(&highest);
            let a = Scores {
                q: &b.index_q,
                weights: &b.index_weights,
                groups: &self.tables.groups(groups)?,
                keys: self.table(&key_ids, Bucket::Index, key_ids.len() / t.sequences),
                scores: &scores,
                highest,
                first_row: rows.start,
                pitch,
                sequences: t.sequences,
                heads,
                visible: pitch,
                stepwise: self.rounding.bf16,
                bad: Some(&self.scratch.bad),
            };
            ops::scores(stream, &a)?;
            let a = TopK {
                scores: &scores,
                pitch,
                positions: Some((&positions.slice(rows.clone())?, LayerKind::C4a.ratio())),
                ids: &b.selected.slice(rows.start * k..rows.end * k)?,
                counts: &b.counts.slice(rows)?,
                k,
                parts: Some((&b.part_scores, &b.part_ids)),
                highest,
            };
            ops::top_k(stream, &a)?;
        }
        Ok(())
    }

    fn attend(
        &self,
        layer: usize,
        w: &Weights,
        b: &Buffers,
        turns: &Buffer<[f32; 2]>,
        staged: &Buffer<u8>,
    ) -> Result<()> {
        let (c, t) = (self.config, self.tables.tables);
        let kind = c.layers[layer];
        let (ring, entry_ids) = (self.tables.ring(layer)?, self.tables.pages(layer, Kind::Entries)?);
        let (sequence, sequences) = (self.tables.sequence()?, self.tables.sequences_within_launches()?);
        let most_keys = t.most_keys(kind, c.sliding_window, c.index_topk);
        for launch in t.launches() {
            let part = |width: usize| launch.rows.start * width..launch.rows.end * width;
            let wide = part(c.num_attention_heads * HEAD_DIM);
            let pages = self.pages(layer, Kind::Entries, &entry_ids);
            let (selected, counts);
            let entries = match kind {
                LayerKind::Window => Entries::None,
                LayerKind::C4a => {
                    (selected, counts) = (b.selected.slice(part(c.index_topk))?, b.counts.slice(part(1))?);
                    Entries::Selected { pages, ids: &selected, counts: &counts, width: c.index_topk }
                }
                LayerKind::C128a => Entries::All { pages },
            };
            let split = AttentionPath::Split { most_keys, out: &b.split, sums: &b.split_sums };
            let attention = Attention {
                q: &b.q.slice(wide.clone())?,
                out: &b.out.slice(wide)?,
                sink: &w.sink,
                turns: &turns.slice(part(ROPE_DIM / 2))?,
                sequence: &sequence.slice(part(1))?,
                sequences: &sequences,
                staged: &staged.slice(part(ROW_BYTES))?,
                ring: self.table(&ring, Bucket::Wide, ring.len() / t.sequences),
                entries,
                window: c.sliding_window,
                quantise: self.rounding.output_fp8,
                path: if launch.splits { split } else { AttentionPath::Whole },
            };
            ops::attend(self.stream, &attention)?;
        }
        Ok(())
    }

    /// Grouped `wo_a`, then `wo_b`.
    fn project_output(&self, w: &Weights, b: &Buffers) -> Result<()> {
        let c = self.config;
        let (rank, groups, width) = (c.o_lora_rank, c.o_groups, c.num_attention_heads * HEAD_DIM);
        let (cols, low_width, d) = (width / groups, groups * rank, c.hidden_size);
        let [low, copy] = &b.low;
        let inputs = (0..groups).map(|group| b.out.slice(group * cols..b.out.len())).collect::<Result<Vec<_>>>()?;
        let mut jobs = alloc::with_capacity("output projection jobs", groups)?;
        for (group, x) in inputs.iter().enumerate() {
            jobs.push(Job {
                weight: &w.wo_a,
                first_row: group * rank,
                rows: rank,
                cols,
                x,
                x_stride: width,
                y: Output::Bf16(low.slice(group * rank..low.len())?),
                y_stride: low_width,
            });
        }
        self.products(&jobs)?;
        let x = if self.rounding.act_fp8 {
            ops::quantise(self.stream, low, copy)?;
            copy
        } else {
            low
        };
        let weight: &Weight = &w.wo_b;
        let y = Output::Bf16(self.scratch.output.clone());
        let job = Job { weight, first_row: 0, rows: d, cols: low_width, x, x_stride: low_width, y, y_stride: d };
        self.products(&[job])
    }
}
