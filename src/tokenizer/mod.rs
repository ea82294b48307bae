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

use std::path::Path;

use tokenizers::{
    Model, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, PreTokenizerWrapper, models::bpe::BPE,
};

use crate::TokenId;
use crate::error::{Error, ErrorKind, Result, bail};

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
    /// A reserved added token without meaning (`<｜place▁holder▁no▁0｜>`, …).
    Placeholder,
}

/// The tokenizer of one checkpoint. Immutable; every method may be called from several threads.
pub struct Tokenizer {
    pre_tokenizer: PreTokenizerWrapper,
    model: BPE,
    markers: MarkerTrie,
    /// Bytes of every id, laid end to end; `spans[id]` finds them.
    bytes: Vec<u8>,
    spans: Vec<Span>,
}

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
    /// `NotFound` or `Io` when the file cannot be read, `Tokenizer` when it is not a byte-level BPE
    /// tokenizer that covers all 256 bytes; the message names the file.
    pub fn from_file(path: &Path) -> Result<Self> {
        let json = std::fs::read(path).map_err(|e| Error::io(path, &e))?;
        Self::from_bytes(&json).map_err(|e| e.context(path.display()))
    }

    /// Reads the contents of a `tokenizer.json`.
    ///
    /// # Errors
    /// `Tokenizer`, as [`Tokenizer::from_file`].
    pub fn from_bytes(json: &[u8]) -> Result<Self> {
        load::from_bytes(json)
    }

    /// Token ids of `text`; no BOS or EOS is added.
    ///
    /// # Errors
    /// `Tokenizer` when the pre-tokeniser gives up on the text.
    pub fn encode(&self, text: &str, markup: Markup) -> Result<Vec<TokenId>> {
        let mut ids = Vec::new();
        if markup == Markup::Text {
            self.encode_ordinary(text, &mut ids)?;
            return Ok(ids);
        }
        let mut rest = text;
        while let Some((range, id)) = self.markers.find(rest) {
            self.encode_ordinary(&rest[..range.start], &mut ids)?;
            ids.push(id);
            rest = &rest[range.end..];
        }
        self.encode_ordinary(rest, &mut ids)?;
        Ok(ids)
    }

    /// Text of `ids`; bytes that are not UTF-8 become U+FFFD, as `String::from_utf8_lossy` does.
    ///
    /// # Errors
    /// `Tokenizer`, naming the first id outside the vocabulary.
    pub fn decode(&self, ids: &[TokenId]) -> Result<String> {
        let bytes = self.decode_bytes(ids)?;
        Ok(String::from_utf8(bytes).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned()))
    }

    /// Bytes of `ids`, exactly; they need not be UTF-8.
    ///
    /// # Errors
    /// `Tokenizer`, naming the first id outside the vocabulary.
    pub fn decode_bytes(&self, ids: &[TokenId]) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        for &id in ids {
            bytes.extend_from_slice(self.token_bytes(id)?);
        }
        Ok(bytes)
    }

    /// Bytes that one token stands for: a control token's spelling, or a piece of text that may
    /// end within a code point.
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

    /// One more than the largest id.
    pub fn vocab_size(&self) -> usize {
        self.spans.len()
    }

    fn span(&self, id: TokenId) -> Result<(Span, TokenKind)> {
        let found = self.spans.get(id as usize).and_then(|&span| Some((span, span.kind?)));
        found.ok_or_else(|| {
            let size = self.spans.len();
            Error::new(ErrorKind::Tokenizer, format!("token id {id} is not in the vocabulary of {size} tokens"))
        })
    }

    /// Appends the ids of `text`, in which no added token is looked for.
    fn encode_ordinary(&self, text: &str, ids: &mut Vec<TokenId>) -> Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        let mut pieces = PreTokenizedString::from(text);
        if let Err(e) = self.pre_tokenizer.pre_tokenize(&mut pieces) {
            bail!(Tokenizer, "cannot split a text of {} bytes: {e}", text.len());
        }
        for (piece, _, _) in pieces.get_splits(OffsetReferential::Original, OffsetType::None) {
            match self.model.tokenize(piece) {
                Ok(tokens) => ids.extend(tokens.into_iter().map(|token| token.id)),
                Err(e) => bail!(Tokenizer, "cannot encode a piece of {} bytes: {e}", piece.len()),
            }
        }
        Ok(())
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size()).finish_non_exhaustive()
    }
}
