//! A rendered prompt: control tokens and text, never mixed up.

use super::markers::IN_TEMPLATES;
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
/// Invariant: no two neighbours are text and no text is empty, so the text between two control
/// tokens goes through the tokenizer as one piece, as it does when the official encoder's string
/// is tokenised whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    segments: Vec<Segment>,
}

impl Prompt {
    /// The parts in order.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The string that the official encoder would give, byte for byte. Tokenising it with
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

    /// Token ids. Equal to the official encoder's string tokenised with [`Markup::Parse`], unless
    /// a user's text spells a control token: here it stays text.
    ///
    /// # Errors
    /// `Tokenizer` when the tokenizer lacks a control token of the prompt; `OutOfMemory`.
    pub fn encode(&self, tokenizer: &Tokenizer) -> Result<Vec<TokenId>> {
        let mut ids = Vec::new();
        for segment in &self.segments {
            match segment {
                Segment::Text(text) => {
                    let more = tokenizer.encode(text, Markup::Text)?;
                    alloc::reserve("the prompt's tokens", &mut ids, more.len())?;
                    ids.extend_from_slice(&more);
                }
                Segment::Marker(marker) => {
                    let missing = || {
                        let message = format!("the tokenizer has no control token {marker}");
                        Error::new(ErrorKind::Tokenizer, message)
                    };
                    alloc::reserve("the prompt's tokens", &mut ids, 1)?;
                    ids.push(tokenizer.id_of(marker).ok_or_else(missing)?);
                }
            }
        }
        Ok(ids)
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
