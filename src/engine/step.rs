//! What a session's call wants of a step, and how a step of several calls is run.
#![forbid(unsafe_code)]

use std::sync::atomic::Ordering;

use crate::TokenId;
use crate::alloc;
use crate::cache::SequenceCache;
use crate::error::Result;
use crate::model::deepseek_v4::{LogitRows, Segment};
use crate::sampler::Draw;

use super::Engine;
use super::batch::{Between, Call, Demand, Home};
use super::cancel::Stop;

/// Tokens of a call up to which it counts as decoding.
const DECODING: usize = 8;

/// Tokens of one sequence that are to go through the model.
pub(crate) struct Job {
    cache: SequenceCache,
    tokens: Vec<u32>,
    logits: LogitRows,
    draw: Option<Draw>,
}

/// What a call wants of a step.
pub(crate) struct Work<'a> {
    /// Tokens, at least one of which goes through the model.
    pub(crate) tokens: &'a [u32],
    /// Which of them get logits.
    pub(crate) logits: LogitRows,
    /// What chooses a token from the last one's logits, if the device can.
    pub(crate) draw: Option<Draw>,
}

/// What a step did for a job.
pub(crate) struct Done {
    /// Tokens that are in the sequence now, the first ones of the job.
    pub(crate) tokens: usize,
    /// Logits `[rows, vocab]` of those that were wanted: of the last one only if it is among the tokens.
    pub(crate) logits: Vec<f32>,
    /// Instead of logits: what the device chose from them.
    pub(crate) chosen: Option<Chosen>,
}

/// What a device chose from logits that stayed there.
pub(crate) struct Chosen {
    /// How.
    pub(crate) draw: Draw,
    /// `None` where the sampler finds an error in the logits.
    pub(crate) token: Option<TokenId>,
    /// What the logits come from, bf16: see [`Engine::logits_of`].
    pub(crate) hidden: Vec<u16>,
}

/// What a step gives.
#[derive(Default)]
pub(super) struct Stepped {
    /// Logits of the wanted rows, without those of segments that have a choice.
    pub(super) logits: Vec<f32>,
    /// Token, if there is one, and hidden state of segments whose draw was followed. There may be fewer than segments.
    pub(super) choices: Vec<Option<(Option<TokenId>, Vec<u16>)>>,
}

/// How a call of a session is treated, however many steps it takes.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    since: u64,
    decodes: bool,
    priority: i32,
    stop: Stop,
    leads: bool,
}

impl Engine {
    /// A home for a sequence that takes part in steps.
    pub(crate) fn home(&self, cache: SequenceCache) -> Home<SequenceCache> {
        Home::new(cache, self.batcher.new_member())
    }

    /// Begins a call of `tokens` tokens.
    pub(crate) fn begin(&self, tokens: usize, stop: Stop, priority: i32, leads: bool) -> Terms {
        Terms { since: self.batcher.new_call(), decodes: tokens <= DECODING, priority, stop, leads }
    }

    /// Takes the first of the tokens, at least one of them, through the model behind what `cache` holds, together with what
    /// other calls want at the same time. On error the cache is as before.
    ///
    /// # Panics
    /// With a panic of the step, if it was over these tokens alone; the cache is then as before.
    pub(crate) fn step(&self, cache: &mut Home<SequenceCache>, work: Work<'_>, terms: &Terms) -> Result<Done> {
        let Work { tokens, logits, draw } = work;
        let tokens = alloc::copied("tokens of a step", tokens)?;
        let demand = Demand {
            tokens: tokens.len(),
            decodes: terms.decodes,
            priority: terms.priority,
            since: terms.since,
            passed: 0,
            apart: false,
        };
        let (member, returns) = (cache.member(), cache.is_prompt(self.batcher.patience()));
        let outcome = cache.lend(|cache| {
            let job = Job { cache, tokens, logits, draw };
            let call = Call { job, demand, stop: terms.stop.clone(), leads: terms.leads, member, returns };
            let (job, outcome) = self.batcher.call(call, &|jobs, between| self.run_jobs(jobs, between));
            (job.cache, outcome)
        });
        outcome.unwrap_or_else(|payload| std::panic::resume_unwind(payload))
    }

    /// Runs one step of what calls wait for, if any do and none of them leads it: for threads that work for others.
    /// Returns whether there was something to do.
    pub fn run_waiting_step(&self) -> bool {
        self.batcher.step(&|jobs, between| self.run_jobs(jobs, between))
    }

    /// Takes the first tokens of each job through the model and commits them. What concerns one job is its result; after
    /// an error all are as before.
    fn run_jobs(&self, jobs: &mut [(Job, usize)], between: &mut Between<'_>) -> Result<Vec<Result<Done>>> {
        self.model.checkpoint().check_sizes()?;
        let vocab = self.model.config().vocab_size;
        let is_shared = jobs.len() > 1;
        let (mut results, mut staged) = (Vec::new(), Vec::new());
        for (job, count) in jobs.iter_mut() {
            let prepared = self.with_room(|| job.cache.stage(*count)).and_then(|staged| {
                // memory first: what has run on a device is part of its sequence
                let rows = if is_shared && job.draw.is_none() { job.rows(*count).of(*count).len() } else { 0 };
                Ok((staged, alloc::with_capacity("logits of a step", rows * vocab)?))
            });
            let (stage, result) = match prepared {
                Ok((stage, logits)) => (Some(stage), Ok(Done { tokens: *count, logits, chosen: None })),
                Err(error) => (None, Err(error)),
            };
            staged.push(stage);
            results.push(result);
        }

        let (mut segments, mut draws) = (Vec::new(), Vec::new());
        for ((job, count), stage) in jobs.iter().zip(&mut staged) {
            if let Some(staged) = stage.take() {
                let (tokens, logits) = (&job.tokens[..*count], job.rows(*count));
                segments.push(Segment { cache: &job.cache, staged, tokens, logits });
                draws.push(job.draw.as_ref());
            }
        }
        if segments.is_empty() {
            return Ok(results);
        }
        let Stepped { mut logits, choices } = self.run(&mut segments, &draws, between)?;
        let is_one = segments.len() == 1;
        let ran: Vec<_> = segments.into_iter().map(|s| (s.wanted().len() * vocab, s.staged)).collect();
        let mut choices = choices.into_iter();
        let mut first = 0;
        let ok = jobs.iter_mut().zip(&mut results).filter(|(_, result)| result.is_ok());
        for (((job, count), result), (values, staged)) in ok.zip(ran) {
            let Ok(done) = result else { continue };
            if let (Some((token, hidden)), Some(draw)) = (choices.next().flatten(), job.draw.take()) {
                self.choices.fetch_add(u64::from(token.is_some()), Ordering::Relaxed);
                done.chosen = Some(Chosen { draw, token, hidden });
            } else if is_one {
                done.logits = std::mem::take(&mut logits);
            } else {
                let row = &logits[first..first + values];
                first += values;
                // reserved above, except for a draw that was not followed: of one token, which can still be refused
                if let Err(error) = alloc::reserve("logits of a step", &mut done.logits, values) {
                    *result = Err(error);
                    continue;
                }
                done.logits.extend_from_slice(row);
            }
            job.cache.commit(staged);
            self.cache.count_computed(*count);
        }
        Ok(results)
    }
}

impl Job {
    /// Which logits are wanted of its first `count` tokens.
    fn rows(&self, count: usize) -> LogitRows {
        if self.logits == LogitRows::Last && count < self.tokens.len() { LogitRows::None } else { self.logits }
    }
}
