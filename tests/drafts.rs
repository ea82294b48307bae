//! Sessions that feed drafts and take rejected ones back: their prompts hit as others do, and nobody is offered a draft.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a failed call is a failed test")]

mod common;

use std::sync::Arc;

use common::golden;
use common::subject;
use dsv4::{Engine, EngineOptions, Session, SessionOptions};

fn nano() -> std::path::PathBuf {
    golden::small()
}

fn options() -> EngineOptions {
    EngineOptions { threads: 1, prefill_chunk: 64, poison_cache: true, ..EngineOptions::default() }
}

fn prompt(seed: usize, n: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * 7 + seed * 13 + i * i % 11) % 90) as u32).collect()
}

/// Tokens that are wrong at every position of `prompt(1, …)`.
fn wrong(at: usize) -> u32 {
    91 + (at % 5) as u32
}

/// Decodes `tokens[session.position()..end]` as a drafting decoder does: each step feeds one token that is certain and
/// `k` drafts, of which the first few are right, and takes the others back. Logits are compared with `truth`.
fn decode_with_drafts(session: &mut Session, tokens: &[u32], end: usize, k: usize, right: usize, truth: &[Vec<f32>]) {
    let mut step = 0;
    while session.position() < end {
        let at = session.position();
        let accepted = if right > k { step % (k + 1) } else { right };
        step += 1;
        let mut fed = vec![tokens[at]];
        fed.extend((1..=k).map(|i| if i <= accepted { tokens[at + i] } else { wrong(at + i) }));
        session
            .feed_all(&fed, &mut |position, logits| {
                assert!(position > at + accepted || logits == truth[position], "{k} drafts: logits at {position}");
                Ok(())
            })
            .unwrap();
        let before = session.engine().cache_stats();
        session.truncate(at + 1 + accepted).unwrap();
        assert_eq!(
            session.engine().cache_stats().computed_tokens,
            before.computed_tokens,
            "rejecting computes nothing"
        );
        assert_eq!(session.logits().unwrap(), truth[at + accepted], "{k} drafts, {accepted} right at {at}");
        assert!(before.prefix_blocks as usize <= session.position() / 256, "{k} drafts: published at {at}");
    }
}

/// Pitfall 34.
#[test]
fn drafts_that_are_taken_back_change_neither_hits_nor_logits_and_are_never_published() {
    let folder = nano();
    let tokens = prompt(1, 600);
    let (start, end) = (250, 522);
    let truth = subject::all_logits(&subject::engine_with(&folder, options()), &tokens);
    // which prompts hit, how far, and what the index holds
    let hits = |engine: &Arc<Engine>| {
        let blocks = (engine.cache_stats().prefix_blocks, engine.cache_stats().checkpoints);
        let reused = [255, 256, 257, 511, 512, 513].map(|n| {
            let mut session = subject::session(engine, 1000);
            session.feed(&tokens[..n]).unwrap();
            assert_eq!(session.logits().unwrap(), truth[n - 1], "a prompt of {n}");
            session.reused_tokens()
        });
        let stats = engine.cache_stats();
        (blocks, reused, stats.lookup_tokens, stats.hit_tokens)
    };
    let plain = subject::engine_with(&folder, options());
    let mut session = subject::session(&plain, 1000);
    session.feed(&tokens[..start]).unwrap();
    for t in start..265 {
        session.feed(&tokens[t..=t]).unwrap();
    }
    session.feed(&tokens[265..505]).unwrap();
    for t in 505..end {
        session.feed(&tokens[t..=t]).unwrap();
    }
    let want = hits(&plain);
    assert_eq!(want.1, [0, 256, 256, 256, 512, 512], "without drafts");
    for k in 1..=8 {
        // none right, and every number of them in turn
        for right in [0, usize::MAX] {
            let engine = subject::engine_with(&folder, options());
            let options = SessionOptions { context: 1000, rollback: k };
            let mut session = Session::new(&engine, options).unwrap();
            session.feed(&tokens[..start]).unwrap();
            // steps that end before, at and behind both blocks' ends
            decode_with_drafts(&mut session, &tokens, 265, k, right, &truth);
            session.feed(&tokens[session.position()..505]).unwrap();
            decode_with_drafts(&mut session, &tokens, end, k, right, &truth);
            assert_eq!(hits(&engine), want, "{k} drafts, {right} right");
            // prompts that go on as rejected drafts did
            for right in [1, 3, 6].into_iter().filter(|_| k == 8 && right == 0) {
                let mut rejected = tokens[..256 - right].to_vec();
                rejected.extend((256 - right..300).map(wrong));
                let mut session = subject::session(&engine, 1000);
                session.feed(&rejected).unwrap();
                assert_eq!(session.reused_tokens(), 0, "{k} drafts");
            }
        }
    }
}

/// As pitfall 34: the smallest prompt that is a hit is the same on sessions that can take tokens back.
#[test]
fn a_prompt_is_offered_at_once_however_many_tokens_can_be_taken_back() {
    let folder = nano();
    for rollback in [0, 1, 8, 64] {
        let engine = subject::engine_with(&folder, options());
        let tokens = prompt(1, 600);
        let options = SessionOptions { context: 1000, rollback };
        for n in [256, 512, 600] {
            Session::new(&engine, options).unwrap().feed(&tokens[..n]).unwrap();
            let mut again = Session::new(&engine, options).unwrap();
            again.feed(&tokens[..n]).unwrap();
            assert_eq!(again.reused_tokens() as usize, n / 256 * 256, "rollback {rollback}");
        }
        // drafts up to a block's end, then a prompt: what is before it is settled, and found
        let mut session = Session::new(&engine, options).unwrap();
        let other = prompt(2, 800);
        session.feed(&other[..255]).unwrap();
        session.feed_all(&other[255..256], &mut |_, _| Ok(())).unwrap();
        session.feed(&other[256..]).unwrap();
        let mut again = Session::new(&engine, options).unwrap();
        again.feed(&other).unwrap();
        assert_eq!(again.reused_tokens(), 768, "rollback {rollback}");
        assert_eq!(again.logits(), session.logits());
    }
}
