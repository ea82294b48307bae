//! Safetensors headers that contradict themselves or their file.

use std::fs;
use std::path::Path;

use dsv4::error::ErrorKind::{Corrupt, Unsupported};
use dsv4::error::Result;
use dsv4::tensor::DType;
use dsv4::weights::Checkpoint;

use super::{assert_error, folder};
use crate::safetensors_writer::{self, bytes};
use crate::tiny_checkpoint::Tiny;

/// Opens a folder whose only file has these bytes.
fn open_bytes(file: &[u8]) -> Result<Checkpoint> {
    let dir = folder();
    fs::write(dir.path().join("model.safetensors"), file).expect("the test folder is writable");
    Checkpoint::open(dir.path())
}

fn open_header(header: &str, data_len: usize) -> Result<Checkpoint> {
    open_bytes(&bytes(header, &vec![0; data_len]))
}

#[test]
fn truncated_shard_is_refused_with_both_sizes() {
    // pitfall A1: files short by whole tensors were loaded as zeros
    let dir = folder();
    Tiny::new().write_single(dir.path());
    let path = dir.path().join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    let last_tensor = 4; // mtp.0.hc_head_scale, one float32
    for cut in [1, 4096, last_tensor, whole.len() / 2] {
        fs::write(&path, &whole[..whole.len() - cut]).unwrap();
        let declared = format!("declares {} bytes", whole.len());
        let real = format!("has {}", whole.len() - cut);
        let parts = [path.to_str().unwrap(), &declared, &real, "truncated"];
        assert_error(Checkpoint::open(dir.path()), Corrupt, &parts);
    }
    fs::write(&path, &whole[..whole.len() - last_tensor]).unwrap();
    assert_error(Checkpoint::open(dir.path()), Corrupt, &["first tensor cut off is mtp.0.hc_head_scale"]);
}

#[test]
fn bytes_behind_the_last_tensor_are_refused() {
    let file = bytes(r#"{"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}"#, &[0; 7]);
    assert_error(open_bytes(&file), Corrupt, &["3 bytes behind the last tensor"]);
}

#[test]
fn file_shorter_than_a_header_length_is_refused() {
    for (len, size) in [(0, "0 bytes"), (1, "1 byte"), (7, "7 bytes")] {
        let parts = ["model.safetensors", &format!("{size}: too short")];
        assert_error(open_bytes(&vec![0; len]), Corrupt, &parts);
    }
}

#[test]
fn header_longer_than_the_file_is_refused_with_both_sizes() {
    for length in [3u64, 1 << 20, 1 << 63, u64::MAX] {
        let mut file = length.to_le_bytes().to_vec();
        file.extend(b"{}");
        assert_error(open_bytes(&file), Corrupt, &[&format!("a header of {length} bytes"), "has 10 bytes"]);
    }
}

#[test]
fn header_above_the_limit_is_refused_without_reading_it() {
    let dir = folder();
    let path = dir.path().join("model.safetensors");
    fs::write(&path, 200_000_000u64.to_le_bytes()).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(1 << 30).unwrap();
    assert_error(Checkpoint::open(dir.path()), Corrupt, &["200000000 bytes", "100000000"]);
}

#[test]
fn git_lfs_pointer_is_called_that() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n";
    assert_error(open_bytes(pointer), Corrupt, &["Git LFS pointer"]);
}

#[test]
fn overlap_gap_and_offsets_past_the_end_are_refused() {
    let two = |a: (u32, u32), b: (u32, u32)| {
        format!(
            r#"{{"a":{{"dtype":"I8","shape":[{}],"data_offsets":[{},{}]}},"b":{{"dtype":"I8","shape":[{}],"data_offsets":[{},{}]}}}}"#,
            a.1 - a.0,
            a.0,
            a.1,
            b.1 - b.0,
            b.0,
            b.1
        )
    };
    assert!(open_header(&two((0, 8), (8, 16)), 16).is_ok());
    assert!(open_header(&two((8, 16), (0, 8)), 16).is_ok(), "the order in the header is free");
    assert_error(open_header(&two((0, 8), (4, 12)), 12), Corrupt, &["tensor b", "overlaps", "a ends at 8"]);
    assert_error(open_header(&two((0, 8), (0, 8)), 8), Corrupt, &["overlaps"]);
    assert_error(open_header(&two((0, 8), (9, 16)), 16), Corrupt, &["tensor b", "gap", "9", "8"]);
    assert_error(open_header(&two((1, 8), (8, 16)), 16), Corrupt, &["tensor a", "gap"]);
    assert_error(open_header(&two((0, 8), (8, 17)), 16), Corrupt, &["truncated by 1 byte;", "cut off is b"]);
    assert_error(open_header(&two((0, 8), (8, u32::MAX)), 16), Corrupt, &["truncated"]);
}

#[test]
fn byte_count_must_fit_dtype_and_shape() {
    for (shape, offsets) in [("[3]", "[0,4]"), ("[2]", "[4,0]"), ("[]", "[0,4]"), ("[0]", "[0,2]")] {
        let header = format!(r#"{{"t":{{"dtype":"BF16","shape":{shape},"data_offsets":{offsets}}}}}"#);
        assert_error(open_header(&header, 4), Corrupt, &["tensor t", "BF16"]);
    }
}

#[test]
fn sizes_that_overflow_are_refused() {
    for shape in ["[4294967296,4294967296]", "[9223372036854775807,2]", "[18446744073709551615]"] {
        let header = format!(r#"{{"t":{{"dtype":"F32","shape":{shape},"data_offsets":[0,4]}}}}"#);
        assert_error(open_header(&header, 4), Corrupt, &["tensor t", "overflows"]);
    }
    // each tensor fits into 64 bits, the file does not
    let end = u64::MAX;
    let header = format!(r#"{{"t":{{"dtype":"I8","shape":[{end}],"data_offsets":[0,{end}]}}}}"#);
    assert_error(open_header(&header, 4), Corrupt, &["truncated"]);
}

#[test]
fn malformed_entries_name_the_tensor() {
    for entry in [
        r#"{"shape":[1],"data_offsets":[0,2]}"#,
        r#"{"dtype":"BF16","data_offsets":[0,2]}"#,
        r#"{"dtype":"BF16","shape":[1]}"#,
        r#"{"dtype":"BF16","shape":[-1],"data_offsets":[0,2]}"#,
        r#"{"dtype":"BF16","shape":[1.5],"data_offsets":[0,2]}"#,
        r#"{"dtype":"BF16","shape":1,"data_offsets":[0,2]}"#,
        r#"{"dtype":"BF16","shape":[1],"data_offsets":[0,2,4]}"#,
        r#"{"dtype":"BF16","shape":[1],"data_offsets":[0]}"#,
        r#"{"dtype":"BF16","shape":[1],"data_offsets":["0","2"]}"#,
        r#"{"dtype":16,"shape":[1],"data_offsets":[0,2]}"#,
        r#"{"dtype":"BF16","dtype":"BF16","shape":[1],"data_offsets":[0,2]}"#,
        "null",
        "7",
    ] {
        assert_error(open_header(&format!(r#"{{"some.tensor":{entry}}}"#), 2), Corrupt, &["some.tensor"]);
    }
}

#[test]
fn text_that_is_no_header_is_refused() {
    for header in ["", "[]", "null", " {}", "{", "{\"a\"}", "{}x", "{} {}", "\u{0}"] {
        assert_error(open_header(header, 0), Corrupt, &["model.safetensors", "header"]);
    }
    let mut file = bytes("{\"??\":1}", &[]);
    file[10..12].copy_from_slice(&[0xFF, 0xFE]);
    assert_error(open_bytes(&file), Corrupt, &["header"]);
    let deep = "[".repeat(100_000);
    assert_error(open_header(&format!(r#"{{"__metadata__":{deep}"#), 0), Corrupt, &["header"]);
}

#[test]
fn tensor_named_twice_is_refused() {
    let header = r#"{"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]},"\u0061":{"dtype":"I8","shape":[1],"data_offsets":[1,2]}}"#;
    assert_error(open_header(header, 2), Corrupt, &["tensor a", "twice"]);
}

#[test]
fn unknown_dtype_names_tensor_and_dtype_and_is_not_called_damage() {
    // pitfalls A5, A6, A7: an unknown dtype was reported as a corrupt file
    let mut tiny = Tiny::new();
    tiny.add("unused.thing", "F3", &[5]);
    let dir = folder();
    tiny.write_single(dir.path());
    let error =
        assert_error(Checkpoint::open(dir.path()), Unsupported, &["unused.thing", "dtype F3", "model.safetensors"]);
    assert!(!error.message().contains("corrupt") && !error.message().contains("damage"), "{error}");
}

#[test]
fn every_dtype_of_the_releases_opens() {
    let data = [0u8; 64];
    let dtypes = ["F8_E4M3", "F8_E8M0", "I8", "BF16", "F32", "I64"];
    let sizes = [1, 1, 1, 2, 4, 8];
    let dir = folder();
    let tensors: Vec<_> =
        dtypes.iter().zip(sizes).map(|(d, size)| (*d, *d, &[2usize, 2][..], &data[..4 * size])).collect();
    safetensors_writer::write(&dir.path().join("model.safetensors"), &tensors);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    for (name, size) in dtypes.iter().zip(sizes) {
        let tensor = checkpoint.tensor(name).unwrap();
        assert_eq!(tensor.dtype(), DType::from_name(name).unwrap());
        assert_eq!((tensor.shape(), tensor.bytes().len(), tensor.name()), (&[2, 2][..], 4 * size, *name));
    }
    assert!(checkpoint.tensor("F8").is_none());
}

#[test]
fn scalars_empty_tensors_and_many_dimensions_are_read() {
    let header = r#"{"scalar":{"dtype":"F32","shape":[],"data_offsets":[0,4]},
        "empty":{"dtype":"I64","shape":[0,5],"data_offsets":[4,4]},
        "deep":{"dtype":"I8","shape":[1,2,1,2,1,2],"data_offsets":[4,12]}}"#;
    let checkpoint = open_header(header, 12).unwrap();
    assert_eq!(checkpoint.tensor("scalar").unwrap().bytes().len(), 4);
    assert!(checkpoint.tensor("empty").unwrap().bytes().is_empty());
    assert_eq!(checkpoint.tensor("deep").unwrap().shape(), [1, 2, 1, 2, 1, 2]);
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["deep", "empty", "scalar"]);
}

#[test]
fn bytes_in_memory_are_read_as_a_file_is() {
    let header = r#"{"a":{"dtype":"I8","shape":[3],"data_offsets":[0,3]}}"#;
    let checkpoint = Checkpoint::from_bytes("embedded", bytes(header, &[1, 2, 3])).unwrap();
    assert_eq!(checkpoint.tensor("a").unwrap().bytes(), [1, 2, 3]);
    checkpoint.check_sizes().unwrap();
    assert_eq!(checkpoint.dir(), Path::new("embedded"));
    assert_error(Checkpoint::from_bytes("embedded", bytes(header, &[1, 2])), Corrupt, &["embedded", "truncated"]);
}
