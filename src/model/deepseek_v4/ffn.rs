//! The mixture-of-experts half of a layer (reference `inference/model.py`).
#![forbid(unsafe_code)]

use crate::alloc;
use crate::backend::cpu::linear::Job;
use crate::backend::cpu::moe::{affinity, choose, route_weights};
use crate::backend::cpu::norm::store_bf16;
use crate::error::{Result, bail};
use crate::model::weights::{MoeWeights, Routing};
use crate::tensor::format::round_bf16;

use super::experts::{ExpertRows, Experts, Routes};
use super::home::Home;
use super::{Probe, Trunk};

impl Trunk<'_> {
    /// Streams `[rows, streams, D]` after the feed-forward sub-layer.
    pub(crate) fn ffn_half(&self, layer: usize, x: &[f32], ids: &[u32], probe: &mut Probe) -> Result<Vec<f32>> {
        let w = &self.weights.layers[layer];
        let (input, mixes) = self.enter(x, &w.hc_ffn, w.ffn_norm.values())?;
        let y = self.moe(layer, &w.ffn, &input, ids, probe)?;
        probe.record(layer, "ffn_out", &[ids.len(), self.config.hidden_size], &y);
        self.leave(&y, x, &mixes)
    }

    fn moe(&self, layer: usize, w: &MoeWeights, x: &[f32], ids: &[u32], probe: &mut Probe) -> Result<Vec<f32>> {
        let (d, rows, top_k) = (self.config.hidden_size, ids.len(), self.config.num_experts_per_tok);
        let quantised = self.quantised(x)?;
        let xq = quantised.as_deref().unwrap_or(x);

        let mut logits = alloc::vec_f32("router logits", rows * w.gate.rows())?;
        let home = Home { tier: self.tier, layer };
        let experts = Experts { cpu: self.cpu, config: self.config, rounding: self.rounding, home };
        let (mut gate, mut up) = (experts.buffer(rows)?, experts.buffer(rows)?);
        self.cpu.linear(&mut [
            Job::new(w.gate.ready()?, x, &mut logits),
            Job::new(w.shared.w1.ready()?, xq, &mut gate),
            Job::new(w.shared.w3.ready()?, xq, &mut up),
        ])?;
        let routes = self.route(layer, w, logits, ids)?;
        if probe.is_on() {
            let ids: Vec<f32> = routes.ids.iter().map(|&e| e as f32).collect();
            probe.record(layer, "router_ids", &[rows, top_k], &ids);
            probe.record(layer, "router_weights", &[rows, top_k], &routes.weights);
        }
        experts.activate(&mut gate, &mut up, |_| 1.0)?;
        let mut shared = alloc::vec_f32("shared expert output", rows * d)?;
        let mut room = ExpertRows::default();
        experts.run(w, xq, &routes, Some((&gate[..], &mut shared[..])), &mut room)?;
        let routed = &mut room.out[..];
        store_bf16(routed, self.rounding.bf16);
        store_bf16(&mut shared, self.rounding.bf16);

        // a row's experts are summed in order of expert id, whatever the batch
        let mut places = alloc::with_capacity("expert places", rows * top_k)?;
        places.resize(rows * top_k, 0usize);
        let mut filled = alloc::zeroed::<usize>("expert place counts", rows)?;
        for (place, &assignment) in routes.order.iter().enumerate() {
            let row = assignment / top_k;
            places[row * top_k + filled[row]] = place;
            filled[row] += 1;
        }
        let bf16 = self.rounding.bf16;
        let mut y = alloc::vec_f32("feed-forward output", rows * d)?;
        self.cpu.pool.chunks(&mut y, d, |row, y| {
            for &place in &places[row * top_k..(row + 1) * top_k] {
                for (y, r) in y.iter_mut().zip(&routed[place * d..(place + 1) * d]) {
                    *y += r;
                }
            }
            for (y, s) in y.iter_mut().zip(&shared[row * d..(row + 1) * d]) {
                *y += s;
                if bf16 {
                    *y = round_bf16(*y);
                }
            }
            Ok(())
        })?;
        Ok(y)
    }

    fn route(&self, layer: usize, w: &MoeWeights, mut logits: Vec<f32>, token_ids: &[u32]) -> Result<Routes> {
        let (experts, top_k, rows) = (w.gate.rows(), self.config.num_experts_per_tok, token_ids.len());
        logits.iter_mut().for_each(|z| *z = affinity(*z));
        let mut ids = alloc::zeroed("expert ids", rows * top_k)?;
        let mut weights = alloc::vec_f32("expert weights", rows * top_k)?;
        for (row, &token) in token_ids.iter().enumerate() {
            let affinities = &logits[row * experts..(row + 1) * experts];
            // none is negative, so their sum shows any that is not finite; choosing by comparison would pass it over
            if !affinities.iter().sum::<f32>().is_finite() {
                bail!(
                    Numeric,
                    "layer {layer}: the router's affinities for row {row} of the step (token {token}) are not finite; \
                     `dsv4 verify --scan` tells whether weights are not finite"
                );
            }
            let ids: &mut [u32] = &mut ids[row * top_k..(row + 1) * top_k];
            match &w.routing {
                Routing::Bias(bias) => choose(affinities, bias.finite()?, ids),
                Routing::Hash(table) => {
                    for (id, expert) in ids.iter_mut().zip(table.row(token)?) {
                        *id = expert as u32;
                    }
                }
            }
            let weights = &mut weights[row * top_k..(row + 1) * top_k];
            route_weights(affinities, ids, self.config.routed_scaling_factor, weights);
        }
        Routes::new(ids, weights, experts)
    }
}
