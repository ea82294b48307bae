//! Many sessions at once: whatever shares a step, is cancelled, forked, dropped or panics meanwhile, each session's tokens
//! and logits are those of a run alone.
//!
//! On a device (`DSV4_TEST_DEVICE`) too, where engines take one order of sums for all steps.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a failed call is a failed test; figures are printed")]

mod common;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use common::at_end::AtEnd;
use common::golden;
use common::subject;
use common::truth::{Rng, Truth};
use dsv4::{CallOptions, Engine, EngineOptions, ErrorKind, Model, Session, SessionOptions};

/// Longest timeline: two blocks and more than four windows.
const LONGEST: usize = 600;

fn tiny() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("examples/models/tiny-v4")
}

fn engine(folder: &Path, prefill_chunk: usize) -> Arc<Engine> {
    let options = EngineOptions { threads: 2, prefill_chunk, poison_cache: true, ..EngineOptions::default() };
    subject::engine_with(folder, options)
}

/// One thread's program: opens, feeds in pieces of every size, cancels from inside and outside, forks and drops.
fn program(seed: u64, engine: &Arc<Engine>, truth: &Truth, steps: usize) {
    let mut rng = Rng(seed.wrapping_mul(0x9E37_79B9) + 1);
    let length = truth.timelines[0].len();
    let mut sessions: Vec<(Session, usize)> = Vec::new();
    for step in 0..steps {
        let what = format!("program {seed}, step {step}");
        if sessions.is_empty() || (sessions.len() < 3 && rng.next(6) == 0) {
            let mut session = subject::session(engine, length);
            session.set_call_options(CallOptions { priority: rng.next(3) as i32, ..CallOptions::default() });
            sessions.push((session, rng.next(truth.timelines.len())));
        }
        let i = rng.next(sessions.len());
        let (session, timeline) = &mut sessions[i];
        let rest = &truth.timelines[*timeline][session.position()..];
        let size = [1, 1, 1, 2, 5, 40, 130, 256, 300][rng.next(9)].min(rest.len());
        match rng.next(12) {
            0..=6 => session.feed(&rest[..size]).unwrap(),
            7 => {
                let first = session.position();
                let rows = &truth.rows[*timeline];
                let see = |position: usize, logits: &[f32]| {
                    assert!(logits == rows[position], "{what}: logits at {position}, first {first}");
                    Ok(())
                };
                session.feed_all(&rest[..size], &mut { see }).unwrap();
            }
            8 => {
                // from outside, at some moment
                let token = session.cancel_token();
                let pause = Duration::from_micros(rng.next(3000) as u64);
                let result = thread::scope(|scope| {
                    scope.spawn(move || {
                        thread::sleep(pause);
                        token.cancel();
                    });
                    session.feed(&rest[..size])
                });
                session.cancel_token().reset();
                assert!(result.is_ok() || result.unwrap_err().kind() == ErrorKind::Cancelled);
            }
            9 => {
                // from inside, after the first chunk
                let result = session.feed_with(&rest[..size], &mut |_| ControlFlow::Break(()));
                assert!(result.is_ok() || result.unwrap_err().kind() == ErrorKind::Cancelled);
            }
            10 => {
                let fork = session.fork().unwrap();
                let timeline = *timeline;
                if sessions.len() < 4 {
                    sessions.push((fork, timeline));
                }
            }
            _ if rng.next(2) == 0 => drop(sessions.swap_remove(i)),
            _ => {
                let position = rng.next(session.position() + 1);
                session.truncate(position).unwrap();
            }
        }
        if let Some((session, timeline)) = sessions.get(i) {
            truth.check(session, *timeline, &what);
        }
    }
}

fn crowd(folder: &Path, truth: &Truth, threads: usize, steps: usize, prefill_chunk: usize) {
    let engine = engine(folder, prefill_chunk);
    thread::scope(|scope| {
        for i in 0..threads {
            let engine = &engine;
            scope.spawn(move || program((threads * 1000 + i) as u64, engine, truth, steps));
        }
    });
    let stats = engine.cache_stats();
    let held = stats.prefix_blocks - stats.evictable_blocks;
    assert_eq!(held, 0, "{threads} threads: no block is in use when all sessions are gone");
}

/// Pitfalls 70, 71, 73, 76.
#[test]
fn sessions_of_one_to_thirty_two_threads_are_each_as_if_alone() {
    let folder = golden::small();
    let truth = Truth::new(&folder, LONGEST);
    for (threads, steps, chunk) in [(1, 20, 64), (2, 20, 7), (8, 12, 64), (32, 5, 128)] {
        crowd(&folder, &truth, threads, steps, chunk);
    }
}

#[test]
fn sessions_of_a_trained_model_are_each_as_if_alone() {
    let truth = Truth::new(&tiny(), 300);
    for (threads, steps) in [(1, 6), (2, 12), (8, 6), (32, 2)] {
        crowd(&tiny(), &truth, threads, steps, 96);
    }
}

/// The same as users have it, where a device has another order of sums for what is read in long pieces: how many logits
/// differ from those of a run alone is counted, and by how much. On the CPU none does.
#[test]
fn logits_beside_others_that_differ_from_a_run_alone_are_counted() {
    let device = subject::device();
    let options = EngineOptions { threads: 2, prefill_chunk: 96, poison_cache: true, ..EngineOptions::default() };
    let options = match device {
        Some(device) => EngineOptions { device, cache_bytes: 128 << 20, ..options },
        None => options,
    };
    let model = Model::open(tiny()).unwrap();
    let engine = || Engine::new(&model, options.clone()).unwrap();
    let vocab = model.config().vocab_size;
    for count in [1_u64, 2, 8, 32] {
        let (alone, shared) = (engine(), engine());
        let compared: Vec<(usize, usize, f64)> = thread::scope(|scope| {
            let sessions: Vec<_> = (0..count)
                .map(|i| {
                    let mut rng = Rng(1000 * count + i);
                    let tokens: Vec<u32> = (0..40 + rng.next(160)).map(|_| rng.next(vocab) as u32).collect();
                    let cut = tokens.len() - 12;
                    let see = move |engine: &Arc<Engine>| {
                        let mut session = subject::session(engine, tokens.len());
                        session.feed(&tokens[..cut]).unwrap();
                        let mut rows = subject::logits(&session).to_vec();
                        for &token in &tokens[cut..] {
                            // a fork comes and goes
                            drop(session.fork().unwrap());
                            session.feed(&[token]).unwrap();
                            rows.extend_from_slice(subject::logits(&session));
                        }
                        rows
                    };
                    let (want, shared) = (see(&alone), &shared);
                    scope.spawn(move || {
                        let got = see(shared);
                        let differ = got.iter().zip(&want).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
                        let square =
                            |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
                        let error = square(&mut got.iter().zip(&want).map(|(a, b)| a - b));
                        (differ, got.len(), (error / square(&mut want.iter().copied())).sqrt())
                    })
                })
                .collect();
            sessions.into_iter().map(|handle| handle.join().unwrap()).collect()
        });
        let differ: usize = compared.iter().map(|c| c.0).sum();
        let all: usize = compared.iter().map(|c| c.1).sum();
        let worst = compared.iter().map(|c| c.2).fold(0.0, f64::max);
        println!("{count} sessions: {differ} of {all} logits differ from a run alone, error at most {worst:.1e}");
        assert!(device.is_some() || differ == 0, "on the CPU none differs");
        // rounding to FP8 makes much of a last bit
        assert!(worst < 0.3, "{worst:e}");
    }
}

#[test]
#[ignore = "minutes: larger crowds, more steps; part of .ci/full"]
fn larger_crowds_are_each_as_if_alone() {
    for folder in [golden::small(), tiny()] {
        let truth = Truth::new(&folder, LONGEST);
        for chunk in [1, 33, 256] {
            for threads in [2, 8, 32] {
                crowd(&folder, &truth, threads, 40, chunk);
            }
        }
    }
}

/// Pitfall 73: identical prompts at the same time share their blocks.
#[test]
fn identical_prompts_at_the_same_time_give_identical_logits() {
    let folder = golden::small();
    let truth = Truth::new(&folder, LONGEST);
    let engine = engine(&folder, 64);
    let start = Barrier::new(4);
    thread::scope(|scope| {
        for i in 0..4 {
            let (engine, truth, start) = (&engine, &truth, &start);
            scope.spawn(move || {
                let mut session = subject::session(engine, LONGEST);
                start.wait();
                session.feed(&truth.timelines[0][..520]).unwrap();
                truth.check(&session, 0, &format!("thread {i}"));
                for &token in &truth.timelines[0][520..560] {
                    session.feed(&[token]).unwrap();
                    truth.check(&session, 0, &format!("thread {i}"));
                }
            });
        }
    });
}

/// Pitfall 108: at the beginning, in the middle and in the last chunk, from another thread and from inside, alone and among
/// others.
#[test]
fn a_cancelled_prompt_keeps_its_chunks_and_goes_on_to_the_same_logits() {
    let folder = golden::small();
    let truth = Truth::new(&folder, LONGEST);
    let prompt = &truth.timelines[0][..500];
    for others in [0, 3] {
        let engine = engine(&folder, 32);
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..others {
                let (engine, done, truth) = (&engine, &done, &truth);
                scope.spawn(move || {
                    while !done.load(Ordering::Relaxed) {
                        let mut session = subject::session(engine, LONGEST);
                        session.feed(&truth.timelines[1][..20]).unwrap();
                        for &token in &truth.timelines[1][20..60] {
                            session.feed(&[token]).unwrap();
                        }
                        truth.check(&session, 1, "a bystander");
                    }
                });
            }
            let _done = AtEnd(&done);
            // chunks have up to 32 tokens, so 460 are in those before the last
            for (at, outside) in [(5, true), (250, true), (460, true), (5, false), (250, false), (460, false)] {
                let mut session = subject::session(&engine, LONGEST);
                let token = session.cancel_token();
                let mut steps_after = 0;
                let result = session.feed_with(prompt, &mut |progress| {
                    if progress.done >= at {
                        steps_after += 1;
                        if !outside {
                            return ControlFlow::Break(());
                        }
                        thread::scope(|scope| drop(scope.spawn(|| token.cancel())));
                    }
                    ControlFlow::Continue(())
                });
                assert_eq!(steps_after, 1, "cancelled at {at}: no further chunk");
                assert_eq!(result.unwrap_err().kind(), ErrorKind::Cancelled, "cancelled at {at}, {outside}");
                let kept = session.position();
                assert!((at..500).contains(&kept), "cancelled at {at}: {kept} tokens stay");
                session.feed(&prompt[kept..]).unwrap();
                truth.check(&session, 0, &format!("cancelled at {at}"));
            }
        });
        let stats = engine.cache_stats();
        assert_eq!(stats.prefix_blocks - stats.evictable_blocks, 0, "no block leaks");
    }
}

#[test]
fn a_call_beyond_its_time_limit_ends_within_a_chunk_and_can_be_continued() {
    let folder = golden::small();
    let truth = Truth::new(&folder, LONGEST);
    let engine = engine(&folder, 16);
    let mut session = subject::session(&engine, LONGEST);
    let limit = |ms| CallOptions { time_limit: Some(Duration::from_millis(ms)), ..CallOptions::default() };
    session.set_call_options(limit(5));
    let slow = |progress: dsv4::Progress| {
        if progress.done >= 32 {
            thread::sleep(Duration::from_millis(10));
        }
        ControlFlow::Continue(())
    };
    let error = session.feed_with(&truth.timelines[0][..500], &mut { slow }).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    assert!(error.message().contains("time limit"), "{error}");
    assert!(session.position() <= 48, "{} tokens", session.position());
    session.set_call_options(limit(600_000));
    let rest = &truth.timelines[0][session.position()..500];
    session.feed(rest).unwrap();
    truth.check(&session, 0, "after the limit");
}

#[test]
fn a_session_that_only_waits_is_worked_for_by_another_thread() {
    let folder = golden::small();
    let truth = Truth::new(&folder, LONGEST);
    let engine = engine(&folder, 64);
    assert!(!engine.run_waiting_step(), "nothing waits");
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let _done = AtEnd(&done);
            let mut session = subject::session(&engine, LONGEST);
            session.set_call_options(CallOptions { waits_only: true, ..CallOptions::default() });
            session.feed(&truth.timelines[2][..300]).unwrap();
            truth.check(&session, 2, "a session that waits");
        });
        let mut steps = 0;
        while !done.load(Ordering::Relaxed) {
            if engine.run_waiting_step() { steps += 1 } else { thread::yield_now() }
        }
        assert!(steps >= 5, "{steps} steps");
    });
}

/// Fairness, measured in steps: a decoding session's token waits for one step, whatever else is read in the meantime.
#[test]
fn decoding_sessions_get_a_token_in_every_step_of_another_sessions_prompt() {
    let folder = golden::small();
    let truth = Truth::new(&folder, LONGEST);
    let engine = engine(&folder, 64);
    let chunks = AtomicUsize::new(0);
    let (ready, done) = (Barrier::new(4), AtomicBool::new(false));
    thread::scope(|scope| {
        let decoding: Vec<_> = (0..3)
            .map(|_| {
                let (engine, truth, chunks, ready, done) = (&engine, &truth, &chunks, &ready, &done);
                scope.spawn(move || {
                    let mut session = subject::session(engine, LONGEST);
                    session.feed(&truth.timelines[1][..100]).unwrap();
                    ready.wait();
                    let mut waits = Vec::new();
                    for &token in &truth.timelines[1][100..] {
                        let before = chunks.load(Ordering::Relaxed);
                        session.feed(&[token]).unwrap();
                        waits.push(chunks.load(Ordering::Relaxed) - before);
                        if done.load(Ordering::Relaxed) {
                            break;
                        }
                    }
                    truth.check(&session, 1, "a decoding session");
                    waits
                })
            })
            .collect();
        let mut reader = subject::session(&engine, LONGEST);
        ready.wait();
        let at_end = AtEnd(&done);
        reader
            .feed_with(&truth.timelines[4][..], &mut |_| {
                chunks.fetch_add(1, Ordering::Relaxed);
                ControlFlow::Continue(())
            })
            .unwrap();
        drop(at_end);
        truth.check(&reader, 4, "the reader");
        let mut waits: Vec<usize> = decoding.into_iter().flat_map(|handle| handle.join().unwrap()).collect();
        waits.sort_unstable();
        println!("chunks of the prompt between two tokens: {waits:?}");
        // the chunk at work when a token comes, and the one it shares
        assert!(waits[waits.len() * 9 / 10] <= 2, "{waits:?}");
    });
}

/// Fairness at length, measured in steps: undisturbed, a decoding session has a token in every step.
#[test]
#[ignore = "minutes: a prompt of 32,768 tokens; part of .ci/full"]
fn decoding_sessions_wait_less_than_three_steps_for_a_token_while_another_reads_32k_tokens() {
    const PROMPT: usize = 32_768;
    let engine = engine(&tiny(), 256);
    let vocab = engine.model().config().vocab_size;
    let (ready, done) = (Barrier::new(4), AtomicBool::new(false));
    let mut waits: Vec<u64> = thread::scope(|scope| {
        let decoding: Vec<_> = (0..3)
            .map(|i| {
                let (engine, ready, done) = (&engine, &ready, &done);
                scope.spawn(move || {
                    let (mut rng, mut session, mut waits) = (Rng(i), subject::session(engine, 2 * PROMPT), Vec::new());
                    session.feed(&[1; 100]).unwrap();
                    ready.wait();
                    while !done.load(Ordering::Relaxed) && session.remaining() > 0 {
                        let before = engine.metrics().steps;
                        session.feed(&[rng.next(vocab) as u32]).unwrap();
                        waits.push(engine.metrics().steps - before);
                    }
                    waits
                })
            })
            .collect();
        let mut rng = Rng(17);
        let prompt: Vec<u32> = (0..PROMPT).map(|_| rng.next(vocab) as u32).collect();
        let mut reader = subject::session(&engine, PROMPT);
        ready.wait();
        let at_end = AtEnd(&done);
        reader.feed(&prompt).unwrap();
        drop(at_end);
        println!("the prompt was read in {} steps", reader.metrics().steps);
        decoding.into_iter().flat_map(|handle| handle.join().unwrap()).collect()
    });
    waits.sort_unstable();
    let at = |percent: usize| waits[(waits.len() - 1) * percent / 100];
    println!(
        "{} tokens; steps between two: p50 {}, p90 {}, p99 {}, most {}",
        waits.len(),
        at(50),
        at(90),
        at(99),
        at(100)
    );
    assert!(waits.len() > 100 && at(50) < 3 && at(99) < 3, "steps for a token: p50 {}, p99 {}", at(50), at(99));
}

/// Pitfall 111: refused pages are one session's error, with the counts; others in the same steps go on, and so does the
/// refused one when something was freed.
#[test]
fn a_full_cache_refuses_one_session_and_the_others_go_on() {
    let folder = golden::small();
    let truth = Truth::new(&folder, LONGEST);
    let model = Model::open(&folder).unwrap();
    let mut whole = subject::session(&engine(&folder, 64), LONGEST);
    whole.feed(&truth.timelines[0][..520]).unwrap();
    let bytes = whole.cache_bytes();
    let one = bytes.window + bytes.state + bytes.pages;
    // from what is too small for three sessions to what is enough
    let mut refused = 0;
    for tenths in 15..60 {
        let cache_bytes = one * tenths / 10;
        let options =
            EngineOptions { threads: 2, prefill_chunk: 64, cache_bytes, poison_cache: true, ..Default::default() };
        let engine = Engine::new(&model, subject::on_device(options)).unwrap();
        let open = || Session::new(&engine, SessionOptions::default());
        let (Ok(mut large), Ok(mut small), Ok(mut last)) = (open(), open(), open()) else { continue };
        let (prompt, text) = (&truth.timelines[0][..520], &truth.timelines[3][..200]);
        if large.feed(prompt).and_then(|()| small.feed(&text[..180])).is_err() {
            continue;
        }
        let wanted = &truth.timelines[4][..520];
        let result = thread::scope(|scope| {
            scope.spawn(|| {
                for &token in &text[180..] {
                    small.feed(&[token]).unwrap();
                    truth.check(&small, 3, "beside a refused session");
                }
            });
            last.feed(wanted)
        });
        let Err(error) = result else { break };
        assert_eq!(error.kind(), ErrorKind::NoBlocks, "{error}");
        assert!(error.message().contains("free") && error.message().contains("in use"), "{error}");
        refused += 1;
        drop(large);
        last.feed(&wanted[last.position()..]).unwrap();
        truth.check(&last, 4, "after room was made");
    }
    assert!(refused > 0, "the cache is too small for three at some size");
}
