//! The cache of one sequence: window rings, compressed entries and index keys in pages of three sizes, and the
//! running states of the compressors.
//!
//! Pages live in three buckets (`wide`, `index`, `narrow`); one block of 256 native tokens is one table entry that
//! names a page per layer and kind. Here each sequence owns its pages; sharing them between sequences is the business
//! of a pool behind the same interface.
//!
//! Invariant: a step never writes what is committed. It reads the cache, fills a [`Staged`] of its own, and
//! [`SequenceCache::commit`] takes that over without a way to fail; so a cancelled or failed step leaves the sequence
//! as it was. Knows nothing of devices or of the model's arithmetic.

mod footprint;
mod layout;
mod pages;
mod sequence;

pub use layout::{CacheLayout, KvFormat, LayerLayout};
pub use pages::{Bucket, PageId, Pages};
pub use sequence::{BLOCK_TOKENS, CacheBytes, LayerView, SequenceCache, Staged, StagedLayer};
