//! Sessions that decode at the same time, a thread each: how many tokens they get together, and how long each waits for
//! its next one, alone and while one session more reads a prompt.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use dsv4::{Engine, Error, ErrorKind, Session, SessionOptions, TokenId};
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
    /// Milliseconds between a session's tokens: median, 99th percentile, longest.
    between: [f64; 3],
    /// Of the prompt that is read.
    reader_per_second: Option<f64>,
    /// Of the sessions' caches.
    cache_bytes: u64,
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
            for _ in 0..count as usize {
                let mut session = Session::new(engine, SessionOptions::default())?;
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
    line(
        "sessions  context  reading  tokens/s  ms between tokens: median     p99     max  reader tokens/s  cache bytes",
    )?;
    for r in &rows {
        let [median, p99, max] = r.between;
        line(format_args!(
            "{:>8} {:>8} {:>8} {:>9} {median:>25.2} {p99:>7.2} {max:>7.2} {:>16} {:>12}",
            r.sessions,
            r.context,
            r.reading,
            rate(r.tokens_per_second),
            r.reader_per_second.map_or("-".to_owned(), rate),
            r.cache_bytes
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
    for round in 0..=args.repetitions {
        let tokens = (0..sessions.len()).map(|_| ids.take(args.decode)).collect::<Result<Vec<_>, Error>>()?;
        let prompt = ids.take(reading)?;
        let is_read = AtomicBool::new(false);
        let start = Instant::now();
        let (decoded, reader) = thread::scope(|scope| {
            let decoding: Vec<_> = sessions
                .iter_mut()
                .zip(&tokens)
                .map(|(session, tokens)| {
                    let until = (reading > 0).then_some(&is_read);
                    scope.spawn(move || decode(session, tokens, until, interrupt))
                })
                .collect();
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
            reader_rates.extend(reader.map(|seconds| reading as f64 / seconds));
            milliseconds.extend(decoded.into_iter().flat_map(|d| d.milliseconds));
        }
    }
    milliseconds.sort_by(f64::total_cmp);
    let last = milliseconds.len() - 1;
    let bytes = |session: &Session| {
        let bytes = session.cache_bytes();
        bytes.window + bytes.state + bytes.pages
    };
    Ok(Row {
        sessions: sessions.len(),
        context,
        reading,
        tokens_per_second: spread(&rates).0,
        between: [milliseconds[last / 2], milliseconds[last * 99 / 100], milliseconds[last]],
        reader_per_second: (!reader_rates.is_empty()).then(|| spread(&reader_rates).0),
        cache_bytes: sessions.iter().map(bytes).sum(),
    })
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
        "cache_bytes": r.cache_bytes,
    })
}
