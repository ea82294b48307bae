//! The experts that the device has no room for: the host computes them from the mapped checkpoint while the device does its
//! own share of the layer.
//!
//! The router's choice, the weights and the rows go to the host when they are known; the device goes on with the shared
//! expert and those of its experts that were chosen. The host's outputs come back into the places behind those of the
//! device, and one kernel adds a token's experts in order of id. So where an expert is decides in which order products are
//! summed, as on any other device, and nothing else.

use std::sync::Arc;

use crate::alloc;
use crate::backend::cpu::Cpu;
use crate::backend::cuda::device::Gpu;
use crate::backend::cuda::memory::{Buffer, Pinned};
use crate::backend::cuda::stream::{Event, Stream};
use crate::error::Result;
use crate::model::config::Config;
use crate::model::deepseek_v4::experts::{Experts, Routes};
use crate::model::{Model, Rounding};
use crate::tensor::format::{bf16_bits, bf16_value};

/// What one step at a time uses of the host.
pub(super) struct HostExperts {
    cpu: Arc<Cpu>,
    model: Arc<Model>,
    rounding: Rounding,
    /// Expert ids, weights and rows on their way to the host.
    ids: Pinned,
    weights: Pinned,
    rows: Pinned,
    /// When they have come.
    known: Event,
    /// Outputs on their way back.
    back: Pinned,
}

impl HostExperts {
    /// For steps of up to `rows` rows.
    pub(super) fn new(gpu: &Gpu, cpu: &Arc<Cpu>, model: &Arc<Model>, rounding: Rounding, rows: usize) -> Result<Self> {
        let [ids, weights, values, back] = pinned_bytes(model.config(), rows);
        Ok(Self {
            cpu: Arc::clone(cpu),
            model: Arc::clone(model),
            rounding,
            ids: Pinned::new(gpu, ids)?,
            weights: Pinned::new(gpu, weights)?,
            rows: Pinned::new(gpu, values)?,
            known: Event::new(gpu)?,
            back: Pinned::new(gpu, back)?,
        })
    }

    /// Queues what the host needs to know of a layer: `ids` and `weights` `[rows, top_k]`, and the experts' input `x`
    /// `[rows, D]`.
    pub(super) fn ask(
        &mut self,
        stream: &Stream,
        ids: &Buffer<u32>,
        weights: &Buffer<f32>,
        x: &Buffer<u16>,
    ) -> Result<()> {
        stream.read_later(ids, &mut self.ids)?;
        stream.read_later(weights, &mut self.weights)?;
        stream.read_later(x, &mut self.rows)?;
        stream.record(&self.known)
    }

    /// Waits for what was asked, computes the experts of `layer` that are not `here`, and queues their outputs into the last
    /// places of `routed` `[rows * top_k, D]`.
    pub(super) fn answer(
        &mut self,
        stream: &Stream,
        layer: usize,
        here: &[bool],
        rows: usize,
        routed: &Buffer<u16>,
    ) -> Result<()> {
        let config = self.model.config();
        let (d, top_k) = (config.hidden_size, config.num_experts_per_tok);
        self.known.synchronize()?;
        let ids: &[u32] = self.ids.values(rows * top_k)?;
        let is_here = |id: u32| here.get(id as usize).is_none_or(|&here| here);
        let nobody = here.len() as u32;
        let mut own = alloc::with_capacity("expert ids", ids.len())?;
        own.extend(ids.iter().map(|&id| if is_here(id) { nobody } else { id }));
        let count = own.iter().filter(|&&id| id != nobody).count();
        if count == 0 {
            return Ok(());
        }
        let weights = alloc::copied("expert weights", self.weights.values::<f32>(rows * top_k)?)?;
        let bits: &[u16] = self.rows.values(rows * d)?;
        let mut x = alloc::with_capacity("expert inputs", bits.len())?;
        x.extend(bits.iter().map(|&bits| bf16_value(bits)));

        let routes = Routes::new(own, weights, here.len())?;
        let (cpu, rounding) = (&self.cpu, self.rounding);
        let experts = Experts { cpu, config, rounding };
        let w = &self.model.weights().layers[layer].ffn;
        let out = cpu.pool.enter(|| experts.run(w, &x, &routes, None))?;
        let bits = in_order_of_assignment(&routes, &out, d)?;
        let last = routed.slice(routed.len() - bits.len()..routed.len())?;
        stream.write_later(&last, &bits, &mut self.back, 0)
    }
}

/// Pinned bytes for steps of `rows` rows: ids, weights, rows, outputs.
pub(super) fn pinned_bytes(config: &Config, rows: usize) -> [usize; 4] {
    let (d, places) = (config.hidden_size, rows * config.num_experts_per_tok);
    [places * size_of::<u32>(), places * size_of::<f32>(), rows * d * size_of::<u16>(), places * d * size_of::<u16>()]
}

/// Rows `out` `[order.len(), d]`, which are sorted by expert, in order of assignment, as bf16.
fn in_order_of_assignment(routes: &Routes, out: &[f32], d: usize) -> Result<Vec<u16>> {
    let mut sorted = alloc::copied("expert order", &routes.order)?;
    sorted.sort_unstable();
    let mut bits = alloc::zeroed::<u16>("expert outputs", out.len())?;
    for (assignment, row) in routes.order.iter().zip(out.chunks_exact(d)) {
        let place = sorted.partition_point(|other| other < assignment);
        for (to, &value) in bits[place * d..(place + 1) * d].iter_mut().zip(row) {
            *to = bf16_bits(value);
        }
    }
    Ok(bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_go_back_in_order_of_assignment() {
        // rows 0 and 1 with two experts each; expert 2 is not ours
        let routes = Routes::new(vec![1, 2, 0, 1], vec![1.0; 4], 2).unwrap();
        assert_eq!(routes.order, [2, 0, 3]);
        let bits = in_order_of_assignment(&routes, &[20.0, 21.0, 0.0, 1.0, 30.0, 31.0], 2).unwrap();
        let values: Vec<f32> = bits.into_iter().map(bf16_value).collect();
        assert_eq!(values, [0.0, 1.0, 20.0, 21.0, 30.0, 31.0]);
    }
}
