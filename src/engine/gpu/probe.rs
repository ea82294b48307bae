//! Single halves on given inputs, with intermediates read back: what [`crate::engine::research`] needs of the device.

use std::sync::PoisonError;

use super::choices::Choices;
use super::step::Run;
use super::{GpuEngine, LOGIT_ROWS, logits, read_bf16};
use crate::alloc;
use crate::backend::cpu::rope::{Rotations, frequencies};
use crate::backend::cuda::ops::{HEAD_DIM, ROW_BYTES};
use crate::backend::cuda::stream::Event;
use crate::error::{Error, Result};
use crate::model::config::LayerKind;
use crate::model::deepseek_v4::{Probe, Segment, finite_streams};
use crate::tensor::format::bf16_bits;

impl GpuEngine {
    /// Layer `layer` on streams `x` `[rows, STREAMS, D]` of the segments' tokens; afterwards they may be committed.
    pub(in crate::engine) fn layer(
        &self,
        layer: usize,
        x: &[f32],
        segments: &mut [Segment<'_>],
        probe: &mut Probe,
    ) -> Result<Vec<f32>> {
        self.with_run(segments, |run, segments| {
            put_streams(run, x)?;
            let shape = [run.rows, run.config.hc_mult, run.config.hidden_size];
            run.attention_half(layer, false)?;
            record_attention(run, layer, segments, probe)?;
            run.ffn_half(layer, true)?;
            if probe.is_on() {
                probe.record(layer, "streams_mid", &shape, &read_bf16(run, run.streams())?);
                record_ffn(run, layer, probe)?;
            }
            run.leave()?;
            let out = read_bf16(run, run.streams())?;
            probe.record(layer, "streams", &shape, &out);
            finite_streams(layer, &out, run.config, segments)?;
            run.commit()?;
            Ok(out)
        })
    }

    /// The feed-forward half of `layer` on streams `x`.
    pub(in crate::engine) fn ffn_half(
        &self,
        layer: usize,
        x: &[f32],
        segments: &mut [Segment<'_>],
        probe: &mut Probe,
    ) -> Result<Vec<f32>> {
        self.with_run(segments, |run, _| {
            put_streams(run, x)?;
            run.ffn_half(layer, false)?;
            if probe.is_on() {
                record_ffn(run, layer, probe)?;
            }
            run.leave()?;
            read_bf16(run, run.streams())
        })
    }

    /// The input of layer 0 for the segments' tokens.
    pub(in crate::engine) fn embed(&self, segments: &mut [Segment<'_>]) -> Result<Vec<f32>> {
        self.with_run(segments, |run, _| {
            run.begin()?;
            read_bf16(run, run.streams())
        })
    }

    /// Logits of every row of final streams `x`.
    pub(in crate::engine) fn head(
        &self,
        x: &[f32],
        segments: &mut [Segment<'_>],
        probe: &mut Probe,
    ) -> Result<Vec<f32>> {
        self.with_run(segments, |run, _| {
            put_streams(run, x)?;
            run.arrive()?;
            let (d, layers) = (run.config.hidden_size, run.config.num_hidden_layers);
            let (mut all, mut hidden) = (Vec::new(), Vec::new());
            for first in (0..run.rows).step_by(LOGIT_ROWS) {
                let part = first..(first + LOGIT_ROWS).min(run.rows);
                let rows = part.len();
                all.extend(run.stream.read(&run.head(part)?)?);
                hidden.extend(read_bf16(run, &run.scratch.hidden.slice(0..rows * d)?)?);
            }
            probe.record(layers, "hidden", &[run.rows, d], &hidden);
            Ok(all)
        })
    }

    /// Streams behind each layer, handed to `seen`, and the logits of every row; afterwards the segments may be committed.
    pub(in crate::engine) fn trace(
        &self,
        segments: &mut [Segment<'_>],
        seen: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<Vec<f32>> {
        self.with_run(segments, |run, segments| {
            run.begin()?;
            for layer in 0..run.config.num_hidden_layers {
                run.attention_half(layer, layer > 0)?;
                run.ffn_half(layer, true)?;
                let at = run.at;
                run.leave()?;
                let x = read_bf16(run, run.streams())?;
                finite_streams(layer, &x, run.config, segments)?;
                seen(layer, &x);
                if layer + 1 < run.config.num_hidden_layers {
                    run.at = at;
                }
            }
            let logits = logits(run, run.rows)?;
            run.commit()?;
            Ok(logits)
        })
    }
}

impl GpuEngine {
    /// From the next step on, whether the indexer works on a second stream; it does at first.
    pub(in crate::engine) fn use_second_stream(&self, second: bool) {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).one_stream = !second;
    }

    /// Microseconds, `times` of them, of a step through `layers` in this order, which may come more than once, and the head:
    /// a deeper model than that of which there are weights. It is captured if it has a token of each sequence. Nothing is
    /// committed.
    pub(in crate::engine) fn deep_times(
        &self,
        segments: &mut [Segment<'_>],
        layers: &[usize],
        times: usize,
    ) -> Result<Vec<f64>> {
        let captured = self.captured_rows(segments);
        self.with_choices(segments, &Choices::default(), captured, |run, _| {
            let queue = |run: &mut Run<'_>| {
                run.begin()?;
                for (i, &layer) in layers.iter().enumerate() {
                    run.attention_half(layer, i > 0)?;
                    run.ffn_half(layer, true)?;
                }
                run.leave()?;
                run.watch()?;
                let heads = run.tables.tables.wanted().min(LOGIT_ROWS);
                run.head(0..heads).map(drop)
            };
            queue(run)?;
            let stream = run.stream;
            stream.synchronize()?;
            let graph = captured.map(|_| stream.capture(|| queue(run))).transpose()?;
            let (start, end) = (Event::new(&self.gpu)?, Event::new(&self.gpu)?);
            let mut micros = alloc::with_capacity("times", times)?;
            for _ in 0..times {
                stream.record(&start)?;
                match &graph {
                    Some(graph) => stream.replay(graph)?,
                    None => queue(run)?,
                }
                stream.record(&end)?;
                end.synchronize()?;
                micros.push(end.micros_since(&start)?);
            }
            Ok(micros)
        })
    }

    /// Microseconds of each layer and of the head; nothing is committed.
    pub(in crate::engine) fn layer_times(&self, segments: &mut [Segment<'_>]) -> Result<Vec<f64>> {
        self.with_run(segments, |run, _| {
            let layers = run.config.num_hidden_layers;
            let mut marks = alloc::with_capacity("events", layers + 2)?;
            run.begin()?;
            let mark = |run: &Run<'_>, marks: &mut Vec<Event>| {
                let event = Event::new(&self.gpu)?;
                run.stream.record(&event)?;
                marks.push(event);
                Ok::<_, Error>(())
            };
            for layer in 0..layers {
                mark(run, &mut marks)?;
                run.attention_half(layer, layer > 0)?;
                run.ffn_half(layer, true)?;
            }
            mark(run, &mut marks)?;
            run.leave()?;
            run.watch()?;
            run.head(0..run.tables.tables.wanted())?;
            mark(run, &mut marks)?;
            run.stream.synchronize()?;
            marks.windows(2).map(|pair| pair[1].micros_since(&pair[0])).collect()
        })
    }
}

/// Makes `x`, rounded to bf16, the residual streams.
fn put_streams(run: &mut Run<'_>, x: &[f32]) -> Result<()> {
    let mut bits = alloc::with_capacity("streams for the device", x.len())?;
    bits.extend(x.iter().map(|&v| bf16_bits(v)));
    run.at = 0;
    run.stream.write(&run.scratch.streams[0], &bits)?;
    run.rotations()
}

fn record_attention(run: &Run<'_>, layer: usize, segments: &[Segment<'_>], probe: &mut Probe) -> Result<()> {
    if !probe.is_on() {
        return Ok(());
    }
    let (c, b) = (run.config, &run.scratch.attention);
    let heads = [run.rows, c.num_attention_heads, HEAD_DIM];
    probe.record(layer, "q", &heads, &read_bf16(run, &b.q)?);
    let layout = segments[0].cache.layout();
    let staged = run.stream.read(&run.staged(layer)?)?;
    let mut kv = vec![0.0; run.rows * HEAD_DIM];
    for (row, bytes) in kv.chunks_exact_mut(HEAD_DIM).zip(staged.chunks_exact(ROW_BYTES)) {
        layout.decode_row(bytes, row);
    }
    probe.record(layer, "kv", &[run.rows, HEAD_DIM], &kv);

    // the kernel rotates back what it stores; the record is from before that
    let frequencies = match c.layers[layer] {
        LayerKind::Window => frequencies(c.qk_rope_head_dim, c.rope_theta, None),
        _ => frequencies(c.qk_rope_head_dim, c.compress_rope_theta, Some(&c.rope_scaling)),
    };
    let positions: Vec<usize> = segments.iter().flat_map(|s| s.staged.start..s.staged.start + s.tokens.len()).collect();
    let rotations = Rotations::new(&frequencies, positions.into_iter())?;
    let mut o = read_bf16(run, &b.out)?;
    for (i, head) in o.chunks_exact_mut(HEAD_DIM).enumerate() {
        rotations.rotate(i / c.num_attention_heads, head, false);
    }
    probe.record(layer, "o", &heads, &o);
    probe.record(layer, "attn_out", &[run.rows, c.hidden_size], &read_bf16(run, &run.scratch.output)?);
    if c.layers[layer] == LayerKind::C4a {
        record_selection(run, layer, segments, probe)?;
    }
    Ok(())
}

/// Chosen entries, -1 for none, and scores, minus infinity for entries that a row does not see.
fn record_selection(run: &Run<'_>, layer: usize, segments: &[Segment<'_>], probe: &mut Probe) -> Result<()> {
    let (b, k) = (&run.scratch.attention, run.config.index_topk);
    let (ids, counts) = (run.stream.read(&b.selected)?, run.stream.read(&b.counts)?);
    let mut selected = vec![-1.0; run.rows * k];
    for (row, &count) in counts.iter().enumerate() {
        let chosen = &ids[row * k..][..count as usize];
        for (out, &id) in selected[row * k..].iter_mut().zip(chosen) {
            *out = id as f32;
        }
    }
    probe.record(layer, "selected", &[run.rows, k], &selected);
    let pitch = run.tables.tables.visible();
    if run.rows * pitch > b.scores.len() {
        return Ok(());
    }
    let all = run.stream.read(&b.scores.slice(0..run.rows * pitch)?)?;
    let positions: Vec<usize> = segments.iter().flat_map(|s| s.staged.start..s.staged.start + s.tokens.len()).collect();
    let widest = positions.iter().map(|p| (p + 1) / 4).max().unwrap_or(0);
    let mut scores = vec![f32::NEG_INFINITY; run.rows * widest];
    for (row, position) in positions.into_iter().enumerate() {
        let seen = (position + 1) / 4;
        scores[row * widest..][..seen].copy_from_slice(&all[row * pitch..][..seen]);
    }
    probe.record(layer, "scores", &[run.rows, widest], &scores);
    Ok(())
}

fn record_ffn(run: &Run<'_>, layer: usize, probe: &mut Probe) -> Result<()> {
    let (b, top_k) = (&run.scratch.ffn, run.config.num_experts_per_tok);
    let ids: Vec<f32> = run.stream.read(&b.ids)?.into_iter().map(|id| id as f32).collect();
    probe.record(layer, "router_ids", &[run.rows, top_k], &ids);
    probe.record(layer, "router_weights", &[run.rows, top_k], &run.stream.read(&b.weights)?);
    probe.record(layer, "ffn_out", &[run.rows, run.config.hidden_size], &read_bf16(run, &run.scratch.output)?);
    Ok(())
}
