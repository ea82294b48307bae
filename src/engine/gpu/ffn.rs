//! The mixture-of-experts half of a layer on the device: `model/deepseek_v4/ffn.rs` with the backend's operations.

use super::host::{HostExperts, Question};
use super::step::Run;
use super::weights::Route as Routing;
use crate::backend::cuda::memory::Buffer;
use crate::backend::cuda::ops::{self, CombineAll, Experts, Job, Output, Product, Route, Swiglu, Weight};
use crate::error::Result;

impl Run<'_> {
    /// `scratch.output` from `scratch.input` and its quantised copy; all rows have one order of sums. `host` computes the
    /// experts that are not on the device.
    pub(super) fn ffn_of_part(&self, layer: usize, mut host: Option<&mut HostExperts>) -> Result<()> {
        let (c, w, b) = (self.config, &self.weights.layers[layer].ffn, &self.scratch.ffn);
        let (d, inter, top_k) = (c.hidden_size, c.moe_intermediate_size, c.num_experts_per_tok);
        let (plain, x) = (&self.scratch.input, self.quantised_input());
        let [w1, w2, w3] = &w.shared;

        let job =
            |weight, rows, x, y, y_stride| Job { weight, first_row: 0, rows, cols: d, x, x_stride: d, y, y_stride };
        let half = |i: usize| b.shared_gate_up.slice(i * inter..b.shared_gate_up.len()).map(Output::Bf16);
        let jobs = [
            job(&w.gate, c.n_routed_experts, plain, Output::F32(b.logits.clone()), c.n_routed_experts),
            job(w1, inter, x, half(0)?, 2 * inter),
            job(w3, inter, x, half(1)?, 2 * inter),
        ];
        self.products(&jobs)?;

        let tokens = self.tables.ids()?;
        let routing = match &w.routing {
            Routing::Bias(bias) => ops::Routing::Bias(bias),
            Routing::Hash(table) => ops::Routing::Hash(table),
        };
        let route = Route {
            logits: &b.logits,
            routing,
            tokens: &tokens,
            ids: &b.ids,
            weights: &b.weights,
            experts: c.n_routed_experts,
            top_k,
            scale: c.routed_scaling_factor,
        };
        ops::route(self.stream, &route)?;
        if let Some(here) = &w.here {
            ops::divide(self.stream, &b.ids, &here.flags, &b.groups.ids)?;
            if let Some(host) = &mut host {
                let (ids, own, weights, rows) = (&b.ids, &b.groups.ids, &b.weights, self.rows);
                host.ask(self.stream, &Question { layer, ids, own, weights, x, rows })?;
            }
        }
        ops::group(self.stream, &b.groups)?;

        let product = |matrices: &[Experts<'_>], rows, cols, x, top_k, y: &Buffer<u16>, beside| {
            let a = Product { matrices, rows, cols, format: w.format, x, top_k, y, tokens: self.rows };
            ops::expert_product(self.stream, &b.groups, &a, Some(&b.images), beside)
        };
        let (limit, quantise) = (c.swiglu_limit, self.rounding.act_fp8);
        product(&[w.w1.experts(), w.w3.experts()], inter, d, x, Some(top_k), &b.gate_up, None)?;
        let swiglu = Swiglu {
            routed: Some((&b.gate_up, &b.active)),
            routes: (&b.weights, &b.groups.order),
            shared: Some((&b.shared_gate_up, &b.shared_active)),
            width: inter,
            limit,
            quantise,
        };
        ops::swiglu(self.stream, &swiglu)?;
        let weight: &Weight = w2;
        let (x, y) = (&b.shared_active, Output::Bf16(b.shared.clone()));
        let job = Job { weight, first_row: 0, rows: d, cols: inter, x, x_stride: inter, y, y_stride: d };
        if self.parts.iter().any(|part| part.is_prompt) {
            product(&[w.w2.experts()], d, inter, &b.active, None, &b.routed, None)?;
            self.products(&[job])?;
        } else {
            let beside = Some((job, Some(&self.scratch.workspace)));
            product(&[w.w2.experts()], d, inter, &b.active, None, &b.routed, beside)?;
        }
        let (routed, shared, places, out) = (&b.routed, &b.shared, &b.groups.places, &self.scratch.output);
        let (Some(_), Some(host)) = (&w.here, host) else {
            return ops::combine(self.stream, routed, shared, (places, &b.groups.used()?), out, d);
        };
        host.answer(self.stream, layer, self.rows, routed, &self.scratch.bad)?;
        let experts = c.n_routed_experts;
        ops::combine_all(self.stream, &CombineAll { routed, shared, ids: &b.ids, places, out, width: d, experts })
    }
}
