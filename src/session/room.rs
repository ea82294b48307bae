//! What a session does about the pages of its sequence, which may be taken while it is idle: it has them back, or computes
//! again what was lost, before anything uses them.
//!
//! Invariant: a session's tokens and logits are its own and stay whatever happens to its pages; only the sequence behind
//! them may be absent, or hold a beginning of them.
#![forbid(unsafe_code)]

use std::time::Instant;

use crate::cache::{BLOCK_TOKENS, CacheBytes, CheckpointPolicy};
use crate::engine::{Caller, Last, Pin, Place, Plan, Request, SessionMetrics, Stop, Terms, WhenFull, Work, now};
use crate::error::Result;
use crate::model::deepseek_v4::LogitRows;

use super::Session;

impl Session {
    /// How a call of `tokens` tokens that begins now is treated.
    pub(super) fn terms(&self, tokens: usize) -> Terms {
        let calls = &self.calls;
        let began = self.submitted.unwrap_or_else(Instant::now);
        let caller = match self.submitted {
            Some(_) => Caller::Leaves,
            None if calls.waits_only => Caller::Waits,
            None => Caller::Leads,
        };
        let when_full = calls.when_full.unwrap_or(self.engine.options().when_full);
        let mut terms = self.engine.begin(Request {
            tokens,
            stop: self.stop(began),
            priority: calls.priority,
            began,
            caller,
            waits: when_full == WhenFull::Wait,
            plan: Plan { end: self.position() + tokens, is_checked: false },
        });
        if when_full != WhenFull::Evict && !terms.decodes() {
            let end = (self.position() + tokens).saturating_add(calls.reserve).min(self.context);
            terms.plan(Plan { end, is_checked: true });
        }
        terms
    }

    /// What ends a call that began at `began`.
    pub(super) fn stop(&self, began: Instant) -> Stop {
        let deadline = self.calls.time_limit.and_then(|limit| began.checked_add(limit));
        Stop { cancel: self.cancel.clone(), deadline }
    }

    /// Has the sequence in pages, with all tokens, while the pin lives.
    ///
    /// # Errors
    /// None where it is so already; otherwise those of [`Session::feed`].
    pub(super) fn ready(&self) -> Result<Pin> {
        self.engine.check_process()?;
        let pin = self.cache.pin();
        if !self.is_whole() {
            // several readers may want it, and one of them brings it for all
            let _alone = self.cache.begin_return();
            now(self.catch_up(&self.terms(0)))?;
        }
        Ok(pin)
    }

    /// As [`Session::ready`], for a call that has pinned the session and is its only one.
    pub(super) async fn catch_up(&self, terms: &Terms) -> Result<()> {
        if self.is_whole() { Ok(()) } else { self.bring_back(&terms.unplanned()).await }
    }

    fn is_whole(&self) -> bool {
        matches!(&self.cache.lock().place, Place::Here(cache) if cache.len() == self.tokens.len())
    }

    async fn bring_back(&self, terms: &Terms) -> Result<()> {
        let work = |tokens| Work { tokens, logits: LogitRows::None, last: Last::Come, ends: false };
        self.engine.step(&self.cache, work(&[]), terms).await?;
        loop {
            let at = self.cache.sequence().len();
            let at = if at == 0 { self.take_over()? } else { at };
            if at == self.tokens.len() {
                break;
            }
            // one that was lost again meanwhile is empty after the step
            let part = &self.tokens[at..self.tokens.len().min(at + self.chunk)];
            let done = self.engine.step(&self.cache, work(part), terms).await?;
            self.cache.count_recomputed(done.tokens);
        }
        self.share_again()
    }

    /// Gives an empty sequence what the cache has of the session's tokens; returns how many.
    fn take_over(&self) -> Result<usize> {
        let cache = self.engine.cache();
        if cache.options().policy == CheckpointPolicy::None {
            return Ok(0);
        }
        let hit = cache.lookup(cache.root(), &self.tokens)?;
        match hit.checkpoint {
            Some(checkpoint) => self.cache.sequence().extend(&hit.blocks, checkpoint.state)?,
            None => return Ok(0),
        }
        Ok(self.cache.sequence().len())
    }

    /// Blocks that were published before are published again, or shared with those that took their place.
    fn share_again(&self) -> Result<()> {
        let cache = self.engine.cache();
        let mut sequence = self.cache.sequence();
        let mut parent = cache.root();
        for (i, &key) in self.keys.iter().enumerate().take(sequence.full_blocks().len()) {
            let tokens = &self.tokens[i * BLOCK_TOKENS..(i + 1) * BLOCK_TOKENS];
            if let Some(equal) = cache.publish(parent, tokens, &sequence.full_blocks()[i])? {
                sequence.replace_block(i, equal);
            }
            parent = key;
        }
        Ok(())
    }

    /// Empties the sequence. On error nothing changes.
    pub(super) fn clear_sequence(&self) -> Result<()> {
        let _pin = self.cache.pin();
        let is_here = matches!(self.cache.lock().place, Place::Here(_));
        if is_here {
            self.engine.find_room(|| self.cache.sequence().clear())?;
        } else {
            self.cache.lose();
        }
        self.cache.forget_promise();
        Ok(())
    }

    /// Bytes of cache memory it holds: none while its pages are taken for others.
    pub fn cache_bytes(&self) -> CacheBytes {
        match &self.cache.lock().place {
            Place::Here(cache) => cache.bytes(),
            _ => CacheBytes::default(),
        }
    }

    /// Figures of the session.
    pub fn metrics(&self) -> SessionMetrics {
        SessionMetrics {
            reused_tokens: self.reused,
            recomputed_tokens: self.cache.recomputed(),
            preemptions: self.cache.preemptions(),
            ..self.metrics
        }
    }
}
