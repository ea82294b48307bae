//! Times of steps behind long contexts, for benchmarks.

use std::sync::Arc;

use super::super::{Device, Engine, Home, Stop};
use crate::cache::{BLOCK_TOKENS, SequenceCache};
use crate::error::{Result, bail};
use crate::model::deepseek_v4::{LogitRows, Segment};

/// Times of steps behind a long context, for benchmarks.
pub struct Timing {
    engine: Arc<Engine>,
    cache: Home<SequenceCache>,
}

impl Timing {
    /// A sequence of `context` tokens, a multiple of 256: `ids`, 256 of them, are computed, and their pages are copied.
    pub fn behind(engine: &Arc<Engine>, context: usize, ids: &[u32]) -> Result<Self> {
        if !context.is_multiple_of(BLOCK_TOKENS) || ids.len() != BLOCK_TOKENS {
            bail!(InvalidArgument, "{context} tokens of context and {} ids; multiples of {BLOCK_TOKENS}", ids.len());
        }
        let mut timing = Self { engine: Arc::clone(engine), cache: engine.home(engine.new_cache(0)?) };
        if context > 0 {
            for ids in ids.chunks(engine.options().prefill_chunk) {
                timing.step(ids)?;
            }
            timing.cache.repeat_last_block(context / BLOCK_TOKENS - 1)?;
        }
        Ok(timing)
    }

    /// Takes `ids` through the model and keeps them; the logits behind the last are computed.
    pub fn step(&mut self, ids: &[u32]) -> Result<()> {
        let terms = self.engine.begin(ids.len(), Stop::default(), 0, true);
        self.engine.step(&mut self.cache, ids, LogitRows::Last, &terms).map(drop)
    }

    /// Microseconds of each layer, and of the head, in a step of `ids`, which are not kept. The indexer works on a second
    /// stream if `side` is set, as it does otherwise.
    pub fn layers(&mut self, ids: &[u32], side: bool) -> Result<Vec<f64>> {
        let staged = self.cache.stage(ids.len())?;
        let mut segments = [Segment { cache: &self.cache, staged, tokens: ids, logits: LogitRows::Last }];
        #[cfg(feature = "cuda")]
        if let Device::Gpu(gpu) = &self.engine.device {
            return gpu.layer_times(&mut segments, side);
        }
        let _ = (&mut segments, side);
        bail!(Unsupported, "layers are timed on GPUs only")
    }
}
