//! Generation
//!
//! The loop of sampling, feeding and decoding, with stop conditions, in two forms: pull one piece after the other with
//! `dsv4_generation_next`, which needs no callback, or have them pushed by `dsv4_session_generate`.
//!
//! The last token that was handed out is not in the session: its logits were not needed. To go on from the text, feed it:
//!
//! ```c
//! dsv4_session_feed(session, &piece.token, 1, NULL, NULL, &err);
//! ```

use std::ffi::{c_char, c_void};
use std::ptr;
use std::sync::Arc;

use super::args::{
    Options, Out, OutStruct, SizedStruct, c_bytes, c_text, flag, free_own, init_options, object, options, slice,
};
use super::guard::{guard, guard_value, unfenced};
use super::handle::Exclusive;
use super::model::reserved;
use super::sampler::dsv4_sampler;
use super::session::dsv4_session;
use super::status::{dsv4_error, dsv4_status};
use crate::alloc;
use crate::engine::now;
use crate::error::{Result, bail};
use crate::sampler::Sampler;
use crate::session::{Decoding, Finish, GenerateOptions, Piece, Session};

/// A running generation of one session with one sampler. One thread at a time.
///
/// A token is sampled, handed out, and fed to the session when the next one is asked for; so the session holds all tokens
/// but the last one that was handed out (to go on from the text, feed that one). Between two calls the session may be
/// read, but not fed or cleared.
pub struct dsv4_generation {
    exclusive: Exclusive<Running>,
}

/// When a generation ends. Fill with `dsv4_generation_options_init`, then change what you like. By default it ends at the
/// model's end-of-sentence token or when the context is full.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dsv4_generation_options {
    /// `sizeof(dsv4_generation_options)`.
    pub size: usize,
    /// Most tokens to generate; 0, the default, is no limit but the context.
    pub max_tokens: u64,
    /// Tokens that end the generation; their text is not part of it. NULL if there are none. Read during the call only.
    pub stop_tokens: *const u32,
    /// Number of stop tokens; 0 by default.
    pub n_stop_tokens: usize,
    /// Texts that end the generation, each of UTF-8 that ends with a NUL; they are not part of the output, not even in
    /// parts. NULL if there are none. Read during the call only.
    pub stop_strings: *const *const c_char,
    /// Number of stop strings; 0 by default.
    pub n_stop_strings: usize,
    /// 1 goes on behind the end-of-sentence token; 0 by default.
    pub ignore_eos: i32,
    /// 0.
    pub reserved: i32,
}

// SAFETY: `repr(C)`, `size` first, plain fields without padding.
unsafe impl SizedStruct for dsv4_generation_options {
    const NAME: &'static str = "dsv4_generation_options";
}

impl Options for dsv4_generation_options {
    fn defaults() -> Self {
        Self {
            size: size_of::<Self>(),
            max_tokens: 0,
            stop_tokens: ptr::null(),
            n_stop_tokens: 0,
            stop_strings: ptr::null(),
            n_stop_strings: 0,
            ignore_eos: 0,
            reserved: 0,
        }
    }
}

/// Why a generation ended.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum dsv4_finish {
    /// It has not.
    None = 0,
    /// The model's end-of-sentence token.
    Eos = 1,
    /// One of the stop tokens; `finish_value` is its id.
    Token = 2,
    /// One of the stop strings; `finish_value` is its index.
    String = 3,
    /// `max_tokens` tokens were generated.
    MaxTokens = 4,
    /// The session's context is full.
    ContextFull = 5,
}

/// One generated token and the text that became certain with it. Set `size` to `sizeof(dsv4_piece)` before the call that
/// fills it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dsv4_piece {
    /// `sizeof(dsv4_piece)`.
    pub size: usize,
    /// `text_len` bytes of complete UTF-8 and a final NUL, valid until the next call with this generation. Empty while a
    /// character or a possible stop string is incomplete. Control tokens come spelled out, as `<think>` does;
    /// `dsv4_chat_parser` tells them from text.
    pub text: *const c_char,
    /// Bytes of `text`, without the NUL.
    pub text_len: usize,
    /// The token. A stop token is reported too.
    pub token: u32,
    /// A `dsv4_finish`: anything but `NONE` says that this is the last piece.
    pub finish: i32,
    /// See `dsv4_finish`; otherwise 0.
    pub finish_value: u32,
    /// 0.
    pub reserved: u32,
}

// SAFETY: `repr(C)`, `size` first, plain fields without padding.
unsafe impl SizedStruct for dsv4_piece {
    const NAME: &'static str = "dsv4_piece";
}

/// Told on the calling thread of each piece of a `dsv4_session_generate`; `piece` and its text are valid during the call
/// only. Return 0 to go on; anything else cancels. It must return (no `longjmp`, no C++ exception). It may read the
/// session (`dsv4_session_get_info`, `_logits`, `_tokens`) and cancel it; for everything else the session is `BUSY`.
pub type dsv4_piece_callback = Option<unsafe extern "C" fn(userdata: *mut c_void, piece: *const dsv4_piece) -> i32>;

/// Sets every default in `options`, a struct of `size` bytes. Use `dsv4_generation_options_init`, which passes the size
/// as your header has it. `options` may be NULL; then nothing happens.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dsv4_generation_options_init_sized(options: *mut dsv4_generation_options, size: usize) {
    guard_value("dsv4_generation_options_init_sized", (), || {
        // SAFETY: NULL or `size` bytes by the header's contract.
        unsafe { init_options(options, size) }
    });
}

/// Starts a generation from the logits of `session`. `options` may be NULL. `*out` receives it, to be freed with
/// `dsv4_generation_free`; nothing is computed yet. It keeps session and sampler alive.
///
/// Errors: `INVALID_ARGUMENT` if the session has no logits, or for an option out of range; `OUT_OF_MEMORY`; `NOT_FOUND`,
/// `IO` and `TOKENIZER` if the model's tokenizer cannot be read.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_generation_new(
    session: *mut dsv4_session,
    sampler: *mut dsv4_sampler,
    options: *const dsv4_generation_options,
    out: *mut *mut dsv4_generation,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let out = unsafe { Out::new(out, "out") };
    guard("dsv4_generation_new", err, || {
        // SAFETY: as above.
        let running = unsafe { Running::start(session, sampler, options, || out.check()) }?;
        out.give(dsv4_generation { exclusive: Exclusive::new("the generation", running).bound() });
        Ok(())
    })
}

/// Frees a generation, which ends it; the session can go on. `generation` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dsv4_generation_free(generation: *mut dsv4_generation) {
    guard_value("dsv4_generation_free", (), || {
        // SAFETY: NULL or an object that nobody uses any more, by the header's contract.
        unsafe { free_own(generation, |generation| generation.exclusive.is_inherited()) }
    });
}

/// Generates one token. After the last piece it gives the same `finish` again, with token 0 and no text.
///
/// Errors: `BUSY` if generation, session or sampler is in use; `INVALID_ARGUMENT` if the session was fed or cleared since
/// the last piece; those of `dsv4_session_feed` and `dsv4_sampler_sample`. After an error other than `PANIC` call it
/// again to go on.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_generation_next(
    generation: *mut dsv4_generation,
    piece: *mut dsv4_piece,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let piece = unsafe { OutStruct::new(piece, "piece") };
    guard("dsv4_generation_next", err, || {
        // SAFETY: as above.
        let mut running = unsafe { object(generation, "generation") }?.exclusive.get()?;
        piece.check()?;
        piece.set(running.next()?);
        Ok(())
    })
}

/// Ends a generation before its time, for example after `CANCELLED`: `*text` receives the text that was held back because
/// it could have become a stop string or because a character was incomplete (U+FFFD then), `*len` bytes of UTF-8 and a
/// final NUL, valid until the next call with this generation.
///
/// Errors: only `INVALID_ARGUMENT`, `BUSY` and `POISONED`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_generation_finish(
    generation: *mut dsv4_generation,
    text: *mut *const c_char,
    len: *mut usize,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let text = unsafe { Out::new(text, "text") };
    // SAFETY: as above.
    let len = unsafe { Out::new(len, "len") };
    guard("dsv4_generation_finish", err, || {
        // SAFETY: as above.
        let mut running = unsafe { object(generation, "generation") }?.exclusive.get()?;
        text.check()?;
        len.check()?;
        running.end()?;
        text.set(running.text.as_ptr().cast());
        len.set(running.text.len() - 1);
        Ok(())
    })
}

/// Generates to the end, telling `callback` of each piece. `options` may be NULL, `callback` may be NULL, `userdata` may
/// be NULL. `*finish` receives the `dsv4_finish`.
///
/// Errors: `CANCELLED` if the callback or `dsv4_session_cancel` asks for it; otherwise as `dsv4_generation_new` and
/// `dsv4_generation_next`. The tokens that were told of are in the session, but for the last: to go on from the text, feed
/// `piece->token` of the last piece.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_session_generate(
    session: *mut dsv4_session,
    sampler: *mut dsv4_sampler,
    options: *const dsv4_generation_options,
    callback: dsv4_piece_callback,
    userdata: *mut c_void,
    finish: *mut i32,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let finish = unsafe { Out::new(finish, "finish") };
    guard("dsv4_session_generate", err, || {
        // SAFETY: as above.
        let mut running = unsafe { Running::start(session, sampler, options, || finish.check()) }?;
        loop {
            let piece = running.next()?;
            let _reading = running.session.hold();
            // SAFETY: the host gave function and userdata to be called so during this call.
            let stop =
                callback.is_some_and(|callback| unfenced(|| unsafe { callback(userdata, &raw const piece) }) != 0);
            if piece.finish != dsv4_finish::None as i32 {
                finish.set(piece.finish);
                return Ok(());
            }
            if stop {
                return Err(crate::Error::new(crate::ErrorKind::Cancelled, "cancelled by the callback").into());
            }
        }
    })
}

/// A generation and the objects that it runs on.
struct Running {
    session: Arc<Exclusive<Session>>,
    sampler: Arc<Exclusive<Sampler>>,
    decoding: Decoding,
    /// Ended by `dsv4_generation_finish`.
    ended: bool,
    /// What the next call gives, if the memory for its text was refused to the last one.
    unsent: Option<Piece>,
    /// Text of the last piece, and a NUL.
    text: Vec<u8>,
}

impl Running {
    /// # Safety
    /// The contract of `dsv4_generation_new`.
    unsafe fn start(
        session: *mut dsv4_session,
        sampler: *mut dsv4_sampler,
        options: *const dsv4_generation_options,
        check_output: impl FnOnce() -> Result<()>,
    ) -> Result<Self> {
        // SAFETY: by the contract above.
        let session = unsafe { object(session, "session") }?;
        let using = session.exclusive.get()?;
        // SAFETY: as above.
        let sampler = unsafe { object(sampler, "sampler") }?;
        drop(sampler.exclusive.get()?);
        // SAFETY: as above.
        let options = unsafe { self::options(options) }?;
        check_output()?;
        // SAFETY: as above; the arrays are read during this call only.
        let decoding = Decoding::new(&using, unsafe { read(&options) }?)?;
        Ok(Self {
            session: Arc::clone(&session.exclusive),
            sampler: Arc::clone(&sampler.exclusive),
            decoding,
            ended: false,
            unsent: None,
            text: vec![0],
        })
    }

    fn next(&mut self) -> Result<dsv4_piece> {
        let piece = match self.unsent.take() {
            Some(piece) => piece,
            None => self.advance()?,
        };
        let token = piece.token;
        self.keep(piece)?;
        let (finish, finish_value) = number(self.decoding.finish());
        Ok(dsv4_piece {
            size: size_of::<dsv4_piece>(),
            text: self.text.as_ptr().cast(),
            text_len: self.text.len() - 1,
            token,
            finish: finish as i32,
            finish_value,
            reserved: 0,
        })
    }

    /// The next piece; after the end one without text.
    fn advance(&mut self) -> Result<Piece> {
        if self.decoding.finish().is_some() {
            return Ok(Piece { token: 0, text: String::new() });
        }
        if self.ended {
            bail!(InvalidArgument, "the generation was ended by dsv4_generation_finish");
        }
        let mut session = self.session.get()?;
        let mut sampler = self.sampler.get()?;
        now(self.decoding.advance(&mut session, &mut sampler))
    }

    /// Ends the generation and keeps the text that was held back.
    fn end(&mut self) -> Result<()> {
        self.ended = true;
        let mut text = self.unsent.take().map(|piece| piece.text).unwrap_or_default();
        text.push_str(&self.decoding.held_text());
        self.keep(Piece { token: 0, text })
    }

    /// Keeps the text for the caller, or the piece for the next call.
    fn keep(&mut self, piece: Piece) -> Result<()> {
        match c_bytes(&piece.text) {
            Ok(text) => {
                self.text = text;
                Ok(())
            }
            Err(e) => {
                self.unsent = Some(piece);
                Err(e)
            }
        }
    }
}

pub(super) fn number(finish: Option<Finish>) -> (dsv4_finish, u32) {
    match finish {
        None => (dsv4_finish::None, 0),
        Some(Finish::Eos) => (dsv4_finish::Eos, 0),
        Some(Finish::Token(id)) => (dsv4_finish::Token, id),
        Some(Finish::String(index)) => (dsv4_finish::String, index as u32),
        Some(Finish::MaxTokens) => (dsv4_finish::MaxTokens, 0),
        Some(Finish::ContextFull) => (dsv4_finish::ContextFull, 0),
    }
}

/// The Rust options behind those of C.
///
/// # Safety
/// The arrays are NULL or have as many elements as their counts say; strings end with a NUL.
pub(super) unsafe fn read(options: &dsv4_generation_options) -> Result<GenerateOptions> {
    reserved(options.reserved)?;
    // SAFETY: by the contract above.
    let tokens = unsafe { slice(options.stop_tokens, options.n_stop_tokens, "stop_tokens") }?;
    // SAFETY: as above.
    let texts = unsafe { slice(options.stop_strings, options.n_stop_strings, "stop_strings") }?;
    let mut stop_strings = alloc::with_capacity("stop strings", texts.len())?;
    for (i, &text) in texts.iter().enumerate() {
        // SAFETY: as above.
        let text = unsafe { c_text(text, &format!("stop_strings[{i}]")) }?;
        stop_strings.push(alloc::copied_text("stop strings", text)?);
    }
    Ok(GenerateOptions {
        max_tokens: (options.max_tokens > 0).then_some(options.max_tokens),
        ignore_eos: flag(options.ignore_eos, "ignore_eos")?,
        stop_tokens: alloc::copied("stop tokens", tokens)?,
        stop_strings,
    })
}
