//! A session: one token timeline with its cache, fed and sampled by one thread at a time.
#![forbid(unsafe_code)]

pub mod eval;
mod file;
mod generate;
mod logits;
mod pending;
mod prefix;
mod room;
mod stop;

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::TokenId;
use crate::alloc;
use crate::cache::{BLOCK_TOKENS, Checkpoint, Mark, PrefixKey, State};
use crate::engine::{Done, Engine, Last, SessionMetrics, Slot, Terms, WhenFull, Work, now};
use crate::error::{Error, ErrorKind, Result, bail};
use crate::model::deepseek_v4::LogitRows;
use crate::sampler::Sampler;

use logits::Logits;

pub use crate::engine::CancelToken;
pub use file::{FileProgress, FileStage, SaveOptions, Saved, SessionFile, SessionFileInfo};
pub(crate) use generate::Decoding;
pub use generate::{Finish, GenerateOptions, Generation, Piece};
pub use pending::{Event, Pending};
pub use stop::{Step, StopConditions, StopMatcher, StopReason};

/// Options of a session.
///
/// ```
/// # use dsv4::{Engine, EngineOptions, Model, Session, SessionOptions};
/// # let engine = Engine::new(&Model::open("examples/models/tiny-v4")?, EngineOptions::default())?;
/// // room for 4,096 tokens, and the last four can be taken back without computing
/// let options = SessionOptions { context: 4096, rollback: 4 };
/// let mut session = Session::new(&engine, options)?;
/// session.feed(&[300; 40])?;
/// for token in [301, 302, 303] {
///     session.feed(&[token])?;
/// }
/// session.truncate(41)?;
/// assert_eq!(session.remaining(), 4096 - 41);
/// # Ok::<(), dsv4::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionOptions {
    /// Most tokens the session can hold, prompt and output together; 0 takes the model's
    /// `max_position_embeddings`. Memory for the context is taken as it fills.
    pub context: usize,
    /// Tokens that [`Session::truncate`] can always take back without computing, for callers that try tokens out, such as
    /// drafts; at most [`SessionOptions::MAX_ROLLBACK`]. Each costs a copy of the compressor states and the logits
    /// (V4-Flash: about 2 MB). With 0 a truncation goes back to a checkpoint and computes from there.
    ///
    /// What may still be taken back is not offered to other prompts: of a call with at most `rollback + 1` tokens, the
    /// last `rollback` wait for later ones. A longer call is a prompt and is settled at once.
    pub rollback: usize,
}

impl SessionOptions {
    /// Most tokens of [`SessionOptions::rollback`].
    pub const MAX_ROLLBACK: usize = 64;

    /// The context that a session on `engine` gets, if all options are within their ranges.
    fn context(self, engine: &Engine) -> Result<usize> {
        let longest = engine.model().config().max_position_embeddings;
        if self.context > longest {
            bail!(InvalidArgument, "context is {}; the model's max_position_embeddings is {longest}", self.context);
        }
        if self.rollback > Self::MAX_ROLLBACK {
            bail!(InvalidArgument, "rollback is {}; at most {}", self.rollback, Self::MAX_ROLLBACK);
        }
        Ok(if self.context == 0 { longest } else { self.context })
    }
}

/// How a session's calls are treated among those of others. Calls that wait at the same time go through the model together;
/// each of their threads may be the one that does the work.
///
/// ```
/// # use dsv4::{Engine, EngineOptions, Model, Session, SessionOptions};
/// # let engine = Engine::new(&Model::open("examples/models/tiny-v4")?, EngineOptions::default())?;
/// # let mut session = Session::new(&engine, SessionOptions::default())?;
/// use std::time::Duration;
/// use dsv4::{CallOptions, ErrorKind, WhenFull};
/// session.set_call_options(CallOptions {
///     priority: 1,
///     time_limit: Some(Duration::ZERO), // for the example
///     when_full: Some(WhenFull::Refuse),
///     ..CallOptions::default()
/// });
/// assert_eq!(session.feed(&[300; 40]).unwrap_err().kind(), ErrorKind::Cancelled);
/// session.set_call_options(CallOptions::default());
/// session.feed(&[300; 40])?;
/// # Ok::<(), dsv4::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallOptions {
    /// Higher goes first where not all fit into a step; nobody waits for ever.
    pub priority: i32,
    /// How long one call may take, from its beginning; `None` is no limit. One that takes longer ends with `Cancelled`
    /// within one chunk, and what was complete stays. Each token of a generation is a call.
    pub time_limit: Option<Duration>,
    /// The calling thread does no work for the model, but waits for others: for threads with little stack or much
    /// priority. Something must work then: calls of other sessions, or a thread in [`Engine::run_waiting_step`].
    pub waits_only: bool,
    /// What the call does for which the cache has no room; `None` is the engine's
    /// [`when_full`](crate::EngineOptions::when_full).
    pub when_full: Option<WhenFull>,
    /// Tokens that are expected behind a prompt: with [`WhenFull::Refuse`] and [`WhenFull::Wait`], room is asked for these
    /// too before the prompt begins, and kept for the session.
    pub reserve: usize,
}

/// How far a call to [`Session::feed_with`] has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Tokens of this call that are in the session.
    pub done: usize,
    /// Tokens of this call.
    pub total: usize,
}

/// One token timeline.
///
/// ```
/// use dsv4::{Engine, EngineOptions, Markup, Model, Session, SessionOptions};
/// let engine = Engine::new(&Model::open("examples/models/tiny-v4")?, EngineOptions::default())?;
/// let mut session = Session::new(&engine, SessionOptions::default())?;
/// session.feed(&engine.model().tokenizer()?.encode("Once upon a time", Markup::Text)?)?;
/// let logits = session.logits().expect("something was fed"); // [vocab_size], before softmax
/// assert_eq!(logits.len(), engine.model().config().vocab_size);
/// println!("{} tokens, {} still fit", session.position(), session.remaining());
/// # Ok::<(), dsv4::Error>(())
/// ```
pub struct Session {
    engine: Arc<Engine>,
    cache: Arc<Slot>,
    context: usize,
    tokens: Vec<TokenId>,
    /// Logits behind the last token; empty before the first.
    logits: Logits,
    /// Whether the caller looked at logits since the last token that was fed alone.
    asked: AtomicBool,
    /// Keys of the full blocks that other prompts can find, in order; the last block may still be missing.
    keys: Vec<PrefixKey>,
    /// A checkpoint that other prompts shall find when its block is among them.
    unsettled: Option<Arc<Mark>>,
    /// The end of the last prompt: what a truncation to there or beyond starts from.
    mark: Option<Arc<Mark>>,
    /// Earlier logits and the positions they stand behind, oldest first: those that a rollback can need.
    earlier: VecDeque<(usize, Logits)>,
    rollback: usize,
    /// Tokens that were reused from other prompts instead of computed.
    reused: u64,
    cancel: CancelToken,
    calls: CallOptions,
    /// When the call that is at work was submitted; `None` if its thread waits.
    submitted: Option<Instant>,
    /// Most tokens of a step.
    chunk: usize,
    metrics: SessionMetrics,
}

impl Session {
    /// An empty session on `engine`.
    ///
    /// # Errors
    /// `InvalidArgument` if the context is longer than the model's, `OutOfMemory` for its fixed memory.
    pub fn new(engine: &Arc<Engine>, options: SessionOptions) -> Result<Self> {
        let context = options.context(engine)?;
        let mut session = Self::over(engine, context, engine.new_slot(options.rollback)?, options.rollback);
        if let Some(mode) = engine.degrade() {
            session.context = context.min(mode.context);
            session.chunk = session.chunk.min(mode.chunk);
            session.metrics.is_degraded = true;
        }
        Ok(session)
    }

    /// A session of no tokens that has the sequence in `cache`.
    fn over(engine: &Arc<Engine>, context: usize, cache: Arc<Slot>, rollback: usize) -> Self {
        Self {
            engine: Arc::clone(engine),
            cache,
            context,
            tokens: Vec::new(),
            logits: Logits::default(),
            asked: AtomicBool::new(false),
            keys: Vec::new(),
            unsettled: None,
            mark: None,
            earlier: VecDeque::new(),
            rollback,
            reused: 0,
            cancel: CancelToken::default(),
            calls: CallOptions::default(),
            submitted: None,
            chunk: engine.options().prefill_chunk,
            metrics: SessionMetrics::default(),
        }
    }

    /// Appends `tokens` and computes the logits behind the last one. No tokens is no work and no error.
    ///
    /// # Errors
    /// `InvalidArgument` for an id outside the vocabulary and `ContextFull` if they do not all fit (then nothing is fed);
    /// `Cancelled`, `NoBlocks`, `OutOfMemory`, `Numeric`, `Io`: the chunks that were complete stay, see
    /// [`Session::position`], and there are no logits if there was one. After any error the session is consistent and can
    /// go on: feed the rest.
    pub fn feed(&mut self, tokens: &[TokenId]) -> Result<()> {
        self.feed_with(tokens, &mut |_| ControlFlow::Continue(()))
    }

    /// As [`Session::feed`], calling `progress` after each chunk, on this thread; `Break` cancels.
    ///
    /// ```
    /// # use dsv4::{Engine, EngineOptions, Model, Session, SessionOptions};
    /// # let engine = Engine::new(&Model::open("examples/models/tiny-v4")?, EngineOptions::default())?;
    /// # let mut session = Session::new(&engine, SessionOptions::default())?;
    /// use std::ops::ControlFlow;
    /// # use dsv4::ErrorKind;
    /// let prompt = [300; 1000];
    /// let result = session.feed_with(&prompt, &mut |now| {
    ///     println!("{} of {} tokens", now.done, now.total);
    ///     ControlFlow::Break(()) // the user has left
    /// });
    /// assert_eq!(result.unwrap_err().kind(), ErrorKind::Cancelled);
    /// // the chunks that were complete stay: feed the rest to go on
    /// let done = session.position();
    /// session.feed(&prompt[done..])?;
    /// # Ok::<(), dsv4::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Session::feed`].
    pub fn feed_with(
        &mut self,
        tokens: &[TokenId],
        progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<()> {
        now(self.read(tokens, progress))
    }

    async fn read(&mut self, tokens: &[TokenId], progress: impl FnMut(Progress) -> ControlFlow<()>) -> Result<()> {
        let last = if tokens.len() == 1 && self.leaves_logits() { Last::Stay } else { Last::Come };
        self.run(tokens, LogitRows::Last, last, progress, |_, _| Ok(())).await
    }

    /// Whether the logits of a token may stay with the device that computes them: not if the caller looked at the last ones.
    fn leaves_logits(&mut self) -> bool {
        self.engine.chooses() && !self.asked.swap(false, Ordering::Relaxed)
    }

    /// As [`Session::feed`], handing out the logits `[vocab]` behind every token: `sink(position, logits)`. Nothing is taken
    /// from the cache then.
    ///
    /// ```
    /// # use dsv4::{Engine, EngineOptions, Model, Session, SessionOptions};
    /// # let engine = Engine::new(&Model::open("examples/models/tiny-v4")?, EngineOptions::default())?;
    /// # let mut session = Session::new(&engine, SessionOptions::default())?;
    /// use dsv4::sampler::logprobs;
    /// let tokens = [0, 300, 301, 302];
    /// let mut sum = 0.0;
    /// session.feed_all(&tokens, &mut |position, logits| {
    ///     if let Some(&next) = tokens.get(position + 1) {
    ///         sum += logprobs(logits, next)?;
    ///     }
    ///     Ok(())
    /// })?;
    /// println!("the model gives this text a probability of exp({sum})");
    /// # Ok::<(), dsv4::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Session::feed`], and those of `sink`, after which the tokens of the chunk stay.
    pub fn feed_all(&mut self, tokens: &[TokenId], sink: &mut dyn FnMut(usize, &[f32]) -> Result<()>) -> Result<()> {
        now(self.run(tokens, LogitRows::All, Last::Come, |_| ControlFlow::Continue(()), sink))
    }

    /// As [`Session::feed`] of one token whose successor `sampler` is about to choose: where the engine's device can do
    /// that, the logits stay there, and [`Session::choose`] finds the choice. Not if the caller looked at the last ones.
    pub(crate) async fn feed_for(&mut self, token: TokenId, sampler: &Sampler) -> Result<()> {
        let draw = self.leaves_logits().then(|| sampler.draw(self.engine.model().config().vocab_size)).flatten();
        let last = draw.map_or(Last::Come, Last::Choose);
        self.run(&[token], LogitRows::Last, last, |_| ControlFlow::Continue(()), |_, _| Ok(())).await
    }

    /// The token that `sampler` chooses from the session's logits.
    ///
    /// # Errors
    /// Those of [`Sampler::sample`]; `InvalidArgument` if there are no logits.
    pub(crate) fn choose(&self, sampler: &mut Sampler) -> Result<TokenId> {
        if self.logits.has_choice()
            && let Some(token) = self.logits.choice(sampler.draw(self.engine.model().config().vocab_size).as_ref())
        {
            sampler.count_draw();
            return Ok(token);
        }
        if !self.has_logits() {
            bail!(InvalidArgument, "the session has no logits");
        }
        sampler.sample(self.logits.get(&self.engine)?)
    }

    /// What all calls that feed do; ready at once, unless the call was submitted.
    async fn run(
        &mut self,
        tokens: &[TokenId],
        rows: LogitRows,
        last: Last,
        progress: impl FnMut(Progress) -> ControlFlow<()>,
        sink: impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        self.engine.check_process()?;
        let vocab = self.engine.model().config().vocab_size;
        if tokens.len() > self.remaining() {
            bail!(
                ContextFull,
                "{} not fit: {} of {} are used; nothing was fed",
                if tokens.len() == 1 { "1 token does".to_owned() } else { format!("{} tokens do", tokens.len()) },
                self.position(),
                self.context
            );
        }
        if let Some(i) = tokens.iter().position(|&t| t as usize >= vocab) {
            bail!(InvalidArgument, "token {i} has id {}; the vocabulary has {vocab} ids", tokens[i]);
        }
        alloc::reserve("session tokens", &mut self.tokens, tokens.len())?;
        let kept = tokens.len().min(self.rollback) + 1;
        self.earlier
            .try_reserve(kept)
            .map_err(|_| Error::out_of_memory("earlier logits", (kept * size_of::<Logits>()) as u64))?;
        let _pin = self.cache.pin();
        let result = self.run_parts(tokens, rows, last, progress, sink).await;
        if result.is_err() {
            self.cache.forget_promise();
        }
        result
    }

    /// The work of a call that can begin, whose sequence is pinned.
    async fn run_parts(
        &mut self,
        tokens: &[TokenId],
        rows: LogitRows,
        mut last: Last,
        mut progress: impl FnMut(Progress) -> ControlFlow<()>,
        mut sink: impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let vocab = self.engine.model().config().vocab_size;
        let terms = self.terms(tokens.len());
        self.catch_up(&terms).await?;
        let mut done = if rows == LogitRows::Last { self.reuse(tokens)? } else { 0 };
        let end = self.position() + tokens.len() - done;
        while done < tokens.len() {
            let part = &tokens[done..done + self.next_chunk(end)];
            let is_last = done + part.len() == tokens.len();
            let wanted = if rows == LogitRows::Last && !is_last { LogitRows::None } else { rows };
            let last_of = if is_last { std::mem::take(&mut last) } else { Last::Come };
            let work = Work { tokens: part, logits: wanted, last: last_of, ends: is_last };
            let step = self.engine.step(&self.cache, work, &terms).await?;
            if step.tokens == 0 {
                self.catch_up(&terms).await?;
                continue;
            }
            self.count(&step, &terms);
            let Done { tokens: taken, logits, stayed, .. } = step;
            let (part, is_last) = (&part[..taken], is_last && taken == part.len());
            // until the call is complete the session's logits would be those of an older token
            self.retire_logits(part.len());
            self.tokens.extend_from_slice(part);
            done += part.len();
            if rows == LogitRows::All {
                let first = self.position() - part.len();
                for (i, row) in logits.chunks_exact(vocab).enumerate() {
                    sink(first + i, row)?;
                }
                self.keep_earlier(&logits, vocab)?;
            }
            if let Some(stayed) = stayed {
                self.logits = stayed.into();
            } else if rows == LogitRows::All || is_last {
                self.keep_last(logits, vocab);
            }
            self.publish(end, self.settled(tokens.len()), terms.decodes())?;
            if progress(Progress { done, total: tokens.len() }).is_break() && !is_last {
                return Err(cancelled(done, tokens.len()));
            }
        }
        if tokens.len() > 1 {
            self.set_mark();
        }
        if !terms.decodes() {
            self.metrics.first_token = Some(terms.began().elapsed());
        }
        Ok(())
    }

    /// Counts a step of a call.
    fn count(&mut self, step: &Done, terms: &Terms) {
        let metrics = &mut self.metrics;
        *(if terms.decodes() { &mut metrics.decode_tokens } else { &mut metrics.prefill_tokens }) += step.tokens as u64;
        metrics.steps += 1;
        metrics.queued += step.queued;
        metrics.in_steps += step.took;
    }

    /// Puts the logits aside for a rollback, now that `fed` more tokens are about to follow them.
    fn retire_logits(&mut self, fed: usize) {
        let (position, oldest) = (self.position(), (self.position() + fed).saturating_sub(self.rollback));
        while self.earlier.front().is_some_and(|&(position, _)| position < oldest) {
            self.earlier.pop_front();
        }
        let logits = std::mem::take(&mut self.logits);
        if !logits.is_empty() && position >= oldest && self.rollback > 0 {
            self.earlier.push_back((position, logits));
        }
    }

    /// Puts all rows of a step but the last aside for a rollback, as far as it reaches; they stand behind the session's
    /// last tokens. There is room for them in the list.
    fn keep_earlier(&mut self, rows: &[f32], vocab: usize) -> Result<()> {
        let count = rows.len() / vocab;
        for back in (1..count.min(self.rollback + 1)).rev() {
            let row = alloc::copied("earlier logits", &rows[(count - 1 - back) * vocab..][..vocab])?;
            self.earlier.push_back((self.position() - back, row.into()));
        }
        Ok(())
    }

    /// Drops all logits: the session goes on from elsewhere.
    fn forget_logits(&mut self) {
        self.logits = Logits::default();
        self.earlier.clear();
    }

    fn keep_last(&mut self, mut logits: Vec<f32>, vocab: usize) {
        let start = logits.len() - vocab;
        logits.drain(..start);
        self.logits = logits.into();
    }

    /// Logits `[vocab]` behind the last token, before softmax. `None` before the first token, and after a `feed` that
    /// stopped half-way (feed on to get them).
    ///
    /// On a GPU, logits of a token that was fed alone or chosen by the device do not leave it if nobody asked for the last
    /// ones. Asking gives them, computed again with the same bits, and the next token's come along; `None` if the device
    /// cannot any more, which the next call on the session explains.
    pub fn logits(&self) -> Option<&[f32]> {
        self.try_logits().ok().flatten()
    }

    /// The same with the reason if the device cannot give them.
    pub(crate) fn try_logits(&self) -> Result<Option<&[f32]>> {
        self.asked.store(true, Ordering::Relaxed);
        let logits = self.logits.get(&self.engine)?;
        Ok(if logits.is_empty() { None } else { Some(logits) })
    }

    /// Whether there are logits, without computing any.
    pub(crate) fn has_logits(&self) -> bool {
        !self.logits.is_empty()
    }

    /// Number of tokens in the session.
    pub fn position(&self) -> usize {
        self.tokens.len()
    }

    /// The tokens in the session.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Most tokens the session can hold.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Tokens that still fit.
    pub fn remaining(&self) -> usize {
        self.context - self.tokens.len()
    }

    /// Empties the session, and takes back a cancel that no call has seen: one that came too late for the call it was
    /// meant for.
    ///
    /// # Errors
    /// `OutOfMemory` or `NoBlocks` if there is no room for an empty state; the session is unchanged.
    pub fn clear(&mut self) -> Result<()> {
        self.empty()?;
        self.cancel.reset();
        Ok(())
    }

    fn empty(&mut self) -> Result<()> {
        // before the mark goes, which takes a lock
        self.engine.check_process()?;
        self.mark = None;
        self.clear_sequence()?;
        self.tokens.clear();
        self.keys.clear();
        self.unsettled = None;
        self.forget_logits();
        Ok(())
    }

    /// A session with the same tokens and logits. Their pages are shared; whoever writes to a partial block first
    /// copies it.
    ///
    /// ```
    /// # use dsv4::{Engine, EngineOptions, Model, Session, SessionOptions};
    /// # let engine = Engine::new(&Model::open("examples/models/tiny-v4")?, EngineOptions::default())?;
    /// # let mut session = Session::new(&engine, SessionOptions::default())?;
    /// session.feed(&[300; 500])?;
    /// // two ways to go on, at the cost of one prompt
    /// let mut other = session.fork()?;
    /// session.feed(&[301])?;
    /// other.feed(&[302])?;
    /// assert_eq!(session.position(), other.position());
    /// assert_ne!(session.logits(), other.logits());
    /// # Ok::<(), dsv4::Error>(())
    /// ```
    ///
    /// # Errors
    /// `OutOfMemory`; where its pages had been taken for others, those of [`Session::feed`].
    pub fn fork(&self) -> Result<Self> {
        let _pin = self.ready()?;
        self.engine.cache().count_fork();
        Ok(Self {
            engine: Arc::clone(&self.engine),
            cache: self.engine.slot(self.cache.sequence().fork()?),
            context: self.context,
            tokens: alloc::copied("session tokens", &self.tokens)?,
            logits: self.logits.copy()?,
            asked: AtomicBool::new(false),
            keys: alloc::copied("session blocks", &self.keys)?,
            unsettled: self.unsettled.clone(),
            mark: self.mark.clone(),
            earlier: self.copy_earlier()?,
            rollback: self.rollback,
            reused: self.reused,
            cancel: CancelToken::default(),
            calls: self.calls,
            submitted: None,
            chunk: self.chunk,
            metrics: SessionMetrics { is_degraded: self.metrics.is_degraded, ..SessionMetrics::default() },
        })
    }

    /// Goes back to the first `position` tokens, exactly. The last [`SessionOptions::rollback`] tokens, fed one at a time or
    /// by [`Session::feed_all`], are taken back without computing; otherwise it starts from the nearest checkpoint at or below and computes the rest
    /// again from the session's own tokens. Afterwards the logits are those behind token `position - 1`; at 0 there are
    /// none.
    ///
    /// ```
    /// # use dsv4::{Engine, EngineOptions, Model, Session, SessionOptions};
    /// # let engine = Engine::new(&Model::open("examples/models/tiny-v4")?, EngineOptions::default())?;
    /// # let mut session = Session::new(&engine, SessionOptions::default())?;
    /// session.feed(&[300; 40])?;
    /// let logits = session.logits().expect("something was fed").to_vec();
    /// session.feed(&[301, 302])?;
    /// session.truncate(40)?;
    /// assert_eq!(session.logits(), Some(&logits[..]));
    /// # Ok::<(), dsv4::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidArgument` if the session is shorter; those of [`Session::feed`], after which the session holds a prefix
    /// of the tokens wanted.
    pub fn truncate(&mut self, position: usize) -> Result<()> {
        if position > self.position() {
            bail!(InvalidArgument, "cannot truncate to {position} tokens: the session has {}", self.position());
        }
        if position == self.position() && self.has_logits() {
            return Ok(());
        }
        if position == 0 {
            return self.empty();
        }
        let _pin = self.ready()?;
        if self.roll_back(position)? {
            return Ok(());
        }
        // the last token is always computed, for its logits
        let rest = self.go_below(position)?;
        now(self.run(&rest, LogitRows::Last, Last::Come, |_| ControlFlow::Continue(()), |_, _| Ok(())))
    }

    /// Goes back to what the session has in common with `tokens`, and returns how many tokens that is; feed the rest of
    /// `tokens` next. For conversations whose history is rendered anew each turn and may come out differently.
    ///
    /// ```
    /// # use dsv4::{Engine, EngineOptions, Model, Session, SessionOptions};
    /// # let engine = Engine::new(&Model::open("examples/models/tiny-v4")?, EngineOptions::default())?;
    /// # let mut session = Session::new(&engine, SessionOptions::default())?;
    /// session.feed(&[300, 301, 302, 303])?;
    /// let prompt = [300, 301, 305, 306];
    /// let kept = session.keep_common(&prompt)?;
    /// assert_eq!(kept, 2);
    /// session.feed(&prompt[kept..])?;
    /// # Ok::<(), dsv4::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`Session::truncate`].
    pub fn keep_common(&mut self, tokens: &[TokenId]) -> Result<usize> {
        let common = self.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        if common < self.position() {
            self.truncate(common)?;
        }
        Ok(common)
    }

    /// Goes back to the nearest place below `position` that can be had without computing, and returns the tokens from
    /// there to `position`.
    fn go_below(&mut self, position: usize) -> Result<Vec<TokenId>> {
        let checkpoint = self.checkpoint_below(position);
        let undone = self.cache.sequence().can_roll_back(position - 1).then_some(position - 1);
        let Some(start) = undone.or(checkpoint.as_ref().map(|state| state.position())) else {
            let rest = alloc::copied("session tokens", &self.tokens[..position])?;
            self.empty()?;
            return Ok(rest);
        };
        let rest = alloc::copied("session tokens", &self.tokens[start..position])?;
        match (undone, checkpoint) {
            (None, Some(state)) => self.cache.sequence().rewind(state),
            _ => self.engine.find_room(|| self.cache.sequence().roll_back(start))?,
        }
        self.cut(start);
        self.forget_logits();
        Ok(rest)
    }

    /// Remembers this place, to come back to.
    fn set_mark(&mut self) {
        // without its logits it is still a place to compute from, so a refusal is no error
        let mut logits = Vec::new();
        if logits.try_reserve_exact(self.logits.on_host().len()).is_ok() {
            logits.extend_from_slice(self.logits.on_host());
        }
        let checkpoint = Checkpoint { state: self.cache.sequence().checkpoint(), logits: logits.into() };
        self.mark = Some(Arc::new(Mark::new(self.engine.cache(), checkpoint)));
    }

    /// Drops what the session knows of the tokens from `position` on, and the room that was promised for them.
    fn cut(&mut self, position: usize) {
        self.cache.forget_promise();
        self.tokens.truncate(position);
        self.keys.truncate(position / BLOCK_TOKENS);
        self.unsettled = self.unsettled.take().filter(|mark| mark.position() <= position);
        self.mark = self.mark.take().filter(|mark| mark.position() <= position);
    }

    /// Goes back to `position` without computing, if its logits are at hand; otherwise changes nothing and says `false`.
    fn roll_back(&mut self, position: usize) -> Result<bool> {
        let known = self.earlier.iter().position(|&(p, _)| p == position);
        let reaches = self.cache.sequence().can_roll_back(position);
        if let (Some(i), true) = (known, reaches) {
            self.engine.find_room(|| self.cache.sequence().roll_back(position))?;
            self.logits = std::mem::take(&mut self.earlier[i].1);
            self.earlier.truncate(i);
            self.cut(position);
            return Ok(true);
        }
        let key = position.is_multiple_of(BLOCK_TOKENS).then(|| self.keys.get(position / BLOCK_TOKENS - 1)).flatten();
        let kept = key.and_then(|&key| self.engine.cache().checkpoint(key));
        let mark = self.mark.as_ref().filter(|mark| mark.position() == position).and_then(|mark| mark.checkpoint());
        let mut whole = mark.into_iter().chain(kept).filter(|checkpoint| !checkpoint.logits.is_empty());
        let Some(checkpoint) = whole.next() else { return Ok(false) };
        let logits = alloc::copied("logits", &checkpoint.logits)?;
        self.cache.sequence().rewind(checkpoint.state);
        self.cut(position);
        self.forget_logits();
        self.logits = logits.into();
        Ok(true)
    }

    fn copy_earlier(&self) -> Result<VecDeque<(usize, Logits)>> {
        let mut copy = alloc::with_capacity("earlier logits", self.earlier.len())?;
        for (position, logits) in &self.earlier {
            copy.push((*position, logits.copy()?));
        }
        Ok(copy.into())
    }

    /// The checkpoint nearest below `position` that this session can go back to.
    fn checkpoint_below(&self, position: usize) -> Option<Arc<State>> {
        let own = self.mark.as_ref().filter(|mark| mark.position() < position);
        let own = own.and_then(|mark| mark.checkpoint()).map(|mark| mark.state);
        let blocks = (position - 1) / BLOCK_TOKENS;
        let keys = &self.keys[..blocks.min(self.keys.len())];
        let kept = keys.iter().rev().find_map(|&key| self.engine.cache().checkpoint(key)).map(|kept| kept.state);
        own.into_iter().chain(kept).max_by_key(|state| state.position())
    }

    /// Tokens that were reused from other prompts instead of computed, over the session's life.
    pub fn reused_tokens(&self) -> u64 {
        self.reused
    }

    /// How the session's calls are treated from now on.
    pub fn set_call_options(&mut self, options: CallOptions) {
        self.calls = options;
    }

    /// How the session's calls are treated.
    pub fn call_options(&self) -> CallOptions {
        self.calls
    }

    /// A handle that cancels this session's running call, or its next one, from any thread.
    pub fn cancel_token(&self) -> CancelToken {
        self.cancel.clone()
    }

    /// The engine it runs on.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }
}

impl Drop for Session {
    /// In a fork of the process its parts are left alone: their end takes locks, which may be held by threads that are not
    /// there.
    fn drop(&mut self) {
        if self.engine.check_process().is_err() {
            let (engine, cache) = (Arc::clone(&self.engine), Arc::clone(&self.cache));
            std::mem::forget((engine, cache, self.mark.take(), self.unsettled.take()));
        }
    }
}

fn cancelled(done: usize, total: usize) -> Error {
    Error::new(ErrorKind::Cancelled, format!("cancelled after {done} of {total} tokens, which stay in the session"))
}
