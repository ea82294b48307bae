//! How good a model is on given tokens: perplexity of a text, and recall of a key planted far back.
//!
//! Both go through a session as any program would, so they judge the whole path: numerics, cache, chunking.

#![forbid(unsafe_code)]

use crate::TokenId;
use crate::alloc;
use crate::error::{Error, ErrorKind, Result, bail};
use crate::sampler::{Sampler, SamplerOptions, logprobs};

use super::Session;

/// Loss of a model on a text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Perplexity {
    /// Tokens that were predicted.
    pub predictions: usize,
    /// Mean of -log p(token i+1 | tokens 0..=i), in nats.
    pub loss: f64,
}

impl Perplexity {
    /// exp(loss).
    pub fn perplexity(&self) -> f64 {
        self.loss.exp()
    }
}

/// Clears `session` and predicts each of `ids` but the first from those before it, as one sequence without windowing.
/// `progress` gets the number of predictions so far; `false` ends the call.
///
/// ```
/// # use dsv4::{Engine, EngineOptions, Model, Session, SessionOptions};
/// # let engine = Engine::new(&Model::open("examples/models/tiny-v4")?, EngineOptions::default())?;
/// # let mut session = Session::new(&engine, SessionOptions::default())?;
/// use dsv4::Markup;
/// use dsv4::session::eval::perplexity;
/// let ids = engine.model().tokenizer()?.encode("It was a long day, and the sea was calm.", Markup::Text)?;
/// let result = perplexity(&mut session, &ids, &mut |_| true)?;
/// assert_eq!(result.predictions, ids.len() - 1);
/// println!("{} nats a token", result.loss);
/// # Ok::<(), dsv4::Error>(())
/// ```
///
/// # Errors
/// `InvalidArgument` for fewer than two ids, `Cancelled` by `progress`, and those of [`Session::feed`].
pub fn perplexity(
    session: &mut Session,
    ids: &[TokenId],
    progress: &mut dyn FnMut(usize) -> bool,
) -> Result<Perplexity> {
    let predictions = ids.len().saturating_sub(1);
    if predictions == 0 {
        bail!(InvalidArgument, "a perplexity needs at least 2 tokens, there are {}", ids.len());
    }
    session.clear()?;
    let mut sum = 0.0;
    session.feed_all(&ids[..predictions], &mut |position, logits| {
        sum -= logprobs(logits, ids[position + 1])?;
        if progress(position + 1) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Cancelled, format!("cancelled after {} of {predictions} predictions", position + 1)))
    })?;
    Ok(Perplexity { predictions, loss: sum / predictions as f64 })
}

/// A prompt that ends with a question whose answer stands earlier in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecallCase {
    /// Tokens from the planted answer to the end of the prompt.
    pub distance: usize,
    /// The prompt, begin-of-sentence token included.
    pub prompt: Vec<TokenId>,
    /// The answer's tokens, all of which must come.
    pub answer: Vec<TokenId>,
}

impl RecallCase {
    /// Plants `fact` (which ends with `answer`) into `filler` so that its answer begins `distance` tokens before the
    /// end of the prompt, which is `question`; `lead` tokens of filler come before the fact. The filler is used from
    /// `start` on and repeated as needed.
    ///
    /// # Errors
    /// `InvalidArgument` if the distance is too short for the answer and the question, or the filler is empty;
    /// `OutOfMemory`.
    pub fn plant(filler: &Filler<'_>, key: &PlantedKey, lead: usize, distance: usize) -> Result<Self> {
        let shortest = key.answer.len() + key.separator.len() + key.question.len();
        if distance < shortest {
            bail!(InvalidArgument, "distance is {distance}; the answer and the question alone take {shortest} tokens");
        }
        let between = distance - shortest;
        if filler.ids.is_empty() {
            bail!(InvalidArgument, "there is no filler text to plant a key into");
        }
        let mut text = filler.ids.iter().copied().cycle().skip(filler.start % filler.ids.len());
        let head = lead.saturating_add(key.fact.len() + 1);
        let mut prompt = alloc::with_capacity("a recall prompt", distance.saturating_add(head))?;
        prompt.push(filler.bos);
        prompt.extend(text.by_ref().take(lead));
        prompt.extend_from_slice(&key.fact);
        prompt.extend_from_slice(&key.answer);
        prompt.extend_from_slice(&key.separator);
        prompt.extend(text.take(between));
        prompt.extend_from_slice(&key.question);
        Ok(Self { distance, prompt, answer: alloc::copied("a recall answer", &key.answer)? })
    }
}

/// The text that a key is planted into.
#[derive(Clone, Copy, Debug)]
pub struct Filler<'a> {
    /// Begin-of-sentence token, put in front.
    pub bos: TokenId,
    /// The text's tokens.
    pub ids: &'a [TokenId],
    /// The first token to use.
    pub start: usize,
}

/// A fact and the question for it, as tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlantedKey {
    /// The fact up to the answer, the break before it included.
    pub fact: Vec<TokenId>,
    /// The answer.
    pub answer: Vec<TokenId>,
    /// What separates the fact from the text that follows.
    pub separator: Vec<TokenId>,
    /// The question at the end of the prompt, the break before it included.
    pub question: Vec<TokenId>,
}

/// Clears `session`, feeds the prompt and decodes greedily: whether all tokens of the answer come.
///
/// # Errors
/// Those of [`Session::feed`]; `InvalidArgument` for an empty prompt or answer.
pub fn recalls(session: &mut Session, case: &RecallCase) -> Result<bool> {
    if case.prompt.is_empty() || case.answer.is_empty() {
        bail!(InvalidArgument, "a recall case needs a prompt and an answer");
    }
    session.clear()?;
    session.feed(&case.prompt)?;
    let mut greedy = Sampler::new(SamplerOptions::greedy())?;
    for (i, &expected) in case.answer.iter().enumerate() {
        let logits = session.logits().expect("the session was fed without an error");
        if greedy.sample(logits)? != expected {
            return Ok(false);
        }
        if i + 1 < case.answer.len() {
            session.feed(&[expected])?;
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_planted_at_the_distance_asked_for() {
        let key =
            PlantedKey { fact: vec![50, 51], answer: vec![60, 61], separator: vec![70], question: vec![80, 81, 82] };
        let ids = [1, 2, 3];
        let filler = Filler { bos: 0, ids: &ids, start: 2 };
        let case = RecallCase::plant(&filler, &key, 2, 10).unwrap();
        assert_eq!(case.prompt, [0, 3, 1, 50, 51, 60, 61, 70, 2, 3, 1, 2, 80, 81, 82]);
        assert_eq!(case.prompt[case.prompt.len() - 10..][..2], case.answer);
        let short = RecallCase::plant(&filler, &key, 2, 5).unwrap_err();
        assert!(short.message().contains("distance is 5; the answer and the question alone take 6"), "{short}");
        for (lead, distance) in [(2, usize::MAX), (usize::MAX, 10), (2, usize::MAX / 4)] {
            let e = RecallCase::plant(&filler, &key, lead, distance).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::OutOfMemory, "{e}");
        }
    }
}
