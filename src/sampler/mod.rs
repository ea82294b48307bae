//! Logits to the next token.
//!
//! The steps, in order: repetition, presence and frequency penalties; logit bias; then either the
//! largest logit (greedy) or temperature, top-k, top-p, min-p and one draw. The result depends on
//! the options, the accepted tokens, the logits and the number of draws so far, and on nothing
//! else: weights are integers, so sums are exact in any order, and `exp` and the random numbers
//! are this module's own, so a seed gives the same tokens on every platform.
//!
//! Invariant: a NaN or infinite logit is an error, never a token. The grammar mask is not applied
//! here: it arrives as logits of minus infinity.

#![forbid(unsafe_code)]

mod draw;
mod nucleus;
mod options;
mod penalties;
mod rng;
mod scan;
mod weights;

use crate::TokenId;
use crate::alloc;
use crate::error::{Result, bail};

pub(crate) use draw::Draw;
#[cfg(feature = "cuda")]
pub(crate) use draw::Edit;
use nucleus::Cut;
pub use options::SamplerOptions;
use penalties::Penalties;
use rng::CounterRng;
use scan::checked_max;
use weights::Weights;

/// Chooses tokens of one sequence. Cloning it forks the sequence: both copies go on alike.
///
/// ```
/// use dsv4::{Sampler, SamplerOptions};
/// let logits = [0.5, 2.0, 1.5, f32::NEG_INFINITY]; // one per token id
/// let mut greedy = Sampler::new(SamplerOptions::greedy())?;
/// assert_eq!(greedy.sample(&logits)?, 1);
///
/// let mut sampler = Sampler::new(SamplerOptions { temperature: 0.8, top_k: 2, seed: 7, ..Default::default() })?;
/// let mut again = sampler.clone();
/// let token = sampler.sample(&logits)?;
/// assert!([1, 2].contains(&token));
/// assert_eq!(again.sample(&logits)?, token); // a seed gives the same tokens everywhere
/// sampler.accept(token)?; // for the penalties
/// let shares = sampler.distribution(&logits)?; // what it would draw from
/// assert_eq!(shares.iter().map(|&(id, _)| id).collect::<Vec<_>>(), [1, 2]);
/// # Ok::<(), dsv4::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Sampler {
    options: SamplerOptions,
    penalties: Penalties,
    rng: CounterRng,
    /// Logits after penalties and bias; reused between calls.
    adjusted: Vec<f32>,
    weights: Weights,
    /// Sort keys of the candidates, scratch of top-k and top-p.
    keys: Vec<u64>,
}

impl Sampler {
    /// A sampler with no accepted tokens.
    ///
    /// # Errors
    /// `InvalidArgument` naming the option that is out of range.
    pub fn new(options: SamplerOptions) -> Result<Self> {
        options.validate()?;
        Ok(Self {
            penalties: Penalties::new(&options),
            rng: CounterRng::new(options.seed),
            options,
            adjusted: Vec::new(),
            weights: Weights::default(),
            keys: Vec::new(),
        })
    }

    /// The options that this sampler was made with.
    pub fn options(&self) -> &SamplerOptions {
        &self.options
    }

    /// Counts a token for the penalties: call it for every token of the sequence, prompt included
    /// if the prompt shall be penalised. [`Sampler::sample`] does not do it on its own.
    ///
    /// # Errors
    /// `OutOfMemory`; the token is not counted then.
    pub fn accept(&mut self, id: TokenId) -> Result<()> {
        self.penalties.accept(id)
    }

    /// Makes room for the next [`Sampler::accept`], which then cannot fail.
    pub(crate) fn reserve_accept(&mut self) -> Result<()> {
        self.penalties.reserve()
    }

    /// Forgets the accepted tokens and starts the random numbers anew.
    pub fn reset(&mut self) {
        self.penalties = Penalties::new(&self.options);
        self.rng = CounterRng::new(self.options.seed);
    }

    /// The next token for `logits` (`[vocab]`, float32).
    ///
    /// # Errors
    /// `Numeric` when a logit is NaN or plus infinity or all are minus infinity;
    /// `InvalidArgument` when `logits` is empty or a biased or accepted id lies beyond it;
    /// `OutOfMemory`. No random number is used up by a failed call.
    pub fn sample(&mut self, logits: &[f32]) -> Result<TokenId> {
        let max = self.adjust(logits)?;
        if self.options.greedy {
            return Ok(first_equal(&self.adjusted, max));
        }
        let cut = self.cut(max)?;
        let total = self.candidates(cut).map(|(_, weight)| weight).sum();
        let mut left = self.rng.below(total);
        for (id, weight) in self.candidates(cut) {
            if left < weight {
                return Ok(id);
            }
            left -= weight;
        }
        unreachable!("the draw is below the sum of the candidates' weights")
    }

    /// The distribution that [`Sampler::sample`] would draw from: (id, probability) by rising id,
    /// only ids that can be drawn. Uses up no random number.
    ///
    /// # Errors
    /// As [`Sampler::sample`].
    pub fn distribution(&mut self, logits: &[f32]) -> Result<Vec<(TokenId, f64)>> {
        let max = self.adjust(logits)?;
        if self.options.greedy {
            return Ok(vec![(first_equal(&self.adjusted, max), 1.0)]);
        }
        let cut = self.cut(max)?;
        let total: u64 = self.candidates(cut).map(|(_, weight)| weight).sum();
        let share = |weight: u64| weight as f64 / total as f64;
        Ok(self.candidates(cut).map(|(id, weight)| (id, share(weight))).collect())
    }

    /// Fills `adjusted`, checked logits with penalties and bias applied, and returns its largest.
    fn adjust(&mut self, logits: &[f32]) -> Result<f32> {
        let max = checked_max(logits)?;
        let vocab = logits.len();
        self.adjusted.clear();
        alloc::reserve("the sampler's logits", &mut self.adjusted, vocab)?;
        self.adjusted.extend_from_slice(logits);
        if self.penalties.is_empty() && self.options.logit_bias.is_empty() {
            return Ok(max);
        }
        self.penalties.apply(&self.options, &mut self.adjusted)?;
        for &(id, bias) in &self.options.logit_bias {
            let Some(logit) = self.adjusted.get_mut(id as usize) else {
                bail!(InvalidArgument, "logit_bias: token id {id} is outside the {vocab} logits");
            };
            *logit += bias;
        }
        checked_max(&self.adjusted).map_err(|e| e.context("after penalties and bias"))
    }

    /// Where top-k, top-p and min-p stop keeping tokens. `max` is the largest adjusted logit.
    fn cut(&mut self, max: f32) -> Result<Cut> {
        let options = &self.options;
        self.weights.fill(&self.adjusted, max, options.temperature)?;
        let limits = nucleus::Limits { top_k: options.top_k, top_p: options.top_p, min_p: options.min_p };
        nucleus::cut(&self.adjusted, &self.weights, &limits, &mut self.keys)
    }

    /// Tokens that `cut` keeps, with their weights, by rising id.
    fn candidates(&self, cut: Cut) -> impl Iterator<Item = (TokenId, u64)> + '_ {
        let weighted = (0..).zip(self.weights.as_slice().iter().copied());
        weighted.filter(move |&(id, weight)| cut.keeps(weight, || nucleus::key(self.adjusted[id as usize], id)))
    }
}

/// Natural logarithm of the probability that `logits` (`[vocab]`) give to `id`, with no penalty,
/// bias or temperature; in float64.
///
/// ```
/// let p = dsv4::sampler::logprobs(&[0.0, 0.0], 1)?.exp();
/// assert!((p - 0.5).abs() < 1e-12);
/// # Ok::<(), dsv4::Error>(())
/// ```
///
/// # Errors
/// `Numeric` as [`Sampler::sample`]; `InvalidArgument` when `id` lies outside the logits.
pub fn logprobs(logits: &[f32], id: TokenId) -> Result<f64> {
    let max = f64::from(checked_max(logits)?);
    let Some(&logit) = logits.get(id as usize) else {
        bail!(InvalidArgument, "token id {id} is outside the {} logits", logits.len());
    };
    let sum: f64 = logits.iter().map(|&l| (f64::from(l) - max).exp()).sum();
    Ok(f64::from(logit) - max - sum.ln())
}

/// Lowest id whose logit is `max`, which is one of them.
fn first_equal(logits: &[f32], max: f32) -> TokenId {
    let found = logits.iter().zip(0..).find(|&(&logit, _)| logit == max);
    found.map_or(0, |(_, id)| id)
}
