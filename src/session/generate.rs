//! Sampling a continuation, token by token.
#![forbid(unsafe_code)]

use std::sync::Arc;

use crate::TokenId;
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
    /// Complete UTF-8 that may be shown now; empty while a code point or a stop string is incomplete.
    pub text: String,
}

/// A running generation; iterate over it. Dropping it ends it, and the session can go on.
///
/// A token is sampled, handed out, and fed to the session when the next one is asked for. So the session holds all
/// tokens but the last one that was handed out.
pub struct Generation<'a> {
    session: &'a mut Session,
    sampler: &'a mut Sampler,
    matcher: StopMatcher,
    /// Sampled but not yet fed.
    pending: Option<TokenId>,
    finish: Option<Finish>,
    failed: bool,
}

impl Session {
    /// Generates from the session's logits with `sampler`.
    ///
    /// # Errors
    /// `InvalidArgument` if the session has no logits (nothing was fed) or for options out of range, `Tokenizer` and
    /// `NotFound` from the model's tokenizer.
    pub fn generate<'a>(&'a mut self, sampler: &'a mut Sampler, options: GenerateOptions) -> Result<Generation<'a>> {
        if self.logits().is_none() {
            bail!(InvalidArgument, "the session has no logits: feed it a prompt first");
        }
        let model = self.engine().model();
        let conditions = StopConditions {
            eos: !options.ignore_eos,
            token_ids: options.stop_tokens,
            strings: options.stop_strings,
            max_tokens: options.max_tokens,
        };
        let matcher = StopMatcher::new(conditions, model.config().eos_token_id, Arc::clone(model.tokenizer()?))?;
        Ok(Generation { session: self, sampler, matcher, pending: None, finish: None, failed: false })
    }
}

impl Generation<'_> {
    /// Why the generation ended; `None` while it runs and after an error.
    pub fn finish(&self) -> Option<Finish> {
        self.finish
    }

    /// Tokens generated so far that are part of the output.
    pub fn tokens(&self) -> u64 {
        self.matcher.tokens()
    }

    /// Ends the generation and gives out text that was held back as the possible start of a stop string. Empty after a
    /// regular end.
    pub fn into_held_text(mut self) -> String {
        self.matcher.finish()
    }

    fn advance(&mut self) -> Result<Piece> {
        if let Some(token) = self.pending {
            self.session.feed(&[token])?;
            self.pending = None;
        }
        let Some(logits) = self.session.logits() else {
            bail!(InvalidArgument, "the session has no logits");
        };
        let token = self.sampler.sample(logits)?;
        self.sampler.accept(token);
        let mut step = self.matcher.push(token)?;
        self.pending = Some(token);
        self.finish = step.stop.map(|reason| match reason {
            StopReason::Eos => Finish::Eos,
            StopReason::Token(id) => Finish::Token(id),
            StopReason::String(i) => Finish::String(i),
            StopReason::MaxTokens => Finish::MaxTokens,
        });
        if self.finish.is_none() && self.session.remaining() == 0 {
            self.finish = Some(Finish::ContextFull);
            step.text.push_str(&self.matcher.finish());
        }
        Ok(Piece { token, text: step.text })
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.finish.is_some() || self.failed {
            return None;
        }
        let result = self.advance();
        self.failed = result.is_err();
        Some(result)
    }
}
