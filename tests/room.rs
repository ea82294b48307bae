//! Sessions that do not all fit into the cache: they wait, give their pages up and have them back, are refused with the
//! counts or made smaller; whatever happens to a session's pages, its logits are those of a run alone, bit for bit.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a failed call is a failed test; figures are printed")]

mod common;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, LazyLock, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use common::golden;
use common::subject;
use common::truth::{Rng, Truth};
use dsv4::{
    CallOptions, DegradedMode, Engine, EngineMetrics, EngineOptions, ErrorKind, Session, SessionOptions, WhenFull,
};

/// Bytes by which a cache on a device grows.
const SLAB: u64 = 635_392;
/// Longest timeline: two blocks and a part.
const LONGEST: usize = 600;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(golden::small);
static TRUTH: LazyLock<Truth> = LazyLock::new(|| Truth::new(&FOLDER, LONGEST));
/// Bytes of pages of a session of that length, and of one of a single block.
static BYTES: LazyLock<(u64, u64)> = LazyLock::new(|| {
    let bytes = |tokens: usize| {
        let mut session = subject::session(&engine_of(0, |_| {}), LONGEST);
        session.feed(&TRUTH.timelines[0][..tokens]).unwrap();
        let bytes = session.cache_bytes();
        bytes.window + bytes.state + bytes.pages
    };
    (bytes(LONGEST), bytes(100))
});

fn engine_of(cache_bytes: u64, change: impl FnOnce(&mut EngineOptions)) -> Arc<Engine> {
    let mut options =
        EngineOptions { threads: 1, prefill_chunk: 64, cache_bytes, poison_cache: true, ..EngineOptions::default() };
    change(&mut options);
    if subject::device().is_some() && options.cache_bytes != 0 {
        // pages of each size have slabs of their own there: one more for each of the two that have fewest
        options.cache_bytes = (options.cache_bytes.div_ceil(SLAB) + 2) * SLAB;
    }
    subject::engine_with(Path::new(&*FOLDER), options)
}

/// An engine whose cache has room for `tenths` tenths of a session of [`LONGEST`] tokens, whose calls wait.
fn tight(tenths: u64, session_bytes: u64) -> Arc<Engine> {
    engine_of(BYTES.0 * tenths / 10, |options| {
        options.when_full = WhenFull::Wait;
        options.tiers.session_bytes = session_bytes;
    })
}

fn open(engine: &Arc<Engine>) -> Session {
    Session::new(engine, SessionOptions { context: LONGEST, ..Default::default() }).unwrap()
}

/// Everything is given back when all sessions are gone.
fn is_empty(engine: &Engine) -> EngineMetrics {
    let m = engine.metrics();
    assert_eq!((m.sessions, m.waiting_calls, m.parked_bytes), (0, 0, 0));
    assert_eq!(m.cache.prefix_blocks, m.cache.evictable_blocks, "no block is in use");
    m
}

/// One thread's program over at most `own` sessions, all of whose calls wait. `is_sure`: none may be refused.
fn program(seed: u64, engine: &Arc<Engine>, own: usize, steps: usize, is_sure: bool, refused: &AtomicUsize) {
    let truth = &*TRUTH;
    let mut rng = Rng(seed.wrapping_mul(0x9E37_79B9) + 5);
    let mut sessions: Vec<(Session, usize)> = Vec::new();
    for step in 0..steps {
        let what = format!("program {seed}, step {step}");
        if sessions.is_empty() || (sessions.len() < own && rng.next(3) == 0) {
            let mut session = open(engine);
            session.set_call_options(CallOptions { priority: rng.next(2) as i32, ..CallOptions::default() });
            sessions.push((session, rng.next(truth.timelines.len())));
        }
        let i = rng.next(sessions.len());
        let may_fork = sessions.len() < own;
        let (session, timeline) = &mut sessions[i];
        let (at, timeline) = (session.position(), *timeline);
        let size = [1, 1, 2, 9, 130, 300, 500][rng.next(7)].min(LONGEST - at);
        let rest = &truth.timelines[timeline][at..at + size];
        let result = match rng.next(12) {
            0..=7 => session.feed(rest),
            8 => session.feed_all(rest, &mut |position, logits| {
                assert!(logits == truth.rows[timeline][position], "{what}: logits at {position}");
                Ok(())
            }),
            9 => session.truncate(rng.next(at + 1)),
            10 if may_fork => session.fork().map(|fork| sessions.push((fork, timeline))),
            10 => {
                let token = session.cancel_token();
                token.cancel();
                let result = session.feed(rest);
                token.reset();
                assert!(
                    result.as_ref().is_ok_and(|()| rest.is_empty() || session.logits().is_some()) || result.is_err()
                );
                match result {
                    Err(e) if e.kind() == ErrorKind::Cancelled => Ok(()),
                    other => other,
                }
            }
            _ => {
                drop(sessions.swap_remove(i));
                continue;
            }
        };
        match result {
            Ok(()) => truth.check(&sessions[i].0, timeline, &what),
            Err(e) => {
                assert!(e.kind() == ErrorKind::NoBlocks && !is_sure, "{what}: {e}");
                assert!(e.message().contains("the cache is full"), "{e}");
                refused.fetch_add(1, Ordering::Relaxed);
                sessions.clear();
            }
        }
    }
}

fn crowd(engine: &Arc<Engine>, threads: usize, own: usize, steps: usize, is_sure: bool) -> (EngineMetrics, usize) {
    let refused = AtomicUsize::new(0);
    thread::scope(|scope| {
        for i in 0..threads {
            let (engine, refused) = (&engine, &refused);
            scope.spawn(move || program((threads * 100 + own * 10 + i) as u64, engine, own, steps, is_sure, refused));
        }
    });
    (is_empty(engine), refused.into_inner())
}

/// Pitfalls 70, 71, 76: with pages for two and a half of six to twelve sessions.
#[test]
fn sessions_that_are_preempted_and_brought_back_are_each_as_if_alone() {
    let (m, _) = crowd(&tight(25, 1 << 30), 6, 2, 16, true);
    println!("{} preemptions, {} came back, {} waits", m.preemptions, m.restored_sessions, m.waits);
    assert!(m.preemptions > 0 && m.restored_sessions > 0, "{m:?}");
    assert_eq!((m.lost_sessions, m.refused_calls), (0, 0));
}

/// Pitfalls 70, 71, 76: with a place in host memory for one of them.
#[test]
fn sessions_that_are_preempted_and_lost_are_each_as_if_alone() {
    let (m, _) = crowd(&tight(25, BYTES.0), 6, 2, 12, true);
    println!("{} preemptions, {} were lost, {} waits", m.preemptions, m.lost_sessions, m.waits);
    assert!(m.preemptions > 0 && m.lost_sessions > 0, "{m:?}");
    assert_eq!(m.refused_calls, 0);
}

/// Pitfalls 71, 111: without preemption some wait for each other; then one is refused and makes room.
#[test]
fn sessions_that_wait_for_room_never_wait_for_each_other() {
    let (m, refused) = crowd(&tight(25, 0), 6, 1, 12, false);
    println!("{} waits, {} refused", m.waits, m.refused_calls);
    assert!(m.waits > 0, "{m:?}");
    assert_eq!((m.preemptions, m.refused_calls), (0, refused as u64));
}

#[test]
#[ignore = "minutes: larger crowds, more steps; part of .ci/full"]
fn larger_crowds_in_tighter_caches_are_each_as_if_alone() {
    for tenths in [12, 20, 40] {
        for bytes in [1, 3 * BYTES.0, 1 << 30] {
            crowd(&tight(tenths, bytes), 12, 3, 60, true);
        }
        crowd(&tight(tenths, 0), 12, 1, 60, false);
    }
}

#[test]
fn one_thread_goes_round_more_sessions_than_fit() {
    let truth = &*TRUTH;
    for session_bytes in [1 << 30, 1] {
        let engine = engine_of(BYTES.0 * 22 / 10, |options| options.tiers.session_bytes = session_bytes);
        let options = SessionOptions { context: LONGEST, rollback: 2 };
        let mut sessions: Vec<Session> = (0..4).map(|_| Session::new(&engine, options).unwrap()).collect();
        for (i, session) in sessions.iter_mut().enumerate() {
            session.feed(&truth.timelines[i][..300 + 10 * i]).unwrap();
        }
        for _ in 0..3 {
            for (i, session) in sessions.iter_mut().enumerate() {
                session.feed(&[truth.timelines[i][session.position()]]).unwrap();
                truth.check(session, i, "round about");
            }
        }
        // all that can be done with a session whose pages are elsewhere
        assert!(sessions.iter().any(|s| s.cache_bytes().pages == 0), "somebody's pages were taken");
        let folder = tempfile::tempdir().unwrap();
        for (i, session) in sessions.iter_mut().enumerate() {
            session.fork().unwrap().feed(&truth.timelines[i][session.position()..][..10]).unwrap();
            session.save(folder.path().join(format!("{i}"))).unwrap();
            let at = session.position();
            session.truncate(at - 2).unwrap();
            truth.check(session, i, "taken back");
            session.truncate(270).unwrap();
            truth.check(session, i, "truncated");
            let again = Session::restore(&engine, folder.path().join(format!("{i}")), options).unwrap();
            assert_eq!(again.position(), at);
            truth.check(&again, i, "restored");
        }
        sessions[0].clear().unwrap();
        sessions[0].feed(&truth.timelines[3][..280]).unwrap();
        truth.check(&sessions[0], 3, "cleared");
        let (m, of_sessions) = (engine.metrics(), sessions.iter().map(Session::metrics).collect::<Vec<_>>());
        assert!(m.preemptions >= 8, "{m:?}");
        assert!(of_sessions.iter().all(|s| s.preemptions > 0), "{of_sessions:?}");
        assert_eq!(m.lost_sessions > 0, session_bytes == 1, "{m:?}");
        assert_eq!(of_sessions.iter().any(|s| s.recomputed_tokens > 0), session_bytes == 1, "{of_sessions:?}");
        drop(sessions);
        is_empty(&engine);
    }
}

#[test]
fn readers_of_a_session_whose_pages_were_taken_have_them_back_together() {
    let truth = &*TRUTH;
    for session_bytes in [1 << 30, 1] {
        let engine = engine_of(BYTES.0 * 19 / 10, |options| options.tiers.session_bytes = session_bytes);
        let (mut read, mut other) = (open(&engine), open(&engine));
        read.feed(&truth.timelines[0][..530]).unwrap();
        other.feed(&truth.timelines[4][..550]).unwrap();
        for round in 0..4 {
            other.feed(&truth.timelines[4][550 + round..][..1]).unwrap();
            assert_eq!(read.cache_bytes().pages, 0, "its pages were taken");
            let begin = Barrier::new(4);
            let forks: Vec<Session> = thread::scope(|scope| {
                let fork = || {
                    begin.wait();
                    read.fork().unwrap()
                };
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(fork)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            for mut fork in forks {
                fork.feed(&truth.timelines[0][530..532]).unwrap();
                truth.check(&fork, 0, "a fork of many");
            }
        }
        read.feed(&truth.timelines[0][530..540]).unwrap();
        truth.check(&read, 0, "read by many");
    }
}

#[test]
fn idle_sessions_of_low_priority_give_their_pages_up_before_others() {
    let truth = &*TRUTH;
    let engine = engine_of(BYTES.0 * 25 / 10, |options| options.tiers.session_bytes = 1 << 30);
    let (mut first, mut second, mut third) = (open(&engine), open(&engine), open(&engine));
    first.set_call_options(CallOptions { priority: 5, ..CallOptions::default() });
    first.feed(&truth.timelines[0][..550]).unwrap();
    second.feed(&truth.timelines[3][..550]).unwrap();
    third.feed(&truth.timelines[4][..550]).unwrap();
    assert_eq!((first.metrics().preemptions, second.metrics().preemptions), (0, 1));
}

#[test]
fn a_prompt_that_its_caller_ends_gives_back_what_it_was_promised() {
    let truth = &*TRUTH;
    let engine = engine_of(BYTES.0 * 17 / 10, |options| options.when_full = WhenFull::Refuse);
    let (mut first, mut second) = (open(&engine), open(&engine));
    first.set_call_options(CallOptions { reserve: 400, ..CallOptions::default() });
    let error = first.feed_with(&truth.timelines[3][..200], &mut |_| ControlFlow::Break(())).unwrap_err();
    assert_eq!((error.kind(), first.position()), (ErrorKind::Cancelled, 64));
    second.feed(&truth.timelines[4][..550]).unwrap();
    truth.check(&second, 4, "beside one that was ended");
}

#[test]
fn the_largest_limits_priorities_and_reserves_are_as_good_as_any() {
    let truth = &*TRUTH;
    for when_full in [WhenFull::Evict, WhenFull::Refuse, WhenFull::Wait] {
        let engine = engine_of(0, |options| {
            options.cache_bytes = if subject::device().is_none() { u64::MAX } else { options.cache_bytes };
            options.tiers.session_bytes = u64::MAX;
            options.when_full = when_full;
        });
        for priority in [i32::MIN, i32::MAX] {
            let mut session = open(&engine);
            session.set_call_options(CallOptions {
                priority,
                time_limit: Some(Duration::MAX),
                reserve: usize::MAX,
                ..CallOptions::default()
            });
            session.feed(&truth.timelines[1][..70]).unwrap();
            truth.check(&session, 1, "with the largest options");
        }
        engine.metrics().to_prometheus();
    }
}

#[test]
fn a_prompts_end_that_is_marked_and_kept_for_others_counts_as_room_once_it_is_left() {
    let truth = &*TRUTH;
    let block = (BYTES.0 - BYTES.1) / 2;
    let state = BYTES.1 - block;
    let engine = engine_of(2 * BYTES.0 + state / 2, |options| {
        options.when_full = WhenFull::Refuse;
        options.checkpoint_bytes = u64::MAX;
    });
    let (mut first, mut second) = (open(&engine), open(&engine));
    first.feed(&truth.timelines[0][..512]).unwrap();
    first.feed(&truth.timelines[0][512..513]).unwrap();
    assert_eq!(engine.cache_stats().checkpoints, 1);
    second.feed(&truth.timelines[4][..550]).unwrap();
    truth.check(&second, 4, "in the place of a mark");
    truth.check(&first, 0, "without its mark");
}

/// Pitfall 111.
#[test]
fn a_prompt_is_refused_whole_with_the_counts_and_its_reserve_is_kept() {
    let engine = engine_of(BYTES.0 * 16 / 10, |options| options.when_full = WhenFull::Refuse);
    let truth = &*TRUTH;
    let (mut first, mut second) = (open(&engine), open(&engine));
    first.set_call_options(CallOptions { reserve: 400, ..CallOptions::default() });
    first.feed(&truth.timelines[3][..200]).unwrap();
    // what is promised to the first is not there for the second, although nobody has it
    let error = second.feed(&truth.timelines[4][..550]).unwrap_err();
    assert_eq!((error.kind(), second.position()), (ErrorKind::NoBlocks, 0));
    for part in ["tokens 0 to 550", "blocks", "promised to others", "2 sessions"] {
        assert!(error.message().contains(part), "{part}: {error}");
    }
    let m = engine.metrics();
    assert_eq!((m.refused_admissions, m.refused_calls, m.prefill_tokens), (1, 1, 200));
    for &token in &truth.timelines[3][200..LONGEST] {
        first.feed(&[token]).unwrap();
    }
    truth.check(&first, 3, "within its reserve");
    drop(first);
    second.feed(&truth.timelines[4][..550]).unwrap();
    truth.check(&second, 4, "after room was made");
    // what can never fit is refused at once, also where calls wait
    let small = tight(9, 0);
    let error = open(&small).feed(&truth.timelines[0][..590]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoBlocks);
    assert!(error.message().contains("590 tokens of one session"), "{error}");
}

#[test]
fn a_call_that_waits_ends_with_its_time_limit_a_cancel_or_room() {
    let truth = &*TRUTH;
    let engine = tight(15, 0);
    let (mut holder, mut waiting) = (open(&engine), open(&engine));
    holder.feed(&truth.timelines[0][..550]).unwrap();
    let limit = CallOptions { time_limit: Some(Duration::from_millis(50)), ..CallOptions::default() };
    waiting.set_call_options(limit);
    let start = Instant::now();
    let error = waiting.feed(&truth.timelines[4][..500]).unwrap_err();
    assert_eq!((error.kind(), waiting.position()), (ErrorKind::Cancelled, 0), "{error}");
    assert!(start.elapsed() >= Duration::from_millis(50));
    waiting.set_call_options(CallOptions::default());
    let token = waiting.cancel_token();
    let later = |engine: &Engine, what: &dyn Fn()| {
        while engine.metrics().waiting_calls == 0 {
            thread::yield_now();
        }
        what();
    };
    thread::scope(|scope| {
        scope.spawn(|| later(&engine, &|| token.cancel()));
        assert_eq!(waiting.feed(&truth.timelines[4][..500]).unwrap_err().kind(), ErrorKind::Cancelled);
    });
    assert_eq!(engine.metrics().waiting_calls, 0);
    let holder = Mutex::new(Some(holder));
    thread::scope(|scope| {
        scope.spawn(|| later(&engine, &|| drop(holder.lock().unwrap().take())));
        waiting.feed(&truth.timelines[4][..500]).unwrap();
    });
    truth.check(&waiting, 4, "after a wait");
    let m = engine.metrics();
    assert_eq!((m.waits, m.refused_calls), (3, 0));
}

#[test]
fn calls_that_wait_go_in_order_of_priority_and_age() {
    let truth = &*TRUTH;
    let engine = tight(17, 0);
    let mut holder = open(&engine);
    holder.feed(&truth.timelines[0][..550]).unwrap();
    let order = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for (i, priority) in [0, 0, 5, 0].into_iter().enumerate() {
            let (engine, order) = (&engine, &order);
            scope.spawn(move || {
                let mut session = open(engine);
                session.set_call_options(CallOptions { priority, ..CallOptions::default() });
                // only one of these fits at a time
                session.feed(&truth.timelines[3][..520]).unwrap();
                order.lock().unwrap().push(i);
                truth.check(&session, 3, "in its turn");
            });
            while engine.metrics().waiting_calls <= i as u64 {
                thread::yield_now();
            }
        }
        drop(holder);
    });
    assert_eq!(order.into_inner().unwrap(), [2, 0, 1, 3]);
    is_empty(&engine);
}

#[test]
fn a_prompt_that_waits_has_the_pages_of_a_session_that_is_idle_for_a_while() {
    let truth = &*TRUTH;
    let engine = tight(17, 1 << 30);
    let mut idle = open(&engine);
    idle.feed(&truth.timelines[0][..530]).unwrap();
    let mut waiting = open(&engine);
    waiting.feed(&truth.timelines[4][..590]).unwrap();
    truth.check(&waiting, 4, "after a wait");
    assert_eq!(idle.cache_bytes().pages, 0);
    assert_eq!(idle.metrics().preemptions, 1);
    idle.feed(&truth.timelines[0][530..560]).unwrap();
    truth.check(&idle, 0, "brought back");
}

#[test]
fn under_load_new_sessions_are_smaller_and_the_metrics_say_so() {
    let truth = &*TRUTH;
    let mode = DegradedMode { load_percent: 40, context: 64, chunk: 16 };
    let engine = engine_of(BYTES.0 * 20 / 10, |options| options.degraded = Some(mode));
    let mut first = open(&engine);
    first.feed(&truth.timelines[0][..550]).unwrap();
    assert!(!first.metrics().is_degraded);
    let mut second = open(&engine);
    let m = engine.metrics();
    assert!(m.is_degraded && m.load_percent >= 40 && m.degraded_sessions == 1, "{m:?}");
    assert!(m.to_prometheus().contains("\ndsv4_degraded 1\n"));
    assert_eq!(second.context(), 64);
    second.feed(&truth.timelines[1][..64]).unwrap();
    truth.check(&second, 1, "a smaller session");
    let s = second.metrics();
    assert_eq!((s.is_degraded, s.steps, s.prefill_tokens), (true, 4, 64), "16 tokens a step");
    assert_eq!(second.feed(&[1]).unwrap_err().kind(), ErrorKind::ContextFull);
    drop((first, second));
    engine.cache_stats();
    assert_eq!(open(&engine).context(), LONGEST, "the load is over");
}

#[test]
fn steps_shrink_before_anything_is_refused() {
    let truth = &*TRUTH;
    let engine = engine_of(BYTES.0 * 21 / 10, |_| {});
    let mut first = open(&engine);
    first.feed(&truth.timelines[0][..590]).unwrap();
    assert_eq!((first.metrics().steps, engine.metrics().pressure), (10, 0));
    let mut second = open(&engine);
    second.feed(&truth.timelines[4][..590]).unwrap();
    truth.check(&second, 4, "under pressure");
    let m = engine.metrics();
    assert!(m.pressure >= 2, "{m:?}");
    assert_eq!(m.refused_calls, 0);
}

/// Figures prove the sharing.
#[test]
fn metrics_count_what_was_shared_batched_and_waited_for() {
    let truth = &*TRUTH;
    let engine = engine_of(0, |_| {});
    let mut sessions: Vec<Session> = (0..4).map(|_| open(&engine)).collect();
    for session in &mut sessions {
        session.feed(&truth.timelines[0][..550]).unwrap();
    }
    let m = engine.metrics();
    assert_eq!(m.prefill_tokens, 550 + 3 * (550 - 512), "three start behind two blocks of the first");
    assert_eq!((m.cache.lookup_tokens, m.cache.hit_tokens), (4 * 550, 3 * 512));
    assert_eq!((m.sessions, m.decode_tokens), (4, 0));
    let apart = 4 * sessions[0].cache_bytes().pages;
    assert!(m.cache.pool.used_bytes < apart + 8 * BYTES.1, "{} bytes", m.cache.pool.used_bytes);
    thread::scope(|scope| {
        for session in &mut sessions {
            scope.spawn(move || {
                for &token in &truth.timelines[0][550..580] {
                    session.feed(&[token]).unwrap();
                }
                truth.check(session, 0, "beside others");
            });
        }
    });
    let m = engine.metrics();
    assert_eq!(m.decode_tokens, 4 * 30);
    assert_eq!(m.batch_sessions.sum() as u64, m.queue_seconds.count(), "each part of a step was waited for");
    assert_eq!((m.steps, m.failed_steps), (m.step_seconds.count(), 0));
    assert_eq!(m.first_token_seconds.count(), 4);
    assert_eq!(m.token_seconds.count(), 4 * 30);
    assert!(m.step_seconds.p50() > 0.0 && m.step_seconds.p50() <= m.step_seconds.p99());
    let s = sessions[1].metrics();
    assert_eq!((s.prefill_tokens, s.decode_tokens, s.reused_tokens, s.preemptions), (38, 30, 512, 0));
    assert!(s.steps >= 31 && s.first_token.is_some() && s.in_steps > Duration::ZERO, "{s:?}");
    check_exposition(&m.to_prometheus());
}

/// Parses the text as a scraper does.
fn check_exposition(text: &str) {
    let mut kinds = std::collections::BTreeMap::new();
    let mut seen = std::collections::BTreeSet::new();
    let mut below = 0.0;
    assert!(text.ends_with('\n'));
    for line in text.lines() {
        if let Some(comment) = line.strip_prefix("# ") {
            let mut words = comment.splitn(3, ' ');
            let (what, name, rest) = (words.next().unwrap(), words.next().unwrap(), words.next().unwrap());
            match what {
                "HELP" => assert!(!rest.is_empty()),
                "TYPE" => {
                    assert!(["counter", "gauge", "histogram"].contains(&rest), "{line}");
                    assert!(kinds.insert(name, rest).is_none(), "{name} twice");
                    assert_eq!(rest == "counter", name.ends_with("_total"), "{name}");
                }
                _ => panic!("{line}"),
            }
            continue;
        }
        let (name, value) = line.rsplit_once(' ').unwrap();
        let value: f64 = value.parse().unwrap();
        assert!(value >= 0.0 && seen.insert(name), "{line}");
        let (name, labels) = match name.split_once('{') {
            Some((name, labels)) => (name, labels.strip_suffix('}').unwrap()),
            None => (name, ""),
        };
        assert!(
            name.starts_with("dsv4_") && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
        );
        assert!(labels.is_empty() || (labels.contains("=\"") && labels.ends_with('"')), "{line}");
        let family = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
        let kind = kinds.get(family).or_else(|| kinds.get(name)).unwrap_or_else(|| panic!("{name} has no type"));
        if *kind == "histogram" && name.ends_with("_bucket") {
            below = if labels == "le=\"0.0001\"" || labels == "le=\"1\"" && value < below { 0.0 } else { below };
            assert!(value >= below, "{line}: buckets are cumulative");
            below = if labels == "le=\"+Inf\"" { 0.0 } else { value };
        }
    }
    for name in ["dsv4_tokens_total", "dsv4_step_seconds", "dsv4_cache_used_pages", "dsv4_preemptions_total"] {
        assert!(kinds.contains_key(name), "{name} is missing");
    }
}
