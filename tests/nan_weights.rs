//! Weights that are not numbers: whichever tensor they are in, feeding says `Numeric` and names a layer or a tensor.
//! Choices made by comparing (entries, experts) and quantised caches would otherwise hide them.

#![allow(clippy::unwrap_used, reason = "a failed call is a failed test")]

mod common;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use dsv4::{Engine, EngineOptions, Error, ErrorKind, Model, Session, SessionOptions, TokenId};
use serde_json::Value;

/// More than a window, two groups of the long compression and many of the short one.
const TOKENS: TokenId = 300;

/// Where a tensor's bytes are.
struct Place {
    file: PathBuf,
    bytes: Range<u64>,
    dtype: String,
}

fn copy_of_model() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models/tiny-v4")).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    dir
}

fn places(dir: &Path) -> BTreeMap<String, Place> {
    let mut places = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let file = entry.unwrap().path();
        if file.extension().is_none_or(|e| e != "safetensors") {
            continue;
        }
        let bytes = fs::read(&file).unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        let json: BTreeMap<String, Value> = serde_json::from_slice(&bytes[8..8 + header as usize]).unwrap();
        for (name, entry) in json.into_iter().filter(|(name, _)| name != "__metadata__") {
            let offset = |i: usize| 8 + header + entry["data_offsets"][i].as_u64().unwrap();
            let dtype = entry["dtype"].as_str().unwrap().to_owned();
            places.insert(name, Place { file: file.clone(), bytes: offset(0)..offset(1), dtype });
        }
    }
    places
}

/// The bytes of one NaN, or of one infinity where there is one; none for types that have neither.
fn not_finite(dtype: &str, infinite: bool) -> &'static [u8] {
    match (dtype, infinite) {
        ("F8_E4M3", _) => &[0x7F],
        ("F8_E8M0", _) => &[0xFF],
        ("BF16", false) => &[0xC0, 0x7F],
        ("BF16", true) => &[0x80, 0x7F],
        ("F32", false) => &[0, 0, 0xC0, 0x7F],
        ("F32", true) => &[0, 0, 0x80, 0x7F],
        _ => &[],
    }
}

fn write(place: &Place, start: u64, bytes: &[u8]) {
    let mut file = File::options().write(true).open(&place.file).unwrap();
    file.seek(SeekFrom::Start(place.bytes.start + start)).unwrap();
    file.write_all(bytes).unwrap();
}

/// What feeding says while the first `count` elements of the tensors are `value`; puts them back afterwards.
fn feed_with(dir: &Path, places: &[&Place], count: usize, infinite: bool) -> Result<(), Error> {
    let before: Vec<Vec<u8>> = places
        .iter()
        .map(|place| {
            let whole = fs::read(&place.file).unwrap();
            let value = not_finite(&place.dtype, infinite);
            let len = (place.bytes.end - place.bytes.start) as usize;
            write(place, 0, &value.repeat((len / value.len()).min(count)));
            whole[place.bytes.start as usize..place.bytes.end as usize].to_vec()
        })
        .collect();
    let result = feed(dir);
    places.iter().zip(&before).for_each(|(place, bytes)| write(place, 0, bytes));
    result
}

fn feed(dir: &Path) -> Result<(), Error> {
    let options = EngineOptions { threads: 2, ..EngineOptions::default() };
    let engine = Engine::new(&Model::open(dir)?, common::subject::on_device(options))?;
    let mut session = Session::new(&engine, SessionOptions::default())?;
    session.feed(&(0..TOKENS).map(|i| 3 + i * 7).collect::<Vec<_>>())
}

/// A tensor's name without numbers: `layers.N.attn.wq_a.weight`.
fn kind_of(name: &str) -> String {
    name.split('.').map(|part| if part.parse::<u32>().is_ok() { "N" } else { part }).collect::<Vec<_>>().join(".")
}

fn layer_of(name: &str) -> &str {
    name.split('.').nth(1).unwrap_or("")
}

#[track_caller]
fn is_numeric(result: Result<(), Error>, what: &str) {
    let e = result.expect_err(what);
    assert_eq!(e.kind(), ErrorKind::Numeric, "{what}: {e}");
    let names_a_place = ["layer", "logit", "hc_", "element"].iter().any(|part| e.message().contains(part));
    assert!(names_a_place && e.message().contains("verify --scan"), "{what}: {e}");
}

/// Pitfall 54.
#[test]
fn no_tensor_of_nan_goes_unnoticed() {
    let dir = copy_of_model();
    let places = places(dir.path());
    feed(dir.path()).unwrap();
    let mut seen = BTreeMap::<String, Vec<&str>>::new();
    for name in places.keys().filter(|name| !name.starts_with("mtp.")) {
        let layers = seen.entry(kind_of(name)).or_default();
        if !layers.contains(&layer_of(name)) {
            layers.push(layer_of(name));
        }
    }
    assert!(seen.len() > 40, "{} kinds of tensors", seen.len());
    for (kind, layers) in &seen {
        // the first and the last layer that has one; of the experts all, since which ones run depends on the text
        for layer in [layers[0], layers[layers.len() - 1]] {
            let all: Vec<&Place> = places
                .iter()
                .filter(|(name, place)| {
                    kind_of(name) == *kind && layer_of(name) == layer && !not_finite(&place.dtype, false).is_empty()
                })
                .map(|(_, place)| place)
                .collect();
            if !all.is_empty() {
                is_numeric(feed_with(dir.path(), &all, usize::MAX, false), &format!("{kind} of layer {layer}"));
            }
        }
    }
    feed(dir.path()).unwrap();
}

#[test]
fn one_element_is_enough_where_the_model_chooses_by_comparing() {
    let dir = copy_of_model();
    let places = places(dir.path());
    let mut tried = 0;
    let endings =
        ["ffn.gate.bias", "ffn.gate.weight", "attn.attn_sink", "indexer.weights_proj.weight", "indexer.wq_b.weight"];
    for (name, place) in places.iter().filter(|(name, _)| !name.starts_with("mtp.")) {
        if endings.iter().any(|ending| name.ends_with(ending)) {
            for infinite in [false, true] {
                is_numeric(feed_with(dir.path(), &[place], 1, infinite), &format!("{name}, infinite: {infinite}"));
                tried += 1;
            }
        }
    }
    assert!(tried > 10, "{tried} tensors");
}
