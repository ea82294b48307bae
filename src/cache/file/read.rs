//! Reading files, with everything checked that can be checked.
#![forbid(unsafe_code)]

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::alloc;
use crate::error::{Error, ErrorKind, Result, bail};

use super::format::{Content, ENTRY_BYTES, FOLDED, Header, PAGE, ROOT_BYTES, Root, Section};

/// Bytes that are read at once to be compared with their checksum.
const PART: usize = 256 << 10;
/// Bytes that are read ahead for small fields; larger ones are read where they belong.
const BUFFER: usize = 8 << 10;

/// An open file: its header, and the sections of its last complete save, whose places lie within the file.
pub struct Container {
    path: PathBuf,
    file: File,
    file_bytes: u64,
    header: Header,
    root: Root,
    has_damaged_root: bool,
    sections: Vec<Section>,
    folded: Option<Section>,
    /// Sections at the end of the list that are not folded.
    added: usize,
}

impl Container {
    /// Opens the file at `path`, which must hold `content`, and checks header, root and table.
    ///
    /// # Errors
    /// `NotFound` and `Io`; `Corrupt` for damaged or truncated files, `Unsupported` for newer ones and those of another
    /// byte order, `Mismatch` for other content.
    pub fn open(path: &Path, content: Content) -> Result<Self> {
        check_regular(path)?;
        let file = File::open(path).map_err(|e| Error::io(path, &e))?;
        Self::read(path, file, content)
    }

    /// As [`Self::open`], to add to it; keeps others from doing so at the same time.
    ///
    /// # Errors
    /// `Busy` too, if another save to the file is under way.
    pub fn open_to_append(path: &Path, content: Content) -> Result<Self> {
        check_regular(path)?;
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(|e| Error::io(path, &e))?;
        if matches!(file.try_lock(), Err(TryLockError::WouldBlock)) {
            bail!(Busy, "{}: another save to this file is under way", path.display());
        }
        Self::read(path, file, content)
    }

    fn read(path: &Path, mut file: File, content: Content) -> Result<Self> {
        let io = |e: &std::io::Error| Error::io(path, e);
        let file_bytes = file.metadata().map_err(|e| io(&e))?.len();
        let mut start = [0; 24];
        if file_bytes < start.len() as u64 {
            bail!(Corrupt, "{}: not a file of dsv4: it has only {file_bytes} bytes", path.display());
        }
        file.read_exact(&mut start).map_err(|e| io(&e))?;
        let mut bytes = alloc::zeroed("file header", Header::length(start, file_bytes, path)? as usize)?;
        file.seek(SeekFrom::Start(0)).and_then(|_| file.read_exact(&mut bytes)).map_err(|e| io(&e))?;
        let header = Header::decode(&bytes, path)?;
        if header.content != content {
            let (is, wanted) = (header.content.name(), content.name());
            bail!(Mismatch, "{}: holds a {is}, not a {wanted}", path.display());
        }
        let (root, has_damaged_root) = read_roots(path, &mut file, &header)?;
        if root.end > file_bytes {
            bail!(Corrupt, "{}: truncated: it has {file_bytes} of {} bytes", path.display(), root.end);
        }
        let mut tables = Tables { path, file: &mut file, data: header.data_start(), end: root.end };
        let mut sections = tables.read(root.table_offset, root.table_bytes, root.table_hash)?;
        let folded = sections.iter().position(|s| s.kind == FOLDED).map(|at| sections.remove(at));
        let added = sections.len();
        if let Some(Section { offset, bytes, hash, .. }) = folded {
            let inner = tables.read(offset, bytes, hash)?;
            alloc::reserve("file table", &mut sections, inner.len())?;
            sections.splice(0..0, inner);
        }
        if sections.iter().any(|s| s.kind == FOLDED) {
            bail!(Corrupt, "{}: damaged: a table within a table", path.display());
        }
        Ok(Self { path: path.to_owned(), file, file_bytes, header, root, has_damaged_root, sections, folded, added })
    }

    /// The file's path, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file's head.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Bytes of the file.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// End of the data of the last save; what is behind it belongs to a save that was interrupted.
    pub fn end(&self) -> u64 {
        self.root.end
    }

    /// Number of saves since the file was made.
    pub fn generation(&self) -> u64 {
        self.root.generation
    }

    /// Whether a root was written but is not whole: the trace of damage, or of a crash during a save.
    pub fn has_damaged_root(&self) -> bool {
        self.has_damaged_root
    }

    /// The sections of the last save, in order.
    pub fn sections(&self) -> &[Section] {
        &self.sections
    }

    /// The entry that stands for the sections that [`Writer::fold`](super::Writer::fold) put together.
    pub fn folded(&self) -> Option<&Section> {
        self.folded.as_ref()
    }

    /// The sections that are not among those, at the end of the list.
    pub fn added(&self) -> &[Section] {
        &self.sections[self.sections.len() - self.added..]
    }

    /// The only section of `kind`, if there is one.
    ///
    /// # Errors
    /// `Corrupt` if there are several.
    pub fn find(&self, kind: u32) -> Result<Option<&Section>> {
        let mut found = self.sections.iter().filter(|section| section.kind == kind);
        let first = found.next();
        if found.next().is_some() {
            return Err(self.corrupt(format_args!("two sections of kind {kind}")));
        }
        Ok(first)
    }

    /// Refuses sections that a reader must know and that are not among `known`.
    pub fn check_kinds(&self, known: &[u32]) -> Result<()> {
        match self.sections.iter().find(|section| section.required && !known.contains(&section.kind)) {
            Some(section) => bail!(
                Unsupported,
                "{}: has a section of kind {}, which this version does not know and which cannot be left out",
                self.path.display(),
                section.kind
            ),
            None => Ok(()),
        }
    }

    /// Compares every section with its checksum.
    ///
    /// # Errors
    /// `Corrupt` names the first that differs; `Io`.
    pub fn verify(&self) -> Result<()> {
        self.verify_with(&mut |_| Ok(()))
    }

    /// As [`Self::verify`], calling `told` with the bytes of sections that were compared, after each 256 KiB; its error ends
    /// the call.
    ///
    /// # Errors
    /// As [`Self::verify`], and those of `told`.
    pub fn verify_with(&self, told: &mut dyn FnMut(u64) -> Result<()>) -> Result<()> {
        let mut part = alloc::zeroed("file buffer", PART)?;
        let mut done = 0;
        for section in &self.sections {
            let mut reader = self.section(section)?;
            while reader.left() > 0 {
                let len = (part.len() as u64).min(reader.left()) as usize;
                reader.fill(&mut part[..len])?;
                done += len as u64;
                told(done)?;
            }
            reader.finish()?;
        }
        Ok(())
    }

    /// Reads a section from its start.
    pub fn section(&self, section: &Section) -> Result<SectionReader<'_>> {
        let mut file = &self.file;
        file.seek(SeekFrom::Start(section.offset)).map_err(|e| Error::io(&self.path, &e))?;
        let file = BufReader::with_capacity(BUFFER, file);
        Ok(SectionReader { container: self, section: *section, file, left: section.bytes, hash: Xxh3::new() })
    }

    /// An error about this file.
    pub fn corrupt(&self, what: impl std::fmt::Display) -> Error {
        Error::new(ErrorKind::Corrupt, format!("{}: damaged: {what}", self.path.display()))
    }

    pub(super) fn into_parts(self) -> (PathBuf, File, Header, Root) {
        (self.path, self.file, self.header, self.root)
    }
}

/// Refuses anything but a regular file before it is opened, since opening a named pipe would wait.
fn check_regular(path: &Path) -> Result<()> {
    let metadata = fs::metadata(path).map_err(|e| Error::io(path, &e))?;
    if !metadata.is_file() {
        bail!(InvalidArgument, "{}: not a regular file", path.display());
    }
    Ok(())
}

/// The newer of the valid roots, and whether one is broken.
fn read_roots(path: &Path, file: &mut File, header: &Header) -> Result<(Root, bool)> {
    let (mut newest, mut is_damaged): (Option<Root>, bool) = (None, false);
    for i in 0..2 {
        let mut bytes = [0; ROOT_BYTES];
        let at = SeekFrom::Start(header.bytes() + i * PAGE);
        file.seek(at).and_then(|_| file.read_exact(&mut bytes)).map_err(|e| Error::io(path, &e))?;
        match Root::decode(&bytes) {
            Some(root) if newest.is_none_or(|newest| root.generation > newest.generation) => newest = Some(root),
            Some(_) => {}
            None => is_damaged |= bytes.iter().any(|&b| b != 0),
        }
    }
    match newest {
        Some(root) => Ok((root, is_damaged)),
        None => bail!(Corrupt, "{}: damaged: neither of its two roots is valid", path.display()),
    }
}

/// Reads tables of a file whose data lies between `data` and `end`.
struct Tables<'a> {
    path: &'a Path,
    file: &'a mut File,
    data: u64,
    end: u64,
}

impl Tables<'_> {
    fn read(&mut self, offset: u64, len: u64, hash: u64) -> Result<Vec<Section>> {
        let Self { path, data, end, .. } = *self;
        let damaged = |what: &str| Error::new(ErrorKind::Corrupt, format!("{}: damaged: {what}", path.display()));
        if !within(offset, len, data, end) || !len.is_multiple_of(ENTRY_BYTES as u64) {
            return Err(damaged("the table's place is impossible"));
        }
        let mut bytes = alloc::zeroed("file table", len as usize)?;
        let read = self.file.seek(SeekFrom::Start(offset)).and_then(|_| self.file.read_exact(&mut bytes));
        read.map_err(|e| Error::io(path, &e))?;
        if xxh3_64(&bytes) != hash {
            return Err(damaged("the table differs from its checksum"));
        }
        let mut sections = alloc::with_capacity("file table", bytes.len() / ENTRY_BYTES)?;
        for entry in bytes.chunks_exact(ENTRY_BYTES) {
            let section = Section::decode(entry).ok_or_else(|| damaged("the table"))?;
            if !within(section.offset, section.bytes, data, end) {
                return Err(damaged("a section's place is impossible"));
            }
            sections.push(section);
        }
        Ok(sections)
    }
}

fn within(offset: u64, bytes: u64, start: u64, end: u64) -> bool {
    offset >= start && offset.checked_add(bytes).is_some_and(|last| last <= end)
}

/// The bytes of one section, in order.
pub struct SectionReader<'a> {
    container: &'a Container,
    section: Section,
    file: BufReader<&'a File>,
    left: u64,
    hash: Xxh3,
}

impl SectionReader<'_> {
    /// Bytes not read yet.
    pub fn left(&self) -> u64 {
        self.left
    }

    /// Fills `bytes` with what comes next.
    ///
    /// # Errors
    /// `Corrupt` if the section has less, `Io`.
    pub fn fill(&mut self, bytes: &mut [u8]) -> Result<()> {
        if bytes.len() as u64 > self.left {
            return Err(self.container.corrupt(format_args!("section {} is too short", self.section.kind)));
        }
        self.file.read_exact(bytes).map_err(|e| Error::io(&self.container.path, &e))?;
        self.hash.update(bytes);
        self.left -= bytes.len() as u64;
        Ok(())
    }

    /// A number.
    pub fn u64(&mut self) -> Result<u64> {
        let mut bytes = [0; 8];
        self.fill(&mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// `count` numbers of 32 bits of `what`.
    pub fn words(&mut self, what: &str, count: usize) -> Result<Vec<u32>> {
        if count as u64 > self.left / 4 {
            return Err(self.container.corrupt(format_args!("section {} is too short", self.section.kind)));
        }
        let mut words = alloc::with_capacity(what, count)?;
        let mut part = [0; 4096];
        while words.len() < count {
            let part = &mut part[..(4 * (count - words.len())).min(4096)];
            self.fill(part)?;
            words.extend(part.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])));
        }
        Ok(words)
    }

    /// Ends reading.
    ///
    /// # Errors
    /// `Corrupt` if bytes are left or the section differs from its checksum.
    pub fn finish(self) -> Result<()> {
        let Section { kind, offset, bytes, hash, .. } = self.section;
        if self.left > 0 {
            return Err(self.container.corrupt(format_args!("section {kind} is longer than its content")));
        }
        if self.hash.digest() != hash {
            let what = format_args!("section {kind} ({bytes} bytes at {offset}) differs from its checksum");
            return Err(self.container.corrupt(what));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::file::{Identity, Writer};
    use crate::cache::{CacheLayout, KvFormat};

    #[test]
    fn sections_beyond_4_gib_are_read_where_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let layout = CacheLayout {
            format: KvFormat::Fp8,
            head_dim: 512,
            rope_dim: 64,
            index_dim: 128,
            window: 128,
            layers: Vec::new(),
        };
        let identity = Identity { fingerprint: 1, numerics: "reference".to_owned(), vocab: 10, layout };
        let header = Header::new(Content::Session, identity);
        let mut writer = Writer::create(&path, &header).unwrap();
        writer.section(7, true, |section| section.put(b"near")).unwrap();
        writer.leave_hole((5 << 30) + 3).unwrap();
        writer.section(8, true, |section| section.put(b"far")).unwrap();
        writer.commit().unwrap();
        let mut writer = Writer::append(Container::open_to_append(&path, Content::Session).unwrap()).unwrap();
        writer.section(9, true, |section| section.put(b"added")).unwrap();
        writer.commit().unwrap();

        let container = Container::open(&path, Content::Session).unwrap();
        assert!(container.file_bytes() > 5 << 30, "{}", container.file_bytes());
        container.verify().unwrap();
        let section = container.find(9).unwrap().copied().unwrap();
        assert!(section.offset > 5 << 30, "{section:?}");
        let mut bytes = [0; 5];
        let mut reader = container.section(&section).unwrap();
        reader.fill(&mut bytes).unwrap();
        reader.finish().unwrap();
        assert_eq!(&bytes, b"added");
    }
}
