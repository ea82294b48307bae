//! `dsv4 cache`: what session files hold, and whether they are whole.

#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};

use dsv4::{SessionFile, SessionFileInfo};
use serde_json::{Value, json};

use crate::failure::{Failure, Result, one_line};
use crate::output;

const EXAMPLES: &str = "\
Needs no model. Without --verify only headers and tables are read, and every place and length in them is checked; with it
every byte is compared with its checksum. A file that cannot be used is a line on standard output, and the exit code is 1.

Examples:
  dsv4 cache talk.session
  dsv4 cache --verify --json sessions/*";

/// Look into session files and check them
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Session files
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,

    /// Read everything and compare every checksum
    #[arg(long)]
    verify: bool,

    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result {
    let mut reports = Vec::new();
    let mut found = false;
    for file in &args.files {
        let info = if args.verify { SessionFile::verify(file) } else { SessionFile::inspect(file) };
        found |= info.is_err();
        match (info, args.json) {
            (Ok(info), true) => reports.push(report(file, &info, args.verify)),
            (Err(e), true) => reports.push(json!({ "file": file.display().to_string(), "error": e.message() })),
            (Ok(info), false) => output::line(text(file, &info, args.verify))?,
            (Err(e), false) => output::line(one_line(e.message()))?,
        }
    }
    if args.json {
        output::json(&Value::Array(reports))?;
    }
    if found { Err(Failure::Findings) } else { Ok(()) }
}

fn report(file: &Path, info: &SessionFileInfo, is_verified: bool) -> Value {
    let layout = &info.layout;
    json!({
        "file": file.display().to_string(),
        "verified": is_verified,
        "version": info.version,
        "oldest_reader": info.oldest_reader,
        "fingerprint": format!("{:032x}", info.fingerprint),
        "numerics": info.numerics,
        "kv_format": layout.format.name(),
        "layers": layout.layers.len(),
        "head_dim": layout.head_dim,
        "window": layout.window,
        "vocab_size": info.vocab,
        "tokens": info.tokens,
        "pending_tokens": info.pending,
        "blocks": info.blocks,
        "saves": info.saves,
        "last_save_is_damaged": info.has_damaged_root,
        "bytes": {
            "file": info.file_bytes,
            "frame": info.frame_bytes,
            "blocks": info.block_bytes,
            "state": info.state_bytes,
            "tokens_and_logits": info.token_bytes,
            "unused": info.unused_bytes,
        },
    })
}

fn text(file: &Path, info: &SessionFileInfo, is_verified: bool) -> String {
    let pending =
        if info.pending > 0 { format!(", {} of them to be computed again", info.pending) } else { String::new() };
    let damaged = if info.has_damaged_root { "\n  the last save is damaged; this is the one before" } else { "" };
    format!(
        "{}: {}\n  tokens   {}{pending}\n  model    {:032x}, {} layers, {} ids\n  numerics {}, {} cache\n  bytes    {}: \
         blocks {}, state {}, tokens and logits {}, frame {}, unused {}\n  format   version {}, readable from version {}; \
         {} save{}{damaged}",
        one_line(&file.display().to_string()),
        if is_verified { "ok, every checksum agrees" } else { "a session" },
        info.tokens,
        info.fingerprint,
        info.layout.layers.len(),
        info.vocab,
        one_line(&info.numerics),
        info.layout.format,
        output::size(info.file_bytes),
        output::size(info.block_bytes),
        output::size(info.state_bytes),
        output::size(info.token_bytes),
        output::size(info.frame_bytes),
        output::size(info.unused_bytes),
        info.version,
        info.oldest_reader,
        info.saves,
        if info.saves == 1 { "" } else { "s" },
    )
}
