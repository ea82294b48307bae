//! `dsv4 bench`: prefill and decode speed at context frontiers.

#![forbid(unsafe_code)]

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use dsv4::research::HostFigures;
use dsv4::{CheckpointPolicy, Engine, EngineOptions, Error, ErrorKind, Model, Session, SessionOptions, TokenId, alloc};
use serde_json::{Value, json};

use crate::args::{EngineArgs, MetricsArgs};
use crate::failure::{Failure, Result};
use crate::interrupt::Interrupt;
use crate::number::{between, whole};
use crate::output::line;
use crate::{output, progress};

mod bandwidth;
mod hybrid;
mod layers;
mod sessions;

use bandwidth::Bandwidth;
use hybrid::Hybrid;

const EXAMPLES: &str = "\
Prefill: that many tokens fed at once behind a context of the given length.
Decode: tokens fed one by one behind it, one repetition after the other. Tokens
come from a seeded generator, so no tokenizer is needed. One unmeasured round
comes first. Speeds are tokens/s: median, slowest and fastest repetition.

--sessions has a thread for each session, which share steps but no token. Cache
bytes are those that the pool has given out for them, those of the plan, and
those of a cache that sets the longest context aside for each.

--bandwidth compares decoding with a plain multi-threaded sum over the same
mapped bytes that one token reads (dense weights and its experts), taken in turns
with it: the share of the memory bandwidth that decoding reaches. Where experts are
shared out between a GPU and the host, it compares with the time that both need to
read what they have of a token: bytes of the GPU's weights at the rate of a copy in
its memory; in each layer's experts the slower of both counts, the host's at the
rate of the sum over experts.

Examples:
  dsv4 bench examples/models/tiny-v4 --prefill 512 --decode 32 --context 0,1024,4096
  dsv4 bench MODEL --decode 64 --bandwidth --json
  dsv4 bench MODEL --device cuda --gpu-experts 36 --prefill 0 --decode 128 --bandwidth
  dsv4 bench MODEL --sessions 1,8 --prefill 0 --context 256
  dsv4 bench MODEL --sessions 1,10,50 --prefill 0 --context 2048 --max-context 32768
  dsv4 bench MODEL --sessions 3 --prefill 32768 --context 64";

/// Measure prefill and decode speed at context frontiers
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Checkpoint folder; a tokenizer is not needed
    model: PathBuf,

    /// Lengths of prompts to prefill; 0 measures none
    #[arg(long, value_name = "N,N,..", value_parser = whole::<usize>, value_delimiter = ',', default_value = "512")]
    prefill: Vec<usize>,

    /// Tokens to decode one by one; 0 measures none
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = whole::<usize>)]
    decode: usize,

    /// Tokens that are in the session before
    #[arg(long, value_name = "N,N,..", value_parser = whole::<usize>, value_delimiter = ',', default_value = "0")]
    context: Vec<usize>,

    /// Measurements of each kind
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = between([1, 1000]))]
    repetitions: u64,

    /// Compare decoding with a plain sum over the bytes that one token reads
    #[arg(long)]
    bandwidth: bool,

    /// Times of single layers by kind, and of all layers of V4-Flash, for which those of the model stand by kind; for the
    /// tokens of --prefill and for one, behind contexts of pages that are copies of one computed block (GPUs only)
    #[arg(long, conflicts_with_all = ["bandwidth", "csv"])]
    layers: bool,

    /// Numbers of sequences that decode together in a step of --layers; single layers are timed for one
    #[arg(long, value_name = "N,N,..", value_parser = between([1, 256]), value_delimiter = ',', default_value = "1", requires = "layers")]
    batch: Vec<u64>,

    /// Numbers of sessions that decode at the same time, a thread each: tokens/s of all together and times between tokens,
    /// also while one session more reads a prompt of --prefill tokens
    #[arg(long, value_name = "N,N,..", value_parser = between([1, 4096]), value_delimiter = ',', conflicts_with_all = ["bandwidth", "layers", "csv"])]
    sessions: Vec<u64>,

    /// Most tokens of a session of --sessions, which a cache in one piece would set aside; 0 takes the model's
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<usize>, requires = "sessions")]
    max_context: usize,

    /// Start of the generator of token ids
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<u64>)]
    seed: u64,

    /// Print JSON
    #[arg(long, conflicts_with = "csv")]
    json: bool,

    /// Print CSV
    #[arg(long)]
    csv: bool,

    #[command(flatten)]
    metrics: MetricsArgs,

    #[command(flatten)]
    engine: EngineArgs,
}

/// Decoding beside what memory allows; its text is a line or several.
trait Comparison: fmt::Display {
    fn as_json(&self) -> Value;
}

/// One kind of measurement with the seconds of each repetition.
struct Measurement {
    kind: &'static str,
    context: usize,
    tokens: usize,
    seconds: Vec<f64>,
}

impl Measurement {
    /// Tokens/s: median, slowest, fastest.
    fn rates(&self) -> [f64; 3] {
        let (median, min, max) = spread(&self.seconds);
        [median, max, min].map(|seconds| self.tokens as f64 / seconds.max(1e-9))
    }
}

/// Median, smallest and largest; `values` is not empty.
fn spread(values: &[f64]) -> (f64, f64, f64) {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (middle, last) = (sorted.len() / 2, sorted.len() - 1);
    let median = if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 };
    (median, sorted[0], sorted[last])
}

pub(crate) fn run(args: &Args) -> Result {
    if !args.sessions.is_empty() && args.decode == 0 {
        return Err(Failure::Usage("--sessions measures decoding: --decode must not be 0".to_owned()));
    }
    if args.bandwidth && args.decode == 0 {
        return Err(Failure::Usage("--bandwidth compares with decoding: --decode must not be 0".to_owned()));
    }
    let prefills: Vec<usize> = args.prefill.iter().copied().filter(|&n| n > 0).collect();
    if prefills.is_empty() && args.decode == 0 {
        return Err(Failure::Usage("--prefill 0 --decode 0 leaves nothing to measure".to_owned()));
    }
    let metrics = args.metrics.check(&args.model)?;
    // nothing is taken from a cache: what is measured is computed
    let options = EngineOptions { checkpoints: CheckpointPolicy::None, ..args.engine.options() };
    let engine = Engine::new(&Model::open(&args.model)?, options)?;
    measure(args, &engine, &prefills)?;
    MetricsArgs::write(metrics.as_ref(), &engine)
}

fn measure(args: &Args, engine: &Arc<Engine>, prefills: &[usize]) -> Result {
    if args.layers {
        let mut ids = Ids { vocab: engine.model().config().vocab_size as u64, state: args.seed };
        return layers::run(args, engine, prefills, &mut |n| ids.take(n));
    }
    if !args.sessions.is_empty() {
        return sessions::run(args, engine, prefills);
    }
    let mut bench = Bench {
        ids: Ids { vocab: engine.model().config().vocab_size as u64, state: args.seed },
        session: Session::new(engine, SessionOptions::default())?,
        interrupt: Interrupt::arm(),
        repetitions: args.repetitions as usize,
    };
    let mut measurements = Vec::new();
    bench.check_lengths(args)?;
    let bar =
        progress::bar("bench", (args.context.len() * (prefills.len() + usize::from(args.decode > 0))) as u64, "kinds");
    for &context in &args.context {
        for &tokens in prefills {
            measurements.push(bench.prefill(context, tokens)?);
            bar.inc(1);
        }
        if args.decode > 0 {
            measurements.push(bench.decode(context, args.decode)?);
            bar.inc(1);
        }
    }
    let bandwidth = if args.bandwidth { Some(bench.compare(engine, args.decode)?) } else { None };
    bar.finish_and_clear();
    match (args.json, args.csv) {
        (true, _) => output::json(&as_json(engine, &measurements, bandwidth.as_deref())),
        (_, true) => print_csv(engine, &measurements, bandwidth.as_deref()),
        _ => print(engine, &measurements, bandwidth.as_deref()),
    }
}

struct Bench {
    ids: Ids,
    session: Session,
    interrupt: Interrupt,
    repetitions: usize,
}

impl Bench {
    /// Refuses lengths that do not fit into the model's context, before any memory is taken for them.
    fn check_lengths(&self, args: &Args) -> Result {
        let longest = self.session.context();
        let decoded = args.decode.saturating_mul(self.repetitions + 1);
        let prefills = args.prefill.iter().map(|&n| ("--prefill", n, n));
        for &context in &args.context {
            for (option, given, tokens) in prefills.clone().chain([("--decode", args.decode, decoded)]) {
                if context.saturating_add(tokens) > longest {
                    return Err(Error::new(
                        ErrorKind::InvalidArgument,
                        format!(
                            "{option} {given} behind --context {context} takes {} tokens; the model's \
                             max_position_embeddings is {longest}",
                            context.saturating_add(tokens)
                        ),
                    )
                    .into());
                }
            }
        }
        Ok(())
    }

    fn prefill(&mut self, context: usize, tokens: usize) -> Result<Measurement> {
        let mut seconds = Vec::new();
        for round in 0..=self.repetitions {
            self.start_at(context)?;
            let ids = self.ids.take(tokens)?;
            let token = self.session.cancel_token();
            let start = Instant::now();
            let fed = self.interrupt.cancels(&token, || self.session.feed(&ids));
            self.judge(fed)?;
            self.note(round, start, &mut seconds)?;
        }
        Ok(Measurement { kind: "prefill", context, tokens, seconds })
    }

    fn decode(&mut self, context: usize, tokens: usize) -> Result<Measurement> {
        let mut seconds = Vec::new();
        self.start_at(context)?;
        for round in 0..=self.repetitions {
            let start = Instant::now();
            self.decode_once(tokens)?;
            self.note(round, start, &mut seconds)?;
        }
        Ok(Measurement { kind: "decode", context, tokens, seconds })
    }

    /// Decoding beside what memory allows.
    fn compare(&mut self, engine: &Engine, tokens: usize) -> Result<Box<dyn Comparison>> {
        Ok(match HostFigures::of(engine) {
            None => Box::new(self.bandwidth(engine, tokens)?),
            Some(_) => Box::new(self.hybrid(engine, tokens)?),
        })
    }

    /// As [`Self::bandwidth`], with experts on both sides.
    fn hybrid(&mut self, engine: &Engine, tokens: usize) -> Result<Hybrid> {
        let mut result = Hybrid::new(engine, tokens)?;
        self.start_at(0)?;
        for round in 0..=self.repetitions {
            let sum = result.sum(engine.model(), round);
            let before = result.figures(engine);
            let start = Instant::now();
            self.decode_once(tokens)?;
            if round > 0 {
                result.note(sum, before, result.figures(engine));
                result.note_device(engine)?;
            }
            self.note(round, start, &mut result.decode_seconds)?;
        }
        Ok(result)
    }

    /// Sums and decodes in turns, from an empty session.
    fn bandwidth(&mut self, engine: &Engine, tokens: usize) -> Result<Bandwidth> {
        let mut result = Bandwidth::new(engine.model(), engine.threads(), tokens);
        self.start_at(0)?;
        for round in 0..=self.repetitions {
            let sum = result.sum(engine.model(), round);
            let start = Instant::now();
            self.decode_once(tokens)?;
            if round > 0 {
                result.sum_seconds.push(sum);
            }
            self.note(round, start, &mut result.decode_seconds)?;
        }
        Ok(result)
    }

    fn decode_once(&mut self, tokens: usize) -> Result {
        let ids = self.ids.take(tokens)?;
        let token = self.session.cancel_token();
        let fed = self.interrupt.cancels(&token, || ids.iter().try_for_each(|&id| self.session.feed(&[id])));
        self.judge(fed)
    }

    /// Empties the session and fills it with `context` tokens.
    fn start_at(&mut self, context: usize) -> Result {
        self.session.clear()?;
        let ids = self.ids.take(context)?;
        let token = self.session.cancel_token();
        let fed = self.interrupt.cancels(&token, || self.session.feed(&ids));
        self.judge(fed)
    }

    /// Tells Ctrl-C from other ends of a call.
    fn judge(&self, fed: Result<(), Error>) -> Result {
        match fed {
            Err(e) if e.kind() == ErrorKind::Cancelled && self.interrupt.seen() => Err(Failure::Interrupted),
            other => Ok(other?),
        }
    }

    /// Keeps the time since `start` unless this was the warm-up round.
    fn note(&self, round: usize, start: Instant, seconds: &mut Vec<f64>) -> Result {
        if round > 0 {
            seconds.push(start.elapsed().as_secs_f64());
        }
        if self.interrupt.seen() { Err(Failure::Interrupted) } else { Ok(()) }
    }
}

/// Token ids that look random and are the same each time (`SplitMix64`).
struct Ids {
    vocab: u64,
    state: u64,
}

impl Ids {
    fn take(&mut self, n: usize) -> Result<Vec<TokenId>, Error> {
        let mut ids = alloc::with_capacity("token ids", n)?;
        ids.extend((0..n).map(|_| self.next()));
        Ok(ids)
    }

    fn next(&mut self) -> TokenId {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^= z >> 31;
        // the high half of the product: below the vocabulary, without the bias of a remainder's low bits
        ((u128::from(z) * u128::from(self.vocab)) >> 64) as TokenId
    }
}

fn as_json(engine: &Engine, measurements: &[Measurement], bandwidth: Option<&dyn Comparison>) -> Value {
    let c = engine.model().config();
    let one = |m: &Measurement| {
        let [median, min, max] = m.rates();
        json!({
            "kind": m.kind,
            "context": m.context,
            "tokens": m.tokens,
            "tokens_per_second": { "median": median, "min": min, "max": max },
            "seconds": m.seconds,
        })
    };
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "device": engine.options().device.to_string(),
        "threads": engine.threads(),
        "simd": engine.simd(),
        "numerics": engine.options().numerics.name(),
        "kv_format": engine.kv_format().name(),
        "prefill_chunk": engine.options().prefill_chunk,
        "model": {
            "path": engine.model().path().to_string_lossy(),
            "num_hidden_layers": c.num_hidden_layers,
            "hidden_size": c.hidden_size,
            "n_routed_experts": c.n_routed_experts,
            "num_experts_per_tok": c.num_experts_per_tok,
            "moe_intermediate_size": c.moe_intermediate_size,
            "vocab_size": c.vocab_size,
            "bytes": engine.model().checkpoint().total_bytes(),
        },
        "measurements": measurements.iter().map(one).collect::<Vec<_>>(),
        "bandwidth": bandwidth.map(Comparison::as_json),
    })
}

fn print_csv(engine: &Engine, measurements: &[Measurement], bandwidth: Option<&dyn Comparison>) -> Result {
    line("kind,context,tokens,tokens_per_second,min,max,repetitions,threads,simd,numerics")?;
    let setting = format!("{},{},{}", engine.threads(), engine.simd(), engine.options().numerics);
    for m in measurements {
        let [median, min, max] = m.rates();
        let (kind, context, tokens, n) = (m.kind, m.context, m.tokens, m.seconds.len());
        line(format_args!("{kind},{context},{tokens},{median:.3},{min:.3},{max:.3},{n},{setting}"))?;
    }
    if let Some(b) = bandwidth {
        output::note(b);
    }
    Ok(())
}

fn print(engine: &Engine, measurements: &[Measurement], bandwidth: Option<&dyn Comparison>) -> Result {
    let c = engine.model().config();
    line(format_args!(
        "{}, {} threads, {}, {}; {} layers, hidden {}, {} of {} experts",
        engine.options().device,
        engine.threads(),
        engine.simd(),
        engine.options().numerics,
        c.num_hidden_layers,
        c.hidden_size,
        c.num_experts_per_tok,
        c.n_routed_experts
    ))?;
    line("kind     context  tokens  tokens/s     min     max")?;
    for m in measurements {
        let [median, min, max] = m.rates().map(output::rate);
        line(format_args!("{:<8} {:>7} {:>7} {median:>9} {min:>7} {max:>7}", m.kind, m.context, m.tokens))?;
    }
    match bandwidth {
        Some(b) => line(b),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_repeat_for_a_seed_and_stay_in_the_vocabulary() {
        let ids = |seed| Ids { vocab: 97, state: seed }.take(1000).unwrap();
        assert_eq!(ids(7), ids(7));
        assert_ne!(ids(7), ids(8));
        assert!(ids(7).iter().all(|&id| id < 97));
        assert!((0..97).all(|id| ids(7).contains(&id)), "every id occurs in a thousand draws");
    }

    #[test]
    fn a_rate_is_the_median_and_the_slowest_time_gives_the_smallest() {
        let m = Measurement { kind: "decode", context: 0, tokens: 10, seconds: vec![4.0, 1.0, 2.0] };
        assert_eq!(m.rates(), [5.0, 2.5, 10.0]);
        assert_eq!(spread(&[1.0, 3.0]).0, 2.0);
    }
}
