//! Sequences in a page memory beside the same ones on the host: after every step, fork, checkpoint and failure of the
//! memory their content is the same.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::fake::FakeMemory;
use super::file::Identity;
use super::tier::{TierOptions, Tiers};
use super::*;
use crate::error::{ErrorKind, Result};
use crate::model::config::LayerKind;

/// All kinds of layers, some twice; states take several pages of each size, and the window's last page is not full.
fn layout() -> CacheLayout {
    let layer = |kind| match kind {
        LayerKind::Window => LayerLayout { kind, main_state: 0, index_state: 0 },
        LayerKind::C4a => LayerLayout { kind, main_state: 24 * 8, index_state: 24 * 32 },
        LayerKind::C128a => LayerLayout { kind, main_state: 3 * 8, index_state: 0 },
    };
    let kinds = [LayerKind::Window, LayerKind::C4a, LayerKind::C128a, LayerKind::C4a, LayerKind::C128a];
    CacheLayout {
        format: KvFormat::Fp8,
        head_dim: 8,
        rope_dim: 0,
        index_dim: 32,
        window: 100,
        layers: kinds.map(layer).to_vec(),
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}

fn manager(memory: Option<&Arc<FakeMemory>>) -> Arc<CacheManager> {
    let options = CacheOptions {
        limit: u64::MAX,
        checkpoint_limit: u64::MAX,
        policy: CheckpointPolicy::Boundary,
        poison: memory.is_some(),
    };
    let memory = memory.map(|memory| Arc::clone(memory) as Arc<dyn PageMemory>);
    CacheManager::with_memory(layout(), options, b"memory", None, memory)
}

/// What the model would have computed for one step: anything that depends on the step, the layer and the token.
#[derive(Clone, Copy)]
struct Step {
    salt: usize,
    count: usize,
}

impl Step {
    fn bytes(self, what: usize, layer: usize, at: usize, len: usize) -> Vec<u8> {
        let mut random = Random((self.salt * 31 + what) as u64 ^ ((layer as u64) << 20) ^ ((at as u64) << 32));
        (0..len).map(|_| random.below(256) as u8).collect()
    }

    fn row(self, layer: usize, position: usize) -> Vec<u8> {
        self.bytes(1, layer, position, layout().row_bytes())
    }

    /// State of a compressor of `len` values behind the token at `position`.
    fn state(self, what: usize, layer: usize, position: usize, len: usize) -> Vec<f32> {
        self.bytes(what, layer, position, len).into_iter().map(f32::from).collect()
    }

    /// Entries, or index keys, that tokens `start..` complete: number, bytes.
    fn completed(self, what: usize, layer: usize, start: usize, ratio: usize, len: usize) -> Vec<(usize, Vec<u8>)> {
        let before = |tokens: usize| tokens.checked_div(ratio).unwrap_or(0);
        (before(start)..before(start + self.count)).map(|j| (j, self.bytes(what, layer, j, len))).collect()
    }

    fn on_host(self, cache: &mut SequenceCache) -> Result<()> {
        let mut staged = cache.stage(self.count)?;
        let (start, kept_from, layout) = (staged.start, staged.kept_from(), layout());
        for (i, l) in layout.layers.iter().enumerate() {
            let layer = &mut staged.layers[i];
            for token in 0..self.count {
                if token >= kept_from {
                    layer.main_before.extend_from_slice(&layer.main_state);
                    layer.index_before.extend_from_slice(&layer.index_state);
                }
                layer.rows[token * layout.row_bytes()..][..layout.row_bytes()]
                    .copy_from_slice(&self.row(i, start + token));
                layer.main_state = self.state(2, i, start + token, l.main_state);
                layer.index_state = self.state(3, i, start + token, l.index_state);
            }
            let ratio = l.kind.ratio();
            for (_, entry) in self.completed(4, i, start, ratio, layout.row_bytes()) {
                layer.entries.extend(entry);
            }
            if l.kind == LayerKind::C4a {
                for (_, key) in self.completed(5, i, start, ratio, layout.key_bytes()) {
                    layer.keys.extend(key);
                }
            }
        }
        cache.commit(staged);
        Ok(())
    }

    /// As an engine does it whose pages lie elsewhere.
    fn in_memory(self, cache: &mut SequenceCache, memory: &FakeMemory) -> Result<()> {
        let mut staged = cache.stage(self.count)?;
        let (start, kept_from, layout) = (staged.start, staged.kept_from(), layout());
        let [wide, index, narrow] = layout.page_bytes();
        let row = layout.row_bytes();
        assert!(staged.layers.iter().all(|l| l.rows.is_empty() && l.main_state.is_empty()));
        let (mut kept_rows, mut before) = (Vec::new(), Vec::new());
        for token in kept_from..self.count {
            for i in 0..layout.layers.len() {
                kept_rows.extend(match (start + token).checked_sub(layout.window) {
                    Some(position) if position >= start => self.row(i, position),
                    Some(position) => {
                        let slot = position % layout.window;
                        let page = cache.ring_ids(i).nth(slot / 64).unwrap() as usize;
                        let mut out = vec![0; row];
                        memory.read((page * wide + slot % 64 * row) as u64, &mut out)?;
                        out
                    }
                    None => vec![0; row],
                });
            }
        }
        for (i, l) in layout.layers.iter().enumerate() {
            let size = if l.kind == LayerKind::C128a { narrow } else { wide };
            before.push((
                read_state(memory, cache.main_state_ids(i), size, l.main_state)?,
                read_state(memory, cache.index_state_ids(i), index, l.index_state)?,
            ));
            let ratio = l.kind.ratio();
            for (j, entry) in self.completed(4, i, start, ratio, row) {
                let per_page = BLOCK_TOKENS / ratio;
                let page = cache.entry_ids(i).nth(j / per_page).unwrap() as usize;
                memory.write((page * size + j % per_page * row) as u64, &entry)?;
            }
            if l.kind == LayerKind::C4a {
                for (j, key) in self.completed(5, i, start, ratio, layout.key_bytes()) {
                    let page = cache.key_ids(i).nth(j / 64).unwrap() as usize;
                    memory.write((page * index + j % 64 * layout.key_bytes()) as u64, &key)?;
                }
            }
            let last = start + self.count - 1;
            write_state(memory, cache.fresh_main_ids(i), size, &self.state(2, i, last, l.main_state))?;
            write_state(memory, cache.fresh_index_ids(i), index, &self.state(3, i, last, l.index_state))?;
        }
        // from here on an engine does not fail, or is broken for good
        memory.fail_nth(0);
        for (i, (main, index)) in before.into_iter().enumerate() {
            let (l, layer) = (layout.layers[i], &mut staged.layers[i]);
            for token in kept_from..self.count {
                let earlier = |what, now: &Vec<f32>, len| match token.checked_sub(1) {
                    Some(token) => self.state(what, i, start + token, len),
                    None => now.clone(),
                };
                layer.main_before.extend(earlier(2, &main, l.main_state));
                layer.index_before.extend(earlier(3, &index, l.index_state));
            }
            for position in start + self.count.saturating_sub(layout.window)..start + self.count {
                let slot = position % layout.window;
                let page = cache.ring_ids(i).nth(slot / 64).unwrap() as usize;
                memory.write((page * wide + slot % 64 * row) as u64, &self.row(i, position)).unwrap();
            }
        }
        assert!(staged.kept() == 0 || staged.keep_rows(&kept_rows[1..]).is_err());
        staged.keep_rows(&kept_rows).unwrap();
        cache.commit(staged);
        Ok(())
    }
}

fn read_state(memory: &FakeMemory, ids: impl Iterator<Item = u32>, size: usize, len: usize) -> Result<Vec<f32>> {
    let mut bytes = Vec::new();
    for id in ids {
        let mut page = vec![0; size];
        memory.read(u64::from(id) * size as u64, &mut page)?;
        bytes.extend(page);
    }
    Ok(bytes.chunks_exact(4).take(len).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect())
}

fn write_state(memory: &FakeMemory, ids: impl Iterator<Item = u32>, size: usize, values: &[f32]) -> Result<()> {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let ids: Vec<u32> = ids.collect();
    assert_eq!(ids.len(), bytes.len().div_ceil(size), "pages for a state of {} values", values.len());
    ids.iter().zip(bytes.chunks(size)).try_for_each(|(&id, part)| memory.write(u64::from(id) * size as u64, part))
}

/// Everything that is committed.
fn content(cache: &SequenceCache) -> Vec<u8> {
    let mut out = cache.len().to_le_bytes().to_vec();
    let layout = cache.layout().clone();
    let mut sink = |bytes: &[u8]| {
        out.extend_from_slice(bytes);
        Ok(())
    };
    for block in cache.full_blocks() {
        block.export(&layout, BLOCK_TOKENS, &mut sink).unwrap();
    }
    if let Some(tail) = cache.tail() {
        tail.export(&layout, cache.len() % BLOCK_TOKENS, &mut sink).unwrap();
    }
    cache.checkpoint().export(&layout, &mut sink).unwrap();
    out
}

/// One sequence in both places.
struct Twin {
    host: SequenceCache,
    device: SequenceCache,
    /// A device's copy of the table of entries of layer 1.
    table: (u64, Vec<u32>),
    /// Earlier states and the length of the table then.
    checkpoints: Vec<(Arc<State>, Arc<State>)>,
}

impl Twin {
    fn new(host: SequenceCache, device: SequenceCache) -> Self {
        Self { host, device, table: (0, Vec::new()), checkpoints: Vec::new() }
    }

    fn check(&mut self, what: &str) {
        assert!(content(&self.host) == content(&self.device), "{what}: the two differ at {} tokens", self.host.len());
        let (version, table) = &mut self.table;
        if *version != self.device.version() {
            (*version, *table) = (self.device.version(), Vec::new());
        }
        table.extend(self.device.entry_ids_from(1, table.len()));
        assert_eq!(*table, self.device.entry_ids(1).collect::<Vec<_>>(), "{what}: the table is not a continuation");
        assert_eq!(table.len(), self.device.table_len());
    }
}

/// A memory in which random programs run, and their twins on the host.
struct World {
    memory: Arc<FakeMemory>,
    host: Arc<CacheManager>,
    device: Arc<CacheManager>,
    random: Random,
    twins: Vec<Twin>,
}

const ROLLBACK: usize = 5;

impl World {
    fn new(seed: u64, slabs: u64) -> Self {
        let memory = Arc::new(FakeMemory::new(slabs * layout().slab_bytes() + seed % 100));
        let (host, device) = (manager(None), manager(Some(&memory)));
        Self { memory, host, device, random: Random(seed), twins: Vec::new() }
    }

    fn begin(&mut self) {
        if let Ok(device) = SequenceCache::new(&self.device, ROLLBACK) {
            self.twins.push(Twin::new(SequenceCache::new(&self.host, ROLLBACK).unwrap(), device));
        }
    }

    /// Does one thing on the device and, if that did not fail, on the host; says what.
    fn act(&mut self, at: usize) -> (&'static str, Result<()>) {
        let choice = self.random.below(13);
        let twin = &mut self.twins[at];
        let len = twin.host.len();
        match choice {
            0..=4 => {
                let count = 1 + if choice == 0 { self.random.below(300) } else { self.random.below(6) };
                let step = Step { salt: self.random.below(1 << 30), count };
                let done = step.in_memory(&mut twin.device, &self.memory);
                if done.is_ok() {
                    step.on_host(&mut twin.host).unwrap();
                }
                ("step", done)
            }
            5 => {
                let fork = Twin::new(twin.host.fork().unwrap(), twin.device.fork().unwrap());
                self.twins.push(fork);
                ("fork", Ok(()))
            }
            6 => {
                twin.checkpoints.push((twin.host.checkpoint(), twin.device.checkpoint()));
                ("checkpoint", Ok(()))
            }
            7 => {
                // a checkpoint beyond where the sequence is now is not one of its own any more
                twin.checkpoints.retain(|(state, _)| state.position() <= len);
                if let Some((host, device)) = twin.checkpoints.pop() {
                    twin.device.rewind(device);
                    twin.host.rewind(host);
                }
                ("rewind", Ok(()))
            }
            8 | 9 => {
                let to = len.saturating_sub(1 + self.random.below(ROLLBACK));
                assert_eq!(twin.host.can_roll_back(to), twin.device.can_roll_back(to));
                if !twin.host.can_roll_back(to) {
                    return ("no rollback", Ok(()));
                }
                let done = twin.device.roll_back(to);
                if done.is_ok() {
                    twin.host.roll_back(to).unwrap();
                    twin.checkpoints.retain(|(state, _)| state.position() <= to);
                }
                ("roll back", done)
            }
            10 => {
                let done = twin.device.clear();
                if done.is_ok() {
                    twin.host.clear().unwrap();
                    twin.checkpoints.clear();
                }
                ("clear", done)
            }
            11 => ("restore", self.restore(at)),
            _ => ("compact", self.device.compact().map(drop)),
        }
    }

    /// Writes a sequence out and reads it back in pages of its own, as files do.
    fn restore(&mut self, at: usize) -> Result<()> {
        let twin = &self.twins[at];
        let bytes = content(&twin.host);
        let mut left = &bytes[size_of::<usize>()..];
        let mut source = |out: &mut [u8]| {
            let (front, rest) = left.split_at(out.len());
            out.copy_from_slice(front);
            left = rest;
            Ok(())
        };
        let (len, mut blocks) = (twin.host.len(), Vec::new());
        for first in (0..len).step_by(BLOCK_TOKENS) {
            blocks.push(Arc::new(Block::import(&self.device, BLOCK_TOKENS.min(len - first), &mut source)?));
        }
        let state = Arc::new(State::import(&self.device, len, &mut source)?);
        assert!(left.is_empty());
        let device = SequenceCache::from_parts(&self.device, blocks, state, ROLLBACK);
        let state = self.twins[at].host.checkpoint();
        let twin = &mut self.twins[at];
        twin.device = device;
        twin.checkpoints.clear();
        // forgets what could be taken back, as the restored sequence does
        twin.host.rewind(state);
        Ok(())
    }
}

#[test]
fn sequences_in_a_page_memory_are_those_on_the_host_whatever_happens_and_fails() {
    let mut failures = [0; 2];
    for seed in 0..60 {
        let mut world = World::new(seed, 6 + seed % 12);
        for round in 0..120 {
            if world.twins.is_empty() {
                world.memory.fail_nth(0);
                world.begin();
            }
            let at = world.random.below(world.twins.len());
            if world.random.below(3) == 0 {
                let n = 1 + world.random.below(60) as u64;
                world.memory.fail_nth(n);
            }
            let (what, done) = world.act(at);
            world.memory.fail_nth(0);
            let what = format!("seed {seed}, round {round}, {what}");
            world.twins.iter_mut().for_each(|twin| twin.check(&what));
            match done.map_err(|error| error.kind()) {
                Ok(()) => {}
                Err(ErrorKind::Unavailable) => failures[0] += 1,
                Err(ErrorKind::NoBlocks) => {
                    failures[1] += 1;
                    world.twins.swap_remove(world.random.below(world.twins.len()));
                }
                Err(kind) => panic!("{what}: {kind:?}"),
            }
            if world.twins.len() > 4 {
                world.twins.swap_remove(0);
            }
        }
        let usage = world.device.stats().pool;
        assert!(usage.used_bytes <= usage.held_bytes && usage.held_bytes <= world.device.stats().limit_bytes);
        world.twins.clear();
        assert_eq!(world.device.stats().pool, PoolUsage::default(), "seed {seed}");
    }
    assert!(failures.iter().all(|&count| count > 20), "{failures:?} refused calls and full pools are too few to tell");
}

#[test]
fn a_copy_is_one_call_however_many_pages_it_has() {
    let memory = Arc::new(FakeMemory::new(20 * layout().slab_bytes()));
    let options = CacheOptions { limit: u64::MAX, ..CacheOptions::PRIVATE };
    let device = CacheManager::with_memory(layout(), options, b"", None, Some(Arc::clone(&memory) as _));
    let calls = |what: &str, most: u64, act: &mut dyn FnMut()| {
        let before = memory.calls();
        act();
        let calls = memory.calls() - before;
        assert!(calls <= most, "{what} took {calls} calls");
    };
    let mut cache = SequenceCache::new(&device, 0).unwrap();
    let (state, block) = (cache.checkpoint(), Block::new(&device).unwrap());
    calls("copying a state", 1, &mut || drop(state.copy(&device).unwrap()));
    calls("copying a block", 1, &mut || drop(block.copy(&device).unwrap()));
    // the pages of one layer of each kind, and one call for all others
    calls("an empty state", 2 + 3 + 6 + 1, &mut || drop(State::new(&device).unwrap()));
    calls("staging with a shared state", 1, &mut || drop(cache.stage(300).unwrap()));
    calls("staging", 0, &mut || drop(cache.stage(300).unwrap()));

    drop((state, block));
    let bytes = cache.bytes();
    assert_eq!(bytes.window + bytes.state + bytes.pages, device.stats().pool.used_bytes);
    assert_eq!(device.stats().pool.held_bytes % layout().slab_bytes(), 0);
}

#[test]
fn a_step_takes_the_bytes_that_its_sequence_said_it_needs() {
    for is_in_memory in [false, true] {
        let memory = Arc::new(FakeMemory::new(200 * layout().slab_bytes()));
        let options = CacheOptions { limit: 200 * layout().slab_bytes(), ..CacheOptions::PRIVATE };
        let pages = is_in_memory.then(|| Arc::clone(&memory) as _);
        let manager = CacheManager::with_memory(layout(), options, b"needs", None, pages);
        let used = || manager.limit_and_used().1;
        let step = |cache: &mut SequenceCache, count: usize, what: &str| {
            let (before, needed) = (used(), cache.needs(count));
            let staged = cache.stage(count).unwrap();
            assert_eq!(used() - before, needed, "{what}, pages in a memory: {is_in_memory}");
            cache.commit(staged);
            needed
        };
        let mut one = SequenceCache::new(&manager, 0).unwrap();
        step(&mut one, 300, "the first step");
        assert_eq!(step(&mut one, 200, "one within a block"), 0);
        let mut two = one.fork().unwrap();
        let (windows, states) = layout().fixed_page_bytes();
        let copied = manager.block_bytes() + windows + states;
        assert_eq!(step(&mut two, 1, "of a fork"), if is_in_memory { copied + states } else { copied });
        assert_eq!(step(&mut one, 1, "of what was forked"), 0);
        step(&mut one, 11, "up to a block's end");
        let mut three = one.fork().unwrap();
        step(&mut three, 600, "of a fork at a block's end");
        let kept = one.checkpoint();
        assert_eq!(step(&mut one, 1, "beside a checkpoint in use"), manager.block_bytes() + windows + states);
        drop(kept);

        // one that is only kept makes room
        let mark = Mark::new(&manager, Checkpoint::new(one.checkpoint()));
        assert_eq!(one.needs(1), 0);
        let mut rest = Vec::new();
        for bucket in Bucket::ALL {
            rest.extend(std::iter::from_fn(|| manager.pool().take(bucket).ok()));
        }
        let before = used();
        let staged = one.stage(1).unwrap();
        one.commit(staged);
        assert!(mark.checkpoint().is_none() && used() == before);
    }
}

#[test]
fn a_step_that_kept_nothing_cannot_be_taken_back_nor_can_those_before() {
    let memory = Arc::new(FakeMemory::new(20 * layout().slab_bytes()));
    let device = manager(Some(&memory));
    let mut cache = SequenceCache::new(&device, ROLLBACK).unwrap();
    Step { salt: 1, count: 10 }.in_memory(&mut cache, &memory).unwrap();
    assert!(cache.can_roll_back(5) && !cache.can_roll_back(4));
    let staged = cache.stage(2).unwrap();
    cache.commit(staged);
    assert!(!cache.can_roll_back(11));
    Step { salt: 2, count: 3 }.in_memory(&mut cache, &memory).unwrap();
    assert!(cache.can_roll_back(12) && !cache.can_roll_back(11));
}

#[test]
fn what_compaction_frees_can_be_had_by_pages_of_any_size() {
    let slabs = 12;
    let memory = Arc::new(FakeMemory::new(slabs * layout().slab_bytes()));
    let device = manager(Some(&memory));
    let take = |bucket, pages: usize| (0..pages).map(|_| device.take(bucket).unwrap()).collect::<Vec<_>>();
    let mut narrow = take(Bucket::Narrow, slabs as usize * 544);
    for (i, page) in narrow.iter_mut().enumerate() {
        page.write(0..16, |bytes| {
            bytes.copy_from_slice(&(i as u128).to_le_bytes());
            Ok(())
        })
        .unwrap();
    }
    let mut i = 0;
    narrow.retain(|_| {
        i += 1;
        i % 100 == 0
    });
    let error = device.take(Bucket::Wide).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoBlocks);
    assert!(error.message().contains("free between pages of other sizes"), "{error}");

    memory.fail_nth(1);
    assert_eq!(device.compact().unwrap_err().kind(), ErrorKind::Unavailable);
    assert!(device.take(Bucket::Wide).is_err());
    let freed = device.compact().unwrap();
    assert_eq!(freed, (slabs - 1) * layout().slab_bytes());
    assert_eq!(device.compact().unwrap(), 0, "nothing is left to move");
    for (i, page) in narrow.iter().enumerate() {
        page.read(0..16, |bytes| {
            assert_eq!(bytes, (i as u128 * 100 + 99).to_le_bytes());
            Ok(())
        })
        .unwrap();
    }
    drop(take(Bucket::Wide, (slabs as usize - 1) * 17));
    drop(narrow);
    assert_eq!(device.stats().pool, PoolUsage::default());
}

/// Pitfall 68. Weights are never evicted here; pages are what is moved and given to others while in use.
#[test]
fn pages_keep_their_content_while_others_compact() {
    let memory = Arc::new(FakeMemory::new(60 * layout().slab_bytes()).late(Duration::from_micros(50)));
    let device = manager(Some(&memory));
    let (done, compacted) = (AtomicBool::new(false), AtomicU64::new(0));
    let work = |seed: u64| {
        let (mut held, mut random) = (Vec::new(), Random(seed));
        for round in 0..400 {
            let tag = random.below(256) as u8;
            let block = Block::import(&device, BLOCK_TOKENS, &mut |out| {
                out.fill(tag);
                Ok(())
            })
            .unwrap();
            held.push((tag, block.copy(&device).unwrap()));
            if held.len() > 60 {
                held.retain(|_| random.below(4) == 0);
            }
            for (tag, block) in &held {
                let same = |bytes: &[u8]| {
                    assert!(bytes.iter().all(|byte| byte == tag), "seed {seed}, round {round}");
                    Ok(())
                };
                block.export(device.layout(), 16, &mut { same }).unwrap();
            }
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..2).map(|seed| scope.spawn(move || work(seed))).collect();
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                compacted.fetch_add(device.compact().unwrap(), Ordering::Relaxed);
            }
        });
        let results: Vec<_> = workers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        done.store(true, Ordering::Relaxed);
        results.into_iter().for_each(|result| result.unwrap());
    });
    assert!(compacted.load(Ordering::Relaxed) > 0, "nothing was ever moved");
    assert_eq!(device.stats().pool, PoolUsage::default());
}

#[test]
fn prefixes_in_a_page_memory_are_found_evicted_to_the_tiers_and_brought_back() {
    let folder = tempfile::tempdir().unwrap();
    let tier = TierOptions { directory: Some(folder.path().to_owned()), ..TierOptions::default() };
    let identity = Identity { fingerprint: 1, numerics: "reference".to_owned(), vocab: 1024, layout: layout() };
    let options =
        CacheOptions { limit: u64::MAX, checkpoint_limit: u64::MAX, policy: CheckpointPolicy::Boundary, poison: true };
    let memory = Arc::new(FakeMemory::new(12 * layout().slab_bytes()));
    let tiers = Some(Tiers::new(tier, identity).unwrap());
    let device = CacheManager::with_memory(layout(), options, b"", tiers, Some(Arc::clone(&memory) as _));
    let tokens = |path: u32| (0..BLOCK_TOKENS as u32).map(|i| path << 8 | i).collect::<Vec<_>>();
    let step = |path: u32, count| Step { salt: path as usize, count };

    let host = manager(None);
    let mut want = Vec::new();
    for path in 0..30 {
        let mut plain = SequenceCache::new(&host, 0).unwrap();
        step(path, BLOCK_TOKENS).on_host(&mut plain).unwrap();
        want.push(content(&plain));
        let mut cache = SequenceCache::new(&device, 0).unwrap();
        step(path, BLOCK_TOKENS).in_memory(&mut cache, &memory).unwrap();
        device.publish(device.root(), &tokens(path), &cache.full_blocks()[0]).unwrap();
        device.keep_checkpoint(device.root().extend(&tokens(path)), Checkpoint::new(cache.checkpoint()));
    }
    assert!(device.stats().evicted_blocks > 10, "{:?}", device.stats());
    device.flush();
    for path in (0..30).rev() {
        let prompt = [tokens(path), vec![1]].concat();
        let mut hit = device.lookup(device.root(), &prompt).unwrap();
        let state = hit.checkpoint.take().unwrap_or_else(|| panic!("path {path} was lost")).state;
        let mut cache = SequenceCache::new(&device, 0).unwrap();
        cache.extend(&hit.blocks, state).unwrap();
        assert!(content(&cache) == want[path as usize], "path {path}");
    }
}
