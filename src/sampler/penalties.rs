//! Repetition, presence and frequency penalties over a window of accepted tokens.

use std::collections::{HashMap, VecDeque};

use super::SamplerOptions;
use crate::TokenId;
use crate::error::{Error, Result, bail};

/// An id and its count.
const BYTES_PER_TOKEN: u64 = 8;

/// Counts of the accepted tokens that the penalties look at. Invariant: with a window, `recent`
/// holds its tokens and `counts` counts exactly those; without one, `recent` stays empty.
#[derive(Clone, Debug)]
pub(super) struct Penalties {
    active: bool,
    window: usize,
    recent: VecDeque<TokenId>,
    counts: HashMap<TokenId, u32>,
}

impl Penalties {
    pub(super) fn new(options: &SamplerOptions) -> Self {
        let active =
            options.repetition_penalty != 1.0 || options.presence_penalty != 0.0 || options.frequency_penalty != 0.0;
        Self { active, window: options.penalty_window, recent: VecDeque::new(), counts: HashMap::new() }
    }

    pub(super) fn accept(&mut self, id: TokenId) -> Result<()> {
        if !self.active {
            return Ok(());
        }
        self.reserve()?;
        *self.counts.entry(id).or_insert(0) += 1;
        if self.window == 0 {
            return Ok(());
        }
        self.recent.push_back(id);
        if self.recent.len() > self.window
            && let Some(old) = self.recent.pop_front()
        {
            self.forget(old);
        }
        Ok(())
    }

    /// Room for one more token.
    pub(super) fn reserve(&mut self) -> Result<()> {
        if !self.active {
            return Ok(());
        }
        let refused = |tokens: usize| Error::out_of_memory("accepted tokens", (tokens as u64 + 1) * BYTES_PER_TOKEN);
        self.counts.try_reserve(1).map_err(|_| refused(self.counts.len()))?;
        if self.window > 0 {
            self.recent.try_reserve(1).map_err(|_| refused(self.recent.len()))?;
        }
        Ok(())
    }

    /// True when no token would be penalised.
    pub(super) fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }

    /// Number of tokens that would be.
    pub(super) fn len(&self) -> usize {
        self.counts.len()
    }

    /// Counted tokens and what is subtracted from their logits, in no order.
    pub(super) fn subtracted(&self, options: &SamplerOptions) -> impl Iterator<Item = (TokenId, f32)> + '_ {
        let (presence, frequency) = (options.presence_penalty, options.frequency_penalty);
        self.counts.iter().map(move |(&id, &count)| (id, presence + frequency * count as f32))
    }

    fn forget(&mut self, id: TokenId) {
        if let Some(count) = self.counts.get_mut(&id) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&id);
            }
        }
    }

    /// Changes the logits of counted tokens; each is touched once, so the order does not matter.
    pub(super) fn apply(&self, options: &SamplerOptions, logits: &mut [f32]) -> Result<()> {
        let vocab = logits.len();
        for (id, subtracted) in self.subtracted(options) {
            let Some(logit) = logits.get_mut(id as usize) else {
                bail!(InvalidArgument, "accepted token id {id} is outside the {vocab} logits");
            };
            // Minus infinity marks a banned token; no penalty, however negative, brings it back.
            if *logit == f32::NEG_INFINITY {
                continue;
            }
            let repetition = options.repetition_penalty;
            *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
            *logit -= subtracted;
        }
        Ok(())
    }
}
