//! `tokenizer.json` to [`Tokenizer`].
//!
//! Everything that lossless encoding stands on is checked here, before the `tokenizers` crate
//! builds its tables (which index without checking): plain byte-level BPE, no normaliser, splits
//! that keep every character, a token for each of the 256 bytes, merges whose parts and result
//! exist, no id used twice.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::Value;
use tokenizers::PreTokenizerWrapper;
use tokenizers::models::bpe::{BPE, Vocab};

use super::pieces::V4_SPLITS;
use super::{MarkerTrie, Span, TokenKind, Tokenizer};
use crate::TokenId;
use crate::error::{Error, ErrorKind, Result, bail};

/// The table of spans is as long as the largest id; one beyond this means a damaged file.
const MAX_ID: TokenId = (1 << 24) - 1;

/// Name parts of the reserved tokens that carry no meaning.
const PLACEHOLDER_NAMES: [&str; 2] = ["place▁holder", "place_holder"];

/// The parts of `tokenizer.json` that decide ids. `post_processor` and `truncation` only matter
/// to callers that ask the `tokenizers` crate for them, which this library never does.
#[derive(Deserialize)]
#[serde(expecting = "an object with added_tokens, pre_tokenizer and model")]
struct File {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    decoder: Value,
    model: Model,
}

#[derive(Deserialize)]
#[serde(expecting = "an added token with id and content")]
struct AddedToken {
    id: TokenId,
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    special: bool,
}

#[derive(Deserialize)]
#[serde(expecting = "a BPE model with vocab and merges")]
struct Model {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    dropout: Value,
    #[serde(default)]
    unk_token: Value,
    #[serde(default)]
    continuing_subword_prefix: Value,
    #[serde(default)]
    end_of_word_suffix: Value,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
    vocab: Vocab,
    merges: Merges,
}

/// Both spellings of the merge list that are in use: `"a b"` and `["a", "b"]`.
#[derive(Deserialize)]
#[serde(untagged, expecting = "merges must be a list of \"a b\" or of [\"a\", \"b\"]")]
enum Merges {
    Joined(Vec<String>),
    Pairs(Vec<(String, String)>),
}

pub(super) fn from_bytes(json: &[u8]) -> Result<Tokenizer> {
    let file: File = serde_json::from_slice(json)
        .map_err(|e| Error::new(ErrorKind::Tokenizer, format!("not a tokenizer.json: {e}")))?;
    check_normalizer(&file.normalizer)?;
    check_decoder(&file.decoder)?;
    check_model(&file.model)?;
    let has_v4_splits = has_v4_splits(&file.pre_tokenizer);
    let pre_tokenizer = build_pre_tokenizer(file.pre_tokenizer)?;

    let mut table = Table::default();
    table.add_vocab(&file.model.vocab)?;
    let markers = table.add_added_tokens(&file.added_tokens)?;
    let model = build_model(file.model.vocab, file.model.merges)?;

    let Table { bytes, spans } = table;
    let ids = 0;
    Ok(Tokenizer { pre_tokenizer, model, markers, bytes, spans, ids, has_v4_splits })
}

fn check_normalizer(normalizer: &Value) -> Result<()> {
    let parts = normalizer.get("normalizers").and_then(Value::as_array);
    let none = normalizer.is_null() || parts.is_some_and(Vec::is_empty);
    if !none {
        bail!(Tokenizer, "normalizer: text would be changed before encoding, V4 has none");
    }
    Ok(())
}

fn check_decoder(decoder: &Value) -> Result<()> {
    match decoder.get("type").and_then(Value::as_str) {
        Some("ByteLevel") => Ok(()),
        other => bail!(Tokenizer, "decoder: expected ByteLevel, found {}", other.unwrap_or("none")),
    }
}

fn check_model(model: &Model) -> Result<()> {
    if let Some(kind) = model.kind.as_deref().filter(|&kind| kind != "BPE") {
        bail!(Tokenizer, "model.type: expected BPE, found {kind}");
    }
    let absent = [
        ("dropout", &model.dropout),
        ("unk_token", &model.unk_token),
        ("continuing_subword_prefix", &model.continuing_subword_prefix),
        ("end_of_word_suffix", &model.end_of_word_suffix),
    ];
    for (name, value) in absent {
        if !value.is_null() && value.as_str() != Some("") {
            bail!(Tokenizer, "model.{name}: byte-level BPE has none, found {value}");
        }
    }
    if model.byte_fallback {
        bail!(Tokenizer, "model.byte_fallback: byte-level BPE does not use it");
    }
    if model.ignore_merges {
        bail!(Tokenizer, "model.ignore_merges: V4's ids come from its merges");
    }
    Ok(())
}

/// Accepts only a sequence of splits that keep every character, closed by `ByteLevel`.
fn build_pre_tokenizer(value: Value) -> Result<PreTokenizerWrapper> {
    let parts = match value.get("pretokenizers").and_then(Value::as_array) {
        Some(parts) => parts.as_slice(),
        None => std::slice::from_ref(&value),
    };
    let Some((last, splits)) = parts.split_last() else {
        bail!(Tokenizer, "pre_tokenizer: empty, expected splits and ByteLevel");
    };
    let text = |part: &Value, key: &str| part.get(key).and_then(Value::as_str).map(str::to_owned);
    for (index, split) in splits.iter().enumerate() {
        let (kind, behavior) = (text(split, "type"), text(split, "behavior"));
        if kind.as_deref() != Some("Split") || behavior.as_deref() != Some("Isolated") {
            bail!(Tokenizer, "pre_tokenizer {index}: expected an isolating Split");
        }
    }
    if text(last, "type").as_deref() != Some("ByteLevel") {
        bail!(Tokenizer, "pre_tokenizer: the last part must be ByteLevel");
    }
    if last.get("add_prefix_space").and_then(Value::as_bool) != Some(false) {
        bail!(Tokenizer, "pre_tokenizer: ByteLevel.add_prefix_space must be false");
    }
    serde_json::from_value(value).map_err(|e| Error::new(ErrorKind::Tokenizer, format!("pre_tokenizer: {e}")))
}

/// Whether the splits are exactly those that [`V4_SPLITS`] lists, one behind the other, `ByteLevel` splitting no further.
fn has_v4_splits(value: &Value) -> bool {
    let Some([splits @ .., last]) = value.get("pretokenizers").and_then(Value::as_array).map(Vec::as_slice) else {
        return false;
    };
    let patterns = splits.iter().map(|split| match split.get("invert") {
        None | Some(Value::Bool(false)) => split.get("pattern")?.get("Regex")?.as_str(),
        Some(_) => None,
    });
    patterns.eq(V4_SPLITS.map(Some)) && last.get("use_regex") == Some(&Value::Bool(false))
}

fn build_model(vocab: Vocab, merges: Merges) -> Result<BPE> {
    let pairs = match merges {
        Merges::Pairs(pairs) => pairs,
        Merges::Joined(lines) => {
            lines.iter().enumerate().map(|(rank, line)| split_merge(rank, line)).collect::<Result<_>>()?
        }
    };
    let mut joined = String::new();
    for (rank, (left, right)) in pairs.iter().enumerate() {
        joined.clear();
        joined.push_str(left);
        joined.push_str(right);
        if let Some(missing) = [left, right, &joined].into_iter().find(|t| !vocab.contains_key(*t)) {
            bail!(Tokenizer, "model.merges {rank}: {missing:?} is not in the vocabulary");
        }
    }
    BPE::builder()
        .vocab_and_merges(vocab, pairs)
        .build()
        .map_err(|e| Error::new(ErrorKind::Tokenizer, format!("model: {e}")))
}

fn split_merge(rank: usize, line: &str) -> Result<(String, String)> {
    match line.split_once(' ') {
        Some((left, right)) if !left.is_empty() && !right.is_empty() && !right.contains(' ') => {
            Ok((left.to_owned(), right.to_owned()))
        }
        _ => bail!(Tokenizer, "model.merges {rank}: {line:?} is not two tokens"),
    }
}

/// Collects the bytes of every id.
#[derive(Default)]
struct Table {
    bytes: Vec<u8>,
    spans: Vec<Span>,
}

impl Table {
    fn add_vocab(&mut self, vocab: &Vocab) -> Result<()> {
        let alphabet = byte_alphabet();
        let mut covered = [false; 256];
        let mut bytes = Vec::new();
        for (token, &id) in vocab {
            bytes.clear();
            bytes.extend(token.chars().map_while(|c| alphabet.get(&c)));
            // BOS, EOS and padding sit in the base vocabulary too, spelt outside the alphabet.
            let is_piece = bytes.len() == token.chars().count();
            if !is_piece {
                self.insert(id, token, token.as_bytes(), None)?;
                continue;
            }
            if let [byte] = bytes[..] {
                covered[usize::from(byte)] = true;
            }
            self.insert(id, token, &bytes, Some(TokenKind::Ordinary))?;
        }
        if let Some(byte) = covered.iter().position(|&covered| !covered) {
            bail!(Tokenizer, "model.vocab: no token for byte {byte:#04x}, text would be lost");
        }
        Ok(())
    }

    fn add_added_tokens(&mut self, added: &[AddedToken]) -> Result<MarkerTrie> {
        let mut markers = MarkerTrie::default();
        for token in added {
            let AddedToken { id, content, .. } = token;
            if content.is_empty() {
                bail!(Tokenizer, "added_tokens: id {id} is empty");
            }
            if token.single_word || token.lstrip || token.rstrip {
                bail!(Tokenizer, "added_tokens: {content:?} takes its surroundings into account");
            }
            let kind = if token.special {
                TokenKind::Special
            } else if PLACEHOLDER_NAMES.iter().any(|name| content.contains(name)) {
                TokenKind::Placeholder
            } else {
                TokenKind::Markup
            };
            self.add_marker(*id, content, kind)?;
            if !markers.insert(content, *id) {
                bail!(Tokenizer, "added_tokens: {content:?} is listed twice");
            }
        }
        let text_without_kind = self.spans.iter().find(|span| span.used && span.kind.is_none());
        if let Some(span) = text_without_kind {
            let token = String::from_utf8_lossy(&self.bytes[span.range()]);
            bail!(Tokenizer, "model.vocab: {token:?} is neither byte-level nor an added token");
        }
        Ok(markers)
    }

    /// Gives an added token its kind; it may be in the base vocabulary, but not as a piece of text,
    /// or user text could become it.
    fn add_marker(&mut self, id: TokenId, content: &str, kind: TokenKind) -> Result<()> {
        let Some(span) = self.spans.get_mut(id as usize).filter(|span| span.used) else {
            return self.insert(id, content, content.as_bytes(), Some(kind));
        };
        if span.kind.is_some() || self.bytes[span.range()] != *content.as_bytes() {
            bail!(Tokenizer, "added_tokens: id {id} of {content:?} belongs to another token");
        }
        span.kind = Some(kind);
        Ok(())
    }

    fn insert(&mut self, id: TokenId, token: &str, bytes: &[u8], kind: Option<TokenKind>) -> Result<()> {
        if id > MAX_ID {
            bail!(Tokenizer, "id {id} of {token:?} is beyond {MAX_ID}");
        }
        let index = id as usize;
        if index >= self.spans.len() {
            self.spans.resize(index + 1, Span::default());
        }
        if self.spans[index].used {
            bail!(Tokenizer, "id {id} of {token:?} belongs to another token");
        }
        let start = self.bytes.len();
        self.bytes.extend_from_slice(bytes);
        self.spans[index] = Span { start, len: bytes.len(), used: true, kind };
        Ok(())
    }
}

/// The printable stand-ins of byte-level BPE: bytes that print stand for themselves, the others
/// for U+0100, U+0101, … in order (GPT-2's table).
fn byte_alphabet() -> HashMap<char, u8> {
    let mut next = 0x100;
    let mut stand_in = |byte: u8| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        _ => {
            next += 1;
            char::from_u32(next - 1).expect("U+0100..U+0144 are assigned characters")
        }
    };
    (0..=u8::MAX).map(|byte| (stand_in(byte), byte)).collect()
}
