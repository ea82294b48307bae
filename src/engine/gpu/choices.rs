//! Logits that stay on the device: which wanted rows' do, which tokens are chosen from them, what comes back instead.
//!
//! Of such a row comes its final hidden state, from which [`GpuEngine::logits_of`] computes the logits again, and with
//! a draw its token. The choice stands behind the step's flag: where a value was not finite there is no token.

use std::ops::Range;

use super::step::{Run, head_product};
use super::{GpuEngine, Scratch, Size};
use crate::alloc;
use crate::backend::cuda::memory::{Buffer, Pinned, Plain};
use crate::backend::cuda::ops::{self, DrawWords, EditWords, Sample};
use crate::backend::cuda::stream::Stream;
use crate::engine::step::{Last, Stayed, Stepped};
use crate::error::{Result, bail};
use crate::model::deepseek_v4::Segment;
use crate::sampler::Draw;

/// Edits of a step: of the longest list, and many of a usual length. Draws whose edits do not fit are left to the host.
pub(super) const EDITS: usize = 4 * Draw::MAX_EDITS;

/// The wanted rows of a step whose logits stay, and the draws among them.
#[derive(Default)]
pub(super) struct Choices {
    rows: Vec<Row>,
    /// As the kernel reads them; the row is that within a part of `LOGIT_ROWS` wanted rows.
    pub(super) draws: Vec<DrawWords>,
    pub(super) edits: Vec<EditWords>,
}

/// A wanted row whose logits stay.
struct Row {
    segment: usize,
    /// Among the wanted rows.
    place: usize,
    draw: Option<Draw>,
}

impl Choices {
    /// Segments whose last row's logits are all they want and need not come, as far as there is room for the edits of
    /// draws. `part` rows have their logits computed at once.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub(super) fn new(segments: &[Segment<'_>], lasts: &[&Last], part: usize) -> Result<Self> {
        let mut choices = Self::default();
        let mut place = 0;
        for (i, segment) in segments.iter().enumerate() {
            let wanted = segment.wanted().len();
            if let (1, Some(last)) = (wanted, lasts.get(i)) {
                choices.add(i, place, last, part)?;
            }
            place += wanted;
        }
        Ok(choices)
    }

    fn add(&mut self, segment: usize, place: usize, last: &Last, part: usize) -> Result<()> {
        let draw = match last {
            Last::Come => return Ok(()),
            Last::Choose(draw) if self.edits.len() + draw.edits.len() > EDITS => return Ok(()),
            Last::Choose(draw) => Some(draw),
            Last::Stay => None,
        };
        if let Some(draw) = draw {
            alloc::reserve("draws of a step", &mut self.draws, 1)?;
            alloc::reserve("edits of a step", &mut self.edits, draw.edits.len())?;
            self.draws.push(ops::draw_words(draw, place % part, self.edits.len())?);
            self.edits.extend(draw.edits.iter().map(ops::edit_words));
        }
        alloc::reserve("rows of a step", &mut self.rows, 1)?;
        self.rows.push(Row { segment, place, draw: draw.cloned() });
        Ok(())
    }

    /// Those among the wanted rows `part`, and their draws.
    fn within(&self, part: &Range<usize>) -> (&[Row], Range<usize>) {
        let first = self.rows.partition_point(|row| row.place < part.start);
        let rows = &self.rows[first..self.rows.partition_point(|row| row.place < part.end)];
        let draws = |rows: &[Row]| rows.iter().filter(|row| row.draw.is_some()).count();
        let before = draws(&self.rows[..first]);
        (rows, before..before + draws(rows))
    }

    /// Runs of the wanted rows `part` whose logits come.
    fn others(&self, part: &Range<usize>) -> Vec<Range<usize>> {
        let staying = self.within(part).0.iter().map(|row| row.place);
        let (mut runs, mut start) = (Vec::new(), part.start);
        for place in staying.chain([part.end]) {
            if start < place {
                runs.push(start..place);
            }
            start = place + 1;
        }
        runs
    }
}

/// Chooses from the logits of the wanted rows `part` and hands what the host wants to `stepped`: hidden states and tokens
/// of rows whose logits stay, logits of others. Waits for the stream.
pub(super) fn deliver(
    run: &mut Run<'_>,
    logits: &Buffer<f32>,
    part: Range<usize>,
    stepped: &mut Stepped,
) -> Result<()> {
    let (config, scratch, stream, choices) = (run.config, run.scratch, run.stream, run.choices);
    let (d, vocab) = (config.hidden_size, config.vocab_size);
    let (rows, draws) = choices.within(&part);
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
    if !rows.is_empty() {
        let hidden = &scratch.hidden.slice(0..part.len() * d)?;
        stream.read_later(hidden, values)?;
        stream.synchronize()?;
        let hidden = values.values::<u16>(part.len() * d)?;
        let mut tokens = outcome.values::<u32>(1 + draws.len())?[1..].iter();
        for row in rows {
            let hidden = alloc::copied("a hidden state", &hidden[(row.place - part.start) * d..][..d])?;
            let choice = row.draw.clone().map(|draw| {
                let token = tokens.next().copied();
                (draw, token.filter(|&token| (token as usize) < vocab))
            });
            let missing = (row.segment + 1).saturating_sub(stepped.stayed.len());
            alloc::reserve("rows of a step", &mut stepped.stayed, missing)?;
            stepped.stayed.extend(std::iter::repeat_with(|| None).take(missing));
            stepped.stayed[row.segment] = Some(Stayed { hidden, choice });
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
        let scratch = Scratch::new(scratch, config, Size { rows: 1, visible: 1, is_shared_out: false })?;
        stream.write(&scratch.hidden, hidden)?;
        stream.read(&head_product(stream, config, &self.weights, &scratch, 1)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::{Sampler, SamplerOptions};

    fn choices(places: &[usize]) -> Choices {
        // every other one is drawn from
        let sampler = Sampler::new(SamplerOptions::greedy()).unwrap();
        let draw = |i: usize| (i % 2 == 1).then(|| sampler.draw(9).unwrap());
        let row = |(i, &place): (usize, &usize)| Row { segment: place, place, draw: draw(i) };
        Choices { rows: places.iter().enumerate().map(row).collect(), ..Choices::default() }
    }

    #[test]
    fn rows_whose_logits_come_lie_between_those_whose_stay() {
        let c = choices(&[0, 3, 4, 9]);
        assert_eq!(c.others(&(0..12)), [1..3, 5..9, 10..12]);
        assert_eq!(c.others(&(4..12)), [5..9, 10..12]);
        let within = |part: Range<usize>| {
            let (rows, draws) = c.within(&part);
            (rows.iter().map(|row| row.place).collect::<Vec<_>>(), draws)
        };
        assert_eq!(within(0..12), (vec![0, 3, 4, 9], 0..2));
        assert_eq!(
            (within(3..9), within(4..12), within(10..12)),
            ((vec![3, 4], 0..1), (vec![4, 9], 1..2), (vec![], 2..2))
        );
        assert_eq!(choices(&[1]).others(&(0..3)), [0..1, 2..3]);
        assert!(choices(&[0, 1]).others(&(0..2)).is_empty() && choices(&[]).others(&(0..0)).is_empty());
    }
}
