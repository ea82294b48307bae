//! The header of a safetensors file: an 8-byte length, then JSON from tensor name to dtype, shape and byte range.
//!
//! Own parser instead of the `safetensors` crate's: that one keeps the last of two tensors of one name, calls an unknown
//! dtype an invalid header without naming the tensor, and gives no sizes in its errors.
//!
//! Invariant: every entry of a parsed [`Header`] has a known dtype and as many bytes as its dtype and shape need, and the
//! entries cover the data section `0..data_len` without overlap or gap. Names are unique. Knows nothing of files.

#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};

use crate::alloc;
use crate::error::{Error, ErrorKind, Result, bail};
use crate::tensor::DType;

/// Longest header accepted, in bytes: the limit of the format's own reader.
pub(super) const MAX_HEADER_LEN: u64 = 100_000_000;

/// The tensors of one file, sorted by name. Names and shapes lie in two shared buffers, so an entry is small.
#[derive(Debug, Default)]
pub(super) struct Header {
    names: String,
    dims: Vec<usize>,
    entries: Vec<Entry>,
    data_len: u64,
}

/// One tensor: where its name, shape and bytes are.
#[derive(Clone, Copy, Debug)]
struct Entry {
    name_start: u32,
    name_len: u32,
    dims_start: u32,
    rank: u32,
    dtype: DType,
    start: u64,
    end: u64,
}

impl Header {
    /// Parses the JSON text (without the length before it).
    ///
    /// # Errors
    /// `Corrupt` if the text is not a header or contradicts itself, `Unsupported` for a dtype that no V4 checkpoint
    /// has, even on a tensor that is not used: its size, and with it the layout of the file, cannot be checked.
    pub(super) fn parse(text: &[u8]) -> Result<Self> {
        if text.first() != Some(&b'{') {
            bail!(Corrupt, "the header is not a JSON object: not a safetensors file");
        }
        alloc::probe("a safetensors header", text.len().saturating_mul(12))?;
        let mut builder = Builder { header: Self::default(), failure: None };
        let mut json = serde_json::Deserializer::from_slice(text);
        let result = builder.deserialize(&mut json).and_then(|()| json.end());
        if let Some(failure) = builder.failure {
            return Err(failure);
        }
        result.map_err(|e| Error::new(ErrorKind::Corrupt, format!("the header cannot be read: {e}")))?;
        let mut header = builder.header;
        header.check_layout()?;
        header.sort_names()?;
        header.names.shrink_to_fit();
        header.dims.shrink_to_fit();
        header.entries.shrink_to_fit();
        Ok(header)
    }

    /// Number of tensors.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Bytes of the data section.
    pub(super) fn data_len(&self) -> u64 {
        self.data_len
    }

    /// Name of tensor `i`; ascending in `i`.
    pub(super) fn name(&self, i: usize) -> &str {
        self.name_of(&self.entries[i])
    }

    /// Element type of tensor `i`.
    pub(super) fn dtype(&self, i: usize) -> DType {
        self.entries[i].dtype
    }

    /// Shape of tensor `i`.
    pub(super) fn shape(&self, i: usize) -> &[usize] {
        let entry = &self.entries[i];
        &self.dims[entry.dims_start as usize..][..entry.rank as usize]
    }

    /// Byte range of tensor `i` in the data section.
    pub(super) fn range(&self, i: usize) -> (u64, u64) {
        (self.entries[i].start, self.entries[i].end)
    }

    /// The tensor called `name`.
    pub(super) fn find(&self, name: &str) -> Option<usize> {
        self.entries.binary_search_by(|entry| self.name_of(entry).cmp(name)).ok()
    }

    /// The first tensor, in file order, that does not fit into `available` bytes of data.
    pub(super) fn first_beyond(&self, available: u64) -> Option<&str> {
        let cut = self.entries.iter().filter(|entry| entry.end > available);
        cut.min_by_key(|entry| entry.start).map(|entry| self.name_of(entry))
    }

    fn name_of(&self, entry: &Entry) -> &str {
        &self.names[entry.name_start as usize..][..entry.name_len as usize]
    }

    /// Checks that the byte ranges follow each other without overlap or gap, and notes where they end.
    fn check_layout(&mut self) -> Result<()> {
        self.entries.sort_unstable_by_key(|entry| (entry.start, entry.end));
        let mut previous: Option<&Entry> = None;
        let mut position = 0;
        for entry in &self.entries {
            if entry.start != position {
                let name = self.name_of(entry);
                let what = if entry.start < position { "overlaps" } else { "leaves a gap after" };
                let neighbour = previous.map_or("the header", |p| self.name_of(p));
                bail!(
                    Corrupt,
                    "tensor {name} starts at data offset {}, but {neighbour} ends at {position}: it {what} it",
                    entry.start
                );
            }
            position = entry.end;
            previous = Some(entry);
        }
        self.data_len = position;
        Ok(())
    }

    /// Sorts the entries by name and refuses a name that occurs twice.
    fn sort_names(&mut self) -> Result<()> {
        let names = &self.names;
        let name_of = |entry: &Entry| &names[entry.name_start as usize..][..entry.name_len as usize];
        self.entries.sort_unstable_by(|a, b| name_of(a).cmp(name_of(b)));
        if let Some(pair) = self.entries.windows(2).find(|pair| name_of(&pair[0]) == name_of(&pair[1])) {
            bail!(Corrupt, "tensor {} is in the header twice", name_of(&pair[0]));
        }
        Ok(())
    }

    /// Adds one tensor after checking it by itself.
    fn push(&mut self, name: &str, raw: &RawEntry<'_>) -> Result<()> {
        let Some(dtype) = DType::from_name(&raw.dtype) else {
            bail!(
                Unsupported,
                "tensor {name} has dtype {}, which DeepSeek-V4 checkpoints do not use (they have F8_E4M3, F8_E8M0, I8, \
                 BF16, F32 and I64)",
                raw.dtype
            );
        };
        let (start, end) = raw.data_offsets;
        let elements = raw.shape.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim as u64));
        let Some(needed) = elements.and_then(|n| n.checked_mul(dtype.size() as u64)) else {
            bail!(Corrupt, "tensor {name}: the size of {dtype} {:?} overflows 64 bits", raw.shape);
        };
        if end < start || end - start != needed {
            bail!(
                Corrupt,
                "tensor {name}: {dtype} {:?} needs {needed} bytes, but data_offsets are [{start}, {end}]",
                raw.shape
            );
        }
        let what = "the names and shapes of a shard";
        alloc::reserve(what, &mut self.entries, 1)?;
        alloc::reserve(what, &mut self.dims, raw.shape.len())?;
        let names = self.names.try_reserve(name.len());
        names.map_err(|_| Error::out_of_memory(what, self.names.len() as u64 + name.len() as u64))?;
        // a header is at most 100 MB long, so these counts fit
        self.entries.push(Entry {
            name_start: self.names.len() as u32,
            name_len: name.len() as u32,
            dims_start: self.dims.len() as u32,
            rank: raw.shape.len() as u32,
            dtype,
            start,
            end,
        });
        self.names.push_str(name);
        self.dims.extend_from_slice(&raw.shape);
        Ok(())
    }
}

/// A header entry as written.
#[derive(Deserialize)]
#[serde(expecting = "an object with dtype, shape and data_offsets")]
struct RawEntry<'a> {
    #[serde(borrow)]
    dtype: Cow<'a, str>,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

/// Fills a header while the JSON is read; keeps our own error, which serde's error type cannot carry.
struct Builder {
    header: Header,
    failure: Option<Error>,
}

impl<'de> DeserializeSeed<'de> for &mut Builder {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut Builder {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object from tensor names to dtype, shape and data_offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<Name<'de>>()? {
            let name = name.0;
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let raw = map.next_value::<RawEntry<'_>>().map_err(|error| {
                let message = format!("the header cannot be read at tensor {name}: {error}");
                self.failure = Some(Error::new(ErrorKind::Corrupt, message));
                error
            })?;
            if let Err(failure) = self.header.push(&name, &raw) {
                let message = serde::de::Error::custom(&failure);
                self.failure = Some(failure);
                return Err(message);
            }
        }
        Ok(())
    }
}

/// A key, borrowed from the text unless it has escapes.
#[derive(Deserialize)]
#[serde(transparent)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);
