//! Checked launchers, one file a group of kernels: each checks every size that its kernel relies on, then launches.
//!
//! The structs marked [`Params`] mirror those of the sources in `kernels/`, field by field. Tensors are dense and
//! row-major; activations are bfloat16 bits (`u16`).

mod attention;
mod cache;
mod chain;
mod exchange;
mod hybrid;
mod hyper;
mod indexer;
mod linear;
mod moe;
mod norm;
mod sample;
pub(crate) mod unfused;
mod wide;

pub(crate) use attention::{
    Attention, AttentionKernel, Entries, Path as AttentionPath, attend, attend_by, hopper_kernels,
};
pub(crate) use cache::{Compress, Compressor, Insert, Pages, Sequence, WindowCommit, compress, insert, window_commit};
pub(crate) use chain::{has_chains, linear_chain};
pub(crate) use exchange::{ANSWERED, ASK_BLOCKS, Ask, Fetch, ask, ask_blocks, fetch};
pub(crate) use hybrid::{CombineAll, combine_all, divide};
pub(crate) use hyper::{Finish, MIX_FLOATS, Project, finish, parts_len, project};
pub(crate) use indexer::{
    GROUP_ROWS, Group, IndexQuery, Scores, TopK, highest_len, hopper_index, index_query, scores, top_k, top_k_parts,
};
pub(crate) use linear::{Job, Output, Weight, linear, workspace_len};
pub(crate) use moe::{
    ExpertFormat, Experts, Grouping, Product, Route, Routing, Swiglu, combine, expert_product, group, is_for_tiles,
    route, swiglu,
};
pub(crate) use norm::{RmsNorm, embed, quantise, rms_norm, rotations, watch, watch_f32};
pub(crate) use sample::{DrawWords, EditWords, Sample, argmax, draw_words, edit_words, sample, top_logits};
pub(crate) use wide::images_len;

use super::memory::{Buffer, Plain};
use super::stream::{Launch, Params};
use crate::error::{Result, bail};

/// Values of a KV row, of its rotary part and of an index key that the kernels are written for.
pub(crate) const HEAD_DIM: usize = 512;
pub(crate) const ROPE_DIM: usize = 64;
pub(crate) const INDEX_DIM: usize = 128;
/// Bytes of a stored KV row and of an index key.
pub(crate) const ROW_BYTES: usize = 584;
pub(crate) const KEY_BYTES: usize = 68;
/// Token of a row that does nothing: its streams are zeros, no expert has it, nothing of it is kept.
pub(crate) const IDLE: u32 = u32::MAX;
/// Residual streams.
pub(crate) const STREAMS: usize = 4;
/// Rows longer than this do not fit the registers of one block.
pub(crate) const MAX_WIDTH: usize = 8192;

/// Refuses a buffer that is not exactly `len` long.
fn exact<T: Plain>(what: &str, buffer: &Buffer<T>, len: usize) -> Result<()> {
    if buffer.len() != len {
        bail!(InvalidArgument, "{what} has {} values instead of {len}", buffer.len());
    }
    Ok(())
}

/// Refuses a buffer that is shorter than `len`.
fn at_least<T: Plain>(what: &str, buffer: &Buffer<T>, len: usize) -> Result<()> {
    if buffer.len() < len {
        bail!(InvalidArgument, "{what} has {} values; {len} are needed", buffer.len());
    }
    Ok(())
}

/// Refuses a width that is not a multiple of `of`, or 0.
fn multiple(what: &str, value: usize, of: usize) -> Result<()> {
    if value == 0 || !value.is_multiple_of(of) {
        bail!(Unsupported, "{what} is {value}; the GPU kernels need a multiple of {of}");
    }
    Ok(())
}

/// A size as kernels take it.
fn word(what: &str, value: usize) -> Result<u32> {
    match u32::try_from(value) {
        Ok(v) => Ok(v),
        Err(_) => bail!(Unsupported, "{what} is {value}; the GPU kernels count it in 32 bits"),
    }
}

/// One block a row.
fn rows(count: usize, block: u32) -> Launch {
    Launch { grid: [count, 1, 1], block, shared: 0 }
}

/// Address of a buffer that may be absent.
fn address<T: Plain>(buffer: Option<&Buffer<T>>) -> u64 {
    buffer.map_or(0, Buffer::address)
}
