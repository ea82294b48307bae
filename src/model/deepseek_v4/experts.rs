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
use super::home::{Home, ReadyExpert};

/// Values of an expert row that a thread activates at a time, whole blocks of what is quantised together.
const PIECE: usize = 4 * ACT_BLOCK;
/// What a value costs to activate, in values that are only looked at.
const ACTIVATION: usize = 8;

/// Which experts each row goes to.
#[derive(Default)]
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
        let mut routes = Self { ids, weights, ..Self::default() };
        routes.sort(experts)?;
        Ok(routes)
    }

    /// Sorts the assignments of `self.ids` to `experts` experts, in memory that is there already if it suffices.
    pub(crate) fn sort(&mut self, experts: usize) -> Result<()> {
        let Self { ids, order, bounds, .. } = self;
        let own = || ids.iter().enumerate().filter(|&(_, &e)| (e as usize) < experts);
        refill(bounds, "expert bounds", experts + 1)?;
        own().for_each(|(_, &e)| bounds[e as usize + 1] += 1);
        for e in 0..experts {
            bounds[e + 1] += bounds[e];
        }
        refill(order, "expert order", bounds[experts])?;
        for (assignment, &e) in own() {
            // for now the first place of each expert that is not taken; in the end that is the first of the next one
            order[bounds[e as usize]] = assignment;
            bounds[e as usize] += 1;
        }
        bounds.rotate_right(1);
        bounds[0] = 0;
        Ok(())
    }
}

/// Makes `values` `len` zeros.
fn refill(values: &mut Vec<usize>, what: &str, len: usize) -> Result<()> {
    values.clear();
    alloc::reserve(what, values, len)?;
    values.resize(len, 0);
    Ok(())
}

/// What computes experts.
pub(crate) struct Experts<'a> {
    pub(crate) cpu: &'a Cpu,
    pub(crate) config: &'a Config,
    pub(crate) rounding: Rounding,
    pub(crate) home: Home<'a>,
}

/// Memory that [`Experts::run`] needs, and its result. It grows to what the largest call needs and is then reused.
#[derive(Default)]
pub(crate) struct ExpertRows {
    inputs: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    /// The outputs of the last call, at its beginning.
    pub(crate) out: Vec<f32>,
}

impl Experts<'_> {
    /// Outputs `[order.len(), D]` of the routed experts in `routes.order`, from the rows `xq` `[rows, D]`, not rounded yet:
    /// in `room.out`. The second product of the shared expert, from its activations to its output, may join the same
    /// parallel region.
    pub(crate) fn run(
        &self,
        w: &MoeWeights,
        xq: &[f32],
        routes: &Routes,
        mut shared: Option<(&[f32], &mut [f32])>,
        room: &mut ExpertRows,
    ) -> Result<()> {
        let bounds = &routes.bounds;
        let mut active = alloc::with_capacity("experts of a step", routes.order.len().min(w.experts.len()))?;
        active.extend((0..w.experts.len()).filter(|&e| bounds[e] < bounds[e + 1]));
        sized(&mut room.out, routes.order.len() * self.config.hidden_size)?;
        self.home.with_ready(w, &active, &mut |ready| self.run_ready(w, ready, xq, routes, shared.take(), room))
    }

    /// As [`Self::run`], for some of the experts, ascending; `room.out` is large enough for all.
    fn run_ready(
        &self,
        w: &MoeWeights,
        ready: &[ReadyExpert<'_>],
        xq: &[f32],
        routes: &Routes,
        shared: Option<(&[f32], &mut [f32])>,
        room: &mut ExpertRows,
    ) -> Result<()> {
        let (d, top_k, inter) =
            (self.config.hidden_size, self.config.num_experts_per_tok, self.config.moe_intermediate_size);
        let places_of = |expert: &ReadyExpert<'_>| routes.bounds[expert.id]..routes.bounds[expert.id + 1];
        let rows_of = |expert| places_of(expert).len();
        let count = ready.iter().map(rows_of).sum::<usize>();
        let row = |assignment: usize| &xq[assignment / top_k * d..][..d];
        let ExpertRows { inputs, gate, up, out } = room;
        let (gate, up) = (sized(gate, count * inter)?, sized(up, count * inter)?);

        // a row that is an expert's only one is used where it lies, where other experts meet it as well
        let gathered = ready.iter().map(rows_of).filter(|&rows| rows > 1).sum::<usize>();
        let mut gathered = sized(inputs, gathered * d)?;
        let mut assignments = alloc::with_capacity("expert inputs", count)?;
        let mut jobs = alloc::with_capacity("expert jobs", 2 * ready.len())?;
        let (mut gate_rest, mut up_rest) = (&mut *gate, &mut *up);
        for expert in ready {
            let own = &routes.order[places_of(expert)];
            assignments.extend_from_slice(own);
            let input = if let [only] = own {
                row(*only)
            } else {
                let (input, rest) = gathered.split_at_mut(own.len() * d);
                gathered = rest;
                input.chunks_exact_mut(d).zip(own).for_each(|(to, &assignment)| to.copy_from_slice(row(assignment)));
                &*input
            };
            let (gate, up);
            (gate, gate_rest) = gate_rest.split_at_mut(own.len() * inter);
            (up, up_rest) = up_rest.split_at_mut(own.len() * inter);
            jobs.push(Job::new(expert.w1, input, gate));
            jobs.push(Job::new(expert.w3, input, up));
        }
        self.cpu.linear(&mut jobs)?;
        drop(jobs);
        self.activate(gate, up, |place| routes.weights[assignments[place]])?;

        let (mut out_rest, mut passed, mut input_rest) = (&mut out[..], 0, &*gate);
        let mut jobs = alloc::with_capacity("expert jobs", ready.len() + 1)?;
        for expert in ready {
            let places = places_of(expert);
            let (output, input);
            (output, out_rest) = out_rest[(places.start - passed) * d..].split_at_mut(places.len() * d);
            (input, input_rest) = input_rest.split_at(places.len() * inter);
            passed = places.end;
            jobs.push(Job::new(expert.w2, input, output));
        }
        if let Some((active, out)) = shared {
            jobs.push(Job::new(w.shared.w2.ready()?, active, out));
        }
        self.cpu.linear(&mut jobs)
    }

    /// Clamped SwiGLU of expert rows, in place in `gate`, rounded as the input of `w2`. `up` is rounded as well.
    pub(crate) fn activate(
        &self,
        gate: &mut [f32],
        up: &mut [f32],
        weight: impl Fn(usize) -> f32 + Sync,
    ) -> Result<()> {
        let (inter, limit, r) = (self.config.moe_intermediate_size, self.config.swiglu_limit, self.rounding);
        let is_small = gate.len() * ACTIVATION < self.cpu.pool.least_values();
        let mut pieces = alloc::with_capacity("pieces of expert rows", gate.len() / inter * inter.div_ceil(PIECE))?;
        for (row, (gate, up)) in gate.chunks_mut(inter).zip(up.chunks_mut(inter)).enumerate() {
            pieces.extend(gate.chunks_mut(PIECE).zip(up.chunks_mut(PIECE)).map(|(gate, up)| (weight(row), gate, up)));
        }
        let mut threads = vec![(); if is_small { 1 } else { self.cpu.pool.threads() }];
        self.cpu.pool.share(&mut threads, &mut pieces, |(weight, gate, up), ()| {
            store_bf16(gate, r.bf16);
            store_bf16(up, r.bf16);
            swiglu(gate, up, limit, *weight, r.bf16);
            if r.act_fp8 {
                e4m3_round_trip(gate, ACT_BLOCK);
            }
        });
        Ok(())
    }

    /// Room for values of `rows` rows within an expert.
    pub(crate) fn buffer(&self, rows: usize) -> Result<Vec<f32>> {
        alloc::vec_f32("expert activations", rows * self.config.moe_intermediate_size)
    }
}

/// The first `len` values, which are made if they are not there.
fn sized(values: &mut Vec<f32>, len: usize) -> Result<&mut [f32]> {
    if values.len() < len {
        *values = alloc::vec_f32("rows of experts", len)?;
    }
    Ok(&mut values[..len])
}
