//! Tables, hashes and index at the sizes of long contexts and many prefixes, over pages of a few bytes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::*;
use crate::model::config::LayerKind;

/// The layers of V4-Flash with rows of two bytes.
fn small_rows() -> CacheLayout {
    let kinds = (0..43).map(|i| match i {
        0 | 1 => LayerKind::Window,
        i if i % 2 == 0 => LayerKind::C4a,
        _ => LayerKind::C128a,
    });
    let layer = |kind| match kind {
        LayerKind::Window => LayerLayout { kind, main_state: 0, index_state: 0 },
        LayerKind::C4a => LayerLayout { kind, main_state: 24, index_state: 24 },
        LayerKind::C128a => LayerLayout { kind, main_state: 3, index_state: 0 },
    };
    CacheLayout {
        format: KvFormat::Bf16,
        head_dim: 1,
        rope_dim: 0,
        index_dim: 1,
        window: 128,
        layers: kinds.map(layer).collect(),
    }
}

fn manager(layout: CacheLayout) -> Arc<CacheManager> {
    let options =
        CacheOptions { limit: u64::MAX, checkpoint_limit: u64::MAX, policy: CheckpointPolicy::Boundary, poison: false };
    CacheManager::new(layout, options, b"scale")
}

fn tokens(path: u32, block: u32) -> Vec<u32> {
    (0..BLOCK_TOKENS as u32).map(|i| path.wrapping_mul(2_654_435_761) ^ (block << 8 | i)).collect()
}

/// Appends a block of 256 tokens and makes it findable; returns its key.
fn append(manager: &Arc<CacheManager>, cache: &mut SequenceCache, parent: PrefixKey, tokens: &[u32]) -> PrefixKey {
    let staged = cache.stage(BLOCK_TOKENS).unwrap();
    cache.commit(staged);
    let block = cache.full_blocks().last().unwrap();
    assert!(manager.publish(parent, tokens, block).unwrap().is_none(), "two different blocks were taken for equal");
    parent.extend(tokens)
}

/// What preempts a thread now and then does not change it.
fn median(times: &[Duration]) -> Duration {
    let mut times = times.to_vec();
    times.sort_unstable();
    times[times.len() / 2]
}

fn time<T>(work: impl FnOnce() -> T) -> Duration {
    let start = Instant::now();
    drop(work());
    start.elapsed()
}

#[test]
fn a_million_tokens_are_extended_and_found_again_block_by_block() {
    let manager = manager(small_rows());
    let mut cache = SequenceCache::new(&manager, 0).unwrap();
    let blocks = (1 << 20) / BLOCK_TOKENS as u32;
    let (mut all, mut key, mut times) = (Vec::new(), manager.root(), Vec::new());
    for block in 0..blocks {
        let tokens = tokens(1, block);
        let start = Instant::now();
        key = append(&manager, &mut cache, key, &tokens);
        times.push(start.elapsed());
        all.extend(tokens);
    }
    manager.keep_checkpoint(key, Checkpoint::new(cache.checkpoint()));
    assert_eq!(manager.lookup(manager.root(), &all).unwrap().end, LookupEnd::NoCheckpoint, "no logits for this end");
    all.push(1);
    let hit = manager.lookup(manager.root(), &all).unwrap();
    assert_eq!((hit.blocks.len(), hit.end), (blocks as usize, LookupEnd::Complete));
    assert_eq!(hit.keys.last(), Some(&key));
    assert!(hit.blocks.iter().zip(cache.full_blocks()).all(|(a, b)| Arc::ptr_eq(a, b)));
    let mut twin = SequenceCache::new(&manager, 0).unwrap();
    twin.extend(&hit.blocks, hit.checkpoint.unwrap().state).unwrap();
    assert_eq!(twin.len(), 1 << 20);
    assert_eq!(manager.stats().prefix_blocks, u64::from(blocks));
    // the figures are in benches/RESULTS.md; this only catches a wrong complexity, on any machine
    let eighth = times.len() / 8;
    let [first, last] = [&times[..eighth], &times[7 * eighth..]].map(median);
    assert!(last < 4 * first, "{first:?} a block at first, {last:?} after a million tokens");
    let lookup = |blocks: usize| {
        median(&[0; 9].map(|_| time(|| manager.lookup(manager.root(), &all[..blocks * BLOCK_TOKENS + 1]))))
    };
    let (short, long) = (lookup(eighth), lookup(8 * eighth));
    assert!(long < 4 * 8 * short, "{short:?} for {eighth} blocks, {long:?} for eight times as many");
}

#[test]
fn ten_thousand_prefixes_are_told_apart_and_evicted_from_the_oldest() {
    let manager = manager(small_rows());
    let system = tokens(0, 0);
    let mut base = SequenceCache::new(&manager, 0).unwrap();
    let root = append(&manager, &mut base, manager.root(), &system);
    let prefixes = 10_000;
    let prompt = |path| [system.clone(), tokens(path, 1), vec![7; 100]].concat();
    let lookup = |path| {
        let prompt = prompt(path);
        time(|| manager.lookup(manager.root(), &prompt))
    };
    let (few, mut among_few) = (100, Duration::MAX);
    for path in 1..=prefixes {
        let mut cache = base.fork().unwrap();
        let key = append(&manager, &mut cache, root, &tokens(path, 1));
        manager.keep_checkpoint(key, Checkpoint::new(cache.checkpoint()));
        if path == few {
            among_few = median(&(1..=few).map(lookup).collect::<Vec<_>>());
        }
    }
    let among_many = median(&(1..=few).map(lookup).collect::<Vec<_>>());
    assert!(among_many < 10 * among_few, "{among_few:?} among {few} prefixes, {among_many:?} among {prefixes}");
    for path in 1..=prefixes {
        let hit = manager.lookup(manager.root(), &prompt(path)).unwrap();
        assert_eq!(hit.blocks.len(), 2, "path {path}");
    }
    assert_eq!(manager.lookup(manager.root(), &prompt(prefixes + 1)).unwrap().end, LookupEnd::NoCheckpoint);

    // path 1 is in use, path 2 was just used again: neither goes before path 3
    let held = manager.lookup(manager.root(), &prompt(1)).unwrap();
    manager.lookup(manager.root(), &prompt(2)).unwrap();
    for path in 3..=prefixes {
        assert!(manager.evict());
        assert!(manager.lookup(manager.root(), &prompt(path)).unwrap().blocks.is_empty(), "path {path} was not next");
    }
    assert!(manager.evict());
    assert!(manager.lookup(manager.root(), &prompt(2)).unwrap().blocks.is_empty());
    assert_eq!(manager.stats().prefix_blocks, 2, "the block in use and its parent stay");
    drop((held, base));
    while manager.evict() {}
    assert_eq!(manager.stats().prefix_blocks, 0);
    assert_eq!(manager.stats().pool.used_bytes, 0);
}

/// Pitfall 51.
#[test]
fn positions_beyond_32_bits_are_positions_like_any_other() {
    let layout = CacheLayout {
        layers: vec![
            LayerLayout { kind: LayerKind::C4a, main_state: 24, index_state: 24 },
            LayerLayout { kind: LayerKind::C128a, main_state: 3, index_state: 0 },
        ],
        ..small_rows()
    };
    let manager = manager(layout);
    // 2^33 tokens: entry 2^31 of the c4a layer follows; every block before is one and the same
    let start = 1usize << 33;
    let mut cache = SequenceCache::synthetic(&manager, start).unwrap();
    let mut staged = cache.stage(BLOCK_TOKENS).unwrap();
    let row = |i: usize| [i as u8, (i >> 8) as u8 ^ 0x5A];
    for (l, per_entry) in [(0, 4), (1, 128)] {
        staged.layers[l].rows = (0..BLOCK_TOKENS).flat_map(row).collect();
        staged.layers[l].entries = (0..BLOCK_TOKENS / per_entry).flat_map(|i| row(i + 1000 * l)).collect();
    }
    staged.layers[0].keys = (0..BLOCK_TOKENS / 4).flat_map(|i| row(i + 500)).collect();
    cache.commit(staged);
    assert_eq!(cache.len(), start + BLOCK_TOKENS);
    assert_eq!(cache.full_blocks().len(), (start + BLOCK_TOKENS) / BLOCK_TOKENS);

    let step = cache.stage(1).unwrap();
    let (c4a, c128a) = (cache.view(0, &step), cache.view(1, &step));
    for i in [0, 1, 63] {
        assert_eq!(c4a.entry((start / 4) + i), row(i));
        assert_eq!(c4a.key((start / 4) + i), row(i + 500));
    }
    assert_eq!(c128a.entry(start / 128 + 1), row(1001));
    assert_eq!(c4a.window_row(start + 255), row(255));
    assert_eq!(c4a.window_row(start + 128), row(128));
    drop(step);
    let bytes = manager.layout().bytes(start + BLOCK_TOKENS);
    assert_eq!(bytes.pages, ((start / BLOCK_TOKENS) as u64 + 1) * 2 * (64 + 64 + 2));
}

#[test]
fn a_block_that_outlived_the_one_before_it_is_known_to_that_when_it_comes_back() {
    let manager = manager(small_rows());
    let path = |block| tokens(9, block);
    let mut cache = SequenceCache::new(&manager, 0).unwrap();
    let staged = cache.stage(4 * BLOCK_TOKENS).unwrap();
    cache.commit(staged);
    let blocks = cache.full_blocks().to_vec();
    drop(cache);
    let key = |n: u32| (0..n).fold(manager.root(), |key, block| key.extend(&path(block)));
    // the second and fourth without those before them, then these
    for block in [1, 3, 0, 2] {
        assert!(manager.publish(key(block), &path(block), &blocks[block as usize]).unwrap().is_none());
    }
    drop(blocks);
    let is_there = |block: u32| manager.block(key(block + 1), &path(block)).is_some();
    for last in (0..4).rev() {
        assert!((0..=last).all(is_there), "block {last} went after one behind it");
        assert!(manager.evict());
        assert!(!is_there(last));
    }
    assert!(!manager.evict(), "nothing is left");
}
