//! Header, roots and tables as bytes.
#![forbid(unsafe_code)]

use std::path::Path;

use xxhash_rust::xxh3::xxh3_64;

use crate::alloc;
use crate::cache::layout::{CacheLayout, KvFormat, LayerLayout};
use crate::cache::sequence::BLOCK_TOKENS;
use crate::error::{Error, ErrorKind, Result, bail};
use crate::model::config::LayerKind;

/// Version of the format that this library writes, and the newest it reads.
pub const VERSION: u16 = 1;
/// The oldest library version that can read what this one writes.
const OLDEST_READER: u16 = 1;
const MAGIC: [u8; 8] = *b"DSV4FILE";
const ROOT_MAGIC: [u8; 8] = *b"DSV4ROOT";
/// Reads as another number on a machine of the other byte order.
const BYTE_ORDER: u32 = 0x0102_0304;
/// Header and roots begin at multiples of this, so that a torn write of one cannot touch another.
pub(super) const PAGE: u64 = 4096;
/// Bytes of the header in front of the layers' entries.
const HEADER_FIXED: usize = 128;
/// Bytes of one layer's entry.
const HEADER_LAYER: usize = 12;
/// Longest header that is believed.
const HEADER_LONGEST: u64 = 1 << 20;
/// Used bytes of a root.
pub(super) const ROOT_BYTES: usize = 64;
/// Bytes of a section's entry in a table.
pub(super) const ENTRY_BYTES: usize = 32;
/// Kind of an entry that stands for all entries of another table, which holds none of this kind.
pub(super) const FOLDED: u32 = 0;

/// Whether a file that begins with `start` is one of dsv4, whole or not.
pub(super) fn is_ours(start: &[u8]) -> bool {
    start.starts_with(&MAGIC)
}

/// What a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// A session.
    Session,
    /// One block of a prefix.
    Block,
    /// The checkpoint at the end of a block.
    Checkpoint,
}

impl Content {
    const ALL: [Self; 3] = [Self::Session, Self::Block, Self::Checkpoint];

    /// The word in the header.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Session => "session",
            Self::Block => "block",
            Self::Checkpoint => "state",
        }
    }
}

/// What must be equal for cached rows to mean the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// [`Model::fingerprint`](crate::model::Model::fingerprint).
    pub fingerprint: u128,
    /// Name of the numerics mode, at most 16 bytes.
    pub numerics: String,
    /// Token ids of the model.
    pub vocab: usize,
    /// Formats and sizes of rows.
    pub layout: CacheLayout,
}

impl Identity {
    /// Refuses content of another model, mode or layout; `path` is the file that has this identity.
    ///
    /// # Errors
    /// `Mismatch` with the first difference.
    pub fn check(&self, engine: &Self, path: &Path) -> Result<()> {
        let path = path.display();
        if self.fingerprint != engine.fingerprint {
            let (theirs, ours) = (self.fingerprint, engine.fingerprint);
            bail!(
                Mismatch,
                "{path}: written with another model: its fingerprint is {theirs:032x}, this one's {ours:032x}; a \
                 fingerprint is made of the config, the tensors, and the shards' sizes and modification times; copy a \
                 model with its times (cp -a) to keep its sessions"
            );
        }
        if self.numerics != engine.numerics {
            bail!(Mismatch, "{path}: written with numerics {}, the engine has {}", self.numerics, engine.numerics);
        }
        let (theirs, ours) = (self.layout.format, engine.layout.format);
        if theirs != ours {
            bail!(Mismatch, "{path}: written with a cache in {theirs}, the engine has {ours}");
        }
        if self != engine {
            let (theirs, ours) = (self.dimensions(), engine.dimensions());
            bail!(Mismatch, "{path}: written with other dimensions ({theirs}) than the engine's ({ours})");
        }
        Ok(())
    }

    fn dimensions(&self) -> String {
        let CacheLayout { head_dim, rope_dim, index_dim, window, layers, .. } = &self.layout;
        let vocab = self.vocab;
        let layers = layers.len();
        format!("head {head_dim}, rope {rope_dim}, index {index_dim}, window {window}, {layers} layers, {vocab} ids")
    }
}

/// Head of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Version of the format it was written in.
    pub version: u16,
    /// Oldest version of a reader that can read it.
    pub oldest_reader: u16,
    /// What the file holds.
    pub content: Content,
    /// Of what wrote it.
    pub identity: Identity,
}

impl Header {
    /// A header as this version writes it.
    pub fn new(content: Content, identity: Identity) -> Self {
        Self { version: VERSION, oldest_reader: OLDEST_READER, content, identity }
    }

    /// Bytes of the header, a whole number of pages.
    pub fn bytes(&self) -> u64 {
        let used = HEADER_FIXED + self.identity.layout.layers.len() * HEADER_LAYER + size_of::<u64>();
        (used as u64).next_multiple_of(PAGE)
    }

    /// Where the data begins.
    pub fn data_start(&self) -> u64 {
        self.bytes() + 2 * PAGE
    }

    pub(super) fn encode(&self) -> Result<Vec<u8>> {
        let Identity { fingerprint, numerics, vocab, layout } = &self.identity;
        let mut out = alloc::with_capacity("file header", self.bytes() as usize)?;
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&BYTE_ORDER.to_le_bytes());
        out.extend_from_slice(&self.version.to_le_bytes());
        out.extend_from_slice(&self.oldest_reader.to_le_bytes());
        out.extend_from_slice(&(self.bytes() as u32).to_le_bytes());
        out.extend_from_slice(&(BLOCK_TOKENS as u32).to_le_bytes());
        out.extend_from_slice(&name::<8>(self.content.name()));
        out.extend_from_slice(&fingerprint.to_le_bytes());
        out.extend_from_slice(&name::<16>(numerics));
        out.extend_from_slice(&name::<16>(layout.format.name()));
        for n in [*vocab, layout.head_dim, layout.rope_dim, layout.index_dim, layout.window, layout.layers.len()] {
            out.extend_from_slice(&(n as u64).to_le_bytes());
        }
        debug_assert_eq!(out.len(), HEADER_FIXED);
        for layer in &layout.layers {
            for n in [layer.kind.ratio(), layer.main_state, layer.index_state] {
                out.extend_from_slice(&(n as u32).to_le_bytes());
            }
        }
        out.resize(self.bytes() as usize - size_of::<u64>(), 0);
        out.extend_from_slice(&xxh3_64(&out).to_le_bytes());
        Ok(out)
    }

    /// Length of the header that begins with `start`, the first 24 bytes of a file of `file_bytes` bytes.
    pub(super) fn length(start: [u8; 24], file_bytes: u64, path: &Path) -> Result<u64> {
        let path = path.display();
        let mut fields = Fields(&start);
        if fields.take() != Some(MAGIC) {
            bail!(Corrupt, "{path}: not a file of dsv4: it does not begin with its mark");
        }
        let order = fields.u32();
        if order == Some(BYTE_ORDER.swap_bytes()) {
            bail!(Unsupported, "{path}: written on a machine of the other byte order");
        }
        if order != Some(BYTE_ORDER) {
            bail!(Corrupt, "{path}: the byte-order mark is damaged");
        }
        let (version, oldest) = (fields.u16().unwrap_or(0), fields.u16().unwrap_or(0));
        if oldest > VERSION {
            bail!(
                Unsupported,
                "{path}: written in version {version} of the format, which needs a reader of version {oldest} or newer; \
                 this one is {VERSION}"
            );
        }
        let length = u64::from(fields.u32().unwrap_or(0));
        if length == 0 || !length.is_multiple_of(PAGE) || length > HEADER_LONGEST {
            bail!(Corrupt, "{path}: the header's length {length} is impossible");
        }
        if length + 2 * PAGE > file_bytes {
            bail!(Corrupt, "{path}: truncated: {file_bytes} bytes are shorter than its header");
        }
        Ok(length)
    }

    /// The header in `bytes`, of the length that [`Self::length`] gave.
    pub(super) fn decode(bytes: &[u8], path: &Path) -> Result<Self> {
        let damaged = || Error::new(ErrorKind::Corrupt, format!("{}: the header is damaged", path.display()));
        let (body, hash) = bytes.split_last_chunk().ok_or_else(damaged)?;
        if xxh3_64(body) != u64::from_le_bytes(*hash) {
            return Err(damaged());
        }
        let layers = alloc::with_capacity("file header", body.len() / HEADER_LAYER)?;
        Self::parse(&mut Fields(body), layers).ok_or_else(damaged)
    }

    /// `None` for values that no writer writes. `layers` has room for as many as the header can hold.
    fn parse(fields: &mut Fields<'_>, mut layers: Vec<LayerLayout>) -> Option<Self> {
        fields.take::<12>()?;
        let (version, oldest_reader) = (fields.u16()?, fields.u16()?);
        fields.u32()?;
        if fields.u32()? as usize != BLOCK_TOKENS {
            return None;
        }
        let content = fields.name::<8>()?;
        let content = Content::ALL.into_iter().find(|c| c.name() == content)?;
        let fingerprint = u128::from_le_bytes(fields.take()?);
        let numerics = fields.name::<16>()?;
        let format: KvFormat = fields.name::<16>()?.parse().ok()?;
        let vocab = u32::try_from(fields.u64()?).ok()? as usize;
        let [head_dim, rope_dim, index_dim, window, count] =
            [fields.size()?, fields.size()?, fields.size()?, fields.size()?, fields.size()?];
        if count > fields.0.len() / HEADER_LAYER || rope_dim > head_dim {
            return None;
        }
        for _ in 0..count {
            let kind = match fields.u32()? {
                0 => LayerKind::Window,
                4 => LayerKind::C4a,
                128 => LayerKind::C128a,
                _ => return None,
            };
            let (main_state, index_state) = (fields.u32()? as usize, fields.u32()? as usize);
            layers.push(LayerLayout { kind, main_state, index_state });
        }
        let layout = CacheLayout { format, head_dim, rope_dim, index_dim, window, layers };
        Some(Self { version, oldest_reader, content, identity: Identity { fingerprint, numerics, vocab, layout } })
    }
}

/// One save: where its table is and where the file's data ended after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Root {
    pub(super) generation: u64,
    pub(super) table_offset: u64,
    pub(super) table_bytes: u64,
    pub(super) table_hash: u64,
    pub(super) end: u64,
}

impl Root {
    pub(super) fn encode(&self) -> [u8; ROOT_BYTES] {
        let mut out = [0; ROOT_BYTES];
        let words = [self.generation, self.table_offset, self.table_bytes, self.table_hash, self.end, 0];
        out[..8].copy_from_slice(&ROOT_MAGIC);
        for (bytes, word) in out[8..].chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        let hash = xxh3_64(&out[..ROOT_BYTES - 8]);
        out[ROOT_BYTES - 8..].copy_from_slice(&hash.to_le_bytes());
        out
    }

    /// `None` for a root that was never written, or not completely.
    pub(super) fn decode(bytes: &[u8; ROOT_BYTES]) -> Option<Self> {
        let (body, hash) = bytes.split_last_chunk()?;
        let mut fields = Fields(body);
        if xxh3_64(body) != u64::from_le_bytes(*hash) || fields.take() != Some(ROOT_MAGIC) {
            return None;
        }
        Some(Self {
            generation: fields.u64()?,
            table_offset: fields.u64()?,
            table_bytes: fields.u64()?,
            table_hash: fields.u64()?,
            end: fields.u64()?,
        })
    }
}

/// One section of a save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Section {
    /// What it is; the numbers from 1 belong to the kind of file.
    pub kind: u32,
    /// A reader that does not know the kind must refuse the file.
    pub required: bool,
    /// Where it begins in the file.
    pub offset: u64,
    /// Its bytes.
    pub bytes: u64,
    /// xxh3 of its bytes.
    pub hash: u64,
}

impl Section {
    pub(super) fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut out = [0; ENTRY_BYTES];
        out[..4].copy_from_slice(&self.kind.to_le_bytes());
        out[4..8].copy_from_slice(&u32::from(self.required).to_le_bytes());
        out[8..16].copy_from_slice(&self.offset.to_le_bytes());
        out[16..24].copy_from_slice(&self.bytes.to_le_bytes());
        out[24..].copy_from_slice(&self.hash.to_le_bytes());
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut fields = Fields(bytes);
        let (kind, flags) = (fields.u32()?, fields.u32()?);
        Some(Self { kind, required: flags & 1 != 0, offset: fields.u64()?, bytes: fields.u64()?, hash: fields.u64()? })
    }
}

/// Text in a field of fixed length, zeros behind it.
fn name<const N: usize>(text: &str) -> [u8; N] {
    debug_assert!(text.len() <= N, "{text} does not fit its field");
    let mut out = [0; N];
    out[..text.len()].copy_from_slice(text.as_bytes());
    out
}

/// Takes fields from the front of bytes; `None` when they end.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*field)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    /// A dimension; small enough that no size computed from several of them exceeds 64 bits.
    fn size(&mut self) -> Option<usize> {
        self.u64().filter(|&n| n < 1 << 20).map(|n| n as usize)
    }

    fn name<const N: usize>(&mut self) -> Option<String> {
        let field: [u8; N] = self.take()?;
        let text = field.split(|&b| b == 0).next()?;
        String::from_utf8(text.to_vec()).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        let layer = |kind| LayerLayout { kind, main_state: 7, index_state: 3 };
        let layout = CacheLayout {
            format: KvFormat::Bf16,
            head_dim: 512,
            rope_dim: 64,
            index_dim: 128,
            window: 128,
            layers: [LayerKind::Window, LayerKind::C4a, LayerKind::C128a].map(layer).to_vec(),
        };
        let identity = Identity { fingerprint: 5 << 100, numerics: "reference".to_owned(), vocab: 129_280, layout };
        Header::new(Content::Session, identity)
    }

    fn start(bytes: &[u8]) -> [u8; 24] {
        bytes[..24].try_into().unwrap()
    }

    #[test]
    fn a_header_comes_back_and_every_flipped_bit_is_noticed() {
        let (header, path) = (header(), Path::new("x"));
        let mut bytes = header.encode().unwrap();
        assert_eq!(Header::length(start(&bytes), 1 << 20, path).unwrap(), bytes.len() as u64);
        assert_eq!(Header::decode(&bytes, path).unwrap(), header);
        for bit in 0..8 * bytes.len() {
            bytes[bit / 8] ^= 1 << (bit % 8);
            let read = Header::length(start(&bytes), 1 << 20, path).and_then(|_| Header::decode(&bytes, path));
            assert!(read.is_err(), "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn another_byte_order_and_a_newer_version_are_named() {
        let path = Path::new("x");
        let mut bytes = header().encode().unwrap();
        bytes[8..12].reverse();
        let error = Header::length(start(&bytes), 1 << 20, path).unwrap_err();
        assert!(error.kind() == ErrorKind::Unsupported && error.message().contains("byte order"), "{error}");
        bytes[8..12].reverse();
        bytes[12..16].copy_from_slice(&[9, 0, 8, 0]);
        let error = Header::length(start(&bytes), 1 << 20, path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("version 9") && error.message().contains("version 8 or newer"), "{error}");
        // a newer writer that old readers understand
        bytes[12..16].copy_from_slice(&[9, 0, 1, 0]);
        Header::length(start(&bytes), 1 << 20, path).unwrap();
    }

    #[test]
    fn every_difference_of_identity_is_named() {
        let ours = header().identity;
        let differs = |change: fn(&mut Identity), what: &str| {
            let mut theirs = ours.clone();
            change(&mut theirs);
            let error = theirs.check(&ours, Path::new("some.file")).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch);
            assert!(error.message().starts_with("some.file: ") && error.message().contains(what), "{error}");
        };
        ours.check(&ours, Path::new("x")).unwrap();
        differs(|i| i.fingerprint += 1, "another model");
        differs(|i| i.numerics = "served".to_owned(), "numerics served, the engine has reference");
        differs(|i| i.layout.format = KvFormat::Fp8, "a cache in fp8, the engine has bf16");
        differs(|i| i.layout.window = 64, "window 64");
        differs(|i| i.layout.layers[0].main_state = 8, "other dimensions");
    }
}
