//! The experts that the device has no room for: the host computes them from the mapped checkpoint while the device does its
//! own share of the layer.
//!
//! The router's choice, the weights and the rows go to the host when they are known; the device goes on with the shared
//! expert and those of its experts that were chosen. The host's outputs come back into the places behind those of the
//! device, and one kernel adds a token's experts in order of id. So where an expert is decides in which order products are
//! summed, as on any other device, and nothing else.
//!
//! A step that is launched kernel by kernel asks by copies and an event, and is answered in between ([`HostExperts::ask`],
//! [`HostExperts::answer`]). One that runs as a graph asks and waits by itself, through flags in pinned memory, and
//! [`HostExperts::serve`] answers layer by layer beside it. It always answers, if only that there is no answer: the device
//! would wait forever.

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::alloc;
use crate::backend::cpu::{Cpu, Pool};
use crate::backend::cuda::device::Gpu;
use crate::backend::cuda::memory::{Buffer, Pinned};
use crate::backend::cuda::ops;
use crate::backend::cuda::stream::{Event, Stream};
use crate::engine::research::HostFigures;
use crate::error::{Result, bail};
use crate::model::config::Config;
use crate::model::deepseek_v4::experts::{ExpertRows, Experts, Routes};
use crate::model::deepseek_v4::home::{ExpertTier, Home};
use crate::model::{Model, Rounding};
use crate::tensor::format::{bf16_value, round_bf16};

/// How often a host that waits for the device looks whether there is still one.
const LOOK: Duration = Duration::from_millis(1);
/// Values that a thread converts at a time.
const PIECE: usize = 4096;

/// What one step at a time uses of the host.
pub(super) struct HostExperts {
    /// What was done so far.
    pub(super) figures: HostFigures,
    asked: Asked,
    known: Event,
    /// Outputs on their way back.
    back: Pinned,
    flags: Flags,
    /// Whether what is queued becomes part of a graph.
    is_captured: bool,
    /// Whether a graph's questions were being answered when that was last heard of.
    is_serving: bool,
    worker: Worker,
}

/// Expert ids, those among them that the device has, weights and rows on their way to the host.
struct Asked {
    ids: Pinned,
    own: Pinned,
    weights: Pinned,
    rows: Pinned,
}

/// What a layer asks of the host, on the device.
pub(super) struct Question<'a> {
    pub(super) layer: usize,
    /// `[rows, top_k]`.
    pub(super) ids: &'a Buffer<u32>,
    /// The same, with the number of experts and above for those that are not on the device.
    pub(super) own: &'a Buffer<u32>,
    /// `[rows, top_k]`.
    pub(super) weights: &'a Buffer<f32>,
    /// The experts' inputs `[rows, D]`.
    pub(super) x: &'a Buffer<u16>,
    pub(super) rows: usize,
}

impl HostExperts {
    /// For steps of up to `rows` rows, where the first `on_device` experts of each layer are the device's, and the others, if
    /// they are not used where they are mapped, in `tier`.
    pub(super) fn new(
        gpu: &Gpu,
        cpu: &Arc<Cpu>,
        model: &Arc<Model>,
        tier: Option<Arc<ExpertTier>>,
        on_device: usize,
        rounding: Rounding,
        rows: usize,
    ) -> Result<Self> {
        let [ids, weights, values, back] = pinned_bytes(model.config(), rows);
        let asked = Asked {
            ids: Pinned::new(gpu, ids)?,
            own: Pinned::new(gpu, ids)?,
            weights: Pinned::new(gpu, weights)?,
            rows: Pinned::new(gpu, values)?,
        };
        Ok(Self {
            figures: HostFigures::default(),
            asked,
            known: Event::new(gpu)?,
            back: Pinned::new(gpu, back)?,
            flags: Flags::new(gpu, model.config().num_hidden_layers)?,
            is_captured: false,
            is_serving: false,
            worker: Worker {
                cpu: Arc::clone(cpu),
                model: Arc::clone(model),
                tier,
                on_device,
                tokens: Vec::new(),
                rounding,
                routes: Routes::default(),
                x: Vec::new(),
                rows: ExpertRows::default(),
                sources: Vec::new(),
            },
        })
    }

    /// Begins a step with `tokens`: where experts follow from token ids, they are read ahead of their layers.
    pub(super) fn begin(&mut self, tokens: impl Iterator<Item = u32> + Clone) -> Result<()> {
        let kept = &mut self.worker.tokens;
        kept.clear();
        if self.worker.tier.is_some() {
            alloc::reserve("tokens of a step", kept, tokens.clone().count())?;
            kept.extend(tokens);
        }
        self.worker.expect(0);
        Ok(())
    }

    /// From now on what is queued is, or is not, part of a graph.
    pub(super) fn set_captured(&mut self, on: bool) {
        self.is_captured = on;
    }

    /// Queues what the host needs to know of a layer.
    pub(super) fn ask(&mut self, stream: &Stream, q: &Question<'_>) -> Result<()> {
        let Asked { ids, own, weights, rows } = &mut self.asked;
        if self.is_captured {
            let ask = ops::Ask {
                ids: (q.ids, q.own, ids),
                weights: (q.weights, weights),
                x: (q.x, rows),
                rows: q.rows,
                experts: self.worker.model.config().n_routed_experts,
                asked: (&self.flags.memory, Flags::asked(q.layer)),
            };
            return ops::ask(stream, &ask);
        }
        stream.read_later(q.ids, ids)?;
        stream.read_later(q.own, own)?;
        stream.read_later(q.weights, weights)?;
        stream.read_later(q.x, rows)?;
        stream.record(&self.known)
    }

    /// Waits for what was asked, computes the experts of `layer` that are not on the device, and queues their outputs into the
    /// last places of `routed` `[rows * top_k, D]`. In a graph the device waits instead, and sets `bad` if it gets no answer.
    pub(super) fn answer(
        &mut self,
        stream: &Stream,
        layer: usize,
        rows: usize,
        routed: &Buffer<u16>,
        bad: &Buffer<u32>,
    ) -> Result<()> {
        let config = self.worker.model.config();
        let (d, top_k, experts) = (config.hidden_size, config.num_experts_per_tok, config.n_routed_experts as u32);
        if self.is_captured {
            let answered = (&self.flags.memory, Flags::answered(layer));
            return ops::fetch(stream, &ops::Fetch { answered, from: &self.back, to: routed, bad, width: d });
        }
        let began = Instant::now();
        self.known.synchronize()?;
        let known = Instant::now();
        let own: &[u32] = self.asked.own.values(rows * top_k)?;
        let ids = self.asked.ids.values(rows * top_k)?;
        let of_host = ids.iter().zip(own).map(|(&id, &own)| if own < experts { experts } else { id });
        self.worker.take(of_host)?;
        let count = self.worker.compute(layer, rows, &mut self.asked, &mut self.back)?;
        note(&mut self.figures, began, known, &self.worker.routes);
        let last = routed.slice(routed.len() - count * d..routed.len())?;
        stream.write_pinned(&last, &self.back)
    }

    /// Has the host ready for a graph: none of its questions is asked or answered.
    pub(super) fn prepare(&mut self, stream: &Stream) -> Result<()> {
        if std::mem::take(&mut self.is_serving) {
            // a panic ended the last step, whose graph may still be under way
            stream.synchronize()?;
        }
        self.flags.clear();
        Ok(())
    }

    /// Answers the questions of a graph that was launched, in `layers`, of `rows` rows each.
    ///
    /// # Errors
    /// Those of the experts' products and the device's; all questions have an answer then.
    pub(super) fn serve(&mut self, stream: &Stream, layers: impl Iterator<Item = usize>, rows: usize) -> Result<()> {
        self.is_serving = true;
        let result = self.serve_all(stream, layers, rows);
        // the caller waits for the graph
        self.is_serving = false;
        result
    }

    fn serve_all(&mut self, stream: &Stream, layers: impl Iterator<Item = usize>, rows: usize) -> Result<()> {
        let Self { figures, asked, back, flags, worker, .. } = self;
        let places = rows * worker.model.config().num_experts_per_tok;
        let flags = Unanswered(flags);
        let _awake = worker.cpu.pool.awake();
        for layer in layers {
            let began = Instant::now();
            flags.0.wait_for_question(stream, layer, ops::ask_blocks(rows))?;
            let known = Instant::now();
            worker.take(asked.ids.values(places)?.iter().copied())?;
            let count = worker.compute(layer, rows, asked, back)?;
            flags.0.answer(layer, count as u32);
            note(figures, began, known, &worker.routes);
        }
        Ok(())
    }
}

/// Counts a layer that was asked for from `began` on, known at `known`, and has been computed.
fn note(figures: &mut HostFigures, began: Instant, known: Instant, routes: &Routes) {
    figures.layers += 1;
    figures.experts += routes.bounds.windows(2).filter(|pair| pair[0] < pair[1]).count() as u64;
    figures.waited += known - began;
    figures.computed += known.elapsed();
}

/// Pinned bytes for steps of `rows` rows: ids, weights, rows, outputs.
pub(super) fn pinned_bytes(config: &Config, rows: usize) -> [usize; 4] {
    let (d, places) = (config.hidden_size, rows * config.num_experts_per_tok);
    [places * size_of::<u32>(), places * size_of::<f32>(), rows * d * size_of::<u16>(), places * d * size_of::<u16>()]
}

/// How far device and host are with each layer of a graph.
struct Flags {
    memory: Pinned,
    layers: usize,
}

impl Flags {
    /// Bytes of a layer: two cache lines, one that the device writes and one that the host writes.
    const LAYER: usize = 2 * Self::LINE;
    const LINE: usize = size_of::<u32>() * ops::ASK_BLOCKS;

    fn new(gpu: &Gpu, layers: usize) -> Result<Self> {
        Ok(Self { memory: Pinned::new(gpu, layers * Self::LAYER)?, layers })
    }

    /// Where the device says that it has asked, a word for each block.
    fn asked(layer: usize) -> usize {
        layer * Self::LAYER
    }

    /// Where the host says whether there is an answer, and of how many rows.
    fn answered(layer: usize) -> usize {
        layer * Self::LAYER + Self::LINE
    }

    fn store(&self, at: usize, value: u32) {
        let flag = self.memory.flag(at).expect("flags of all layers were allocated");
        flag.store(value, Ordering::Release);
    }

    fn load(&self, at: usize) -> u32 {
        self.memory.flag(at).expect("flags of all layers were allocated").load(Ordering::Acquire)
    }

    fn clear(&self) {
        (0..self.layers * Self::LAYER).step_by(size_of::<u32>()).for_each(|at| self.store(at, 0));
    }

    fn answer(&self, layer: usize, rows: u32) {
        self.store(Self::answered(layer) + size_of::<u32>(), rows);
        self.store(Self::answered(layer), ops::ANSWERED);
    }

    fn wait_for_question(&self, stream: &Stream, layer: usize, blocks: usize) -> Result<()> {
        let is_asked = || (0..blocks).all(|block| self.load(Self::asked(layer) + block * size_of::<u32>()) != 0);
        let mut since = Instant::now();
        while !is_asked() {
            spin_loop();
            if since.elapsed() > LOOK {
                if stream.is_idle()? && !is_asked() {
                    bail!(Panic, "the device ended a step without asking for the experts of layer {layer}");
                }
                since = Instant::now();
            }
        }
        Ok(())
    }
}

/// Flags of a graph that may wait: when this goes, for whatever reason, no question is left without an answer.
struct Unanswered<'a>(&'a Flags);

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        let unanswered = (0..self.0.layers).map(Flags::answered).filter(|&at| self.0.load(at) == 0);
        unanswered.for_each(|at| self.0.store(at, ops::ANSWERED + 1));
    }
}

/// What computes the host's experts, in memory that it keeps.
struct Worker {
    cpu: Arc<Cpu>,
    model: Arc<Model>,
    /// The host's experts, if they are not used where they are mapped.
    tier: Option<Arc<ExpertTier>>,
    /// How many experts of each layer are the device's, the first ones.
    on_device: usize,
    /// Tokens of the step, where there is a tier.
    tokens: Vec<u32>,
    rounding: Rounding,
    routes: Routes,
    x: Vec<f32>,
    rows: ExpertRows,
    /// For each output, in order of assignment, its row in `rows`.
    sources: Vec<usize>,
}

impl Worker {
    /// Tells which experts of `layer` and the next will be needed.
    fn expect(&self, layer: usize) {
        if let Some(tier) = &self.tier {
            let (weights, tokens) = (self.model.weights(), self.tokens.iter().copied());
            tier.expect(weights, layer, &tokens, |_, expert| expert >= self.on_device);
        }
    }

    /// Takes the ids of a layer's experts that are the host's; others are the number of experts.
    fn take(&mut self, ids: impl ExactSizeIterator<Item = u32>) -> Result<()> {
        let kept = &mut self.routes.ids;
        kept.clear();
        alloc::reserve("expert ids", kept, ids.len())?;
        kept.extend(ids);
        Ok(())
    }

    /// Computes the experts of `layer` that were taken, for `rows` rows, and leaves their outputs in `back`, in order of
    /// assignment; how many there are.
    fn compute(&mut self, layer: usize, rows: usize, asked: &mut Asked, back: &mut Pinned) -> Result<usize> {
        self.expect(layer + 1);
        let Self { cpu, model, tier, rounding, routes, x, rows: outputs, sources, .. } = self;
        let config = model.config();
        let (d, places) = (config.hidden_size, rows * config.num_experts_per_tok);
        routes.sort(config.n_routed_experts)?;
        let count = routes.order.len();
        if count == 0 {
            return Ok(0);
        }
        routes.weights.clear();
        alloc::reserve("expert weights", &mut routes.weights, places)?;
        routes.weights.extend_from_slice(asked.weights.values(places)?);

        x.clear();
        alloc::reserve("expert inputs", x, rows * d)?;
        x.resize(rows * d, 0.0);
        let bits: &[u16] = asked.rows.values(rows * d)?;
        convert(&cpu.pool, x, |first, x| {
            x.iter_mut().zip(&bits[first..]).for_each(|(x, &bits)| *x = bf16_value(bits));
        })?;

        let home = Home { tier: tier.as_deref(), layer };
        let experts = Experts { cpu, config, rounding: *rounding, home };
        experts.run(&model.weights().layers[layer].ffn, x, routes, None, outputs)?;
        in_order_of_assignment(&routes.order, sources)?;
        let out = &outputs.out;
        convert(&cpu.pool, back.values_mut(count * d)?, |first, bits| {
            let (mut at, mut rest) = (first, bits);
            while !rest.is_empty() {
                let (bits, after) = rest.split_at_mut(rest.len().min(d - at % d));
                let row = &out[sources[at / d] * d + at % d..];
                bits.iter_mut().zip(row).for_each(|(bits, &value)| *bits = (round_bf16(value).to_bits() >> 16) as u16);
                (at, rest) = (at + bits.len(), after);
            }
        })?;
        Ok(count)
    }
}

/// For each of the assignments `order`, which are sorted by expert, in ascending order of assignment, its place in `order`.
fn in_order_of_assignment(order: &[usize], sources: &mut Vec<usize>) -> Result<()> {
    sources.clear();
    alloc::reserve("expert order", sources, order.len())?;
    sources.extend(0..order.len());
    sources.sort_unstable_by_key(|&place| order[place]);
    Ok(())
}

/// Has `convert` fill `to`, which gets the index of the first value of each piece.
fn convert<T: Send>(pool: &Pool, to: &mut [T], convert: impl Fn(usize, &mut [T]) + Sync) -> Result<()> {
    let threads = if to.len() < 4 * pool.least_values() { 1 } else { pool.threads() };
    let mut pieces = alloc::with_capacity("pieces of rows", to.len().div_ceil(PIECE))?;
    pieces.extend(to.chunks_mut(PIECE).enumerate());
    pool.share(&mut vec![(); threads], &mut pieces, |(piece, to), ()| convert(*piece * PIECE, to));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_go_back_in_order_of_assignment() {
        // rows 0 and 1 with two experts each; expert 2 is not ours
        let routes = Routes::new(vec![1, 2, 0, 1], vec![1.0; 4], 2).unwrap();
        assert_eq!(routes.order, [2, 0, 3]);
        let mut sources = vec![7; 9];
        in_order_of_assignment(&routes.order, &mut sources).unwrap();
        assert_eq!(sources, [1, 0, 2]);
    }

    #[test]
    fn every_piece_is_converted_by_its_index() {
        let pool = Pool::beside_caller(2).unwrap();
        for len in [0, 1, PIECE, 40 * PIECE + 3] {
            let mut to = vec![0; len];
            convert(&pool, &mut to, |first, to| to.iter_mut().enumerate().for_each(|(i, to)| *to = first + i)).unwrap();
            assert!(to.iter().enumerate().all(|(i, &to)| i == to));
        }
    }
}
