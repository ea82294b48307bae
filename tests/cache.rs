//! The cache, driven by random programs: whatever sessions do, fork, truncate, save and restore included, their logits
//! are those of a cold session that was fed the same tokens, bit for bit, with tiers behind the pages and without.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a failed call is a failed test; seeds are printed")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::golden;
use common::subject;
use dsv4::cache::tier::{Prefetch, TierOptions};
use dsv4::cache::{CacheLayout, CachePlan, CheckpointPolicy};
use dsv4::{Engine, EngineOptions, ErrorKind, SaveOptions, Session, SessionOptions};

/// Programs per run; `DSV4_CACHE_PROGRAMS` sets more.
const PROGRAMS: u64 = 240;
/// Programs that run at the same time.
const SIDE_BY_SIDE: u64 = 2;
/// Longest timeline: several blocks, several windows, two c128 entries per block.
const LONGEST: usize = 900;

fn nano() -> std::path::PathBuf {
    golden::small()
}

struct Rng(u64);

impl Rng {
    fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % below
    }

    /// Lengths that straddle the boundaries that matter.
    fn length(&mut self) -> usize {
        let near = [1, 2, 4, 8, 16, 127, 128, 255, 256, 257, 300, 384, 512];
        let base = near[self.next(near.len())];
        (base + self.next(3)).saturating_sub(1).max(1)
    }
}

/// Cold logits of prefixes of a few fixed timelines, computed once.
struct Truth {
    timelines: Vec<Vec<u32>>,
    rows: Vec<Vec<Vec<f32>>>,
}

impl Truth {
    /// Timelines that share beginnings: timeline i leaves timeline 0 at its fork point.
    fn new(engine: &Arc<Engine>) -> Self {
        let vocab = engine.model().config().vocab_size;
        let mut rng = Rng(7);
        let trunk: Vec<u32> = (0..LONGEST).map(|_| rng.next(vocab) as u32).collect();
        let forks = [LONGEST, 256, 300, 511, 130];
        let timelines: Vec<Vec<u32>> = forks
            .iter()
            .map(|&at| {
                let mut tokens = trunk.clone();
                tokens[at..].iter_mut().for_each(|t| *t = rng.next(vocab) as u32);
                tokens
            })
            .collect();
        let rows = timelines.iter().map(|tokens| subject::all_logits(engine, tokens)).collect();
        Self { timelines, rows }
    }
}

fn options(chunk: usize) -> EngineOptions {
    let options = EngineOptions { threads: 1, prefill_chunk: chunk, poison_cache: true, ..EngineOptions::default() };
    subject::on_device(options)
}

/// A session and the timeline it is on.
struct Run {
    session: Session,
    timeline: usize,
}

fn check(truth: &Truth, run: &Run, what: &str) {
    let at = run.session.position();
    assert_eq!(run.session.tokens(), &truth.timelines[run.timeline][..at], "{what}");
    match run.session.logits() {
        None => {}
        Some(logits) => {
            let want = &truth.rows[run.timeline][at - 1];
            let same = logits.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{what}: logits at {at} of timeline {} differ from a cold session's", run.timeline);
        }
    }
}

fn program(seed: u64, truth: &Truth, folder: &std::path::Path) {
    let mut rng = Rng(seed);
    let policies = [CheckpointPolicy::Boundary, CheckpointPolicy::Every(256), CheckpointPolicy::Every(512)];
    let mut options = EngineOptions {
        checkpoints: policies[rng.next(policies.len())],
        ..options([1, 7, 64, 128, 256, 1000][rng.next(6)])
    };
    let model = dsv4::Model::open(folder).unwrap();
    // from very tight (eviction all the time, sometimes nothing fits) to roomy
    let roomy = Engine::new(&model, options.clone()).unwrap();
    let one = fixed(&subject::session(&roomy, LONGEST));
    options.cache_bytes = one * [3, 6, 12, 100][rng.next(4)];
    let files = tempfile::tempdir().unwrap();
    options.tiers = TierOptions {
        host_bytes: one * [0, 0, 2, 100][rng.next(4)],
        directory: (rng.next(2) == 0).then(|| files.path().join("tier")),
        prefetch: [Prefetch::Off, Prefetch::Next, Prefetch::Aggressive][rng.next(3)],
        timeout: Duration::from_millis([0, 1, 2000][rng.next(3)]),
        ..TierOptions::default()
    };
    let engine = Engine::new(&model, options).unwrap();
    let mut runs: Vec<Run> = Vec::new();
    let file = |timeline: usize| files.path().join(format!("{timeline}.session"));
    for step in 0..14 {
        let what = format!("seed {seed}, step {step}");
        let action = if runs.is_empty() { 0 } else { rng.next(13) };
        let options = SessionOptions { context: LONGEST, rollback: [0, 0, 1, 4, 9][rng.next(5)] };
        if action == 9 && runs.len() < 4 {
            let timeline = rng.next(truth.timelines.len());
            if file(timeline).exists() {
                let restored = Session::restore(&engine, file(timeline), options);
                runs.extend(allowed(restored, &what).map(|session| Run { session, timeline }));
            }
        }
        if action == 0 && runs.len() < 4 {
            if let Some(session) = allowed(Session::new(&engine, options), &what) {
                runs.push(Run { session, timeline: rng.next(truth.timelines.len()) });
            }
            continue;
        }
        let i = rng.next(runs.len());
        match action {
            1 => {
                drop(runs.swap_remove(i));
                continue;
            }
            2 if runs.len() < 4 => {
                if let Some(session) = allowed(runs[i].session.fork(), &what) {
                    let timeline = runs[i].timeline;
                    runs.push(Run { session, timeline });
                }
            }
            3 => {
                let to = rng.next(runs[i].session.position() + 1);
                allowed(runs[i].session.truncate(to), &what);
            }
            4 => {
                allowed(runs[i].session.clear(), &what);
            }
            6 => {
                let at = runs[i].session.position();
                allowed(runs[i].session.truncate(at.saturating_sub(rng.next(10))), &what);
            }
            8 => {
                let options = SaveOptions { complete: rng.next(2) == 0 };
                runs[i].session.save_with(file(runs[i].timeline), options).unwrap();
            }
            9 => {}
            _ => {
                let run = &mut runs[i];
                let at = run.session.position();
                let tokens = &truth.timelines[run.timeline];
                let end = (at + rng.length()).min(LONGEST);
                if action == 5 {
                    // one token at a time, as decoding does
                    for t in at..end.min(at + 12) {
                        if allowed(run.session.feed(&tokens[t..t + 1]), &what).is_none() {
                            break;
                        }
                    }
                } else if action == 7 {
                    // as drafts are fed: some are perhaps taken back in a later step
                    let drafts = &tokens[at..end.min(at + 12)];
                    allowed(run.session.feed_all(drafts, &mut |_, _| Ok(())), &what);
                } else {
                    allowed(run.session.feed(&tokens[at..end]), &what);
                }
            }
        }
        for run in &mut runs {
            settle(run, truth, &what);
            check(truth, run, &what);
        }
    }
    drop(runs);
    let stats = engine.cache_stats();
    assert!(stats.pool.held_bytes <= engine.options().cache_bytes, "seed {seed}: {stats:?}");
    assert_eq!(stats.evictable_blocks, stats.prefix_blocks, "seed {seed}: a block is still in use after all sessions");
}

/// `None` for an error that a tight cache may give; anything else is a failure.
fn allowed<T>(result: dsv4::Result<T>, what: &str) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(e) if e.kind() == ErrorKind::NoBlocks => None,
        Err(e) => panic!("{what}: {e}"),
    }
}

/// A call that ran out of blocks half-way leaves a session without logits: its tokens are still a prefix. Computing the
/// last one again, or starting anew, must work in the room there is, or be refused again.
fn settle(run: &mut Run, truth: &Truth, what: &str) {
    let at = run.session.position();
    if run.session.logits().is_some() || at == 0 {
        return;
    }
    assert_eq!(run.session.tokens(), &truth.timelines[run.timeline][..at], "{what}");
    if allowed(run.session.truncate(at), what).is_none() {
        allowed(run.session.clear(), what);
    }
}

#[test]
fn any_program_gives_the_logits_of_a_cold_session() {
    let folder = nano();
    let truth = Truth::new(&subject::engine_with(
        &folder,
        EngineOptions { checkpoints: CheckpointPolicy::None, ..options(256) },
    ));
    let programs = std::env::var("DSV4_CACHE_PROGRAMS").ok().and_then(|n| n.parse().ok()).unwrap_or(PROGRAMS);
    let start = std::env::var("DSV4_CACHE_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(1u64);
    println!("{programs} programs from seed {start}");
    std::thread::scope(|scope| {
        for first in start..start + SIDE_BY_SIDE {
            let (truth, folder) = (&truth, &folder);
            scope.spawn(move || {
                (first..start + programs).step_by(SIDE_BY_SIDE as usize).for_each(|seed| program(seed, truth, folder));
            });
        }
    });
}

/// Bytes that a session takes however long it is.
fn fixed(session: &Session) -> u64 {
    session.cache_bytes().window + session.cache_bytes().state
}

fn prompt(seed: usize, n: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * 7 + seed * 13 + i * i % 11) % 90) as u32).collect()
}

/// Pitfall 30.
#[test]
fn the_same_prompt_again_computes_at_most_one_block() {
    let folder = nano();
    let engine = subject::engine_with(&folder, options(128));
    let tokens = prompt(1, 1000);
    let mut first = subject::session(&engine, 2000);
    first.feed(&tokens).unwrap();
    assert_eq!(first.reused_tokens(), 0);
    let mut second = subject::session(&engine, 2000);
    second.feed(&tokens).unwrap();
    assert_eq!(second.reused_tokens(), 768);
    assert_eq!(second.logits(), first.logits());
    // a prompt that is entirely cached and ends at a block's end still gives its logits
    let mut third = subject::session(&engine, 2000);
    third.feed(&tokens[..768]).unwrap();
    third.clear().unwrap();
    let before = engine.cache_stats().computed_tokens;
    third.feed(&tokens[..768]).unwrap();
    assert_eq!(engine.cache_stats().computed_tokens, before, "everything was there, the logits too");
    let cold = subject::engine_with(&folder, EngineOptions { checkpoints: CheckpointPolicy::None, ..options(128) });
    assert_eq!(third.logits().unwrap(), subject::last_logits(&cold, &tokens[..768]));
}

/// Pitfall 23.
#[test]
fn hits_equal_cold_runs_at_prefix_lengths_around_every_boundary() {
    let folder = nano();
    let cold = subject::engine_with(&folder, EngineOptions { checkpoints: CheckpointPolicy::None, ..options(256) });
    for shared in [127, 128, 129, 130, 255, 256, 257, 258, 383, 384, 385, 512, 600] {
        let engine = subject::engine_with(&folder, options(256));
        let mut filler = subject::session(&engine, 1000);
        filler.feed(&prompt(1, shared)).unwrap();
        filler.feed(&prompt(2, 100)).unwrap();
        let mut tokens = prompt(1, shared);
        tokens.extend(prompt(3, 50));
        let mut session = subject::session(&engine, 1000);
        session.feed(&tokens).unwrap();
        assert_eq!(session.logits().unwrap(), subject::last_logits(&cold, &tokens), "{shared} shared tokens");
    }
}

/// Pitfall 32.
#[test]
fn prompts_of_a_few_hundred_tokens_are_hits_too() {
    let folder = nano();
    let engine = subject::engine_with(&folder, options(64));
    for (n, hit) in [(255, 0), (256, 256), (257, 256), (300, 256), (511, 256), (512, 512), (600, 512), (1000, 768)] {
        let tokens = prompt(n, n);
        let mut first = subject::session(&engine, 2000);
        first.feed(&tokens).unwrap();
        let mut second = subject::session(&engine, 2000);
        second.feed(&tokens).unwrap();
        assert_eq!(second.reused_tokens(), hit, "a prompt of {n}");
        assert_eq!(second.logits(), first.logits());
    }
}

/// Pitfall 31.
#[test]
fn every_position_that_is_stored_can_be_hit() {
    let folder = nano();
    for policy in [CheckpointPolicy::Boundary, CheckpointPolicy::Every(256), CheckpointPolicy::Every(512)] {
        for chunk in [1, 100, 128, 256, 1000] {
            let engine = subject::engine_with(&folder, EngineOptions { checkpoints: policy, ..options(chunk) });
            let tokens = prompt(3, 600);
            subject::session(&engine, 2000).feed(&tokens).unwrap();
            let stored = engine.cache_stats().checkpoints;
            assert_eq!(stored, if policy == CheckpointPolicy::Every(256) { 2 } else { 1 }, "{policy:?}");
            for blocks in 1..=2 {
                let mut longer = tokens[..blocks * 256].to_vec();
                longer.push(1);
                let mut session = subject::session(&engine, 2000);
                session.feed(&longer).unwrap();
                let want = if blocks == 1 && stored == 1 { 0 } else { blocks * 256 };
                assert_eq!(session.reused_tokens(), want as u64, "{policy:?}, chunks of {chunk}, {blocks} blocks");
            }
        }
    }
}

/// Pitfall 35.
#[test]
fn idle_sessions_cost_the_documented_constant_whatever_the_chunk() {
    let folder = nano();
    for chunk in [1, 128, 4096] {
        let engine = subject::engine_with(&folder, options(chunk));
        let sessions: Vec<Session> = (0..10).map(|_| subject::session(&engine, 2000)).collect();
        let (window, states) = CacheLayout::new(engine.model().config(), engine.kv_format()).fixed_page_bytes();
        assert_eq!(engine.cache_stats().pool.used_bytes, 10 * (window + states), "chunks of {chunk}");
        drop(sessions);
        assert_eq!(engine.cache_stats().pool.used_bytes, 0);
    }
}

#[test]
fn what_sessions_mark_for_themselves_makes_room_for_other_sessions() {
    let folder = nano();
    let roomy = subject::engine_with(&folder, options(64));
    let plan = CachePlan::new(roomy.model().config(), roomy.kv_format(), 300, 0);
    // room for exactly five sessions of 300 tokens, each of which was fed and decoded
    let limit = 5 * plan.pages(300);
    let policy = CheckpointPolicy::None;
    let engine =
        subject::engine_with(&folder, EngineOptions { cache_bytes: limit, checkpoints: policy, ..options(64) });
    let mut sessions = Vec::new();
    for seed in 0..5 {
        let mut session = subject::session(&engine, 300);
        session.feed(&prompt(seed, 290)).unwrap();
        for &token in &prompt(9, 10) {
            session.feed(&[token]).unwrap();
        }
        sessions.push(session);
    }
    assert_eq!(engine.cache_stats().pool.used_bytes, limit);
    // a truncation without its mark is exact, only slower
    sessions.truncate(1);
    let (mut whole, at) = (subject::session(&roomy, 300), 290);
    whole.feed(&prompt(0, at)).unwrap();
    sessions[0].truncate(at).unwrap();
    assert_eq!(sessions[0].logits(), whole.logits());
}

/// Pitfall 42.
#[test]
fn checkpoints_never_push_out_the_one_that_is_being_kept() {
    let folder = nano();
    let probe = subject::session(&subject::engine_with(&folder, options(256)), 2000);
    let one = fixed(&probe) + 4 * probe.engine().model().config().vocab_size as u64;
    for (limit, kept) in [(fixed(&probe) - 1, 0), (one, 1), (2 * one, 2)] {
        let options = EngineOptions { checkpoint_bytes: limit, ..options(256) };
        let engine = subject::engine_with(&folder, options);
        for seed in 0..4 {
            subject::session(&engine, 2000).feed(&prompt(seed, 300)).unwrap();
            let mut again = subject::session(&engine, 2000);
            again.feed(&prompt(seed, 300)).unwrap();
            assert_eq!(again.reused_tokens(), if kept > 0 { 256 } else { 0 }, "limit {limit}, prompt {seed}");
        }
        let stats = engine.cache_stats();
        assert_eq!(stats.checkpoints, kept, "limit {limit}");
        assert_eq!(stats.evicted_checkpoints, if kept > 0 { 4 - kept } else { 0 }, "limit {limit}: no churn");
    }
}

/// Pitfall 29.
#[test]
fn a_truncation_to_any_position_never_goes_on_from_a_stale_state() {
    let folder = nano();
    let engine = subject::engine_with(&folder, options(200));
    let tokens = prompt(1, 520);
    let truth = subject::all_logits(&engine, &tokens);
    let mut session = subject::session(&engine, 2000);
    for to in [519, 513, 512, 511, 385, 384, 383, 300, 257, 256, 255, 129, 128, 127, 5, 4, 3, 1] {
        session.feed(&tokens[session.position()..]).unwrap();
        session.truncate(to).unwrap();
        assert_eq!(session.logits().unwrap(), truth[to - 1], "truncated to {to}");
        session.feed(&tokens[to..to + 1]).unwrap();
        assert_eq!(session.logits().unwrap(), truth[to], "one token behind {to}");
    }
}

/// Pitfall 26.
#[test]
fn sessions_that_are_pushed_out_and_come_back_give_the_tokens_of_an_undisturbed_run() {
    let folder = nano();
    let probe = subject::session(&subject::engine_with(&folder, options(64)), 2000);
    let tight = EngineOptions { cache_bytes: fixed(&probe) * 8, checkpoint_bytes: fixed(&probe) * 5, ..options(64) };
    let engine = subject::engine_with(&folder, tight);
    let roomy = subject::engine_with(&folder, options(64));
    let greedy = |session: &Session| {
        let logits = session.logits().unwrap();
        (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]).then(b.cmp(&a))).unwrap() as u32
    };
    let mut undisturbed: Vec<Session> = Vec::new();
    let mut histories: Vec<Vec<u32>> = Vec::new();
    for seed in 0..6 {
        let mut session = subject::session(&roomy, 2000);
        histories.push(prompt(seed, 250 + seed));
        session.feed(&histories[seed]).unwrap();
        undisturbed.push(session);
    }
    for turn in 0..12 {
        for (i, history) in histories.iter_mut().enumerate() {
            // the session comes back from what the cache still has, and leaves again; some come twice in a row
            if turn % 3 == i % 3 {
                subject::session(&engine, 2000).feed(history).unwrap();
            }
            let mut session = subject::session(&engine, 2000);
            session.feed(history).unwrap();
            for step in 0..7 {
                let (token, want) = (greedy(&session), greedy(&undisturbed[i]));
                assert_eq!(token, want, "session {i}, turn {turn}, step {step}");
                session.feed(&[token]).unwrap();
                undisturbed[i].feed(&[want]).unwrap();
                history.push(token);
            }
        }
    }
    let stats = engine.cache_stats();
    assert!(stats.evicted_blocks + stats.evicted_checkpoints > 0 && stats.hit_tokens > 0, "{stats:?}");
}

/// Pitfall 45.
#[test]
fn a_history_rendered_without_its_reasoning_keeps_the_prompt_before_it() {
    let folder = nano();
    let engine = subject::engine_with(&folder, EngineOptions { checkpoints: CheckpointPolicy::None, ..options(256) });
    let (first_prompt, answer, question) = (prompt(1, 600), prompt(3, 40), prompt(4, 30));
    let mut session = subject::session(&engine, 2000);
    session.feed(&first_prompt).unwrap();
    // 90 tokens of reasoning, then the answer, as decoding brings them
    for &token in prompt(2, 90).iter().chain(&answer) {
        session.feed(&[token]).unwrap();
    }
    let next = [first_prompt.as_slice(), &answer, &question].concat();
    let before = engine.cache_stats().computed_tokens;
    let kept = session.keep_common(&next).unwrap();
    session.feed(&next[kept..]).unwrap();
    assert_eq!(kept, first_prompt.len(), "reasoning differs from the answer at once");
    let computed = (engine.cache_stats().computed_tokens - before) as usize;
    assert!(computed <= next.len() - kept + 255, "{computed} tokens computed");
    assert_eq!(session.logits().unwrap(), subject::last_logits(&engine, &next));
}

/// Pitfall 37.
#[test]
fn lossless_cache_formats_give_the_same_bits() {
    let folder = nano();
    let tokens = prompt(1, 400);
    for numerics in [dsv4::Numerics::Reference, dsv4::Numerics::Served] {
        let logits = [None, Some(dsv4::KvFormat::Bf16)].map(|kv_format| {
            let engine = subject::engine_with(&folder, EngineOptions { numerics, kv_format, ..options(100) });
            subject::last_logits(&engine, &tokens)
        });
        assert_eq!(logits[0], logits[1], "{numerics}");
    }
}

#[test]
fn a_shared_prompt_under_many_continuations_is_stored_once() {
    let folder = nano();
    let engine = subject::engine_with(&folder, options(256));
    let system = prompt(1, 512);
    let mut sessions = Vec::new();
    for i in 0..20 {
        let mut session = subject::session(&engine, 1000);
        session.feed(&system).unwrap();
        session.feed(&prompt(10 + i, 20)).unwrap();
        sessions.push(session);
    }
    let stats = engine.cache_stats();
    assert_eq!(stats.prefix_blocks, 2, "{stats:?}");
    assert_eq!(stats.hit_tokens, 19 * 512, "{stats:?}");
}

#[test]
fn a_growing_conversation_computes_what_is_new_plus_at_most_255_tokens() {
    let folder = nano();
    let engine = subject::engine_with(&folder, options(256));
    let mut history: Vec<u32> = Vec::new();
    let mut live = subject::session(&engine, 4000);
    let computed = |session: &mut Session, tokens: &[u32]| {
        let before = engine.cache_stats().computed_tokens;
        session.feed(tokens).unwrap();
        (engine.cache_stats().computed_tokens - before) as usize
    };
    for turn in 0..20 {
        let before = history.len();
        history.extend(prompt(turn, 60 + turn));
        let mut session = subject::session(&engine, 4000);
        let fresh = computed(&mut session, &history);
        assert!(fresh <= history.len() - before + 255, "turn {turn}: {fresh} computed");
        assert_eq!(
            computed(&mut live, &history[before..]),
            history.len() - before,
            "a live session computes what is new"
        );
        assert_eq!(live.logits(), session.logits(), "turn {turn}");
        // the answer, decoded token by token
        for t in prompt(100 + turn, 30) {
            session.feed(&[t]).unwrap();
            live.feed(&[t]).unwrap();
            history.push(t);
        }
    }
}

#[test]
fn tokens_within_the_rollback_are_taken_back_without_computing() {
    let folder = nano();
    let engine = subject::engine_with(&folder, EngineOptions { checkpoints: CheckpointPolicy::None, ..options(64) });
    let tokens = prompt(1, 400);
    let truth = subject::all_logits(&engine, &tokens);
    // across a c4a group, a c128a group and a block; after a prompt as well as after single tokens
    for end in [3, 5, 127, 128, 129, 131, 256, 258, 260, 300] {
        let mut session = Session::new(&engine, SessionOptions { context: 1000, rollback: 6 }).unwrap();
        session.feed(&tokens[..end]).unwrap();
        for t in end..end + 6 {
            session.feed(&tokens[t..=t]).unwrap();
        }
        let mut fork = session.fork().unwrap();
        for back in [1, 2, 5, 6] {
            let before = engine.cache_stats().computed_tokens;
            session.truncate(end + 6 - back).unwrap();
            assert_eq!(engine.cache_stats().computed_tokens, before, "{back} tokens back from {}", end + 6);
            assert_eq!(session.logits().unwrap(), truth[end + 5 - back], "{back} tokens back from {}", end + 6);
        }
        // going on from there, by another way of cutting, gives what a cold session gives
        session.feed(&tokens[end..end + 9]).unwrap();
        assert_eq!(session.logits().unwrap(), truth[end + 8]);
        fork.truncate(end + 3).unwrap();
        fork.feed(&tokens[end + 3..end + 80]).unwrap();
        assert_eq!(fork.logits().unwrap(), truth[end + 79]);
        // one token further back than its logits are known: that one alone is computed
        let mut session = Session::new(&engine, SessionOptions { context: 1000, rollback: 6 }).unwrap();
        session.feed(&tokens[..end + 5]).unwrap();
        let before = engine.cache_stats().computed_tokens;
        session.truncate(end).unwrap();
        assert_eq!(engine.cache_stats().computed_tokens, before + 1);
        assert_eq!(session.logits().unwrap(), truth[end - 1]);
    }
}

#[test]
fn a_feed_that_finds_no_room_keeps_its_complete_chunks_and_goes_on_when_there_is_some() {
    let folder = nano();
    let whole = prompt(1, 900);
    let mut cold = subject::session(&subject::engine_with(&folder, options(64)), 900);
    cold.feed(&whole).unwrap();
    let limit = 2 * fixed(&cold) + cold.cache_bytes().pages;
    let engine = subject::engine_with(&folder, EngineOptions { cache_bytes: limit, ..options(64) });
    let mut other = subject::session(&engine, 900);
    other.feed(&prompt(2, 600)).unwrap();
    let mut session = subject::session(&engine, 900);
    let error = session.feed(&whole).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoBlocks);
    assert!(error.message().ends_with("raise cache_bytes (--cache-bytes), or free or clear a session"), "{error}");
    let done = session.position();
    assert!(done > 0 && done < 900 && done.is_multiple_of(64), "{done} tokens");
    assert_eq!(session.tokens(), &whole[..done]);
    assert!(session.logits().is_none(), "they would be those of an older token");
    drop(other);
    session.feed(&whole[done..]).unwrap();
    assert_eq!(session.logits(), cold.logits());
}

#[test]
fn exhaustion_names_the_counts_and_freeing_anything_lets_it_go_on() {
    let folder = nano();
    let probe = subject::session(&subject::engine_with(&folder, options(64)), 900);
    let limit = fixed(&probe) * 5 / 2;
    let engine = subject::engine_with(&folder, EngineOptions { cache_bytes: limit, ..options(64) });
    let mut first = subject::session(&engine, 900);
    first.feed(&prompt(1, 40)).unwrap();
    let mut others: Vec<Session> = Vec::new();
    let error = loop {
        match Session::new(&engine, SessionOptions { context: 900, ..Default::default() }) {
            Ok(session) => others.push(session),
            Err(error) => break error,
        }
        assert!(others.len() < 10);
    };
    assert_eq!(error.kind(), ErrorKind::NoBlocks);
    assert!(error.message().contains("wide") && error.message().contains(&limit.to_string()), "{error}");
    let before = first.logits().unwrap().to_vec();
    assert_eq!(first.logits().unwrap(), before);
    others.clear();
    first.feed(&prompt(2, 10)).unwrap();
    let _again = subject::session(&engine, 900);
}
