//! Session files: what comes back is bit for bit what was saved, and whatever happens to a file or to a process that
//! writes it, a file is refused or gives a session that was saved.
#![forbid(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a failed call is a failed test; what is skipped is printed"
)]

mod common;

use std::fs;
use std::io::{BufRead, BufReader};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use common::golden::{self, Golden};
use common::subject;
use dsv4::{
    CallOptions, CheckpointPolicy, Engine, EngineOptions, ErrorKind, FileProgress, FileStage, KvFormat, Model,
    Numerics, SaveOptions, Session, SessionFile, SessionOptions,
};
use xxhash_rust::xxh3::xxh3_64;

/// Set in processes that a test starts: the file to save to.
const CHILD: &str = "DSV4_TEST_SAVE_TO";
const CONTEXT: usize = 1200;

fn nano() -> PathBuf {
    golden::small()
}

fn engine() -> Arc<Engine> {
    subject::engine_with(&nano(), options())
}

fn options() -> EngineOptions {
    subject::on_device(EngineOptions { threads: 1, poison_cache: true, ..EngineOptions::default() })
}

fn tokens(n: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * 7 + i * i % 11) % 90) as u32).collect()
}

fn fed(engine: &Arc<Engine>, n: usize) -> Session {
    let mut session = subject::session(engine, CONTEXT);
    session.feed(&tokens(n)).unwrap();
    session
}

fn restore(engine: &Arc<Engine>, path: &Path) -> dsv4::Result<Session> {
    Session::restore(engine, path, SessionOptions { context: CONTEXT, ..Default::default() })
}

fn bits(session: &Session) -> Vec<u32> {
    session.logits().unwrap().iter().map(|v| v.to_bits()).collect()
}

/// The names of the files beside `path`.
fn neighbours(path: &Path) -> Vec<String> {
    let entries = fs::read_dir(path.parent().unwrap()).unwrap();
    entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
}

/// Pitfalls 24 and 28.
#[test]
fn a_restored_session_goes_on_bit_for_bit_at_every_boundary() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.session");
    let writer = engine();
    for n in [1, 3, 4, 5, 127, 128, 129, 255, 256, 257, 511, 512, 513, 700] {
        let mut session = fed(&writer, n);
        let before = (session.tokens().to_vec(), bits(&session));
        session.save_with(&path, SaveOptions { complete: true }).unwrap();
        assert_eq!((session.tokens().to_vec(), bits(&session)), before, "saving changes nothing");
        let reader = engine();
        let mut restored = restore(&reader, &path).unwrap();
        assert_eq!((restored.tokens().to_vec(), bits(&restored)), before, "{n} tokens");
        assert_eq!(restored.reused_tokens(), n as u64, "nothing was computed");
        assert_eq!(reader.cache_stats().prefix_blocks, n as u64 / 256, "its blocks can be reused");

        // sessions of their own from here on: decoding, a prompt, a fork, and back
        let mut fork = restored.fork().unwrap();
        for (i, &t) in tokens(n + 300)[n..].iter().enumerate().take(6) {
            restored.feed(&[t]).unwrap();
            session.feed(&[t]).unwrap();
            assert_eq!(bits(&restored), bits(&session), "{n} tokens and {i} more");
        }
        restored.feed(&tokens(n + 300)[n + 6..]).unwrap();
        session.feed(&tokens(n + 300)[n + 6..]).unwrap();
        assert_eq!(bits(&restored), bits(&session), "{n} tokens and a prompt");
        fork.feed(&[5]).unwrap();
        restored.truncate(n).unwrap();
        assert_eq!(bits(&restored), before.1, "truncated to {n} tokens again");
        restored.feed(&[5]).unwrap();
        assert_eq!(bits(&restored), bits(&fork));
    }
}

#[test]
fn an_empty_session_and_one_without_logits_come_back_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.session");
    let engine = engine();
    subject::session(&engine, CONTEXT).save(&path).unwrap();
    let mut restored = restore(&engine, &path).unwrap();
    assert!(restored.tokens().is_empty() && restored.logits().is_none());
    restored.feed(&tokens(10)).unwrap();
    assert_eq!(bits(&restored), bits(&fed(&engine, 10)));

    let mut session = subject::session(&engine, CONTEXT);
    let ended = session.feed_with(&tokens(600), &mut |_| ControlFlow::Break(()));
    assert_eq!(ended.unwrap_err().kind(), ErrorKind::Cancelled);
    assert!(session.logits().is_none());
    session.save(&path).unwrap();
    let restored = restore(&engine, &path).unwrap();
    assert!(restored.logits().is_none());
    assert_eq!(restored.tokens(), session.tokens());
}

#[test]
fn blocks_that_the_engine_has_are_shared_and_not_taken_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.session");
    let engine = engine();
    let session = fed(&engine, 800);
    session.save(&path).unwrap();
    let before = engine.cache_stats();
    let restored = restore(&engine, &path).unwrap();
    let after = engine.cache_stats();
    assert_eq!(after.prefix_blocks, before.prefix_blocks);
    let fixed = restored.cache_bytes().window + restored.cache_bytes().state;
    let block = restored.cache_bytes().pages / 4;
    assert_eq!(after.pool.used_bytes - before.pool.used_bytes, fixed + block, "a state and the partial block");
}

#[test]
fn a_restored_session_gives_hits_from_its_next_checkpoint_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let all = tokens(600);
    let reused = |engine: &Arc<Engine>| {
        let mut session = subject::session(engine, 1000);
        session.feed(&all).unwrap();
        session.reused_tokens()
    };
    for (position, at_once) in [(300, 0), (512, 512)] {
        let first = engine();
        fed(&first, position).save(&path).unwrap();
        let second = engine();
        let mut session = restore(&second, &path).unwrap();
        assert_eq!(session.reused_tokens() as usize, position, "all that was saved is used");
        assert_eq!(reused(&second), at_once, "restored at {position}");
        let third = engine();
        session = restore(&third, &path).unwrap();
        // an answer, token by token
        for t in position..520 {
            session.feed(&all[t..=t]).unwrap();
        }
        assert_eq!(reused(&third), 512, "restored at {position}, continued");
    }
}

#[test]
fn saving_again_adds_what_is_new() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.session");
    let engine = engine();
    let mut session = fed(&engine, 600);
    let first = session.save(&path).unwrap();
    assert_eq!(first.written, fs::metadata(&path).unwrap().len());
    assert_eq!(session.save(&path).unwrap().written, 0, "the file has it already");
    assert_eq!(session.fork().unwrap().save(&path).unwrap().written, 0);

    session.feed(&tokens(900)[600..]).unwrap();
    let second = session.save(&path).unwrap();
    assert!(second.written > 0 && second.written < first.written, "{second:?}");
    assert_eq!(second.file_bytes, fs::metadata(&path).unwrap().len());
    assert_eq!(SessionFile::verify(&path).unwrap().saves, 2);
    let restored = restore(&engine, &path).unwrap();
    assert_eq!(bits(&restored), bits(&session));

    // one that was restored, and one that leaves the file's path
    let mut other = restored.fork().unwrap();
    other.truncate(700).unwrap();
    other.feed(&[1, 2, 3]).unwrap();
    other.save(&path).unwrap();
    let again = restore(&engine, &path).unwrap();
    assert_eq!((again.tokens(), bits(&again)), (other.tokens(), bits(&other)));
}

#[test]
fn frequent_saves_leave_tokens_to_be_computed_and_write_at_most_twice_the_size() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.session");
    let engine = engine();
    let mut session = subject::session(&engine, CONTEXT);
    let (mut written, mut most_pending) = (0, 0);
    for (i, &t) in tokens(CONTEXT).iter().enumerate() {
        session.feed(&[t]).unwrap();
        if i % 9 != 0 {
            continue;
        }
        let saved = session.save(&path).unwrap();
        written += saved.written;
        most_pending = most_pending.max(saved.pending);
        assert_eq!(saved.file_bytes, fs::metadata(&path).unwrap().len());
        if i % 90 == 0 {
            let restored = restore(&self::engine(), &path).unwrap();
            assert_eq!((restored.tokens(), bits(&restored)), (session.tokens(), bits(&session)), "{saved:?}");
        }
    }
    assert!(most_pending > 0, "no save was put off");
    let fresh = session.save(folder.path().join("fresh.session")).unwrap();
    assert!(written <= 2 * fresh.written, "{written} bytes for a session of {}", fresh.written);
    let complete = session.save_with(&path, SaveOptions { complete: true }).unwrap();
    assert_eq!((complete.pending, SessionFile::verify(&path).unwrap().pending), (0, 0));
}

/// Restoring `path` fails, and the engine is as before.
fn refused(engine: &Arc<Engine>, path: &Path, kind: ErrorKind, what: &str) {
    let before = engine.cache_stats();
    let error = restore(engine, path).err().unwrap_or_else(|| panic!("{what} is accepted"));
    assert_eq!(error.kind(), kind, "{what}: {error}");
    assert!(error.message().contains(path.to_str().unwrap()), "{what}: the file is not named: {error}");
    assert_eq!(engine.cache_stats(), before, "{what}");
}

/// Pitfall 38.
#[test]
fn a_file_truncated_at_any_kib_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.session");
    let engine = engine();
    let mut session = fed(&engine, 530);
    session.save(&path).unwrap();
    session.feed(&tokens(540)[530..]).unwrap();
    session.save(&path).unwrap();
    let whole = fs::read(&path).unwrap();
    let ends = (0..whole.len()).step_by(1024).chain([1, 7, 8, 23, 24, whole.len() - 1]);
    for end in ends {
        fs::write(&path, &whole[..end]).unwrap();
        refused(&engine, &path, ErrorKind::Corrupt, &format!("{end} of {} bytes", whole.len()));
        assert_eq!(SessionFile::inspect(&path).unwrap_err().kind(), ErrorKind::Corrupt);
    }
    // and the session can be saved over the ruin
    session.save(&path).unwrap();
    assert_eq!(bits(&restore(&engine, &path).unwrap()), bits(&session));
}

/// Pitfall 39.
#[test]
fn a_flipped_bit_anywhere_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.session");
    let engine = engine();
    let session = fed(&engine, 530);
    session.save(&path).unwrap();
    let mut file = fs::read(&path).unwrap();
    let header = u32::from_le_bytes(file[16..20].try_into().unwrap()) as usize;
    let root = header + 4096;
    // beside the used part of the first root lie zeros that mean nothing
    let places = (0..header).step_by(53).chain(root..root + 64).chain((header + 8192..file.len()).step_by(211));
    for at in places {
        file[at] ^= 1 << (at % 8);
        fs::write(&path, &file).unwrap();
        let before = engine.cache_stats();
        let error = restore(&engine, &path).err().unwrap_or_else(|| panic!("byte {at} is damaged and accepted"));
        let kinds = [ErrorKind::Corrupt, ErrorKind::Unsupported, ErrorKind::Mismatch];
        assert!(kinds.contains(&error.kind()) && error.message().contains(path.to_str().unwrap()), "{at}: {error}");
        assert!(SessionFile::verify(&path).is_err(), "byte {at}");
        assert_eq!(engine.cache_stats(), before);
        file[at] ^= 1 << (at % 8);
    }
}

#[test]
fn when_the_last_root_is_damaged_the_save_before_it_counts() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.session");
    let engine = engine();
    let mut session = fed(&engine, 300);
    session.save(&path).unwrap();
    let first = bits(&session);
    session.feed(&tokens(700)[300..]).unwrap();
    session.save(&path).unwrap();
    let mut file = fs::read(&path).unwrap();
    let header = u32::from_le_bytes(file[16..20].try_into().unwrap()) as usize;
    file[header + 20] ^= 1;
    fs::write(&path, &file).unwrap();
    let restored = restore(&engine, &path).unwrap();
    assert_eq!((restored.position(), bits(&restored)), (300, first));
    let error = SessionFile::verify(&path).unwrap_err();
    assert!(error.message().contains("roots"), "{error}");
    // saving goes on from there
    session.save(&path).unwrap();
    SessionFile::verify(&path).unwrap();
    assert_eq!(bits(&restore(&engine, &path).unwrap()), bits(&session));
}

/// Pitfalls 39 and 49.
#[test]
fn another_model_numerics_format_order_or_version_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.session");
    fed(&engine(), 300).save(&path).unwrap();
    let with = |options: EngineOptions| subject::engine_with(&nano(), options);
    let names = |error: dsv4::Error, word: &str| assert!(error.message().contains(word), "{error}");
    for (other, word) in [
        (with(EngineOptions { numerics: Numerics::Served, ..options() }), "numerics reference"),
        (with(EngineOptions { kv_format: Some(KvFormat::Bf16), ..options() }), "fp8"),
        (subject::engine_with(&Golden::open(&golden::committed().join("nano-pro")).checkpoint(), options()), "model"),
    ] {
        refused(&other, &path, ErrorKind::Mismatch, word);
        names(restore(&other, &path).err().unwrap(), word);
    }
    let engine = engine();
    let whole = fs::read(&path).unwrap();
    let spoilt = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut file = whole.clone();
        change(&mut file);
        let length = u32::from_le_bytes(whole[16..20].try_into().unwrap()) as usize;
        let hash = xxh3_64(&file[..length - 8]);
        file[length - 8..length].copy_from_slice(&hash.to_le_bytes());
        fs::write(&path, file).unwrap();
    };
    spoilt(&|file| file[8..12].reverse());
    refused(&engine, &path, ErrorKind::Unsupported, "the other byte order");
    names(restore(&engine, &path).err().unwrap(), "byte order");
    spoilt(&|file| file[12..16].copy_from_slice(&[2, 0, 2, 0]));
    refused(&engine, &path, ErrorKind::Unsupported, "a newer version");
    names(SessionFile::inspect(&path).unwrap_err(), "version 2");
    spoilt(&|file| file[12..16].copy_from_slice(&[2, 0, 1, 0]));
    restore(&engine, &path).expect("a newer version that says that we can read it");
    spoilt(&|file| file[..8].copy_from_slice(b"GGUF\x03\0\0\0"));
    refused(&engine, &path, ErrorKind::Corrupt, "another kind of file");
    spoilt(&|file| file[24..32].copy_from_slice(b"block\0\0\0"));
    refused(&engine, &path, ErrorKind::Mismatch, "a block");
    fs::write(&path, &whole).unwrap();
    restore(&engine, &path).unwrap();
}

/// Makes every checksum of header, tables and root right again: what a hostile writer would do.
fn forge(file: &mut [u8]) {
    let number = |file: &[u8], at: usize| u64::from_le_bytes(file[at..at + 8].try_into().unwrap()) as usize;
    let put = |file: &mut [u8], at: usize, value: u64| file[at..at + 8].copy_from_slice(&value.to_le_bytes());
    let header = u32::from_le_bytes(file[16..20].try_into().unwrap()) as usize;
    if header < 24 || header + 8192 > file.len() {
        return;
    }
    let hash = xxh3_64(&file[..header - 8]);
    put(file, header - 8, hash);
    let root = header + 4096;
    let (table, bytes) = (number(file, root + 16), number(file, root + 24));
    if let Some(entry) = file.get(table..table.saturating_add(bytes)).filter(|entry| entry.len() >= 32) {
        let (offset, len) = (number(entry, 8), number(entry, 16));
        if let Some(inner) = file.get(offset..offset.saturating_add(len)) {
            let hash = xxh3_64(inner);
            put(file, table + 24, hash);
        }
        let hash = xxh3_64(&file[table..table + bytes]);
        put(file, root + 32, hash);
    }
    let hash = xxh3_64(&file[root..root + 56]);
    put(file, root + 56, hash);
}

#[test]
fn wrong_numbers_under_right_checksums_are_refused_or_mean_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.session");
    let engine = engine();
    let session = fed(&engine, 530);
    session.save(&path).unwrap();
    let whole = fs::read(&path).unwrap();
    let want = bits(&session);
    let header = u32::from_le_bytes(whole[16..20].try_into().unwrap()) as usize;
    // the header's fields, the root's, and both tables at the end of the file
    let places: Vec<usize> =
        (8..200).chain(header + 4096..header + 4152).chain(whole.len() - 400..whole.len()).collect();
    let values = [0, 1, 2, 7, 255, 4096, 1 << 20, 1 << 31, u64::from(u32::MAX), 1 << 40, 1 << 63, u64::MAX];
    let mut random = 1u64;
    let mut refused = 0;
    for i in 0..2000 {
        let mut next = |below: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as usize % below
        };
        let mut file = whole.clone();
        let (at, value, width) = (places[next(places.len())], values[next(values.len())], 1 << next(4));
        let end = (at + width).min(file.len());
        file[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
        forge(&mut file);
        fs::write(&path, &file).unwrap();
        match restore(&engine, &path) {
            Ok(restored) => {
                assert_eq!(restored.tokens(), session.tokens(), "{i}: {at} {value}");
                // logits that are marked as something unknown that may be left out are left out
                assert!(restored.logits().is_none() || bits(&restored) == want, "{i}: {at} {value}");
            }
            Err(e) => {
                refused += 1;
                assert!(!matches!(e.kind(), ErrorKind::OutOfMemory | ErrorKind::NoBlocks), "{i}: {at} {value}: {e}");
            }
        }
        drop(SessionFile::verify(&path));
    }
    assert!(refused > 1000, "only {refused} were refused");
}

/// Pitfall 40.
#[test]
fn a_model_whose_weights_changed_is_another_model() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.session");
    let copy = folder.path().join("model");
    fs::create_dir(&copy).unwrap();
    for entry in fs::read_dir(nano()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
    }
    fed(&subject::engine_with(&copy, options()), 20).save(&path).unwrap();
    let shard = fs::read_dir(&copy).unwrap().map(|e| e.unwrap().path());
    let shard = shard.into_iter().find(|p| p.extension().is_some_and(|e| e == "safetensors")).unwrap();
    let mut bytes = fs::read(&shard).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&shard, bytes).unwrap();
    refused(&subject::engine_with(&copy, options()), &path, ErrorKind::Mismatch, "a changed weight");
}

#[test]
fn a_session_longer_than_the_context_and_a_full_cache_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.session");
    let writer = engine();
    let session = fed(&writer, 700);
    session.save(&path).unwrap();
    let error = Session::restore(&writer, &path, SessionOptions { context: 699, ..Default::default() }).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::ContextFull);
    assert!(error.message().contains("holds 700 tokens; the context is 699"), "{error}");
    let bytes = session.cache_bytes();
    let small = EngineOptions { cache_bytes: bytes.window + bytes.state + bytes.pages / 2, ..options() };
    let small = subject::engine_with(&nano(), small);
    refused_for_room(&small, &path);
}

fn refused_for_room(engine: &Arc<Engine>, path: &Path) {
    assert_eq!(restore(engine, path).err().unwrap().kind(), ErrorKind::NoBlocks);
    assert_eq!(engine.cache_stats().pool.used_bytes, 0, "what was taken is given back");
    fed(engine, 100);
}

#[test]
fn places_that_cannot_be_saved_to_are_named_and_nothing_is_left_there() {
    let folder = tempfile::tempdir().unwrap();
    let session = fed(&engine(), 20);
    let fails = |path: &Path, kinds: &[ErrorKind]| {
        let error = session.save(path).unwrap_err();
        assert!(kinds.contains(&error.kind()), "{}: {error:?}", path.display());
        assert!(error.message().contains(path.to_str().unwrap()), "{error}");
    };
    fails(folder.path(), &[ErrorKind::InvalidArgument]);
    fails(&folder.path().join("none/a.session"), &[ErrorKind::NotFound]);
    fails(Path::new("/dev/full"), &[ErrorKind::InvalidArgument]);
    // a folder that even root cannot write to
    fails(Path::new("/sys/kernel/a.session"), &[ErrorKind::Io, ErrorKind::NotFound]);
    let read_only = folder.path().join("read-only");
    fs::create_dir(&read_only).unwrap();
    let mut permissions = fs::metadata(&read_only).unwrap().permissions();
    permissions.set_readonly(true);
    fs::set_permissions(&read_only, permissions).unwrap();
    if fs::write(read_only.join("probe"), b"").is_err() {
        fails(&read_only.join("a.session"), &[ErrorKind::Io]);
    } else {
        println!("skipped: this user may write to read-only folders");
        fs::remove_file(read_only.join("probe")).unwrap();
    }
    assert_eq!(neighbours(&folder.path().join("x")), ["read-only"]);
    assert_eq!(restore(session.engine(), &folder.path().join("x")).err().unwrap().kind(), ErrorKind::NotFound);
}

#[cfg(unix)]
#[test]
fn a_named_pipe_is_refused_without_waiting_for_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    let engine = engine();
    refused(&engine, &path, ErrorKind::InvalidArgument, "a pipe");
    let error = SessionFile::inspect(&path).unwrap_err();
    assert!(error.message().contains("not a regular file"), "{error}");
    assert_eq!(fed(&engine, 3).save(&path).unwrap_err().kind(), ErrorKind::InvalidArgument);
}

#[test]
fn what_is_not_ours_or_too_new_is_not_replaced_and_what_is_damaged_or_empty_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.session");
    let engine = engine();
    let session = fed(&engine, 300);
    session.save(&path).unwrap();
    let ours = fs::read(&path).unwrap();
    let mut newer = ours.clone();
    newer[12..16].copy_from_slice(&[2, 0, 2, 0]);
    let foreign = format!("{}: is not a session file of dsv4 and will not be replaced", path.display());
    for (bytes, kind, words) in [
        (&b"x"[..], ErrorKind::InvalidArgument, &*foreign),
        (b"DSV4FIL", ErrorKind::InvalidArgument, &foreign),
        (&[7; 100_000], ErrorKind::InvalidArgument, &foreign),
        (&newer, ErrorKind::Unsupported, "needs a reader of version 2"),
    ] {
        fs::write(&path, bytes).unwrap();
        for complete in [false, true] {
            let error = session.save_with(&path, SaveOptions { complete }).unwrap_err();
            assert!(error.kind() == kind && error.message().contains(words), "{error:?}");
        }
        assert_eq!(fs::read(&path).unwrap(), bytes);
        assert_eq!(neighbours(&path), ["a.session"]);
    }
    for bytes in [&b""[..], b"DSV4FILE", &ours[..ours.len() / 2]] {
        fs::write(&path, bytes).unwrap();
        session.save(&path).unwrap();
        assert_eq!(bits(&restore(&engine, &path).unwrap()), bits(&session));
    }
}

#[test]
fn a_copy_of_a_model_has_its_sessions_if_it_has_its_times() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.session");
    let copy = folder.path().join("model");
    fs::create_dir(&copy).unwrap();
    let session = fed(&engine(), 20);
    session.save(&path).unwrap();
    for entry in fs::read_dir(nano()).unwrap() {
        let entry = entry.unwrap();
        let to = copy.join(entry.file_name());
        fs::copy(entry.path(), &to).unwrap();
        let later = entry.metadata().unwrap().modified().unwrap() + Duration::from_secs(1);
        fs::OpenOptions::new().append(true).open(to).unwrap().set_modified(later).unwrap();
    }
    let error = restore(&subject::engine_with(&copy, options()), &path).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Mismatch);
    assert!(error.message().contains("modification times") && error.message().contains("cp -a"), "{error}");
    for entry in fs::read_dir(nano()).unwrap() {
        let entry = entry.unwrap();
        let to = fs::OpenOptions::new().append(true).open(copy.join(entry.file_name())).unwrap();
        to.set_modified(entry.metadata().unwrap().modified().unwrap()).unwrap();
    }
    assert_eq!(bits(&restore(&subject::engine_with(&copy, options()), &path).unwrap()), bits(&session));
}

#[test]
fn a_link_stays_a_link_and_its_target_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let (target, link) = (folder.path().join("target.session"), folder.path().join("link.session"));
    let engine = engine();
    fed(&engine, 300).save(&target).unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    fed(&engine, 30).save(&link).unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(restore(&engine, &target).unwrap().position(), 30);
}

#[cfg(unix)]
#[test]
fn a_file_that_is_replaced_keeps_its_permissions() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("private.session");
    let session = fed(&engine(), 3);
    for mode in [0o600, 0o640, 0o664] {
        // an empty file is replaced
        fs::write(&path, b"").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        session.save(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, mode);
    }
}

/// Pitfall 26.
#[test]
fn sessions_that_are_saved_dropped_and_restored_each_turn_stay_as_those_that_are_not() {
    let folder = tempfile::tempdir().unwrap();
    let greedy = |session: &Session| {
        let logits = session.logits().unwrap();
        (0..logits.len()).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap() as u32
    };
    let (engine, other) = (engine(), engine());
    let lengths = [1, 3, 100, 126, 250, 255];
    let mut kept: Vec<Session> = lengths.iter().map(|&n| fed(&engine, n)).collect();
    let path = |i: usize| folder.path().join(format!("{i}.session"));
    for (i, session) in kept.iter().enumerate() {
        session.save(path(i)).unwrap();
    }
    for turn in 0..24 {
        for (i, session) in kept.iter_mut().enumerate() {
            let mut away = restore(&other, &path(i)).unwrap();
            assert_eq!(bits(&away), bits(session), "session {i}, turn {turn}");
            for _ in 0..=turn % 3 {
                let token = greedy(&away);
                away.feed(&[token]).unwrap();
                session.feed(&[token]).unwrap();
            }
            assert_eq!(bits(&away), bits(session), "session {i}, turn {turn}");
            away.save(path(i)).unwrap();
        }
    }
}

/// A process that runs only `test` of this file, which sees `path` in the environment.
fn child(test: &str, path: &Path, limit: Option<u64>) -> Command {
    // writes beyond the limit fail instead of killing the process
    let limit = limit.map(|blocks| format!("trap '' XFSZ; ulimit -f {blocks}; ")).unwrap_or_default();
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("{limit}exec \"$0\" \"$@\"")).arg(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(CHILD, path).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// Pitfall 38.
#[test]
fn a_process_killed_while_saving_leaves_one_of_its_saves() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.session");
    let truth = subject::engine_with(&nano(), EngineOptions { checkpoints: CheckpointPolicy::None, ..options() });
    let rows = subject::all_logits(&truth, &tokens(CONTEXT));
    let (engine, mut seen, mut positions) = (engine(), 0, std::collections::BTreeSet::new());
    let mut random = 1u64;
    for round in 0..40 {
        let mut process = child("what_the_killed_process_does", &path, None).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        assert!(lines.map_while(Result::ok).any(|line| line.ends_with("ready")), "the process does not start");
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        std::thread::sleep(Duration::from_micros((random >> 33) % 100_000));
        process.kill().unwrap();
        process.wait().unwrap();
        let left = neighbours(&path);
        assert!(left.len() <= 2, "round {round}: {left:?}");
        if !path.exists() {
            continue;
        }
        SessionFile::verify(&path).unwrap();
        let restored = restore(&engine, &path).unwrap();
        let n = restored.position();
        assert_eq!(restored.tokens(), &tokens(CONTEXT)[..n]);
        let want: Vec<u32> = rows[n - 1].iter().map(|v| v.to_bits()).collect();
        assert_eq!(bits(&restored), want, "round {round}: {n} tokens");
        seen += 1;
        positions.insert(n);
    }
    assert!(seen > 20 && positions.len() > 3, "{seen} files seen, {positions:?}");
    fed(&engine, 40).save(&path).unwrap();
    let old = folder.path().join("b.session");
    fed(&engine, 40).save(&old).unwrap();
    assert_eq!(neighbours(&path).len(), 2, "what killed processes left is gone: {:?}", neighbours(&path));
}

/// Feeds and saves without end, when the test above starts it.
#[test]
fn what_the_killed_process_does() {
    let Some(path) = std::env::var_os(CHILD) else { return };
    let engine = engine();
    let seed = std::process::id() as usize;
    let mut session = match restore(&engine, Path::new(&path)) {
        Ok(session) => session,
        Err(_) => subject::session(&engine, CONTEXT),
    };
    println!("\nready");
    for i in seed.. {
        let (at, n) = (session.position(), 1 + i * 37 % 60);
        if at + n > CONTEXT {
            session.clear().unwrap();
            continue;
        }
        session.feed(&tokens(CONTEXT)[at..at + n]).unwrap();
        session.save_with(&path, SaveOptions { complete: i % 5 == 0 }).unwrap();
    }
}

#[test]
fn a_full_disk_is_an_error_that_leaves_the_old_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.session");
    let engine = engine();
    let session = fed(&engine, 100);
    session.save(&path).unwrap();
    let before = fs::read(&path).unwrap();
    // from within the header to within the last section, for a new file and for an addition
    for kib in [0, 1, 9, 13, 20, 40, 80, 100] {
        let output = child("what_the_process_without_room_does", &path, Some(2 * kib)).output().unwrap();
        assert!(output.status.success(), "{kib} KiB: {}", String::from_utf8_lossy(&output.stderr));
        assert!(fs::read(&path).unwrap() == before, "{kib} KiB: the old file changed");
        assert_eq!(neighbours(&path), ["a.session"], "{kib} KiB");
    }
}

/// Saves where there is no room, when the test above starts it.
#[test]
fn what_the_process_without_room_does() {
    let Some(path) = std::env::var_os(CHILD) else { return };
    let path = PathBuf::from(path);
    let engine = engine();
    let mut session = fed(&engine, 1000);
    let logits = bits(&session);
    for path in [&path, &path.with_file_name("new.session")] {
        let error = session.save(path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io);
        assert!(error.message().contains(path.to_str().unwrap()) && error.message().contains("large"), "{error}");
    }
    assert_eq!(bits(&session), logits);
    session.feed(&[1]).unwrap();
}

#[test]
fn two_saves_to_one_file_do_not_meet() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.session");
    let model = Model::open(nano()).unwrap();
    let engine = Engine::new(&model, options()).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut session = fed(&engine, 250);
                for t in tokens(290).split_off(250) {
                    session.feed(&[t]).unwrap();
                    match session.save(&path) {
                        Ok(_) => {}
                        Err(e) if e.kind() == ErrorKind::Busy => {}
                        Err(e) => panic!("{e}"),
                    }
                }
            });
        }
    });
    SessionFile::verify(&path).unwrap();
    let restored = restore(&engine, &path).unwrap();
    assert_eq!(bits(&restored), bits(&fed(&engine, restored.position())));
    assert_eq!(neighbours(&path), ["a.session"]);
}

/// Every report of a save or a restore, which is cancelled at number `stop`.
fn watch<T>(
    stop: usize,
    call: impl FnOnce(&mut dyn FnMut(FileProgress) -> ControlFlow<()>) -> dsv4::Result<T>,
) -> (Vec<FileProgress>, dsv4::Result<T>) {
    let mut reports = Vec::new();
    let result = call(&mut |now| {
        reports.push(now);
        if reports.len() > stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    (reports, result)
}

/// Each stage begins at nothing, never goes back and ends with all of it.
fn check_stages(reports: &[FileProgress], stages: &[FileStage]) {
    let mut seen: Vec<FileStage> = reports.iter().map(|now| now.stage).collect();
    seen.dedup();
    assert_eq!(seen, stages);
    for stage in stages {
        let of_stage: Vec<_> = reports.iter().filter(|now| now.stage == *stage).collect();
        let (first, last) = (of_stage[0], of_stage[of_stage.len() - 1]);
        assert!(of_stage.windows(2).all(|two| two[0].done <= two[1].done && two[0].total == two[1].total));
        assert!(first.done == 0 || *stage == FileStage::Compute, "{first:?}");
        assert_eq!(last.done, last.total, "{stage:?}");
    }
}

#[test]
fn a_save_that_is_cancelled_anywhere_leaves_the_old_file_and_nothing_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    let engine = engine();
    let mut session = fed(&engine, 600);
    let mut old: Option<Vec<u8>> = None;
    // a new file, and then an addition
    for _ in 0..2 {
        let mut stop = 0;
        let reports = loop {
            let save = |progress: &mut dyn FnMut(FileProgress) -> ControlFlow<()>| {
                session.save_with_progress(&path, SaveOptions { complete: true }, progress)
            };
            let (reports, result) = watch(stop, save);
            let Err(error) = result else { break reports };
            assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
            let FileProgress { done, total, .. } = reports[stop];
            assert_eq!(error.message(), format!("cancelled after {done} of {total} bytes; the file is as it was"));
            assert_eq!(fs::read(&path).ok(), old, "cancelled at report {stop}");
            assert_eq!(neighbours(&path).len(), usize::from(old.is_some()), "{:?}", neighbours(&path));
            stop += 1;
        };
        assert!(stop >= 4, "{stop} places to cancel at");
        check_stages(&reports, &[FileStage::Write]);
        assert_eq!(bits(&restore(&engine, &path).unwrap()), bits(&session));
        old = Some(fs::read(&path).unwrap());
        session.feed(&tokens(900)[600..]).unwrap();
    }
    // what is told of a new file is all of it but its frame
    fs::remove_file(&path).unwrap();
    let (reports, _) =
        watch(usize::MAX, |progress| session.save_with_progress(&path, SaveOptions::default(), progress));
    let file = SessionFile::inspect(&path).unwrap();
    assert_eq!(file.file_bytes, reports[0].total + file.frame_bytes);
}

#[test]
fn a_sessions_cancel_and_time_limit_end_its_save() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    let mut session = fed(&engine(), 600);
    session.cancel_token().cancel();
    let error = session.save(&path).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
    assert!(neighbours(&path).is_empty());
    // from within, as another thread would
    let (token, mut reports) = (session.cancel_token(), 0);
    let saved = session.save_with_progress(&path, SaveOptions::default(), &mut |_| {
        reports += 1;
        if reports == 2 {
            token.cancel();
        }
        ControlFlow::Continue(())
    });
    assert_eq!((saved.unwrap_err().kind(), reports), (ErrorKind::Cancelled, 2));
    session.set_call_options(CallOptions { time_limit: Some(Duration::ZERO), ..CallOptions::default() });
    let error = session.save(&path).unwrap_err();
    assert!(error.message().starts_with("the call's time limit has passed after 0 of "), "{error}");
    session.set_call_options(CallOptions::default());
    session.save(&path).unwrap();
}

#[test]
fn a_restore_that_is_cancelled_anywhere_leaves_no_session_and_the_file_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    let mut session = fed(&engine(), 600);
    session.save(&path).unwrap();
    // soon behind others a save writes only tokens
    let mut end = 600;
    while SessionFile::inspect(&path).unwrap().pending < 40 {
        session.feed(&tokens(end + 10)[end..]).unwrap();
        session.save(&path).unwrap();
        end += 10;
    }
    let pending = SessionFile::inspect(&path).unwrap().pending;
    let file = fs::read(&path).unwrap();
    let options = SessionOptions { context: CONTEXT, ..Default::default() };
    let engine = subject::engine_with(&nano(), EngineOptions { prefill_chunk: 16, ..self::options() });
    let mut stop = 0;
    let (reports, restored) = loop {
        let restore = |progress: &mut dyn FnMut(FileProgress) -> ControlFlow<()>| {
            Session::restore_with_progress(&engine, &path, options, progress)
        };
        let (reports, result) = watch(stop, restore);
        let error = match result {
            Ok(restored) => break (reports, restored),
            Err(error) => error,
        };
        assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
        let FileProgress { stage, done, total } = reports[stop];
        let what = if stage == FileStage::Compute { "tokens" } else { "bytes" };
        assert_eq!(error.message(), format!("cancelled after {done} of {total} {what}; there is no session"));
        assert_eq!(engine.metrics().sessions, 0);
        let stats = engine.cache_stats();
        assert_eq!(stats.prefix_blocks, stats.evictable_blocks, "a session's pages are still held: {stats:?}");
        stop += 1;
    };
    check_stages(&reports, &[FileStage::Check, FileStage::Read, FileStage::Compute]);
    let computed = reports.iter().filter(|now| now.stage == FileStage::Compute).count();
    assert_eq!(computed, pending.div_ceil(16), "{pending} tokens in chunks of 16");
    assert_eq!(bits(&restored), bits(&session));
    assert_eq!(fs::read(&path).unwrap(), file);
}

#[test]
fn a_callback_of_a_save_may_use_other_sessions_and_read_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine();
    let session = fed(&engine, 600);
    let mut other = subject::session(&engine, CONTEXT);
    let saved = session.save_with_progress(folder.path().join("a"), SaveOptions::default(), &mut |_| {
        other.feed(&tokens(20)).unwrap();
        assert_eq!(session.fork().unwrap().position(), 600);
        ControlFlow::Continue(())
    });
    saved.unwrap();
    assert_eq!(bits(&restore(&engine, &folder.path().join("a")).unwrap()), bits(&session));
}
