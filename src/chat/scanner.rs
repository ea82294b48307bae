//! Model output as a sequence of text and control tokens.
//!
//! From token ids the control tokens are known for certain; from plain text they are found by
//! their spelling, and a spelling that may still be completed is held back.

use super::markers::{ASSISTANT, BOS, DSML, END_THINK, EOS, LATEST_REMINDER, THINK, USER};

/// A control token in model output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Marker {
    Think,
    EndThink,
    Dsml,
    Eos,
    /// One that has no place in an answer, by its spelling.
    Other(String),
}

impl Marker {
    pub(super) fn from_spelling(spelling: &str) -> Self {
        match spelling {
            THINK => Self::Think,
            END_THINK => Self::EndThink,
            DSML => Self::Dsml,
            EOS => Self::Eos,
            other => Self::Other(other.to_owned()),
        }
    }

    pub(super) fn spelling(&self) -> &str {
        match self {
            Self::Think => THINK,
            Self::EndThink => END_THINK,
            Self::Dsml => DSML,
            Self::Eos => EOS,
            Self::Other(spelling) => spelling,
        }
    }
}

/// One piece of model output.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Piece {
    Text(String),
    Marker(Marker),
}

/// What is looked for in plain text.
const SPELLINGS: [&str; 8] = [THINK, END_THINK, DSML, EOS, BOS, USER, ASSISTANT, LATEST_REMINDER];

/// Finds control tokens in plain text that arrives in parts.
#[derive(Clone, Debug, Default)]
pub(super) struct Scanner {
    /// Text that may be the beginning of a control token.
    held: String,
}

impl Scanner {
    /// Adds text; returns the pieces that are certain now.
    pub(super) fn push(&mut self, text: &str) -> Vec<Piece> {
        self.held.push_str(text);
        let mut pieces = Vec::new();
        let mut done = 0;
        while let Some((at, spelling)) = first_spelling(&self.held[done..]) {
            if at > 0 {
                pieces.push(Piece::Text(self.held[done..done + at].to_owned()));
            }
            pieces.push(Piece::Marker(Marker::from_spelling(spelling)));
            done += at + spelling.len();
        }
        let kept = done + beginning_at_end(&self.held[done..]);
        if kept > done {
            pieces.push(Piece::Text(self.held[done..kept].to_owned()));
        }
        self.held.drain(..kept);
        pieces
    }

    /// Ends the text: what is held back, if anything, became no control token.
    pub(super) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// First control token in `text`. One pass: every spelling starts with `<` or `｜`.
fn first_spelling(text: &str) -> Option<(usize, &'static str)> {
    text.match_indices(['<', '｜']).find_map(|(at, _)| {
        let spelling = SPELLINGS.iter().find(|spelling| text[at..].starts_with(**spelling))?;
        Some((at, *spelling))
    })
}

/// Where the longest end of `text` starts that could become a control token; its length if none.
fn beginning_at_end(text: &str) -> usize {
    let longest = SPELLINGS.iter().map(|spelling| spelling.len()).max().unwrap_or(0);
    let may_begin = |at: &usize| text.is_char_boundary(*at) && SPELLINGS.iter().any(|s| s.starts_with(&text[*at..]));
    (text.len().saturating_sub(longest)..text.len()).find(may_begin).unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_are_found_across_any_split() {
        let text = "a<think>b｜DSML<｜DSML｜c</think></thin";
        for cut in (0..=text.len()).filter(|&cut| text.is_char_boundary(cut)) {
            let mut scanner = Scanner::default();
            let mut pieces = scanner.push(&text[..cut]);
            pieces.extend(scanner.push(&text[cut..]));
            let shown: Vec<String> = pieces
                .iter()
                .map(|piece| match piece {
                    Piece::Text(text) => text.clone(),
                    Piece::Marker(marker) => format!("[{}]", marker.spelling()),
                })
                .collect();
            assert_eq!(shown.concat(), "a[<think>]b｜DSML<[｜DSML｜]c[</think>]", "cut at {cut}");
            assert_eq!(scanner.finish(), "</thin");
        }
    }
}
