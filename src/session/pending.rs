//! Calls that are submitted: no thread waits in them, whoever steps for others has them go on, and their news are fetched.
//!
//! They run the same code as calls whose thread waits (`Session::run`, `Decoding::advance`), as the task of an agenda. While
//! they run, the session is theirs.
#![forbid(unsafe_code)]

use std::any::Any;
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::TokenId;
use crate::engine::{CancelToken, Engine, LOOK, Task};
use crate::error::{Error, ErrorKind, Result};
use crate::sampler::Sampler;

use super::{Decoding, Finish, GenerateOptions, Piece, Progress, Session};

/// News of a submitted call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A prompt has come so far. Only the last such news is kept.
    Progress(Progress),
    /// A token was generated.
    Piece(Piece),
    /// The call is over, and this is the last news: why a generation ended, nothing for a prompt, or the error that the
    /// call would have returned. A panic is an error of kind `Panic`, and the session is lost.
    End(Result<Option<Finish>>),
}

/// A submitted call: see [`Session::submit`]. It has the session until [`Pending::into_parts`] gives it back; dropping it
/// ends the call and the session.
///
/// One thread's loop, with any number of calls:
///
/// ```
/// # use dsv4::{Engine, EngineOptions, Model, Session, SessionOptions};
/// # let engine = Engine::new(&Model::open("examples/models/tiny-v4")?, EngineOptions::default())?;
/// use dsv4::{Event, GenerateOptions, Sampler, SamplerOptions};
/// let mut calls = Vec::new();
/// for token in [300, 400] {
///     let mut session = Session::new(&engine, SessionOptions::default())?;
///     session.feed(&[0, token])?;
///     let options = GenerateOptions { max_tokens: Some(8), ..Default::default() };
///     calls.push(session.submit_generation(Sampler::new(SamplerOptions::default())?, options));
/// }
/// while !calls.is_empty() {
///     // where nothing is to be done, sleep on `engine.wake_fd()` among whatever else the program waits for
///     engine.run_waiting_step();
///     calls.retain_mut(|call| loop {
///         match call.poll() {
///             Some(Event::Piece(piece)) => print!("{}", piece.text),
///             Some(Event::Progress(_)) => {}
///             Some(Event::End(finish)) => {
///                 println!(" [{finish:?}]");
///                 break false;
///             }
///             None => break true,
///         }
///     });
/// }
/// # Ok::<(), dsv4::Error>(())
/// ```
pub struct Pending {
    engine: Arc<Engine>,
    task: Arc<Task>,
    mail: Arc<Mail>,
    cancel: CancelToken,
}

/// What a call is to do.
enum Errand {
    Feed(Vec<TokenId>),
    Generate(Result<Decoding>),
}

/// What a call leaves for its owner.
#[derive(Default)]
struct Mail(Mutex<Letters>);

#[derive(Default)]
struct Letters {
    events: VecDeque<Event>,
    /// What the call had, when it is over.
    parts: Option<(Session, Option<Sampler>)>,
}

impl Session {
    /// Submits a [`Session::feed`] of `tokens` and returns at once: nothing is computed or checked yet. The work is done by
    /// calls of [`Engine::run_waiting_step`] and by threads that wait in calls of other sessions, in the same steps as
    /// theirs and with the same results as a call that waits. The session's call options hold, but for `waits_only`.
    ///
    /// ```
    /// # use dsv4::{Engine, EngineOptions, Model, Session, SessionOptions};
    /// # let engine = Engine::new(&Model::open("examples/models/tiny-v4")?, EngineOptions::default())?;
    /// # let session = Session::new(&engine, SessionOptions::default())?;
    /// use dsv4::Event;
    /// let mut call = session.submit(vec![300; 40]);
    /// // `wait` works or waits until there is news; `poll` only asks
    /// while let Some(event) = call.wait(None) {
    ///     if let Event::End(result) = event {
    ///         result?;
    ///     }
    /// }
    /// let (session, _) = call.into_parts()?;
    /// assert_eq!(session.position(), 40);
    /// # Ok::<(), dsv4::Error>(())
    /// ```
    pub fn submit(self, tokens: Vec<TokenId>) -> Pending {
        Pending::begin(self, None, Errand::Feed(tokens))
    }

    /// Submits a [`Session::generate`] to its end, as [`Session::submit`] does.
    pub fn submit_generation(self, sampler: Sampler, options: GenerateOptions) -> Pending {
        let decoding = Decoding::new(&self, options);
        Pending::generate(self, sampler, decoding)
    }
}

impl Pending {
    /// A generation that was prepared for `session`.
    pub(crate) fn generate(session: Session, sampler: Sampler, decoding: Result<Decoding>) -> Self {
        Self::begin(session, Some(sampler), Errand::Generate(decoding))
    }

    fn begin(mut session: Session, mut sampler: Option<Sampler>, errand: Errand) -> Self {
        let (engine, cancel, mail) = (Arc::clone(session.engine()), session.cancel_token(), Arc::<Mail>::default());
        session.submitted = Some(Instant::now());
        let letters = Arc::clone(&mail);
        let task = engine.begin_task(Box::pin(async move {
            let result = errand.run(&mut session, sampler.as_mut(), &letters).await;
            session.submitted = None;
            letters.end((session, sampler), result);
        }));
        Self { engine, task, mail, cancel }
    }

    /// The oldest news that was not fetched; `None` if there is none now. Does no work.
    ///
    /// In a fork of the process the call is over, with `Unavailable`.
    pub fn poll(&mut self) -> Option<Event> {
        if let Err(error) = self.engine.check_process() {
            return Some(Event::End(Err(error)));
        }
        let event = self.mail.letters().events.pop_front();
        event.or_else(|| self.task.take_panic().map(|payload| Event::End(Err(panicked(&*payload)))))
    }

    /// As [`Pending::poll`], but works or waits until there is news, for `limit` at most. Behind the end there is none.
    pub fn wait(&mut self, limit: Option<Duration>) -> Option<Event> {
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        loop {
            let is_inherited = self.engine.check_process().is_err();
            let is_last =
                is_inherited || self.task.is_over() || deadline.is_some_and(|deadline| Instant::now() >= deadline);
            let event = self.poll();
            if event.is_some() || is_last {
                return event;
            }
            if !self.engine.work_for_all() {
                self.task.wait(LOOK);
            }
        }
    }

    /// A handle that cancels the call from any thread: it ends with `Cancelled`, as one that waits would.
    pub fn cancel_token(&self) -> CancelToken {
        self.cancel.clone()
    }

    /// The session, and a generation's sampler, as they are after a call. One that is not over is cancelled; if a thread
    /// has it in a step right now, that is waited for.
    ///
    /// # Errors
    /// `Panic` if a panic ended the call; `Unavailable` in a fork of the process.
    pub fn into_parts(mut self) -> Result<(Session, Option<Sampler>)> {
        self.take_parts()
    }

    /// As [`Pending::into_parts`], the first time.
    pub(crate) fn take_parts(&mut self) -> Result<(Session, Option<Sampler>)> {
        self.engine.check_process()?;
        self.end();
        let parts = self.mail.letters().parts.take();
        parts.ok_or_else(|| Error::new(ErrorKind::Panic, "the session was lost in a panic of its submitted call"))
    }

    /// Cancels the call if it is not over, and waits for its end.
    fn end(&self) {
        if self.task.is_over() {
            return;
        }
        loop {
            self.cancel.cancel();
            self.engine.dismiss_stopped();
            if self.task.advance() {
                break;
            }
            self.task.wait(LOOK);
        }
        // it may have ended by itself
        self.cancel.reset();
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        match self.engine.check_process() {
            Ok(()) => self.end(),
            // what it has could wait for threads that are not here
            Err(_) => std::mem::forget((Arc::clone(&self.task), Arc::clone(&self.mail))),
        }
    }
}

impl Errand {
    async fn run(self, session: &mut Session, sampler: Option<&mut Sampler>, mail: &Mail) -> Result<Option<Finish>> {
        match self {
            Self::Generate(decoding) => {
                let sampler = sampler.expect("a generation is begun with one");
                generate(session, sampler, decoding?, mail).await.map(Some)
            }
            Self::Feed(tokens) => {
                let tell = |progress| {
                    mail.progress(progress);
                    ControlFlow::Continue(())
                };
                session.read(&tokens, tell).await?;
                Ok(None)
            }
        }
    }
}

async fn generate(session: &mut Session, sampler: &mut Sampler, mut decoding: Decoding, mail: &Mail) -> Result<Finish> {
    loop {
        mail.reserve()?;
        mail.tell(Event::Piece(decoding.advance(session, sampler).await?));
        if let Some(finish) = decoding.finish() {
            return Ok(finish);
        }
        // each token is a call of its own
        session.submitted = Some(Instant::now());
    }
}

impl Mail {
    fn letters(&self) -> MutexGuard<'_, Letters> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes room for one more.
    fn reserve(&self) -> Result<()> {
        let events = &mut self.letters().events;
        events.try_reserve(1).map_err(|_| Error::out_of_memory("news of a call", size_of::<Event>() as u64))
    }

    fn tell(&self, event: Event) {
        self.letters().events.push_back(event);
    }

    fn progress(&self, progress: Progress) {
        let events = &mut self.letters().events;
        match events.back_mut() {
            Some(Event::Progress(last)) => *last = progress,
            _ => events.push_back(Event::Progress(progress)),
        }
    }

    fn end(&self, parts: (Session, Option<Sampler>), result: Result<Option<Finish>>) {
        let mut letters = self.letters();
        letters.parts = Some(parts);
        letters.events.push_back(Event::End(result));
    }
}

fn panicked(payload: &(dyn Any + Send)) -> Error {
    let text = payload.downcast_ref::<&str>().copied().or(payload.downcast_ref::<String>().map(String::as_str));
    let text = text.unwrap_or("no text");
    Error::new(ErrorKind::Panic, format!("panic in a submitted call: {text}; this is a defect of the library"))
}
