//! The ends of the trunk and the seams between sub-layers: embedding, hyper-connections, head.
#![forbid(unsafe_code)]

use crate::alloc;
use crate::backend::cpu::hyper::{self, Mix};
use crate::backend::cpu::linear::Job;
use crate::backend::cpu::norm::{inverse_rms, rms_norm};
use crate::error::Result;
use crate::model::weights::HyperWeights;
use crate::tensor::format::bf16_value;

use super::{Probe, StepContext, Trunk, finite_logits};

impl Trunk<'_> {
    /// Embedding rows of `ids`, repeated for each stream: `[rows, streams, D]`.
    pub(crate) fn embed(&self, ids: &[u32]) -> Result<Vec<f32>> {
        let (d, streams) = (self.config.hidden_size, self.config.hc_mult);
        let mut x = alloc::vec_f32("residual streams", ids.len() * streams * d)?;
        let table = self.weights.embed.view();
        for (x, &id) in x.chunks_exact_mut(streams * d).zip(ids) {
            let bytes = id as usize * 2 * d..(id as usize + 1) * 2 * d;
            self.weights.embed.tensor().populate(bytes.clone())?;
            let row = &table.data[bytes];
            let (first, others) = x.split_at_mut(d);
            for (v, b) in first.iter_mut().zip(row.chunks_exact(2)) {
                *v = bf16_value(u16::from_le_bytes([b[0], b[1]]));
            }
            others.chunks_exact_mut(d).for_each(|copy| copy.copy_from_slice(first));
        }
        Ok(x)
    }

    /// Sub-layer input (collapsed and normalised, `[rows, D]`) and the mixing of each row.
    pub(crate) fn enter(&self, x: &[f32], w: &HyperWeights, norm: &[f32]) -> Result<(Vec<f32>, Vec<Mix>)> {
        let (params, d) = (self.hyper(), self.config.hidden_size);
        let width = params.streams * d;
        let rows = x.len() / width;
        let projected = self.project_streams(x, w)?;
        let outputs = projected.len() / rows;
        let mut mixes: Vec<Mix> = alloc::with_capacity("stream mixes", rows)?;
        mixes.resize(rows, Mix::default());
        let (scale, base) = (w.scale.values(), w.base.values());
        self.cpu.pool.chunks(&mut mixes, 8, |chunk, mixes| {
            for (i, mix) in mixes.iter_mut().enumerate() {
                let row = chunk * 8 + i;
                *mix = hyper::mix(params, &projected[row * outputs..(row + 1) * outputs], scale, base);
            }
            Ok(())
        })?;
        let mut out = alloc::vec_f32("sub-layer input", rows * d)?;
        let (eps, bf16) = (self.config.rms_norm_eps, self.rounding.bf16);
        self.cpu.pool.chunks(&mut out, d, |row, out| {
            let mut collapsed = alloc::vec_f32("collapsed streams", d)?;
            hyper::collapse(&mixes[row].pre, &x[row * width..(row + 1) * width], bf16, &mut collapsed);
            rms_norm(&collapsed, norm, eps, bf16, out);
            Ok(())
        })?;
        Ok((out, mixes))
    }

    /// New streams from a sub-layer's output `y` `[rows, D]`.
    pub(crate) fn leave(&self, y: &[f32], x: &[f32], mixes: &[Mix]) -> Result<Vec<f32>> {
        let d = self.config.hidden_size;
        let width = self.config.hc_mult * d;
        let mut out = alloc::vec_f32("residual streams", x.len())?;
        self.cpu.pool.chunks(&mut out, width, |row, out| {
            let x = &x[row * width..(row + 1) * width];
            hyper::expand(&mixes[row], &y[row * d..(row + 1) * d], x, self.rounding.bf16, out);
            Ok(())
        })?;
        Ok(out)
    }

    /// `(v . fn^T) / rms(v)` of each row's streams, float32: `[rows, outputs]`.
    fn project_streams(&self, x: &[f32], w: &HyperWeights) -> Result<Vec<f32>> {
        let width = self.config.hc_mult * self.config.hidden_size;
        let rows = x.len() / width;
        let outputs = w.mix.rows();
        let mut projected = alloc::vec_f32("stream projection", rows * outputs)?;
        self.cpu.linear(&mut [Job::new(w.mix.ready()?, x, &mut projected)])?;
        self.cpu.pool.chunks(&mut projected, outputs, |row, values| {
            let scale = inverse_rms(&x[row * width..(row + 1) * width], self.config.rms_norm_eps);
            values.iter_mut().for_each(|v| *v *= scale);
            Ok(())
        })?;
        Ok(projected)
    }

    /// Final collapse, norm and logits of the rows asked for: `[those rows, vocab]`, float32.
    pub(crate) fn head(&self, x: &[f32], step: &StepContext, probe: &mut Probe) -> Result<Vec<f32>> {
        let (params, d) = (self.hyper(), self.config.hidden_size);
        let width = params.streams * d;
        let wanted = &step.wanted;
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        let mut chosen = alloc::with_capacity("final streams", wanted.len() * width)?;
        wanted.iter().for_each(|&row| chosen.extend_from_slice(&x[row * width..(row + 1) * width]));
        let w = &self.weights.hc_head;
        let projected = self.project_streams(&chosen, w)?;
        let mut hidden = alloc::vec_f32("final hidden state", wanted.len() * d)?;
        let mut collapsed = alloc::vec_f32("collapsed streams", d)?;
        for (i, hidden) in hidden.chunks_exact_mut(d).enumerate() {
            let m = &projected[i * params.streams..(i + 1) * params.streams];
            let pre = hyper::head_weights(params, m, w.scale.values()[0], w.base.values());
            hyper::collapse(&pre, &chosen[i * width..(i + 1) * width], self.rounding.bf16, &mut collapsed);
            rms_norm(&collapsed, self.weights.norm.values(), self.config.rms_norm_eps, self.rounding.bf16, hidden);
        }
        probe.record(self.config.num_hidden_layers, "hidden", &[wanted.len(), d], &hidden);
        let vocab = self.config.vocab_size;
        let mut logits = alloc::vec_f32("logits", wanted.len() * vocab)?;
        self.cpu.linear(&mut [Job::new(self.weights.head.ready()?, &hidden, &mut logits)])?;
        finite_logits(&logits, vocab, wanted.iter().copied())?;
        Ok(logits)
    }
}
