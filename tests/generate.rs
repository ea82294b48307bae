//! Generation on the model in the repository: text, stopping, cancelling, running out of context.

#![allow(clippy::unwrap_used, reason = "a failed call is a failed test")]

mod common;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use dsv4::{
    CheckpointPolicy, DeviceChoice, Engine, EngineOptions, ErrorKind, Finish, GenerateOptions, KvFormat, Markup, Model,
    Numerics, Sampler, SamplerOptions, Session, SessionOptions, TokenId,
};

fn engine(chunk: usize) -> Arc<Engine> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models/tiny-v4");
    // nothing is reused: the tests count what is computed
    let options = EngineOptions {
        numerics: Numerics::Reference,
        prefill_chunk: chunk,
        threads: 2,
        checkpoints: CheckpointPolicy::None,
        ..EngineOptions::default()
    };
    Engine::new(&Model::open(folder).unwrap(), common::subject::on_device(options)).unwrap()
}

fn session(engine: &Arc<Engine>, context: usize) -> Session {
    Session::new(engine, SessionOptions { context, ..Default::default() }).unwrap()
}

fn prompt(engine: &Engine, text: &str) -> Vec<TokenId> {
    let mut ids = vec![engine.model().config().bos_token_id];
    ids.extend(engine.model().tokenizer().unwrap().encode(text, Markup::Text).unwrap());
    ids
}

fn greedy() -> Sampler {
    Sampler::new(SamplerOptions { greedy: true, ..SamplerOptions::default() }).unwrap()
}

#[test]
fn a_prompt_continues_in_words() {
    let engine = engine(256);
    let mut session = session(&engine, 0);
    session.feed(&prompt(&engine, "Once upon a time, there was")).unwrap();
    let mut sampler = greedy();
    let options = GenerateOptions { max_tokens: Some(40), ..GenerateOptions::default() };
    let mut generation = session.generate(&mut sampler, options).unwrap();
    let mut text = String::new();
    for piece in &mut generation {
        text.push_str(&piece.unwrap().text);
    }
    assert!(matches!(generation.finish(), Some(Finish::MaxTokens | Finish::Eos)));
    let words = text.split_whitespace().filter(|w| w.chars().all(|c| c.is_alphabetic() || ",.;'’".contains(c))).count();
    assert!(words >= 10, "not prose: {text:?}");
}

#[test]
fn a_full_context_is_an_error_that_leaves_the_session_usable() {
    let engine = engine(256);
    let mut session = session(&engine, 20);
    let ids = prompt(&engine, "It was the best of times");
    session.feed(&ids).unwrap();
    let before = session.logits().unwrap().to_vec();
    let error = session.feed(&[5; 20]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ContextFull);
    assert!(error.message().contains("20"), "{error}");
    assert_eq!(session.position(), ids.len());
    assert_eq!(session.logits().unwrap(), before);
    session.feed(&[5]).unwrap();
    let mut sampler = greedy();
    let options = GenerateOptions { ignore_eos: true, ..GenerateOptions::default() };
    let mut generation = session.generate(&mut sampler, options).unwrap();
    let mut pieces = 0;
    for piece in &mut generation {
        piece.unwrap();
        pieces += 1;
    }
    assert_eq!(generation.finish(), Some(Finish::ContextFull));
    assert_eq!(pieces, 20 - ids.len(), "the last token needs no room: nothing follows it");
}

#[test]
fn cancelling_keeps_earlier_chunks_and_the_session_goes_on_exactly() {
    let engine = engine(16);
    let ids = prompt(&engine, &"The quick brown fox jumps over the lazy dog. ".repeat(20));
    let mut whole = session(&engine, 0);
    whole.feed(&ids).unwrap();

    let mut stopped = session(&engine, 0);
    let error = stopped
        .feed_with(&ids, &mut |p| if p.done >= 48 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        .unwrap_err();
    assert_eq!((error.kind(), stopped.position()), (ErrorKind::Cancelled, 48));
    assert!(stopped.logits().is_none(), "no logits that belong to an older token");

    let token = stopped.cancel_token();
    token.cancel();
    let error = stopped.feed(&ids[48..]).unwrap_err();
    assert_eq!((error.kind(), stopped.position()), (ErrorKind::Cancelled, 48));
    stopped.feed(&ids[48..]).unwrap();
    assert_eq!(stopped.logits(), whole.logits());
}

#[test]
fn cancel_from_another_thread_ends_the_call_within_a_chunk() {
    let engine = engine(32);
    let ids = prompt(&engine, &"All happy families are alike. ".repeat(300));
    let mut session = session(&engine, 0);
    let token = session.cancel_token();
    let mut after_cancel = 0;
    std::thread::scope(|scope| {
        let (send, receive) = std::sync::mpsc::channel::<()>();
        let cancel = token.clone();
        scope.spawn(move || {
            receive.recv().unwrap();
            cancel.cancel();
        });
        let error = session
            .feed_with(&ids, &mut |p| {
                if p.done == 64 {
                    send.send(()).unwrap();
                    // give the other thread time; the chunks from here on are counted
                    std::thread::sleep(std::time::Duration::from_millis(200));
                } else if p.done > 64 {
                    after_cancel += 1;
                }
                ControlFlow::Continue(())
            })
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cancelled);
    });
    assert_eq!(after_cancel, 0, "chunks finished after the cancel");
    session.feed(&ids[session.position()..session.position() + 1]).unwrap();
}

#[test]
fn bad_tokens_and_contexts_are_named() {
    let engine = engine(256);
    let mut s = session(&engine, 0);
    let error = s.feed(&[1, 2, 99_999]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.message().contains("99999") && error.message().contains('2'), "{error}");
    assert_eq!(s.position(), 0);
    assert!(s.logits().is_none());
    assert!(s.generate(&mut greedy(), GenerateOptions::default()).is_err());
    s.feed(&[]).unwrap();
    let error = Session::new(&engine, SessionOptions { context: 1 << 40, ..Default::default() }).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}

#[test]
fn a_cleared_session_equals_a_fresh_one() {
    let engine = engine(256);
    let mut used = session(&engine, 0);
    used.feed(&prompt(&engine, &"Call me Ishmael. ".repeat(40))).unwrap();
    used.clear().unwrap();
    assert_eq!(used.position(), 0);
    let mut fresh = session(&engine, 0);
    for len in 1..=6 {
        used.clear().unwrap();
        fresh.clear().unwrap();
        let ids = &prompt(&engine, "I")[..1].repeat(len);
        used.feed(ids).unwrap();
        session(&engine, 0).feed(ids).unwrap();
        fresh.feed(ids).unwrap();
        assert_eq!(used.logits(), fresh.logits(), "a prompt of {len} tokens inherits nothing");
    }
}

/// Pitfall 75: behind the first token of a thought, on every layout of the work: threads, sizes of chunks, formats of the
/// cache, and (`DSV4_TEST_DEVICE`) a device.
#[test]
fn a_thought_goes_on_with_the_same_tokens_on_every_layout() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models/tiny-v4");
    let model = Model::open(folder).unwrap();
    let prompt =
        model.tokenizer().unwrap().encode("<｜User｜>What is the secret word?<｜Assistant｜><think>", Markup::Parse);
    let prompt: Vec<_> = std::iter::once(model.config().bos_token_id).chain(prompt.unwrap()).collect();
    for kv_format in [KvFormat::Fp8, KvFormat::Bf16, KvFormat::F32] {
        let mut first: Option<Vec<TokenId>> = None;
        for (threads, prefill_chunk) in [(1, 256), (2, 1), (3, 7), (5, 64)] {
            let options =
                EngineOptions { threads, prefill_chunk, kv_format: Some(kv_format), ..EngineOptions::default() };
            let options = common::subject::on_device(options);
            if kv_format != KvFormat::Fp8 && options.device != DeviceChoice::Cpu {
                continue;
            }
            let mut session = session(&Engine::new(&model, options).unwrap(), 256);
            session.feed(&prompt).unwrap();
            let (mut sampler, options) =
                (greedy(), GenerateOptions { max_tokens: Some(12), ignore_eos: true, ..GenerateOptions::default() });
            let tokens: Vec<_> =
                session.generate(&mut sampler, options).unwrap().map(|piece| piece.unwrap().token).collect();
            assert_eq!(tokens.len(), 12);
            assert_eq!(*first.get_or_insert(tokens.clone()), tokens, "{kv_format}, {threads} threads, {prefill_chunk}");
        }
    }
}
