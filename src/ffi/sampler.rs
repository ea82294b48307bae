//! Sampler
//!
//! Logits to a token, deterministic for a seed: penalties, logit bias, then either the largest logit (greedy) or
//! temperature, top-k, top-p, min-p and one draw. One thread at a time; a second one gets `BUSY`.

use std::ptr;
use std::sync::Arc;

use super::args::{Options, Out, SizedStruct, count, flag, free, init_options, object, options, slice};
use super::guard::{guard, guard_value};
use super::handle::Exclusive;
use super::status::{dsv4_error, dsv4_status};
use crate::alloc;
use crate::error::Result;
use crate::sampler::{Sampler, SamplerOptions};

/// Chooses the tokens of one sequence. One thread at a time.
pub struct dsv4_sampler {
    pub(super) exclusive: Arc<Exclusive<Sampler>>,
}

/// What a sampler does. Fill with `dsv4_sampler_options_init`, then change what you like. The defaults draw from the
/// model's own distribution, as its authors recommend.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dsv4_sampler_options {
    /// `sizeof(dsv4_sampler_options)`.
    pub size: usize,
    /// Start of the random numbers: equal seeds give equal tokens for equal logits, on every platform. 0 by default.
    pub seed: u64,
    /// The penalties look at this many accepted tokens, the latest; 0, the default, looks at all.
    pub penalty_window: u64,
    /// Ids whose logits get a bias, `n_bias` of them, each once; NULL if there are none. Read during the call only.
    pub bias_tokens: *const u32,
    /// What is added to their logits: finite, or minus infinity to ban a token.
    pub bias_values: *const f32,
    /// Number of biases; 0 by default.
    pub n_bias: usize,
    /// 1 takes the largest logit (the lowest id among equals) instead of drawing; 0 by default. Penalties and bias
    /// still count; `temperature`, `top_k`, `top_p`, `min_p` and `seed` mean nothing then. Greedy decoding is this choice and
    /// never a temperature of 0, which is refused.
    pub greedy: i32,
    /// Keeps the k largest logits; 0, the default, keeps all.
    pub top_k: u32,
    /// Divides the logits; finite and above 0, 1 by default.
    pub temperature: f32,
    /// Keeps the smallest set of likeliest tokens whose probabilities reach this; above 0, at most 1, the default.
    pub top_p: f32,
    /// Keeps tokens at least this fraction as likely as the likeliest; from 0, the default, to below 1.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of accepted tokens; above 0, 1 by default.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of accepted tokens; finite, 0 by default.
    pub presence_penalty: f32,
    /// Subtracted once per accepted occurrence; finite, 0 by default.
    pub frequency_penalty: f32,
}

// SAFETY: `repr(C)`, `size` first, plain fields without padding.
unsafe impl SizedStruct for dsv4_sampler_options {
    const NAME: &'static str = "dsv4_sampler_options";
}

impl Options for dsv4_sampler_options {
    fn defaults() -> Self {
        let rust = SamplerOptions::default();
        Self {
            size: size_of::<Self>(),
            seed: rust.seed,
            penalty_window: rust.penalty_window as u64,
            bias_tokens: ptr::null(),
            bias_values: ptr::null(),
            n_bias: 0,
            greedy: i32::from(rust.greedy),
            top_k: rust.top_k,
            temperature: rust.temperature,
            top_p: rust.top_p,
            min_p: rust.min_p,
            repetition_penalty: rust.repetition_penalty,
            presence_penalty: rust.presence_penalty,
            frequency_penalty: rust.frequency_penalty,
        }
    }
}

/// Sets every default in `options`, a struct of `size` bytes. Use `dsv4_sampler_options_init`, which passes the size as
/// your header has it. `options` may be NULL; then nothing happens.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dsv4_sampler_options_init_sized(options: *mut dsv4_sampler_options, size: usize) {
    guard_value("dsv4_sampler_options_init_sized", (), || {
        // SAFETY: NULL or `size` bytes by the header's contract.
        unsafe { init_options(options, size) }
    });
}

/// Makes a sampler. `options` may be NULL. `*out` receives it, to be freed with `dsv4_sampler_free`.
///
/// Errors: `INVALID_ARGUMENT` naming the option that is out of range; `OUT_OF_MEMORY`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_sampler_new(
    options: *const dsv4_sampler_options,
    out: *mut *mut dsv4_sampler,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let out = unsafe { Out::new(out, "out") };
    guard("dsv4_sampler_new", err, || {
        // SAFETY: as above.
        let options = unsafe { self::options(options) }?;
        out.check()?;
        // SAFETY: as above; the arrays are read during this call only.
        let sampler = Sampler::new(unsafe { read(&options) }?)?;
        out.give(dsv4_sampler { exclusive: Arc::new(Exclusive::new("the sampler", sampler)) });
        Ok(())
    })
}

/// Frees a sampler. A generation that was started with it keeps what it needs. `sampler` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dsv4_sampler_free(sampler: *mut dsv4_sampler) {
    guard_value("dsv4_sampler_free", (), || {
        // SAFETY: NULL or an object that nobody uses any more, by the header's contract.
        unsafe { free(sampler) }
    });
}

/// Chooses the next token for `logits`, `n` float32: those of `dsv4_session_logits`, in place, or your own. It does not
/// count as accepted; call `dsv4_sampler_accept` for that.
///
/// Errors: `NUMERIC` for NaN, plus infinity, or nothing but minus infinity; `INVALID_ARGUMENT` for no logits, or a
/// biased or accepted id beyond them; `OUT_OF_MEMORY`. A failed call uses up no random number.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_sampler_sample(
    sampler: *mut dsv4_sampler,
    logits: *const f32,
    n: usize,
    token: *mut u32,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let token = unsafe { Out::new(token, "token") };
    guard("dsv4_sampler_sample", err, || {
        // SAFETY: as above.
        let mut sampler = unsafe { object(sampler, "sampler") }?.exclusive.get()?;
        // SAFETY: as above.
        let logits = unsafe { slice(logits, n, "logits") }?;
        token.check()?;
        token.set(sampler.sample(logits)?);
        Ok(())
    })
}

/// Counts a token for the penalties: every token of the sequence, those of the prompt only if they shall be penalised.
///
/// Errors: `OUT_OF_MEMORY`, and the token is not counted then; `BUSY`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_sampler_accept(
    sampler: *mut dsv4_sampler,
    token: u32,
    err: *mut dsv4_error,
) -> dsv4_status {
    guard("dsv4_sampler_accept", err, || {
        // SAFETY: by the header's contract.
        unsafe { object(sampler, "sampler") }?.exclusive.get()?.accept(token)?;
        Ok(())
    })
}

/// Forgets the accepted tokens and starts the random numbers anew.
///
/// Errors: only `INVALID_ARGUMENT`, `BUSY` and `POISONED`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_sampler_reset(sampler: *mut dsv4_sampler, err: *mut dsv4_error) -> dsv4_status {
    guard("dsv4_sampler_reset", err, || {
        // SAFETY: by the header's contract.
        unsafe { object(sampler, "sampler") }?.exclusive.get()?.reset();
        Ok(())
    })
}

/// The Rust options behind those of C.
///
/// # Safety
/// The arrays are NULL or have `n_bias` elements.
unsafe fn read(options: &dsv4_sampler_options) -> Result<SamplerOptions> {
    // SAFETY: by the contract above.
    let tokens = unsafe { slice(options.bias_tokens, options.n_bias, "bias_tokens") }?;
    // SAFETY: as above.
    let values = unsafe { slice(options.bias_values, options.n_bias, "bias_values") }?;
    let mut logit_bias = alloc::with_capacity("logit bias", tokens.len())?;
    logit_bias.extend(tokens.iter().copied().zip(values.iter().copied()));
    Ok(SamplerOptions {
        greedy: flag(options.greedy, "greedy")?,
        temperature: options.temperature,
        top_k: options.top_k,
        top_p: options.top_p,
        min_p: options.min_p,
        repetition_penalty: options.repetition_penalty,
        presence_penalty: options.presence_penalty,
        frequency_penalty: options.frequency_penalty,
        penalty_window: count(options.penalty_window, "penalty_window")?,
        logit_bias,
        seed: options.seed,
    })
}
