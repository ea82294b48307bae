//! Bringing records back into pages and the prefix index when a prompt begins with them.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cache::block::Block;
use crate::cache::manager::CacheManager;
use crate::cache::prefix::PrefixKey;
use crate::cache::sequence::BLOCK_TOKENS;

use super::{Kind, Record, RecordKey, Tiers, nanos};

/// As good as without end, and still a time of the system.
const LONGEST_WAIT: Duration = Duration::from_secs(86_400);

/// A block on the way from `from` to a checkpoint.
struct Step<'a> {
    parent: PrefixKey,
    key: PrefixKey,
    tokens: &'a [u32],
    /// Has pages already.
    is_here: bool,
}

impl CacheManager {
    /// Brings the blocks of `tokens` behind `from` that are in the tiers back into pages and the prefix index, as far as
    /// they lead to a checkpoint. Returns what keeps them there.
    pub(in crate::cache) fn promote(&self, tiers: &Tiers, from: PrefixKey, tokens: &[u32]) -> Vec<Arc<Block>> {
        let (path, is_checkpoint_away) = self.path(tiers, from, tokens);
        let missing = path.iter().filter(|step| !step.is_here);
        let mut wanted: Vec<RecordKey> =
            missing.map(|step| RecordKey { prefix: step.key, kind: Kind::Block }).collect();
        let checkpoint = path.last().filter(|_| is_checkpoint_away);
        wanted.extend(checkpoint.map(|step| RecordKey { prefix: step.key, kind: Kind::Checkpoint }));
        if wanted.is_empty() {
            return Vec::new();
        }
        let start = Instant::now();
        let (held, taken) = self.bring(tiers, &path, checkpoint, &wanted);
        tiers.shared.settle(&wanted, taken);
        tiers.shared.count(|stats| stats.wait_nanos += nanos(start));
        held
    }

    /// The blocks up to the deepest checkpoint that can be had, and whether that is in the tiers.
    fn path<'a>(&self, tiers: &Tiers, from: PrefixKey, tokens: &'a [u32]) -> (Vec<Step<'a>>, bool) {
        let (mut path, mut end, mut is_away, mut key) = (Vec::new(), 0, false, from);
        for tokens in tokens.chunks_exact(BLOCK_TOKENS) {
            let parent = key;
            key = key.extend(tokens);
            let is_here = self.block(key, tokens).is_some();
            if !is_here && !tiers.shared.has(RecordKey { prefix: key, kind: Kind::Block }) {
                break;
            }
            path.push(Step { parent, key, tokens, is_here });
            if self.checkpoint(key).is_some() {
                (end, is_away) = (path.len(), false);
            } else if tiers.shared.has(RecordKey { prefix: key, kind: Kind::Checkpoint }) {
                (end, is_away) = (path.len(), true);
            }
        }
        path.truncate(end);
        (path, is_away)
    }

    /// Waits for the records of `wanted`, which are those of `path` that have no pages and then that of `checkpoint`.
    /// Returns the blocks, and how many records were taken over.
    fn bring(
        &self,
        tiers: &Tiers,
        path: &[Step<'_>],
        checkpoint: Option<&Step<'_>>,
        wanted: &[RecordKey],
    ) -> (Vec<Arc<Block>>, usize) {
        let deadline = Instant::now() + tiers.options.timeout.min(LONGEST_WAIT);
        let window = tiers.options.window();
        let fetch = |step: &Step<'_>, at: usize| {
            let record = tiers.shared.fetch(&wanted[at..wanted.len().min(at + window)], deadline)?;
            (record.parent == step.parent && record.tokens == step.tokens).then_some(record)
        };
        let (mut held, mut at) = (Vec::new(), 0);
        for step in path {
            let mut block = self.block(step.key, step.tokens);
            if !step.is_here {
                block = block.or_else(|| self.adopt(step, &*fetch(step, at)?));
            }
            // it may have been evicted since, lost, or brought back by another prompt
            let Some(block) = block.or_else(|| self.block(step.key, step.tokens)) else { return (held, at) };
            held.push(block);
            at += usize::from(!step.is_here);
        }
        if let Some(step) = checkpoint
            && let Some(record) = fetch(step, at)
            && let Ok(checkpoint) = record.checkpoint(self)
        {
            self.keep_checkpoint(step.key, checkpoint);
            at += 1;
        }
        (held, at)
    }

    /// A block of pages from `record`, in the prefix index.
    fn adopt(&self, step: &Step<'_>, record: &Record) -> Option<Arc<Block>> {
        let block = Arc::new(record.block(self).ok()?);
        let equal = self.publish(step.parent, step.tokens, &block).ok()?;
        Some(equal.unwrap_or(block))
    }
}
