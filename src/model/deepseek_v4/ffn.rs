//! The mixture-of-experts half of a layer (reference `inference/model.py`).
#![forbid(unsafe_code)]

use crate::alloc;
use crate::backend::cpu::linear::Job;
use crate::backend::cpu::moe::{affinity, choose, route_weights, swiglu};
use crate::backend::cpu::norm::store_bf16;
use crate::error::{Result, bail};
use crate::model::weights::{MoeWeights, Routing};
use crate::tensor::format::{e4m3_round_trip, round_bf16};

use super::attention::ACT_BLOCK;
use super::{Probe, Trunk};

/// Which experts each row goes to.
struct Routes {
    /// `[rows, top-k]` expert ids, best first.
    ids: Vec<u32>,
    /// `[rows, top-k]` weights.
    weights: Vec<f32>,
    /// Assignments (`row * top_k + place`) sorted by expert, then by row.
    order: Vec<usize>,
    /// First place in `order` of each expert, and the total at the end.
    bounds: Vec<usize>,
}

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
        let (mut gate, mut up) = (self.expert_buffer(rows)?, self.expert_buffer(rows)?);
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
        self.activate(&mut gate, &up, |_| 1.0)?;
        let mut shared = alloc::vec_f32("shared expert output", rows * d)?;
        let routed = self.routed(w, xq, &routes, &gate, &mut shared)?;

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

    /// Outputs of the routed experts in `routes.order`. The shared expert's second product, from its activations
    /// `shared_gate`, joins the same parallel region.
    fn routed(
        &self,
        w: &MoeWeights,
        xq: &[f32],
        routes: &Routes,
        shared_gate: &[f32],
        shared: &mut [f32],
    ) -> Result<Vec<f32>> {
        let (d, top_k, inter) =
            (self.config.hidden_size, self.config.num_experts_per_tok, self.config.moe_intermediate_size);
        let count = routes.order.len();
        let mut gathered = alloc::with_capacity("expert inputs", count * d)?;
        for &assignment in &routes.order {
            let row = assignment / top_k;
            gathered.extend_from_slice(&xq[row * d..(row + 1) * d]);
        }
        let (mut gate, mut up) = (self.expert_buffer(count)?, self.expert_buffer(count)?);
        let active: Vec<usize> = (0..w.experts.len()).filter(|&e| routes.bounds[e] < routes.bounds[e + 1]).collect();
        let rows_of = |e: usize| routes.bounds[e + 1] - routes.bounds[e];

        let mut jobs = alloc::with_capacity("expert jobs", 2 * active.len())?;
        let (mut gate_rest, mut up_rest, mut input_rest) = (&mut gate[..], &mut up[..], &gathered[..]);
        for &e in &active {
            let rows = rows_of(e);
            let (gate, up, input);
            (gate, gate_rest) = gate_rest.split_at_mut(rows * inter);
            (up, up_rest) = up_rest.split_at_mut(rows * inter);
            (input, input_rest) = input_rest.split_at(rows * d);
            jobs.push(Job::new(w.experts[e].w1.ready()?, input, gate));
            jobs.push(Job::new(w.experts[e].w3.ready()?, input, up));
        }
        self.cpu.linear(&mut jobs)?;
        drop(jobs);
        drop(gathered);
        self.activate(&mut gate, &up, |place| routes.weights[routes.order[place]])?;
        drop(up);

        let mut out = alloc::vec_f32("expert outputs", count * d)?;
        let mut jobs = alloc::with_capacity("expert jobs", active.len() + 1)?;
        let (mut out_rest, mut input_rest) = (&mut out[..], &gate[..]);
        for &e in &active {
            let (output, input);
            (output, out_rest) = out_rest.split_at_mut(rows_of(e) * d);
            (input, input_rest) = input_rest.split_at(rows_of(e) * inter);
            jobs.push(Job::new(w.experts[e].w2.ready()?, input, output));
        }
        jobs.push(Job::new(w.shared.w2.ready()?, shared_gate, &mut *shared));
        self.cpu.linear(&mut jobs)?;
        drop(jobs);
        store_bf16(&mut out, self.rounding.bf16);
        store_bf16(shared, self.rounding.bf16);
        Ok(out)
    }

    /// Clamped SwiGLU of expert rows, in place in `gate`, rounded as the input of `w2`.
    fn activate(&self, gate: &mut [f32], up: &[f32], weight: impl Fn(usize) -> f32 + Sync) -> Result<()> {
        let (inter, limit, r) = (self.config.moe_intermediate_size, self.config.swiglu_limit, self.rounding);
        self.cpu.pool.chunks(gate, inter, |row, gate| {
            let mut up = alloc::copied("expert values", &up[row * inter..(row + 1) * inter])?;
            store_bf16(gate, r.bf16);
            store_bf16(&mut up, r.bf16);
            swiglu(gate, &up, limit, weight(row), r.bf16);
            if r.act_fp8 {
                e4m3_round_trip(gate, ACT_BLOCK);
            }
            Ok(())
        })
    }

    fn expert_buffer(&self, rows: usize) -> Result<Vec<f32>> {
        alloc::vec_f32("expert activations", rows * self.config.moe_intermediate_size)
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
        let mut bounds = alloc::zeroed("expert bounds", experts + 1)?;
        ids.iter().for_each(|&e| bounds[e as usize + 1] += 1);
        for e in 0..experts {
            bounds[e + 1] += bounds[e];
        }
        let mut next = alloc::copied("expert bounds", &bounds)?;
        let mut order = alloc::zeroed("expert order", ids.len())?;
        for (assignment, &e) in ids.iter().enumerate() {
            order[next[e as usize]] = assignment;
            next[e as usize] += 1;
        }
        Ok(Routes { ids, weights, order, bounds })
    }
}
