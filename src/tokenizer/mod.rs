//! Text to token ids and back: byte-level BPE read from a checkpoint's `tokenizer.json`.
//!
//! Invariant: encoding loses nothing. Every byte has a token (checked at load), so the bytes of
//! `encode(text)` are the bytes of `text`, whatever the text and the [`Markup`] choice. Control
//! tokens (turn markers, `<think>`, DSML) come out of [`Tokenizer::encode`] only under
//! [`Markup::Parse`]; text from users goes through [`Markup::Text`] and can never become one.
//!
//! This module knows no chat format (see `chat`) and never adds BOS or EOS on its own.

#![forbid(unsafe_code)]

mod detokenizer;
mod load;
mod marker_trie;
mod pieces;

use std::path::Path;

use tokenizers::{
    Model, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, PreTokenizerWrapper, models::bpe::BPE,
};

use crate::TokenId;
use crate::alloc;
use crate::error::{Result, bail};
use crate::file;

pub use detokenizer::{Detokenizer, Utf8Stream};
use marker_trie::MarkerTrie;

/// Whether text that spells an added token (`<｜User｜>`, `<think>`, …) becomes that token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Markup {
    /// Never: the text is split into ordinary pieces. The right choice for anything a user wrote.
    Text,
    /// Yes, leftmost and longest match first, as the official encoder does with a whole prompt.
    Parse,
}

/// What a token id stands for. The kinds do not overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// A piece of text from the byte-level vocabulary.
    Ordinary,
    /// Flagged `special` in `tokenizer.json`: begin of sentence, end of sentence, padding.
    Special,
    /// A control token that is *not* flagged special: turn, `<think>`, DSML, task, fill-in markers.
    Markup,
    /// A reserved added token without meaning (`<｜place▁holder▁no▁0｜>`, …), or an id without a token.
    Placeholder,
}

/// The tokenizer of one checkpoint. Immutable; every method may be called from several threads.
///
/// ```
/// use dsv4::Markup;
/// let model = dsv4::Model::open("examples/models/tiny-v4")?;
/// let tokenizer = model.tokenizer()?;
/// let tokens = tokenizer.encode("Once upon a time", Markup::Text)?;
/// assert_eq!(tokenizer.decode(&tokens)?, "Once upon a time");
///
/// // what a user wrote never becomes a control token
/// let think = tokenizer.id_of("<think>").expect("V4 has it");
/// assert_eq!(tokenizer.encode("<think>", Markup::Parse)?, [think]);
/// assert!(!tokenizer.encode("<think>", Markup::Text)?.contains(&think));
/// # Ok::<(), dsv4::Error>(())
/// ```
pub struct Tokenizer {
    pre_tokenizer: PreTokenizerWrapper,
    model: BPE,
    markers: MarkerTrie,
    /// Bytes of every id, laid end to end; `spans[id]` finds them.
    bytes: Vec<u8>,
    spans: Vec<Span>,
    /// Ids of the model, those without a token included; 0 until [`Tokenizer::pad_to`] has told.
    ids: usize,
    /// Whether the pre-tokeniser is V4's, so that long texts can be encoded in pieces.
    has_v4_splits: bool,
}

/// Bytes that the `tokenizers` crate takes at most for each byte of a text that is encoded in one piece.
/// (`tests/tokenizer_memory.rs` measures it.)
const ENCODING_COST: usize = 400;
/// Bytes that reading a `tokenizer.json` takes at most for each of its bytes.
const LOADING_COST: usize = 24;

/// Where one token's bytes lie in `Tokenizer::bytes`.
#[derive(Clone, Copy, Default)]
struct Span {
    start: usize,
    len: usize,
    /// False for an id that the file gives no token.
    used: bool,
    /// Known for every used id once loading is complete.
    kind: Option<TokenKind>,
}

impl Span {
    fn range(&self) -> std::ops::Range<usize> {
        self.start..self.start + self.len
    }
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// `NotFound` or `Io` when the file cannot be read, `OutOfMemory`, `Tokenizer` when it is not a byte-level BPE
    /// tokenizer that covers all 256 bytes; the message names the file.
    pub fn from_file(path: &Path) -> Result<Self> {
        let json = file::read(path, file::TOKENIZER)?;
        Self::from_bytes(&json).map_err(|e| e.context(path.display()))
    }

    /// Reads the contents of a `tokenizer.json`.
    ///
    /// # Errors
    /// `Tokenizer` and `OutOfMemory`, as [`Tokenizer::from_file`].
    pub fn from_bytes(json: &[u8]) -> Result<Self> {
        alloc::probe("the tokenizer", json.len().saturating_mul(LOADING_COST))?;
        load::from_bytes(json)
    }

    /// Token ids of `text`; no BOS or EOS is added.
    ///
    /// # Errors
    /// `Tokenizer` when the pre-tokeniser gives up on the text; `OutOfMemory` with the bytes.
    pub fn encode(&self, text: &str, markup: Markup) -> Result<Vec<TokenId>> {
        let mut ids = Vec::new();
        if markup == Markup::Text {
            self.encode_ordinary(text, &mut ids)?;
            return Ok(ids);
        }
        let mut rest = text;
        while let Some((range, id)) = self.markers.find(rest) {
            self.encode_ordinary(&rest[..range.start], &mut ids)?;
            alloc::reserve("token ids", &mut ids, 1)?;
            ids.push(id);
            rest = &rest[range.end..];
        }
        self.encode_ordinary(rest, &mut ids)?;
        Ok(ids)
    }

    /// Text of `ids`; bytes that are not UTF-8 become U+FFFD, as `String::from_utf8_lossy` does.
    ///
    /// # Errors
    /// `Tokenizer`, naming the first id outside the vocabulary; `OutOfMemory`.
    pub fn decode(&self, ids: &[TokenId]) -> Result<String> {
        String::from_utf8(self.decode_bytes(ids)?).or_else(|e| replace_invalid(e.as_bytes()))
    }

    /// Bytes of `ids`, exactly; they need not be UTF-8.
    ///
    /// # Errors
    /// `Tokenizer`, naming the first id outside the vocabulary; `OutOfMemory`.
    pub fn decode_bytes(&self, ids: &[TokenId]) -> Result<Vec<u8>> {
        let mut len = 0;
        for &id in ids {
            len += self.token_bytes(id)?.len();
        }
        let mut bytes = alloc::with_capacity("decoded text", len)?;
        for &id in ids {
            bytes.extend_from_slice(self.token_bytes(id)?);
        }
        Ok(bytes)
    }

    /// Bytes that one token stands for: a control token's spelling, or a piece of text that may
    /// end within a code point. Nothing for an id that pads the vocabulary (see [`Tokenizer::pad_to`]).
    ///
    /// # Errors
    /// `Tokenizer` when `id` is outside the vocabulary.
    pub fn token_bytes(&self, id: TokenId) -> Result<&[u8]> {
        let (span, _) = self.span(id)?;
        Ok(&self.bytes[span.range()])
    }

    /// What `id` stands for.
    ///
    /// # Errors
    /// `Tokenizer` when `id` is outside the vocabulary.
    pub fn kind(&self, id: TokenId) -> Result<TokenKind> {
        self.span(id).map(|(_, kind)| kind)
    }

    /// True for the tokens that `tokenizer.json` flags special (BOS, EOS, padding) and no others.
    pub fn is_special(&self, id: TokenId) -> bool {
        self.kind(id).is_ok_and(|kind| kind == TokenKind::Special)
    }

    /// True for turn, `<think>`, DSML, task and the other named markers that are not flagged special.
    pub fn is_markup(&self, id: TokenId) -> bool {
        self.kind(id).is_ok_and(|kind| kind == TokenKind::Markup)
    }

    /// Id of an added token by its exact spelling, e.g. `<｜User｜>`.
    pub fn id_of(&self, marker: &str) -> Option<TokenId> {
        self.markers.get(marker)
    }

    /// Ids of all added tokens (special, markup and placeholders), in no particular order.
    pub fn added_tokens(&self) -> impl Iterator<Item = TokenId> + '_ {
        self.markers.ids()
    }

    /// One more than the largest id that has a token.
    pub fn vocab_size(&self) -> usize {
        self.spans.len()
    }

    /// Most bytes that one token stands for.
    pub fn longest_token(&self) -> usize {
        self.spans.iter().map(|span| span.len).max().unwrap_or(0)
    }

    /// The tokenizer for a model with `vocab_size` ids. Checkpoints round their vocabulary up, so the last ids may have
    /// no token; a model can choose them all the same. They are placeholders that stand for no bytes.
    ///
    /// # Errors
    /// `Tokenizer` if there are more tokens than ids.
    pub fn pad_to(mut self, vocab_size: usize) -> Result<Self> {
        if self.spans.len() > vocab_size {
            bail!(Tokenizer, "{} ids, but the model's vocab_size is {vocab_size}", self.spans.len());
        }
        self.ids = vocab_size;
        Ok(self)
    }

    fn span(&self, id: TokenId) -> Result<(Span, TokenKind)> {
        let span = self.spans.get(id as usize).copied().unwrap_or_default();
        match span.kind {
            Some(kind) => Ok((span, kind)),
            // an empty span
            None if (id as usize) < self.ids => Ok((span, TokenKind::Placeholder)),
            None => {
                let size = self.spans.len().max(self.ids);
                bail!(Tokenizer, "token id {id} is not in the vocabulary of {size} tokens")
            }
        }
    }

    /// Appends the ids of `text`, in which no added token is looked for.
    fn encode_ordinary(&self, mut text: &str, ids: &mut Vec<TokenId>) -> Result<()> {
        while !text.is_empty() {
            let (piece, rest) = if self.has_v4_splits { pieces::next_piece(text) } else { (text, "") };
            self.encode_piece(piece, ids)?;
            text = rest;
        }
        Ok(())
    }

    fn encode_piece(&self, text: &str, ids: &mut Vec<TokenId>) -> Result<()> {
        alloc::probe("encoding a text", text.len().saturating_mul(ENCODING_COST))?;
        let mut pieces = PreTokenizedString::from(text);
        if let Err(e) = self.pre_tokenizer.pre_tokenize(&mut pieces) {
            bail!(Tokenizer, "cannot split a text of {} bytes: {e}", text.len());
        }
        for (piece, _, _) in pieces.get_splits(OffsetReferential::Original, OffsetType::None) {
            match self.model.tokenize(piece) {
                Ok(tokens) => {
                    alloc::reserve("token ids", ids, tokens.len())?;
                    ids.extend(tokens.into_iter().map(|token| token.id));
                }
                Err(e) => bail!(Tokenizer, "cannot encode a piece of {} bytes: {e}", piece.len()),
            }
        }
        Ok(())
    }
}

/// As `String::from_utf8_lossy`, with memory that is reserved fallibly.
fn replace_invalid(bytes: &[u8]) -> Result<String> {
    let mut text = String::new();
    for chunk in bytes.utf8_chunks() {
        alloc::reserve_text("decoded text", &mut text, chunk.valid().len() + char::REPLACEMENT_CHARACTER.len_utf8())?;
        text.push_str(chunk.valid());
        if !chunk.invalid().is_empty() {
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }
    Ok(text)
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size()).finish_non_exhaustive()
    }
}
