//! The figures in the text format that Prometheus reads.
#![forbid(unsafe_code)]

use std::fmt::Write;

use crate::cache::Bucket;

use super::{EngineMetrics, Histogram};

/// A text under way. Writing to it cannot fail.
struct Text(String);

impl EngineMetrics {
    /// The figures in the Prometheus text exposition format, version 0.0.4. Names begin with `dsv4_`, counters end in
    /// `_total`, times are in seconds and sizes in bytes.
    pub fn to_prometheus(&self) -> String {
        let mut text = Text(String::with_capacity(24 << 10));
        self.write_work(&mut text);
        self.write_cache(&mut text);
        self.write_room(&mut text);
        self.write_host_experts(&mut text);
        text.0
    }

    fn write_work(&self, text: &mut Text) {
        let tokens = [("phase", "prefill", self.prefill_tokens), ("phase", "decode", self.decode_tokens)];
        text.family("dsv4_tokens_total", "counter", "Tokens that went through the model.", &tokens);
        text.counter("dsv4_steps_total", "Passes over the weights.", self.steps);
        text.counter("dsv4_failed_steps_total", "Steps that failed as a whole or were stopped.", self.failed_steps);
        for (name, help, histogram) in [
            ("dsv4_step_seconds", "Time of a step.", &self.step_seconds),
            ("dsv4_batch_sessions", "Sessions in a step.", &self.batch_sessions),
            ("dsv4_queue_seconds", "Time of a call in the queue before its step.", &self.queue_seconds),
            ("dsv4_first_token_seconds", "From a prompt to its logits.", &self.first_token_seconds),
            ("dsv4_token_seconds", "Between two tokens of a session that decodes.", &self.token_seconds),
        ] {
            text.histogram(name, help, histogram);
        }
        for (name, help, value) in [
            ("dsv4_step_p50_seconds", "Median time of a step.", self.step_seconds.p50()),
            ("dsv4_step_p99_seconds", "Time that 99 of 100 steps do not exceed.", self.step_seconds.p99()),
        ] {
            text.gauge(name, help, value);
        }
    }

    fn write_cache(&self, text: &mut Text) {
        let cache = &self.cache;
        let by_bucket = |pages: [u64; 3]| {
            let name = |bucket| match bucket {
                Bucket::Wide => "wide",
                Bucket::Index => "index",
                Bucket::Narrow => "narrow",
            };
            Bucket::ALL.map(|bucket| ("bucket", name(bucket), pages[bucket as usize]))
        };
        text.family("dsv4_cache_used_pages", "gauge", "Pages in use, by bucket.", &by_bucket(cache.pool.used));
        text.family(
            "dsv4_cache_free_pages",
            "gauge",
            "Pages that wait for reuse, by bucket.",
            &by_bucket(cache.pool.free),
        );
        for (name, help, value) in [
            ("dsv4_cache_limit_bytes", "Most bytes of pages.", cache.limit_bytes),
            ("dsv4_cache_used_bytes", "Bytes of the pages in use.", cache.pool.used_bytes),
            ("dsv4_cache_held_bytes", "Bytes of all pages.", cache.pool.held_bytes),
            ("dsv4_cache_prefix_blocks", "Reusable blocks.", cache.prefix_blocks),
            ("dsv4_cache_evictable_blocks", "Reusable blocks that no session uses.", cache.evictable_blocks),
            ("dsv4_cache_checkpoints", "Places where a prompt can start.", cache.checkpoints),
            ("dsv4_tier_host_bytes", "Bytes of reusable blocks in host memory.", cache.tiers.host_bytes),
        ] {
            text.gauge(name, help, value);
        }
        let ended =
            [("reason", "no_block", cache.ended_no_block), ("reason", "no_checkpoint", cache.ended_no_checkpoint)];
        text.family("dsv4_cache_lookups_ended_total", "counter", "Lookups that found less than all.", &ended);
        let evicted = [("kind", "block", cache.evicted_blocks), ("kind", "checkpoint", cache.evicted_checkpoints)];
        text.family("dsv4_cache_evictions_total", "counter", "What was dropped to make room.", &evicted);
        let hits = [("tier", "host", cache.tiers.host_hits), ("tier", "disk", cache.tiers.disk_hits)];
        text.family("dsv4_tier_hits_total", "counter", "Blocks and checkpoints that came back from a tier.", &hits);
        for (name, help, value) in [
            ("dsv4_cache_lookup_tokens_total", "Tokens of prompts that were looked up.", cache.lookup_tokens),
            ("dsv4_cache_hit_tokens_total", "Tokens that were reused instead of computed.", cache.hit_tokens),
            ("dsv4_cache_forks_total", "Sessions forked.", cache.forks),
            ("dsv4_cache_copies_on_write_total", "Shared blocks copied before writing.", cache.copies_on_write),
            ("dsv4_tier_offload_bytes_total", "Bytes that went to the tiers.", cache.tiers.offload_bytes),
        ] {
            text.counter(name, help, value);
        }
    }

    fn write_room(&self, text: &mut Text) {
        for (name, help, value) in [
            ("dsv4_waits_total", "Calls that had to wait for room.", self.waits),
            ("dsv4_refused_admissions_total", "Prompts that were not admitted.", self.refused_admissions),
            ("dsv4_refused_calls_total", "Calls that ended with NO_BLOCKS.", self.refused_calls),
            ("dsv4_preemptions_total", "Sessions whose pages were taken for others.", self.preemptions),
            ("dsv4_restored_sessions_total", "Preempted sessions that came back.", self.restored_sessions),
            ("dsv4_lost_sessions_total", "Preempted sessions that are computed again.", self.lost_sessions),
            ("dsv4_degraded_sessions_total", "Sessions that were made smaller.", self.degraded_sessions),
        ] {
            text.counter(name, help, value);
        }
        for (name, help, value) in [
            ("dsv4_sessions", "Sessions that exist.", self.sessions),
            ("dsv4_waiting_calls", "Calls that wait for room.", self.waiting_calls),
            ("dsv4_parked_bytes", "Host memory of preempted sessions.", self.parked_bytes),
            ("dsv4_load_percent", "Percent of the cache that sessions hold.", self.load_percent),
            ("dsv4_pressure", "How far steps are cut back, 0 to 3.", u64::from(self.pressure)),
            ("dsv4_degraded", "1 while new sessions are made smaller.", u64::from(self.is_degraded)),
        ] {
            text.gauge(name, help, value);
        }
    }

    fn write_host_experts(&self, text: &mut Text) {
        let experts = &self.host_experts;
        for (name, help, value) in [
            ("dsv4_host_expert_hits_total", "Experts that were in host memory when they were chosen.", experts.hits),
            ("dsv4_host_expert_misses_total", "Experts that had to be read or waited for.", experts.misses),
            (
                "dsv4_host_expert_read_ahead_total",
                "Experts that were read before they were chosen.",
                experts.read_ahead,
            ),
            ("dsv4_host_expert_read_bytes_total", "Bytes of experts read from files.", experts.read_bytes),
        ] {
            text.counter(name, help, value);
        }
        let waited = experts.wait_nanos as f64 / 1e9;
        text.counter("dsv4_host_expert_wait_seconds_total", "Time that steps waited for experts.", waited);
        text.gauge("dsv4_host_expert_bytes", "Host memory for experts that are read.", experts.frame_bytes);
    }
}

impl Text {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        self.line(format_args!("# HELP {name} {help}"));
        self.line(format_args!("# TYPE {name} {kind}"));
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        writeln!(self.0, "{line}").expect("a string takes every text");
    }

    fn counter(&mut self, name: &str, help: &str, value: impl std::fmt::Display) {
        self.head(name, "counter", help);
        self.line(format_args!("{name} {value}"));
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl std::fmt::Display) {
        self.head(name, "gauge", help);
        self.line(format_args!("{name} {value}"));
    }

    /// Values that differ in one label.
    fn family(&mut self, name: &str, kind: &str, help: &str, values: &[(&str, &str, u64)]) {
        self.head(name, kind, help);
        for (label, which, value) in values {
            self.line(format_args!("{name}{{{label}=\"{which}\"}} {value}"));
        }
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.head(name, "histogram", help);
        let mut below = 0;
        for (bound, count) in histogram.bounds().iter().zip(histogram.counts()) {
            below += count;
            self.line(format_args!("{name}_bucket{{le=\"{bound}\"}} {below}"));
        }
        let count = histogram.count();
        self.line(format_args!("{name}_bucket{{le=\"+Inf\"}} {count}"));
        self.line(format_args!("{name}_sum {}", histogram.sum()));
        self.line(format_args!("{name}_count {count}"));
    }
}
