//! Submitted calls: one thread with an event loop has what threads that wait have, bit for bit and in shared steps.
//!
//! On a device (`DSV4_TEST_DEVICE`) too, where engines take one order of sums for all steps.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a failed call is a failed test; figures are printed")]

mod common;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::at_end::AtEnd;
use common::golden;
use common::subject;
use common::truth::{Rng, Truth};
use dsv4::{
    CallOptions, CheckpointPolicy, Engine, EngineOptions, ErrorKind, Event, Finish, GenerateOptions, Markup, Pending,
    Progress, Sampler, SamplerOptions, Session, TokenId, WhenFull,
};

const LONGEST: usize = 600;

fn tiny() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("examples/models/tiny-v4")
}

fn engine(folder: &std::path::Path, prefill_chunk: usize) -> Arc<Engine> {
    // nothing is reused: the tests count what is computed
    let checkpoints = CheckpointPolicy::None;
    let options = EngineOptions { threads: 2, prefill_chunk, checkpoints, poison_cache: true, ..Default::default() };
    subject::engine_with(folder, options)
}

/// Whether the engine's descriptor can be read, after `ms` milliseconds at most.
#[cfg(unix)]
fn is_readable(engine: &Engine, ms: i32) -> bool {
    let mut fd = libc::pollfd { fd: engine.wake_fd().unwrap(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one local.
    unsafe { libc::poll(&raw mut fd, 1, ms) == 1 && fd.revents == libc::POLLIN }
}

/// A loop of one thread that is asleep unless the descriptor wakes it: each call's news, to the end.
#[cfg(unix)]
fn until_all_end(engine: &Engine, mut calls: Vec<Pending>) -> Vec<(Vec<Event>, Pending)> {
    let mut news: Vec<Vec<Event>> = calls.iter().map(|_| Vec::new()).collect();
    while !news.iter().all(|news| matches!(news.last(), Some(Event::End(_)))) {
        assert!(is_readable(engine, 20_000), "the loop sleeps while there is something to do");
        engine.run_waiting_step();
        for (call, news) in calls.iter_mut().zip(&mut news) {
            news.extend(std::iter::from_fn(|| call.poll()));
        }
    }
    news.into_iter().zip(calls).collect()
}

fn end(news: &[Event]) -> Result<Option<Finish>, dsv4::Error> {
    match news.last() {
        Some(Event::End(result)) => result.clone(),
        other => panic!("the last news is {other:?}"),
    }
}

fn prompt(engine: &Engine, text: &str) -> Vec<TokenId> {
    let mut ids = vec![engine.model().config().bos_token_id];
    ids.extend(engine.model().tokenizer().unwrap().encode(text, Markup::Text).unwrap());
    ids
}

const TEXTS: [&str; 8] = [
    "Once upon a time",
    "The little dog",
    "There was a girl who",
    "One day, Tom and his mother went to the park and",
    "A big red ball",
    "Lily had a",
    "The sun was warm, so",
    "It was very cold and the boy",
];

fn sampler(seed: u64) -> Sampler {
    Sampler::new(SamplerOptions { seed, temperature: 0.9, ..SamplerOptions::default() }).unwrap()
}

fn options() -> GenerateOptions {
    GenerateOptions { max_tokens: Some(24), ignore_eos: true, ..GenerateOptions::default() }
}

#[cfg(unix)]
#[test]
fn eight_requests_in_one_threads_loop_share_steps_and_give_what_calls_that_wait_give() {
    let engine = engine(&tiny(), 64);
    let expected: Vec<_> = (0..TEXTS.len())
        .map(|i| {
            let (mut session, mut sampler) = (subject::session(&engine, LONGEST), sampler(i as u64));
            session.feed(&prompt(&engine, TEXTS[i])).unwrap();
            let first = session.logits().unwrap().to_vec();
            let pieces: Vec<_> = session.generate(&mut sampler, options()).unwrap().collect::<Result<_, _>>().unwrap();
            (first, pieces, session.tokens().to_vec(), session.logits().unwrap().to_vec())
        })
        .collect();
    let before = engine.metrics();

    let calls = TEXTS.map(|text| subject::session(&engine, LONGEST).submit(prompt(&engine, text))).into();
    let sessions =
        until_all_end(&engine, calls).into_iter().zip(TEXTS).zip(&expected).map(|(((news, call), text), e)| {
            let total = prompt(&engine, text).len();
            assert_eq!(news, [Event::Progress(Progress { done: total, total }), Event::End(Ok(None))]);
            let session = call.into_parts().unwrap().0;
            assert!(session.logits().unwrap() == e.0);
            session
        });
    let calls = sessions.enumerate().map(|(i, session)| session.submit_generation(sampler(i as u64), options()));
    for ((news, call), (_, pieces, tokens, logits)) in until_all_end(&engine, calls.collect()).into_iter().zip(expected)
    {
        let told: Vec<_> = pieces.into_iter().map(Event::Piece).collect();
        assert_eq!(news[..news.len() - 1], told, "one for each token");
        assert_eq!(end(&news), Ok(Some(Finish::MaxTokens)));
        let (session, sampler) = call.into_parts().unwrap();
        assert_eq!(session.tokens(), tokens);
        assert!(session.logits().unwrap() == logits);
        assert!(sampler.is_some());
    }
    let after = engine.metrics();
    let (steps, sessions) = (after.steps - before.steps, after.batch_sessions.sum() - before.batch_sessions.sum());
    println!("{sessions} calls in {steps} steps");
    assert!(sessions >= 7.0 * steps as f64, "{sessions} calls in {steps} steps");
    engine.run_waiting_step();
    assert!(!is_readable(&engine, 0), "nothing is left to do");
}

/// A loop beside a call that is waited for, as where a program has both.
#[cfg(unix)]
#[test]
fn news_that_a_wait_for_another_call_leaves_wake_the_loop() {
    let engine = engine(&tiny(), 64);
    engine.wake_fd().unwrap();
    // calls that end in a step, and those that end without one
    for token in [5, 1 << 20] {
        let of_loop = subject::session(&engine, LONGEST).submit(vec![token; 40]);
        let mut waited_for = subject::session(&engine, LONGEST).submit(vec![token; 40]);
        while !matches!(waited_for.wait(None), Some(Event::End(_))) {}
        assert!(waited_for.wait(None).is_none());
        let (news, _) = until_all_end(&engine, vec![of_loop]).remove(0);
        assert_eq!(end(&news).is_ok(), token == 5);
    }
    engine.run_waiting_step();
    assert!(!is_readable(&engine, 0), "nothing is left to do");
}

/// A thread in a loop with random submitted calls, beside threads whose calls wait; all are as if alone.
#[cfg(unix)]
#[test]
fn submitted_calls_beside_calls_that_wait_are_each_as_if_alone() {
    let folder = golden::small();
    let truth = Truth::new(&folder, LONGEST);
    let engine = engine(&folder, 64);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for i in 0..3_usize {
            let (engine, truth, done) = (&engine, &truth, &done);
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    let mut session = subject::session(engine, LONGEST);
                    session.feed(&truth.timelines[i][..40 * (i + 1)]).unwrap();
                    for &token in &truth.timelines[i][40 * (i + 1)..][..30] {
                        session.feed(&[token]).unwrap();
                    }
                    truth.check(&session, i, "a call that waits");
                }
            });
        }
        let _done = AtEnd(&done);
        let mut rng = Rng(5);
        let mut sessions: Vec<(Session, usize)> =
            (0..6).map(|i| (subject::session(&engine, LONGEST), i % truth.timelines.len())).collect();
        for round in 0..12 {
            let (calls, cancelled): (Vec<_>, Vec<_>) = sessions
                .drain(..)
                .map(|(session, timeline)| {
                    let rest = &truth.timelines[timeline][session.position()..];
                    let size = [1, 1, 2, 40, 130, 200][rng.next(6)].min(rest.len());
                    let call = session.submit(rest[..size].to_vec());
                    let is_cancelled = rng.next(4) == 0;
                    if is_cancelled {
                        call.cancel_token().cancel();
                    }
                    (call, (timeline, is_cancelled))
                })
                .unzip();
            for ((news, call), (timeline, is_cancelled)) in until_all_end(&engine, calls).into_iter().zip(cancelled) {
                match end(&news) {
                    Ok(None) => {}
                    Err(e) => assert!(is_cancelled && e.kind() == ErrorKind::Cancelled, "{e}"),
                    other => panic!("{other:?}"),
                }
                let session = call.into_parts().unwrap().0;
                session.cancel_token().reset();
                truth.check(&session, timeline, &format!("a submitted call, round {round}"));
                sessions.push((session, timeline));
            }
        }
    });
}

/// Cancelled or dropped at the beginning, in the middle and in the last chunk, while another thread may have it in a step:
/// what is complete stays usable, and no block leaks.
#[test]
fn a_submitted_call_that_is_cancelled_or_dropped_leaves_its_chunks_and_no_block() {
    let folder = golden::small();
    let truth = Truth::new(&folder, LONGEST);
    let prompt = &truth.timelines[0][..500];
    for has_leader in [false, true] {
        let engine = engine(&folder, 32);
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            let _done = AtEnd(&done);
            if has_leader {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        subject::session(&engine, LONGEST).feed(&truth.timelines[1][..70]).unwrap();
                    }
                });
            }
            // chunks have up to 32 tokens, so 460 are in those before the last
            for at in [0, 5, 250, 460] {
                for how in ["cancelled", "taken back", "dropped"] {
                    let what = format!("{how} at {at}, {has_leader}");
                    let mut call = subject::session(&engine, LONGEST).submit(prompt.to_vec());
                    let mut seen = 0;
                    while seen < at {
                        match call.wait(Some(Duration::from_secs(20))) {
                            Some(Event::Progress(progress)) => seen = progress.done,
                            other => panic!("{what}: {other:?}"),
                        }
                    }
                    if how == "dropped" {
                        drop(call);
                        continue;
                    }
                    if how == "cancelled" {
                        call.cancel_token().cancel();
                        let result = loop {
                            match call.wait(None) {
                                Some(Event::End(result)) => break result,
                                Some(Event::Progress(progress)) => assert!(progress.done <= seen + 64, "{what}"),
                                other => panic!("{what}: {other:?}"),
                            }
                        };
                        match result {
                            Err(error) => assert_eq!(error.kind(), ErrorKind::Cancelled, "{what}"),
                            // the other thread had its last chunk before the cancel
                            Ok(_) => assert!(has_leader && at == 480, "{what}"),
                        }
                        call.cancel_token().reset();
                    }
                    let mut session = call.into_parts().unwrap().0;
                    assert!((seen..=seen + 64).contains(&session.position()), "{what}: {}", session.position());
                    let rest = &prompt[session.position()..];
                    session.feed(rest).unwrap();
                    truth.check(&session, 0, &what);
                }
            }
        });
        let stats = engine.cache_stats();
        assert_eq!(stats.prefix_blocks - stats.evictable_blocks, 0, "no block leaks");
        assert_eq!(engine.metrics().sessions, 0);
    }
}

#[test]
fn a_generation_that_is_taken_back_goes_on_with_the_same_tokens() {
    let engine = engine(&tiny(), 64);
    let text = prompt(&engine, TEXTS[0]);
    let mut session = subject::session(&engine, LONGEST);
    session.feed(&text).unwrap();
    let mut fork = session.fork().unwrap();
    let expected: Vec<_> =
        fork.generate(&mut sampler(1), options()).unwrap().map(|piece| piece.unwrap().token).collect();

    let mut call = session.submit_generation(sampler(1), options());
    let mut tokens = Vec::new();
    while tokens.len() < 10 {
        match call.wait(None) {
            Some(Event::Piece(piece)) => tokens.push(piece.token),
            other => panic!("{other:?}"),
        }
    }
    let (mut session, sampler) = call.into_parts().unwrap();
    let (mut sampler, last) = (sampler.unwrap(), *tokens.last().unwrap());
    // at most one more was chosen than was fetched
    let known = session.position() - text.len();
    assert!((known == 9 || known == 10) && session.tokens()[text.len()..] == expected[..known]);
    if known == 9 {
        session.feed(&[last]).unwrap();
    }
    let rest = GenerateOptions { max_tokens: Some(24 - 10), ..options() };
    let rest: Vec<_> = session.generate(&mut sampler, rest).unwrap().map(|piece| piece.unwrap().token).collect();
    if known == 9 {
        assert_eq!(tokens.into_iter().chain(rest).collect::<Vec<_>>(), expected);
    }
}

#[test]
fn a_submitted_call_ends_at_its_time_limit_which_begins_when_it_is_submitted() {
    let engine = engine(&tiny(), 64);
    let limit = |ms| CallOptions { time_limit: Some(Duration::from_millis(ms)), ..CallOptions::default() };
    let mut session = subject::session(&engine, LONGEST);
    session.set_call_options(limit(20));
    let mut call = session.submit(vec![5; 300]);
    thread::sleep(Duration::from_millis(25));
    let Some(Event::End(Err(error))) = call.wait(None) else { panic!("it is late") };
    assert!(error.kind() == ErrorKind::Cancelled && error.message().contains("time limit"), "{error}");
    let mut session = call.into_parts().unwrap().0;
    assert_eq!(session.position(), 0);
    session.set_call_options(limit(600_000));
    let mut call = session.submit(vec![5; 300]);
    while !matches!(call.wait(None), Some(Event::End(Ok(None)))) {}
    assert_eq!(call.into_parts().unwrap().0.position(), 300);
}

#[test]
fn what_a_call_would_refuse_is_told_at_the_end_and_the_session_comes_back() {
    let engine = engine(&tiny(), 64);
    let refused = |call: Pending| {
        let mut call = call;
        let Some(Event::End(Err(error))) = call.wait(None) else { panic!("it is refused") };
        assert!(call.poll().is_none(), "nothing comes behind the end");
        (call.into_parts().unwrap().0, error)
    };
    let (session, error) = refused(subject::session(&engine, 10).submit(vec![1 << 20]));
    assert!(error.kind() == ErrorKind::InvalidArgument && error.message().contains("1048576"), "{error}");
    let (session, error) = refused(session.submit(vec![5; 11]));
    assert_eq!(error.kind(), ErrorKind::ContextFull);
    let (session, error) = refused(session.submit_generation(sampler(0), options()));
    assert!(error.message().contains("no logits"), "{error}");
    assert_eq!(session.position(), 0);
    // a full cache is the call's own too
    let tight = EngineOptions { cache_bytes: 1 << 20, threads: 2, when_full: WhenFull::Refuse, ..Default::default() };
    let tight = subject::engine_with(&tiny(), tight);
    if let Ok(session) = Session::new(&tight, Default::default()) {
        assert_eq!(refused(session.submit(vec![5; 60_000])).1.kind(), ErrorKind::NoBlocks);
    }
}

#[cfg(unix)]
#[test]
fn the_descriptor_wakes_a_loop_that_works_for_threads_which_only_wait() {
    let engine = engine(&tiny(), 64);
    assert!(!is_readable(&engine, 0));
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut session = subject::session(&engine, LONGEST);
            session.set_call_options(CallOptions { waits_only: true, ..CallOptions::default() });
            session.feed(&[5; 300]).unwrap();
            done.store(true, Ordering::Relaxed);
        });
        let begun = Instant::now();
        while !done.load(Ordering::Relaxed) && begun.elapsed() < Duration::from_secs(20) {
            if is_readable(&engine, 50) {
                engine.run_waiting_step();
            }
        }
        assert!(done.load(Ordering::Relaxed), "it was woken for each step");
    });
    engine.run_waiting_step();
    assert!(!is_readable(&engine, 0));
}

/// Sessions that are waited for by nobody come and go on many threads, each of which works and fetches its own.
#[test]
fn calls_that_wait_for_their_own_news_work_for_each_other() {
    let folder = golden::small();
    let truth = Truth::new(&folder, LONGEST);
    let engine = engine(&folder, 64);
    thread::scope(|scope| {
        for i in 0..4_usize {
            let (engine, truth) = (&engine, &truth);
            scope.spawn(move || {
                let mut session = subject::session(engine, LONGEST);
                for size in [100, 1, 1, 30, 1, 70, 1] {
                    let rest = truth.timelines[i][session.position()..][..size].to_vec();
                    let mut call = session.submit(rest);
                    while !matches!(call.wait(Some(Duration::from_secs(20))).expect("news"), Event::End(Ok(None))) {}
                    session = call.into_parts().unwrap().0;
                    truth.check(&session, i, "a call that waits for its news");
                }
            });
        }
    });
}
