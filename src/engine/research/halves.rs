//! One engine's half layers against another's on the same inputs.
//!
//! `reference` numerics amplify last-bit differences: an activation on a rounding boundary goes the other way, and everything
//! behind it differs. So engines are compared half layer by half layer, each on the first one's input, and the yardstick is
//! what the noise of other float32 sums does to the first one itself.

use std::sync::Arc;

use super::super::{Engine, EngineOptions};
use super::{Lab, Probe, engine_with_noise};
use crate::error::{Result, bail};
use crate::model::config::LayerKind;
use crate::model::{Model, Numerics};

/// Tokens that go through a layer at once.
const CHUNK: usize = 256;
/// The comparisons of a layer and the largest median and 90th percentile of each beside twice the noise's: what goldens
/// allow, which is for tiles of attention and small dimensions (tests/goldens/README.md).
const COMPARED: [(&str, f64); 3] = [("attention", 2.5e-3), ("first half", 1e-2), ("second half", 1e-3)];
/// One token in so many may get other experts, where the router is near a tie.
const ROUTES: usize = 500;

/// Quantiles of the relative errors `|got - want| / |want|` of tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spread {
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// Largest.
    pub max: f64,
    /// Share of tokens whose every value is equal.
    pub equal: f64,
}

/// One comparison.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HalfLayer {
    /// Number of the layer.
    pub layer: usize,
    /// What it attends to.
    pub kind: LayerKind,
    /// `attention` (its output before the inverse rotation), `first half` (the streams behind the attention half) or
    /// `second half` (those behind the feed-forward half, from the CPU's streams in the middle).
    pub what: &'static str,
    /// The device against the CPU.
    pub error: Spread,
    /// The CPU with the noise of other sums against itself.
    pub noise: Spread,
    /// Largest median and 90th percentile that pass.
    pub limit: [f64; 2],
}

impl HalfLayer {
    /// Whether median and 90th percentile are within their limits.
    pub fn passed(&self) -> bool {
        self.error.p50 <= self.limit[0] && self.error.p90 <= self.limit[1]
    }
}

/// All comparisons of a model.
#[derive(Clone, Debug, Default)]
pub struct Halves {
    /// Three a layer, or two where the device's attention output is rounded before it can be seen.
    pub layers: Vec<HalfLayer>,
    /// Tokens of all layers that got other experts.
    pub other_routes: usize,
    /// Tokens of all layers.
    pub routes: usize,
}

impl Halves {
    /// Whether everything is within the limits.
    pub fn passed(&self) -> bool {
        self.layers.iter().all(HalfLayer::passed) && self.other_routes * ROUTES <= self.routes
    }
}

/// Compares an engine of `options`, with a cache that suits, with the CPU on `texts`, sequences of token ids. The noise is
/// measured on the first of them.
///
/// # Errors
/// As making engines, and those of a step; `InvalidArgument` without tokens.
pub fn compare_halves(model: &Arc<Model>, options: &EngineOptions, texts: &[Vec<u32>]) -> Result<Halves> {
    let Some(first) = texts.first().filter(|text| !text.is_empty()) else {
        bail!(InvalidArgument, "nothing to compare half layers on")
    };
    let longest = texts.iter().map(Vec::len).max().unwrap_or(0);
    let numerics = options.numerics;
    let on_cpu = EngineOptions { numerics, prefill_chunk: CHUNK, ..EngineOptions::default() };
    let cpu = Engine::new(model, on_cpu.clone())?;
    let noisy = engine_with_noise(model, on_cpu.clone())?;
    // every layer has a sequence of its own
    let layers = model.config().num_hidden_layers as u64;
    let plan = crate::cache::CachePlan::new(model.config(), cpu.kv_format(), longest, 0);
    let cache_bytes = (layers + 2) * 2 * plan.pages(longest);
    let other = Engine::new(model, EngineOptions { cache_bytes, prefill_chunk: CHUNK, ..options.clone() })?;
    let mut noise = Tally::new(layers as usize);
    noise.add(&cpu, &noisy, first)?;
    let mut errors = Tally::new(layers as usize);
    for text in texts {
        errors.add(&cpu, &other, text)?;
    }
    let mut halves = Halves { other_routes: errors.other_routes, routes: errors.routes, ..Halves::default() };
    for (layer, (errors, noise)) in errors.layers.iter().zip(&noise.layers).enumerate() {
        for (i, (what, floor)) in COMPARED.into_iter().enumerate() {
            // `served` rounds the attention output where the CPU's record is from before that
            if what == "attention" && numerics == Numerics::Served {
                continue;
            }
            let (error, noise) = (spread(&errors[i]), spread(&noise[i]));
            let limit = [floor + 2.0 * noise.p50, floor + 2.0 * noise.p90];
            let kind = model.config().layers[layer];
            halves.layers.push(HalfLayer { layer, kind, what, error, noise, limit });
        }
    }
    Ok(halves)
}

/// Errors of tokens by layer and comparison.
struct Tally {
    layers: Vec<[Vec<f64>; 3]>,
    other_routes: usize,
    routes: usize,
}

impl Tally {
    fn new(layers: usize) -> Self {
        Self { layers: (0..layers).map(|_| Default::default()).collect(), other_routes: 0, routes: 0 }
    }

    /// Adds the errors of `other` against `cpu` on a text.
    fn add(&mut self, cpu: &Arc<Engine>, other: &Arc<Engine>, text: &[u32]) -> Result<()> {
        let (mut cpu, mut other) = (Lab::new(cpu)?, Lab::new(other)?);
        for ids in text.chunks(CHUNK) {
            let mut x = cpu.embed(ids)?;
            for layer in 0..self.layers.len() {
                x = self.add_layer(layer, &x, ids, &mut cpu, &mut other)?;
            }
        }
        Ok(())
    }

    /// Adds a layer on streams `x`; the streams behind it.
    fn add_layer(&mut self, layer: usize, x: &[f32], ids: &[u32], cpu: &mut Lab, other: &mut Lab) -> Result<Vec<f32>> {
        let [mut want, mut got, mut want_ffn, mut got_ffn] = [(); 4].map(|()| Probe::on());
        let out = cpu.run_layer(layer, x, ids, &mut want)?;
        other.run_layer(layer, x, ids, &mut got)?;
        let [attention, first, second] = &mut self.layers[layer];
        for (name, errors) in [("o", attention), ("streams_mid", first)] {
            let (got, want) = (recorded(&got, layer, name)?, recorded(&want, layer, name)?);
            let width = want.len() / ids.len();
            errors.extend(got.chunks_exact(width).zip(want.chunks_exact(width)).map(error));
        }
        let mid = recorded(&want, layer, "streams_mid")?;
        let want = cpu.run_ffn_half(layer, &mid, ids, &mut want_ffn)?;
        let got = other.run_ffn_half(layer, &mid, ids, &mut got_ffn)?;
        let [want_ids, got_ids] = [&want_ffn, &got_ffn].map(|probe| recorded(probe, layer, "router_ids"));
        let (want_ids, got_ids) = (want_ids?, got_ids?);
        let (width, top_k) = (want.len() / ids.len(), want_ids.len() / ids.len());
        for token in 0..ids.len() {
            let set = |all: &[f32]| {
                let mut set = all[token * top_k..(token + 1) * top_k].to_vec();
                set.sort_by(f32::total_cmp);
                set
            };
            self.routes += 1;
            if set(&want_ids) == set(&got_ids) {
                let part = token * width..(token + 1) * width;
                second.push(error((&got[part.clone()], &want[part])));
            } else {
                self.other_routes += 1;
            }
        }
        Ok(out)
    }
}

fn recorded(probe: &Probe, layer: usize, name: &str) -> Result<Vec<f32>> {
    match probe.get(layer, name) {
        Some(record) => Ok(record.values),
        None => bail!(InvalidArgument, "layer {layer} left no record of {name}"),
    }
}

/// `|got - want| / |want|` of one token.
fn error((got, want): (&[f32], &[f32])) -> f64 {
    let square = |x: f64| x * x;
    let difference: f64 = got.iter().zip(want).map(|(&g, &w)| square(f64::from(g) - f64::from(w))).sum();
    let size: f64 = want.iter().map(|&w| square(f64::from(w))).sum();
    if difference == 0.0 { 0.0 } else { (difference / size).sqrt() }
}

fn spread(errors: &[f64]) -> Spread {
    let mut sorted = errors.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(&max) = sorted.last() else { return Spread::default() };
    let at = |share: f64| sorted[((sorted.len() - 1) as f64 * share).round() as usize];
    let equal = sorted.iter().filter(|&&e| e == 0.0).count() as f64 / sorted.len() as f64;
    Spread { p50: at(0.5), p90: at(0.9), max, equal }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nan_is_the_largest_error_and_does_not_pass() {
        assert!(error((&[1.0, f32::NAN], &[1.0, 1.0])).is_nan());
        let errors: Vec<f64> = (0..10).map(|i| if i < 5 { 0.0 } else { f64::NAN }).collect();
        let spread = spread(&errors);
        assert!(spread.p90.is_nan() && spread.equal == 0.5);
        let half = HalfLayer {
            layer: 0,
            kind: LayerKind::Window,
            what: "attention",
            error: spread,
            noise: Spread::default(),
            limit: [1.0; 2],
        };
        assert!(!half.passed());
    }

    #[test]
    fn noise_differs_and_another_cpu_engine_does_not() {
        let model = Model::open("examples/models/tiny-v4").unwrap();
        let text: Vec<u32> = (0..150).map(|i| 3 + i * 7).collect();
        let halves = compare_halves(&model, &EngineOptions::default(), &[text]).unwrap();
        assert_eq!(halves.layers.len(), 3 * 6);
        assert!(halves.passed() && halves.routes == 6 * 150 && halves.other_routes == 0);
        assert!(halves.layers.iter().all(|half| half.error == Spread { equal: 1.0, ..Spread::default() }));
        assert!(halves.layers.iter().any(|half| half.noise.max > 1e-4), "one turned rounding shows");
    }
}
