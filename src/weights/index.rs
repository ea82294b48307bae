//! `model.safetensors.index.json`: which shard holds which tensor.
//!
//! Invariant: the file names of a parsed [`Index`] are relative, without `..`, so they lie below the folder unless a
//! symbolic link (as in Hugging Face caches) leads out of it. Knows nothing of the shards themselves.

#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use crate::alloc;
use crate::error::{Error, ErrorKind, Result, bail};

/// Which shard holds which tensor, borrowed from the text of the file.
#[derive(Debug, Default)]
pub(super) struct Index<'a> {
    /// Shard file names, each once, sorted.
    pub(super) files: Vec<Cow<'a, str>>,
    /// Tensor name and position of its shard in `files`, sorted by name.
    pub(super) tensors: Vec<(Cow<'a, str>, u32)>,
    /// `metadata.total_size`, if it is there and a whole number.
    pub(super) total_size: Option<u64>,
}

impl<'a> Index<'a> {
    /// Parses the text of an index file.
    ///
    /// # Errors
    /// `Corrupt` if it is not an index, names a tensor twice, or has a file name that could leave the folder.
    pub(super) fn parse(text: &'a [u8]) -> Result<Self> {
        alloc::probe("the index", text.len().saturating_mul(8))?;
        let raw: RawIndex<'a> = serde_json::from_slice(text)
            .map_err(|e| Error::new(ErrorKind::Corrupt, format!("not a safetensors index: {e}")))?;
        let WeightMap { mut files, mut tensors, failure } = raw.weight_map;
        if let Some(failure) = failure {
            return Err(failure);
        }
        if tensors.is_empty() {
            bail!(Corrupt, "weight_map is empty");
        }
        tensors.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        if let Some(pair) = tensors.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            bail!(Corrupt, "weight_map names tensor {} twice", pair[0].0);
        }
        for file in &files {
            check_file_name(file)?;
        }
        let mut order: Vec<u32> = (0..files.len() as u32).collect();
        order.sort_unstable_by(|&a, &b| files[a as usize].cmp(&files[b as usize]));
        let mut rank = vec![0; files.len()];
        for (new, &old) in order.iter().enumerate() {
            rank[old as usize] = new as u32;
        }
        for (_, file) in &mut tensors {
            *file = rank[*file as usize];
        }
        files.sort_unstable();
        let total_size =
            raw.metadata.and_then(|metadata| metadata.get("total_size").and_then(serde_json::Value::as_u64));
        Ok(Self { files, tensors, total_size })
    }
}

/// Refuses file names that could leave the folder, on any system.
fn check_file_name(name: &str) -> Result<()> {
    let bytes = name.as_bytes();
    let has_drive = bytes.len() >= 2 && bytes[0].is_ascii_alphabetic() && bytes[1] == b':';
    let reason = if name.is_empty() {
        "it is empty"
    } else if name.starts_with('/') || has_drive {
        "it is an absolute path"
    } else if name.contains('\\') {
        "it contains a backslash"
    } else if name.contains('\0') {
        "it contains a NUL character"
    } else if name.split('/').any(|part| part == "..") {
        "it contains `..`"
    } else if name.split('/').any(|part| part.is_empty() || part == ".") {
        "it contains an empty or `.` component"
    } else {
        return Ok(());
    };
    bail!(Corrupt, "weight_map has the file name {name:?}: {reason}; shards must lie below the model folder")
}

#[derive(Deserialize)]
#[serde(expecting = "an object with weight_map")]
struct RawIndex<'a> {
    #[serde(default)]
    metadata: Option<serde_json::Value>,
    #[serde(borrow)]
    weight_map: WeightMap<'a>,
}

/// `weight_map` with each file name stored once.
#[derive(Default)]
struct WeightMap<'a> {
    files: Vec<Cow<'a, str>>,
    tensors: Vec<(Cow<'a, str>, u32)>,
    /// Our own error, which serde's error type cannot carry; the rest of the map was skipped.
    failure: Option<Error>,
}

impl<'de: 'a, 'a> Deserialize<'de> for WeightMap<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MapVisitor;

        impl<'de> Visitor<'de> for MapVisitor {
            type Value = WeightMap<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object from tensor names to shard file names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut result = WeightMap::default();
                let mut positions: HashMap<Cow<'de, str>, u32> = HashMap::new();
                while let Some(Text(tensor)) = map.next_key()? {
                    let Text(file) =
                        map.next_value().map_err(|e| A::Error::custom(format!("at tensor {tensor}: {e}")))?;
                    let next = result.files.len() as u32;
                    let position = *positions.entry(file.clone()).or_insert(next);
                    if position == next {
                        result.files.push(file);
                    }
                    if let Err(failure) = alloc::reserve("the index", &mut result.tensors, 1) {
                        result.failure = Some(failure);
                        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                        break;
                    }
                    result.tensors.push((tensor, position));
                }
                Ok(result)
            }
        }

        deserializer.deserialize_map(MapVisitor)
    }
}

/// A string, borrowed from the text unless it has escapes.
#[derive(Deserialize)]
#[serde(transparent)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);
