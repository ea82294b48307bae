//! What a session file says about itself, without a model.
#![forbid(unsafe_code)]

use std::path::Path;

use crate::cache::CacheLayout;
use crate::cache::file::{Container, Content};
use crate::error::Result;

use super::kind;
use super::load::Frame;

/// Looking at session files. Needs no model.
///
/// ```
/// # use dsv4::{Engine, EngineOptions, Model, Session, SessionOptions};
/// # let engine = Engine::new(&Model::open("examples/models/tiny-v4")?, EngineOptions::default())?;
/// # let mut session = Session::new(&engine, SessionOptions::default())?;
/// use dsv4::SessionFile;
/// session.feed(&[300; 300])?;
/// # let file = std::env::temp_dir().join(format!("dsv4-doc-info-{}", std::process::id()));
/// session.save(&file)?;
/// let info = SessionFile::verify(&file)?; // every checksum; `inspect` reads the tables alone
/// assert_eq!((info.tokens, info.blocks, info.numerics.as_str()), (300, 1, "reference"));
/// assert_eq!(info.fingerprint, engine.model().fingerprint());
/// # std::fs::remove_file(file).expect("it was made");
/// # Ok::<(), dsv4::Error>(())
/// ```
pub struct SessionFile;

/// Facts about a session file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionFileInfo {
    /// Version of the format it was written in.
    pub version: u16,
    /// Oldest version of a reader that can read it.
    pub oldest_reader: u16,
    /// Fingerprint of the model.
    pub fingerprint: u128,
    /// Name of the numerics.
    pub numerics: String,
    /// Format and sizes of the cache.
    pub layout: CacheLayout,
    /// Token ids of the model.
    pub vocab: usize,
    /// Tokens of the session.
    pub tokens: usize,
    /// Of these, tokens that restoring computes again.
    pub pending: usize,
    /// Full blocks.
    pub blocks: usize,
    /// Saves since the file was made.
    pub saves: u64,
    /// Whether one of the two roots is damaged, so that the save before is the one that is described here.
    pub has_damaged_root: bool,
    /// Bytes of the file: the sum of the next five.
    pub file_bytes: u64,
    /// Header, roots and table.
    pub frame_bytes: u64,
    /// Rows and tokens of the full blocks, and rows of the partial block behind them: something even where
    /// [`blocks`](Self::blocks) is 0.
    pub block_bytes: u64,
    /// Windows and compressor states.
    pub state_bytes: u64,
    /// Tokens behind the last full block, and logits.
    pub token_bytes: u64,
    /// What earlier or interrupted saves left.
    pub unused_bytes: u64,
}

impl SessionFile {
    /// Reads header and table of the file at `path`.
    ///
    /// # Errors
    /// `NotFound` and `Io`; `Corrupt`, `Unsupported` and `Mismatch` for files that no session can be restored from.
    pub fn inspect(path: impl AsRef<Path>) -> Result<SessionFileInfo> {
        describe(&Container::open(path.as_ref(), Content::Session)?)
    }

    /// As [`SessionFile::inspect`], reading everything and comparing every checksum.
    ///
    /// # Errors
    /// As [`SessionFile::inspect`]; `Corrupt` names the section that differs.
    pub fn verify(path: impl AsRef<Path>) -> Result<SessionFileInfo> {
        let container = Container::open(path.as_ref(), Content::Session)?;
        let info = describe(&container)?;
        container.verify()?;
        if info.has_damaged_root {
            return Err(container.corrupt("one of its two roots; the save before the last one is intact"));
        }
        Ok(info)
    }
}

fn describe(container: &Container) -> Result<SessionFileInfo> {
    let frame = Frame::read(container)?;
    let header = container.header();
    let bytes = |kinds: &[u32]| -> u64 {
        container.sections().iter().filter(|s| kinds.contains(&s.kind)).map(|s| s.bytes).sum()
    };
    let frame_bytes = header.data_start() + 32 * (container.sections().len() as u64 + 1);
    let used = frame_bytes + bytes(&kind::ALL);
    Ok(SessionFileInfo {
        version: header.version,
        oldest_reader: header.oldest_reader,
        fingerprint: header.identity.fingerprint,
        numerics: header.identity.numerics.clone(),
        layout: header.identity.layout.clone(),
        vocab: header.identity.vocab,
        tokens: frame.total,
        pending: frame.total - frame.position,
        blocks: frame.blocks.len(),
        saves: container.generation(),
        has_damaged_root: container.has_damaged_root(),
        file_bytes: container.file_bytes(),
        frame_bytes,
        block_bytes: bytes(&[kind::BLOCK, kind::TAIL]),
        state_bytes: bytes(&[kind::STATE]),
        token_bytes: bytes(&[kind::POSITION, kind::TOKENS, kind::LOGITS]),
        unused_bytes: container.file_bytes().saturating_sub(used),
    })
}
