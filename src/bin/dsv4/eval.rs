//! `dsv4 eval`: perplexity of a text, recall of planted keys.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use dsv4::session::eval::{Filler, Perplexity, PlantedKey, RecallCase, perplexity, recalls};
use dsv4::{Engine, Error, ErrorKind, Markup, Session, TokenId, Tokenizer, file};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::args::{ContextArgs, EngineArgs};
use crate::failure::{Failure, Result};
use crate::interrupt::Interrupt;
use crate::number::{between, whole};
use crate::output::line;
use crate::{output, progress};

const EXAMPLES: &str = "\
Perplexity: the begin-of-sentence token and the text as one sequence, mean of
the negative logarithm of p(next token), no windowing.
Recall: greedy decoding of an answer that stands earlier in the prompt; all its
tokens must come. Cases come from a file, a JSON list of
{\"distance\", \"prompt\": [ids], \"answer\": [ids]}, or are planted into a filler text.

Examples:
  dsv4 eval examples/models/tiny-v4 --text examples/models/tiny-v4/eval.txt --numerics exact
  dsv4 eval examples/models/tiny-v4 --recall examples/models/tiny-v4/recall.json --json
  dsv4 eval MODEL --recall-distances 1000,30000,100000 --filler book.txt";

/// Measure perplexity on a text and recall of planted keys
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
#[command(group = clap::ArgGroup::new("what").required(true).multiple(true).args(["text", "recall", "recall_distances"]))]
pub(crate) struct Args {
    /// Checkpoint folder
    model: PathBuf,

    /// Perplexity of this UTF-8 text file; - is standard input
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,

    /// Only the first N predictions; 0 is all
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<usize>, requires = "text")]
    limit: usize,

    /// Recall of the cases in this file
    #[arg(long, value_name = "FILE.json")]
    recall: Option<PathBuf>,

    /// Recall of keys planted this many tokens before the end of the prompt
    #[arg(long, value_name = "N,N,..", value_parser = whole::<usize>, value_delimiter = ',')]
    recall_distances: Vec<usize>,

    /// The text to plant keys into [default: a paragraph of this program, repeated]
    #[arg(long, value_name = "FILE", requires = "recall_distances")]
    filler: Option<PathBuf>,

    /// Keys planted at each distance
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = between([1, 1000]))]
    cases: u64,

    /// Print JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    context: ContextArgs,

    #[command(flatten)]
    engine: EngineArgs,
}

pub(crate) fn run(args: &Args) -> Result {
    // files first: a mistyped name should not wait for the model
    let text = args.text.as_deref().map(output::read_text).transpose()?;
    let from_file = args.recall.as_deref().map(read_cases).transpose()?;
    let filler = args.filler.as_deref().map(output::read_text).transpose()?;
    let engine = args.engine.open(&args.model)?;
    let mut session = args.context.session(&engine)?;
    let interrupt = Interrupt::arm();

    let perplexity = match &text {
        Some(text) => Some(measure(&mut session, &text_ids(&engine, text, args.limit)?, &interrupt)?),
        None => None,
    };
    let mut cases = from_file.unwrap_or_default();
    if !args.recall_distances.is_empty() {
        cases.extend(plant(args, &engine, filler.as_deref().unwrap_or(PARAGRAPH), session.context())?);
    }
    let recall = ask(&mut session, &cases, &interrupt)?;
    if args.json {
        return output::json(&as_json(&engine, perplexity, &recall));
    }
    if let Some(p) = perplexity {
        line(format_args!(
            "perplexity {:.4} (loss {:.6} over {} predictions, {})",
            p.perplexity(),
            p.loss,
            p.predictions,
            engine.options().numerics
        ))?;
    }
    for (distance, share) in &recall {
        line(format_args!("recall at {distance:>7} tokens: {}/{}", share.right, share.cases))?;
    }
    Ok(())
}

/// Ids of a text behind the begin-of-sentence token, enough for `limit` predictions unless that is 0.
fn text_ids(engine: &Engine, text: &str, limit: usize) -> Result<Vec<TokenId>> {
    let mut ids = vec![engine.model().config().bos_token_id];
    ids.extend(engine.model().tokenizer()?.encode(text, Markup::Text)?);
    if limit > 0 {
        ids.truncate(limit.saturating_add(1));
    }
    Ok(ids)
}

fn measure(session: &mut Session, ids: &[TokenId], interrupt: &Interrupt) -> Result<Perplexity> {
    let bar = progress::bar("perplexity", ids.len().saturating_sub(1) as u64, "tokens");
    let result = interrupt.cancels(&session.cancel_token(), || {
        perplexity(session, ids, &mut |done| {
            bar.set_position(done as u64);
            !interrupt.seen()
        })
    });
    bar.finish_and_clear();
    match result {
        Err(e) if e.kind() == ErrorKind::Cancelled => Err(Failure::Interrupted),
        other => Ok(other?),
    }
}

/// Right answers of some cases.
#[derive(Default)]
struct Share {
    right: usize,
    cases: usize,
}

/// Asks every case; shares by distance.
fn ask(session: &mut Session, cases: &[RecallCase], interrupt: &Interrupt) -> Result<BTreeMap<usize, Share>> {
    let bar = progress::bar("recall", cases.len() as u64, "prompts");
    let mut shares = BTreeMap::<usize, Share>::new();
    for case in cases {
        let right = interrupt.cancels(&session.cancel_token(), || recalls(session, case));
        if interrupt.seen() {
            return Err(Failure::Interrupted);
        }
        let right = right?;
        let share = shares.entry(case.distance).or_default();
        share.cases += 1;
        share.right += usize::from(right);
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(shares)
}

fn as_json(engine: &Engine, perplexity: Option<Perplexity>, recall: &BTreeMap<usize, Share>) -> Value {
    let recall = recall
        .iter()
        .map(|(distance, share)| json!({ "distance": distance, "right": share.right, "cases": share.cases }))
        .collect::<Vec<_>>();
    json!({
        "numerics": engine.options().numerics.name(),
        "kv_format": engine.kv_format().name(),
        "perplexity": perplexity.map(|p| json!({
            "predictions": p.predictions,
            "loss": p.loss,
            "perplexity": p.perplexity(),
        })),
        "recall": recall,
    })
}

fn read_cases(path: &Path) -> Result<Vec<RecallCase>> {
    #[derive(Deserialize)]
    struct Case {
        distance: usize,
        prompt: Vec<TokenId>,
        answer: Vec<TokenId>,
    }
    let fault = |what: String| Error::new(ErrorKind::InvalidArgument, format!("{}: {what}", path.display()));
    let text = file::read(path, file::JSON)?;
    let cases: Vec<Case> =
        serde_json::from_slice(&text).map_err(|e| fault(format!("not a list of recall cases: {e}")))?;
    if cases.is_empty() {
        return Err(fault("the list of recall cases is empty".to_owned()).into());
    }
    Ok(cases.into_iter().map(|Case { distance, prompt, answer }| RecallCase { distance, prompt, answer }).collect())
}

/// Text to plant keys into when there is no `--filler`; repeated, so it is dull on purpose.
const PARAGRAPH: &str = "The road went on between the fields, and nothing in it was new. A cart stood at the gate, the \
grass was long, and the wind came over the hill as it had come in the morning. Somebody had left a lamp in the window. \
We walked slowly, because there was no reason to walk fast, and spoke of the weather.\n\n";
const NAMES: [&str; 8] = ["Rose", "Nicholas", "Peter", "Isabel", "Harry", "Meg", "Dora", "Tom"];
const WORDS: [&str; 11] =
    ["paused", "answer", "horror", "seven", "offered", "family", "glance", "walked", "yellow", "bread", "door"];

/// Filler tokens in front of the fact.
const LEAD: usize = 32;

/// `--cases` keys at each distance: "The secret word of NAME is WORD WORD." and the question for it.
fn plant(args: &Args, engine: &Engine, filler: &str, context: usize) -> Result<Vec<RecallCase>> {
    let tokenizer = engine.model().tokenizer()?;
    let ids = tokenizer.encode(filler, Markup::Text)?;
    let mut cases = Vec::new();
    for &distance in &args.recall_distances {
        if distance > context {
            let message = format!("--recall-distances {distance} is more than the {context} tokens of the context");
            return Err(Error::new(ErrorKind::InvalidArgument, message).into());
        }
        for case in 0..args.cases as usize {
            let filler = Filler {
                bos: engine.model().config().bos_token_id,
                ids: &ids,
                start: case * ids.len() / args.cases as usize,
            };
            cases.push(RecallCase::plant(&filler, &key(tokenizer, case + distance)?, LEAD, distance)?);
        }
    }
    Ok(cases)
}

/// Key number `n`; the numbers of names and words have no common factor, so keys repeat late.
fn key(tokenizer: &Tokenizer, n: usize) -> Result<PlantedKey> {
    let encode = |text: &str| tokenizer.encode(text, Markup::Text);
    let name = NAMES[n % NAMES.len()];
    let (first, second) = (WORDS[n % WORDS.len()], WORDS[(n * 3 + 5) % WORDS.len()]);
    Ok(PlantedKey {
        fact: encode(&format!("\n\nThe secret word of {name} is"))?,
        answer: encode(&format!(" {first} {second}"))?,
        separator: encode(".\n\n")?,
        question: encode(&format!("\n\nWhat is the secret word of {name}? The secret word of {name} is"))?,
    })
}
