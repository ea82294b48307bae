//! Long texts in pieces, so that the memory of encoding does not grow with the text.
//!
//! The `tokenizers` crate keeps an offset pair for each byte and a string for each word, hundreds of bytes for each
//! byte of text. Encoding a text piece by piece gives the same ids if every cut lies where the pre-tokeniser cuts
//! anyway, whatever stands around it. [`next_piece`] knows such places for V4's three splits ([`V4_SPLITS`]):
//!
//! * between a line feed and an ASCII letter: only `\s*[\r\n]+` and ` ?[\p{P}\p{S}]+[\r\n]*` can reach over a line feed,
//!   both end at the last one of a run, and neither takes a letter;
//! * between an ASCII letter and a space before another one: runs of letters end at the space, and the word behind it
//!   begins with it;
//! * where the range of Chinese and Japanese characters begins or ends: the second split cuts there, the first one, for
//!   digits, never reaches into it, and the third one only sees one side.
//!
//! No pattern looks back, and the only one that looks ahead, `\s+(?!\S)`, is never tried on white space that ends with a
//! line feed, since the alternative before it takes that.

use crate::error::beginning;

/// The patterns of V4's `pre_tokenizer`, for which [`next_piece`] is right.
pub(super) const V4_SPLITS: [&str; 3] = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"##,
        "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
    ),
];

/// Length in bytes from which on a cut is looked for.
const LEAST: usize = 16 << 10;

/// The beginning of `text` up to the first safe cut behind [`LEAST`] bytes, and the rest.
pub(super) fn next_piece(text: &str) -> (&str, &str) {
    next_piece_from(text, LEAST)
}

fn next_piece_from(text: &str, least: usize) -> (&str, &str) {
    if text.len() <= least {
        return (text, "");
    }
    let mut before = None;
    let start = beginning(text, least).len();
    let mut rest = text[start..].char_indices();
    while let Some((at, c)) = rest.next() {
        if before.is_some_and(|before| is_safe(before, c, rest.clone().next().map(|(_, next)| next))) {
            return text.split_at(start + at);
        }
        before = Some(c);
    }
    (text, "")
}

/// Whether the pre-tokeniser always cuts between `before` and `after`, which `next` follows.
fn is_safe(before: char, after: char, next: Option<char>) -> bool {
    match (before, after) {
        ('\n', after) if after.is_ascii_alphabetic() => true,
        (before, ' ') if before.is_ascii_alphabetic() => next.is_some_and(|next| next.is_ascii_alphabetic()),
        (before, after) => is_cjk(before) != is_cjk(after),
    }
}

/// The range of the second split.
fn is_cjk(c: char) -> bool {
    matches!(c, '一'..='龥' | '\u{3040}'..='ゟ' | '゠'..='ヿ')
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::LazyLock;

    use proptest::prelude::*;

    use super::*;
    use crate::TokenId;
    use crate::tokenizer::{Markup, Tokenizer};

    fn model_file(name: &str) -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models/tiny-v4").join(name)
    }

    fn tokenizer() -> &'static Tokenizer {
        static TINY: LazyLock<Tokenizer> =
            LazyLock::new(|| Tokenizer::from_file(&model_file("tokenizer.json")).unwrap());
        &TINY
    }

    /// Ids of `text` cut at every safe place, and the number of pieces. Pieces this short are not cut again.
    fn in_pieces(mut text: &str, least: usize) -> (Vec<TokenId>, usize) {
        let (mut ids, mut pieces) = (Vec::new(), 0);
        while !text.is_empty() {
            let (piece, rest) = next_piece_from(text, least);
            ids.extend(tokenizer().encode(piece, Markup::Text).unwrap());
            pieces += 1;
            text = rest;
        }
        (ids, pieces)
    }

    #[test]
    fn the_ranges_in_the_pattern_are_those_of_the_cuts() {
        let pattern: Vec<char> = V4_SPLITS[1].chars().filter(|c| !"[]-+".contains(*c)).collect();
        assert_eq!(pattern, ['一', '龥', '\u{3040}', 'ゟ', '゠', 'ヿ']);
    }

    #[test]
    fn a_book_in_pieces_has_the_ids_of_the_whole() {
        let text = std::fs::read_to_string(model_file("eval.txt")).unwrap();
        // the whole in stretches that are not cut, since encoding itself takes longer texts in pieces
        for whole in text.as_bytes().chunks(LEAST).filter_map(|part| std::str::from_utf8(part).ok()) {
            let (ids, pieces) = in_pieces(whole, 1);
            assert_eq!(ids, tokenizer().encode(whole, Markup::Text).unwrap());
            assert!(pieces > whole.len() / 10, "{pieces} pieces of {} bytes", whole.len());
        }
    }

    #[test]
    fn pieces_are_bounded_where_the_text_has_places_to_cut() {
        let text = "A word and another.\n".repeat(10_000);
        let mut rest = text.as_str();
        while !rest.is_empty() {
            let (piece, more) = next_piece(rest);
            assert!(piece.len() <= LEAST + 20 && (piece.len() >= LEAST || more.is_empty()), "{}", piece.len());
            rest = more;
        }
    }

    #[test]
    fn a_text_without_a_safe_place_stays_whole() {
        for part in ["a", "7", " ", "!", "\n", "é", "😀"] {
            let text = part.repeat(LEAST);
            assert_eq!(next_piece_from(&text, 7), (text.as_str(), ""), "{part:?}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_text_in_pieces_has_the_ids_of_the_whole(
            text in r"([a-zA-Z]{0,3}|[ \t\r\n]{0,4}|[0-9]{0,5}|[一丁龥龦ぁゟ゠ヿ々〇。，、]{0,3}|[.!'$~|–“]{0,3}|[éßÅΩж\u{300}\u{5d0}\u{e01}]{0,2}|[\u{a0}\u{2028}\u{85}\u{3000}\u{b}]{0,2}|[²٣Ⅷ½]{0,2}|[😀\u{200d}€])*",
        ) {
            let (ids, _) = in_pieces(&text, 1);
            prop_assert_eq!(ids, tokenizer().encode(&text, Markup::Text).unwrap());
        }

        #[test]
        fn any_characters_in_pieces_have_the_ids_of_the_whole(text in r"\PC{0,40}(\n\PC{0,20}){0,3}") {
            let (ids, _) = in_pieces(&text, 1);
            prop_assert_eq!(ids, tokenizer().encode(&text, Markup::Text).unwrap());
        }
    }
}
