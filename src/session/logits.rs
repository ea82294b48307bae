//! Logits behind a session's token: on the host, or with the device, which computes them again when somebody asks.
//!
//! Of a token that was fed alone, the host may have only the hidden state that the logits come from, a hundredth of their
//! size, and the next token if a device chose it. A product's bits depend on its rows alone, so the logits are those that were chosen from, whenever they are asked
//! for.

use once_cell::sync::OnceCell;

use crate::TokenId;
use crate::alloc;
use crate::engine::{Engine, Stayed};
use crate::error::Result;
use crate::sampler::Draw;

/// Logits `[vocab]`, or none.
#[derive(Default)]
pub(super) struct Logits {
    /// Not set as long as nobody asked for those of a hidden state.
    values: OnceCell<Vec<f32>>,
    /// Empty if the values did not come from one.
    hidden: Vec<u16>,
    choice: Option<(Draw, TokenId)>,
}

impl From<Vec<f32>> for Logits {
    fn from(values: Vec<f32>) -> Self {
        Self { values: OnceCell::with_value(values), ..Self::default() }
    }
}

impl From<Stayed> for Logits {
    fn from(Stayed { hidden, choice }: Stayed) -> Self {
        Self { values: OnceCell::new(), hidden, choice: choice.and_then(|(draw, token)| Some((draw, token?))) }
    }
}

impl Logits {
    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.hidden.is_empty() && self.on_host().is_empty()
    }

    /// The values, empty if there are none.
    ///
    /// # Errors
    /// Those of the device that computes them.
    pub(super) fn get(&self, engine: &Engine) -> Result<&[f32]> {
        if self.hidden.is_empty() {
            return Ok(self.on_host());
        }
        Ok(self.values.get_or_try_init(|| engine.logits_of(&self.hidden))?)
    }

    /// The values if they are on the host.
    pub(super) fn on_host(&self) -> &[f32] {
        self.values.get().map_or(&[], Vec::as_slice)
    }

    /// A copy of the values, of which none is kept.
    ///
    /// # Errors
    /// Those of [`Self::get`].
    pub(super) fn to_vec(&self, engine: &Engine) -> Result<Vec<f32>> {
        match self.values.get() {
            None if !self.hidden.is_empty() => engine.logits_of(&self.hidden),
            _ => alloc::copied("logits", self.on_host()),
        }
    }

    /// The same again, without the choice.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub(super) fn copy(&self) -> Result<Self> {
        let values = match self.values.get() {
            Some(values) => OnceCell::with_value(alloc::copied("logits", values)?),
            None => OnceCell::new(),
        };
        Ok(Self { values, hidden: alloc::copied("a hidden state", &self.hidden)?, choice: None })
    }

    /// Whether a device chose from them.
    pub(super) fn has_choice(&self) -> bool {
        self.choice.is_some()
    }

    /// What the device chose from them, if that was for `draw`.
    pub(super) fn choice(&self, draw: Option<&Draw>) -> Option<TokenId> {
        self.choice.as_ref().filter(|(for_draw, _)| draw == Some(for_draw)).map(|&(_, token)| token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::{Sampler, SamplerOptions};

    #[test]
    fn a_choice_counts_for_the_draw_that_it_was_made_for_alone() {
        let sampler = Sampler::new(SamplerOptions { seed: 3, ..SamplerOptions::default() }).unwrap();
        let mut later = sampler.clone();
        later.count_draw();
        let [draw, other] = [&sampler, &later].map(|sampler| sampler.draw(100).unwrap());
        let logits = Logits::from(Stayed { choice: Some((draw.clone(), Some(17))), hidden: vec![1, 2] });
        assert!(!logits.is_empty() && logits.has_choice());
        assert_eq!(logits.choice(Some(&draw)), Some(17));
        assert_eq!([logits.choice(Some(&other)), logits.choice(None)], [None, None]);
        assert_eq!(logits.copy().unwrap().choice(Some(&draw)), None);
    }

    #[test]
    fn values_on_the_host_are_what_they_are_and_nothing_was_chosen() {
        let logits = Logits::from(vec![1.0, 2.0]);
        assert!(!logits.is_empty() && !logits.has_choice());
        assert_eq!(logits.copy().unwrap().on_host(), [1.0, 2.0]);
        assert!(Logits::default().is_empty() && Logits::default().copy().unwrap().is_empty());
    }
}
