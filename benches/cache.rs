//! What the cache's bookkeeping costs a block of 256 tokens: `cargo bench --bench cache`.
//!
//! The layers are those of V4-Flash with rows of two bytes, so that tables, hashes and page lists are measured and not
//! the filling of memory.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a benchmark prints, and may stop where something fails")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use dsv4::cache::{
    BLOCK_TOKENS, Block, CacheLayout, CacheManager, CacheOptions, Checkpoint, CheckpointPolicy, KvFormat, LayerLayout,
    PrefixKey, SequenceCache,
};
use dsv4::model::config::LayerKind;

const BLOCKS: u32 = (1 << 20) / BLOCK_TOKENS as u32;

fn manager(limit: u64) -> Arc<CacheManager> {
    let layer = |i| match i {
        0 | 1 => LayerLayout { kind: LayerKind::Window, main_state: 0, index_state: 0 },
        i if i % 2 == 0 => LayerLayout { kind: LayerKind::C4a, main_state: 24, index_state: 24 },
        _ => LayerLayout { kind: LayerKind::C128a, main_state: 3, index_state: 0 },
    };
    let layout = CacheLayout {
        format: KvFormat::Bf16,
        head_dim: 1,
        rope_dim: 0,
        index_dim: 1,
        window: 128,
        layers: (0..43).map(layer).collect(),
    };
    let options = CacheOptions { limit, checkpoint_limit: u64::MAX, policy: CheckpointPolicy::Boundary, poison: false };
    CacheManager::new(layout, options, b"bench")
}

fn tokens(path: u32, block: u32) -> Vec<u32> {
    (0..BLOCK_TOKENS as u32).map(|i| path.wrapping_mul(2_654_435_761) ^ (block << 8 | i)).collect()
}

/// The blocks of 1,048,576 tokens, all of them in the index, as a growing sequence brings them there.
struct Million {
    blocks: Vec<Arc<Block>>,
    tokens: Vec<u32>,
    key: PrefixKey,
}

impl Million {
    fn new(manager: &CacheManager, path: u32) -> Self {
        let (mut blocks, mut all, mut key) = (Vec::new(), Vec::new(), manager.root());
        for i in 0..BLOCKS {
            let tokens = tokens(path, i);
            let block = Arc::new(Block::new(manager).unwrap());
            manager.publish(key, &tokens, &block).unwrap();
            key = key.extend(&tokens);
            blocks.push(block);
            all.extend(tokens);
        }
        Self { blocks, tokens: all, key }
    }
}

/// Median time of `f` in microseconds a block.
fn median(f: &mut dyn FnMut() -> Duration) -> f64 {
    let mut times: Vec<Duration> = (0..5).map(|_| f()).collect();
    times.sort();
    times[2].as_secs_f64() * 1e6 / f64::from(BLOCKS)
}

fn time<T>(f: impl FnOnce() -> T) -> Duration {
    let start = Instant::now();
    let result = f();
    let spent = start.elapsed();
    drop(result);
    spent
}

fn main() {
    let fresh = median(&mut || {
        let manager = manager(u64::MAX);
        time(|| Million::new(&manager, 1))
    });
    println!("extension by new pages (pages, hash, index): {fresh:.2} us a block");

    let full = manager(u64::MAX);
    let recycled = median(&mut || {
        while full.evict() {}
        time(|| Million::new(&full, 1))
    });
    println!("extension by freed pages: {recycled:.2} us a block");

    while full.evict() {}
    let million = Million::new(&full, 1);
    let evicting = median(&mut || {
        let tight = manager(full.stats().pool.used_bytes);
        drop(Million::new(&tight, 1));
        time(|| Million::new(&tight, 2).blocks.len())
    });
    println!("extension where each block evicts one: {evicting:.2} us a block");

    let mut sequence = SequenceCache::new(&full, 0).unwrap();
    full.keep_checkpoint(million.key, Checkpoint::new(sequence.checkpoint()));
    let lookup =
        median(&mut || time(|| full.lookup(full.root(), &[million.tokens.as_slice(), &[0]].concat()).unwrap()));
    println!("lookup: {lookup:.2} us a block");

    sequence.extend(&million.blocks, sequence.checkpoint()).unwrap();
    let fork = median(&mut || time(|| sequence.fork().unwrap()));
    println!("fork: {fork:.3} us a block");
}
