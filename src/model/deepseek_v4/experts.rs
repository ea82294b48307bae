//! Routed experts on the CPU (reference `inference/model.py`): all of a step's, or those that a device has no room for.
#![forbid(unsafe_code)]

use crate::alloc;
use crate::backend::cpu::Cpu;
use crate::backend::cpu::linear::Job;
use crate::backend::cpu::moe::swiglu;
use crate::backend::cpu::norm::store_bf16;
use crate::error::Result;
use crate::model::Rounding;
use crate::model::config::Config;
use crate::model::weights::MoeWeights;
use crate::tensor::format::e4m3_round_trip;

use super::attention::ACT_BLOCK;

/// Which experts each row goes to.
pub(crate) struct Routes {
    /// `[rows, top-k]` expert ids, best first; from the number of experts on, nobody's.
    pub(crate) ids: Vec<u32>,
    /// `[rows, top-k]` weights.
    pub(crate) weights: Vec<f32>,
    /// Assignments (`row * top_k + place`) sorted by expert, then by row, without nobody's.
    pub(crate) order: Vec<usize>,
    /// First place in `order` of each expert, and the total at the end.
    pub(crate) bounds: Vec<usize>,
}

impl Routes {
    /// Sorts the assignments of `ids` to `experts` experts.
    pub(crate) fn new(ids: Vec<u32>, weights: Vec<f32>, experts: usize) -> Result<Self> {
        let mut bounds = alloc::zeroed("expert bounds", experts + 1)?;
        let own = || ids.iter().enumerate().filter(|&(_, &e)| (e as usize) < experts);
        own().for_each(|(_, &e)| bounds[e as usize + 1] += 1);
        for e in 0..experts {
            bounds[e + 1] += bounds[e];
        }
        let mut next = alloc::copied("expert bounds", &bounds)?;
        let mut order = alloc::zeroed("expert order", bounds[experts])?;
        for (assignment, &e) in own() {
            order[next[e as usize]] = assignment;
            next[e as usize] += 1;
        }
        Ok(Self { ids, weights, order, bounds })
    }
}

/// What computes experts.
pub(crate) struct Experts<'a> {
    pub(crate) cpu: &'a Cpu,
    pub(crate) config: &'a Config,
    pub(crate) rounding: Rounding,
}

impl Experts<'_> {
    /// Outputs `[order.len(), D]` of the routed experts in `routes.order`, from the rows `xq` `[rows, D]`. The second product
    /// of the shared expert, from its activations to its output, may join the same parallel region.
    pub(crate) fn run(
        &self,
        w: &MoeWeights,
        xq: &[f32],
        routes: &Routes,
        mut shared: Option<(&[f32], &mut [f32])>,
    ) -> Result<Vec<f32>> {
        let (d, top_k, inter) =
            (self.config.hidden_size, self.config.num_experts_per_tok, self.config.moe_intermediate_size);
        let count = routes.order.len();
        let mut gathered = alloc::with_capacity("expert inputs", count * d)?;
        for &assignment in &routes.order {
            let row = assignment / top_k;
            gathered.extend_from_slice(&xq[row * d..(row + 1) * d]);
        }
        let (mut gate, mut up) = (self.buffer(count)?, self.buffer(count)?);
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
        if let Some((active, out)) = &mut shared {
            jobs.push(Job::new(w.shared.w2.ready()?, active, out));
        }
        self.cpu.linear(&mut jobs)?;
        drop(jobs);
        store_bf16(&mut out, self.rounding.bf16);
        if let Some((_, out)) = shared {
            store_bf16(out, self.rounding.bf16);
        }
        Ok(out)
    }

    /// Clamped SwiGLU of expert rows, in place in `gate`, rounded as the input of `w2`.
    pub(crate) fn activate(&self, gate: &mut [f32], up: &[f32], weight: impl Fn(usize) -> f32 + Sync) -> Result<()> {
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

    /// Room for values of `rows` rows within an expert.
    pub(crate) fn buffer(&self, rows: usize) -> Result<Vec<f32>> {
        alloc::vec_f32("expert activations", rows * self.config.moe_intermediate_size)
    }
}
