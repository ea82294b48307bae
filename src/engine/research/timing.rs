//! Steps behind long contexts, for benchmarks and tests.

use std::sync::Arc;
use std::time::Instant;

use super::super::{Caller, Engine, Last, Pin, Plan, Request, Slot, Stop, Work, now};
use crate::cache::{BLOCK_TOKENS, SequenceCache};
use crate::error::{Result, bail};
use crate::model::deepseek_v4::{LogitRows, Segment};

/// Steps behind a long context.
pub struct Timing {
    engine: Arc<Engine>,
    slot: Arc<Slot>,
    /// It is never idle.
    _pin: Pin,
}

impl Timing {
    /// A sequence of `context` tokens, a multiple of 256: `ids`, 256 of them, are computed, and their pages are copied.
    pub fn behind(engine: &Arc<Engine>, context: usize, ids: &[u32]) -> Result<Self> {
        if !context.is_multiple_of(BLOCK_TOKENS) || ids.len() != BLOCK_TOKENS {
            bail!(InvalidArgument, "{context} tokens of context and {} ids; multiples of {BLOCK_TOKENS}", ids.len());
        }
        let mut timing = Self::over(engine, engine.new_cache(0)?);
        if context > 0 {
            for ids in ids.chunks(engine.options().prefill_chunk) {
                timing.step(ids)?;
            }
            timing.slot.sequence().repeat_last_block(context / BLOCK_TOKENS - 1)?;
        }
        Ok(timing)
    }

    /// Appends copies of the last block of 256 tokens, which is full, in pages of their own.
    pub fn repeat(&mut self, times: usize) -> Result<()> {
        self.slot.sequence().repeat_last_block(times)
    }

    /// Another one at the same place; what either computes from here on is its own.
    pub fn fork(&self) -> Result<Self> {
        let fork = self.slot.sequence().fork()?;
        Ok(Self::over(&self.engine, fork))
    }

    fn over(engine: &Arc<Engine>, cache: SequenceCache) -> Self {
        let slot = engine.slot(cache);
        Self { engine: Arc::clone(engine), _pin: slot.pin(), slot }
    }

    /// Tokens so far.
    pub fn position(&self) -> usize {
        self.slot.sequence().len()
    }

    /// Takes `ids` through the model and keeps them: the logits behind the last.
    pub fn step(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
        let plan = Plan { end: self.position() + ids.len(), is_checked: false };
        let (stop, tokens) = (Stop::default(), ids.len());
        let (began, caller) = (Instant::now(), Caller::Leads);
        let terms = self.engine.begin(Request { tokens, stop, priority: 0, began, caller, waits: false, plan });
        let mut rest = ids;
        loop {
            let work = Work { tokens: rest, logits: LogitRows::Last, last: Last::Come, ends: true };
            let done = now(self.engine.step(&self.slot, work, &terms))?;
            rest = &rest[done.tokens..];
            if rest.is_empty() {
                return Ok(done.logits);
            }
        }
    }

    /// From the next step of the engine on, whether the indexer works on a second stream, as it does at first.
    pub fn use_second_stream(&self, second: bool) {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = self.engine.gpu() {
            gpu.use_second_stream(second);
        }
        let _ = second;
    }

    /// Microseconds of each layer, and of the head, in a step of `ids`, which are not kept.
    pub fn layers(&mut self, ids: &[u32]) -> Result<Vec<f64>> {
        let mut sequence = self.slot.sequence();
        let staged = sequence.stage(ids.len())?;
        let mut segments = [Segment { cache: &sequence, staged, tokens: ids, logits: LogitRows::Last }];
        #[cfg(feature = "cuda")]
        if let Some(gpu) = self.engine.gpu() {
            return gpu.layer_times(&mut segments);
        }
        let _ = &mut segments;
        bail!(Unsupported, "layers are timed on GPUs only")
    }

    /// Microseconds, `times` of them, of a step of `ids`, the same number behind each of `sequences`, which are not kept,
    /// through `layers` in this order and the head. A layer may come more than once, so that a few layers can stand for a
    /// whole model; its weights are read again each time where others came in between.
    pub fn deep(sequences: &mut [Self], ids: &[u32], layers: &[usize], times: usize) -> Result<Vec<f64>> {
        let Some(first) = sequences.first() else { bail!(InvalidArgument, "no sequence to time a step of") };
        let engine = Arc::clone(&first.engine);
        let known = engine.model().config().num_hidden_layers;
        if layers.iter().any(|&layer| layer >= known) || ids.is_empty() || !ids.len().is_multiple_of(sequences.len()) {
            let (tokens, sequences) = (ids.len(), sequences.len());
            bail!(InvalidArgument, "layers {layers:?} of {known} with {tokens} tokens for {sequences} sequences");
        }
        let each = ids.len() / sequences.len();
        let mut locked: Vec<_> = sequences.iter().map(|timing| timing.slot.sequence()).collect();
        let staged = locked.iter_mut().map(|sequence| sequence.stage(each)).collect::<Result<Vec<_>>>()?;
        let mut segments: Vec<_> = locked
            .iter()
            .zip(staged)
            .zip(ids.chunks_exact(each))
            .map(|((cache, staged), tokens)| Segment { cache, staged, tokens, logits: LogitRows::Last })
            .collect();
        #[cfg(feature = "cuda")]
        if let Some(gpu) = engine.gpu() {
            return gpu.deep_times(&mut segments, layers, times);
        }
        let _ = (&mut segments, times);
        bail!(Unsupported, "steps are timed on GPUs only")
    }
}
