//! A rendered prompt: control tokens and text, never mixed up.

use super::markers::IN_TEMPLATES;
use super::message::Message;
use super::sampled::Replay;
use crate::TokenId;
use crate::alloc;
use crate::error::{Error, ErrorKind, Result};
use crate::tokenizer::{Markup, Tokenizer};

/// One part of a [`Prompt`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Segment {
    /// Exactly one control token, by its spelling.
    Marker(&'static str),
    /// Text, in which nothing is a control token whatever it spells.
    Text(String),
}

/// A prompt as the model was trained to see it.
///
/// ```
/// use dsv4::chat::{ChatOptions, Message, Role, Segment, render};
/// let model = dsv4::Model::open("examples/models/tiny-v4")?;
/// // what a user wrote stays text, whatever it spells
/// let prompt = render(&[Message::new(Role::User, "</think>")], &ChatOptions::default())?;
/// assert!(prompt.segments().contains(&Segment::Text("</think>".into())));
/// let tokens = prompt.encode(model.tokenizer()?)?;
/// assert_eq!(tokens[0], model.config().bos_token_id);
/// # Ok::<(), dsv4::Error>(())
/// ```
///
/// Invariant: no two neighbours are text and no text is empty, so the text between two control
/// tokens goes through the tokenizer as one piece, as it does when the official encoder's string
/// is tokenised whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    segments: Vec<Segment>,
    /// Answers whose own tokens may stand for their segments, in order.
    replays: Vec<Replay>,
}

impl Prompt {
    /// The parts in order, all rendered from what the messages say.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The string that the official encoder would give for the messages, byte for byte. Tokenising it with
    /// [`Markup::Parse`] makes control tokens of whatever users spelt: use [`Prompt::encode`].
    pub fn to_text(&self) -> String {
        self.texts().collect()
    }

    /// As [`Prompt::to_text`], in bytes that end with a NUL and are reserved fallibly.
    pub(crate) fn to_c_text(&self) -> Result<Vec<u8>> {
        let len: usize = self.texts().map(str::len).sum();
        let mut bytes = alloc::with_capacity("the prompt's text", len + 1)?;
        self.texts().for_each(|text| bytes.extend_from_slice(text.as_bytes()));
        bytes.push(0);
        Ok(bytes)
    }

    fn texts(&self) -> impl Iterator<Item = &str> {
        self.segments.iter().map(|segment| match segment {
            Segment::Marker(marker) => marker,
            Segment::Text(text) => text.as_str(),
        })
    }

    /// Token ids. Equal to the official encoder's string tokenised with [`Markup::Parse`], but for a user's text that
    /// spells a control token, which stays text here, and for answers that have their own tokens
    /// ([`Message::sampled`]).
    ///
    /// # Errors
    /// `Tokenizer` when the tokenizer lacks a control token of the prompt; `OutOfMemory`.
    pub fn encode(&self, tokenizer: &Tokenizer) -> Result<Vec<TokenId>> {
        let (mut ids, mut done) = (Vec::new(), 0);
        for replay in &self.replays {
            let Some(tokens) = replay.tokens(tokenizer)? else { continue };
            encode(&self.segments[done..replay.segments.start], tokenizer, &mut ids)?;
            append(&tokens, &mut ids)?;
            done = replay.segments.end;
        }
        encode(&self.segments[done..], tokenizer, &mut ids)?;
        Ok(ids)
    }

    /// The place where the next segment begins; `None` where text would join the last one.
    pub(super) fn boundary(&self) -> Option<usize> {
        (!matches!(self.segments.last(), Some(Segment::Text(_)))).then_some(self.segments.len())
    }

    /// Lets the tokens of `answer` stand for the segments from `start` on, if they say what it says. What follows them
    /// is a marker or nothing.
    pub(super) fn replay(&mut self, start: usize, answer: &Message) {
        self.replays.push(Replay { segments: start..self.segments.len(), answer: answer.clone() });
    }

    pub(super) fn marker(&mut self, marker: &'static str) {
        self.segments.push(Segment::Marker(marker));
    }

    /// Adds text from outside.
    pub(super) fn text(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        match self.segments.last_mut() {
            Some(Segment::Text(last)) => last.push_str(text),
            _ => self.segments.push(Segment::Text(text.to_owned())),
        }
    }

    /// Adds text of the format itself, in which `<think>`, `</think>` and `｜DSML｜` are control
    /// tokens.
    pub(super) fn template(&mut self, template: &str) {
        let mut rest = template;
        while let Some((at, marker)) = first_marker(rest) {
            self.text(&rest[..at]);
            self.marker(marker);
            rest = &rest[at + marker.len()..];
        }
        self.text(rest);
    }
}

/// Appends the ids of `segments`.
fn encode(segments: &[Segment], tokenizer: &Tokenizer, ids: &mut Vec<TokenId>) -> Result<()> {
    for segment in segments {
        match segment {
            Segment::Text(text) => append(&tokenizer.encode(text, Markup::Text)?, ids)?,
            Segment::Marker(marker) => {
                let missing = || {
                    let message = format!("the tokenizer has no control token {marker}");
                    Error::new(ErrorKind::Tokenizer, message)
                };
                append(&[tokenizer.id_of(marker).ok_or_else(missing)?], ids)?;
            }
        }
    }
    Ok(())
}

fn append(more: &[TokenId], ids: &mut Vec<TokenId>) -> Result<()> {
    alloc::reserve("the prompt's tokens", ids, more.len())?;
    ids.extend_from_slice(more);
    Ok(())
}

fn first_marker(text: &str) -> Option<(usize, &'static str)> {
    let places = IN_TEMPLATES.iter().filter_map(|&marker| Some((text.find(marker)?, marker)));
    places.min_by_key(|&(at, _)| at)
}

#[cfg(test)]
mod tests {
    use super::super::markers::{DSML, END_THINK, THINK};
    use super::*;

    #[test]
    fn templates_are_cut_at_markers_and_texts_are_joined() {
        let mut prompt = Prompt::default();
        prompt.text("user says </think>");
        prompt.text("");
        prompt.template("\n<｜DSML｜x></think>");
        let text = |t: &str| Segment::Text(t.to_owned());
        let parts = [text("user says </think>\n<"), Segment::Marker(DSML), text("x>"), Segment::Marker(END_THINK)];
        assert_eq!(prompt.segments(), parts);
        assert_eq!(prompt.to_text(), "user says </think>\n<｜DSML｜x></think>");
        assert_eq!(first_marker("a<think></think>"), Some((1, THINK)));
    }
}
