//! Token ids to text as they arrive.
//!
//! A byte-level token may end within a code point. Text comes out only when its last byte has
//! arrived, and the concatenation of everything that came out equals decoding all ids at once.

use std::sync::Arc;

use super::Tokenizer;
use crate::TokenId;
use crate::error::Result;

/// Incremental decoder of one token stream.
///
/// ```
/// use dsv4::Markup;
/// use dsv4::tokenizer::Detokenizer;
/// let model = dsv4::Model::open("examples/models/tiny-v4")?;
/// let tokenizer = model.tokenizer()?;
/// let mut stream = Detokenizer::new(tokenizer.clone());
/// let mut text = String::new();
/// for token in tokenizer.encode("a fine day 😀", Markup::Text)? {
///     text.push_str(&stream.push(token)?); // complete characters only
/// }
/// text.push_str(&stream.finish());
/// assert_eq!(text, "a fine day 😀");
/// # Ok::<(), dsv4::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    utf8: Utf8Stream,
}

impl Detokenizer {
    /// Starts an empty stream.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer, utf8: Utf8Stream::default() }
    }

    /// Adds one token and returns the text it completes; empty while a code point is unfinished.
    /// (The token's own bytes are [`Tokenizer::token_bytes`].)
    ///
    /// # Errors
    /// `Tokenizer` when `id` is outside the vocabulary; the stream is unchanged.
    pub fn push(&mut self, id: TokenId) -> Result<String> {
        let bytes = self.tokenizer.token_bytes(id)?;
        Ok(self.utf8.push(bytes))
    }

    /// Bytes of a code point that is not complete yet: at most three.
    pub fn pending(&self) -> &[u8] {
        self.utf8.pending()
    }

    /// Ends the stream: U+FFFD when it stopped within a code point, else nothing. The
    /// detokenizer is then empty and may be used for another stream.
    pub fn finish(&mut self) -> String {
        self.utf8.finish()
    }
}

/// Bytes to text, incrementally; invalid sequences become U+FFFD as in `String::from_utf8_lossy`.
///
/// ```
/// let mut stream = dsv4::tokenizer::Utf8Stream::default();
/// assert_eq!(stream.push(b"caf\xc3"), "caf");
/// assert_eq!(stream.push(b"\xa9"), "é");
/// assert_eq!(stream.finish(), "");
/// ```
#[derive(Clone, Debug, Default)]
pub struct Utf8Stream {
    /// The start of a code point whose end has not arrived.
    pending: Vec<u8>,
}

impl Utf8Stream {
    /// Adds bytes and returns the text they complete.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        let mut done = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            done += chunk.valid().len();
            let invalid = chunk.invalid();
            let at_end = done + invalid.len() == self.pending.len();
            if at_end && may_continue(invalid) {
                break;
            }
            if !invalid.is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
                done += invalid.len();
            }
        }
        self.pending.drain(..done);
        text
    }

    /// Bytes of a code point that is not complete yet.
    pub fn pending(&self) -> &[u8] {
        &self.pending
    }

    /// Ends the stream: U+FFFD for an incomplete code point, else nothing.
    pub fn finish(&mut self) -> String {
        let incomplete = !self.pending.is_empty();
        self.pending.clear();
        if incomplete { char::REPLACEMENT_CHARACTER.to_string() } else { String::new() }
    }
}

/// True when more bytes could make a code point of `bytes`, an invalid chunk at the end of input.
fn may_continue(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|e| e.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fed(pieces: &[&[u8]]) -> String {
        let mut stream = Utf8Stream::default();
        let mut text: String = pieces.iter().map(|piece| stream.push(piece)).collect();
        text.push_str(&stream.finish());
        text
    }

    #[test]
    fn any_split_of_any_bytes_decodes_as_the_whole() {
        let samples: [&[u8]; 6] = [
            "aé€😀z".as_bytes(),
            b"\xe2\x82",
            b"a\xff\xe2\x82b\x80",
            b"\xf0\x9f\x98",
            b"\xed\xa0\x80\xf4\x90\x80\x80",
            b"\xc0\xaf\xe2",
        ];
        for sample in samples {
            let whole = String::from_utf8_lossy(sample);
            for first in 0..=sample.len() {
                for second in first..=sample.len() {
                    let pieces = [&sample[..first], &sample[first..second], &sample[second..]];
                    assert_eq!(fed(&pieces), whole, "{sample:x?} cut at {first} and {second}");
                }
            }
        }
    }

    #[test]
    fn an_unfinished_code_point_is_held_back() {
        let mut stream = Utf8Stream::default();
        assert_eq!(stream.push(b"a\xf0\x9f"), "a");
        assert_eq!(stream.pending(), b"\xf0\x9f");
        assert_eq!(stream.push(b"\x98\x80"), "😀");
        assert_eq!(stream.pending(), b"");
    }
}
