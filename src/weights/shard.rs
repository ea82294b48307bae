//! One safetensors file, checked against its own header and then mapped.
//!
//! Invariant: a [`Shard`] exists only if its file has exactly the size its header declares; the bytes of each of its
//! tensors lie inside the mapping. Opening reads the header with `read` and touches no page of the data.

#![forbid(unsafe_code)]

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use super::header::{Header, MAX_HEADER_LEN};
use super::mmap::Mapping;
use crate::alloc;
use crate::error::{Error, ErrorKind, Result, bail, plural};
use crate::tensor::DType;

/// Bytes of the header length at the start of a file.
const PREFIX: u64 = 8;

/// One safetensors file of a checkpoint.
#[derive(Debug)]
pub struct Shard {
    path: PathBuf,
    size: u64,
    /// Position of the data section in the file.
    data_start: usize,
    header: Header,
    bytes: Backing,
}

/// Where the bytes of a shard are.
#[derive(Debug)]
enum Backing {
    /// Mapped; the file stays open so that its size can be asked for again.
    Mapped(File, Mapping),
    /// In memory, for programs that carry their model with them and for tests without a file system.
    Owned(Vec<u8>),
}

impl Shard {
    /// Opens and maps `path`.
    ///
    /// # Errors
    /// `NotFound` or `Io` from the system; `Corrupt` with declared and real size if the file is truncated, too long or
    /// its header contradicts itself; `Unsupported` for an unknown dtype; `OutOfMemory` if it cannot be mapped.
    pub(super) fn open(path: PathBuf) -> Result<Self> {
        // asked for before opening: opening a named pipe would wait for a writer
        let metadata = fs::metadata(&path).map_err(|e| Error::io(&path, &e))?;
        if !metadata.is_file() {
            bail!(Io, "{}: not a regular file", path.display());
        }
        let mut file = File::open(&path).map_err(|e| Error::io(&path, &e))?;
        let size = file.metadata().map_err(|e| Error::io(&path, &e))?.len();
        let (header, data_start) = read_header(&mut file, size).map_err(|e| e.context(path.display()))?;
        let map = usize::try_from(size)
            .map_err(|_| std::io::Error::from(std::io::ErrorKind::OutOfMemory))
            .and_then(|len| Mapping::new(&file, len));
        let map = map.map_err(|e| {
            let kind =
                if Error::io(&path, &e).kind() == ErrorKind::Io { ErrorKind::Io } else { ErrorKind::OutOfMemory };
            Error::new(kind, format!("cannot map {size} bytes of {}: {e}", path.display()))
        })?;
        Ok(Self { path, size, data_start, header, bytes: Backing::Mapped(file, map) })
    }

    /// A shard from the `bytes` of a safetensors file; `name` stands for its path in messages.
    pub(super) fn from_bytes(name: &str, bytes: Vec<u8>) -> Result<Self> {
        let size = bytes.len() as u64;
        let (header, data_start) = read_header(&mut std::io::Cursor::new(&bytes), size).map_err(|e| e.context(name))?;
        Ok(Self { path: PathBuf::from(name), size, data_start, header, bytes: Backing::Owned(bytes) })
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of tensors in the file.
    pub fn tensor_count(&self) -> usize {
        self.header.len()
    }

    /// Bytes that the header declares for the whole file; the file had exactly so many when it was opened.
    pub fn declared_bytes(&self) -> u64 {
        self.size
    }

    /// Bytes the file has now.
    ///
    /// # Errors
    /// `Io` if the system does not tell.
    pub fn current_bytes(&self) -> Result<u64> {
        match &self.bytes {
            Backing::Mapped(file, _) => Ok(file.metadata().map_err(|e| Error::io(&self.path, &e))?.len()),
            Backing::Owned(bytes) => Ok(bytes.len() as u64),
        }
    }

    /// Checks that the file still has the size it was opened with.
    ///
    /// # Errors
    /// `Corrupt` with both sizes: its mapping must not be read any more.
    pub fn check_size(&self) -> Result<()> {
        let now = self.current_bytes()?;
        if now != self.size {
            bail!(
                Corrupt,
                "{}: changed from {} to {now} bytes since it was opened; its weights cannot be used any more",
                self.path.display(),
                self.size
            );
        }
        Ok(())
    }

    pub(super) fn find(&self, name: &str) -> Option<usize> {
        self.header.find(name)
    }

    pub(super) fn name(&self, i: usize) -> &str {
        self.header.name(i)
    }

    pub(super) fn dtype(&self, i: usize) -> DType {
        self.header.dtype(i)
    }

    pub(super) fn shape(&self, i: usize) -> &[usize] {
        self.header.shape(i)
    }

    pub(super) fn byte_len(&self, i: usize) -> u64 {
        let (start, end) = self.header.range(i);
        end - start
    }

    pub(super) fn data(&self, i: usize) -> &[u8] {
        let bytes = match &self.bytes {
            Backing::Mapped(_, map) => map.bytes(),
            Backing::Owned(bytes) => bytes,
        };
        &bytes[self.file_range(i)]
    }

    /// The open file, unless the bytes are in memory.
    pub(super) fn file(&self) -> Option<&File> {
        match &self.bytes {
            Backing::Mapped(file, _) => Some(file),
            Backing::Owned(_) => None,
        }
    }

    /// Reads the pages of `part` (bytes relative to tensor `i`) in, reporting what reading them would die of.
    pub(super) fn populate(&self, i: usize, part: std::ops::Range<usize>) -> Result<()> {
        let Backing::Mapped(_, map) = &self.bytes else { return Ok(()) };
        let start = self.file_range(i).start;
        map.populate(start + part.start..start + part.end).map_err(|e| {
            // "Bad address" is what the system says of pages that a file no longer has
            if let Err(shrunk) = self.check_size() {
                return shrunk;
            }
            let position = start + part.start;
            Error::new(
                ErrorKind::Io,
                format!("{}: cannot read {} bytes at {position}: {e}", self.path.display(), part.len()),
            )
        })
    }

    /// Position of tensor `i` in the file.
    pub(super) fn file_range(&self, i: usize) -> std::ops::Range<usize> {
        // inside the file, whose size was converted to usize when it was mapped
        let (start, end) = self.header.range(i);
        self.data_start + start as usize..self.data_start + end as usize
    }
}

/// Reads and checks the header of a file of `size` bytes; also gives the position of the data.
fn read_header(file: &mut (impl Read + Seek), size: u64) -> Result<(Header, usize)> {
    if size < PREFIX {
        bail!(Corrupt, "{}: too short for a safetensors file", plural(size, "byte"));
    }
    let io = |e: std::io::Error| Error::new(ErrorKind::Io, e.to_string());
    let mut prefix = [0; PREFIX as usize];
    file.seek(SeekFrom::Start(0)).and_then(|_| file.read_exact(&mut prefix)).map_err(io)?;
    if &prefix == b"version " {
        bail!(Corrupt, "a Git LFS pointer of {size} bytes, not the file it stands for (run `git lfs pull`)");
    }
    let length = u64::from_le_bytes(prefix);
    if length > size - PREFIX {
        bail!(
            Corrupt,
            "declares a header of {length} bytes, but the file has {size} bytes: truncated or not safetensors"
        );
    }
    if length > MAX_HEADER_LEN {
        bail!(Corrupt, "declares a header of {length} bytes; at most {MAX_HEADER_LEN} are accepted");
    }
    let mut text = alloc::zeroed::<u8>("a safetensors header", length as usize)?;
    file.read_exact(&mut text).map_err(io)?;
    let header = Header::parse(&text)?;
    let available = size - PREFIX - length;
    if header.data_len() > available {
        let first = header.first_beyond(available).unwrap_or("?");
        bail!(
            Corrupt,
            "declares {} bytes, but the file has {size}: truncated by {}; the first tensor cut off is {first}",
            u128::from(PREFIX) + u128::from(length) + u128::from(header.data_len()),
            plural(header.data_len() - available, "byte")
        );
    }
    if header.data_len() < available {
        bail!(
            Corrupt,
            "declares {} bytes, but the file has {size}: {} behind the last tensor too many",
            PREFIX + length + header.data_len(),
            plural(available - header.data_len(), "byte")
        );
    }
    Ok((header, (PREFIX + length) as usize))
}
