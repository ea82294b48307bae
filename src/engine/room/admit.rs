//! Admission by the plan: before a prompt begins, what its tokens need is compared with what can be had.
#![forbid(unsafe_code)]

use crate::cache::{BLOCK_TOKENS, SequenceCache};
use crate::error::{Error, Result};

use super::{Line, Place, Room, Slot};

/// What a call will need in all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Position at which its tokens and those that are expected behind them end.
    pub(crate) end: usize,
    /// Whether room for all of them is asked for before the first.
    pub(crate) is_checked: bool,
}

impl Room {
    /// Whether a call that wants `count` more tokens now lines up behind those who wait.
    pub(crate) fn yields(
        &self,
        line: Option<Line>,
        slot: &Slot,
        cache: Option<&SequenceCache>,
        plan: Plan,
        count: usize,
    ) -> bool {
        let Some(line) = line.filter(|line| !line.is_of(slot) && line.rank < slot.rank()) else {
            return false;
        };
        let begins = plan.is_checked && slot.promised() < plan.end;
        // what fits into its pages takes nothing from anybody
        (line.is_overdue || begins) && cache.is_none_or(|cache| begins || cache.needs(count) > 0)
    }

    /// Whether the whole plan could be met if nobody else were there; an error with the counts if not.
    pub(crate) fn is_possible(&self, plan: Plan) -> Result<()> {
        let (needed, limit) = (self.cache.sequence_bytes(plan.end), self.cache.limit_and_used().0);
        if needed <= limit {
            return Ok(());
        }
        Err(self.is_full(format_args!("{} tokens of one session, alone,", plan.end), needed, limit))
    }

    /// Promises room for the plan, if that was not done; what was promised to others and not yet taken is theirs.
    ///
    /// # Errors
    /// `NoBlocks` with the counts.
    pub(crate) fn admit(&self, slot: &Slot, cache: &SequenceCache, plan: Plan) -> Result<()> {
        if !plan.is_checked || slot.promised() >= plan.end {
            return Ok(());
        }
        let needed = cache.needs(plan.end.saturating_sub(cache.len()));
        let owed: u64 = self.slots().iter().filter(|other| other.number() != slot.number()).map(|o| self.owed(o)).sum();
        let room = self.cache.room().saturating_sub(owed);
        if needed > room {
            let (from, to) = (cache.len(), plan.end);
            let promised = if owed > 0 { format!(" ({owed} bytes are promised to others)") } else { String::new() };
            return Err(self.is_full(format_args!("tokens {from} to {to} of a session{promised}"), needed, room));
        }
        slot.promise(plan.end);
        Ok(())
    }

    /// Bytes that are free before it is worth to try again a call of `count` tokens that had too few.
    pub(crate) fn lacks(&self, slot: &Slot, plan: Plan, count: usize) -> u64 {
        let begins = plan.is_checked && slot.promised() < plan.end;
        let inside = slot.try_lock();
        match inside.as_ref().map(|inside| &inside.place) {
            Some(Place::Here(cache)) => cache.needs(if begins { plan.end.saturating_sub(cache.len()) } else { count }),
            Some(Place::Parked(parked)) => parked.page_bytes(&self.cache),
            _ => self.cache.sequence_bytes(0),
        }
    }

    /// Why a call is refused where all wait for each other.
    pub(crate) fn deadlock(&self, slot: &Slot, plan: Plan) -> Error {
        let needed = self.lacks(slot, plan, 1);
        self.is_full(
            format_args!("all sessions wait for each other, and the last one would"),
            needed,
            self.cache.room(),
        )
    }

    fn owed(&self, slot: &Slot) -> u64 {
        let blocks = slot.promised().div_ceil(BLOCK_TOKENS).saturating_sub(slot.held());
        blocks as u64 * self.cache.block_bytes()
    }
}
