//! A soak: sixteen threads open, feed, decode, cancel, fork, save, restore, truncate and drop sessions of one engine whose
//! cache has room for a few of them. No error but those that a full cache or a cancel gives, the logits of a run alone, all
//! blocks back in the end, and memory that does not grow.
//!
//! `DSV4_SOAK_SECONDS` says how long; the ignored test takes ten minutes.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a failed call is a failed test; figures are printed")]

mod common;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use common::golden;
use common::subject;
use common::truth::{Rng, Truth};
use dsv4::{CallOptions, Engine, EngineOptions, ErrorKind, Session, SessionOptions, WhenFull};

const THREADS: usize = 16;
const LONGEST: usize = 600;
/// Seconds where nothing else is said.
const SECONDS: u64 = 8;
/// Growth of the process that is none: what its allocator keeps.
const SLACK: u64 = 48 << 20;

/// Bytes of the process in memory; `None` where the system does not tell.
fn resident() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    text.split(' ').nth(1)?.parse::<u64>().ok().map(|pages| pages * 4096)
}

struct Soak<'a> {
    engine: Arc<Engine>,
    truth: &'a Truth,
    folder: &'a Path,
    until: Instant,
    calls: AtomicU64,
    refused: AtomicU64,
}

impl Soak<'_> {
    fn thread(&self, number: usize) {
        let mut rng = Rng(number as u64 * 7919 + 3);
        let mut sessions: Vec<(Session, usize)> = Vec::new();
        while Instant::now() < self.until {
            if sessions.is_empty() || (sessions.len() < 3 && rng.next(5) == 0) {
                let options = SessionOptions { context: LONGEST, rollback: rng.next(3) };
                let Ok(mut session) = Session::new(&self.engine, options) else {
                    sessions.clear();
                    continue;
                };
                let when_full = [WhenFull::Wait, WhenFull::Wait, WhenFull::Evict, WhenFull::Refuse][rng.next(4)];
                session.set_call_options(CallOptions {
                    priority: rng.next(3) as i32,
                    when_full: Some(when_full),
                    time_limit: (rng.next(4) == 0).then(|| Duration::from_millis(rng.next(50) as u64)),
                    ..CallOptions::default()
                });
                sessions.push((session, rng.next(self.truth.timelines.len())));
            }
            let i = rng.next(sessions.len());
            let result = self.act(&mut rng, &mut sessions, i, number);
            self.calls.fetch_add(1, Ordering::Relaxed);
            match result {
                Ok(()) => {}
                Err(e) if e.kind() == ErrorKind::Cancelled => {}
                Err(e) if e.kind() == ErrorKind::NoBlocks => {
                    self.refused.fetch_add(1, Ordering::Relaxed);
                    sessions.clear();
                }
                Err(e) => panic!("thread {number}: {e}"),
            }
            if let Some((session, timeline)) = sessions.get(i) {
                self.truth.check(session, *timeline, &format!("thread {number}"));
            }
        }
    }

    fn act(&self, rng: &mut Rng, sessions: &mut Vec<(Session, usize)>, i: usize, number: usize) -> dsv4::Result<()> {
        let may_fork = sessions.len() < 4;
        let (session, timeline) = &mut sessions[i];
        let timeline = *timeline;
        let size = [1, 1, 1, 3, 60, 260, 400][rng.next(7)].min(session.remaining());
        let rest = &self.truth.timelines[timeline][session.position()..][..size];
        match rng.next(16) {
            0..=7 => session.feed(rest),
            8 => session.feed_with(rest, &mut |_| ControlFlow::Break(())),
            9 => {
                let (token, pause) = (session.cancel_token(), Duration::from_micros(rng.next(4000) as u64));
                let result = thread::scope(|scope| {
                    scope.spawn(move || {
                        thread::sleep(pause);
                        token.cancel();
                    });
                    session.feed(rest)
                });
                session.cancel_token().reset();
                result
            }
            10 => session.truncate(rng.next(session.position() + 1)),
            11 if may_fork => sessions[i].0.fork().map(|fork| sessions.push((fork, timeline))),
            12 => {
                let path = self.folder.join(format!("{number}.session"));
                session.save(&path)?;
                let options = SessionOptions { context: LONGEST, rollback: 0 };
                Session::restore(&self.engine, &path, options).map(|restored| sessions[i].0 = restored)
            }
            13 => session.clear(),
            _ => {
                drop(sessions.swap_remove(i));
                Ok(())
            }
        }
    }
}

fn soak(seconds: u64) {
    let (model, folder) = (golden::small(), tempfile::tempdir().unwrap());
    let truth = Truth::new(&model, LONGEST);
    let bytes = {
        let engine = subject::engine_with(&model, EngineOptions { threads: 1, ..EngineOptions::default() });
        let mut session = subject::session(&engine, LONGEST);
        session.feed(&truth.timelines[0]).unwrap();
        let bytes = session.cache_bytes();
        bytes.window + bytes.state + bytes.pages
    };
    let mut options = EngineOptions {
        threads: 2,
        prefill_chunk: 64,
        cache_bytes: 6 * bytes,
        when_full: WhenFull::Wait,
        ..EngineOptions::default()
    };
    (options.tiers.host_bytes, options.tiers.session_bytes) = (4 * bytes, 8 * bytes);
    let (start, length) = (Instant::now(), Duration::from_secs(seconds));
    let soak = Soak {
        engine: subject::engine_with(&model, options),
        truth: &truth,
        folder: folder.path(),
        until: start + length,
        calls: AtomicU64::new(0),
        refused: AtomicU64::new(0),
    };
    let seen = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for number in 0..THREADS {
            let soak = &soak;
            scope.spawn(move || soak.thread(number));
        }
        while Instant::now() < soak.until {
            thread::sleep((length / 40).min(Duration::from_secs(1)));
            seen.lock().unwrap().extend(resident());
        }
    });
    let m = soak.engine.metrics();
    let (calls, refused) = (soak.calls.into_inner(), soak.refused.into_inner());
    println!(
        "{calls} calls, {refused} refused; {} steps, {} preemptions ({} lost), {} waits, {} evictions",
        m.steps, m.preemptions, m.lost_sessions, m.waits, m.cache.evicted_blocks
    );
    assert!(m.steps > 50 && m.preemptions > 0 && m.waits > 0, "{m:?}");
    assert_eq!((m.sessions, m.waiting_calls, m.parked_bytes), (0, 0, 0), "nothing is left of the sessions");
    assert_eq!(m.cache.prefix_blocks, m.cache.evictable_blocks, "no block is in use");
    // what is left is for reuse; with that gone too, no page is in use
    soak.engine.flush_cache();
    let left = soak.engine.cache_stats();
    assert_eq!((left.prefix_blocks, left.pool.used), (0, [0; 3]), "{left:?}");
    let seen = seen.into_inner().unwrap();
    let half = seen.len() / 2;
    if let (Some(&before), Some(&after)) = (seen[..half].iter().max(), seen[half..].iter().max()) {
        println!("resident: at most {} MB in the first half, {} MB in the second", before >> 20, after >> 20);
        assert!(after <= before + SLACK, "memory grows from {before} to {after} bytes");
    }
}

/// Pitfalls 70, 71, 76.
#[test]
fn sixteen_threads_leak_nothing_and_see_no_error() {
    let seconds = std::env::var("DSV4_SOAK_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(SECONDS);
    soak(seconds);
}

/// Pitfalls 70, 71, 76.
#[test]
#[ignore = "ten minutes; part of .ci/full"]
fn sixteen_threads_leak_nothing_in_ten_minutes() {
    soak(600);
}
