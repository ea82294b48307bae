//! Refused memory while a cached prefix is taken over. A binary of its own: the injected failure is process-wide.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a failed call is a failed test")]

mod common;

use common::golden::{self, Golden};
use common::subject;
use dsv4::{EngineOptions, ErrorKind};

/// Requests of a feed that are refused in turn: those until the hit is taken over, and a few of the step behind it.
const REQUESTS: u64 = 40;

#[test]
fn a_hit_that_could_not_be_taken_over_is_not_counted() {
    let folder = Golden::open(&golden::committed().join("nano-flash")).checkpoint();
    let options = EngineOptions { threads: 1, poison_cache: true, ..EngineOptions::default() };
    let engine = subject::engine_with(&folder, options);
    let tokens = (0..300).map(|i| i * 7 % 90).collect::<Vec<u32>>();
    subject::session(&engine, 2000).feed(&tokens).unwrap();
    let mut used = 0;
    for nth in 1..=REQUESTS {
        let mut session = subject::session(&engine, 2000);
        let guard = dsv4::alloc::fail_nth(nth);
        let result = session.feed(&tokens);
        let fired = guard.fired();
        drop(guard);
        used += session.reused_tokens();
        assert_eq!(engine.cache_stats().hit_tokens, used, "request {nth} refused: {result:?}");
        assert!(fired, "a feed makes more than {nth} requests");
        assert_eq!(result.unwrap_err().kind(), ErrorKind::OutOfMemory);
    }
    assert!(used > 0, "the last requests are those of the step behind the hit");
}
