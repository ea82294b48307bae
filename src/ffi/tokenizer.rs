//! Tokenizer
//!
//! Text to token ids and back. The tokenizer belongs to the model, is read from `tokenizer.json` at its first use (or at
//! opening, see `dsv4_model_options`), and may be used from several threads at once.
//!
//! Functions that fill a buffer of the caller's always report the length that is needed. With a NULL buffer of capacity
//! 0 they report the length and succeed; with a buffer that is too small they return `BUFFER_TOO_SMALL` and the length.

use std::ffi::c_char;
use std::sync::Arc;

use super::args::{Buffer, Out, c_bytes, choice, free, object, slice, text};
use super::guard::{guard, guard_value};
use super::handle::Exclusive;
use super::model::dsv4_model;
use super::status::{Fault, dsv4_error, dsv4_status};
use crate::error::{Error, ErrorKind, Result, beginning};
use crate::tokenizer::{Detokenizer, Markup};

/// Whether text that spells a control token becomes that token.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum dsv4_markup {
    /// Never. The right choice for everything that a user wrote.
    Text = 0,
    /// Yes, as the official encoder does with a whole prompt.
    Parse = 1,
}

const MARKUPS: [(dsv4_markup, Markup); 2] = [(dsv4_markup::Text, Markup::Text), (dsv4_markup::Parse, Markup::Parse)];

/// Encodes `text_len` bytes of UTF-8 to token ids. No begin-of-sentence token is added. `markup` is a `dsv4_markup`.
///
/// `*n_tokens` receives the number of tokens and `tokens`, an array with room for `capacity`, the tokens. A text never
/// has more tokens than bytes, so a capacity of `text_len` is always enough.
///
/// Long texts are encoded in pieces, so that what is needed beside the tokens does not grow with the text; a word without
/// an end takes up to 400 bytes for each of its own.
///
/// Errors: `BUFFER_TOO_SMALL`; `OUT_OF_MEMORY` with the bytes; `INVALID_ARGUMENT`, for example for text that is not
/// UTF-8; `NOT_FOUND`, `IO` and `TOKENIZER` if the model's tokenizer cannot be read.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_tokenizer_encode(
    model: *const dsv4_model,
    text: *const c_char,
    text_len: usize,
    markup: i32,
    tokens: *mut u32,
    capacity: usize,
    n_tokens: *mut usize,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let n_tokens = unsafe { Out::new(n_tokens, "n_tokens") };
    // SAFETY: as above.
    let tokens = unsafe { Buffer::new(tokens, capacity, "tokens", n_tokens) };
    guard("dsv4_tokenizer_encode", err, || {
        // SAFETY: as above.
        let model = unsafe { object(model, "model") }?.get()?;
        // SAFETY: as above.
        let text = unsafe { self::text(text, text_len, "text") }?;
        let markup = choice(markup, "markup", &MARKUPS, |markup| markup as i32)?;
        tokens.check()?;
        tokens.fill(&model.model.tokenizer()?.encode(text, markup)?, false)
    })
}

/// Decodes `n_tokens` ids to text. Bytes that are not UTF-8 become U+FFFD; for text that arrives token by token use a
/// `dsv4_detokenizer`, which waits for incomplete characters. Ids without a token, with which checkpoints round their
/// vocabulary up, give no text.
///
/// `*text_len` receives the length in bytes and `text`, an array with room for `capacity` bytes, the text and a final
/// NUL, so that `capacity` must be at least the length plus 1.
///
/// Errors: `BUFFER_TOO_SMALL`; `OUT_OF_MEMORY`; `TOKENIZER` for an id outside the vocabulary; as `dsv4_tokenizer_encode`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_tokenizer_decode(
    model: *const dsv4_model,
    tokens: *const u32,
    n_tokens: usize,
    text: *mut c_char,
    capacity: usize,
    text_len: *mut usize,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let text_len = unsafe { Out::new(text_len, "text_len") };
    // SAFETY: as above; a `char` may be any byte.
    let text = unsafe { Buffer::new(text.cast::<u8>(), capacity, "text", text_len) };
    guard("dsv4_tokenizer_decode", err, || {
        // SAFETY: as above.
        let model = unsafe { object(model, "model") }?.get()?;
        // SAFETY: as above.
        let tokens = unsafe { slice(tokens, n_tokens, "tokens") }?;
        text.check()?;
        text.fill(model.model.tokenizer()?.decode(tokens)?.as_bytes(), true)
    })
}

/// The bytes that one token stands for: a control token's spelling, or a piece of text that may begin or end within a
/// character; none for an id without a token. `*bytes` points to `*len` bytes without a final NUL, which live as long as
/// the model or an object made from it.
///
/// Errors: `TOKENIZER` for an id outside the vocabulary; as `dsv4_tokenizer_encode`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_tokenizer_token_bytes(
    model: *const dsv4_model,
    token: u32,
    bytes: *mut *const c_char,
    len: *mut usize,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let bytes = unsafe { Out::new(bytes, "bytes") };
    // SAFETY: as above.
    let len = unsafe { Out::new(len, "len") };
    guard("dsv4_tokenizer_token_bytes", err, || {
        // SAFETY: as above.
        let model = unsafe { object(model, "model") }?.get()?;
        bytes.check()?;
        len.check()?;
        let found = model.model.tokenizer()?.token_bytes(token)?;
        bytes.set(found.as_ptr().cast());
        len.set(found.len());
        Ok(())
    })
}

/// The id of a control token by its exact spelling (`text_len` bytes of UTF-8), for example `<think>`.
///
/// Errors: `NOT_FOUND` if there is no such token; as `dsv4_tokenizer_encode`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_tokenizer_token_id(
    model: *const dsv4_model,
    text: *const c_char,
    text_len: usize,
    token: *mut u32,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let token = unsafe { Out::new(token, "token") };
    guard("dsv4_tokenizer_token_id", err, || {
        // SAFETY: as above.
        let model = unsafe { object(model, "model") }?.get()?;
        // SAFETY: as above.
        let text = unsafe { self::text(text, text_len, "text") }?;
        token.check()?;
        let missing =
            || Error::new(ErrorKind::NotFound, format!("there is no control token {:?}", beginning(text, 100)));
        token.set(model.model.tokenizer()?.id_of(text).ok_or_else(missing)?);
        Ok(())
    })
}

/// Decodes one stream of tokens, giving out text only once its characters are complete. One thread at a time; a second
/// one gets `BUSY`.
pub struct dsv4_detokenizer {
    exclusive: Exclusive<Stream>,
}

struct Stream {
    detokenizer: Detokenizer,
    /// What the last call gave out, and a NUL.
    text: Vec<u8>,
}

/// Starts an empty stream. `*out` receives it, to be freed with `dsv4_detokenizer_free`.
///
/// Errors: `NOT_FOUND`, `IO`, `OUT_OF_MEMORY` and `TOKENIZER` if the model's tokenizer cannot be read.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_detokenizer_new(
    model: *const dsv4_model,
    out: *mut *mut dsv4_detokenizer,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let out = unsafe { Out::new(out, "out") };
    guard("dsv4_detokenizer_new", err, || {
        // SAFETY: as above.
        let model = unsafe { object(model, "model") }?.get()?;
        out.check()?;
        let detokenizer = Detokenizer::new(Arc::clone(model.model.tokenizer()?));
        let stream = Stream { detokenizer, text: Vec::new() };
        out.give(dsv4_detokenizer { exclusive: Exclusive::new("the detokenizer", stream) });
        Ok(())
    })
}

/// Frees a detokenizer. `detokenizer` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dsv4_detokenizer_free(detokenizer: *mut dsv4_detokenizer) {
    guard_value("dsv4_detokenizer_free", (), || {
        // SAFETY: NULL or an object that nobody uses any more, by the header's contract.
        unsafe { free(detokenizer) }
    });
}

/// Adds one token. `*text` receives the text that it completes, `*len` bytes of UTF-8 and a final NUL, valid until the
/// next call with this detokenizer; empty while a character is incomplete.
///
/// Errors: `TOKENIZER` for an id outside the vocabulary; the stream is unchanged.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_detokenizer_push(
    detokenizer: *mut dsv4_detokenizer,
    token: u32,
    text: *mut *const c_char,
    len: *mut usize,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let text = unsafe { Out::new(text, "text") };
    // SAFETY: as above.
    let len = unsafe { Out::new(len, "len") };
    guard("dsv4_detokenizer_push", err, || {
        // SAFETY: as above.
        let mut stream = unsafe { object(detokenizer, "detokenizer") }?.exclusive.get()?;
        text.check()?;
        len.check()?;
        let piece = stream.detokenizer.push(token)?;
        stream.keep(&piece, &text, &len)
    })
}

/// Ends the stream: `*text` is U+FFFD if it stopped within a character, else empty; as in `dsv4_detokenizer_push`. The
/// detokenizer can be used for another stream.
///
/// Errors: only `INVALID_ARGUMENT`, `BUSY` and `POISONED`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_detokenizer_finish(
    detokenizer: *mut dsv4_detokenizer,
    text: *mut *const c_char,
    len: *mut usize,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let text = unsafe { Out::new(text, "text") };
    // SAFETY: as above.
    let len = unsafe { Out::new(len, "len") };
    guard("dsv4_detokenizer_finish", err, || {
        // SAFETY: as above.
        let mut stream = unsafe { object(detokenizer, "detokenizer") }?.exclusive.get()?;
        text.check()?;
        len.check()?;
        let piece = stream.detokenizer.finish();
        stream.keep(&piece, &text, &len)
    })
}

impl Stream {
    fn keep(&mut self, piece: &str, text: &Out<*const c_char>, len: &Out<usize>) -> Result<(), Fault> {
        self.text = c_bytes(piece)?;
        len.set(piece.len());
        text.set(self.text.as_ptr().cast());
        Ok(())
    }
}
