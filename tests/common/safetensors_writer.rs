//! Writes small safetensors files for tests, valid ones and headers that lie.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};

/// One tensor: name, dtype, shape, bytes.
pub(crate) type Entry<'a> = (&'a str, &'a str, &'a [usize], &'a [u8]);

/// Writes a valid file; the tensors lie in the order given.
pub(crate) fn write(path: &Path, tensors: &[Entry<'_>]) {
    let data: Vec<u8> = tensors.iter().flat_map(|t| t.3.iter().copied()).collect();
    fs::write(path, bytes(&header(tensors), &data)).expect("the test folder is writable");
}

/// The header text of `write`.
pub(crate) fn header(tensors: &[Entry<'_>]) -> String {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut position = 0;
    for (name, dtype, shape, bytes) in tensors {
        header.insert((*name).into(), entry(dtype, shape, position, position + bytes.len() as u64));
        position += bytes.len() as u64;
    }
    Value::Object(header).to_string()
}

/// One value of a header.
pub(crate) fn entry(dtype: &str, shape: &[usize], start: u64, end: u64) -> Value {
    json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]})
}

/// A file of any header text, padded to 8 bytes as the official writer does, and data.
pub(crate) fn bytes(header: &str, data: &[u8]) -> Vec<u8> {
    let padded = header.len().next_multiple_of(8);
    let mut file = (padded as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(8 + padded, b' ');
    file.extend(data);
    file
}
