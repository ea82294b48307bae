//! Figures of an engine at work: what it did, how long it took, and who waited.
//!
//! A [`Meter`] has plain integers under a lock of its own, which a step takes once and which nothing else is taken under;
//! no observation allocates. Thresholds and alerts are the user's.
#![forbid(unsafe_code)]

mod histogram;
mod prometheus;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::cache::CacheStats;
use crate::model::deepseek_v4::home::PoolStats;

use super::Engine;

pub use histogram::Histogram;

/// Figures of an engine. Counters and histograms are since its beginning; times are seconds.
///
/// A *prompt* is a call of more than eight tokens, or one that asks for the logits of each of its tokens; shorter calls
/// decode.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineMetrics {
    /// Tokens of prompts that went through the model.
    pub prefill_tokens: u64,
    /// Tokens of decoding calls that went through the model.
    pub decode_tokens: u64,
    /// Steps that were completed: passes over the weights.
    pub steps: u64,
    /// Steps that failed as a whole, or ended early because all their calls were stopped.
    pub failed_steps: u64,
    /// Time of a step.
    pub step_seconds: Histogram,
    /// Sessions in a step.
    pub batch_sessions: Histogram,
    /// From a call's coming into the queue, for each step anew, to the beginning of the step that serves it.
    pub queue_seconds: Histogram,
    /// From the beginning of a prompt's call to its logits.
    pub first_token_seconds: Histogram,
    /// Between the results of two calls of a session, the second of one token; the host's own time between them included.
    pub token_seconds: Histogram,
    /// The cache: hits and lookups, pages by bucket, evictions, tiers.
    pub cache: CacheStats,
    /// Sessions that exist now.
    pub sessions: u64,
    /// Calls that wait for room now.
    pub waiting_calls: u64,
    /// Calls that had to wait for room.
    pub waits: u64,
    /// Prompts that were not admitted, since the room was not there for all of their plan.
    pub refused_admissions: u64,
    /// Calls that ended with `NoBlocks`, those prompts among them.
    pub refused_calls: u64,
    /// Sessions whose pages were taken for others.
    pub preemptions: u64,
    /// Of these, sessions that came back from host memory.
    pub restored_sessions: u64,
    /// Of these, sessions for which there was no place in host memory: they are computed again.
    pub lost_sessions: u64,
    /// Bytes of host memory that preempted sessions take now.
    pub parked_bytes: u64,
    /// Percent of the cache that sessions hold, as it was seen last: every few steps.
    pub load_percent: u64,
    /// How far steps and checkpoints are cut back for want of room: 0 not at all, 3 most.
    pub pressure: u32,
    /// Whether a session that is made now is a smaller one.
    pub is_degraded: bool,
    /// Sessions that were made smaller.
    pub degraded_sessions: u64,
    /// Routed experts in host memory; zeros where they are used where they are mapped.
    pub host_experts: PoolStats,
}

/// Figures of one session, since it was made; a fork begins with its parent's tokens reused and all else at 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionMetrics {
    /// Tokens of prompts that went through the model.
    pub prefill_tokens: u64,
    /// Tokens of decoding calls that went through the model.
    pub decode_tokens: u64,
    /// Tokens that were taken from the cache instead.
    pub reused_tokens: u64,
    /// Tokens that were computed again, because the session's pages had been taken and lost.
    pub recomputed_tokens: u64,
    /// Steps it took part in.
    pub steps: u64,
    /// Time in the queue.
    pub queued: Duration,
    /// Time in steps.
    pub in_steps: Duration,
    /// From the beginning of its last prompt's call to the logits.
    pub first_token: Option<Duration>,
    /// How often its pages were taken for others.
    pub preemptions: u64,
    /// Whether it was made smaller, since the engine was under load.
    pub is_degraded: bool,
}

/// What is counted as it happens.
pub(super) struct Meter {
    counts: Mutex<Counts>,
}

/// Under the meter's lock.
pub(super) struct Counts {
    pub(super) prefill_tokens: u64,
    pub(super) decode_tokens: u64,
    pub(super) steps: u64,
    pub(super) failed_steps: u64,
    pub(super) degraded_sessions: u64,
    pub(super) step_seconds: Histogram,
    pub(super) batch_sessions: Histogram,
    pub(super) queue_seconds: Histogram,
    pub(super) first_token_seconds: Histogram,
    pub(super) token_seconds: Histogram,
}

impl Meter {
    pub(super) fn new() -> Self {
        let counts = Counts {
            prefill_tokens: 0,
            decode_tokens: 0,
            steps: 0,
            failed_steps: 0,
            degraded_sessions: 0,
            step_seconds: Histogram::of_seconds(),
            batch_sessions: Histogram::of_counts(),
            queue_seconds: Histogram::of_seconds(),
            first_token_seconds: Histogram::of_seconds(),
            token_seconds: Histogram::of_seconds(),
        };
        Self { counts: Mutex::new(counts) }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Counts {
    /// A step of `sessions` sessions is over.
    pub(super) fn step(&mut self, sessions: usize, took: Duration) {
        self.steps += 1;
        self.step_seconds.observe_time(took);
        self.batch_sessions.observe(sessions as f64);
    }

    /// It had `tokens` tokens of a call, which had waited for `queued`.
    pub(super) fn served(&mut self, decodes: bool, tokens: usize, queued: Duration) {
        *(if decodes { &mut self.decode_tokens } else { &mut self.prefill_tokens }) += tokens as u64;
        self.queue_seconds.observe_time(queued);
    }

    /// A prompt has its logits.
    pub(super) fn first_token(&mut self, took: Duration) {
        self.first_token_seconds.observe_time(took);
    }

    /// A session has its next token, after `left`.
    pub(super) fn token(&mut self, left: Instant, now: Instant) {
        self.token_seconds.observe_time(now.saturating_duration_since(left));
    }
}

impl Engine {
    /// Figures now. Those of the cache take a look at every reusable block.
    ///
    /// ```
    /// # use dsv4::{Engine, EngineOptions, Model, Session, SessionOptions};
    /// # let engine = Engine::new(&Model::open("examples/models/tiny-v4")?, EngineOptions::default())?;
    /// # let mut session = Session::new(&engine, SessionOptions::default())?;
    /// # session.feed(&[300; 20])?;
    /// let metrics = engine.metrics();
    /// println!("{} steps, half of them within {} s", metrics.steps, metrics.step_seconds.p50());
    /// assert_eq!(metrics.prefill_tokens, 20);
    /// assert!(metrics.to_prometheus().contains("phase=\"prefill\""));
    /// # Ok::<(), dsv4::Error>(())
    /// ```
    pub fn metrics(&self) -> EngineMetrics {
        let cache = self.cache_stats();
        let room = self.room.figures();
        self.room.pressure().look_now(&self.cache);
        let host_experts = self.device.tier().map(|tier| tier.stats()).unwrap_or_default();
        let counts = self.meter.lock();
        EngineMetrics {
            prefill_tokens: counts.prefill_tokens,
            decode_tokens: counts.decode_tokens,
            steps: counts.steps,
            failed_steps: counts.failed_steps,
            step_seconds: counts.step_seconds,
            batch_sessions: counts.batch_sessions,
            queue_seconds: counts.queue_seconds,
            first_token_seconds: counts.first_token_seconds,
            token_seconds: counts.token_seconds,
            cache,
            sessions: room.sessions,
            waiting_calls: room.waiting,
            waits: room.waits,
            refused_admissions: room.refused_admissions,
            refused_calls: room.refused,
            preemptions: room.preemptions,
            restored_sessions: room.restored,
            lost_sessions: room.recomputed,
            parked_bytes: room.parked_bytes,
            load_percent: self.room.pressure().load(),
            pressure: self.room.pressure().level(),
            is_degraded: self.degraded().is_some(),
            degraded_sessions: counts.degraded_sessions,
            host_experts,
        }
    }
}
