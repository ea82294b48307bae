//! What a cache takes and what fits under a limit, before any of it is allocated.
#![forbid(unsafe_code)]

use super::sequence::BLOCK_TOKENS;
use super::{CacheBytes, CacheLayout, KvFormat};
use crate::model::config::{Config, Draft};

/// Memory of an engine's sequences, in bytes; a pure function of the configuration.
///
/// ```
/// use dsv4::cache::{CachePlan, KvFormat};
/// use dsv4::model::config::Config;
/// let config = Config::from_file("examples/models/tiny-v4/config.json".as_ref())?;
/// let plan = CachePlan::new(&config, KvFormat::Fp8, 4096, 64 << 20);
/// assert_eq!(plan.sequences, plan.limit / plan.pages(4096));
/// # Ok::<(), dsv4::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachePlan {
    /// Tokens of a sequence that `bytes` and `sequences` are for.
    pub context: usize,
    /// What a sequence of that many tokens stores, without the padding of pages.
    pub bytes: CacheBytes,
    /// Pages of a sequence's windows and states: what it takes when it is made, whatever the prefill chunk.
    pub sequence: u64,
    /// Pages of each further block of 256 tokens.
    pub block: u64,
    /// Each token of [`SessionOptions::rollback`](crate::SessionOptions::rollback), besides the pages.
    pub rollback_token: u64,
    /// Windows of the draft module's layers, which are not part of the other figures.
    pub draft_windows: u64,
    /// Most bytes of pages.
    pub limit: u64,
    /// Tokens of the longest sequence that fits under the limit alone, a multiple of 256; at most the model's.
    pub longest_context: usize,
    /// Sequences of `context` tokens that fit under the limit together.
    pub sequences: u64,
}

impl CachePlan {
    /// The plan for sequences of `context` tokens with rows of `format` under a `limit` in bytes.
    pub fn new(config: &Config, format: KvFormat, context: usize, limit: u64) -> Self {
        let layout = CacheLayout::new(config, format);
        let (window, state) = layout.fixed_page_bytes();
        let (entries, keys) = layout.block_bytes();
        let stages = match config.draft {
            Draft::None => 0,
            Draft::Mtp => 1,
            Draft::Dspark { stages, .. } => stages,
        };
        let bytes = layout.bytes(context);
        let rows = (layout.layers.len() * layout.row_bytes()) as u64;
        let mut plan = Self {
            context,
            bytes,
            sequence: window + state,
            block: entries + keys,
            rollback_token: rows + bytes.state + 4 * config.vocab_size as u64,
            draft_windows: (stages * layout.window * layout.row_bytes()) as u64,
            limit,
            longest_context: 0,
            sequences: 0,
        };
        plan.sequences = limit / plan.pages(context);
        if let Some(rest) = limit.checked_sub(plan.sequence) {
            let blocks = usize::try_from(rest.checked_div(plan.block).unwrap_or(u64::MAX)).unwrap_or(usize::MAX);
            plan.longest_context = blocks.saturating_mul(BLOCK_TOKENS).min(config.max_position_embeddings);
        }
        plan
    }

    /// Pages of one sequence of `tokens` tokens.
    pub fn pages(&self, tokens: usize) -> u64 {
        self.sequence + tokens.div_ceil(BLOCK_TOKENS) as u64 * self.block
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{CacheManager, CacheOptions, SequenceCache};
    use crate::error::ErrorKind;

    fn tiny() -> Config {
        Config::from_file("examples/models/tiny-v4/config.json".as_ref()).unwrap()
    }

    #[test]
    fn what_the_plan_says_fits_does_and_nothing_more() {
        let config = tiny();
        let context = 1000;
        let plan = CachePlan::new(&config, KvFormat::Fp8, context, 10_000_000);
        assert!(plan.sequences > 2 && plan.longest_context > 10_000, "{plan:?}");
        let options = CacheOptions { limit: plan.limit, ..CacheOptions::PRIVATE };
        let manager = || CacheManager::new(CacheLayout::new(&config, KvFormat::Fp8), options.clone(), b"");
        let fill = |cache: &mut SequenceCache, tokens: usize| {
            let staged = cache.stage(tokens)?;
            cache.commit(staged);
            Ok::<(), crate::Error>(())
        };

        let many = manager();
        let mut held = Vec::new();
        for i in 0..plan.sequences {
            let mut cache = SequenceCache::new(&many, 0).unwrap();
            fill(&mut cache, context).unwrap();
            held.push(cache);
            assert_eq!(many.stats().pool.used_bytes, (i + 1) * plan.pages(context));
        }
        let another = SequenceCache::new(&many, 0).and_then(|mut cache| fill(&mut cache, context));
        assert_eq!(another.unwrap_err().kind(), ErrorKind::NoBlocks);

        let mut long = SequenceCache::new(&manager(), 0).unwrap();
        for _ in 0..plan.longest_context / BLOCK_TOKENS {
            fill(&mut long, BLOCK_TOKENS).unwrap();
        }
        assert_eq!(fill(&mut long, 1).unwrap_err().kind(), ErrorKind::NoBlocks);
    }

    #[test]
    fn a_limit_below_one_sequence_fits_none() {
        let config = tiny();
        let plan = CachePlan::new(&config, KvFormat::Fp8, 1, 1000);
        assert_eq!((plan.sequences, plan.longest_context), (0, 0));
        let all = CachePlan::new(&config, KvFormat::Fp8, 1, u64::MAX);
        assert_eq!(all.longest_context, config.max_position_embeddings);
        assert!(all.draft_windows > 0, "tiny-v4 has a draft module");
    }
}
