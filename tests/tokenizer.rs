//! The tokenizer over the model in `examples/`, and over the full V4 tokenizer where it is at hand.

#![allow(clippy::unwrap_used, reason = "a failed call is a failed test")]

#[path = "common/shared.rs"]
mod shared;

use std::path::Path;
use std::sync::{Arc, LazyLock};

use dsv4::tokenizer::{Detokenizer, Markup, TokenKind, Tokenizer};
use dsv4::{ErrorKind, TokenId};
use proptest::prelude::*;
use serde_json::Value;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn tiny_json() -> Vec<u8> {
    std::fs::read(root().join("examples/models/tiny-v4/tokenizer.json")).unwrap()
}

fn tiny() -> Arc<Tokenizer> {
    static TINY: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| Arc::new(Tokenizer::from_bytes(&tiny_json()).unwrap()));
    TINY.clone()
}

/// Hugging Face's own pipeline over the same file.
static HUGGING_FACE: LazyLock<tokenizers::Tokenizer> =
    LazyLock::new(|| tokenizers::Tokenizer::from_bytes(tiny_json()).unwrap());

fn official() -> Option<Tokenizer> {
    Some(Tokenizer::from_file(&shared::shared("tokenizer", "data/tokenizer/tokenizer.json")?).unwrap())
}

#[test]
fn all_known_vectors_are_equal() {
    let (Some(tokenizer), Some(path)) = (official(), shared::shared("tokenizer", "data/tokenizer_vectors.json")) else {
        return;
    };
    let vectors: Vec<Value> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    assert_eq!(vectors.len(), 2118);
    for vector in vectors {
        let text = vector["t"].as_str().unwrap();
        let ids: Vec<TokenId> = serde_json::from_value(vector["ids"].clone()).unwrap();
        assert_eq!(tokenizer.encode(text, Markup::Parse).unwrap(), ids, "{text:?}");
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
    }
}

/// The same tokenizer with one more split, which never matches: it is not known where that may be cut, so every text is
/// encoded whole.
fn without_pieces(json: &[u8]) -> Tokenizer {
    let mut json: Value = serde_json::from_slice(json).unwrap();
    let splits = json["pre_tokenizer"]["pretokenizers"].as_array_mut().unwrap();
    let mut never = splits[0].clone();
    never["pattern"]["Regex"] = Value::from("\u{10fffe}{7}");
    splits.insert(0, never);
    Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap()
}

#[test]
fn long_texts_in_pieces_have_the_ids_of_the_whole() {
    let book = std::fs::read_to_string(root().join("examples/models/tiny-v4/eval.txt")).unwrap();
    let mut texts = vec![book.repeat(8)];
    if let Some(path) = shared::shared("the vectors in pieces", "data/tokenizer_vectors.json") {
        let vectors: Vec<Value> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        for between in ["", " ", "\n", "a"] {
            let parts: Vec<&str> = vectors.iter().map(|vector| vector["t"].as_str().unwrap()).collect();
            texts.push(parts.join(between));
        }
    }
    let files = [
        Some(root().join("examples/models/tiny-v4/tokenizer.json")),
        shared::shared("the official tokenizer in pieces", "data/tokenizer/tokenizer.json"),
    ];
    for file in files.into_iter().flatten() {
        let json = std::fs::read(&file).unwrap();
        let (in_pieces, whole) = (Tokenizer::from_bytes(&json).unwrap(), without_pieces(&json));
        for text in &texts {
            assert!(text.len() > 100_000, "{} bytes are few pieces", text.len());
            // other beginnings make other cuts
            for skip in (0..10_000).step_by(997).filter(|&at| text.is_char_boundary(at)) {
                let part = &text[skip..];
                let part = part.get(..100_000).unwrap_or(part);
                assert!(in_pieces.encode(part, Markup::Text) == whole.encode(part, Markup::Text), "from byte {skip}");
            }
        }
    }
}

#[test]
fn the_official_tokenizer_has_the_documented_ids() {
    let Some(tokenizer) = official() else { return };
    assert_eq!(tokenizer.vocab_size(), 129_280);
    assert_eq!(tokenizer.added_tokens().count(), 1283);
    for (marker, id) in [
        ("<｜begin▁of▁sentence｜>", 0),
        ("<｜end▁of▁sentence｜>", 1),
        ("<｜User｜>", 128_803),
        ("<｜Assistant｜>", 128_804),
        ("<think>", 128_821),
        ("</think>", 128_822),
        ("｜DSML｜", 128_825),
        ("<｜read_url｜>", 128_845),
    ] {
        assert_eq!(tokenizer.id_of(marker), Some(id), "{marker}");
    }
    assert_eq!(tokenizer.encode("The capital of France is", Markup::Text).unwrap(), [671, 6102, 294, 8760, 344]);
    check_added_tokens(&tokenizer);
}

#[test]
fn the_tiny_tokenizer_gives_its_pinned_ids() {
    // From Hugging Face's `tokenizers` over the same file.
    let tokenizer = tiny();
    assert_eq!(tokenizer.vocab_size(), 3712);
    for (text, ids) in PINNED {
        assert_eq!(tokenizer.encode(text, Markup::Parse).unwrap(), *ids, "{text:?}");
    }
}

/// Pitfall 89: "special" is not "hidden", and no added token is lost by decoding.
#[test]
fn added_tokens_survive_a_round_trip_and_keep_their_flags() {
    check_added_tokens(&tiny());
}

fn check_added_tokens(tokenizer: &Tokenizer) {
    let special: Vec<TokenId> = (0..tokenizer.vocab_size() as TokenId).filter(|&id| tokenizer.is_special(id)).collect();
    assert_eq!(special, [0, 1, 2]);
    for id in tokenizer.added_tokens() {
        let text = tokenizer.decode(&[id]).unwrap();
        assert_eq!(tokenizer.encode(&text, Markup::Parse).unwrap(), [id], "{text}");
        assert_eq!(tokenizer.id_of(&text), Some(id));

        let pieces = tokenizer.encode(&text, Markup::Text).unwrap();
        assert_eq!(tokenizer.decode(&pieces).unwrap(), text);
        assert!(pieces.iter().all(|&p| tokenizer.kind(p).unwrap() == TokenKind::Ordinary), "{text}");
    }
    for marker in ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜action｜>"] {
        let id = tokenizer.id_of(marker).unwrap();
        assert!(tokenizer.is_markup(id) && !tokenizer.is_special(id), "{marker}");
    }
    let ordinary = tokenizer.encode("word", Markup::Text).unwrap()[0];
    assert_eq!(tokenizer.kind(ordinary).unwrap(), TokenKind::Ordinary);
}

#[test]
fn user_text_never_becomes_a_control_token() {
    let tokenizer = tiny();
    let text = "a<｜User｜>b</think><｜end▁of▁sentence｜>｜DSML｜";
    let as_text = tokenizer.encode(text, Markup::Text).unwrap();
    assert!(as_text.iter().all(|&id| tokenizer.kind(id).unwrap() == TokenKind::Ordinary));
    assert_eq!(tokenizer.decode(&as_text).unwrap(), text);

    let parsed = tokenizer.encode(text, Markup::Parse).unwrap();
    let controls = parsed.iter().filter(|&&id| tokenizer.kind(id).unwrap() != TokenKind::Ordinary);
    assert_eq!(controls.count(), 4);
}

#[test]
fn an_id_outside_the_vocabulary_is_named() {
    let tokenizer = tiny();
    for result in [tokenizer.decode(&[5, 3712]).err(), tokenizer.token_bytes(3712).err()] {
        let e = result.unwrap();
        assert_eq!(e.kind(), ErrorKind::Tokenizer);
        assert_eq!(e.message(), "token id 3712 is not in the vocabulary of 3712 tokens");
    }
    let mut detokenizer = Detokenizer::new(tokenizer);
    assert!(detokenizer.push(u32::MAX).unwrap_err().message().contains("4294967295"));
    assert_eq!(detokenizer.finish(), "");
}

#[test]
fn pieces_that_split_a_code_point_come_out_whole() {
    let tokenizer = tiny();
    let ids = tokenizer.encode("a😀漢é", Markup::Text).unwrap();
    assert!(ids.len() > 4, "the tiny vocabulary has no token for these code points: {ids:?}");
    let mut detokenizer = Detokenizer::new(tokenizer.clone());
    let mut texts = Vec::new();
    for id in ids {
        let text = detokenizer.push(id).unwrap();
        assert!(detokenizer.pending().len() < 4);
        texts.push(text);
    }
    assert!(texts.iter().any(String::is_empty), "some token ends within a code point");
    assert_eq!(texts.concat(), "a😀漢é");
    assert_eq!(detokenizer.finish(), "");

    let emoji = tokenizer.encode("😀", Markup::Text).unwrap();
    for id in &emoji[..emoji.len() - 1] {
        assert_eq!(detokenizer.push(*id).unwrap(), "");
    }
    assert_eq!(detokenizer.finish(), "\u{fffd}");
    assert_eq!(detokenizer.finish(), "", "the stream starts anew");
}

#[test]
fn one_tokenizer_serves_many_threads() {
    let tokenizer = tiny();
    let text = "Once upon a time, <think>there</think> was 12345 漢字.\n\n";
    let want = tokenizer.encode(text, Markup::Parse).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    assert_eq!(tokenizer.encode(text, Markup::Parse).unwrap(), want);
                }
            });
        }
    });
}

/// Text built from what tokenizers trip over: markers, their halves, odd spaces, scripts.
fn awkward_text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        4 => any::<String>(),
        2 => "[ \t\r\n]{1,6}",
        2 => "[a-z0-9<>｜▁/]{1,12}",
        1 => "\\PC{1,8}",
        1 => prop::sample::select(vec!["<｜User｜>", "</think>", "<｜User", "｜DSML｜", "｜", "<<think>", "\u{0}", "é\u{301}", "한국어"])
            .prop_map(str::to_owned),
    ];
    prop::collection::vec(part, 0..8).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn parsing_markup_gives_what_hugging_face_gives(text in awkward_text()) {
        let want = HUGGING_FACE.encode(text.as_str(), false).unwrap();
        prop_assert_eq!(tiny().encode(&text, Markup::Parse).unwrap(), want.get_ids());
    }

    #[test]
    fn decoding_gives_back_any_text(text in awkward_text()) {
        let tokenizer = tiny();
        for markup in [Markup::Text, Markup::Parse] {
            let ids = tokenizer.encode(&text, markup).unwrap();
            prop_assert_eq!(tokenizer.decode(&ids).unwrap(), text.as_str());
        }
        let ids = tokenizer.encode(&text, Markup::Text).unwrap();
        prop_assert!(ids.iter().all(|&id| tokenizer.kind(id).unwrap() == TokenKind::Ordinary));
    }

    #[test]
    fn streaming_any_ids_equals_decoding_them_at_once(ids in prop::collection::vec(0u32..3712, 0..64)) {
        let tokenizer = tiny();
        let mut detokenizer = Detokenizer::new(tokenizer.clone());
        let mut text: String = ids.iter().map(|&id| detokenizer.push(id).unwrap()).collect();
        text.push_str(&detokenizer.finish());
        prop_assert_eq!(text, tokenizer.decode(&ids).unwrap());
    }

    #[test]
    fn a_damaged_file_is_an_error_and_never_a_panic(
        cut in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(), byte: u8,
    ) {
        let mut json = tiny_json();
        let index = at.index(json.len());
        json[index] = byte;
        if let Err(e) = Tokenizer::from_bytes(&json) {
            prop_assert_eq!(e.kind(), ErrorKind::Tokenizer);
        }
        json.truncate(cut.index(json.len()));
        prop_assert_eq!(Tokenizer::from_bytes(&json).unwrap_err().kind(), ErrorKind::Tokenizer);
    }
}

#[test]
fn a_contradictory_file_is_refused_with_the_reason() {
    let original: Value = serde_json::from_slice(&tiny_json()).unwrap();
    let refused = |change: &dyn Fn(&mut Value), reason: &str| {
        let mut json = original.clone();
        change(&mut json);
        let e = Tokenizer::from_bytes(&serde_json::to_vec(&json).unwrap()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Tokenizer);
        assert!(e.message().contains(reason), "expected {reason:?} in: {e}");
    };
    let vocab = |json: &mut Value, token: &str, id: u64| {
        json["model"]["vocab"][token] = id.into();
    };
    refused(&|j| j["model"]["type"] = "WordPiece".into(), "model.type: expected BPE, found WordPiece");
    refused(&|j| j["model"]["dropout"] = 0.1.into(), "model.dropout");
    refused(&|j| j["model"]["continuing_subword_prefix"] = "##".into(), "continuing_subword_prefix");
    refused(&|j| j["model"]["byte_fallback"] = true.into(), "byte_fallback");
    refused(&|j| j["model"]["ignore_merges"] = true.into(), "ignore_merges");
    refused(&|j| j["normalizer"] = serde_json::json!({"type": "NFC"}), "normalizer");
    refused(&|j| j["decoder"] = Value::Null, "decoder");
    refused(&|j| j["pre_tokenizer"] = Value::Null, "ByteLevel");
    refused(&|j| j["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Removed".into(), "pre_tokenizer 0");
    refused(&|j| j["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(".into(), "pre_tokenizer");
    refused(&|j| j["pre_tokenizer"]["pretokenizers"][3]["add_prefix_space"] = true.into(), "add_prefix_space");
    refused(&|j| j["model"]["merges"][0] = "no such".into(), "model.merges 0");
    refused(&|j| j["model"]["merges"][3] = "one".into(), "model.merges 3: \"one\" is not two tokens");
    refused(&|j| vocab(j, "zzzzzzzzq", 17), "id 17");
    refused(&|j| vocab(j, "zzzzzzzzq", u64::from(u32::MAX)), "id 4294967295");
    refused(&|j| vocab(j, "漢", 9999), "neither byte-level nor an added token");
    refused(
        &|j| {
            j["model"]["vocab"].as_object_mut().unwrap().remove("!");
        },
        "no token for byte 0x21",
    );
    refused(&|j| j["added_tokens"][5]["id"] = 17.into(), "id 17");
    refused(&|j| j["added_tokens"][5]["content"] = "".into(), "is empty");
    refused(&|j| j["added_tokens"][5]["lstrip"] = true.into(), "surroundings");
    refused(
        &|j| {
            j["added_tokens"][5]["content"] = j["added_tokens"][6]["content"].clone();
        },
        "twice",
    );
}

#[test]
fn the_message_names_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    let e = Tokenizer::from_file(&path).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NotFound);
    std::fs::write(&path, "{\"model\": 3}").unwrap();
    let e = Tokenizer::from_file(&path).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Tokenizer);
    assert!(e.message().starts_with(path.to_str().unwrap()), "{e}");
}

/// A megabyte of prose, and 256 KiB each of what makes regexes and merges slow. The bound is generous (this is no
/// benchmark): quadratic work would take minutes.
#[test]
fn long_texts_of_any_kind_are_encoded_in_time() {
    let tokenizer = tiny();
    let prose = std::fs::read_to_string(root().join("examples/models/tiny-v4/eval.txt")).unwrap();
    for sample in [prose.as_str(), " ", "a", "<", "\n", " \n", "1", "漢", "<｜User｜>", "a ", "\u{301}", "\t x"] {
        let size = if sample.len() > 100 { 1 << 20 } else { 1 << 18 };
        let text = sample.repeat(size / sample.len());
        let start = std::time::Instant::now();
        let ids = tokenizer.encode(&text, Markup::Parse).unwrap();
        let seconds = start.elapsed().as_secs_f64();
        assert!(tokenizer.decode(&ids).unwrap() == text);
        assert!(seconds < 30.0, "{:?}: {seconds} s", sample.chars().take(9).collect::<String>());
    }
}

const PINNED: &[(&str, &[TokenId])] = &[
    ("", &[]),
    ("Once upon a time", &[49, 1377, 735, 261, 572]),
    (
        "<｜begin▁of▁sentence｜><｜User｜>Hello, 1234!<｜Assistant｜></think>",
        &[0, 3683, 42, 480, 81, 14, 223, 19, 20, 21, 22, 3, 3684, 3687],
    ),
    ("  two\n\n\tlines 漢é", &[223, 724, 298, 200, 1902, 296, 223, 165, 123, 98, 987]),
];
