//! Session file
//!
//! A session saved to one file, to go on later, in another process or on another engine of the same model, numerics and
//! cache format. Files carry checksums and are read with suspicion: whatever is wrong with one is an error that names it,
//! and nothing changes. While a file is saved, at every moment the file under the path is a complete old save or the
//! complete new one, also when the process is killed or the power fails.
//!
//! The model is known by its fingerprint, which is made of the config, the tensors, and the shards' sizes and modification
//! times, so that a changed weight is noticed. A copy of a model has the same only if it keeps the times: `cp -a`.

use std::ffi::{c_char, c_void};
use std::ops::ControlFlow;

use super::args::{Out, OutStruct, SizedStruct, copy_text, flag, object, options, path};
use super::engine::{dsv4_engine, kv_format_number};
use super::guard::{guard, unfenced};
use super::session::{self, dsv4_session, dsv4_session_options};
use super::status::{dsv4_error, dsv4_status};
use crate::session::{FileProgress, FileStage, SaveOptions, Session, SessionFile, SessionFileInfo};

/// Facts about a session file. Set `size` to `sizeof(dsv4_session_file_info)` before the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dsv4_session_file_info {
    /// `sizeof(dsv4_session_file_info)`.
    pub size: usize,
    /// Fingerprint of the model, 32 hexadecimal digits; ends with a NUL.
    pub fingerprint: [c_char; 40],
    /// Name of the numerics, for example `"reference"`; ends with a NUL.
    pub numerics: [c_char; 24],
    /// Version of the format that the file is written in.
    pub version: u32,
    /// Oldest version of a reader that can read it.
    pub oldest_reader: u32,
    /// A `dsv4_kv_format`, never `AUTO`.
    pub kv_format: i32,
    /// 1 if the last save is damaged, so that the one before it is described here, else 0.
    pub is_last_save_damaged: i32,
    /// Tokens of the session.
    pub tokens: u64,
    /// Of these, tokens that restoring computes again.
    pub pending_tokens: u64,
    /// Full blocks of 256 tokens.
    pub blocks: u64,
    /// Saves since the file was made.
    pub saves: u64,
    /// Bytes of the file: the sum of the next five.
    pub file_bytes: u64,
    /// Header and tables.
    pub frame_bytes: u64,
    /// Rows and tokens of the full blocks, and rows of the partial block behind them: something even where `blocks` is 0.
    pub block_bytes: u64,
    /// Windows and states.
    pub state_bytes: u64,
    /// Tokens behind the last full block, and logits.
    pub token_bytes: u64,
    /// What earlier saves left, which a later one removes.
    pub unused_bytes: u64,
}

// SAFETY: `repr(C)`, `size` first, plain fields without padding.
unsafe impl SizedStruct for dsv4_session_file_info {
    const NAME: &'static str = "dsv4_session_file_info";
}

/// What a save or a restore is at. A save only writes; a restore goes through the others in order.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum dsv4_file_stage {
    /// Bytes are written.
    Write = 0,
    /// The file's bytes are compared with their checksums.
    Check = 1,
    /// The file's bytes are read into the cache; from the beginning again where the cache had no room at first.
    Read = 2,
    /// Tokens that the last save left out are computed.
    Compute = 3,
}

/// Told on the calling thread, at the beginning of each stage of a save or a restore, after each part of a few megabytes and
/// after each chunk of tokens, that `done` of the stage's `total` bytes (in `DSV4_FILE_STAGE_COMPUTE`, tokens) are through.
/// Return 0 to go on; anything else cancels, also the last time. Later versions may have more stages. It must return (no
/// `longjmp`, no C++ exception), and a session that is saved is `BUSY` for it, except for `dsv4_session_cancel`.
pub type dsv4_file_progress_callback =
    Option<unsafe extern "C" fn(userdata: *mut c_void, stage: dsv4_file_stage, done: u64, total: u64) -> i32>;

/// A host's callback for the library.
fn watching(
    progress: dsv4_file_progress_callback,
    userdata: *mut c_void,
) -> impl FnMut(FileProgress) -> ControlFlow<()> {
    move |FileProgress { stage, done, total }| {
        let stage = match stage {
            FileStage::Write => dsv4_file_stage::Write,
            FileStage::Check => dsv4_file_stage::Check,
            FileStage::Read => dsv4_file_stage::Read,
            FileStage::Compute => dsv4_file_stage::Compute,
        };
        // SAFETY: the host gave function and userdata to be called so during this call.
        let stop = progress.is_some_and(|progress| unfenced(|| unsafe { progress(userdata, stage, done, total) }) != 0);
        if stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

/// Saves the session to the file at `path`. A file that holds a beginning of this session is added to. A file of another
/// session or model, a damaged one and an empty one are replaced; what is not dsv4's, or only newer versions can read, is
/// not. The session does not change.
///
/// Over the life of a session that grows, at most twice its size is written, however often it is saved. To keep that, a
/// save soon after another may write only the new tokens, which restoring then computes again: never more than about as
/// many as take the room of one state (1,600 for V4-Flash). With `complete` = 1 everything is written, which is what the
/// last save wants; 0 keeps the bound.
///
/// `dsv4_session_cancel` and the time limit of the session's call options end it between parts of a few megabytes.
///
/// Errors: `IO` and `NOT_FOUND` from the file system (disk full, permissions, no such folder), `INVALID_ARGUMENT` if
/// something other than a file, or a file that is not dsv4's, is at `path`, `UNSUPPORTED` if a file of a newer version or of
/// the other byte order is, `BUSY` also during another save to the same file, `OUT_OF_MEMORY`, `CANCELLED`. After any of them
/// the old file is as it was.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_session_save(
    session: *mut dsv4_session,
    path: *const c_char,
    complete: i32,
    err: *mut dsv4_error,
) -> dsv4_status {
    guard("dsv4_session_save", err, || {
        // SAFETY: by the header's contract.
        let session = unsafe { object(session, "session") }?.exclusive.get()?;
        // SAFETY: as above.
        let path = unsafe { self::path(path, "path") }?;
        session.save_with(path, SaveOptions { complete: flag(complete, "complete")? })?;
        Ok(())
    })
}

/// As `dsv4_session_save`, telling `progress` how far it has come. A save that has nothing to write does not call it.
/// `progress` may be NULL, and `userdata` may be NULL.
///
/// Errors: as `dsv4_session_save`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_session_save_with_progress(
    session: *mut dsv4_session,
    path: *const c_char,
    complete: i32,
    progress: dsv4_file_progress_callback,
    userdata: *mut c_void,
    err: *mut dsv4_error,
) -> dsv4_status {
    guard("dsv4_session_save_with_progress", err, || {
        // SAFETY: by the header's contract.
        let session = unsafe { object(session, "session") }?.exclusive.get()?;
        // SAFETY: as above.
        let path = unsafe { self::path(path, "path") }?;
        let options = SaveOptions { complete: flag(complete, "complete")? };
        session.save_with_progress(path, options, &mut watching(progress, userdata))?;
        Ok(())
    })
}

/// Makes a session on `engine` from the file at `path`: tokens, logits and cache bit for bit as they were saved, ready to
/// sample. `options` may be NULL. `*out` receives the session, to be freed with `dsv4_session_free`. Equal blocks that the
/// engine has already are shared, and those of the file can be reused by later prompts.
///
/// Errors: `NOT_FOUND`, `IO`; `CORRUPT` for a damaged or truncated file, `UNSUPPORTED` for one of a newer version or of
/// the other byte order, `MISMATCH` for one of another model, numerics or cache format; `CONTEXT_FULL` if it holds more
/// tokens than the context; `NO_BLOCKS`, `OUT_OF_MEMORY`; and where tokens are pending, those of `dsv4_session_feed`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_session_restore(
    engine: *const dsv4_engine,
    path: *const c_char,
    options: *const dsv4_session_options,
    out: *mut *mut dsv4_session,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let out = unsafe { Out::new(out, "out") };
    guard("dsv4_session_restore", err, || {
        // SAFETY: as above.
        let engine = unsafe { object(engine, "engine") }?.get()?;
        // SAFETY: as above.
        let path = unsafe { self::path(path, "path") }?;
        // SAFETY: as above.
        let options = unsafe { self::options(options) }?;
        out.check()?;
        out.give(dsv4_session::new(Session::restore(&engine, path, session::read(&options)?)?));
        Ok(())
    })
}

/// As `dsv4_session_restore`, telling `progress` how far it has come. `options` may be NULL, `progress` may be NULL, and
/// `userdata` may be NULL. To cancel from another thread, have `progress` look at something that the other one sets.
///
/// Errors: as `dsv4_session_restore`; `CANCELLED`, and there is no session then.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_session_restore_with_progress(
    engine: *const dsv4_engine,
    path: *const c_char,
    options: *const dsv4_session_options,
    progress: dsv4_file_progress_callback,
    userdata: *mut c_void,
    out: *mut *mut dsv4_session,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let out = unsafe { Out::new(out, "out") };
    guard("dsv4_session_restore_with_progress", err, || {
        // SAFETY: as above.
        let engine = unsafe { object(engine, "engine") }?.get()?;
        // SAFETY: as above.
        let path = unsafe { self::path(path, "path") }?;
        // SAFETY: as above.
        let options = unsafe { self::options(options) }?;
        out.check()?;
        let options = session::read(&options)?;
        let restored = Session::restore_with_progress(&engine, path, options, &mut watching(progress, userdata));
        out.give(dsv4_session::new(restored?));
        Ok(())
    })
}

/// What the file at `path` says about itself. Reads header and tables only, and needs no model.
///
/// Errors: `NOT_FOUND`, `IO`; `CORRUPT`, `UNSUPPORTED` and `MISMATCH` for files that no session can be restored from;
/// `OUT_OF_MEMORY`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_session_file_get_info(
    path: *const c_char,
    info: *mut dsv4_session_file_info,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let info = unsafe { OutStruct::new(info, "info") };
    guard("dsv4_session_file_get_info", err, || {
        // SAFETY: as above.
        let path = unsafe { self::path(path, "path") }?;
        info.check()?;
        info.set(describe(&SessionFile::inspect(path)?));
        Ok(())
    })
}

/// As `dsv4_session_file_get_info`, after comparing everything in the file with its checksums.
///
/// Errors: as there; `CORRUPT` names the part that differs.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_session_file_verify(
    path: *const c_char,
    info: *mut dsv4_session_file_info,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let info = unsafe { OutStruct::new(info, "info") };
    guard("dsv4_session_file_verify", err, || {
        // SAFETY: as above.
        let path = unsafe { self::path(path, "path") }?;
        info.check()?;
        info.set(describe(&SessionFile::verify(path)?));
        Ok(())
    })
}

fn describe(file: &SessionFileInfo) -> dsv4_session_file_info {
    let mut info = dsv4_session_file_info {
        size: size_of::<dsv4_session_file_info>(),
        fingerprint: [0; 40],
        numerics: [0; 24],
        version: file.version.into(),
        oldest_reader: file.oldest_reader.into(),
        kv_format: kv_format_number(file.layout.format),
        is_last_save_damaged: i32::from(file.has_damaged_root),
        tokens: file.tokens as u64,
        pending_tokens: file.pending as u64,
        blocks: file.blocks as u64,
        saves: file.saves,
        file_bytes: file.file_bytes,
        frame_bytes: file.frame_bytes,
        block_bytes: file.block_bytes,
        state_bytes: file.state_bytes,
        token_bytes: file.token_bytes,
        unused_bytes: file.unused_bytes,
    };
    copy_text(&format!("{:032x}", file.fingerprint), &mut info.fingerprint);
    copy_text(&file.numerics, &mut info.numerics);
    info
}
