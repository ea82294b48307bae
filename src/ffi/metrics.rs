//! Metrics
//!
//! What an engine did, how long it took, and who waited. Thresholds and alerts are the host's.

use std::ffi::c_char;

use super::args::{Buffer, Out, OutStruct, SizedStruct, object};
use super::engine::dsv4_engine;
use super::guard::guard;
use super::session::dsv4_session;
use super::status::{dsv4_error, dsv4_status};

/// Figures of an engine. Set `size` to `sizeof(dsv4_engine_metrics)` before the call. Counters count from the engine's
/// beginning; medians and 99th percentiles, in nanoseconds, are as exact as the buckets of `dsv4_engine_metrics_text`. What
/// the cache has is in `dsv4_cache_stats`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dsv4_engine_metrics {
    /// `sizeof(dsv4_engine_metrics)`.
    pub size: usize,
    /// Tokens of prompts, calls of more than eight tokens, that went through the model.
    pub prefill_tokens: u64,
    /// Tokens of shorter calls that went through the model.
    pub decode_tokens: u64,
    /// Passes over the weights.
    pub steps: u64,
    /// Passes that failed as a whole, or ended early because all their calls were stopped.
    pub failed_steps: u64,
    /// Sessions in all steps together: divided by `steps`, the mean batch.
    pub batch_sessions: u64,
    /// Time of a step, median.
    pub step_p50_nanos: u64,
    /// Time of a step that 99 of 100 do not exceed.
    pub step_p99_nanos: u64,
    /// Time of a call in the queue before each of its steps, median.
    pub queue_p50_nanos: u64,
    /// That time, 99 of 100.
    pub queue_p99_nanos: u64,
    /// From a prompt to its logits, median.
    pub first_token_p50_nanos: u64,
    /// That time, 99 of 100.
    pub first_token_p99_nanos: u64,
    /// Between the results of two calls of a session, the second of one token, median; the host's own time included.
    pub token_p50_nanos: u64,
    /// That time, 99 of 100.
    pub token_p99_nanos: u64,
    /// Sessions that exist now.
    pub sessions: u64,
    /// Calls that wait for room now.
    pub waiting_calls: u64,
    /// Calls that had to wait for room.
    pub waits: u64,
    /// Prompts that were not admitted, since the room for all of their plan was not there.
    pub refused_admissions: u64,
    /// Calls that ended with `NO_BLOCKS`, those prompts among them.
    pub refused_calls: u64,
    /// Sessions whose pages were taken for others.
    pub preemptions: u64,
    /// Sessions that came back from host memory.
    pub restored_sessions: u64,
    /// Sessions for which there was no place in host memory, and which are computed again.
    pub lost_sessions: u64,
    /// Bytes of host memory that preempted sessions take now.
    pub parked_bytes: u64,
    /// Percent of the cache that sessions hold.
    pub load_percent: u64,
    /// How far steps and checkpoints are cut back for want of room: 0 not at all, 3 most.
    pub pressure: u32,
    /// 1 while sessions that are made are smaller ones.
    pub is_degraded: i32,
    /// Sessions that were made smaller.
    pub degraded_sessions: u64,
    /// Routed experts that were in host memory when they were chosen. This and the next five are 0 without `host_bytes`, or
    /// where all experts fit.
    pub host_expert_hits: u64,
    /// Those that had to be read from the files, or were still being read.
    pub host_expert_misses: u64,
    /// Reads of experts before they were chosen, where token ids tell which will be.
    pub host_expert_read_ahead: u64,
    /// Bytes of experts that were read.
    pub host_expert_read_bytes: u64,
    /// Nanoseconds that steps waited for these reads.
    pub host_expert_wait_nanos: u64,
    /// Bytes of host memory for experts.
    pub host_expert_bytes: u64,
}

// SAFETY: `repr(C)`, `size` first, plain fields without padding.
unsafe impl SizedStruct for dsv4_engine_metrics {
    const NAME: &'static str = "dsv4_engine_metrics";
}

/// Figures of a session since it was made; a fork begins with its parent's reused tokens. Set `size` to
/// `sizeof(dsv4_session_metrics)` before the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dsv4_session_metrics {
    /// `sizeof(dsv4_session_metrics)`.
    pub size: usize,
    /// Tokens of prompts that went through the model.
    pub prefill_tokens: u64,
    /// Tokens of calls of at most eight tokens that went through the model.
    pub decode_tokens: u64,
    /// Tokens that were taken from the cache instead.
    pub reused_tokens: u64,
    /// Tokens that were computed again, because the session's pages had been taken and lost.
    pub recomputed_tokens: u64,
    /// Steps it took part in.
    pub steps: u64,
    /// Nanoseconds in the queue.
    pub queued_nanos: u64,
    /// Nanoseconds in steps.
    pub step_nanos: u64,
    /// Nanoseconds from the beginning of its last prompt's call to the logits; 0 before the first.
    pub first_token_nanos: u64,
    /// How often its pages were taken for others.
    pub preemptions: u64,
    /// 1 if it was made smaller, since the engine was under load.
    pub is_degraded: i32,
    /// 0.
    pub reserved: i32,
}

// SAFETY: `repr(C)`, `size` first, plain fields without padding.
unsafe impl SizedStruct for dsv4_session_metrics {
    const NAME: &'static str = "dsv4_session_metrics";
}

/// Figures of the engine now.
///
/// Errors: `UNAVAILABLE` in a fork of the process; otherwise only `INVALID_ARGUMENT` and `POISONED`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_engine_get_metrics(
    engine: *const dsv4_engine,
    metrics: *mut dsv4_engine_metrics,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let out = unsafe { OutStruct::new(metrics, "metrics") };
    guard("dsv4_engine_get_metrics", err, || {
        // SAFETY: as above.
        let engine = unsafe { object(engine, "engine") }?.get()?;
        out.check()?;
        let m = engine.metrics();
        let nanos = |seconds: f64| (seconds * 1e9) as u64;
        out.set(dsv4_engine_metrics {
            size: size_of::<dsv4_engine_metrics>(),
            prefill_tokens: m.prefill_tokens,
            decode_tokens: m.decode_tokens,
            steps: m.steps,
            failed_steps: m.failed_steps,
            batch_sessions: m.batch_sessions.sum() as u64,
            step_p50_nanos: nanos(m.step_seconds.p50()),
            step_p99_nanos: nanos(m.step_seconds.p99()),
            queue_p50_nanos: nanos(m.queue_seconds.p50()),
            queue_p99_nanos: nanos(m.queue_seconds.p99()),
            first_token_p50_nanos: nanos(m.first_token_seconds.p50()),
            first_token_p99_nanos: nanos(m.first_token_seconds.p99()),
            token_p50_nanos: nanos(m.token_seconds.p50()),
            token_p99_nanos: nanos(m.token_seconds.p99()),
            sessions: m.sessions,
            waiting_calls: m.waiting_calls,
            waits: m.waits,
            refused_admissions: m.refused_admissions,
            refused_calls: m.refused_calls,
            preemptions: m.preemptions,
            restored_sessions: m.restored_sessions,
            lost_sessions: m.lost_sessions,
            parked_bytes: m.parked_bytes,
            load_percent: m.load_percent,
            pressure: m.pressure,
            is_degraded: i32::from(m.is_degraded),
            degraded_sessions: m.degraded_sessions,
            host_expert_hits: m.host_experts.hits,
            host_expert_misses: m.host_experts.misses,
            host_expert_read_ahead: m.host_experts.read_ahead,
            host_expert_read_bytes: m.host_experts.read_bytes,
            host_expert_wait_nanos: m.host_experts.wait_nanos,
            host_expert_bytes: m.host_experts.frame_bytes,
        });
        Ok(())
    })
}

/// All figures of the engine, those of the cache and the histograms included, in the Prometheus text exposition format,
/// version 0.0.4. `*text_len` receives the length in bytes and `text`, an array with room for `capacity` bytes, the text and
/// a final NUL; with NULL and 0 the length alone is asked for, which grows with the figures: leave some room.
///
/// Errors: `BUFFER_TOO_SMALL`; `UNAVAILABLE` in a fork of the process.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_engine_metrics_text(
    engine: *const dsv4_engine,
    text: *mut c_char,
    capacity: usize,
    text_len: *mut usize,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let text_len = unsafe { Out::new(text_len, "text_len") };
    // SAFETY: as above; a `char` may be any byte.
    let text = unsafe { Buffer::new(text.cast::<u8>(), capacity, "text", text_len) };
    guard("dsv4_engine_metrics_text", err, || {
        // SAFETY: as above.
        let engine = unsafe { object(engine, "engine") }?.get()?;
        text.check()?;
        text.fill(engine.metrics().to_prometheus().as_bytes(), true)
    })
}

/// Figures of the session now.
///
/// Errors: `UNAVAILABLE` in a fork of the process; otherwise only `INVALID_ARGUMENT`, `BUSY` and `POISONED`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_session_get_metrics(
    session: *mut dsv4_session,
    metrics: *mut dsv4_session_metrics,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let out = unsafe { OutStruct::new(metrics, "metrics") };
    guard("dsv4_session_get_metrics", err, || {
        // SAFETY: as above.
        let session = unsafe { object(session, "session") }?.exclusive.read()?;
        out.check()?;
        let m = session.metrics();
        let nanos = |time: std::time::Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        out.set(dsv4_session_metrics {
            size: size_of::<dsv4_session_metrics>(),
            prefill_tokens: m.prefill_tokens,
            decode_tokens: m.decode_tokens,
            reused_tokens: m.reused_tokens,
            recomputed_tokens: m.recomputed_tokens,
            steps: m.steps,
            queued_nanos: nanos(m.queued),
            step_nanos: nanos(m.in_steps),
            first_token_nanos: m.first_token.map_or(0, nanos),
            preemptions: m.preemptions,
            is_degraded: i32::from(m.is_degraded),
            reserved: 0,
        });
        Ok(())
    })
}
