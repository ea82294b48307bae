//! Status and error
//!
//! Every fallible function returns a `dsv4_status` and takes a `dsv4_error *` as its last parameter, which may be NULL.
//! The error is the caller's own memory: nothing is thread-local and nothing has to be freed.

use std::ffi::c_char;
use std::mem::offset_of;

use super::guard::{guard, guard_value};
use super::version;
use crate::error::{Error, ErrorKind, beginning};

/// Outcome of a call. Numbers are never changed or used again; later versions may add some, so treat an unknown number
/// as a failure.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum dsv4_status {
    /// Success.
    Ok = 0,
    /// An argument is NULL or out of its documented range, or the call is not possible in this state.
    InvalidArgument = 1,
    /// A file, folder, tensor or entry that was named does not exist.
    NotFound = 2,
    /// The operating system refused to read, map or write a file.
    Io = 3,
    /// A checkpoint or session file is damaged, truncated or contradicts itself.
    Corrupt = 4,
    /// `config.json` has a known key with a wrong type or an impossible value.
    Config = 5,
    /// A model of another architecture; never loaded by guess.
    UnsupportedModel = 6,
    /// A valid request that this build or device cannot serve.
    Unsupported = 7,
    /// A device or library that was asked for is not there; the message says the remedy.
    Unavailable = 8,
    /// An allocation sized by model, context, batch, file or text was refused; the message has the bytes. The objects of
    /// the call are as before it and can be used on.
    OutOfMemory = 9,
    /// The session's context is full; the session is unchanged.
    ContextFull = 10,
    /// The call was cancelled; what was computed before stays usable.
    Cancelled = 11,
    /// The object is in use by another thread.
    Busy = 12,
    /// Logits or activations became NaN or infinite.
    Numeric = 13,
    /// `tokenizer.json` cannot be read, or text or ids do not fit it.
    Tokenizer = 14,
    /// A chat message list does not follow the expected form.
    Chat = 15,
    /// A panic broke this object earlier; it can only be freed.
    Poisoned = 16,
    /// A defect of this library: a panic that was stopped at its border. The object is poisoned.
    Panic = 17,
    /// The caller's buffer is too small; the required length has been written. Call again with more room.
    BufferTooSmall = 18,
    /// The engine's cache limit is reached by pages in use; the message has the counts. As after `CANCELLED`, the chunks
    /// of a feed that were complete stay in the session; free or clear any session and feed the rest to go on.
    NoBlocks = 19,
    /// A session file was written with another model, numerics or cache format than the engine's.
    Mismatch = 20,
}

impl dsv4_status {
    /// All of them, by number.
    pub(super) const ALL: [(Self, &'static std::ffi::CStr); 21] = [
        (Self::Ok, c"OK"),
        (Self::InvalidArgument, c"INVALID_ARGUMENT"),
        (Self::NotFound, c"NOT_FOUND"),
        (Self::Io, c"IO"),
        (Self::Corrupt, c"CORRUPT"),
        (Self::Config, c"CONFIG"),
        (Self::UnsupportedModel, c"UNSUPPORTED_MODEL"),
        (Self::Unsupported, c"UNSUPPORTED"),
        (Self::Unavailable, c"UNAVAILABLE"),
        (Self::OutOfMemory, c"OUT_OF_MEMORY"),
        (Self::ContextFull, c"CONTEXT_FULL"),
        (Self::Cancelled, c"CANCELLED"),
        (Self::Busy, c"BUSY"),
        (Self::Numeric, c"NUMERIC"),
        (Self::Tokenizer, c"TOKENIZER"),
        (Self::Chat, c"CHAT"),
        (Self::Poisoned, c"POISONED"),
        (Self::Panic, c"PANIC"),
        (Self::BufferTooSmall, c"BUFFER_TOO_SMALL"),
        (Self::NoBlocks, c"NO_BLOCKS"),
        (Self::Mismatch, c"MISMATCH"),
    ];
}

impl From<ErrorKind> for dsv4_status {
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::InvalidArgument => Self::InvalidArgument,
            ErrorKind::NotFound => Self::NotFound,
            ErrorKind::Io => Self::Io,
            ErrorKind::Corrupt => Self::Corrupt,
            ErrorKind::Mismatch => Self::Mismatch,
            ErrorKind::Config => Self::Config,
            ErrorKind::UnsupportedModel => Self::UnsupportedModel,
            ErrorKind::Unsupported => Self::Unsupported,
            ErrorKind::Unavailable => Self::Unavailable,
            ErrorKind::OutOfMemory => Self::OutOfMemory,
            ErrorKind::ContextFull => Self::ContextFull,
            ErrorKind::NoBlocks => Self::NoBlocks,
            ErrorKind::Cancelled => Self::Cancelled,
            ErrorKind::Busy => Self::Busy,
            ErrorKind::Numeric => Self::Numeric,
            ErrorKind::Tokenizer => Self::Tokenizer,
            ErrorKind::Chat => Self::Chat,
            ErrorKind::Poisoned => Self::Poisoned,
            ErrorKind::Panic => Self::Panic,
        }
    }
}

/// What went wrong, in the caller's own memory. `dsv4_error err = {0};` is a valid start. Every call that gets it
/// writes `code` and `message`, also when it succeeds (`DSV4_STATUS_OK` and an empty message).
#[repr(C)]
pub struct dsv4_error {
    /// `sizeof(dsv4_error)`, or 0, which stands for the layout of the first version. Nothing is written beyond it: a
    /// smaller size cuts the message. Never written itself.
    pub size: usize,
    /// The status that the call returned.
    pub code: dsv4_status,
    /// For people: UTF-8, cut at a character border if it is too long, always ended by a NUL. Lower case, without a
    /// final period; names the file, key, tensor or value at fault.
    pub message: [c_char; DSV4_ERROR_MESSAGE_SIZE],
}

/// Bytes of `dsv4_error.message`, the final NUL included.
pub const DSV4_ERROR_MESSAGE_SIZE: usize = 1000;

/// Name of a status as in this header, without the prefix: `"OUT_OF_MEMORY"`. `"UNKNOWN"` for a number that this
/// version does not know. Static text; never NULL.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn dsv4_status_name(status: i32) -> *const c_char {
    guard_value("dsv4_status_name", c"UNKNOWN".as_ptr(), || {
        let known = dsv4_status::ALL.iter().find(|(known, _)| *known as i32 == status);
        known.map_or(c"UNKNOWN", |(_, name)| name).as_ptr()
    })
}

/// Checks that a program compiled against the header of version `header_version` (pass `DSV4_VERSION_NUMBER`) can use
/// this library. Call it once at the start.
///
/// Versions fit if the major number is equal and, while that is 0, also the minor number; from 1.0 on, if the library's
/// minor number is at least the header's.
///
/// Errors: `UNSUPPORTED`, with a message that says which side is too old.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_abi_check(header_version: u32, err: *mut dsv4_error) -> dsv4_status {
    guard("dsv4_abi_check", err, || Ok(version::check(header_version, version::VERSION)?))
}

/// Why a call failed: like [`Error`], and the statuses that only the C API has.
pub(super) struct Fault {
    pub(super) status: dsv4_status,
    pub(super) message: String,
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self { status: error.kind().into(), message: error.message().to_owned() }
    }
}

/// Fills the caller's error, if there is one.
///
/// # Safety
/// `err` is NULL or points to a `dsv4_error`, or to one of an older version whose `size` says so.
pub(super) unsafe fn report(err: *mut dsv4_error, status: dsv4_status, message: &str) {
    if err.is_null() {
        return;
    }
    // SAFETY: every version begins with `size`.
    let size = unsafe { (&raw const (*err).size).read_unaligned() };
    let size = if size == 0 { size_of::<dsv4_error>() } else { size };
    if size < offset_of!(dsv4_error, message) {
        return;
    }
    // SAFETY: `err` is valid for writes up to its `size`, and every version has these fields at these places.
    unsafe { (&raw mut (*err).code).write_unaligned(status) };
    let room = (size - offset_of!(dsv4_error, message)).min(DSV4_ERROR_MESSAGE_SIZE);
    let Some(longest) = room.checked_sub(1) else { return };
    let message = beginning(message, longest);
    // SAFETY: as above; the pointer is only formed.
    let text = unsafe { &raw mut (*err).message }.cast::<u8>();
    // SAFETY: the message is shorter than `room`, and a `str` of ours never overlaps the caller's memory.
    unsafe { text.copy_from_nonoverlapping(message.as_ptr(), message.len()) };
    // SAFETY: as above.
    unsafe { text.add(message.len()).write(0) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reported(message: &str) -> String {
        let mut err = dsv4_error { size: 0, code: dsv4_status::Ok, message: [0x55; DSV4_ERROR_MESSAGE_SIZE] };
        // SAFETY: `err` is a local.
        unsafe { report(&raw mut err, dsv4_status::Config, message) };
        assert_eq!((err.size, err.code), (0, dsv4_status::Config));
        // SAFETY: `report` ends the message with a NUL.
        let text = unsafe { std::ffi::CStr::from_ptr(err.message.as_ptr()) };
        text.to_str().expect("the message is UTF-8").to_owned()
    }

    #[test]
    fn a_long_message_is_cut_at_a_character_border() {
        assert_eq!(reported("short"), "short");
        assert_eq!(reported(&"x".repeat(2000)), "x".repeat(999));
        assert_eq!(reported(&"€".repeat(400)), "€".repeat(333));
        assert_eq!(reported(&format!("x{}", "€".repeat(400))), format!("x{}", "€".repeat(332)));
    }

    #[test]
    fn nothing_is_written_beyond_the_size() {
        for size in [1, 8, 11, 12, 13, 20, 1011, 1012] {
            let mut err = dsv4_error { size, code: dsv4_status::Ok, message: [0x55; DSV4_ERROR_MESSAGE_SIZE] };
            // SAFETY: `err` is a local.
            unsafe { report(&raw mut err, dsv4_status::Config, &"x".repeat(2000)) };
            let room = size.saturating_sub(12);
            assert_eq!(err.size, size);
            assert_eq!(err.code == dsv4_status::Config, size >= 12, "size {size}");
            let text =
                [vec![c_char::try_from(b'x').expect("ASCII"); room.saturating_sub(1)], vec![0; room.min(1)]].concat();
            assert_eq!(err.message[..room], text, "size {size}");
            assert!(err.message[room..].iter().all(|&c| c == 0x55), "size {size}");
        }
    }

    /// Pitfall 98.
    #[test]
    fn numbers_are_dense_and_names_are_unique() {
        for (i, (status, name)) in dsv4_status::ALL.iter().enumerate() {
            assert_eq!(*status as usize, i, "{name:?}");
            assert_eq!(dsv4_status::ALL.iter().filter(|(_, other)| other == name).count(), 1, "{name:?}");
        }
    }

    #[test]
    fn a_null_error_is_ignored() {
        // SAFETY: NULL is allowed.
        unsafe { report(std::ptr::null_mut(), dsv4_status::Io, "lost") };
    }
}
