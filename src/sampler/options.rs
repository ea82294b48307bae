//! What a sampler is asked to do, and which values make sense.

use crate::TokenId;
use crate::alloc;
use crate::error::{Result, bail};

/// Options of a [`Sampler`](super::Sampler). The default draws from the model's own distribution:
/// temperature 1, nothing cut off, no penalty, as the V4 model card recommends.
///
/// ```
/// use dsv4::SamplerOptions;
/// let options = SamplerOptions {
///     temperature: 0.7,
///     top_p: 0.95,
///     repetition_penalty: 1.1,
///     logit_bias: vec![(42, f32::NEG_INFINITY)], // never token 42
///     seed: 2026,
///     ..SamplerOptions::default()
/// };
/// options.validate()?;
///
/// let cold = SamplerOptions { temperature: 0.0, ..SamplerOptions::default() };
/// let error = cold.validate().unwrap_err();
/// assert_eq!(error.message(), "temperature is 0: ask for greedy decoding with greedy = true");
/// # Ok::<(), dsv4::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct SamplerOptions {
    /// Takes the largest logit (lowest id among equals) instead of drawing. Penalties and bias
    /// still count; temperature, top-k, top-p, min-p and seed have no meaning then.
    pub greedy: bool,
    /// Divides the logits. Finite and above 0; greedy decoding is `greedy`, not temperature 0.
    pub temperature: f32,
    /// Keeps the k largest logits (lowest ids among equals); 0 keeps all.
    pub top_k: u32,
    /// Keeps the smallest set of likeliest tokens whose probabilities reach this; above 0, at most
    /// 1 (keeps all). Probabilities are those after temperature and top-k.
    pub top_p: f32,
    /// Keeps tokens at least this fraction as likely as the likeliest; from 0 (keeps all) to below 1.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of accepted tokens; above 0, 1 is none.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of accepted tokens; finite, 0 is none.
    pub presence_penalty: f32,
    /// Subtracted once per accepted occurrence; finite, 0 is none.
    pub frequency_penalty: f32,
    /// The penalties look at this many accepted tokens, the latest; 0 looks at all.
    pub penalty_window: usize,
    /// Added to single logits, each id once; finite, or minus infinity to ban a token.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Start of the random numbers: equal seeds give equal tokens for equal logits.
    pub seed: u64,
}

impl Default for SamplerOptions {
    fn default() -> Self {
        Self {
            greedy: false,
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            penalty_window: 0,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

impl SamplerOptions {
    /// Greedy decoding: the largest logit each time.
    pub fn greedy() -> Self {
        Self { greedy: true, ..Self::default() }
    }

    /// Checks every value.
    ///
    /// # Errors
    /// `InvalidArgument` naming the field and its value; `OutOfMemory`.
    pub fn validate(&self) -> Result<()> {
        let Self { temperature, top_p, min_p, .. } = *self;
        if temperature == 0.0 && !self.greedy {
            bail!(InvalidArgument, "temperature is 0: ask for greedy decoding with greedy = true");
        }
        if !(0.0..=f32::MAX).contains(&temperature) {
            bail!(InvalidArgument, "temperature is {temperature}, it must be finite and above 0");
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            bail!(InvalidArgument, "top_p is {top_p}, it must be above 0 and at most 1");
        }
        if !(0.0..1.0).contains(&min_p) {
            bail!(InvalidArgument, "min_p is {min_p}, it must be at least 0 and below 1");
        }
        self.validate_penalties()?;
        self.validate_bias()
    }

    fn validate_penalties(&self) -> Result<()> {
        let repetition = self.repetition_penalty;
        if !(repetition.is_finite() && repetition > 0.0) {
            bail!(InvalidArgument, "repetition_penalty is {repetition}, it must be finite and above 0");
        }
        let plain = [("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)];
        for (name, value) in plain {
            if !value.is_finite() {
                bail!(InvalidArgument, "{name} is {value}, it must be finite");
            }
        }
        Ok(())
    }

    fn validate_bias(&self) -> Result<()> {
        let mut ids = alloc::with_capacity("logit bias", self.logit_bias.len())?;
        for &(id, bias) in &self.logit_bias {
            if bias.is_nan() || bias == f32::INFINITY {
                bail!(InvalidArgument, "logit_bias of token id {id} is {bias}, it must be finite or minus infinity");
            }
            ids.push(id);
        }
        ids.sort_unstable();
        if let Some(pair) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
            bail!(InvalidArgument, "logit_bias has token id {} twice", pair[0]);
        }
        Ok(())
    }
}
