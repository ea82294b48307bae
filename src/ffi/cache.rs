//! Cache and statistics

use super::args::{OutStruct, SizedStruct, object};
use super::guard::guard;
use super::session::dsv4_session;
use super::status::{dsv4_error, dsv4_status};

/// Bytes of cache memory by kind. Set `size` to `sizeof(dsv4_cache_info)` before the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dsv4_cache_info {
    /// `sizeof(dsv4_cache_info)`.
    pub size: usize,
    /// Sliding windows of all layers; fixed.
    pub window_bytes: u64,
    /// States of the compressors; fixed.
    pub state_bytes: u64,
    /// Pages of compressed entries and index keys; grow with the context.
    pub page_bytes: u64,
}

// SAFETY: `repr(C)`, `size` first, plain fields without padding.
unsafe impl SizedStruct for dsv4_cache_info {
    const NAME: &'static str = "dsv4_cache_info";
}

/// Cache memory that the session holds now.
///
/// Errors: only `INVALID_ARGUMENT`, `BUSY` and `POISONED`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_session_get_cache_info(
    session: *mut dsv4_session,
    info: *mut dsv4_cache_info,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let info = unsafe { OutStruct::new(info, "info") };
    guard("dsv4_session_get_cache_info", err, || {
        // SAFETY: as above.
        let session = unsafe { object(session, "session") }?.exclusive.get()?;
        info.check()?;
        let bytes = session.cache_bytes();
        info.set(dsv4_cache_info {
            size: size_of::<dsv4_cache_info>(),
            window_bytes: bytes.window,
            state_bytes: bytes.state,
            page_bytes: bytes.pages,
        });
        Ok(())
    })
}
