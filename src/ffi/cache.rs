//! Cache and statistics

use super::args::{OutStruct, SizedStruct, object};
use super::engine::dsv4_engine;
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
        let session = unsafe { object(session, "session") }?.exclusive.read()?;
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

/// Figures of an engine's cache. Set `size` to `sizeof(dsv4_cache_stats)` before the call. Counters count from the
/// engine's beginning.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dsv4_cache_stats {
    /// `sizeof(dsv4_cache_stats)`.
    pub size: usize,
    /// Most bytes of pages.
    pub limit_bytes: u64,
    /// Bytes of the pages in use, by sessions and by reusable prompt beginnings.
    pub used_bytes: u64,
    /// Bytes of all pages, those that wait for reuse included.
    pub held_bytes: u64,
    /// Pages in use: wide (64 rows), index (64 index keys), narrow (2 rows).
    pub used_pages: [u64; 3],
    /// Pages that wait for reuse.
    pub free_pages: [u64; 3],
    /// Reusable blocks of 256 tokens.
    pub prefix_blocks: u64,
    /// Of these, blocks that no session uses, which make room when it is needed.
    pub evictable_blocks: u64,
    /// Checkpoints, at which prompts can start.
    pub checkpoints: u64,
    /// Tokens of prompts that were looked up.
    pub lookup_tokens: u64,
    /// Of these, tokens that were reused instead of computed.
    pub hit_tokens: u64,
    /// Lookups that ended because the next block was not there.
    pub ended_no_block: u64,
    /// Lookups that ended because blocks go on, but without a checkpoint.
    pub ended_no_checkpoint: u64,
    /// Blocks dropped to make room.
    pub evicted_blocks: u64,
    /// Checkpoints dropped to make room.
    pub evicted_checkpoints: u64,
    /// Sessions forked.
    pub forks: u64,
    /// Shared partial blocks copied before they were written.
    pub copies_on_write: u64,
    /// Blocks and checkpoints in the host tier now; the next fields are all zero where there are no tiers.
    pub host_records: u64,
    /// Their bytes.
    pub host_bytes: u64,
    /// Bytes of evicted blocks and checkpoints that went to the tiers.
    pub offload_bytes: u64,
    /// Nanoseconds of copying them there.
    pub offload_nanos: u64,
    /// Bytes written to the disk tier.
    pub written_bytes: u64,
    /// Nanoseconds of writing them, on a thread of their own.
    pub write_nanos: u64,
    /// Bytes read from the disk tier.
    pub read_bytes: u64,
    /// Nanoseconds of reading them, on that thread.
    pub read_nanos: u64,
    /// Nanoseconds that prompts waited for the tiers.
    pub wait_nanos: u64,
    /// Blocks and checkpoints that came back from the host tier.
    pub host_hits: u64,
    /// Blocks and checkpoints that came back from the disk tier.
    pub disk_hits: u64,
    /// Of these, those that had been read ahead when they were asked for.
    pub prefetched: u64,
    /// Prompts that stopped waiting.
    pub timeouts: u64,
    /// Blocks and checkpoints that the write limits kept from the disk tier.
    pub limited_writes: u64,
    /// Blocks and checkpoints that were lost because memory or disk were full, or writing was too slow.
    pub dropped: u64,
    /// Files of the disk tier that were deleted to make room for others.
    pub deleted_files: u64,
    /// Files of the disk tier that were damaged or of another engine, and were deleted.
    pub damaged_files: u64,
    /// Failures of the file system.
    pub io_errors: u64,
    /// Tokens that went through the model, in all sessions.
    pub computed_tokens: u64,
}

// SAFETY: `repr(C)`, `size` first, plain fields without padding.
unsafe impl SizedStruct for dsv4_cache_stats {
    const NAME: &'static str = "dsv4_cache_stats";
}

/// Figures of the engine's cache now.
///
/// Errors: only `INVALID_ARGUMENT` and `POISONED`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_engine_get_cache_stats(
    engine: *const dsv4_engine,
    stats: *mut dsv4_cache_stats,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let out = unsafe { OutStruct::new(stats, "stats") };
    guard("dsv4_engine_get_cache_stats", err, || {
        // SAFETY: as above.
        let engine = unsafe { object(engine, "engine") }?.get()?;
        out.check()?;
        let stats = engine.cache_stats();
        out.set(dsv4_cache_stats {
            size: size_of::<dsv4_cache_stats>(),
            limit_bytes: stats.limit_bytes,
            used_bytes: stats.pool.used_bytes,
            held_bytes: stats.pool.held_bytes,
            used_pages: stats.pool.used,
            free_pages: stats.pool.free,
            prefix_blocks: stats.prefix_blocks,
            evictable_blocks: stats.evictable_blocks,
            checkpoints: stats.checkpoints,
            lookup_tokens: stats.lookup_tokens,
            hit_tokens: stats.hit_tokens,
            ended_no_block: stats.ended_no_block,
            ended_no_checkpoint: stats.ended_no_checkpoint,
            evicted_blocks: stats.evicted_blocks,
            evicted_checkpoints: stats.evicted_checkpoints,
            forks: stats.forks,
            copies_on_write: stats.copies_on_write,
            host_records: stats.tiers.host_records,
            host_bytes: stats.tiers.host_bytes,
            offload_bytes: stats.tiers.offload_bytes,
            offload_nanos: stats.tiers.offload_nanos,
            written_bytes: stats.tiers.written_bytes,
            write_nanos: stats.tiers.write_nanos,
            read_bytes: stats.tiers.read_bytes,
            read_nanos: stats.tiers.read_nanos,
            wait_nanos: stats.tiers.wait_nanos,
            host_hits: stats.tiers.host_hits,
            disk_hits: stats.tiers.disk_hits,
            prefetched: stats.tiers.prefetched,
            timeouts: stats.tiers.timeouts,
            limited_writes: stats.tiers.limited_writes,
            dropped: stats.tiers.dropped,
            deleted_files: stats.tiers.deleted_files,
            damaged_files: stats.tiers.damaged_files,
            io_errors: stats.tiers.io_errors,
            computed_tokens: stats.computed_tokens,
        });
        Ok(())
    })
}

/// Moves every reusable beginning that no session uses to the tiers, and the host tier to the folder of the disk tier,
/// within the write limits. Returns when all is written: for an orderly end, after which other processes find them.
/// Without tiers it does nothing.
///
/// Errors: only `INVALID_ARGUMENT` and `POISONED`; what cannot be written is lost and counted.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_engine_flush_cache(engine: *const dsv4_engine, err: *mut dsv4_error) -> dsv4_status {
    guard("dsv4_engine_flush_cache", err, || {
        // SAFETY: by the header's contract.
        unsafe { object(engine, "engine") }?.get()?.flush_cache();
        Ok(())
    })
}
