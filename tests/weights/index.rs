//! The index and the shards it names.

use std::fs;

use dsv4::error::ErrorKind::{Corrupt, NotFound};
use dsv4::weights::Checkpoint;
use serde_json::{Value, json};

use super::spoil::read_index;
use super::{assert_error, folder, load};
use crate::safetensors_writer;
use crate::tiny_checkpoint::{Tiny, shard_name, write_index};

/// A sharded checkpoint whose index was changed by `change`.
fn with_index(change: impl FnOnce(&mut Value)) -> tempfile::TempDir {
    let dir = folder();
    Tiny::new().write_sharded(dir.path());
    let mut index = read_index(dir.path());
    change(&mut index);
    write_index(dir.path(), &index);
    dir
}

#[test]
fn sharded_checkpoint_opens() {
    let dir = with_index(|_| {});
    let (checkpoint, _, weights) = load(dir.path()).unwrap();
    assert_eq!(checkpoint.shards().len(), 3);
    assert_eq!(weights.layers.len(), 3);
    let names: Vec<_> = checkpoint.names().collect();
    assert!(names.is_sorted());
    assert_eq!(names.len(), Tiny::new().tensors.len());
    let sum: usize = Tiny::new().tensors.iter().map(|t| t.3.len()).sum();
    assert_eq!(checkpoint.total_bytes(), sum as u64);
    for shard in checkpoint.shards() {
        assert_eq!(shard.declared_bytes(), shard.current_bytes().unwrap());
        assert_eq!(shard.declared_bytes(), fs::metadata(shard.path()).unwrap().len());
    }
}

#[test]
fn missing_shards_are_counted_and_named_even_if_their_tensors_are_elsewhere() {
    // pitfall A9: the index says 30 shards, the folder has 15 with all the weights
    let dir = folder();
    let tiny = Tiny::new();
    tiny.write_single(dir.path());
    tiny.write_sharded(dir.path());
    fs::remove_file(dir.path().join(shard_name(1))).unwrap();
    fs::remove_file(dir.path().join(shard_name(2))).unwrap();
    let parts = ["model.safetensors.index.json", "2 of the 3 shards", &shard_name(1), "layers."];
    assert_error(Checkpoint::open(dir.path()), NotFound, &parts);
}

#[test]
fn tensor_in_another_shard_than_the_index_says_is_refused() {
    let dir = with_index(|index| index["weight_map"]["embed.weight"] = json!(shard_name(2)));
    let parts = ["embed.weight", &shard_name(2), "but it is in", &shard_name(0)];
    assert_error(Checkpoint::open(dir.path()), Corrupt, &parts);
    let dir = with_index(|index| index["weight_map"]["no.such.tensor"] = json!(shard_name(2)));
    assert_error(Checkpoint::open(dir.path()), Corrupt, &["no.such.tensor", "in no shard"]);
}

#[test]
fn tensors_the_index_does_not_name_are_not_part_of_the_model() {
    let dir = folder();
    let mut tiny = Tiny::new();
    tiny.add("layers.0.attn.surprise", "F32", &[1]);
    tiny.write_sharded(dir.path());
    let mut index = read_index(dir.path());
    index["weight_map"].as_object_mut().unwrap().shift_remove("layers.0.attn.surprise");
    write_index(dir.path(), &index);
    let (checkpoint, ..) = load(dir.path()).unwrap();
    assert!(checkpoint.tensor("layers.0.attn.surprise").is_none());
}

#[test]
fn scale_missing_from_the_index_is_named_with_the_shard_that_has_it() {
    // pitfall A10: an index without the scale tensors
    let name = "layers.0.attn.wq_a.scale";
    let dir = with_index(|index| {
        index["weight_map"].as_object_mut().unwrap().shift_remove(name);
    });
    let parts = ["layers.0.attn.wq_a.weight", name, &shard_name(1), "the index does not name it"];
    assert_error(load(dir.path()), NotFound, &parts);
}

#[test]
fn file_names_that_leave_the_folder_are_refused() {
    // pitfall A11
    for name in [
        "../model-00001-of-00003.safetensors",
        "a/../../b.safetensors",
        "..",
        "a/..",
        "/etc/passwd",
        "//server/share",
        "\\\\server\\share",
        "..\\up.safetensors",
        "C:\\model.safetensors",
        "C:model.safetensors",
        "",
        ".",
        "./a.safetensors",
        "a//b.safetensors",
        "a/",
        "nul\u{0}.safetensors",
    ] {
        let dir = with_index(|index| index["weight_map"]["embed.weight"] = json!(name));
        let quoted = format!("{name:?}");
        assert_error(Checkpoint::open(dir.path()), Corrupt, &["model.safetensors.index.json", &quoted]);
    }
}

#[test]
fn shards_may_lie_in_a_subfolder_and_have_any_padding() {
    // pitfall A11: five digits are a habit, not a rule
    let dir = with_index(|_| {});
    fs::create_dir(dir.path().join("part..one")).unwrap();
    let mut index = read_index(dir.path());
    for (i, new) in ["part..one/model-000001-of-000003.safetensors", "model-2-of-3.safetensors", "Ⅲ.safetensors"]
        .into_iter()
        .enumerate()
    {
        fs::rename(dir.path().join(shard_name(i)), dir.path().join(new)).unwrap();
        for file in index["weight_map"].as_object_mut().unwrap().values_mut() {
            if *file == json!(shard_name(i)) {
                *file = json!(new);
            }
        }
    }
    write_index(dir.path(), &index);
    load(dir.path()).unwrap();
}

#[cfg(unix)]
#[test]
fn shards_may_be_symbolic_links_as_in_a_download_cache() {
    // pitfall A21
    let dir = folder();
    let snapshot = dir.path().join("snapshots/abc");
    Tiny::new().write_sharded(&snapshot);
    fs::create_dir(dir.path().join("blobs")).unwrap();
    for file in fs::read_dir(&snapshot).unwrap() {
        let file = file.unwrap();
        let blob = dir.path().join("blobs").join(file.file_name());
        fs::rename(file.path(), &blob).unwrap();
        std::os::unix::fs::symlink(std::path::Path::new("../../blobs").join(file.file_name()), file.path()).unwrap();
    }
    load(&snapshot).unwrap();
    fs::remove_file(dir.path().join("blobs").join(shard_name(1))).unwrap();
    assert_error(Checkpoint::open(&snapshot), NotFound, &["1 of the 3 shards", &shard_name(1)]);
}

#[test]
fn wrong_total_size_is_a_difference_and_no_error() {
    for total in [json!(1), json!("many"), json!(-1), Value::Null] {
        let dir = with_index(|index| index["metadata"]["total_size"] = total.clone());
        let differences = load(dir.path()).unwrap().0.differences().to_vec();
        assert_eq!(differences.iter().any(|d| d.contains("total_size is 1, but")), total == 1, "{differences:?}");
    }
    let dir = with_index(|index| {
        index.as_object_mut().unwrap().shift_remove("metadata");
    });
    load(dir.path()).unwrap();
}

#[test]
fn text_that_is_no_index_is_refused() {
    let dir = folder();
    let texts = [
        "",
        "null",
        "[]",
        "{}",
        r#"{"weight_map":{}}"#,
        r#"{"weight_map":null}"#,
        r#"{"weight_map":["a"]}"#,
        r#"{"weight_map":{"a":1}}"#,
        r#"{"weight_map":{"a":"f","a":"g"}}"#,
        r#"{"weight_map":{"a":"f"},"weight_map":{"a":"f"}}"#,
        r#"{"weight_map":{"a":"f"}"#,
        r#"{"weight_map":{"a":"f"}} x"#,
    ];
    for text in texts {
        fs::write(dir.path().join("model.safetensors.index.json"), text).unwrap();
        assert_error(Checkpoint::open(dir.path()), Corrupt, &["model.safetensors.index.json"]);
    }
}

#[test]
fn one_file_without_an_index_opens() {
    // pitfall A11
    let dir = folder();
    Tiny::new().write_single(dir.path());
    let (checkpoint, ..) = load(dir.path()).unwrap();
    assert_eq!(checkpoint.shards().len(), 1);
}

#[test]
fn index_wins_over_a_single_file() {
    let dir = folder();
    Tiny::new().write_sharded(dir.path());
    safetensors_writer::write(&dir.path().join("model.safetensors"), &[("x", "I8", &[1], &[0])]);
    assert_eq!(load(dir.path()).unwrap().0.shards().len(), 3);
}
