//! Folders, paths, mappings: what the file system can do to us.

use std::fs;

use dsv4::error::ErrorKind::{Corrupt, InvalidArgument, Io, NotFound, OutOfMemory};
use dsv4::weights::Checkpoint;

use super::{assert_error, folder, load};
use crate::safetensors_writer;
use crate::tiny_checkpoint::{Tiny, shard_name};

#[test]
fn folder_without_weights_says_what_was_looked_for() {
    let dir = folder();
    let parts = [dir.path().to_str().unwrap(), "model.safetensors.index.json", "model.safetensors"];
    assert_error(Checkpoint::open(dir.path()), NotFound, &parts);
    assert_error(Checkpoint::open(&dir.path().join("absent")), NotFound, &["absent"]);
    let file = dir.path().join("model.safetensors");
    safetensors_writer::write(&file, &[("x", "I8", &[1], &[0])]);
    assert_error(Checkpoint::open(&file), InvalidArgument, &["not a folder"]);
}

#[test]
fn survey_reports_every_bad_shard() {
    let dir = folder();
    Tiny::new().write_sharded(dir.path());
    let size = |i| fs::metadata(dir.path().join(shard_name(i))).unwrap().len();
    let (first, second) = (size(0), size(1));
    fs::File::options().write(true).open(dir.path().join(shard_name(1))).unwrap().set_len(second - 10).unwrap();
    fs::remove_file(dir.path().join(shard_name(2))).unwrap();
    let report = Checkpoint::survey(dir.path()).unwrap();
    let states: Vec<_> = report.into_iter().map(|r| r.state).collect();
    assert_eq!(states.len(), 3);
    assert_eq!(states[0], Ok((6, first)));
    let [_, truncated, missing] = states.try_into().unwrap();
    assert_error(truncated, Corrupt, &[&shard_name(1), "truncated by 10 bytes"]);
    assert_error(missing, NotFound, &[&shard_name(2)]);
    let single = folder();
    Tiny::new().write_single(single.path());
    assert!(matches!(Checkpoint::survey(single.path()).unwrap()[..], [ref only] if only.state.is_ok()));
}

#[test]
fn folder_in_place_of_a_file_is_refused() {
    let dir = folder();
    fs::create_dir(dir.path().join("model.safetensors")).unwrap();
    assert_error(Checkpoint::open(dir.path()), Io, &["model.safetensors", "not a regular file"]);
    let dir = folder();
    Tiny::new().write_sharded(dir.path());
    fs::remove_file(dir.path().join(shard_name(0))).unwrap();
    fs::create_dir(dir.path().join(shard_name(0))).unwrap();
    assert_error(Checkpoint::open(dir.path()), Io, &[&shard_name(0), "not a regular file"]);
}

#[test]
fn folder_names_of_any_script_and_length_open() {
    // pitfall A21
    let dir = folder();
    let long = (0..12).map(|_| "a folder name of thirty letters").collect::<Vec<_>>().join("/");
    assert!(long.len() > 260);
    for name in ["Загрузки", "🐋 model", " spaces  inside ", "e\u{301}te\u{301}", "a'b\"c", &long] {
        let path = dir.path().join(name);
        Tiny::new().write_sharded(&path);
        load(&path).unwrap();
        let mut with_slash = path.into_os_string();
        with_slash.push("/");
        load(with_slash.as_ref()).unwrap();
    }
}

#[cfg(target_os = "linux")]
#[test]
fn folder_name_that_is_not_utf_8_opens() {
    use std::os::unix::ffi::OsStrExt;
    let dir = folder();
    let path = dir.path().join(std::ffi::OsStr::from_bytes(b"caf\xE9 \xFF"));
    Tiny::new().write_sharded(&path);
    load(&path).unwrap();
    fs::remove_file(path.join(shard_name(2))).unwrap();
    assert_error(Checkpoint::open(&path), NotFound, &["caf", &shard_name(2)]);
}

#[test]
fn path_beyond_the_limit_of_the_system_is_an_error() {
    let path = std::path::PathBuf::from("x/".repeat(5000));
    assert!(Checkpoint::open(&path).is_err());
}

#[test]
fn file_that_changes_size_is_noticed_before_its_pages_are_touched() {
    let dir = folder();
    Tiny::new().write_sharded(dir.path());
    let (checkpoint, ..) = load(dir.path()).unwrap();
    checkpoint.check_sizes().unwrap();
    let path = dir.path().join(shard_name(1));
    let size = fs::metadata(&path).unwrap().len();
    fs::File::options().write(true).open(&path).unwrap().set_len(size - 1).unwrap();
    let (before, after) = (size.to_string(), (size - 1).to_string());
    assert_error(checkpoint.check_sizes(), Corrupt, &[path.to_str().unwrap(), &before, &after]);
    let mut read = 0;
    let scan = checkpoint.suspicious(&mut |done, _| {
        read = done;
        true
    });
    assert_error(scan, Corrupt, &[&shard_name(1), &after]);
}

#[cfg(target_os = "linux")]
#[test]
fn populating_pages_that_are_gone_is_an_error_and_not_a_bus_error() {
    // pitfall A3: a page that cannot be had kills the process when it is touched
    let dir = folder();
    let path = dir.path().join("model.safetensors");
    let data = vec![7; 1 << 20];
    safetensors_writer::write(&path, &[("x", "I8", &[1 << 20], &data)]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let tensor = checkpoint.tensor("x").unwrap();
    tensor.populate(0..1 << 20).unwrap();
    tensor.populate(0..0).unwrap();
    assert_eq!(tensor.bytes(), data);
    if !has_populate_read() {
        crate::shared::say("SKIPPED the rest: this kernel has no MADV_POPULATE_READ (Linux 5.14)");
        return;
    }
    fs::File::options().write(true).open(&path).unwrap().set_len(8192).unwrap();
    for gone in [0..1 << 20, 500_000..500_001] {
        assert_error(
            tensor.populate(gone),
            Corrupt,
            &["model.safetensors: changed from ", " bytes since it was opened"],
        );
    }
}

/// Whether the kernel is Linux 5.14 or newer.
#[cfg(target_os = "linux")]
fn has_populate_read() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(['.', '-']).map(|n| n.parse::<u32>().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(5), Some(14))
}

#[test]
fn sparse_file_reads_as_zeros() {
    // pitfall A3: a hole is not an error by itself
    let dir = folder();
    let path = dir.path().join("model.safetensors");
    let head = safetensors_writer::bytes(r#"{"x":{"dtype":"I8","shape":[1048576],"data_offsets":[0,1048576]}}"#, &[]);
    fs::write(&path, &head).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(head.len() as u64 + (1 << 20)).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let tensor = checkpoint.tensor("x").unwrap();
    tensor.populate(0..1 << 20).unwrap();
    assert!(tensor.bytes().iter().all(|&b| b == 0));
}

const CHILD: &str = "DSV4_TEST_MAPPING_DIR";

/// Run by the test below in a process with little address space.
#[test]
#[ignore = "run by file_larger_than_the_address_space_cannot_be_mapped"]
fn child_maps_too_much() {
    let Some(dir) = std::env::var_os(CHILD) else { return };
    let parts = ["cannot map 68719476", "bytes of", "model.safetensors"];
    let error = assert_error(Checkpoint::open(dir.as_ref()), OutOfMemory, &parts);
    crate::shared::say(&format!("REFUSED {error}"));
}

#[cfg(target_os = "linux")]
#[test]
fn file_larger_than_the_address_space_cannot_be_mapped() {
    // pitfall A4
    let dir = folder();
    let path = dir.path().join("model.safetensors");
    let header = r#"{"x":{"dtype":"I8","shape":[68719476736],"data_offsets":[0,68719476736]}}"#;
    let head = safetensors_writer::bytes(header, &[]);
    fs::write(&path, &head).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(head.len() as u64 + (1 << 36)).unwrap();
    // without a limit it maps: read-only and shared, nothing is reserved
    assert_eq!(Checkpoint::open(dir.path()).unwrap().total_bytes(), 1 << 36);
    let exe = std::env::current_exe().unwrap();
    let output = std::process::Command::new("sh")
        .args(["-c", r#"ulimit -v 8388608 && exec "$0" "$@""#])
        .arg(exe)
        .args(["--exact", "files::child_maps_too_much", "--ignored", "--nocapture"])
        .env(CHILD, dir.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("REFUSED"), "{text}{}", String::from_utf8_lossy(&output.stdout));
}
