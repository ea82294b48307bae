//! Sampling a continuation, token by token.
#![forbid(unsafe_code)]

use std::sync::Arc;

use crate::TokenId;
use crate::engine::now;
use crate::error::{Result, bail};
use crate::sampler::Sampler;

use super::Session;
use super::stop::{StopConditions, StopMatcher, StopReason};

/// When a generation ends. By default at the model's end-of-sentence token or when the context is full.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GenerateOptions {
    /// Most tokens to generate, at least 1; `None` is no limit but the context.
    pub max_tokens: Option<u64>,
    /// Go on behind the end-of-sentence token.
    pub ignore_eos: bool,
    /// Tokens that end the generation; their text is not part of it.
    pub stop_tokens: Vec<TokenId>,
    /// Texts that end the generation; they are not part of it, not even in parts. None may be empty.
    pub stop_strings: Vec<String>,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model's end-of-sentence token.
    Eos,
    /// This one of `stop_tokens`.
    Token(TokenId),
    /// `stop_strings[i]`.
    String(usize),
    /// `max_tokens` tokens were generated.
    MaxTokens,
    /// The session's context is full.
    ContextFull,
}

/// One generated token and the text that became certain with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The token. A stop token is reported too.
    pub token: TokenId,
    /// Complete UTF-8 that may be shown now; empty while a code point or a stop string is incomplete. Control tokens come
    /// spelled out, as `<think>` does: [`chat::Parser`](crate::chat::Parser) tells them from text.
    pub text: String,
}

/// A running generation; iterate over it. Dropping it ends it, and the session can go on.
///
/// A token is sampled, handed out, and fed to the session when the next one is asked for. So the session holds all
/// tokens but the last one that was handed out, whose logits nobody has needed yet. To go on from the text, feed it:
///
/// ```
/// # use dsv4::{Engine, EngineOptions, Model, Session, SessionOptions};
/// # let engine = Engine::new(&Model::open("examples/models/tiny-v4")?, EngineOptions::default())?;
/// # let mut session = Session::new(&engine, SessionOptions::default())?;
/// use dsv4::{Finish, GenerateOptions, Sampler, SamplerOptions};
/// session.feed(&[0, 300, 301])?;
/// let mut sampler = Sampler::new(SamplerOptions::greedy())?;
/// let mut last = None;
/// let options = GenerateOptions { max_tokens: Some(8), stop_strings: vec!["\n\n".into()], ..Default::default() };
/// let mut generation = session.generate(&mut sampler, options)?;
/// for piece in &mut generation {
///     let piece = piece?;
///     print!("{}", piece.text);
///     last = Some(piece.token);
/// }
/// if generation.finish() == Some(Finish::MaxTokens) {
///     println!(" ... after {} tokens", generation.tokens());
/// }
/// if let Some(token) = last {
///     session.feed(&[token])?;
/// }
/// # Ok::<(), dsv4::Error>(())
/// ```
pub struct Generation<'a> {
    session: &'a mut Session,
    sampler: &'a mut Sampler,
    decoding: Decoding,
    failed: bool,
}

/// A generation without its session and sampler, for owners that lend them anew for each token.
pub(crate) struct Decoding {
    matcher: StopMatcher,
    /// Sampled but not yet fed.
    pending: Option<TokenId>,
    finish: Option<Finish>,
    /// Where the session must stand when the next token is asked for.
    position: usize,
}

impl Session {
    /// Generates from the session's logits with `sampler`.
    ///
    /// # Errors
    /// `InvalidArgument` if the session has no logits (nothing was fed) or for options out of range, `OutOfMemory`,
    /// `Tokenizer` and `NotFound` from the model's tokenizer.
    pub fn generate<'a>(&'a mut self, sampler: &'a mut Sampler, options: GenerateOptions) -> Result<Generation<'a>> {
        let decoding = Decoding::new(self, options)?;
        Ok(Generation { session: self, sampler, decoding, failed: false })
    }
}

impl Generation<'_> {
    /// Why the generation ended; `None` while it runs and after an error.
    pub fn finish(&self) -> Option<Finish> {
        self.decoding.finish
    }

    /// Tokens generated so far that are part of the output.
    pub fn tokens(&self) -> u64 {
        self.decoding.matcher.tokens()
    }

    /// Ends the generation and gives out text that was held back as the possible start of a stop string. Empty after a
    /// regular end.
    pub fn into_held_text(mut self) -> String {
        self.decoding.held_text()
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.finish().is_some() || self.failed {
            return None;
        }
        let result = now(self.decoding.advance(self.session, self.sampler));
        self.failed = result.is_err();
        Some(result)
    }
}

impl Decoding {
    /// Starts from the logits of `session`. Errors as [`Session::generate`].
    pub(crate) fn new(session: &Session, options: GenerateOptions) -> Result<Self> {
        if !session.has_logits() {
            bail!(InvalidArgument, "the session has no logits: feed it a prompt first");
        }
        let model = session.engine().model();
        let conditions = StopConditions {
            eos: !options.ignore_eos,
            token_ids: options.stop_tokens,
            strings: options.stop_strings,
            max_tokens: options.max_tokens,
        };
        let matcher = StopMatcher::new(conditions, model.config().eos_token_id, Arc::clone(model.tokenizer()?))?;
        Ok(Self { matcher, pending: None, finish: None, position: session.position() })
    }

    /// Why it ended; `None` while it runs.
    pub(crate) fn finish(&self) -> Option<Finish> {
        self.finish
    }

    /// Gives out text that was held back, and ends.
    pub(crate) fn held_text(&mut self) -> String {
        self.matcher.finish()
    }

    /// The next token, of the session it was started with; not called after the end. After an error it can be tried
    /// again. Ready at once, unless it is part of a submitted call.
    pub(crate) async fn advance(&mut self, session: &mut Session, sampler: &mut Sampler) -> Result<Piece> {
        if session.position() != self.position {
            bail!(
                InvalidArgument,
                "the session is at position {}, but this generation left it at {}; start a new one",
                session.position(),
                self.position
            );
        }
        if let Some(token) = self.pending {
            session.feed_for(token, sampler).await?;
            self.pending = None;
            self.position += 1;
        }
        // memory first: after the draw nothing may fail, or a second try would draw another token
        sampler.reserve_accept()?;
        self.matcher.reserve()?;
        let token = session.choose(sampler)?;
        sampler.accept(token)?;
        let mut step = self.matcher.push(token)?;
        self.pending = Some(token);
        self.finish = step.stop.map(|reason| match reason {
            StopReason::Eos => Finish::Eos,
            StopReason::Token(id) => Finish::Token(id),
            StopReason::String(i) => Finish::String(i),
            StopReason::MaxTokens => Finish::MaxTokens,
        });
        if self.finish.is_none() && session.remaining() == 0 {
            self.finish = Some(Finish::ContextFull);
            step.text.push_str(&self.matcher.finish());
        }
        Ok(Piece { token, text: step.text })
    }
}
