//! What a file of a disk tier says about itself, without a model.
#![forbid(unsafe_code)]

use std::path::Path;

use crate::cache::file::{Container, Content, Identity};
use crate::cache::sequence::BLOCK_TOKENS;
use crate::error::{ErrorKind, Result};

use super::disk::read_link;

/// Facts about a file of a disk tier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TierFileInfo {
    /// `block` for the rows of a block, `state` for the checkpoint at the end of one.
    pub kind: &'static str,
    /// Hash of everything up to the end of the block, which is the file's name.
    pub key: u128,
    /// Tokens that the file gives back: those of one block, or all in front of a checkpoint.
    pub tokens: u64,
    /// The model, numerics and format that it belongs to.
    pub identity: Identity,
    /// Bytes of the file.
    pub file_bytes: u64,
}

impl TierFileInfo {
    /// Reads header and tables of the file at `path`; with `verify` everything, to compare every checksum.
    ///
    /// # Errors
    /// `NotFound` and `Io`; `Corrupt`, `Unsupported`, and `Mismatch` for a file that is not of a disk tier.
    pub fn read(path: impl AsRef<Path>, verify: bool) -> Result<Self> {
        let path = path.as_ref();
        let container = match Container::open(path, Content::Block) {
            Err(e) if e.kind() == ErrorKind::Mismatch => Container::open(path, Content::Checkpoint)?,
            opened => opened?,
        };
        let link = read_link(&container)?;
        if verify {
            container.verify()?;
        }
        let header = container.header();
        Ok(Self {
            kind: header.content.name(),
            key: link.parent.extend(&link.tokens).number(),
            tokens: if header.content == Content::Block { BLOCK_TOKENS as u64 } else { link.position },
            identity: header.identity.clone(),
            file_bytes: container.file_bytes(),
        })
    }
}
