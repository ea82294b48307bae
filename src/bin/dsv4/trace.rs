//! `dsv4 trace`: the residual streams behind each layer and all logits, for research.

#![forbid(unsafe_code)]

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use dsv4::{Error, ErrorKind, TokenId, file, research};
use serde_json::{Value, json};

use crate::args::EngineArgs;
use crate::failure::Result;
use crate::outfile::OutFile;
use crate::output;

const EXAMPLES: &str = "\
IDS.json is a list of token ids, such as [0, 1667, 12]; nothing is put in front of
them. The file gets, all F32,
  logits              [n, vocab_size]                 of every position
  layers.L.streams    [n, hc_mult, hidden_size]       behind layer L, one for each layer

Example:
  dsv4 trace examples/models/tiny-v4 --tokens ids.json --out trace.safetensors";

/// Write the streams behind each layer and the logits of all positions to a file
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Checkpoint folder
    model: PathBuf,

    /// JSON file with the list of token ids
    #[arg(long, value_name = "IDS.json")]
    tokens: PathBuf,

    /// The safetensors file to write, complete or not at all; - is standard output. Not inside MODEL
    #[arg(long, value_name = "FILE")]
    out: PathBuf,

    #[command(flatten)]
    engine: EngineArgs,
}

pub(crate) fn run(args: &Args) -> Result {
    let out = OutFile::check(&args.out, &[&args.tokens], &args.model)?;
    let ids = read_ids(&args.tokens)?;
    let engine = args.engine.open(&args.model)?;
    let trace = research::trace(&engine, &ids, engine.options().prefill_chunk)?;
    let config = engine.model().config();
    let shape = [ids.len(), config.hc_mult, config.hidden_size];
    let mut tensors: Tensors<'_> =
        vec![("logits".to_owned(), vec![ids.len(), config.vocab_size], trace.logits.as_slice())];
    for (layer, values) in trace.streams.iter().enumerate() {
        tensors.push((format!("layers.{layer}.streams"), shape.to_vec(), values));
    }
    out.write(|out| write(out, &tensors))?;
    output::note(format_args!("{} tokens, {} layers: {}", ids.len(), trace.streams.len(), args.out.display()));
    Ok(())
}

fn read_ids(path: &Path) -> Result<Vec<TokenId>> {
    let text = file::read(path, file::JSON)?;
    let fault = |what: String| Error::new(ErrorKind::InvalidArgument, format!("{}: {what}", path.display()));
    let ids: Vec<TokenId> =
        serde_json::from_slice(&text).map_err(|e| fault(format!("not a JSON list of token ids: {e}")))?;
    if ids.is_empty() {
        return Err(fault("the list of token ids is empty".to_owned()).into());
    }
    Ok(ids)
}

/// Tensors by name: their shape and float32 values.
type Tensors<'a> = Vec<(String, Vec<usize>, &'a [f32])>;

/// Writes the tensors as a safetensors file, in their order.
fn write(out: &mut dyn Write, tensors: &Tensors<'_>) -> io::Result<()> {
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, shape, values) in tensors {
        let start = end;
        end += size_of_val(*values);
        header.insert(name.clone(), json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, end] }));
    }
    let mut header = Value::Object(header).to_string();
    // the data begins at a multiple of 8
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(header.as_bytes())?;
    for (_, _, values) in tensors {
        values.iter().try_for_each(|value| out.write_all(&value.to_le_bytes()))?;
    }
    Ok(())
}
