//! `dsv4 cache`: what session files and files of a disk tier hold, and whether they are whole.

#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};

use dsv4::cache::tier::TierFileInfo;
use dsv4::{Error, ErrorKind, SessionFile, SessionFileInfo};
use serde_json::{Value, json};

use crate::failure::{Failure, Result, one_line};
use crate::output;

const EXAMPLES: &str = "\
Needs no model. Without --verify only headers and tables are read, and every place
and length in them is checked; with it every byte is compared with its checksum.
A file that cannot be used is a line on standard output, and the exit code is 1.
In the JSON, bytes.blocks counts the partial block too: it is something even where
blocks is 0.

Examples:
  dsv4 cache talk.session
  dsv4 cache --verify --json sessions/*
  dsv4 cache --verify ~/.cache/dsv4/*";

/// Look into session files and files of a disk tier, and check them
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Session files, or files of a disk tier
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
        let described = describe(file, args);
        found |= described.is_err();
        match (described, args.json) {
            (Ok((report, _)), true) => reports.push(report),
            (Err(e), true) => reports.push(json!({ "file": file.display().to_string(), "error": e.message() })),
            (Ok((_, text)), false) => output::line(text)?,
            (Err(e), false) => output::line(one_line(e.message()))?,
        }
    }
    if args.json {
        output::json(&Value::Array(reports))?;
    }
    if found { Err(Failure::Findings) } else { Ok(()) }
}

/// What is to be said about `file`, for programs and for people.
fn describe(file: &Path, args: &Args) -> Result<(Value, String), Error> {
    let session = if args.verify { SessionFile::verify(file) } else { SessionFile::inspect(file) };
    match session {
        Ok(info) => Ok((report(file, &info, args.verify), text(file, &info, args.verify))),
        Err(e) if e.kind() == ErrorKind::Mismatch => {
            let info = TierFileInfo::read(file, args.verify)?;
            Ok((tier_report(file, &info, args.verify), tier_text(file, &info, args.verify)))
        }
        Err(e) => Err(e),
    }
}

fn tier_report(file: &Path, info: &TierFileInfo, is_verified: bool) -> Value {
    json!({
        "file": file.display().to_string(),
        "verified": is_verified,
        "tier": info.kind,
        "key": format!("{:032x}", info.key),
        "fingerprint": format!("{:032x}", info.identity.fingerprint),
        "numerics": info.identity.numerics,
        "kv_format": info.identity.layout.format.name(),
        "tokens": info.tokens,
        "bytes": { "file": info.file_bytes },
    })
}

fn tier_text(file: &Path, info: &TierFileInfo, is_verified: bool) -> String {
    format!(
        "{}: a {} of a disk tier{}\n  tokens   {}\n  key      {:032x}\n  model    {:032x}\n  numerics {}, {} cache\n  \
         bytes    {}",
        one_line(&file.display().to_string()),
        info.kind,
        if is_verified { ", ok, every checksum agrees" } else { "" },
        info.tokens,
        info.key,
        info.identity.fingerprint,
        one_line(&info.identity.numerics),
        info.identity.layout.format,
        output::size(info.file_bytes),
    )
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
