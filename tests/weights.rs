//! Opening checkpoint folders and resolving their tensors: good ones, and every way to be wrong that we know of.
//! "pitfall A1" and the like refer to the public bug reports this test answers to.

#[path = "common/safetensors_writer.rs"]
mod safetensors_writer;
#[path = "common/shared.rs"]
mod shared;
#[path = "common/tiny_checkpoint.rs"]
mod tiny_checkpoint;

#[path = "weights/files.rs"]
mod files;
#[path = "weights/headers.rs"]
mod headers;
#[path = "weights/index.rs"]
mod index;
#[path = "weights/mutations.rs"]
mod mutations;
#[path = "weights/resolve.rs"]
mod resolve;
#[path = "weights/scan.rs"]
mod scan;
#[path = "weights/spoil.rs"]
mod spoil;

use std::path::Path;

use dsv4::error::{Error, ErrorKind, Result};
use dsv4::model::config::Config;
use dsv4::model::weights::Weights;
use dsv4::weights::Checkpoint;

/// A fresh folder.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder can be made")
}

/// Opens and resolves the checkpoint in `dir`.
fn load(dir: &Path) -> Result<(Checkpoint, Config, Weights)> {
    let config = Config::from_file(&dir.join("config.json"))?;
    let checkpoint = Checkpoint::open(dir)?;
    let weights = Weights::resolve(&config, &checkpoint)?;
    Ok((checkpoint, config, weights))
}

/// The error of `result`, which must have `kind` and mention all of `parts`.
#[track_caller]
fn assert_error<T>(result: Result<T>, kind: ErrorKind, parts: &[&str]) -> Error {
    let Err(error) = result else { panic!("no error; expected {kind:?} with {parts:?}") };
    assert_eq!(error.kind(), kind, "{error}");
    for part in parts {
        assert!(error.message().contains(part), "{part:?} is not in: {error}");
    }
    error
}
