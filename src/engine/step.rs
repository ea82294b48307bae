//! What a session's call wants of a step, and how a step of several calls is run.
#![forbid(unsafe_code)]

use crate::alloc;
use crate::cache::SequenceCache;
use crate::error::Result;
use crate::model::deepseek_v4::{LogitRows, Segment};

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
}

/// What a step did for a job.
pub(crate) struct Done {
    /// Tokens that are in the sequence now, the first ones of the job.
    pub(crate) tokens: usize,
    /// Logits `[rows, vocab]` of those that were wanted: of the last one only if it is among the tokens.
    pub(crate) logits: Vec<f32>,
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

    /// Takes the first of `tokens`, at least one of them, through the model behind what `cache` holds, together with what
    /// other calls want at the same time. On error the cache is as before.
    ///
    /// # Panics
    /// With a panic of the step, if it was over these tokens alone; the cache is then as before.
    pub(crate) fn step(
        &self,
        cache: &mut Home<SequenceCache>,
        tokens: &[u32],
        logits: LogitRows,
        terms: &Terms,
    ) -> Result<Done> {
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
            let job = Job { cache, tokens, logits };
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
                let rows = if is_shared { job.rows(*count).of(*count).len() } else { 0 };
                Ok((staged, alloc::with_capacity("logits of a step", rows * vocab)?))
            });
            let (stage, result) = match prepared {
                Ok((stage, logits)) => (Some(stage), Ok(Done { tokens: *count, logits })),
                Err(error) => (None, Err(error)),
            };
            staged.push(stage);
            results.push(result);
        }

        let mut segments = Vec::new();
        for ((job, count), stage) in jobs.iter().zip(&mut staged) {
            if let Some(staged) = stage.take() {
                let (tokens, logits) = (&job.tokens[..*count], job.rows(*count));
                segments.push(Segment { cache: &job.cache, staged, tokens, logits });
            }
        }
        if segments.is_empty() {
            return Ok(results);
        }
        let mut logits = self.run(&mut segments, between)?;
        let is_one = segments.len() == 1;
        let ran: Vec<_> = segments.into_iter().map(|s| (s.wanted().len() * vocab, s.staged)).collect();
        let mut first = 0;
        let done = jobs.iter_mut().zip(&mut results).filter_map(|(job, result)| Some((job, result.as_mut().ok()?)));
        for (((job, count), done), (values, staged)) in done.zip(ran) {
            if is_one {
                done.logits = std::mem::take(&mut logits);
            } else {
                done.logits.extend_from_slice(&logits[first..first + values]);
            }
            first += values;
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
