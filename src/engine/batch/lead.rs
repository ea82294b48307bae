//! The leader and its followers.
//!
//! A call leaves its work here and waits. Whoever finds no leader leads: it forms a step of what all wait for, runs it,
//! deals out the results, and hands over to another that waits, or goes on until its own call is served. So at any time
//! there is at most one leader, and one whenever somebody waits who may lead.
//!
//! A leader's panic or error is nobody else's: a step of several calls that fails as a whole is dropped, and each of its
//! calls gets a step of its own, whose panic or error then is its owner's. Work moves to the leader and comes back with
//! the result, so nothing is shared while it is worked on.
//!
//! A call for which there is no room stays in the queue, and takes part in a step again when there may be: when as much is
//! free as it lacked, or when nobody else has anything to do.
//!
//! A call may also be [submitted](Batcher::submit): then no thread waits in it, and its result wakes a task. If nobody is
//! left who leads, whoever steps for others is [told](Runner::unattended).
#![forbid(unsafe_code)]

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::engine::cancel::Stop;
use crate::error::{Error, ErrorKind, Result};

use super::compose::{Demand, Limits, compose};
use super::pace::Pace;
use super::sync::{Guard, Monitor, attend};

/// How often a thread that does not lead looks whether its call was stopped, and a leader whether there is room.
pub(crate) const LOOK: Duration = Duration::from_millis(5);
/// How long a leader that waits for callers only lets others run instead of going to sleep, from which it wakes late.
const ATTENTIVE: Duration = Duration::from_micros(200);
/// Results up to which the leader wakes all threads itself, which is sooner; of more, it wakes one in [`FAN`].
const FEW: usize = 16;
/// That thread and those whom it wakes.
const FAN: usize = 8;

/// Called before each layer; its error ends the step.
pub(crate) type Between<'a> = dyn FnMut(usize) -> Result<()> + Send + 'a;

/// What the leader does with jobs.
pub(crate) trait Runner<J, R> {
    /// Runs one step of jobs and how many of their tokens it takes: a reply for each, or one error for all, which then are
    /// as before.
    fn run(&self, jobs: &mut [(J, usize)], between: &mut Between<'_>) -> Result<Vec<Reply<R>>>;

    /// How much room there is for jobs that wait for some.
    fn room(&self) -> u64 {
        0
    }

    /// What the next step may have of `limits`.
    fn squeeze(&self, limits: Limits) -> Limits {
        limits
    }

    /// Told, under the queue's lock, that calls wait and none of their threads leads.
    fn unattended(&self) {}
}

/// What a step answers a job.
pub(crate) enum Reply<R> {
    /// It was served, or failed by itself.
    Done(Result<R>),
    /// It is answered, but took no part in the step.
    Aside(R),
    /// There is no room for it: at least so much must become free. The job is as before.
    Later(u64),
}

/// What became of a job: its result, or what a panic left.
pub(crate) type Outcome<R> = Result<Result<R>, Box<dyn Any + Send>>;

/// A call's job and how it wants to be treated.
pub(crate) struct Call<J> {
    /// The work.
    pub(crate) job: J,
    /// What it wants.
    pub(crate) demand: Demand,
    /// What may end it.
    pub(crate) stop: Stop,
    /// Whether its thread may lead steps; one that does not waits until others do.
    pub(crate) leads: bool,
    /// Who calls.
    pub(crate) member: u64,
    /// Whether it is expected back soon after its result.
    pub(crate) returns: bool,
}

/// Where the calls of one engine meet.
pub(crate) struct Batcher<J, R> {
    /// The leader waits here, until everybody is there that it waits for.
    state: Monitor<State<J, R>>,
    /// How many are still away.
    expected: AtomicUsize,
    /// Nanoseconds that [`Pace::patience`] says.
    patience: AtomicU64,
    calls: AtomicU64,
    members: AtomicU64,
    limits: Limits,
}

pub(super) struct State<J, R> {
    pub(super) waiting: Vec<Waiting<J, R>>,
    pub(super) is_led: bool,
    /// Those of the last step who are expected back.
    away: Vec<u64>,
    pace: Pace,
}

pub(super) struct Waiting<J, R> {
    call: Call<J>,
    seat: Arc<Seat<J, R>>,
    /// The room it waits for.
    needs: Option<u64>,
}

/// Where one call waits.
struct Seat<J, R> {
    news: Monitor<News<J, R>>,
    /// Whether no thread waits here, but a task.
    is_task: bool,
}

enum News<J, R> {
    /// With the task to wake, if it is one that waits.
    None(Option<Waker>),
    /// The thread leads from now on.
    Lead,
    /// A result, and whom else the thread wakes, for whom there are results too: waking many takes one thread a while.
    Done(J, Outcome<R>, Vec<Arc<Seat<J, R>>>),
}

/// The result of a call that was submitted, when it is there.
pub(crate) struct Ticket<J, R>(Arc<Seat<J, R>>);

/// Where a call waits, its job and what became of it.
type Told<J, R> = (Arc<Seat<J, R>>, J, Outcome<R>);

/// A call in a step, without its job.
struct Served<J, R> {
    call: Call<()>,
    seat: Arc<Seat<J, R>>,
}

/// A step that was formed: the calls in it, and their jobs with their numbers of tokens.
struct Step<J, R> {
    calls: Vec<Served<J, R>>,
    jobs: Vec<(J, usize)>,
}

impl<J, R> Batcher<J, R> {
    /// For steps of at most `rows` tokens and `sequences` jobs.
    pub(crate) fn new(rows: usize, sequences: usize) -> Self {
        let state = State { waiting: Vec::new(), is_led: false, away: Vec::new(), pace: Pace::new(rows) };
        Self {
            state: Monitor::new(state),
            expected: AtomicUsize::new(0),
            patience: AtomicU64::new(0),
            calls: AtomicU64::new(0),
            members: AtomicU64::new(0),
            limits: Limits { rows, sequences, prefill: rows },
        }
    }

    /// A number for a caller.
    pub(crate) fn new_member(&self) -> u64 {
        self.members.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// A number for a call: its age among others.
    pub(crate) fn new_call(&self) -> u64 {
        self.calls.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// How soon after its result a caller must be back to be waited for.
    pub(crate) fn patience(&self) -> Duration {
        Duration::from_nanos(self.patience.load(Ordering::Relaxed))
    }

    /// Has the call's job done in a step, by this thread or another, and returns it with its result: `Cancelled` if the call
    /// was stopped before, an error or a panic of `run` that concerns this job alone.
    pub(crate) fn call(&self, call: Call<J>, work: &dyn Runner<J, R>) -> (J, Outcome<R>) {
        let seat = Seat::new(false);
        let (stop, may_lead) = (call.stop.clone(), call.leads);
        if self.enter(call, &seat, work) {
            self.lead(Some(&seat), work);
        }
        loop {
            match seat.wait((!may_lead).then_some(LOOK)) {
                News::Done(job, outcome, others) => {
                    others.iter().for_each(|seat| seat.news.tell());
                    return (job, outcome);
                }
                News::Lead => self.lead(Some(&seat), work),
                News::None(_) => {
                    if stop.is_asked() {
                        self.withdraw(&seat);
                    }
                }
            }
        }
    }

    /// As [`Self::call`] for a caller that does not wait and whose thread never leads.
    pub(crate) fn submit(&self, call: Call<J>, work: &dyn Runner<J, R>) -> Ticket<J, R> {
        let seat = Seat::new(true);
        self.enter(Call { leads: false, ..call }, &seat, work);
        Ticket(seat)
    }

    /// Ends the calls in the queue that were stopped, if their threads do not lead: one that does may have been told to a
    /// moment ago, and then nobody else would.
    pub(crate) fn dismiss(&self) {
        self.state().dismiss(|call| !call.leads);
    }

    /// Runs one step of what waits, if anything does and nobody leads: for a thread that works for others. Returns whether
    /// there was something to do.
    pub(crate) fn step(&self, work: &dyn Runner<J, R>) -> bool {
        {
            let mut state = self.state();
            if state.is_led || state.waiting.is_empty() {
                return false;
            }
            state.is_led = true;
        }
        self.lead(None, work);
        true
    }

    /// Queues the call; whether its thread leads from now on.
    fn enter(&self, call: Call<J>, seat: &Arc<Seat<J, R>>, work: &dyn Runner<J, R>) -> bool {
        let mut state = self.state();
        state.away.retain(|&member| member != call.member);
        self.expected.store(state.away.len(), Ordering::Relaxed);
        let leads = call.leads && !state.is_led;
        state.is_led |= leads;
        state.waiting.push(Waiting { call, seat: Arc::clone(seat), needs: None });
        if state.away.is_empty() {
            self.state.tell();
        }
        if !state.is_led {
            work.unattended();
        }
        leads
    }

    /// Leads until the call of `own` is served, or for one step; then hands over.
    fn lead(&self, own: Option<&Arc<Seat<J, R>>>, work: &dyn Runner<J, R>) {
        loop {
            if let Some(step) = self.form(work) {
                self.run(step, work);
            }
            let mut state = self.state();
            let is_own = |w: &Waiting<J, R>| own.is_some_and(|own| Arc::ptr_eq(own, &w.seat));
            if state.waiting.iter().any(is_own) {
                continue;
            }
            match state.waiting.iter().filter(|w| w.call.leads).min_by_key(|w| w.call.demand.since) {
                Some(next) => next.seat.tell(News::Lead),
                None => {
                    state.is_led = false;
                    if !state.waiting.is_empty() {
                        work.unattended();
                    }
                }
            }
            return;
        }
    }

    /// Waits a little for those who are expected, turns away those who were stopped, and forms a step of the others.
    fn form(&self, work: &dyn Runner<J, R>) -> Option<Step<J, R>> {
        let mut state = self.state();
        let patience = state.pace.patience();
        let until = Instant::now() + patience;
        if !state.away.is_empty() {
            drop(state);
            attend(ATTENTIVE.min(patience), || self.expected.load(Ordering::Relaxed) > 0);
            state = self.state();
        }
        while !state.away.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.state.wait_for(state, left);
        }
        state.away.clear();
        let is_held_up = |state: &State<J, R>| state.waiting.iter().all(|w| w.needs.is_some());
        if !state.waiting.is_empty() && is_held_up(&state) {
            state = self.state.wait_for(state, LOOK);
        }
        state.dismiss(|_| true);

        let room = match state.waiting.iter().any(|w| w.needs.is_some()) {
            true if is_held_up(&state) => u64::MAX,
            true => work.room(),
            false => 0,
        };
        let waiting = std::mem::take(&mut state.waiting);
        let (fit, held_up) = waiting.into_iter().partition(|w| w.needs.is_none_or(|needs| needs <= room));
        state.waiting = held_up;
        self.compose(&mut state, fit, work)
    }

    /// Forms a step of `fit`; those that have no part in it stay in the queue.
    fn compose(&self, state: &mut State<J, R>, fit: Vec<Waiting<J, R>>, work: &dyn Runner<J, R>) -> Option<Step<J, R>> {
        let demands: Vec<Demand> = fit.iter().map(|w| w.call.demand).collect();
        let limits = work.squeeze(Limits { prefill: state.pace.prefill(), ..self.limits });
        let mut tokens = vec![0; demands.len()];
        compose(&demands, limits).iter().for_each(|share| tokens[share.index] = share.tokens);
        let mut step = Step { calls: Vec::new(), jobs: Vec::new() };
        let mut fit: Vec<_> = fit.into_iter().zip(tokens).collect();
        // those with few tokens side by side: a device takes neighbours of a kind together, and has less to be told where
        // the same callers come in the same order
        fit.sort_by_key(|(waiting, tokens)| (*tokens, waiting.call.member));
        for (mut waiting, tokens) in fit {
            if tokens == 0 {
                waiting.call.demand.passed += 1;
                state.waiting.push(waiting);
                continue;
            }
            let (call, job) = waiting.call.split();
            step.calls.push(Served { call, seat: waiting.seat });
            step.jobs.push((job, tokens));
        }
        (!step.jobs.is_empty()).then_some(step)
    }

    /// Runs the step and deals out what became of it.
    fn run(&self, step: Step<J, R>, work: &dyn Runner<J, R>) {
        let Step { calls, mut jobs } = step;
        let stops: Vec<Stop> = calls.iter().map(|served| served.call.stop.clone()).collect();
        let mut between = |_: usize| match stops.iter().all(Stop::is_asked) {
            true => Err(Error::new(ErrorKind::Cancelled, "cancelled")),
            false => Ok(()),
        };
        let start = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| work.run(&mut jobs, &mut between)));
        let took = start.elapsed();

        let mut state = self.state();
        if let Ok(Ok(replies)) = &outcome {
            let served = |i: usize| matches!(replies.get(i), Some(Reply::Done(Ok(_))));
            let tokens = |decodes: bool| {
                let of_kind =
                    calls.iter().zip(&jobs).enumerate().filter(move |(_, (s, _))| s.call.demand.decodes == decodes);
                of_kind.filter(|(i, _)| served(*i)).map(|(_, (_, job))| job.1).sum::<usize>()
            };
            if tokens(true) + tokens(false) > 0 {
                state.pace.observe(tokens(true) > 0, tokens(false), took);
                self.patience.store(state.pace.patience().as_nanos() as u64, Ordering::Relaxed);
            }
        }

        let several = jobs.len() > 1;
        let mut results = match outcome {
            Ok(Ok(results)) => Ok(results.into_iter()),
            Ok(Err(error)) => Err(Ok(error)),
            Err(payload) => Err(Err(payload)),
        };
        let mut told = Vec::new();
        for (Served { mut call, seat }, (job, _)) in calls.into_iter().zip(jobs) {
            let outcome = match &mut results {
                Ok(results) => match results.next() {
                    Some(Reply::Done(result)) => Ok(result),
                    Some(Reply::Aside(answer)) => Ok(Ok(answer)),
                    Some(Reply::Later(needs)) => {
                        // it had its turn, so that those who were passed over come first
                        call.demand.passed = 0;
                        state.waiting.push(Waiting { call: call.with(job), seat, needs: Some(needs) });
                        continue;
                    }
                    None => Ok(Err(missing())),
                },
                Err(Ok(error)) if error.kind() == ErrorKind::Cancelled => Ok(Err(stopped(&call.stop))),
                Err(_) if several => {
                    call.demand.apart = true;
                    state.waiting.push(Waiting { call: call.with(job), seat, needs: None });
                    continue;
                }
                Err(Ok(error)) => Ok(Err(error.clone())),
                Err(Err(payload)) => Err(std::mem::replace(payload, Box::new(()))),
            };
            if call.returns && outcome.is_ok() {
                state.away.push(call.member);
            }
            told.push((seat, job, outcome));
        }
        self.expected.store(state.away.len(), Ordering::Relaxed);
        // those who wake want the lock
        drop(state);
        Self::deal(told);
    }

    /// Gives everybody their result, and wakes tasks, and threads: some, who wake the others.
    fn deal(told: Vec<Told<J, R>>) {
        let (tasks, threads): (Vec<_>, Vec<_>) = told.into_iter().partition(|(seat, ..)| seat.is_task);
        let followers = if threads.len() > FEW { FAN - 1 } else { 0 };
        let mut threads = threads.into_iter();
        while let Some((first, job, outcome)) = threads.next() {
            let mut others = Vec::new();
            for (seat, job, outcome) in threads.by_ref().take(followers) {
                seat.put(News::Done(job, outcome, Vec::new()));
                others.push(seat);
            }
            first.tell(News::Done(job, outcome, others));
        }
        tasks.into_iter().for_each(|(seat, job, outcome)| seat.tell(News::Done(job, outcome, Vec::new())));
    }

    /// Takes the call out of the queue, if it is still there, since it was stopped.
    fn withdraw(&self, seat: &Arc<Seat<J, R>>) {
        let mut state = self.state();
        if let Some(i) = state.waiting.iter().position(|w| Arc::ptr_eq(&w.seat, seat)) {
            let call = state.waiting.remove(i).call;
            seat.tell(News::Done(call.job, Ok(Err(stopped(&call.stop))), Vec::new()));
        }
    }

    pub(super) fn state(&self) -> Guard<'_, State<J, R>> {
        self.state.lock()
    }
}

impl<J, R> State<J, R> {
    /// Ends the calls that were stopped, of those that are `meant`.
    fn dismiss(&mut self, meant: impl Fn(&Call<J>) -> bool) {
        for i in (0..self.waiting.len()).rev() {
            if meant(&self.waiting[i].call) && self.waiting[i].call.stop.is_asked() {
                let Waiting { call, seat, .. } = self.waiting.remove(i);
                seat.tell(News::Done(call.job, Ok(Err(stopped(&call.stop))), Vec::new()));
            }
        }
    }
}

impl<J, R> Future for Ticket<J, R> {
    type Output = (J, Outcome<R>);

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut news = self.0.news.lock();
        match std::mem::replace(&mut *news, News::None(Some(context.waker().clone()))) {
            News::Done(job, outcome, _) => Poll::Ready((job, outcome)),
            News::None(_) | News::Lead => Poll::Pending,
        }
    }
}

impl<J, R> Seat<J, R> {
    fn new(is_task: bool) -> Arc<Self> {
        Arc::new(Self { news: Monitor::new(News::None(None)), is_task })
    }

    fn tell(&self, news: News<J, R>) {
        let before = self.put(news);
        self.news.tell();
        if let News::None(Some(waker)) = before {
            waker.wake();
        }
    }

    /// Leaves news for a thread that somebody wakes afterwards; what was there before.
    fn put(&self, news: News<J, R>) -> News<J, R> {
        std::mem::replace(&mut *self.news.lock(), news)
    }

    /// The next news; none if there is a limit to the waiting and it has passed.
    fn wait(&self, limit: Option<Duration>) -> News<J, R> {
        let mut news = self.news.lock();
        while matches!(*news, News::None(_)) {
            match limit {
                None => news = self.news.wait(news),
                Some(limit) => {
                    news = self.news.wait_for(news, limit);
                    break;
                }
            }
        }
        std::mem::replace(&mut *news, News::None(None))
    }
}

impl<J> Call<J> {
    fn split(self) -> (Call<()>, J) {
        let Self { job, demand, stop, leads, member, returns } = self;
        (Call { job: (), demand, stop, leads, member, returns }, job)
    }
}

impl Call<()> {
    fn with<J>(self, job: J) -> Call<J> {
        let Self { demand, stop, leads, member, returns, .. } = self;
        Call { job, demand, stop, leads, member, returns }
    }
}

/// Why a stopped call ends; uses its cancel up.
fn stopped(stop: &Stop) -> Error {
    let taken_back =
        || Error::new(ErrorKind::Cancelled, "cancelled; the tokens that were complete stay in the session");
    stop.check().err().unwrap_or_else(taken_back)
}

fn missing() -> Error {
    Error::new(ErrorKind::Panic, "a step has no result for one of its calls; this is a defect of the library")
}
