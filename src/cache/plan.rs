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

    /// The plan where pages lie in a [`PageMemory`](super::PageMemory) of `limit` bytes: a sequence has its compressor
    /// states twice, and each page size has slabs of its own.
    pub fn in_page_memory(config: &Config, format: KvFormat, context: usize, limit: u64) -> Self {
        let layout = CacheLayout::new(config, format);
        let mut plan = Self::new(config, format, context, limit);
        plan.sequence += layout.fixed_page_bytes().1;
        let (windows, states, block) = (layout.window_pages(), layout.compressor_pages(), layout.all_block_pages());
        let slab = layout.slab_bytes();
        let fits = |sequences: u64, blocks: u64| {
            let slabs = |b: usize| {
                let pages = (windows[b] + 2 * states[b]).saturating_add(blocks.saturating_mul(block[b]));
                sequences.saturating_mul(pages).div_ceil(slab / layout.page_bytes()[b].max(1) as u64)
            };
            slabs(0).saturating_add(slabs(1)).saturating_add(slabs(2)) <= limit / slab
        };
        let blocks = context.div_ceil(BLOCK_TOKENS) as u64;
        plan.sequences = most(plan.limit / plan.pages(context), |sequences| fits(sequences, blocks));
        let longest = most(plan.longest_context.div_ceil(BLOCK_TOKENS) as u64, |blocks| fits(1, blocks));
        plan.longest_context = plan.longest_context.min(longest as usize * BLOCK_TOKENS);
        plan
    }

    /// Pages of one sequence of `tokens` tokens.
    pub fn pages(&self, tokens: usize) -> u64 {
        self.sequence + tokens.div_ceil(BLOCK_TOKENS) as u64 * self.block
    }
}

/// The largest number up to `limit` that fits, where every smaller one does too; 0 if none does.
fn most(limit: u64, fits: impl Fn(u64) -> bool) -> u64 {
    let (mut low, mut high) = (0, limit);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::cache::fake::FakeMemory;
    use crate::cache::{CacheManager, CacheOptions, SequenceCache};
    use crate::error::ErrorKind;

    fn tiny() -> Config {
        Config::from_file("examples/models/tiny-v4/config.json".as_ref()).unwrap()
    }

    /// Pitfall 65.
    #[test]
    fn what_the_plan_says_fits_does_and_nothing_more() {
        let config = tiny();
        let (context, format, limit) = (1000, KvFormat::Fp8, 10_000_000);
        let plan = CachePlan::new(&config, format, context, limit);
        let options = CacheOptions { limit, ..CacheOptions::PRIVATE };
        check(&plan, context, || CacheManager::new(CacheLayout::new(&config, format), options.clone(), b""));

        let plan = CachePlan::in_page_memory(&config, format, context, limit);
        check(&plan, context, || {
            let (memory, layout) = (FakeMemory::new(limit), CacheLayout::new(&config, format));
            CacheManager::with_memory(layout, CacheOptions::PRIVATE, b"", None, Some(Arc::new(memory)))
        });
    }

    fn check(plan: &CachePlan, context: usize, manager: impl Fn() -> Arc<CacheManager>) {
        assert!(plan.sequences > 2 && plan.longest_context > 10_000, "{plan:?}");
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
        let plan = CachePlan::in_page_memory(&config, KvFormat::Fp8, 1, 1000);
        assert_eq!((plan.sequences, plan.longest_context), (0, 0));
        let all = CachePlan::in_page_memory(&config, KvFormat::Fp8, 1, u64::MAX);
        assert_eq!(all.longest_context, config.max_position_embeddings);
        let all = CachePlan::new(&config, KvFormat::Fp8, 1, u64::MAX);
        assert_eq!(all.longest_context, config.max_position_embeddings);
        assert!(all.draft_windows > 0, "tiny-v4 has a draft module");
    }
}
