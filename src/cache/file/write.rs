//! Writing files: a new one beside the old and renamed over it, or an addition behind the end of one that is there.
//!
//! Invariant: until [`Writer::commit`] has returned, the file under the path is the old one, complete.
#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::alloc;
use crate::error::{Error, ErrorKind, Result, bail};

use super::format::{ENTRY_BYTES, FOLDED, Header, PAGE, ROOT_BYTES, Root, Section, is_ours};
use super::read::Container;

/// Bytes that are collected before they are written.
const BUFFER: usize = 256 << 10;

/// A save under way; dropping it without [`Writer::commit`] leaves the old file.
pub struct Writer {
    /// The file in the end.
    path: PathBuf,
    file: File,
    /// Where the bytes go before they get their final name; `None` for an addition.
    temporary: Option<PathBuf>,
    /// End of the data that is there already, which a failed addition goes back to.
    start: u64,
    /// End of what was handed over so far.
    end: u64,
    buffer: Vec<u8>,
    sections: Vec<Section>,
    /// Where the roots are.
    roots: u64,
    generation: u64,
    /// Is on the disk, not only in the system's memory, when it is committed.
    is_durable: bool,
    committed: bool,
}

/// Takes the bytes of one section.
pub struct SectionWriter<'a> {
    writer: &'a mut Writer,
    hash: Xxh3,
}

/// The file that saving to `path` means: behind symbolic links, and a regular file if anything is there.
///
/// # Errors
/// `InvalidArgument` if something else is there, `Io`.
pub fn resolve(path: &Path) -> Result<PathBuf> {
    let path = match fs::canonicalize(path) {
        Ok(path) => path,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(path.to_owned()),
        Err(e) => return Err(Error::io(path, &e)),
    };
    let metadata = fs::metadata(&path).map_err(|e| Error::io(&path, &e))?;
    if !metadata.is_file() {
        let what = if metadata.is_dir() { "a folder" } else { "not a regular file" };
        bail!(InvalidArgument, "{}: cannot save here: it is {what}", path.display());
    }
    Ok(path)
}

/// Refuses to replace the file at `path` unless it is one of dsv4, however damaged, or empty.
///
/// # Errors
/// `InvalidArgument` for somebody else's file, `Io`.
pub fn check_replaceable(path: &Path) -> Result<()> {
    let mut start = Vec::with_capacity(8);
    File::open(path).and_then(|file| file.take(8).read_to_end(&mut start)).map_err(|e| Error::io(path, &e))?;
    if start.is_empty() || is_ours(&start) {
        return Ok(());
    }
    bail!(InvalidArgument, "{}: is not a session file of dsv4 and will not be replaced", path.display())
}

impl Writer {
    /// Starts a new file that will replace whatever is at `path`.
    pub fn create(path: &Path, header: &Header) -> Result<Self> {
        let (folder, name) = split(path)?;
        let prefix = temporary_prefix(&name);
        sweep(folder, |name| name.as_encoded_bytes().starts_with(prefix.as_encoded_bytes()));
        Self::start(path, header, true)
    }

    /// As [`Self::create`] for a file that may be lost when the power fails.
    pub fn create_volatile(path: &Path, header: &Header) -> Result<Self> {
        Self::start(path, header, false)
    }

    fn start(path: &Path, header: &Header, is_durable: bool) -> Result<Self> {
        let buffer = alloc::with_capacity("file buffer", BUFFER)?;
        let (temporary, file) = create_temporary(path)?;
        let mut writer = Self {
            path: path.to_owned(),
            file,
            temporary: Some(temporary),
            start: 0,
            end: 0,
            buffer,
            sections: Vec::new(),
            roots: header.bytes(),
            generation: 1,
            is_durable,
            committed: false,
        };
        // whoever may not read the old file may not read the new one
        if let Ok(old) = fs::metadata(path) {
            writer.file.set_permissions(old.permissions()).map_err(|e| Error::io(path, &e))?;
        }
        writer.put(&header.encode()?)?;
        writer.put(&[0; 2 * PAGE as usize])?;
        Ok(writer)
    }

    /// Starts an addition to `container`, which [`Container::open_to_append`] opened.
    pub fn append(container: Container) -> Result<Self> {
        let (path, mut file, header, root) = container.into_parts();
        // what is behind the end belongs to a save that was interrupted
        file.set_len(root.end).and_then(|()| file.seek(SeekFrom::Start(root.end))).map_err(|e| Error::io(&path, &e))?;
        Ok(Self {
            path,
            file,
            temporary: None,
            start: root.end,
            end: root.end,
            buffer: alloc::with_capacity("file buffer", BUFFER)?,
            sections: Vec::new(),
            roots: header.bytes(),
            generation: root.generation + 1,
            is_durable: true,
            committed: false,
        })
    }

    /// Bytes that were handed over so far.
    pub fn written(&self) -> u64 {
        self.end - self.start
    }

    /// Writes a section with the bytes that `fill` hands over.
    pub fn section(
        &mut self,
        kind: u32,
        required: bool,
        fill: impl FnOnce(&mut SectionWriter<'_>) -> Result<()>,
    ) -> Result<()> {
        let offset = self.end;
        let mut section = SectionWriter { writer: self, hash: Xxh3::new() };
        fill(&mut section)?;
        let hash = section.hash.digest();
        self.keep(&Section { kind, required, offset, bytes: self.end - offset, hash })
    }

    /// Takes a section over that the file has already.
    pub fn keep(&mut self, section: &Section) -> Result<()> {
        alloc::reserve("file table", &mut self.sections, 1)?;
        self.sections.push(*section);
        Ok(())
    }

    /// Puts the sections so far into a table of their own, which later saves can take over as if it were one section.
    pub fn fold(&mut self) -> Result<()> {
        let table = self.table()?;
        let section = Section { kind: FOLDED, required: true, offset: self.end, bytes: 0, hash: xxh3_64(&table) };
        self.put(&table)?;
        self.sections.clear();
        self.keep(&Section { bytes: self.end - section.offset, ..section })
    }

    /// Leaves `bytes` bytes out that no section has.
    #[cfg(test)]
    pub(super) fn leave_hole(&mut self, bytes: u64) -> Result<()> {
        self.flush()?;
        self.end += bytes;
        self.file.seek(SeekFrom::Start(self.end)).map_err(|e| Error::io(&self.path, &e))?;
        Ok(())
    }

    fn table(&self) -> Result<Vec<u8>> {
        let mut table = alloc::with_capacity("file table", self.sections.len() * ENTRY_BYTES)?;
        self.sections.iter().for_each(|section| table.extend_from_slice(&section.encode()));
        Ok(table)
    }

    /// Makes the save durable and visible. Returns the bytes that were written for it.
    pub fn commit(mut self) -> Result<u64> {
        let (table, table_offset) = (self.table()?, self.end);
        self.put(&table)?;
        self.flush()?;
        let root = Root {
            generation: self.generation,
            table_offset,
            table_bytes: table.len() as u64,
            table_hash: xxh3_64(&table),
            end: self.end,
        };
        if self.temporary.is_none() {
            self.file.sync_data().map_err(|e| Error::io(&self.path, &e))?;
        }
        self.write_root(&root).map_err(|e| Error::io(&self.path, &e))?;
        if let Some(temporary) = &self.temporary {
            fs::rename(temporary, &self.path).map_err(|e| Error::io(&self.path, &e))?;
            self.committed = true;
            if self.is_durable {
                sync_folder(&self.path)?;
            }
        }
        self.committed = true;
        Ok(self.end - self.start + if self.temporary.is_none() { ROOT_BYTES as u64 } else { 0 })
    }

    fn write_root(&mut self, root: &Root) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(self.roots + root.generation % 2 * PAGE))?;
        self.file.write_all(&root.encode())?;
        if self.is_durable { self.file.sync_all() } else { Ok(()) }
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.end += bytes.len() as u64;
        if self.buffer.len() + bytes.len() > BUFFER {
            self.flush()?;
        }
        if bytes.len() >= BUFFER {
            return self.file.write_all(bytes).map_err(|e| Error::io(&self.path, &e));
        }
        self.buffer.extend_from_slice(bytes);
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.file.write_all(&self.buffer).map_err(|e| Error::io(&self.path, &e))?;
        self.buffer.clear();
        Ok(())
    }
}

impl SectionWriter<'_> {
    /// Appends `bytes` to the section.
    pub fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        self.writer.put(bytes)
    }

    /// Appends `values` to the section, little-endian.
    pub fn put_words(&mut self, values: impl Iterator<Item = u32>) -> Result<()> {
        let (mut part, mut used) = ([0; 4096], 0);
        for value in values {
            part[used..used + 4].copy_from_slice(&value.to_le_bytes());
            used += 4;
            if used == part.len() {
                self.put(&part)?;
                used = 0;
            }
        }
        self.put(&part[..used])
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if self.committed {
            return;
        }
        // what cannot be cleaned up is not part of any save: readers stop at the end that the root gives
        match &self.temporary {
            Some(temporary) => drop(fs::remove_file(temporary)),
            None => drop(self.file.set_len(self.start)),
        }
    }
}

/// Folder and file name of `path`.
fn split(path: &Path) -> Result<(&Path, OsString)> {
    let Some(name) = path.file_name() else {
        bail!(InvalidArgument, "{}: cannot save here: it does not end with a file's name", path.display());
    };
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok((folder, name.to_owned()))
}

/// What temporary files for `name` begin with.
fn temporary_prefix(name: &OsString) -> OsString {
    let mut prefix = OsString::from(".");
    prefix.push(name);
    prefix.push(".dsv4-");
    prefix
}

/// A file of a new name in the folder of `path`, locked for as long as it is open.
fn create_temporary(path: &Path) -> Result<(PathBuf, File)> {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let (folder, name) = split(path)?;
    for _ in 0..100 {
        let mut temporary = temporary_prefix(&name);
        temporary.push(format!("{}-{}.tmp", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed)));
        let temporary = folder.join(temporary);
        let file = match OpenOptions::new().write(true).create_new(true).open(&temporary) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
            Err(e) => return Err(Error::io(path, &e)),
        };
        // a file system without locks only loses the cleaning up after a killed process
        if matches!(file.try_lock(), Err(TryLockError::WouldBlock)) || !temporary.exists() {
            continue;
        }
        return Ok((temporary, file));
    }
    bail!(Io, "{}: no temporary file can be made beside it", path.display())
}

/// Removes what killed processes left behind in `folder`: temporary files that nobody has locked, of the names that
/// `is_meant`.
fn sweep(folder: &Path, is_meant: impl Fn(&OsString) -> bool) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten().filter(|entry| is_meant(&entry.file_name())) {
        let Ok(file) = File::open(entry.path()) else { continue };
        if file.try_lock().is_ok() {
            tracing::info!(file = %entry.path().display(), "removing what an interrupted save left");
            drop(fs::remove_file(entry.path()));
        }
    }
}

/// Removes every temporary file that killed processes left in `folder`.
pub fn sweep_all(folder: &Path) {
    let is_ours = |name: &OsString| {
        name.to_str().is_some_and(|name| name.starts_with('.') && name.contains(".dsv4-") && name.ends_with(".tmp"))
    };
    sweep(folder, is_ours);
}

/// Makes the renaming durable.
fn sync_folder(path: &Path) -> Result<()> {
    let (folder, _) = split(path)?;
    if !cfg!(unix) {
        return Ok(());
    }
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(|e| Error::new(ErrorKind::Io, format!("{}: synchronising the folder: {e}", folder.display())))
}
