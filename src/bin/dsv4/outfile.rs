//! Files that a command writes: complete or not at all, and never over something else than an older result.
//!
//! A regular file is written beside its place and renamed, with the mode that a new file gets (or the old one had).
//! Symbolic links are followed. Devices and pipes are written through. Anything that the command reads, everything in
//! the model's folder, read-only files, folders and disks are refused, before the work begins.

#![forbid(unsafe_code)]

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use dsv4::{Error, ErrorKind};

use crate::failure::{Failure, Result};

/// A place that may be written to.
#[derive(Debug)]
pub(crate) struct OutFile {
    /// As the user gave it, for messages.
    name: PathBuf,
    place: Place,
}

#[derive(Debug)]
enum Place {
    /// `-`
    StandardOutput,
    /// A pipe or a device.
    Stream(PathBuf),
    /// A regular file, which may not be there yet; symbolic links are resolved.
    File(PathBuf, Option<fs::Permissions>),
}

/// Most symbolic links in a row; the system's own limit is 40.
const MAX_LINKS: usize = 40;

impl OutFile {
    /// Checks that `name` may be written, when `inputs` are read from and `model` is the folder of the model. Nothing is
    /// created yet.
    pub(crate) fn check(name: &Path, inputs: &[&Path], model: &Path) -> Result<Self> {
        let refuse = |why: &str| {
            let message = format!("{}: {why}; not written", name.display());
            Err(Failure::Error(Error::new(ErrorKind::InvalidArgument, message)))
        };
        let place = |place| Ok(Self { name: name.to_owned(), place });
        if name.as_os_str() == "-" {
            return place(Place::StandardOutput);
        }
        let path = resolve(name)?;
        let Some(file_name) = path.file_name() else { return refuse("not a file name") };
        let parent = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        // the folder has to be there, and is the same by whatever way it is reached
        let parent = fs::canonicalize(parent).map_err(|e| Error::io(parent, &e))?;
        if fs::canonicalize(model).is_ok_and(|model| parent.starts_with(model)) {
            return refuse("inside the model's folder");
        }
        let path = parent.join(file_name);
        let metadata = match fs::metadata(&path) {
            Ok(metadata) => metadata,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return place(Place::File(path, None)),
            Err(e) => return Err(Error::io(name, &e).into()),
        };
        if metadata.is_dir() {
            return refuse("a folder");
        }
        if inputs.iter().any(|input| is_same(&path, &metadata, input)) {
            return refuse("the command reads it");
        }
        if files_in(model).iter().any(|file| is_same(&path, &metadata, file)) {
            return refuse("a file of the model");
        }
        if metadata.is_file() {
            if metadata.permissions().readonly() {
                return refuse("read-only");
            }
            return place(Place::File(path, Some(metadata.permissions())));
        }
        if is_disk(&metadata) {
            return refuse("a disk");
        }
        place(Place::Stream(path))
    }

    /// Writes what `content` writes. A regular file appears complete or not at all.
    pub(crate) fn write(&self, content: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result {
        let fault = |e: io::Error| Error::io(&self.name, &e);
        match &self.place {
            Place::StandardOutput => {
                let mut out = BufWriter::new(io::stdout().lock());
                content(&mut out)?;
                Ok(out.flush()?)
            }
            Place::Stream(path) => {
                let stream = OpenOptions::new().write(true).open(path).map_err(fault)?;
                let mut out = BufWriter::new(stream);
                match content(&mut out).and_then(|()| out.flush()) {
                    Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Err(Failure::Closed),
                    other => Ok(other.map_err(fault)?),
                }
            }
            Place::File(path, permissions) => Ok(replace(path, permissions.as_ref(), content).map_err(fault)?),
        }
    }
}

/// Writes a file beside `path` and renames it.
fn replace(
    path: &Path,
    permissions: Option<&fs::Permissions>,
    content: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    // short, because the name of the file may have the greatest length already
    let temporary = path.with_file_name(format!(".dsv4-{}.tmp", std::process::id()));
    let file = File::create_new(&temporary)?;
    let written = (|| {
        if let Some(permissions) = permissions {
            file.set_permissions(permissions.clone())?;
        }
        let mut out = BufWriter::new(file);
        content(&mut out)?;
        out.into_inner()?.sync_all()?;
        fs::rename(&temporary, path)
    })();
    if written.is_err() {
        // the error that led here counts, not whether there is something to remove
        drop(fs::remove_file(&temporary));
    }
    written
}

/// Where a chain of symbolic links leads; the file there need not exist.
fn resolve(name: &Path) -> Result<PathBuf> {
    let mut path = name.to_owned();
    for _ in 0..MAX_LINKS {
        match fs::read_link(&path) {
            Ok(target) => path = path.parent().unwrap_or(Path::new("")).join(target),
            // no link, or nothing there
            Err(_) => return Ok(path),
        }
    }
    Err(Error::new(ErrorKind::Io, format!("{}: more than {MAX_LINKS} symbolic links in a row", name.display())).into())
}

/// The files of a folder, links and what they lead to alike; none if it cannot be read.
fn files_in(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path())).collect()
}

/// Whether both are the same file on the disk, by whatever names.
#[cfg(unix)]
fn is_same(_: &Path, metadata: &Metadata, other: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(other).is_ok_and(|other| (other.dev(), other.ino()) == (metadata.dev(), metadata.ino()))
}

/// Whether both are the same file, as far as paths tell.
#[cfg(not(unix))]
fn is_same(path: &Path, _: &Metadata, other: &Path) -> bool {
    fs::canonicalize(path).is_ok_and(|path| fs::canonicalize(other).is_ok_and(|other| other == path))
}

#[cfg(unix)]
fn is_disk(metadata: &Metadata) -> bool {
    std::os::unix::fs::FileTypeExt::is_block_device(&metadata.file_type())
}

#[cfg(not(unix))]
fn is_disk(_: &Metadata) -> bool {
    false
}
