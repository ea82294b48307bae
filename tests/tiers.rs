//! Host and disk tiers: what comes back from them gives the logits of a cold session, bit for bit, and whatever happens to
//! the folder costs time only.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a failed call is a failed test")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use common::golden;
use common::subject;
use dsv4::cache::CacheLayout;
use dsv4::cache::tier::{Prefetch, TierOptions, TierStats};
use dsv4::{CheckpointPolicy, Engine, EngineOptions, KvFormat, Model, Numerics};

/// Set in processes that a test starts: the folder of the disk tier.
const CHILD: &str = "DSV4_TEST_TIER";
/// Tokens of the prompts: two blocks and a rest.
const LEN: usize = 600;
/// Tokens that a second prompt need not compute.
const REUSED: u64 = 512;
/// Files of a prompt: two blocks and a checkpoint.
const FILES: u64 = 3;

fn nano() -> PathBuf {
    golden::small()
}

fn prompt(seed: usize) -> Vec<u32> {
    (0..LEN).map(|i| ((i * 7 + seed * 13 + i * i % 11) % 90) as u32).collect()
}

fn options() -> EngineOptions {
    subject::on_device(EngineOptions { threads: 1, poison_cache: true, ..EngineOptions::default() })
}

/// An engine whose pages hold little more than one prompt, so that the next one drives it out.
fn engine(tiers: TierOptions) -> Arc<Engine> {
    engine_with(EngineOptions { tiers, ..options() })
}

fn engine_with(options: EngineOptions) -> Arc<Engine> {
    let model = Model::open(nano()).unwrap();
    let (window, state) = CacheLayout::new(model.config(), KvFormat::Fp8).fixed_page_bytes();
    let fixed = window + state;
    // a device's pages come in slabs, each for one size: as many for each size as one prompt needs
    let slabs = subject::device().map_or(0, |_| 7 * CacheLayout::new(model.config(), KvFormat::Fp8).slab_bytes());
    let cache_bytes = slabs.max(5 * fixed);
    Engine::new(&model, EngineOptions { cache_bytes, checkpoint_bytes: 2 * fixed, ..options }).unwrap()
}

fn disk(folder: &Path) -> TierOptions {
    TierOptions { directory: Some(folder.to_owned()), timeout: Duration::from_secs(60), ..TierOptions::default() }
}

/// Logits behind a prompt, and how many of its tokens were reused.
fn ask(engine: &Arc<Engine>, seed: usize) -> (Vec<u32>, u64) {
    let mut session = subject::session(engine, LEN);
    session.feed(&prompt(seed)).unwrap();
    (session.logits().unwrap().iter().map(|v| v.to_bits()).collect(), session.reused_tokens())
}

/// As computed by an engine that reuses nothing.
fn cold(seed: usize) -> Vec<u32> {
    ask(&subject::engine_with(&nano(), EngineOptions { checkpoints: CheckpointPolicy::None, ..options() }), seed).0
}

fn stats(engine: &Engine) -> TierStats {
    engine.cache_stats().tiers
}

fn files(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

fn bytes(folder: &Path) -> u64 {
    files(folder).iter().map(|file| fs::metadata(file).unwrap().len()).sum()
}

/// A folder with the blocks of prompt 1.
fn filled() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine(disk(folder.path()));
    ask(&engine, 1);
    engine.flush_cache();
    assert_eq!(files(folder.path()).len() as u64, FILES, "{:?}", stats(&engine));
    folder
}

#[test]
fn what_was_driven_out_comes_back_from_host_memory() {
    let engine = engine(TierOptions { host_bytes: 1 << 30, ..TierOptions::default() });
    ask(&engine, 1);
    ask(&engine, 2);
    ask(&engine, 3);
    assert!(stats(&engine).host_records > 0 && stats(&engine).offload_bytes > 0);
    let before = engine.cache_stats().hit_tokens;
    assert_eq!(ask(&engine, 1), (cold(1), REUSED));
    assert_eq!(engine.cache_stats().hit_tokens - before, REUSED, "{:?}", engine.cache_stats());
    let stats = stats(&engine);
    // a device's slabs are coarse and may have kept a part of it
    let least = if subject::device().is_some() { 1 } else { 2 };
    assert!(stats.host_hits >= least && stats.disk_hits == 0 && stats.wait_nanos > 0, "{stats:?}");
}

#[test]
fn without_room_in_host_memory_what_was_driven_out_comes_back_from_disk() {
    for prefetch in [Prefetch::Off, Prefetch::Next, Prefetch::Aggressive] {
        let folder = tempfile::tempdir().unwrap();
        let engine = engine(TierOptions { prefetch, ..disk(folder.path()) });
        ask(&engine, 1);
        engine.flush_cache();
        assert_eq!(ask(&engine, 1), (cold(1), REUSED), "{prefetch:?}");
        let stats = stats(&engine);
        assert_eq!((stats.disk_hits, stats.host_hits, stats.timeouts), (FILES, 0, 0), "{stats:?}");
        assert!(stats.written_bytes > 0 && stats.read_bytes > 0 && stats.read_nanos > 0, "{stats:?}");
        assert!(prefetch != Prefetch::Off || stats.prefetched == 0, "{stats:?}");
        assert_eq!(stats.host_records, 0, "nothing stays where there is no room: {stats:?}");
    }
}

#[test]
fn a_prompt_that_is_entirely_on_disk_comes_back_with_its_logits() {
    let folder = tempfile::tempdir().unwrap();
    let whole = |engine: &Arc<Engine>| {
        let mut session = subject::session(engine, LEN);
        session.feed(&prompt(1)[..REUSED as usize]).unwrap();
        (session.logits().unwrap().to_vec(), session.reused_tokens())
    };
    let engine = engine(disk(folder.path()));
    let (logits, computed) = whole(&engine);
    assert_eq!(computed, 0);
    engine.flush_cache();
    assert_eq!(whole(&self::engine(disk(folder.path()))), (logits, REUSED));
}

#[test]
fn a_new_engine_and_a_new_process_find_what_is_on_disk() {
    let folder = filled();
    assert_eq!(ask(&engine(disk(folder.path())), 1), (cold(1), REUSED));
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "what_another_process_does", "--nocapture"])
        .env(CHILD, folder.path())
        .output()
        .unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stderr));
}

/// Finds the prompt on disk, when the test above starts it.
#[test]
fn what_another_process_does() {
    let Some(folder) = std::env::var_os(CHILD) else { return };
    let engine = engine(disk(Path::new(&folder)));
    assert_eq!(ask(&engine, 1).1, REUSED);
    assert_eq!(stats(&engine).disk_hits, FILES);
}

#[test]
fn another_salt_numerics_or_prompt_finds_nothing() {
    let folder = filled();
    let with = |options: EngineOptions| engine_with(EngineOptions { tiers: disk(folder.path()), ..options });
    for engine in [
        with(EngineOptions { prefix_salt: "other".to_owned(), ..options() }),
        with(EngineOptions { numerics: Numerics::Served, ..options() }),
    ] {
        assert_eq!(ask(&engine, 1).1, 0);
        assert_eq!(stats(&engine).damaged_files, 0, "it does not even look at foreign files");
    }
    assert_eq!(ask(&with(options()), 2), (cold(2), 0));
    assert_eq!(ask(&with(options()), 1).1, REUSED, "and they are left alone");
}

#[test]
fn a_block_under_a_foreign_name_is_dropped() {
    let folder = filled();
    let other = tempfile::tempdir().unwrap();
    let served = EngineOptions { numerics: Numerics::Served, tiers: disk(other.path()), ..options() };
    let served = engine_with(served);
    ask(&served, 1);
    served.flush_cache();
    // blocks of another mode, renamed to what this engine looks for; and blocks that changed places
    let names: Vec<PathBuf> = files(folder.path()).into_iter().filter(|f| f.extension().unwrap() == "block").collect();
    let foreign: Vec<PathBuf> = files(other.path()).into_iter().filter(|f| f.extension().unwrap() == "block").collect();
    let own = fs::read(&names[0]).unwrap();
    fs::copy(&foreign[0], &names[0]).unwrap();
    fs::write(&names[1], own).unwrap();
    let engine = engine(disk(folder.path()));
    assert_eq!(ask(&engine, 1), (cold(1), 0));
    assert!(stats(&engine).damaged_files >= 1, "{:?}", stats(&engine));
}

#[test]
fn damaged_files_are_deleted_and_computed_again() {
    type Damage = fn(&mut Vec<u8>);
    let damages: [(&str, Damage); 4] = [
        ("a flipped bit", |file| {
            let at = file.len() / 2;
            file[at] ^= 4;
        }),
        ("truncated", |file| file.truncate(9000)),
        ("empty", Vec::clear),
        ("zeros", |file| file.fill(0)),
    ];
    for (what, damage) in damages {
        let folder = filled();
        for file in files(folder.path()) {
            let mut content = fs::read(&file).unwrap();
            damage(&mut content);
            fs::write(&file, content).unwrap();
        }
        let engine = engine(disk(folder.path()));
        assert_eq!(ask(&engine, 1), (cold(1), 0), "{what}");
        let damaged = stats(&engine).damaged_files;
        assert!(damaged >= 1, "{what}: {:?}", stats(&engine));
        assert_eq!(files(folder.path()).len() as u64, FILES - damaged, "{what}");
        engine.flush_cache();
        assert!(ask(&engine, 1).0 == cold(1), "{what}");
    }
}

#[test]
fn a_folder_deleted_under_it_costs_time_only() {
    let folder = filled();
    let engine = engine(disk(folder.path()));
    fs::remove_dir_all(folder.path()).unwrap();
    assert_eq!(ask(&engine, 1), (cold(1), 0));
    engine.flush_cache();
    assert_eq!(files(folder.path()).len() as u64, FILES, "it is made again");
    assert_eq!(ask(&engine, 1), (cold(1), REUSED));
    // something in its place
    fs::remove_dir_all(folder.path()).unwrap();
    fs::write(folder.path(), b"a file").unwrap();
    engine.flush_cache();
    assert_eq!(ask(&engine, 2), (cold(2), 0));
    engine.flush_cache();
    assert!(stats(&engine).io_errors > 0, "{:?}", stats(&engine));
    assert_eq!(ask(&engine, 2).0, cold(2));
    let error = Engine::new(engine.model(), EngineOptions { tiers: disk(folder.path()), ..options() }).err().unwrap();
    assert!(error.message().contains(folder.path().to_str().unwrap()), "{error}");
    fs::remove_file(folder.path()).unwrap();
}

#[test]
fn a_prompt_computes_instead_of_waiting_beyond_the_timeout() {
    let folder = filled();
    let engine = engine(TierOptions { timeout: Duration::ZERO, ..disk(folder.path()) });
    assert_eq!(ask(&engine, 1).0, cold(1));
    assert_eq!(stats(&engine).timeouts, 1, "{:?}", stats(&engine));
    assert_eq!(files(folder.path()).len() as u64, FILES);
}

/// Pitfalls 40 and 42.
#[test]
fn the_folder_stays_within_its_limit_and_a_new_file_is_not_deleted_for_itself() {
    let whole = bytes(filled().path());
    let largest = files(filled().path()).iter().map(|f| fs::metadata(f).unwrap().len()).max().unwrap();
    for (limit, fewest) in [(largest / 4, 0), (largest, 1), (2 * largest, 1), (whole, FILES - 1), (2 * whole, FILES)] {
        let folder = tempfile::tempdir().unwrap();
        let engine = engine(TierOptions { disk_bytes: limit, ..disk(folder.path()) });
        for seed in 1..5 {
            ask(&engine, seed);
            engine.flush_cache();
            assert!(bytes(folder.path()) <= limit, "{} of {limit} bytes", bytes(folder.path()));
            let n = files(folder.path()).len() as u64;
            assert!(n >= fewest, "limit {limit}: {n} files");
        }
        let stats = stats(&engine);
        assert!(stats.written_bytes <= 4 * whole, "each record is written once: {stats:?}");
        assert!(limit >= 2 * whole || stats.deleted_files + stats.dropped > 0, "{stats:?}");
        if limit == 2 * whole {
            assert_eq!(ask(&engine, 4), (cold(4), REUSED), "the last one is there");
        }
    }
}

#[test]
fn the_write_limits_hold() {
    let whole = bytes(filled().path());
    let folder = tempfile::tempdir().unwrap();
    let engine = engine(TierOptions { disk_write_total: whole / 2, ..disk(folder.path()) });
    ask(&engine, 1);
    engine.flush_cache();
    let total = stats(&engine);
    assert!(total.limited_writes > 0 && (files(folder.path()).len() as u64) < FILES, "{total:?}");

    let folder = tempfile::tempdir().unwrap();
    let engine = self::engine(TierOptions { disk_write_rate: 1, ..disk(folder.path()) });
    for seed in 1..4 {
        ask(&engine, seed);
        engine.flush_cache();
    }
    let rate = stats(&engine);
    assert!(rate.limited_writes > 0, "{rate:?}");
    assert_eq!(files(folder.path()).len(), 1, "one record may be saved up for: {rate:?}");
}

#[test]
fn a_full_disk_is_counted_and_leaves_no_partial_file() {
    // the child could not write the model
    nano();
    let folder = tempfile::tempdir().unwrap();
    let child = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 20; exec \"$0\" \"$@\""])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "what_the_process_without_room_does", "--nocapture"])
        .env(CHILD, folder.path())
        .output()
        .unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stderr));
    assert!(files(folder.path()).is_empty(), "{:?}", files(folder.path()));
}

/// Offloads where there is no room, when the test above starts it.
#[test]
fn what_the_process_without_room_does() {
    let Some(folder) = std::env::var_os(CHILD) else { return };
    let engine = engine(disk(Path::new(&folder)));
    let first = ask(&engine, 1);
    engine.flush_cache();
    assert!(stats(&engine).io_errors >= FILES, "{:?}", stats(&engine));
    assert_eq!(ask(&engine, 1), first);
}

#[test]
fn engines_that_share_a_folder_at_the_same_time_stay_right() {
    let folder = tempfile::tempdir().unwrap();
    let truth: Vec<Vec<u32>> = (0..4).map(cold).collect();
    let limit = 2 * bytes(filled().path());
    std::thread::scope(|scope| {
        for first in 0..3 {
            let (folder, truth) = (folder.path(), &truth);
            scope.spawn(move || {
                let engine = engine(TierOptions { disk_bytes: limit, host_bytes: 100_000, ..disk(folder) });
                for i in 0..10 {
                    let seed = (first + i) % truth.len();
                    assert!(ask(&engine, seed).0 == truth[seed]);
                    if i % 3 == first {
                        engine.flush_cache();
                    }
                }
                assert_eq!(stats(&engine).damaged_files, 0, "{:?}", stats(&engine));
            });
        }
    });
}

#[test]
fn what_a_killed_process_left_is_swept_when_an_engine_starts() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join(".0123.block.dsv4-1-0.tmp"), b"half").unwrap();
    fs::write(folder.path().join("mine.txt"), b"not ours").unwrap();
    let _engine = engine(disk(folder.path()));
    assert_eq!(files(folder.path()), [folder.path().join("mine.txt")]);
}
