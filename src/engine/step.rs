//! What a session's call wants of a step, and how a step of several calls is run.
#![forbid(unsafe_code)]

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::task::Wake;
use std::time::{Duration, Instant};

use crate::TokenId;
use crate::alloc;
use crate::cache::{SequenceCache, Staged};
use crate::error::{Error, ErrorKind, Result};
use crate::model::deepseek_v4::{LogitRows, Segment};
use crate::sampler::Draw;

use super::Engine;
use super::agenda::{Course, Task};
use super::batch::{Between, Call, Demand, Limits, Reply, Runner};
use super::cancel::Stop;
use super::options::WhenFull;
use super::room::{Inside, Line, Place, Plan, Slot};

/// Tokens of a call up to which it counts as decoding.
const DECODING: usize = 8;

/// Tokens of one sequence that are to go through the model. Without any, the sequence is only brought into pages.
pub(crate) struct Job {
    slot: Arc<Slot>,
    tokens: Vec<u32>,
    logits: LogitRows,
    last: Last,
    decodes: bool,
    waits: bool,
    plan: Plan,
    /// When the call began, and when it came to the queue with these tokens.
    began: Instant,
    entered: Instant,
    /// Whether the call is complete with these tokens.
    ends: bool,
}

/// What a call wants of a step.
pub(crate) struct Work<'a> {
    /// Tokens, at least one of which goes through the model. Without any, the sequence is only brought into pages.
    pub(crate) tokens: &'a [u32],
    /// Which of them get logits.
    pub(crate) logits: LogitRows,
    /// What becomes of the last one's logits.
    pub(crate) last: Last,
    /// Whether no tokens of the call come behind these.
    pub(crate) ends: bool,
}

/// What becomes of the logits of a call's last token.
#[derive(Clone, Debug, Default)]
pub(crate) enum Last {
    /// They come to the host.
    #[default]
    Come,
    /// Nobody may want them: a device may keep them.
    Stay,
    /// As [`Self::Stay`], and a device that can chooses a token from them.
    Choose(#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only a device chooses"))] Draw),
}

/// Instead of logits that stayed with a device.
pub(crate) struct Stayed {
    /// What the logits come from, bf16: see [`Engine::logits_of`].
    pub(crate) hidden: Vec<u16>,
    /// How a token was chosen; `None` for it where the sampler finds an error in the logits.
    pub(crate) choice: Option<(Draw, Option<TokenId>)>,
}

/// What a step gives.
#[derive(Default)]
pub(super) struct Stepped {
    /// Logits of the wanted rows, without those that stayed.
    pub(super) logits: Vec<f32>,
    /// What there is of segments whose logits stayed. There may be fewer than segments.
    pub(super) stayed: Vec<Option<Stayed>>,
}

/// What a step did for a job.
#[derive(Default)]
pub(crate) struct Done {
    /// Tokens that are in the sequence now, the first ones of the job. None if the sequence had been lost: then it is empty.
    pub(crate) tokens: usize,
    /// Logits `[rows, vocab]` of those that were wanted: of the last one only if it is among the tokens.
    pub(crate) logits: Vec<f32>,
    /// Instead of logits, if they stayed with the device.
    pub(crate) stayed: Option<Stayed>,
    /// Time before the step.
    pub(crate) queued: Duration,
    /// Time of the step.
    pub(crate) took: Duration,
}

/// What a call asks for, besides its tokens.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// Tokens of the call in all.
    pub(crate) tokens: usize,
    /// What may end it.
    pub(crate) stop: Stop,
    /// Higher goes first.
    pub(crate) priority: i32,
    /// When it began.
    pub(crate) began: Instant,
    /// What its thread does meanwhile.
    pub(crate) caller: Caller,
    /// Whether it waits for room.
    pub(crate) waits: bool,
    /// What it needs in all.
    pub(crate) plan: Plan,
}

/// What the thread of a call does while its tokens are in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Caller {
    /// It waits, and may work for all who do.
    Leads,
    /// It waits.
    Waits,
    /// It goes on with something else.
    Leaves,
}

/// How a call of a session is treated, however many steps it takes.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    since: u64,
    request: Request,
    decodes: bool,
}

impl Terms {
    /// Whether the call decodes instead of reading a prompt.
    pub(crate) fn decodes(&self) -> bool {
        self.decodes
    }

    /// When the call began.
    pub(crate) fn began(&self) -> Instant {
        self.request.began
    }

    /// Sets what the call needs in all.
    pub(crate) fn plan(&mut self, plan: Plan) {
        self.request.plan = plan;
    }

    /// As these, for work that has to be done before the call can begin.
    pub(crate) fn unplanned(&self) -> Self {
        let plan = Plan { is_checked: false, ..self.request.plan };
        Self { request: Request { plan, ..self.request.clone() }, ..self.clone() }
    }
}

/// A job whose sequence is in pages, with what it needs for the step.
struct Ready<'a> {
    inside: MutexGuard<'a, Inside>,
    staged: Option<Staged>,
    logits: Vec<f32>,
}

impl Ready<'_> {
    fn cache(&self) -> &SequenceCache {
        match &self.inside.place {
            Place::Here(cache) => cache,
            _ => unreachable!("it was brought into pages, and its lock is held"),
        }
    }

    fn cache_mut(&mut self) -> &mut SequenceCache {
        match &mut self.inside.place {
            Place::Here(cache) => cache,
            _ => unreachable!("it was brought into pages, and its lock is held"),
        }
    }
}

impl Engine {
    /// A place for a sequence that takes part in steps.
    pub(crate) fn slot(&self, cache: SequenceCache) -> Arc<Slot> {
        let rollback = cache.rollback();
        self.room.slot(self.batcher.new_member(), Some(cache), rollback)
    }

    /// A place for an empty sequence whose last `rollback` tokens can be taken back. Where calls wait for room, it need not
    /// be there yet.
    pub(crate) fn new_slot(&self, rollback: usize) -> Result<Arc<Slot>> {
        let cache = match self.new_cache(rollback) {
            Ok(cache) => Some(cache),
            Err(e) if e.kind() == ErrorKind::NoBlocks && self.options.when_full == WhenFull::Wait => None,
            Err(error) => return Err(error),
        };
        Ok(self.room.slot(self.batcher.new_member(), cache, rollback))
    }

    /// Begins a call.
    pub(crate) fn begin(&self, request: Request) -> Terms {
        let decodes = request.tokens <= DECODING;
        Terms { since: self.batcher.new_call(), request, decodes }
    }

    /// Takes the first of the tokens through the model behind what `slot` holds, at least one of them, together with what
    /// other calls want at the same time. On error the sequence is as before. If it had been lost, it is empty afterwards,
    /// and nothing else was done.
    ///
    /// The future is ready at once, unless the caller leaves.
    ///
    /// # Panics
    /// With a panic of the step, if it was over these tokens alone; the sequence is then as before.
    pub(crate) async fn step(&self, slot: &Arc<Slot>, work: Work<'_>, terms: &Terms) -> Result<Done> {
        self.check_process()?;
        let Work { tokens, logits, last, ends } = work;
        let tokens = alloc::copied("tokens of a step", tokens)?;
        let Terms { since, decodes, ref request } = *terms;
        // what waits for its pages only is no text that is read
        let decodes = decodes || tokens.is_empty();
        let demand =
            Demand { tokens: tokens.len().max(1), decodes, priority: request.priority, since, passed: 0, apart: false };
        let (waits, plan, began, entered) = (request.waits, request.plan, request.began, Instant::now());
        let returns = slot.is_prompt(self.batcher.patience());
        slot.enqueue(request.priority, since);
        let job = Job { slot: Arc::clone(slot), tokens, logits, last, decodes, waits, plan, began, entered, ends };
        let (stop, leads, member) = (request.stop.clone(), request.caller == Caller::Leads, slot.number());
        let call = Call { job, demand, stop, leads, member, returns };
        let (_, outcome) = match request.caller {
            Caller::Leaves => self.batcher.submit(call, self).await,
            Caller::Leads | Caller::Waits => self.batcher.call(call, self),
        };
        slot.leave();
        let result = outcome.unwrap_or_else(|payload| std::panic::resume_unwind(payload));
        if result.is_err() {
            slot.forget_promise();
        }
        result
    }

    /// Has [submitted](crate::Session::submit) calls go on, and runs one step of what calls wait for, if any do and none of
    /// their threads leads: for threads that work for others. Returns whether there was something to do: never in a fork of
    /// the process.
    pub fn run_waiting_step(&self) -> bool {
        if self.check_process().is_err() {
            return false;
        }
        self.agenda.bell().silence();
        self.work_for_all()
    }

    /// As [`Engine::run_waiting_step`] for a thread that waits for news of one call: whoever sleeps on the descriptor is told
    /// nonetheless, since there may be news for them.
    pub(crate) fn work_for_all(&self) -> bool {
        if self.check_process().is_err() {
            return false;
        }
        let is_advanced = self.agenda.advance();
        let is_stepped = self.batcher.step(self);
        // results are seen now, and the next tokens are in the queue before the next step
        self.agenda.advance();
        is_advanced || is_stepped
    }

    /// For event loops: a descriptor that can be read, as `poll` or `epoll` mean it, while [`Engine::run_waiting_step`] has
    /// something to do, or has left news with submitted calls. It is to be waited for only, and belongs to the engine.
    ///
    /// The loop's round is: wait for the descriptor, call [`Engine::run_waiting_step`] once, ask the submitted calls for
    /// [news](crate::Pending::poll). If several threads do that, each may miss what another one was woken for.
    ///
    /// # Errors
    /// `Io` if the system gives none; `Unavailable` in a fork of the process.
    #[cfg(unix)]
    pub fn wake_fd(&self) -> Result<std::os::fd::RawFd> {
        self.check_process()?;
        self.agenda.bell().descriptor(std::os::fd::AsRawFd::as_raw_fd)
    }

    /// A task for a submitted call. In a fork of the process nothing is done with it.
    pub(crate) fn begin_task(&self, course: Course) -> Arc<Task> {
        let task = Task::new(&self.agenda, course);
        if self.check_process().is_ok() {
            Arc::clone(&task).wake();
        }
        task
    }

    /// Ends the calls in the queue that were stopped, of those whose threads do not lead.
    pub(crate) fn dismiss_stopped(&self) {
        self.batcher.dismiss();
    }

    /// Has everything that a step of the job needs. If nothing was staged, the sequence was brought into pages, and that is
    /// all.
    ///
    /// # Errors
    /// `NoBlocks` and others; the job is as before.
    fn prepare<'a>(&self, job: &'a Job, count: usize, line: Option<Line>, rows: usize) -> Result<Ready<'a>> {
        let slot = &job.slot;
        // no other job of the step has it: a session has one call in the queue at a time
        let mut inside = slot.lock();
        let here = if let Place::Here(cache) = &inside.place { Some(cache) } else { None };
        if job.waits && self.room.yields(line, slot, here, job.plan, count) {
            return Err(self.room.lines_up());
        }
        loop {
            let prepared = self.try_prepare(job, count, rows, &mut inside);
            match prepared {
                Err(e) if e.kind() == ErrorKind::NoBlocks && self.room.make_way(Some(slot), job.waits) => {}
                prepared => {
                    let (staged, logits) = prepared?.unzip();
                    return Ok(Ready { inside, staged, logits: logits.unwrap_or_default() });
                }
            }
        }
    }

    fn try_prepare(
        &self,
        job: &Job,
        count: usize,
        rows: usize,
        inside: &mut Inside,
    ) -> Result<Option<(Staged, Vec<f32>)>> {
        let Job { slot, plan, .. } = job;
        let is_whole = self.with_room(|| self.room.bring(slot, inside))?;
        let Place::Here(cache) = &mut inside.place else { return Ok(None) };
        if job.tokens.is_empty() || !is_whole {
            return Ok(None);
        }
        self.room.admit(slot, cache, *plan)?;
        let staged = self.with_room(|| cache.stage(count))?;
        slot.settle(cache.table_len());
        // memory first: what has run on a device is part of its sequence
        let logits = alloc::with_capacity("logits of a step", rows * self.model.config().vocab_size)?;
        Ok(Some((staged, logits)))
    }

    /// What becomes of a job for which there is no room.
    fn refuse(&self, job: &Job, count: usize, error: Error) -> Reply<Done> {
        if error.kind() != ErrorKind::NoBlocks {
            return Reply::Done(Err(error));
        }
        if job.waits {
            match self.room.is_possible(job.plan) {
                Ok(()) => {
                    self.room.wait(&job.slot);
                    return Reply::Later(self.room.lacks(&job.slot, job.plan, count));
                }
                Err(impossible) => return self.refused(job, impossible),
            }
        }
        self.refused(job, error)
    }

    fn refused(&self, job: &Job, error: Error) -> Reply<Done> {
        self.room.count_refused(job.plan.is_checked && job.slot.promised() < job.plan.end);
        Reply::Done(Err(error))
    }

    /// Whether a step of these replies shows that all who hold pages wait for each other; then the last of them is refused,
    /// preferably one that holds blocks.
    fn break_deadlock(&self, jobs: &[(Job, usize)], line: Option<Line>, replies: &mut [Reply<Done>]) {
        // who leads the line must have had a try
        let is_tried = line.is_none_or(|line| jobs.iter().any(|(job, _)| line.is_of(&job.slot)));
        if !is_tried || !replies.iter().all(|reply| matches!(reply, Reply::Later(_))) || !self.room.is_stuck() {
            return;
        }
        let last = (0..jobs.len()).max_by_key(|&i| (jobs[i].0.slot.held() > 0, jobs[i].0.slot.rank()));
        let Some(i) = last else { return };
        let job = &jobs[i].0;
        replies[i] = self.refused(job, self.room.deadlock(&job.slot, job.plan));
    }
}

impl Runner<Job, Done> for Engine {
    /// Takes the first tokens of each job through the model and commits them. What concerns one job is its result; after
    /// an error all are as before.
    fn run(&self, jobs: &mut [(Job, usize)], between: &mut Between<'_>) -> Result<Vec<Reply<Done>>> {
        self.model.checkpoint().check_sizes()?;
        let (begun, line) = (Instant::now(), self.room.line());
        let (vocab, is_shared) = (self.model.config().vocab_size, jobs.len() > 1);
        let mut order: Vec<usize> = (0..jobs.len()).collect();
        order.sort_by_key(|&i| jobs[i].0.slot.rank());
        let mut replies: Vec<Reply<Done>> = jobs.iter().map(|_| Reply::Aside(Done::default())).collect();
        let mut ready: Vec<Option<Ready<'_>>> = jobs.iter().map(|_| None).collect();
        for i in order {
            let (job, count) = &jobs[i];
            let come = is_shared && matches!(job.last, Last::Come);
            let rows = if come { job.rows(*count).of(*count).len() } else { 0 };
            match self.prepare(job, *count, line, rows) {
                Ok(prepared) if prepared.staged.is_some() => {
                    job.slot.stop_waiting();
                    ready[i] = Some(prepared);
                }
                Ok(brought) => {
                    // under its lock, so that nobody takes the pages before the owner has seen them
                    job.slot.leave();
                    drop(brought);
                    replies[i] = Reply::Aside(Done::default());
                }
                Err(error) => replies[i] = self.refuse(job, *count, error),
            }
        }

        let mut staged: Vec<Option<Staged>> = ready.iter_mut().map(|r| r.as_mut()?.staged.take()).collect();
        let (mut segments, mut lasts) = (Vec::new(), Vec::new());
        for (((job, count), ready), staged) in jobs.iter().zip(&ready).zip(&mut staged) {
            if let (Some(ready), Some(staged)) = (ready, staged.take()) {
                let (tokens, logits) = (&job.tokens[..*count], job.rows(*count));
                segments.push(Segment { cache: ready.cache(), staged, tokens, logits });
                lasts.push(&job.last);
            }
        }
        if segments.is_empty() {
            drop(segments);
            drop(ready);
            self.break_deadlock(jobs, line, &mut replies);
            return Ok(replies);
        }
        self.room.pressure().look(&self.cache);
        let stepped = self.forward(&mut segments, &lasts, between);
        let Stepped { mut logits, stayed } = stepped.inspect_err(|_| self.meter.lock().failed_steps += 1)?;
        let (sessions, mut stayed) = (segments.len(), stayed.into_iter());
        let ran: Vec<_> = segments.into_iter().map(|s| (s.wanted().len() * vocab, s.staged)).collect();
        let (now, took) = (Instant::now(), begun.elapsed());
        let mut counts = self.meter.lock();
        counts.step(sessions, took);
        let mut first = 0;
        let served =
            jobs.iter().zip(ready).zip(&mut replies).filter_map(|((job, ready), reply)| Some((job, ready?, reply)));
        for (((job, count), mut ready, reply), (values, staged)) in served.zip(ran) {
            let mut rows = std::mem::take(&mut ready.logits);
            let stayed = stayed.next().flatten();
            if let Some(Stayed { choice, .. }) = &stayed {
                let is_chosen = choice.as_ref().is_some_and(|(_, token)| token.is_some());
                self.choices.fetch_add(u64::from(is_chosen), Ordering::Relaxed);
            } else if sessions == 1 {
                rows = std::mem::take(&mut logits);
            } else {
                let of_job = &logits[first..first + values];
                first += values;
                // reserved above, except for those that could have stayed: of one token, which can still be refused
                if let Err(error) = alloc::reserve("logits of a step", &mut rows, values) {
                    *reply = Reply::Done(Err(error));
                    continue;
                }
                rows.extend_from_slice(of_job);
            }
            ready.cache_mut().commit(staged);
            self.cache.count_computed(*count);
            let queued = begun.saturating_duration_since(job.entered);
            counts.served(job.decodes, *count, queued);
            if job.ends && *count == job.tokens.len() {
                match ready.inside.left {
                    _ if !job.decodes => counts.first_token(now - job.began),
                    Some(left) if *count == 1 => counts.token(left, now),
                    _ => {}
                }
            }
            ready.inside.left = Some(now);
            // under its lock: from here on its owner has it
            job.slot.leave();
            *reply = Reply::Done(Ok(Done { tokens: *count, logits: rows, stayed, queued, took }));
        }
        Ok(replies)
    }

    fn room(&self) -> u64 {
        self.room.within_reach()
    }

    fn unattended(&self) {
        self.agenda.bell().ring();
    }

    fn squeeze(&self, limits: Limits) -> Limits {
        let Limits { rows, sequences, prefill } = limits;
        let (rows, sequences) = self.room.pressure().squeeze(self.cache.block_bytes(), rows, sequences);
        Limits { rows, sequences, prefill: prefill.min(rows) }
    }
}

impl Job {
    /// Which logits are wanted of its first `count` tokens.
    fn rows(&self, count: usize) -> LogitRows {
        if self.logits == LogitRows::Last && count < self.tokens.len() { LogitRows::None } else { self.logits }
    }
}
