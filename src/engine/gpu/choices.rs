//! Tokens that the device chooses: which wanted rows have a draw, and what comes back of them instead of logits.
//!
//! A row that is drawn from leaves its token and its final hidden state, from which [`GpuEngine::logits_of`] computes the
//! logits again. The choice stands behind the step's flag: where a value was not finite there is no token.

use std::ops::Range;

use super::step::{Run, head_product};
use super::{GpuEngine, Scratch, Size};
use crate::alloc;
use crate::backend::cuda::memory::{Buffer, Pinned, Plain};
use crate::backend::cuda::ops::{self, DrawWords, EditWords, Sample};
use crate::backend::cuda::stream::Stream;
use crate::engine::step::Stepped;
use crate::error::{Result, bail};
use crate::model::deepseek_v4::Segment;
use crate::sampler::Draw;

/// Edits of a step: of the longest list, and many of a usual length. Draws whose edits do not fit are left to the host.
pub(super) const EDITS: usize = 4 * Draw::MAX_EDITS;

/// The draws of a step.
#[derive(Default)]
pub(super) struct Choices {
    /// Segment and place among the wanted rows of each.
    places: Vec<(usize, usize)>,
    /// As the kernel reads them; the row is that within a part of `LOGIT_ROWS` wanted rows.
    pub(super) draws: Vec<DrawWords>,
    pub(super) edits: Vec<EditWords>,
}

impl Choices {
    /// The draws of segments whose last row's logits are wanted, as far as there is room for their edits. `part` rows
    /// have their logits computed at once.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub(super) fn new(segments: &[Segment<'_>], draws: &[Option<&Draw>], part: usize) -> Result<Self> {
        let mut choices = Self::default();
        let mut place = 0;
        for (i, segment) in segments.iter().enumerate() {
            let wanted = segment.wanted().len();
            if let (1, Some(Some(draw))) = (wanted, draws.get(i))
                && choices.edits.len() + draw.edits.len() <= EDITS
            {
                alloc::reserve("draws of a step", &mut choices.places, 1)?;
                alloc::reserve("draws of a step", &mut choices.draws, 1)?;
                alloc::reserve("edits of a step", &mut choices.edits, draw.edits.len())?;
                choices.places.push((i, place));
                choices.draws.push(ops::draw_words(draw, place % part, choices.edits.len())?);
                choices.edits.extend(draw.edits.iter().map(ops::edit_words));
            }
            place += wanted;
        }
        Ok(choices)
    }

    /// The draws of the wanted rows `part`.
    fn within(&self, part: &Range<usize>) -> Range<usize> {
        let first = self.places.partition_point(|&(_, place)| place < part.start);
        first..self.places.partition_point(|&(_, place)| place < part.end)
    }

    /// Runs of the wanted rows `part` that have no draw.
    fn others(&self, part: &Range<usize>) -> Vec<Range<usize>> {
        let drawn = self.places[self.within(part)].iter().map(|&(_, place)| place);
        let (mut runs, mut start) = (Vec::new(), part.start);
        for place in drawn.chain([part.end]) {
            if start < place {
                runs.push(start..place);
            }
            start = place + 1;
        }
        runs
    }
}

/// Chooses from the logits of the wanted rows `part` and hands what the host wants to `stepped`: tokens and hidden states
/// of rows that are drawn from, logits of others. Waits for the stream.
pub(super) fn deliver(
    run: &mut Run<'_>,
    logits: &Buffer<f32>,
    part: Range<usize>,
    stepped: &mut Stepped,
) -> Result<()> {
    let (config, scratch, stream, choices) = (run.config, run.scratch, run.stream, run.choices);
    let (d, vocab) = (config.hidden_size, config.vocab_size);
    let draws = choices.within(&part);
    if !draws.is_empty() {
        let sample = Sample {
            logits,
            vocab,
            draws: &run.tables.draws(draws.clone())?,
            edits: &run.tables.edits()?,
            tokens: &scratch.tokens,
        };
        ops::sample(stream, &sample)?;
    }
    let Some([outcome, values]) = run.host.as_deref_mut() else {
        bail!(InvalidArgument, "a step without a place for what it gives")
    };
    stream.read_later(&scratch.outcome, outcome)?;
    if !draws.is_empty() {
        let mut hidden = Vec::new();
        append(stream, &scratch.hidden.slice(0..part.len() * d)?, values, &mut hidden)?;
        let tokens = &outcome.values::<u32>(1 + draws.len())?[1..];
        for (&token, &(segment, place)) in tokens.iter().zip(&choices.places[draws]) {
            let row = alloc::copied("a hidden state", &hidden[(place - part.start) * d..][..d])?;
            let missing = (segment + 1).saturating_sub(stepped.choices.len());
            alloc::reserve("choices of a step", &mut stepped.choices, missing)?;
            stepped.choices.extend(std::iter::repeat_with(|| None).take(missing));
            stepped.choices[segment] = Some((Some(token).filter(|&token| (token as usize) < vocab), row));
        }
    }
    for rows in choices.others(&part) {
        let rows = (rows.start - part.start) * vocab..(rows.end - part.start) * vocab;
        append(stream, &logits.slice(rows)?, values, &mut stepped.logits)?;
    }
    Ok(())
}

/// Appends the values of a buffer, through pinned memory if they fit.
fn append<T: Plain + Default>(stream: &Stream, from: &Buffer<T>, pinned: &mut Pinned, to: &mut Vec<T>) -> Result<()> {
    alloc::reserve("values from the device", to, from.len())?;
    if from.bytes() <= pinned.len() {
        stream.read_later(from, pinned)?;
        stream.synchronize()?;
        to.extend_from_slice(pinned.values(from.len())?);
    } else {
        to.extend_from_slice(&stream.read(from)?);
    }
    Ok(())
}

impl GpuEngine {
    /// Logits of a final hidden state that a step left.
    pub(in crate::engine) fn logits_of(&self, hidden: &[u16]) -> Result<Vec<f32>> {
        let config = self.model.config();
        let mut queue = self.queue();
        let super::Queue { stream, scratch, .. } = &mut *queue;
        let scratch = Scratch::new(scratch, config, Size { rows: 1, visible: 1 })?;
        stream.write(&scratch.hidden, hidden)?;
        stream.read(&head_product(stream, config, &self.weights, &scratch, 1)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choices(places: &[usize]) -> Choices {
        Choices { places: places.iter().map(|&place| (place, place)).collect(), ..Choices::default() }
    }

    #[test]
    fn rows_without_a_draw_lie_between_those_with_one() {
        let c = choices(&[0, 3, 4, 9]);
        assert_eq!(c.others(&(0..12)), [1..3, 5..9, 10..12]);
        assert_eq!(c.others(&(4..12)), [5..9, 10..12]);
        assert_eq!((c.within(&(3..9)), c.within(&(10..12))), (1..3, 4..4));
        assert_eq!(choices(&[1]).others(&(0..3)), [0..1, 2..3]);
        assert!(choices(&[0, 1]).others(&(0..2)).is_empty() && choices(&[]).others(&(0..0)).is_empty());
    }
}
