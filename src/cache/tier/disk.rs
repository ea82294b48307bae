//! Records in files of one folder: the name is the record's key, and the file confirms it.
//!
//! A file appears under its name only when it is complete. It is not synchronised: what a power failure leaves differs from
//! its checksums and is deleted when it is read. The time of modification is that of the last use.
#![forbid(unsafe_code)]

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use crate::alloc;
use crate::cache::file::{Container, Content, Header, Identity, Section, Writer, sweep_all};
use crate::cache::prefix::PrefixKey;
use crate::cache::sequence::BLOCK_TOKENS;
use crate::error::{Error, ErrorKind, Result};

use super::{Kind, Record, RecordKey, TierOptions};

/// Kinds of sections.
const LINK: u32 = 1;
const CONTENT: u32 = 2;
const LOGITS: u32 = 3;
const ENDINGS: [&str; 2] = ["block", "state"];

/// Where the file of a record is.
#[derive(Clone)]
pub(super) struct Names {
    folder: PathBuf,
}

impl Names {
    pub(super) fn path(&self, key: RecordKey) -> PathBuf {
        self.folder.join(format!("{:032x}.{}", key.prefix.number(), content(key.kind).name()))
    }
}

/// The folder. Used by the I/O thread only.
pub(super) struct Disk {
    names: Names,
    identity: Identity,
    limit: u64,
    /// Bytes of the folder's files, as far as this engine knows.
    bytes: u64,
}

/// What happened to a record that was to be written.
pub(super) enum Stored {
    /// Written, that many bytes, after deleting so many files.
    Written { bytes: u64, deleted: u64 },
    /// It was there already.
    Known,
    /// It is larger than the whole folder may be.
    TooLarge,
}

fn content(kind: Kind) -> Content {
    match kind {
        Kind::Block => Content::Block,
        Kind::Checkpoint => Content::Checkpoint,
    }
}

impl Disk {
    /// Opens the folder, which is made if need be, and counts what is in it.
    pub(super) fn open(folder: &Path, options: &TierOptions, identity: Identity) -> Result<Self> {
        fs::create_dir_all(folder).map_err(|e| Error::io(folder, &e))?;
        let names = Names { folder: folder.to_owned() };
        let limit = if options.disk_bytes == 0 { u64::MAX } else { options.disk_bytes };
        let mut disk = Self { names, identity, limit, bytes: 0 };
        let files = disk.files().map_err(|e| Error::io(folder, &e))?;
        disk.bytes = files.iter().map(|file| file.bytes).sum();
        sweep_all(folder);
        Ok(disk)
    }

    pub(super) fn names(&self) -> Names {
        self.names.clone()
    }

    /// Reads a record; `None` if there is no file.
    ///
    /// # Errors
    /// `Corrupt`, `Mismatch` and `Unsupported` for files of no use, which are deleted; `Io`, `OutOfMemory`.
    pub(super) fn read(&self, key: RecordKey) -> Result<Option<Arc<Record>>> {
        let path = self.names.path(key);
        let read = self.read_file(key, &path);
        match read {
            Ok(record) => {
                // best effort: a file whose time cannot be set is deleted earlier
                drop(File::open(&path).and_then(|file| file.set_modified(SystemTime::now())));
                Ok(Some(Arc::new(record)))
            }
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            Err(e) => {
                if matches!(e.kind(), ErrorKind::Corrupt | ErrorKind::Mismatch | ErrorKind::Unsupported) {
                    drop(fs::remove_file(&path));
                }
                Err(e)
            }
        }
    }

    fn read_file(&self, key: RecordKey, path: &Path) -> Result<Record> {
        let container = Container::open(path, content(key.kind))?;
        container.header().identity.check(&self.identity, path)?;
        container.check_kinds(&[LINK, CONTENT, LOGITS])?;
        let Link { parent, position, tokens } = read_link(&container)?;
        if parent.extend(&tokens) != key.prefix {
            return Err(container.corrupt("it holds another prefix than its name says"));
        }
        let wanted = match key.kind {
            Kind::Block => self.identity.layout.block_content(BLOCK_TOKENS),
            Kind::Checkpoint => self.identity.layout.state_content(),
        };
        let section = part(&container, CONTENT)?;
        if section.bytes != wanted || (key.kind == Kind::Checkpoint && !position.is_multiple_of(BLOCK_TOKENS as u64)) {
            return Err(container.corrupt(format_args!("{} bytes, not {wanted}", section.bytes)));
        }
        let mut bytes = alloc::zeroed("offloaded block", wanted as usize)?;
        let mut reader = container.section(section)?;
        reader.fill(&mut bytes)?;
        reader.finish()?;
        let logits = match container.find(LOGITS)? {
            Some(section) if section.bytes != 4 * self.identity.vocab as u64 => {
                return Err(container.corrupt(format_args!("{} bytes of logits", section.bytes)));
            }
            Some(section) => {
                let mut reader = container.section(section)?;
                let bits = reader.words("logits", self.identity.vocab)?;
                reader.finish()?;
                bits.into_iter().map(f32::from_bits).collect()
            }
            None => Arc::default(),
        };
        Ok(Record { parent, tokens, content: bytes, position, logits })
    }

    /// Writes a record, unless it is there, and makes room for it first.
    pub(super) fn write(&mut self, key: RecordKey, record: &Record) -> Result<Stored> {
        let path = self.names.path(key);
        if path.exists() {
            return Ok(Stored::Known);
        }
        let header = Header::new(content(key.kind), self.identity.clone());
        let bytes = header.data_start() + record.bytes() + 24 + 3 * 32;
        if bytes > self.limit {
            return Ok(Stored::TooLarge);
        }
        let deleted = self.make_room(bytes)?;
        let written = self.write_file(&path, &header, record).or_else(|e| {
            // somebody may have deleted the folder
            fs::create_dir_all(&self.names.folder).map_err(|_| e)?;
            self.write_file(&path, &header, record)
        })?;
        self.bytes += written;
        Ok(Stored::Written { bytes: written, deleted })
    }

    fn write_file(&self, path: &Path, header: &Header, record: &Record) -> Result<u64> {
        let mut writer = Writer::create_volatile(path, header)?;
        writer.section(LINK, true, |section| {
            section.put(&record.parent.number().to_le_bytes())?;
            section.put(&record.position.to_le_bytes())?;
            section.put_words(record.tokens.iter().copied())
        })?;
        writer.section(CONTENT, true, |section| section.put(&record.content))?;
        if !record.logits.is_empty() {
            let bits = record.logits.iter().map(|logit| logit.to_bits());
            writer.section(LOGITS, true, |section| section.put_words(bits))?;
        }
        writer.commit()
    }

    /// Deletes files in order of their last use until `bytes` more fit, and some more, so that it need not look again at
    /// once. Counts anew before, since others may use the folder.
    fn make_room(&mut self, bytes: u64) -> Result<u64> {
        if self.bytes + bytes <= self.limit {
            return Ok(0);
        }
        let mut files = self.files().map_err(|e| Error::io(&self.names.folder, &e))?;
        self.bytes = files.iter().map(|file| file.bytes).sum();
        if self.bytes + bytes <= self.limit {
            return Ok(0);
        }
        files.sort_by_key(|file| file.used);
        let (target, mut deleted) = ((self.limit - bytes) / 16 * 15, 0);
        for file in files {
            if self.bytes <= target {
                break;
            }
            if fs::remove_file(&file.path).is_ok() {
                deleted += 1;
            }
            self.bytes -= file.bytes;
        }
        Ok(deleted)
    }

    fn files(&self) -> io::Result<Vec<Listed>> {
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.names.folder)? {
            let path = entry?.path();
            let is_record = path.extension().and_then(|e| e.to_str()).is_some_and(|e| ENDINGS.contains(&e));
            // files may go while they are listed
            if let (true, Ok(metadata)) = (is_record, fs::metadata(&path)) {
                let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                files.push(Listed { path, bytes: metadata.len(), used });
            }
        }
        Ok(files)
    }
}

/// Where a record belongs.
pub(super) struct Link {
    pub(super) parent: PrefixKey,
    /// Of a checkpoint; otherwise 0.
    pub(super) position: u64,
    /// Those of the block behind the parent.
    pub(super) tokens: Vec<u32>,
}

pub(super) fn read_link(container: &Container) -> Result<Link> {
    let mut link = container.section(part(container, LINK)?)?;
    let (low, high, position) = (link.u64()?, link.u64()?, link.u64()?);
    let tokens = link.words("offloaded block", BLOCK_TOKENS)?;
    link.finish()?;
    Ok(Link { parent: PrefixKey::from_number(u128::from(low) | u128::from(high) << 64), position, tokens })
}

fn part(container: &Container, kind: u32) -> Result<&Section> {
    container.find(kind)?.ok_or_else(|| container.corrupt("a part is missing"))
}

/// A file of the folder.
struct Listed {
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
}
