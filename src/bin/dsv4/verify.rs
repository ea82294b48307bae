//! `dsv4 verify`: is this folder whole, and is it what its config says?

#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::time::Duration;

use dsv4::model::config::Config;
use dsv4::model::weights::Weights;
use dsv4::tokenizer::Tokenizer;
use dsv4::weights::{Checkpoint, INDEX_FILE};
use dsv4::{Error, ErrorKind, Result as Outcome, file};

use crate::args::Defaults;
use crate::failure::{Failure, Result, one_line};
use crate::{output, progress};

const EXAMPLES: &str = "\
Checks config.json, that every shard of the index is there with the size its
header declares, that every tensor is in the shard the index says and in no other,
that all tensors of the architecture are there with their shapes, dtypes and
scales, that the tables of experts name experts, that the tokenizer loads and fits
the model, and that generation_config.json says something possible. With --scan it
also reads every byte, which takes as long as the disk does.

Each finding is a line on standard output; the exit code is 1 if there is any,
else 0.

Example:
  dsv4 verify ~/models/DeepSeek-V4-Flash --scan";

/// Check a checkpoint's files against their index, sizes and architecture
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Checkpoint folder
    model: PathBuf,

    /// Read all weights and report suspicious ones: all zeros, NaN or infinite
    #[arg(long)]
    scan: bool,
}

pub(crate) fn run(args: &Args) -> Result {
    let found = check(args)?;
    if found > 0 {
        output::line(format_args!("{found} finding{}", if found == 1 { "" } else { "s" }))?;
        return Err(Failure::Findings);
    }
    Ok(())
}

/// Number of findings, each printed.
fn check(args: &Args) -> Result<usize> {
    file::check_model_folder(&args.model)?;
    let mut found = 0;
    let config = keep(Config::from_file(&args.model.join("config.json")), &mut found)?;
    let shards = keep(Checkpoint::survey(&args.model), &mut found)?;
    let mut is_whole = shards.is_some();
    for shard in shards.into_iter().flatten() {
        is_whole &= keep(shard.state, &mut found)?.is_some();
    }
    keep_optional(tokenizer(&args.model, config.as_ref()), &mut found)?;
    keep(Defaults::of_model(&args.model), &mut found)?;
    if !is_whole {
        return Ok(found);
    }
    let Some(checkpoint) = keep(Checkpoint::open(&args.model), &mut found)? else { return Ok(found) };
    let weights = config.map(|config| keep(Weights::resolve(&config, &checkpoint), &mut found)).transpose()?;
    for table in weights.iter().flatten().flat_map(Weights::hash_tables) {
        keep(table.check(), &mut found)?;
    }
    for difference in checkpoint.differences() {
        found += 1;
        output::line(one_line(&format!("{}: {difference}", args.model.join(INDEX_FILE).display())))?;
    }
    if args.scan {
        found += scan(&checkpoint)?;
    }
    if found == 0 {
        let (tensors, shards) = (checkpoint.len(), checkpoint.shards().len());
        let scanned = if args.scan { ", all bytes read" } else { "" };
        let size = output::size(checkpoint.total_bytes());
        output::line(format_args!("ok: {tensors} tensors in {shards} shards, {size}{scanned}"))?;
    }
    Ok(found)
}

/// The tokenizer as running the model has it, padded to the config's ids.
fn tokenizer(model: &Path, config: Option<&Config>) -> Outcome<Tokenizer> {
    let path = model.join("tokenizer.json");
    let tokenizer = Tokenizer::from_file(&path)?;
    let Some(config) = config else { return Ok(tokenizer) };
    tokenizer.pad_to(config.vocab_size).map_err(|e| e.context(path.display()))
}

/// Reads every byte.
fn scan(checkpoint: &Checkpoint) -> Result<usize> {
    let bar = progress::byte_bar("scan", checkpoint.total_bytes());
    bar.enable_steady_tick(Duration::from_millis(200));
    let suspicions = checkpoint.suspicious(&mut |done, _| {
        bar.set_position(done);
        true
    });
    bar.finish_and_clear();
    let suspicions = suspicions?;
    for suspicion in &suspicions {
        output::line(one_line(&suspicion.to_string()))?;
    }
    Ok(suspicions.len())
}

/// The value, or `None` with its error printed as a finding.
fn keep<T>(outcome: Outcome<T>, found: &mut usize) -> Result<Option<T>> {
    match outcome {
        Ok(value) => Ok(Some(value)),
        Err(e) => {
            finding(&e, found)?;
            Ok(None)
        }
    }
}

/// As [`keep`] for a file that a model can run without.
fn keep_optional<T>(outcome: Outcome<T>, found: &mut usize) -> Result<Option<T>> {
    match outcome {
        Err(e) if e.kind() == ErrorKind::NotFound => {
            output::note(format_args!("note: {}: runs by token ids only", one_line(e.message())));
            Ok(None)
        }
        other => keep(other, found),
    }
}

fn finding(e: &Error, found: &mut usize) -> Result {
    *found += 1;
    output::line(one_line(e.message()))
}
