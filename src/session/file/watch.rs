//! How far a save or a restore has come, and whether it is to end.
#![forbid(unsafe_code)]

use std::ops::ControlFlow;

use crate::engine::Stop;
use crate::error::{Error, ErrorKind, Result};

/// What a save or a restore is at. A save only writes; a restore goes through the others in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FileStage {
    /// Bytes are written.
    Write,
    /// The file's bytes are compared with their checksums.
    Check,
    /// The file's bytes are read into the cache; from the beginning again where the cache had no room at first.
    Read,
    /// Tokens that the last save left out are computed.
    Compute,
}

/// How far a call to [`Session::save_with_progress`](crate::Session::save_with_progress) or
/// [`Session::restore_with_progress`](crate::Session::restore_with_progress) has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileProgress {
    /// What it is at.
    pub stage: FileStage,
    /// Of this stage: bytes, or tokens in [`FileStage::Compute`].
    pub done: u64,
    /// All of this stage.
    pub total: u64,
}

/// Whom to tell, and what ends the call.
pub(super) struct Watch<'a> {
    pub(super) progress: &'a mut dyn FnMut(FileProgress) -> ControlFlow<()>,
    pub(super) stop: Stop,
}

impl Watch<'_> {
    /// Tells how far the call has come.
    ///
    /// # Errors
    /// `Cancelled` if the call is to end.
    pub(super) fn report(&mut self, stage: FileStage, done: u64, total: u64) -> Result<()> {
        let reason = match (self.progress)(FileProgress { stage, done, total }) {
            ControlFlow::Break(()) => Some("cancelled"),
            ControlFlow::Continue(()) => self.stop.reason(),
        };
        let Some(reason) = reason else { return Ok(()) };
        let what = if stage == FileStage::Compute { "tokens" } else { "bytes" };
        let rest = if stage == FileStage::Write { "the file is as it was" } else { "there is no session" };
        Err(Error::new(ErrorKind::Cancelled, format!("{reason} after {done} of {total} {what}; {rest}")))
    }
}
