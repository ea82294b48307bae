//! `dsv4 trace`: the residual streams behind each layer and all logits, for research.

#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use dsv4::research::{self, Trace};
use dsv4::{Error, ErrorKind, TokenId};
use safetensors::{Dtype, View};

use crate::args::EngineArgs;
use crate::failure::Result;
use crate::output;

const EXAMPLES: &str = "\
IDS.json is a list of token ids, such as [0, 1667, 12]; nothing is put in front of them. The file gets, all F32,
  logits              [n, vocab_size]                 of every position
  layers.L.streams    [n, hc_mult, hidden_size]       behind layer L, one for each layer

Example:
  dsv4 trace examples/models/tiny-v4 --tokens ids.json --numerics exact --out trace.safetensors";

/// Write the streams behind each layer and the logits of all positions to a file
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Checkpoint folder
    model: PathBuf,

    /// JSON file with the list of token ids
    #[arg(long, value_name = "IDS.json")]
    tokens: PathBuf,

    /// The safetensors file to write; appears complete or not at all
    #[arg(long, value_name = "FILE")]
    out: PathBuf,

    #[command(flatten)]
    engine: EngineArgs,
}

pub(crate) fn run(args: &Args) -> Result {
    let ids = read_ids(&args.tokens)?;
    let engine = args.engine.open(&args.model)?;
    let trace = research::trace(&engine, &ids, args.engine.chunk as usize)?;
    let config = engine.model().config();
    let shape = [ids.len(), config.hc_mult, config.hidden_size];
    write(&args.out, &trace, &shape, config.vocab_size)?;
    output::note(format_args!("{} tokens, {} layers: {}", ids.len(), trace.streams.len(), args.out.display()));
    Ok(())
}

fn read_ids(path: &Path) -> Result<Vec<TokenId>> {
    let text = std::fs::read(path).map_err(|e| Error::io(path, &e))?;
    let fault = |what: String| Error::new(ErrorKind::InvalidArgument, format!("{}: {what}", path.display()));
    let ids: Vec<TokenId> =
        serde_json::from_slice(&text).map_err(|e| fault(format!("not a JSON list of token ids: {e}")))?;
    if ids.is_empty() {
        return Err(fault("the list of token ids is empty".to_owned()).into());
    }
    Ok(ids)
}

/// A float32 tensor to be written.
struct F32<'a> {
    shape: Vec<usize>,
    values: &'a [f32],
}

impl View for F32<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Owned(self.values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    fn data_len(&self) -> usize {
        size_of_val(self.values)
    }
}

/// Writes beside `path` and renames, so that no half file carries its name.
fn write(path: &Path, trace: &Trace, streams: &[usize; 3], vocab: usize) -> Result<(), Error> {
    let mut tensors =
        vec![("logits".to_owned(), F32 { shape: vec![streams[0], vocab], values: trace.logits.as_slice() })];
    for (layer, values) in trace.streams.iter().enumerate() {
        tensors.push((format!("layers.{layer}.streams"), F32 { shape: streams.to_vec(), values }));
    }
    let Some(name) = path.file_name() else {
        return Err(Error::new(ErrorKind::InvalidArgument, format!("{}: not a file name", path.display())));
    };
    let mut temporary = name.to_owned();
    temporary.push(format!(".{}.tmp", std::process::id()));
    let temporary = path.with_file_name(temporary);
    let written = safetensors::serialize_to_file(tensors, None, &temporary)
        .map_err(|e| Error::new(ErrorKind::Io, format!("{}: {e}", temporary.display())))
        .and_then(|()| std::fs::rename(&temporary, path).map_err(|e| Error::io(path, &e)));
    if written.is_err() {
        // the error that led here counts, not whether there is something to remove
        drop(std::fs::remove_file(&temporary));
    }
    written
}
