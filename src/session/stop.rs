//! When generation ends, and which text may be shown before it does.
//!
//! Invariant: the text given out never contains a stop string or the beginning of one that later
//! completes, however tokens cut it; the result is the same for every division into tokens. Text
//! that could still become a stop string is held back, and given out once it cannot, or at the end.

use std::sync::Arc;

use crate::TokenId;
use crate::alloc;
use crate::error::{Result, bail};
use crate::tokenizer::{Detokenizer, Tokenizer};

/// What ends a generation; whichever comes first. All off: only the context's end does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopConditions {
    /// The model's end-of-sentence token.
    pub eos: bool,
    /// Any of these tokens; like end of sentence, the token's own text is not part of the output.
    pub token_ids: Vec<TokenId>,
    /// Any of these texts, which is then not part of the output. None may be empty.
    pub strings: Vec<String>,
    /// This many tokens, at least 1; the last one is part of the output.
    pub max_tokens: Option<u64>,
}

/// Which condition ended a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The end-of-sentence token.
    Eos,
    /// This one of `token_ids`.
    Token(TokenId),
    /// `strings[i]`. Of several that end at the same byte the longest counts.
    String(usize),
    /// `max_tokens` tokens were generated.
    MaxTokens,
}

/// What one token brought.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Text that may be shown now; may be empty.
    pub text: String,
    /// Set when generation ends with this token. Nothing is held back any more then.
    pub stop: Option<StopReason>,
}

/// Follows one generated token stream, for callers with a loop of their own; [`Session::generate`](crate::Session::generate)
/// has one.
///
/// ```
/// use dsv4::session::{StopConditions, StopMatcher, StopReason};
/// use dsv4::Markup;
/// let model = dsv4::Model::open("examples/models/tiny-v4")?;
/// let conditions = StopConditions { eos: true, strings: vec!["END".into()], ..Default::default() };
/// let mut matcher = StopMatcher::new(conditions, model.config().eos_token_id, model.tokenizer()?.clone())?;
/// let mut text = String::new();
/// for token in model.tokenizer()?.encode("a tale. END of it", Markup::Text)? {
///     let step = matcher.push(token)?;
///     text.push_str(&step.text);
///     if step.stop == Some(StopReason::String(0)) {
///         break;
///     }
/// }
/// assert_eq!(text, "a tale. ");
/// # Ok::<(), dsv4::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct StopMatcher {
    conditions: StopConditions,
    eos: TokenId,
    detokenizer: Detokenizer,
    patterns: Vec<Pattern>,
    /// Text not given out: its end may be the beginning of a stop string.
    held: String,
    longest_token: usize,
    tokens: u64,
    stopped: bool,
}

impl StopMatcher {
    /// Starts a stream; `eos` is the model's end-of-sentence id (`eos_token_id` of its config).
    ///
    /// # Errors
    /// `InvalidArgument` for an empty stop string, a token id outside the vocabulary, or
    /// `max_tokens` 0; `OutOfMemory`.
    pub fn new(conditions: StopConditions, eos: TokenId, tokenizer: Arc<Tokenizer>) -> Result<Self> {
        if conditions.max_tokens == Some(0) {
            bail!(InvalidArgument, "max_tokens is 0, it must be at least 1");
        }
        if let Some(index) = conditions.strings.iter().position(String::is_empty) {
            bail!(InvalidArgument, "stop string {index} is empty");
        }
        if let Some(id) = conditions.token_ids.iter().find(|&&id| tokenizer.kind(id).is_err()) {
            bail!(InvalidArgument, "stop token id {id} is outside the vocabulary");
        }
        let mut patterns = alloc::with_capacity("stop strings", conditions.strings.len())?;
        for text in &conditions.strings {
            patterns.push(Pattern::new(text)?);
        }
        Ok(Self {
            patterns,
            conditions,
            longest_token: tokenizer.longest_token(),
            eos,
            detokenizer: Detokenizer::new(tokenizer),
            held: String::new(),
            tokens: 0,
            stopped: false,
        })
    }

    /// Makes room for the text of the next token, so that [`Self::push`] cannot fail for memory.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn reserve(&mut self) -> Result<()> {
        // a byte that is not UTF-8 becomes three, and up to three bytes wait for their character's end
        let most = (self.longest_token + 3) * char::REPLACEMENT_CHARACTER.len_utf8();
        alloc::reserve_text("generated text", &mut self.held, most)?;
        // what is held may all be given out at once
        alloc::probe("generated text", self.held.len() + most)
    }

    /// Takes the next generated token.
    ///
    /// # Errors
    /// `Tokenizer` when `id` is outside the vocabulary; `InvalidArgument` after the stream ended.
    pub fn push(&mut self, id: TokenId) -> Result<Step> {
        if self.stopped {
            bail!(InvalidArgument, "token id {id} after the generation has stopped");
        }
        if let Some(reason) = self.token_reason(id) {
            return Ok(self.end(reason));
        }
        let text = self.detokenizer.push(id)?;
        self.tokens += 1;
        let mut step = self.take(&text);
        if step.stop.is_none() && self.conditions.max_tokens == Some(self.tokens) {
            let last = self.end(StopReason::MaxTokens);
            step.text.push_str(&last.text);
            step.stop = last.stop;
        }
        Ok(step)
    }

    /// Ends the stream without a condition (cancelled, context full) and gives out what was held
    /// back; a code point that is not complete becomes U+FFFD. Empty once stopped.
    pub fn finish(&mut self) -> String {
        if self.stopped {
            return String::new();
        }
        let tail = self.detokenizer.finish();
        let mut text = self.take(&tail).text;
        text.push_str(&std::mem::take(&mut self.held));
        self.stopped = true;
        text
    }

    /// Tokens taken that are part of the output.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    fn token_reason(&self, id: TokenId) -> Option<StopReason> {
        if self.conditions.eos && id == self.eos {
            return Some(StopReason::Eos);
        }
        self.conditions.token_ids.contains(&id).then_some(StopReason::Token(id))
    }

    fn end(&mut self, reason: StopReason) -> Step {
        Step { text: self.finish(), stop: Some(reason) }
    }

    /// Adds complete text; gives out what cannot be part of a stop string.
    fn take(&mut self, text: &str) -> Step {
        for (index, byte) in text.bytes().enumerate() {
            let mut longest: Option<usize> = None;
            for (which, pattern) in self.patterns.iter_mut().enumerate() {
                let ends_here = pattern.advance(byte);
                let is_longer = longest
                    .is_none_or(|best| self.conditions.strings[which].len() > self.conditions.strings[best].len());
                if ends_here && is_longer {
                    longest = Some(which);
                }
            }
            if let Some(which) = longest {
                self.held.push_str(&text[..=index]);
                let shown = self.held.len() - self.conditions.strings[which].len();
                self.held.truncate(shown);
                self.stopped = true;
                let text = std::mem::take(&mut self.held);
                return Step { text, stop: Some(StopReason::String(which)) };
            }
        }
        self.held.push_str(text);
        let kept = self.patterns.iter().map(|pattern| pattern.matched).max().unwrap_or(0);
        let shown = self.held.len() - kept;
        let text = self.held[..shown].to_owned();
        self.held.drain(..shown);
        Step { text, stop: None }
    }
}

/// One stop string, matched byte by byte (Knuth, Morris, Pratt).
#[derive(Clone, Debug)]
struct Pattern {
    bytes: Vec<u8>,
    /// `borders[n]`: length of the longest proper prefix of the first n bytes that also ends them.
    borders: Vec<usize>,
    /// Length of the longest prefix of the pattern that the text so far ends with.
    matched: usize,
}

impl Pattern {
    /// `text` is not empty.
    fn new(text: &str) -> Result<Self> {
        let bytes = alloc::copied("a stop string", text.as_bytes())?;
        let mut borders = alloc::zeroed("a stop string", bytes.len() + 1)?;
        let mut border = 0;
        for at in 1..bytes.len() {
            while border > 0 && bytes[at] != bytes[border] {
                border = borders[border];
            }
            border += usize::from(bytes[at] == bytes[border]);
            borders[at + 1] = border;
        }
        Ok(Self { bytes, borders, matched: 0 })
    }

    /// Takes one byte of text; true when the pattern ends with it. Not called again after that.
    fn advance(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.borders[self.matched];
        }
        self.matched += usize::from(self.bytes[self.matched] == byte);
        self.matched == self.bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use proptest::prelude::*;

    use super::*;
    use crate::tokenizer::Markup;

    const EOS: TokenId = 1;

    fn tokenizer() -> Arc<Tokenizer> {
        static TINY: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
            let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
            let path = root.join("examples/models/tiny-v4/tokenizer.json");
            Arc::new(Tokenizer::from_file(&path).unwrap())
        });
        TINY.clone()
    }

    fn matcher(conditions: StopConditions) -> StopMatcher {
        StopMatcher::new(conditions, EOS, tokenizer()).unwrap()
    }

    fn stop_at(strings: &[&str]) -> StopConditions {
        let strings = strings.iter().map(|&s| s.to_owned()).collect();
        StopConditions { strings, ..StopConditions::default() }
    }

    /// All text given out for `ids`, and why it ended.
    fn run(matcher: &mut StopMatcher, ids: &[TokenId]) -> (String, Option<StopReason>) {
        let mut text = String::new();
        for &id in ids {
            let step = matcher.push(id).unwrap();
            text.push_str(&step.text);
            if step.stop.is_some() {
                assert_eq!(matcher.finish(), "", "nothing is held back after a stop");
                return (text, step.stop);
            }
        }
        text.push_str(&matcher.finish());
        (text, None)
    }

    fn bytewise(text: &str) -> Vec<TokenId> {
        let tokenizer = tokenizer();
        let byte_token = |byte: u8| {
            let ids = 0..tokenizer.vocab_size() as TokenId;
            ids.into_iter().find(|&id| tokenizer.token_bytes(id).unwrap() == [byte]).unwrap()
        };
        text.bytes().map(byte_token).collect()
    }

    #[test]
    fn a_stop_string_across_tokens_is_never_shown() {
        let text = "one, STOP two";
        let whole = tokenizer().encode(text, Markup::Text).unwrap();
        for ids in [whole, bytewise(text)] {
            let result = run(&mut matcher(stop_at(&["STOP"])), &ids);
            assert_eq!(result, ("one, ".to_owned(), Some(StopReason::String(0))));
        }
    }

    #[test]
    fn text_that_only_began_like_a_stop_string_is_given_out() {
        let ids = bytewise("a STO b ST");
        assert_eq!(run(&mut matcher(stop_at(&["STOP"])), &ids), ("a STO b ST".to_owned(), None));
        let mut held = matcher(stop_at(&["STOP"]));
        let shown: Vec<_> = bytewise("xSTx").iter().map(|&id| held.push(id).unwrap().text).collect();
        assert_eq!(shown, ["x", "", "", "STx"]);
    }

    #[test]
    fn a_multi_byte_stop_string_is_found_within_code_points() {
        let ids = bytewise("bar ｜ and ｜DSML｜ more");
        let (text, reason) = run(&mut matcher(stop_at(&["｜DSML｜"])), &ids);
        assert_eq!((text.as_str(), reason), ("bar ｜ and ", Some(StopReason::String(0))));
    }

    #[test]
    fn the_string_that_ends_first_wins_and_the_longest_there() {
        let reason = |strings: &[&str], text| run(&mut matcher(stop_at(strings)), &bytewise(text));
        assert_eq!(reason(&["abcd", "bc"], "xabcd"), ("xa".into(), Some(StopReason::String(1))));
        assert_eq!(reason(&["c", "bc", "abc"], "xabc"), ("x".into(), Some(StopReason::String(2))));
        assert_eq!(reason(&["aab"], "aaab"), ("a".into(), Some(StopReason::String(0))));
        assert_eq!(reason(&["abab"], "abaabab"), ("aba".into(), Some(StopReason::String(0))));
    }

    #[test]
    fn end_of_sentence_and_stop_tokens_give_out_what_was_held_and_not_themselves() {
        let mut ids = bytewise("a ST");
        ids.push(EOS);
        let eos = StopConditions { eos: true, ..stop_at(&["STOP"]) };
        assert_eq!(run(&mut matcher(eos), &ids), ("a ST".into(), Some(StopReason::Eos)));

        let by_token = StopConditions { token_ids: vec![EOS], ..StopConditions::default() };
        let (text, reason) = run(&mut matcher(by_token), &ids);
        assert_eq!((text.as_str(), reason), ("a ST", Some(StopReason::Token(EOS))));

        let (text, reason) = run(&mut matcher(StopConditions::default()), &ids);
        assert_eq!((text.as_str(), reason), ("a ST<｜end▁of▁sentence｜>", None));
    }

    #[test]
    fn the_length_limit_counts_the_last_token_and_yields_to_a_stop_string() {
        let limit = |max, strings: &[&str]| StopConditions { max_tokens: Some(max), ..stop_at(strings) };
        let ids = bytewise("abcdef");
        let result = run(&mut matcher(limit(3, &["cde"])), &ids);
        assert_eq!(result, ("abc".to_owned(), Some(StopReason::MaxTokens)));
        let result = run(&mut matcher(limit(5, &["cde"])), &ids);
        assert_eq!(result, ("ab".to_owned(), Some(StopReason::String(0))));
        let mut cut = matcher(limit(2, &[]));
        assert_eq!(run(&mut cut, &bytewise("漢")).0, "\u{fffd}");
        assert_eq!(cut.tokens(), 2);
    }

    #[test]
    fn conditions_that_make_no_sense_are_refused() {
        let refused = |conditions, reason: &str| {
            let e = StopMatcher::new(conditions, EOS, tokenizer()).unwrap_err();
            assert!(e.message().contains(reason), "{e}");
        };
        refused(stop_at(&["a", ""]), "stop string 1 is empty");
        refused(StopConditions { max_tokens: Some(0), ..stop_at(&[]) }, "max_tokens");
        refused(StopConditions { token_ids: vec![9999], ..stop_at(&[]) }, "stop token id 9999");
        let mut ended = matcher(StopConditions { max_tokens: Some(1), ..stop_at(&[]) });
        ended.push(5).unwrap();
        assert!(ended.push(5).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 64, failure_persistence: None, ..ProptestConfig::default()
        })]

        #[test]
        fn the_output_is_the_text_before_the_first_stop_string(
            text in "[abc漢]{0,40}", strings in prop::collection::vec("[abc漢]{1,4}", 0..4),
        ) {
            let ends = |s: &String| text.find(s.as_str()).map(|at| (at + s.len(), at));
            let first = strings.iter().filter_map(ends).min();
            let want = first.map_or(text.as_str(), |(_, start)| &text[..start]);
            let strings: Vec<&str> = strings.iter().map(String::as_str).collect();
            for ids in [bytewise(&text), tokenizer().encode(&text, Markup::Text).unwrap()] {
                let (shown, reason) = run(&mut matcher(stop_at(&strings)), &ids);
                prop_assert_eq!(&shown, want);
                prop_assert_eq!(reason.is_some(), first.is_some());
            }
        }
    }
}
