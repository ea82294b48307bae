//! Looks at every shard of a folder even if some of them are bad, for `dsv4 verify`.

#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};

use super::index::Index;
use super::{Checkpoint, INDEX_FILE, SINGLE_FILE, Shard, exists};
use crate::error::Result;
use crate::file;

/// One shard as [`Checkpoint::survey`] found it.
#[derive(Debug)]
pub struct ShardReport {
    /// Path of the file.
    pub path: PathBuf,
    /// Number of its tensors and its size in bytes, or what is wrong with it.
    pub state: Result<(usize, u64)>,
}

impl Checkpoint {
    /// Opens every shard that the index of `dir` names (or the only one) by itself and reports on each, where
    /// [`Self::open`] stops at the first bad one.
    ///
    /// # Errors
    /// Those of the index.
    pub fn survey(dir: &Path) -> Result<Vec<ShardReport>> {
        let path = dir.join(INDEX_FILE);
        let files = if exists(&path)? {
            let text = file::read(&path, file::INDEX)?;
            let index = Index::parse(&text).map_err(|e| e.context(path.display()))?;
            index.files.iter().map(|file| dir.join(&**file)).collect()
        } else {
            vec![dir.join(SINGLE_FILE)]
        };
        let report = |path: PathBuf| {
            let state = Shard::open(path.clone()).map(|shard| (shard.tensor_count(), shard.declared_bytes()));
            ShardReport { path, state }
        };
        Ok(files.into_iter().map(report).collect())
    }
}
