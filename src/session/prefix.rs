//! What a session takes from the prefix index, and what it gives to it.
//!
//! Invariant: what a truncation can still take back without computing is not in the index: a draft that is rejected was
//! never offered to anybody. So the keys of a session may lag behind its full blocks by one.
#![forbid(unsafe_code)]

use std::sync::Arc;

use crate::TokenId;
use crate::alloc;
use crate::cache::{BLOCK_TOKENS, Checkpoint, CheckpointPolicy, Mark};
use crate::error::Result;

use super::Session;

impl Session {
    /// Takes over what the cache has of `tokens`, and the logits if that is all of them. Returns how many it has.
    pub(super) fn reuse(&mut self, tokens: &[TokenId]) -> Result<usize> {
        let cache = Arc::clone(self.engine.cache());
        let off = cache.options().policy == CheckpointPolicy::None;
        if off || tokens.len() < BLOCK_TOKENS || !self.position().is_multiple_of(BLOCK_TOKENS) {
            return Ok(0);
        }
        // a prompt this long puts everything before it out of a rollback's reach
        self.offer(self.position())?;
        let from = self.keys.last().copied().unwrap_or(cache.root());
        let hit = cache.lookup(from, tokens)?;
        let count = hit.blocks.len() * BLOCK_TOKENS;
        if let Some(checkpoint) = hit.checkpoint {
            let logits = alloc::copied("logits", if count == tokens.len() { &checkpoint.logits } else { &[] })?;
            alloc::reserve("session blocks", &mut self.keys, hit.keys.len())?;
            self.cache.sequence().extend(&hit.blocks, checkpoint.state)?;
            self.keys.extend_from_slice(&hit.keys);
            self.tokens.extend_from_slice(&tokens[..count]);
            self.forget_logits();
            self.logits = logits.into();
            self.reused += count as u64;
        }
        // only now: a hit that was found but could not be taken over is none
        cache.count_lookup(tokens.len(), count, hit.end);
        Ok(count)
    }

    /// Tokens of the next chunk of a call that ends at position `end`: chunks stop where a checkpoint is wanted.
    pub(super) fn next_chunk(&self, end: usize) -> usize {
        let position = self.position();
        let stop = match self.engine.cache().options().policy {
            CheckpointPolicy::None => end,
            CheckpointPolicy::Boundary => last_boundary(end),
            CheckpointPolicy::Every(n) => {
                let n = n.saturating_mul(self.engine.checkpoint_spacing());
                (position / n + 1).saturating_mul(n)
            }
        };
        let stop = if stop > position { stop.min(end) } else { end };
        (stop - position).min(self.chunk)
    }

    /// Tokens of the session that are not to be taken back, during a call with `count` tokens: a prompt is settled,
    /// tokens that may be drafts are not while a rollback reaches them.
    pub(super) fn settled(&self, count: usize) -> usize {
        self.position() - if count > self.rollback + 1 { 0 } else { self.rollback.min(self.position()) }
    }

    /// Makes full blocks among the first `settled` tokens findable, and keeps a checkpoint where the policy of a call
    /// that ends at position `end`, and `decodes` or not, wants one.
    pub(super) fn publish(&mut self, end: usize, settled: usize, decodes: bool) -> Result<()> {
        self.offer(settled)?;
        let position = self.position();
        // where room is short, what decoding passes is kept less often
        let spacing = self.engine.checkpoint_spacing();
        let is_spaced = !decodes || (position / BLOCK_TOKENS).is_multiple_of(spacing);
        let wanted = match self.engine.cache().options().policy {
            _ if position == 0 => false,
            CheckpointPolicy::None => false,
            CheckpointPolicy::Boundary => {
                position.is_multiple_of(BLOCK_TOKENS) && position >= last_boundary(end) && is_spaced
            }
            CheckpointPolicy::Every(n) => position.is_multiple_of(n.saturating_mul(spacing)),
        };
        if !wanted {
            return Ok(());
        }
        let logits = self.logits.to_vec(&self.engine)?.into();
        let checkpoint = Checkpoint { state: self.cache.sequence().checkpoint(), logits };
        // like a mark, it makes room where there is none
        self.unsettled = Some(Arc::new(Mark::new(self.engine.cache(), checkpoint)));
        self.offer(settled)
    }

    /// Makes what full blocks and checkpoint there are among the first `settled` tokens findable.
    fn offer(&mut self, settled: usize) -> Result<()> {
        let cache = Arc::clone(self.engine.cache());
        if cache.options().policy == CheckpointPolicy::None {
            return Ok(());
        }
        for i in self.keys.len()..settled / BLOCK_TOKENS {
            let parent = self.keys.last().copied().unwrap_or(cache.root());
            let tokens = &self.tokens[i * BLOCK_TOKENS..(i + 1) * BLOCK_TOKENS];
            alloc::reserve("session blocks", &mut self.keys, 1)?;
            let mut sequence = self.cache.sequence();
            if let Some(equal) = cache.publish(parent, tokens, &sequence.full_blocks()[i])? {
                sequence.replace_block(i, equal);
            }
            drop(sequence);
            self.keys.push(parent.extend(tokens));
        }
        if let Some(mark) = self.unsettled.take_if(|mark| mark.position() <= settled)
            && let Some(checkpoint) = mark.checkpoint()
        {
            cache.keep_checkpoint(self.keys[mark.position() / BLOCK_TOKENS - 1], checkpoint);
        }
        Ok(())
    }
}

/// The last block's end at or below `end`.
fn last_boundary(end: usize) -> usize {
    end / BLOCK_TOKENS * BLOCK_TOKENS
}
