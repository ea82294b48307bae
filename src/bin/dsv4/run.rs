//! `dsv4 run`: continues a text.

use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use dsv4::{
    DeviceChoice, Engine, Error, ErrorKind, Finish, GenerateOptions, Generation, Markup, Model, Sampler, Session,
    TokenId,
};

use crate::args::{CallArgs, ContextArgs, EngineArgs, MetricsArgs, SamplingArgs, SessionArgs};
use crate::failure::{Failure, Result};
use crate::interrupt::Interrupt;
use crate::number::whole;
use crate::{output, progress};

const EXAMPLES: &str = "\
The text goes to standard output as it comes; progress, speed and errors go to
standard error.

Examples:
  dsv4 run examples/models/tiny-v4 --prompt \"Once upon a time\"
  dsv4 run MODEL --prompt-file chapter.txt --max-tokens 500 --stats > next.txt
  dsv4 run MODEL --session tale.session --prompt \"Once upon a time\"
  dsv4 run MODEL --session tale.session --prompt \" Then\"
  echo -n \"2 + 2 =\" | dsv4 run MODEL --prompt-file - --greedy --stop $'\\n'
  dsv4 run MODEL --markup --prompt '<｜User｜>Hi<｜Assistant｜></think>'";

/// Continue a text
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Checkpoint folder
    model: PathBuf,

    #[command(flatten)]
    prompt: PromptArgs,

    /// Most tokens to generate; 0 is no limit but the context
    #[arg(short = 'n', long, value_name = "N", default_value_t = 200, value_parser = whole::<u64>)]
    max_tokens: u64,

    /// End at this text, which is not printed; may be given several times
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    stop: Vec<String>,

    /// Go on behind the end-of-sentence token
    #[arg(long)]
    ignore_eos: bool,

    /// Print the prompt in front of the text [default: on a terminal]
    #[arg(long, overrides_with = "no_echo")]
    echo: bool,

    /// Do not print the prompt
    #[arg(long)]
    no_echo: bool,

    /// Report tokens, those of the prompt that were reused, speed and memory at the end
    #[arg(long)]
    stats: bool,

    #[command(flatten)]
    sampling: SamplingArgs,

    #[command(flatten)]
    context: ContextArgs,

    #[command(flatten)]
    session: SessionArgs,

    #[command(flatten)]
    calls: CallArgs,

    #[command(flatten)]
    metrics: MetricsArgs,

    #[command(flatten)]
    engine: EngineArgs,
}

#[derive(clap::Args)]
struct PromptArgs {
    /// The text to continue
    #[arg(short, long, value_name = "TEXT", conflicts_with = "prompt_file")]
    prompt: Option<String>,

    /// A file with the text to continue; - is standard input
    #[arg(short = 'f', long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,

    /// Put the begin-of-sentence token in front, as the model expects (the default)
    #[arg(long, overrides_with = "no_bos")]
    bos: bool,

    /// Do not put the begin-of-sentence token in front
    #[arg(long)]
    no_bos: bool,

    /// Read control tokens such as <｜User｜> in the prompt as such, not as text
    #[arg(long)]
    markup: bool,
}

impl PromptArgs {
    fn text(&self) -> Result<String> {
        match (&self.prompt, &self.prompt_file) {
            (Some(text), _) => Ok(text.clone()),
            (None, Some(file)) => output::read_text(file),
            (None, None) => Err(Failure::Usage(
                "a prompt is needed: --prompt TEXT, or --prompt-file FILE (- is standard input)".to_owned(),
            )),
        }
    }

    /// The tokens that go behind those of `session`.
    fn tokens(&self, session: &Session, text: &str) -> Result<Vec<TokenId>> {
        let (model, is_start) = (session.engine().model(), session.position() == 0);
        let markup = if self.markup { Markup::Parse } else { Markup::Text };
        let bos = (is_start && !self.no_bos).then_some(model.config().bos_token_id);
        let mut ids: Vec<TokenId> = bos.into_iter().collect();
        ids.extend(model.tokenizer()?.encode(text, markup)?);
        if ids.is_empty() && is_start {
            return Err(Failure::Usage("the prompt is empty, and --no-bos leaves nothing to start from".to_owned()));
        }
        Ok(ids)
    }
}

pub(crate) fn run(args: Args) -> Result {
    let text = args.prompt.text()?;
    args.session.check()?;
    let sampling = args.sampling.options(&args.model)?;
    let metrics = args.metrics.check(&args.model)?;
    let engine = args.engine.open(&args.model)?;
    let mut session = args.session.open(&engine, &args.context)?;
    args.calls.apply(&mut session);
    check_length(&text, engine.model(), session.remaining())?;
    let prompt = args.prompt.tokens(&session, &text)?;
    let mut sampler = Sampler::new(sampling)?;
    for &id in session.tokens().iter().chain(&prompt) {
        sampler.accept(id)?;
    }
    let interrupt = Interrupt::arm();
    let (start, known, reused) = (Instant::now(), session.position(), session.reused_tokens());
    let fed = feed(&mut session, &prompt, &interrupt);
    if matches!(fed, Err(Failure::Interrupted)) {
        args.session.save_interrupted(&session, known, prompt.len())?;
    }
    fed?;
    let (prefill, reused) = (start.elapsed(), (session.reused_tokens() - reused) as usize);

    if args.echo || (!args.no_echo && output::is_terminal()) {
        output::piece(&if output::is_terminal() { output::dimmed(&text) } else { text })?;
    }
    let options = GenerateOptions {
        max_tokens: Some(args.max_tokens).filter(|&n| n > 0),
        ignore_eos: args.ignore_eos,
        stop_strings: args.stop,
        ..GenerateOptions::default()
    };
    let start = Instant::now();
    let mut generation = session.generate(&mut sampler, options)?;
    let ended = stream(&mut generation, &interrupt);
    let (tokens, finish) = (generation.tokens(), generation.finish());
    output::piece(&generation.into_held_text())?;
    if output::is_terminal() || ended.is_ok() {
        output::piece("\n")?;
    }
    if let (Ok(Some(token)), Some(Finish::MaxTokens)) = (&ended, finish) {
        // printed, but not yet in the session
        session.feed(&[*token])?;
    }
    args.session.save(&session)?;
    if finish == Some(Finish::ContextFull) && !args.stats {
        output::note(format_args!("(the context of {} tokens is full)", session.context()));
    }
    if args.stats {
        Stats { prompt: prompt.len(), reused, prefill, tokens, decode: start.elapsed(), finish }
            .report(&engine, &session);
    }
    // what the session used can go to the disk tier, if there is one
    drop(session);
    engine.flush_cache();
    MetricsArgs::write(metrics.as_ref(), &engine)?;
    ended.map(drop)
}

/// Refuses a text that cannot fit into `context` tokens even if all of them were the longest there is, before it is
/// encoded.
fn check_length(text: &str, model: &Model, context: usize) -> Result {
    let least = text.len().div_ceil(model.tokenizer()?.longest_token().max(1));
    if least > context {
        let bytes = text.len();
        let message = format!("the prompt of {bytes} bytes has at least {least} tokens; the context holds {context}");
        return Err(Error::new(ErrorKind::ContextFull, message).into());
    }
    Ok(())
}

/// Feeds `ids` with a progress bar; Ctrl-C ends it.
pub(crate) fn feed(session: &mut Session, ids: &[TokenId], interrupt: &Interrupt) -> Result {
    let bar = progress::bar("prompt", ids.len() as u64, "tokens");
    let fed = interrupt.cancels(&session.cancel_token(), || {
        session.feed_with(ids, &mut |progress| {
            bar.set_position(progress.done as u64);
            ControlFlow::Continue(())
        })
    });
    bar.finish_and_clear();
    match fed {
        // not by a time limit
        Err(e) if e.kind() == ErrorKind::Cancelled && interrupt.seen() => Err(Failure::Interrupted),
        Err(e) => Err(e.into()),
        Ok(()) if interrupt.seen() => Err(Failure::Interrupted),
        Ok(()) => Ok(()),
    }
}

/// Prints a generation as it comes. Returns its last token.
fn stream(generation: &mut Generation<'_>, interrupt: &Interrupt) -> Result<Option<TokenId>> {
    let mut last = None;
    for piece in generation {
        let piece = piece?;
        output::piece(&piece.text)?;
        last = Some(piece.token);
        if interrupt.seen() {
            return Err(Failure::Interrupted);
        }
    }
    Ok(last)
}

/// What `--stats` reports.
struct Stats {
    prompt: usize,
    /// Tokens of the prompt that the cache had.
    reused: usize,
    prefill: Duration,
    tokens: u64,
    decode: Duration,
    finish: Option<Finish>,
}

impl Stats {
    fn report(&self, engine: &Engine, session: &Session) {
        let per_second = |n: f64, time: Duration| output::rate(n / time.as_secs_f64().max(1e-9));
        let cache = session.cache_bytes();
        let end = match self.finish {
            Some(Finish::Eos) => "end of sentence",
            Some(Finish::Token(_) | Finish::String(_)) => "stop condition",
            Some(Finish::MaxTokens) => "--max-tokens",
            Some(Finish::ContextFull) => "context full",
            None => "interrupted",
        };
        let device = match engine.options().device {
            DeviceChoice::Cpu => format!("{} threads, {}", engine.threads(), engine.simd()),
            device @ DeviceChoice::Cuda(_) => format!("{device} ({})", engine.device_name()),
        };
        let break_line = if std::io::stderr().is_terminal() { "\n" } else { "" };
        output::note(format_args!(
            "{break_line}prompt: {} tokens, {} of them reused, {} tokens/s computed\noutput: {} tokens, {} tokens/s, ended by {end}\ncache: {} for {} \
             tokens\nengine: {} on {device}, {} cache",
            self.prompt,
            self.reused,
            per_second((self.prompt - self.reused) as f64, self.prefill),
            self.tokens,
            per_second(self.tokens as f64, self.decode),
            output::size(cache.window + cache.state + cache.pages),
            session.position(),
            engine.options().numerics,
            engine.kv_format(),
        ));
    }
}
