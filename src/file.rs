//! Reading whole files that somebody else wrote: how much is accepted of each kind, and from what.
//!
//! Invariant: no read waits for a writer, goes on for ever or asks for memory without a limit: files of a model are
//! regular files of a bounded size. What a person named as a text may also be a pipe or a terminal; it is bounded too.
//! Knows nothing of what the files mean. Weights are not read but mapped, see [`crate::weights`].

#![forbid(unsafe_code)]

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use crate::alloc;
use crate::error::{Error, ErrorKind, Result, bail};

/// A kind of file and how long one may be.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// What it is, with its article, for messages.
    pub name: &'static str,
    /// Most bytes accepted.
    pub limit: u64,
}

/// `config.json`; those of the releases have 4 kB.
pub const CONFIG: Kind = Kind { name: "a config.json", limit: 16 << 20 };
/// `generation_config.json`; those of the releases have 200 bytes.
pub const GENERATION_CONFIG: Kind = Kind { name: "a generation_config.json", limit: 1 << 20 };
/// `model.safetensors.index.json`: twenty times that of the largest release.
pub const INDEX: Kind = Kind { name: "a safetensors index", limit: 256 << 20 };
/// `tokenizer.json`: sixteen times that of the releases.
pub const TOKENIZER: Kind = Kind { name: "a tokenizer.json", limit: 128 << 20 };
/// A prompt, a text to be measured, a filler: more than a million tokens of any language.
pub const TEXT: Kind = Kind { name: "a text", limit: 64 << 20 };
/// JSON from a person: token ids, recall cases, tools.
pub const JSON: Kind = Kind { name: "a JSON file", limit: 256 << 20 };

/// Bytes that are asked for at a time where the size is not known.
const CHUNK: usize = 64 << 10;

/// Reads a regular file.
///
/// # Errors
/// `NotFound` or `Io` from the system, `Io` for anything but a regular file (before it is opened, since opening a named
/// pipe would wait), `InvalidArgument` with both sizes if it is too long, `OutOfMemory` with the bytes.
pub fn read(path: &Path, kind: Kind) -> Result<Vec<u8>> {
    let metadata = fs::metadata(path).map_err(|e| Error::io(path, &e))?;
    if !metadata.is_file() {
        bail!(Io, "{}: not a regular file", path.display());
    }
    let name = path.display().to_string();
    check_len(&name, metadata.len(), kind)?;
    let file = File::open(path).map_err(|e| Error::io(path, &e))?;
    read_to_end(file, &name, metadata.len(), kind)
}

/// Reads what a person named: a regular file, a pipe or a terminal, to its end.
///
/// # Errors
/// As [`read`], without the one for pipes.
pub fn read_any(path: &Path, kind: Kind) -> Result<Vec<u8>> {
    let metadata = fs::metadata(path).map_err(|e| Error::io(path, &e))?;
    if metadata.is_file() {
        return read(path, kind);
    }
    if metadata.is_dir() {
        bail!(Io, "{}: a folder, not a file", path.display());
    }
    let file = File::open(path).map_err(|e| Error::io(path, &e))?;
    read_to_end(file, &path.display().to_string(), 0, kind)
}

/// Reads `input`, called `name` in messages, to its end. `expected` is its length as far as it is known.
///
/// # Errors
/// As [`read`].
pub fn read_to_end(mut input: impl Read, name: &str, expected: u64, kind: Kind) -> Result<Vec<u8>> {
    // one more than expected, so that the end is seen without growing
    let mut bytes = alloc::with_capacity(name, expected as usize + 1)?;
    loop {
        if bytes.len() == bytes.capacity() {
            alloc::reserve(name, &mut bytes, CHUNK)?;
        }
        let room = (bytes.capacity() - bytes.len()) as u64;
        let read = input.by_ref().take(room).read_to_end(&mut bytes);
        if read.map_err(|e| Error::io(name, &e))? == 0 {
            return Ok(bytes);
        }
        check_len(name, bytes.len() as u64, kind)?;
    }
}

/// Refuses a `path` that is not a folder, in words: "Not a directory" about `path/config.json` would not help.
///
/// # Errors
/// `NotFound` or `Io` from the system, `InvalidArgument` if it is something else.
pub fn check_model_folder(path: &Path) -> Result<()> {
    let metadata = fs::metadata(path).map_err(|e| Error::io(path, &e))?;
    if !metadata.is_dir() {
        bail!(InvalidArgument, "{}: not a folder; a model is the folder with config.json", path.display());
    }
    Ok(())
}

fn check_len(name: &str, len: u64, kind: Kind) -> Result<()> {
    if len > kind.limit {
        return Err(Error::new(
            ErrorKind::InvalidArgument,
            format!("{name}: more than the {} bytes accepted of {} ({len} bytes at least)", kind.limit, kind.name),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: Kind = Kind { name: "a note", limit: 100_000 };

    #[test]
    fn a_file_is_read_up_to_its_limit_and_refused_beyond() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("note");
        fs::write(&path, vec![7; 100_000]).unwrap();
        assert_eq!(read(&path, SMALL).unwrap(), vec![7; 100_000]);
        fs::write(&path, vec![7; 100_001]).unwrap();
        for refused in [read(&path, SMALL), read_any(&path, SMALL)] {
            let e = refused.unwrap_err();
            assert!(e.message().contains("note: more than the 100000 bytes accepted of a note"), "{e}");
        }
    }

    #[test]
    fn an_endless_input_ends_at_the_limit() {
        let e = read_to_end(std::io::repeat(1), "the input", 0, SMALL).unwrap_err();
        assert!(e.message().starts_with("the input: more than the 100000 bytes"), "{e}");
        assert_eq!(read_to_end(&b"abc"[..], "the input", 0, SMALL).unwrap(), b"abc");
        assert_eq!(read_to_end(&b"abc"[..], "the input", 9, SMALL).unwrap(), b"abc");
    }

    #[test]
    fn a_huge_sparse_file_is_refused_by_its_size() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sparse");
        File::create(&path).unwrap().set_len(1 << 41).unwrap();
        assert!(read(&path, TOKENIZER).unwrap_err().message().contains("(2199023255552 bytes at least)"));
    }

    #[cfg(unix)]
    #[test]
    fn a_pipe_is_refused_before_it_is_opened() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        assert_eq!(read(&path, SMALL).unwrap_err().message(), format!("{}: not a regular file", path.display()));
        let folder = read_any(dir.path(), SMALL).unwrap_err();
        assert!(folder.message().contains("a folder, not a file"), "{folder}");
    }
}
