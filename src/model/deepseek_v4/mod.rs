//! The trunk of DeepSeek-V4: what is computed, in which order, with which roundings (reference
//! `inference/model.py`).
//!
//! A step takes new tokens of one or more sequences through all layers at once: rows of different sequences share every
//! product with a weight and meet nowhere else. Nothing here depends on how a sequence was cut into steps, so neither
//! do the results. Calls the backend's operations; owns neither weights nor cache.
#![forbid(unsafe_code)]

mod attention;
pub(crate) mod experts;
mod ffn;
pub(crate) mod home;
mod probe;
mod streams;

use std::ops::Range;

use crate::alloc;
use crate::backend::cpu::Cpu;
use crate::backend::cpu::hyper::{HyperParams, MAX_STREAMS};
use crate::backend::cpu::rope::{Rotations, frequencies};
use crate::cache::{SequenceCache, Staged};
use crate::error::{Result, bail};

use super::config::{Config, LayerKind};
use super::numerics::Rounding;
use super::weights::Weights;
use home::ExpertTier;

pub use probe::{Probe, Record};

/// One sequence's share of a step.
pub struct Segment<'a> {
    /// What the sequence has so far; not changed by the step.
    pub cache: &'a SequenceCache,
    /// Receives what the step adds; made by [`SequenceCache::stage`] for `tokens.len()` tokens.
    pub staged: Staged,
    /// The new tokens.
    pub tokens: &'a [u32],
    /// Which of them get logits.
    pub logits: LogitRows,
}

impl Segment<'_> {
    /// The tokens that get logits, by their place among the segment's.
    pub fn wanted(&self) -> Range<usize> {
        self.logits.of(self.tokens.len())
    }
}

/// Rows of the step that get logits, segment by segment.
pub(crate) fn wanted_rows(segments: &[Segment<'_>]) -> Vec<usize> {
    let mut first = 0;
    let mut rows = Vec::new();
    for s in segments {
        rows.extend(s.wanted().map(|row| first + row));
        first += s.tokens.len();
    }
    rows
}

/// Which rows of a segment a step computes logits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitRows {
    /// None: a prefill chunk that is not the last.
    None,
    /// The last row.
    Last,
    /// Every row.
    All,
}

impl LogitRows {
    /// The rows meant among `count`, which is not 0.
    pub fn of(self, count: usize) -> Range<usize> {
        match self {
            Self::None => 0..0,
            Self::Last => count - 1..count,
            Self::All => 0..count,
        }
    }
}

/// The trunk of a model with its rounding points and derived tables.
pub struct Trunk<'a> {
    pub(crate) config: &'a Config,
    pub(crate) weights: &'a Weights,
    pub(crate) rounding: Rounding,
    pub(crate) cpu: &'a Cpu,
    pub(crate) tables: &'a Tables,
    /// Where routed experts are, if not in the mapped checkpoint.
    pub(crate) tier: Option<&'a ExpertTier>,
}

/// Tables that depend on the config alone.
pub struct Tables {
    /// Frequencies of window-only layers.
    plain: Vec<f32>,
    /// Frequencies of layers with compressed entries, for everything in them.
    yarn: Vec<f32>,
}

impl Tables {
    /// Tables of a model.
    pub fn new(config: &Config) -> Self {
        let dim = config.qk_rope_head_dim;
        Self {
            plain: frequencies(dim, config.rope_theta, None),
            yarn: frequencies(dim, config.compress_rope_theta, Some(&config.rope_scaling)),
        }
    }
}

/// What all layers of one step share.
pub(crate) struct StepContext {
    /// Token id of each row.
    ids: Vec<u32>,
    /// First row of each segment, and the total at the end.
    bounds: Vec<usize>,
    /// Rotations of the rows' own positions.
    plain: Rotations,
    yarn: Rotations,
    /// Rotations of the entries that each segment completes: for ratio 4 and for ratio 128.
    entries: Vec<[Rotations; 2]>,
    /// Rows that get logits.
    wanted: Vec<usize>,
}

impl StepContext {
    fn new(tables: &Tables, segments: &[Segment<'_>]) -> Result<Self> {
        let rows = segments.iter().map(|s| s.tokens.len()).sum();
        let mut ids = alloc::with_capacity("step token ids", rows)?;
        let mut positions: Vec<usize> = alloc::with_capacity("step positions", rows)?;
        let mut bounds = alloc::with_capacity("step bounds", segments.len() + 1)?;
        let mut entries = alloc::with_capacity("step entry rotations", segments.len())?;
        bounds.push(0);
        for s in segments {
            let (start, end) = (s.staged.start, s.staged.start + s.tokens.len());
            ids.extend_from_slice(s.tokens);
            positions.extend(start..end);
            bounds.push(ids.len());
            let of = |ratio: usize| Rotations::new(&tables.yarn, (start / ratio..end / ratio).map(move |j| j * ratio));
            entries.push([of(4)?, of(128)?]);
        }
        Ok(Self {
            plain: Rotations::new(&tables.plain, positions.iter().copied())?,
            yarn: Rotations::new(&tables.yarn, positions.iter().copied())?,
            ids,
            bounds,
            entries,
            wanted: wanted_rows(segments),
        })
    }

    fn rows(&self) -> usize {
        self.ids.len()
    }

    fn rotations(&self, kind: LayerKind) -> &Rotations {
        if kind == LayerKind::Window { &self.plain } else { &self.yarn }
    }

    fn entry_rotations(&self, segment: usize, kind: LayerKind) -> &Rotations {
        &self.entries[segment][usize::from(kind == LayerKind::C128a)]
    }
}

impl<'a> Trunk<'a> {
    /// Takes the segments' tokens through all layers and returns the logits `[rows, vocab]` of the rows they want.
    /// `between` runs before each layer and may end the step with its error; the caches are untouched until committed.
    pub fn step(
        &self,
        segments: &mut [Segment<'_>],
        between: &mut (dyn FnMut(usize) -> Result<()> + Send),
        probe: &mut Probe,
    ) -> Result<Vec<f32>> {
        let step = StepContext::new(self.tables, segments)?;
        let mut x = self.embed(&step.ids)?;
        for layer in 0..self.config.num_hidden_layers {
            between(layer)?;
            if let Some(tier) = self.tier {
                tier.expect(self.weights, layer, &step.ids.iter().copied(), |_, _| true);
            }
            x = self.layer(layer, &x, &step, segments, probe)?;
        }
        self.head(&x, &step, probe)
    }

    /// One layer on given streams `[rows, streams, D]`.
    pub(crate) fn layer(
        &self,
        layer: usize,
        x: &[f32],
        step: &StepContext,
        segments: &mut [Segment<'_>],
        probe: &mut Probe,
    ) -> Result<Vec<f32>> {
        let x = self.attention_half(layer, x, step, segments, probe)?;
        probe.record(layer, "streams_mid", &[step.rows(), self.config.hc_mult, self.config.hidden_size], &x);
        let x = self.ffn_half(layer, &x, &step.ids, probe)?;
        probe.record(layer, "streams", &[step.rows(), self.config.hc_mult, self.config.hidden_size], &x);
        finite_streams(layer, &x, self.config, segments)?;
        Ok(x)
    }

    /// A step's shared context, for callers that run single layers.
    pub(crate) fn context(&self, segments: &[Segment<'_>]) -> Result<StepContext> {
        StepContext::new(self.tables, segments)
    }

    /// Constants of the hyper-connections.
    fn hyper(&self) -> HyperParams {
        debug_assert!(self.config.hc_mult <= MAX_STREAMS, "checked when the config was read");
        HyperParams { streams: self.config.hc_mult, iterations: self.config.hc_sinkhorn_iters, eps: self.config.hc_eps }
    }
}

/// Checks the streams `[rows, streams, D]` of the segments' tokens behind `layer`.
///
/// # Errors
/// `Numeric`, naming the layer, the position and the token of the first value that is not finite.
pub(crate) fn finite_streams(layer: usize, x: &[f32], config: &Config, segments: &[Segment<'_>]) -> Result<()> {
    let Some(bad) = x.iter().position(|v| !v.is_finite()) else { return Ok(()) };
    let row = bad / (config.hc_mult * config.hidden_size);
    let mut first = 0;
    for s in segments {
        if let Some(token) = s.tokens.get(row - first) {
            bail!(
                Numeric,
                "activations are not finite after layer {layer}: the first is {} at position {} (token {token}); \
                 `dsv4 verify --scan` tells whether weights are not finite",
                x[bad],
                s.staged.start + row - first
            );
        }
        first += s.tokens.len();
    }
    bail!(Numeric, "activations are not finite after layer {layer}: value {bad} is {}", x[bad])
}

/// Checks logits `[rows.len(), vocab]` of `rows` of a step.
///
/// # Errors
/// `Numeric`, naming the token and the row of the first that is not finite.
pub(crate) fn finite_logits(logits: &[f32], vocab: usize, mut rows: impl Iterator<Item = usize>) -> Result<()> {
    // all at first, since a loop without an early end looks at many at a time
    if !logits.iter().fold(false, |bad, v| bad | !v.is_finite()) {
        return Ok(());
    }
    let Some(bad) = logits.iter().position(|v| !v.is_finite()) else { return Ok(()) };
    let row = rows.nth(bad / vocab).unwrap_or(bad / vocab);
    bail!(
        Numeric,
        "logit of token {} is {} (row {row} of the step); `dsv4 verify --scan` tells whether weights are not finite",
        bad % vocab,
        logits[bad]
    )
}
