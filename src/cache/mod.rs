//! The cache: window rings, compressed entries and index keys in pages of three sizes, and the running states of the
//! compressors; shared between sequences where prefixes are equal.
//!
//! * [`PagePool`] has the memory, on the host or what a backend supplies as [`PageMemory`]; [`CacheManager`] has the
//!   limits, the [prefix index](PrefixKey) and the figures.
//! * A [`Block`] is the pages of all layers for 256 tokens; a [`State`] is what a sequence carries besides.
//! * A [`SequenceCache`] is a table of blocks and a state, each of its own or shared; what is shared is copied before
//!   it is written.
//!
//! Invariant: a step never writes what is committed. It reads the cache, fills a [`Staged`] of its own, and
//! [`SequenceCache::commit`] takes that over without a way to fail; so a cancelled or failed step leaves the sequence
//! as it was. Knows nothing of devices or of the model's arithmetic.

mod block;
mod compressors;
#[cfg(test)]
mod fake;
pub mod file;
mod footprint;
mod layout;
mod manager;
mod mark;
mod memory;
mod plan;
mod pool;
mod prefix;
mod rollback;
mod sequence;
mod slabs;
mod state;
pub mod tier;

pub use block::Block;
pub use layout::{CacheLayout, KvFormat, LayerLayout};
pub use manager::{CacheManager, CacheOptions, CacheStats, CheckpointPolicy};
pub use mark::Mark;
pub use memory::{PageMemory, PageMove};
pub use plan::CachePlan;
pub use pool::{Bucket, Page, PagePool, PoolUsage};
pub use prefix::{Checkpoint, Hit, LookupEnd, PrefixKey};
pub use sequence::{BLOCK_TOKENS, CacheBytes, LayerView, SequenceCache, Staged, StagedLayer};
pub use state::State;

#[cfg(test)]
mod memory_tests;
#[cfg(test)]
mod scale_tests;
