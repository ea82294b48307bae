//! A checkpoint folder: safetensors shards behind an index, checked at opening and mapped read-only.
//!
//! Invariant: a [`Checkpoint`] exists only if every shard is there with exactly the size its header declares, and every
//! tensor the index names lies in the shard the index says. Opening touches no page of the weights.
//!
//! What the tensors mean is not known here: see [`crate::model::weights`].

// not `forbid`, which would bind `mmap` too
#![deny(unsafe_code)]

pub(crate) mod buffer_pool;
mod header;
mod index;
mod inventory;
#[expect(unsafe_code, reason = "mapping a file is unsafe: another process may change it")]
mod mmap;
mod scan;
mod shard;
mod survey;

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use self::buffer_pool::{FailRead, PoolStats, fail_nth_read};
use self::index::Index;
pub use self::inventory::{Category, Inventory, Share};
pub use self::scan::{Finding, Suspicion};
pub use self::shard::Shard;
pub use self::survey::ShardReport;
use crate::alloc;
use crate::error::{Error, ErrorKind, Result, bail, plural};
use crate::file;
use crate::tensor::DType;

/// Name of the index of a checkpoint with several shards.
pub const INDEX_FILE: &str = "model.safetensors.index.json";
/// Name of the only file of a checkpoint without an index.
pub const SINGLE_FILE: &str = "model.safetensors";

/// An open checkpoint. Cheap to share; immutable.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    shards: Vec<Arc<Shard>>,
    /// Shard and position therein of each tensor, sorted by name.
    table: Vec<(u32, u32)>,
    total_bytes: u64,
    differences: Vec<String>,
}

/// Most differences that are told one by one.
const MAX_DIFFERENCES: usize = 10;

/// One tensor of a checkpoint: a handle that keeps its shard mapped.
#[derive(Clone)]
pub struct Tensor {
    shard: Arc<Shard>,
    position: u32,
}

impl Checkpoint {
    /// Opens the checkpoint in folder `dir`: all shards of `model.safetensors.index.json`, else `model.safetensors`.
    ///
    /// The index is the contract: tensors in the shards that it does not name are not part of the model (logged), and
    /// [`Self::differences`] are logged, since every size is checked one by one anyway.
    /// Symbolic links are followed.
    ///
    /// # Errors
    /// `NotFound` for a missing folder, index or shard, or a tensor that is not in the shard the index names; `Corrupt`
    /// with names, declared and real sizes for anything truncated or contradictory; `Unsupported` for an unknown dtype,
    /// used or not; `Io`; `OutOfMemory` if a shard cannot be mapped.
    pub fn open(dir: &Path) -> Result<Self> {
        file::check_model_folder(dir)?;
        let index = dir.join(INDEX_FILE);
        if exists(&index)? {
            return Self::open_indexed(dir, &index);
        }
        let single = dir.join(SINGLE_FILE);
        if exists(&single)? {
            return Self::assemble(dir, vec![Shard::open(single)?], None);
        }
        bail!(NotFound, "{}: neither {INDEX_FILE} nor {SINGLE_FILE} is there", dir.display());
    }

    /// A checkpoint of one safetensors file that is already in memory; `name` stands for its path in messages.
    ///
    /// # Errors
    /// As for a file, less those of the file system.
    pub fn from_bytes(name: &str, bytes: Vec<u8>) -> Result<Self> {
        Self::assemble(Path::new(name), vec![Shard::from_bytes(name, bytes)?], None)
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<Tensor> {
        self.position(name).map(|i| self.at(i))
    }

    /// All names, sorted.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.table.iter().map(|&entry| self.name_of(entry))
    }

    /// All tensors, sorted by name.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = Tensor> {
        (0..self.table.len()).map(|i| self.at(i))
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether there is no tensor.
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// The shards, sorted by file name.
    pub fn shards(&self) -> &[Arc<Shard>] {
        &self.shards
    }

    /// Sum of the bytes of all tensors.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What the index says that does not keep the model from running, in words: a tensor in a second shard (ignored), a
    /// wrong `metadata.total_size`. Each was logged as a warning.
    pub fn differences(&self) -> &[String] {
        &self.differences
    }

    /// Checks that no shard has changed its size since opening: one `fstat` each, cheap enough for every step.
    ///
    /// # Errors
    /// `Corrupt`, naming the file and both sizes. Reading its mapping would raise SIGBUS.
    pub fn check_sizes(&self) -> Result<()> {
        self.shards.iter().try_for_each(|shard| shard.check_size())
    }

    /// Position of `name` in the order of [`Self::names`].
    pub(crate) fn position(&self, name: &str) -> Option<usize> {
        self.table.binary_search_by(|&entry| self.name_of(entry).cmp(name)).ok()
    }

    /// Tensor `i` in the order of [`Self::names`].
    pub(crate) fn at(&self, i: usize) -> Tensor {
        let (shard, position) = self.table[i];
        Tensor { shard: Arc::clone(&self.shards[shard as usize]), position }
    }

    /// File name of a shard that holds `name` although the index does not list it.
    pub(crate) fn unlisted(&self, name: &str) -> Option<Cow<'_, str>> {
        let shard = self.shards.iter().find(|shard| shard.find(name).is_some())?;
        shard.path().file_name().map(|file| file.to_string_lossy())
    }

    fn name_of(&self, (shard, position): (u32, u32)) -> &str {
        self.shards[shard as usize].name(position as usize)
    }

    fn open_indexed(dir: &Path, path: &Path) -> Result<Self> {
        let text = file::read(path, file::INDEX)?;
        let index = Index::parse(&text).map_err(|e| e.context(path.display()))?;
        check_presence(dir, &index).map_err(|e| e.context(path.display()))?;
        let mut shards = alloc::with_capacity("the list of shards", index.files.len())?;
        for file in &index.files {
            shards.push(Shard::open(dir.join(&**file))?);
        }
        Self::assemble(dir, shards, Some((path, &index)))
    }

    /// Builds the table of names, from the index if there is one.
    fn assemble(dir: &Path, shards: Vec<Shard>, index: Option<(&Path, &Index<'_>)>) -> Result<Self> {
        let in_shards: usize = shards.iter().map(Shard::tensor_count).sum();
        let mut table = alloc::with_capacity("the table of tensors", index.map_or(in_shards, |i| i.1.tensors.len()))?;
        match index {
            None => table.extend((0..in_shards as u32).map(|position| (0, position))),
            Some((path, index)) => {
                for (name, shard) in &index.tensors {
                    let Some(position) = shards[*shard as usize].find(name) else {
                        return Err(misplaced(name, *shard as usize, &shards).context(path.display()));
                    };
                    table.push((*shard, position as u32));
                }
            }
        }
        let bytes =
            table.iter().map(|&(shard, position): &(u32, u32)| shards[shard as usize].byte_len(position as usize));
        let total_bytes = bytes.sum();
        let differences = match index {
            Some((path, index)) => differences(path, index, &shards, total_bytes),
            None => Vec::new(),
        };
        let shards = shards.into_iter().map(Arc::new).collect();
        Ok(Self { dir: dir.to_owned(), shards, table, total_bytes, differences })
    }
}

impl Tensor {
    /// Its name in the checkpoint.
    pub fn name(&self) -> &str {
        self.shard.name(self.position as usize)
    }

    /// Its element type.
    pub fn dtype(&self) -> DType {
        self.shard.dtype(self.position as usize)
    }

    /// Its shape, outermost dimension first.
    pub fn shape(&self) -> &[usize] {
        self.shard.shape(self.position as usize)
    }

    /// Its bytes: little-endian elements in row-major order, not aligned. Reading them may touch the disk.
    pub fn bytes(&self) -> &[u8] {
        self.shard.data(self.position as usize)
    }

    /// Number of its bytes.
    pub fn byte_len(&self) -> usize {
        // a mapped tensor fits into the address space
        self.shard.byte_len(self.position as usize) as usize
    }

    /// Where its bytes are in the file.
    pub(crate) fn file_range(&self) -> Range<u64> {
        let Range { start, end } = self.shard.file_range(self.position as usize);
        start as u64..end as u64
    }

    /// The file that holds it.
    pub fn shard(&self) -> &Shard {
        &self.shard
    }

    /// Reads the pages of `part` of its bytes into memory, so that a disk error or a file that shrank is an error here
    /// and not a signal later. Does nothing where the system cannot (before Linux 5.14, other systems).
    ///
    /// # Errors
    /// `Io`, naming the file and the position.
    ///
    /// # Panics
    /// If `part` does not lie inside `0..byte_len()`.
    pub fn populate(&self, part: Range<usize>) -> Result<()> {
        assert!(part.start <= part.end && part.end <= self.byte_len(), "{part:?} of {} bytes", self.byte_len());
        self.shard.populate(self.position as usize, part)
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {:?}", self.name(), self.dtype(), self.shape())
    }
}

/// Whether `path` exists; a system that will not tell is an error, not a no.
fn exists(path: &Path) -> Result<bool> {
    path.try_exists().map_err(|e| Error::io(path, &e))
}

/// Refuses an index that names shards which are not there, with their number and the first one.
fn check_presence(dir: &Path, index: &Index<'_>) -> Result<()> {
    let mut missing = Vec::new();
    for (i, file) in index.files.iter().enumerate() {
        if !exists(&dir.join(&**file))? {
            missing.push(i);
        }
    }
    let Some(&first) = missing.first() else { return Ok(()) };
    let mut tensors = index.tensors.iter().filter(|(_, shard)| *shard as usize == first);
    let example = tensors.next().map_or("?", |(name, _)| name);
    bail!(
        NotFound,
        "{} of the {} shards it names are missing, first {} (with {}, such as {example})",
        missing.len(),
        index.files.len(),
        index.files[first],
        plural(tensors.count() as u64 + 1, "tensor")
    );
}

/// The error for a tensor that is not in the shard the index says.
fn misplaced(name: &str, shard: usize, shards: &[Shard]) -> Error {
    let said = shards[shard].path().display();
    let message = match shards.iter().find(|other| other.find(name).is_some()) {
        Some(other) => format!("tensor {name} is said to be in {said}, but it is in {}", other.path().display()),
        None => format!("tensor {name} is said to be in {said}, but it is in no shard"),
    };
    Error::new(ErrorKind::Corrupt, message)
}

/// What the index says differently without contradicting the tensors it names; logged too.
fn differences(path: &Path, index: &Index<'_>, shards: &[Shard], total_bytes: u64) -> Vec<String> {
    let mut found = Vec::new();
    let (mut doubled, mut unlisted, mut example) = (0, 0, "");
    let in_shards: usize = shards.iter().map(Shard::tensor_count).sum();
    if in_shards > index.tensors.len() {
        for (s, shard) in shards.iter().enumerate() {
            for name in (0..shard.tensor_count()).map(|i| shard.name(i)) {
                match index.tensors.binary_search_by(|(listed, _)| (**listed).cmp(name)) {
                    Ok(i) if index.tensors[i].1 as usize == s => {}
                    Ok(i) => {
                        doubled += 1;
                        let file = &index.files[index.tensors[i].1 as usize];
                        if doubled <= MAX_DIFFERENCES {
                            found.push(format!(
                                "tensor {name} is in {file}, as the index says, and in {} too",
                                index.files[s]
                            ));
                        }
                    }
                    Err(_) => {
                        unlisted += 1;
                        example = name;
                    }
                }
            }
        }
    }
    if doubled > MAX_DIFFERENCES {
        found.push(format!("{} tensors more are in two shards", doubled - MAX_DIFFERENCES));
    }
    if let Some(declared) = index.total_size.filter(|&declared| declared != total_bytes) {
        found.push(format!("metadata.total_size is {declared}, but the tensors have {total_bytes} bytes"));
    }
    for difference in &found {
        tracing::warn!(path = %path.display(), "{difference}");
    }
    if unlisted > 0 {
        tracing::warn!(path = %path.display(), unlisted, example, "tensors that the index does not name are ignored");
    }
    found
}
