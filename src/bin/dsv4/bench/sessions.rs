//! Sessions that decode at the same time, a thread each: how many tokens they get together, how long each waits for its next
//! one, alone and while one session more reads a prompt, and what their caches take beside what was planned.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Instant;

use dsv4::cache::CachePlan;
use dsv4::{DeviceChoice, Engine, Error, ErrorKind, Session, SessionOptions, TokenId};
use serde_json::{Value, json};

use super::{Args, Ids, spread};
use crate::failure::{Failure, Result};
use crate::interrupt::Interrupt;
use crate::output::{self, line, rate};

/// One number of sessions.
struct Row {
    sessions: usize,
    context: usize,
    /// Tokens of the prompt that is read meanwhile.
    reading: usize,
    /// Of all decoding sessions together.
    tokens_per_second: f64,
    /// Tokens that a step had, on average, and its milliseconds.
    tokens_per_step: f64,
    ms_per_step: f64,
    /// Milliseconds between a session's tokens: median, 99th percentile, longest.
    between: [f64; 3],
    /// Of the prompt that is read.
    reader_per_second: Option<f64>,
    cache: Cache,
}

/// Bytes of the sessions' caches.
struct Cache {
    /// What the pool has given out, less what no session uses.
    used: u64,
    /// Of that, what the sessions themselves count; the rest are marks of prompts' ends.
    own: u64,
    /// What [`CachePlan`] says of so many sessions of this length.
    planned: u64,
    /// What they would take if each had its longest context in one piece.
    contiguous: u64,
}

/// What one thread's decoding took.
struct Decoded {
    seconds: f64,
    milliseconds: Vec<f64>,
}

pub(super) fn run(args: &Args, engine: &Arc<Engine>, prefills: &[usize]) -> Result {
    let interrupt = Interrupt::arm();
    let mut ids = Ids { vocab: engine.model().config().vocab_size as u64, state: args.seed };
    let mut rows = Vec::new();
    for &context in &args.context {
        for &count in &args.sessions {
            let mut sessions = Vec::new();
            let options = SessionOptions { context: args.max_context, ..SessionOptions::default() };
            for _ in 0..count as usize {
                let mut session = Session::new(engine, options)?;
                read(&mut session, &ids.take(context)?, &interrupt)?;
                sessions.push(session);
            }
            for reading in std::iter::once(0).chain(prefills.iter().copied()) {
                rows.push(measure(args, engine, &mut sessions, context, reading, &mut ids, &interrupt)?);
            }
        }
    }
    if args.json {
        return output::json(&Value::Array(rows.iter().map(as_json).collect()));
    }
    line("                              tokens  a step: ms between tokens:         reader  MB of cache:      in one")?;
    line(
        "sessions  context  reading  a second  tokens     ms    p50     p99     max  tokens/s     used planned   piece",
    )?;
    for r in &rows {
        let [median, p99, max] = r.between;
        let mb = |bytes: u64| bytes as f64 / 1e6;
        line(format_args!(
            "{:>8} {:>8} {:>8} {:>9} {:>7.1} {:>6.2} {median:>6.2} {p99:>7.2} {max:>7.2} {:>9} {:>8.2} {:>7.2} {:>7.0}",
            r.sessions,
            r.context,
            r.reading,
            rate(r.tokens_per_second),
            r.tokens_per_step,
            r.ms_per_step,
            r.reader_per_second.map_or("-".to_owned(), rate),
            mb(r.cache.used),
            mb(r.cache.planned),
            mb(r.cache.contiguous),
        ))?;
    }
    Ok(())
}

/// Measures `args.repetitions` rounds after one that does not count.
fn measure(
    args: &Args,
    engine: &Arc<Engine>,
    sessions: &mut [Session],
    context: usize,
    reading: usize,
    ids: &mut Ids,
    interrupt: &Interrupt,
) -> Result<Row> {
    let (mut rates, mut reader_rates, mut milliseconds) = (Vec::new(), Vec::new(), Vec::new());
    let (mut tokens_in_steps, mut steps, mut in_steps) = (0, 0, 0.0);
    for round in 0..=args.repetitions {
        let tokens = (0..sessions.len()).map(|_| ids.take(args.decode)).collect::<Result<Vec<_>, Error>>()?;
        let prompt = ids.take(reading)?;
        let (is_read, before) = (AtomicBool::new(false), engine.metrics());
        // a thread takes its time to begin
        let begin = Barrier::new(sessions.len() + 1);
        let mut start = Instant::now();
        let (decoded, reader) = thread::scope(|scope| {
            let decoding: Vec<_> = sessions
                .iter_mut()
                .zip(&tokens)
                .map(|(session, tokens)| {
                    let (until, begin) = ((reading > 0).then_some(&is_read), &begin);
                    scope.spawn(move || {
                        begin.wait();
                        decode(session, tokens, until, interrupt)
                    })
                })
                .collect();
            begin.wait();
            start = Instant::now();
            let reader = (reading > 0).then(|| {
                let read = Session::new(engine, SessionOptions::default())
                    .and_then(|mut session| read(&mut session, &prompt, interrupt));
                is_read.store(true, Ordering::Relaxed);
                read.map(|()| start.elapsed().as_secs_f64())
            });
            let decoded = decoding.into_iter().map(|handle| handle.join().expect("decoding does not panic"));
            (decoded.collect::<Result<Vec<_>, Error>>(), reader.transpose())
        });
        let elapsed = start.elapsed().as_secs_f64();
        let judged = |e: Error| if interrupt.seen() { Failure::Interrupted } else { e.into() };
        let (decoded, reader) = (decoded.map_err(judged)?, reader.map_err(judged)?);
        if round > 0 {
            let count: usize = decoded.iter().map(|d| d.milliseconds.len()).sum();
            let longest = decoded.iter().map(|d| d.seconds).fold(0.0, f64::max);
            rates.push(count as f64 / if reading > 0 { elapsed } else { longest });
            let after = engine.metrics();
            tokens_in_steps +=
                after.decode_tokens + after.prefill_tokens - before.decode_tokens - before.prefill_tokens;
            steps += after.steps - before.steps;
            in_steps += after.step_seconds.sum() - before.step_seconds.sum();
            reader_rates.extend(reader.map(|seconds| reading as f64 / seconds));
            milliseconds.extend(decoded.into_iter().flat_map(|d| d.milliseconds));
        }
    }
    milliseconds.sort_by(f64::total_cmp);
    let last = milliseconds.len() - 1;
    Ok(Row {
        sessions: sessions.len(),
        context,
        reading,
        tokens_per_second: spread(&rates).0,
        tokens_per_step: tokens_in_steps as f64 / steps.max(1) as f64,
        ms_per_step: in_steps * 1e3 / steps.max(1) as f64,
        between: [milliseconds[last / 2], milliseconds[last * 99 / 100], milliseconds[last]],
        reader_per_second: (!reader_rates.is_empty()).then(|| spread(&reader_rates).0),
        cache: Cache::of(engine, sessions),
    })
}

impl Cache {
    fn of(engine: &Engine, sessions: &[Session]) -> Self {
        let is_on_host = engine.options().device == DeviceChoice::Cpu;
        let plan_for = if is_on_host { CachePlan::new } else { CachePlan::in_page_memory };
        let stats = engine.cache_stats();
        let plan = plan_for(engine.model().config(), engine.kv_format(), 0, stats.limit_bytes);
        let own = |session: &Session| {
            let bytes = session.cache_bytes();
            bytes.window + bytes.state + bytes.pages
        };
        Self {
            used: stats.pool.used_bytes - stats.evictable_blocks * plan.block,
            own: sessions.iter().map(own).sum(),
            planned: sessions.iter().map(|session| plan.pages(session.position())).sum(),
            contiguous: sessions.iter().map(|session| plan.pages(session.context())).sum(),
        }
    }
}

/// Feeds `tokens` one by one, at least one, and again from the first until `until` is set, if it is given.
fn decode(
    session: &mut Session,
    tokens: &[TokenId],
    until: Option<&AtomicBool>,
    interrupt: &Interrupt,
) -> Result<Decoded, Error> {
    let (start, mut milliseconds) = (Instant::now(), Vec::new());
    let count = if until.is_some() { usize::MAX } else { tokens.len() };
    for &token in tokens.iter().cycle().take(count) {
        let before = Instant::now();
        session.feed(&[token])?;
        milliseconds.push(before.elapsed().as_secs_f64() * 1e3);
        if until.is_some_and(|until| until.load(Ordering::Relaxed)) {
            break;
        }
        if interrupt.seen() {
            return Err(Error::new(ErrorKind::Cancelled, "interrupted"));
        }
    }
    Ok(Decoded { seconds: start.elapsed().as_secs_f64(), milliseconds })
}

fn read(session: &mut Session, tokens: &[TokenId], interrupt: &Interrupt) -> Result<(), Error> {
    session
        .feed_with(tokens, &mut |_| if interrupt.seen() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
}

fn as_json(r: &Row) -> Value {
    let [median, p99, max] = r.between;
    json!({
        "sessions": r.sessions,
        "context": r.context,
        "reading": r.reading,
        "tokens_per_second": r.tokens_per_second,
        "ms_between_tokens": { "median": median, "p99": p99, "max": max },
        "reader_tokens_per_second": r.reader_per_second,
        "tokens_per_step": r.tokens_per_step,
        "ms_per_step": r.ms_per_step,
        "cache_bytes": {
            "used": r.cache.used, "own": r.cache.own, "planned": r.cache.planned, "contiguous": r.cache.contiguous,
        },
    })
}
