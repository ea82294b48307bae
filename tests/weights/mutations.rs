//! Thousands of damaged headers, indexes and configurations: each is read or refused, none panics.

use std::fs;

use dsv4::model::config::Config;
use dsv4::model::weights::Weights;
use dsv4::weights::Checkpoint;

use super::folder;
use super::spoil::read_index;
use crate::safetensors_writer;
use crate::tiny_checkpoint::{Tiny, config, shard_name};

/// Numbers of a fixed sequence (xorshift64*).
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % n
    }
}

/// Fragments that mean something to one of the parsers.
const FRAGMENTS: &[&str] = &[
    "0",
    "-1",
    "1e400",
    "2147483648",
    "18446744073709551616",
    "null",
    "true",
    "\"\"",
    "[]",
    "{}",
    "[",
    "}",
    ",",
    ":",
    "\"",
    "\\u0000",
    "\\ud800",
    "../",
    "NaN",
    "0.5",
    "\"F3\"",
    "9223372036854775808",
];

/// One to three random edits: a byte changed, removed, or repeated, a fragment put in, a piece cut out or copied.
fn mutate(text: &[u8], random: &mut Random) -> Vec<u8> {
    let mut text = text.to_vec();
    for _ in 0..=random.below(3) {
        let at = random.below(text.len().max(1)).min(text.len());
        let end = (at + random.below(24)).min(text.len());
        match random.below(6) {
            0 if at < text.len() => text[at] = random.below(256) as u8,
            1 if at < text.len() => text[at] ^= 1 << random.below(8),
            2 => drop(text.drain(at..end)),
            3 => {
                let piece = text[at..end].to_vec();
                text.splice(end..end, piece);
            }
            4 => {
                let fragment = FRAGMENTS[random.below(FRAGMENTS.len())];
                text.splice(at..end.min(at + fragment.len()), fragment.bytes());
            }
            _ => text.truncate(at),
        }
    }
    text
}

#[test]
fn mutated_headers_are_read_or_refused() {
    let data = [1u8; 64];
    let tensors: [safetensors_writer::Entry<'_>; 3] = [
        ("a.weight", "F8_E4M3", &[4, 4], &data[..16]),
        ("a.scale", "F8_E8M0", &[1, 1], &data[..1]),
        ("b", "F32", &[3], &data[..12]),
    ];
    let good = safetensors_writer::bytes(&safetensors_writer::header(&tensors), &data[..29]);
    let mut random = Random(1);
    let mut accepted = 0;
    for _ in 0..20_000 {
        let file = mutate(&good, &mut random);
        let Ok(checkpoint) = Checkpoint::from_bytes("mutated", file) else { continue };
        accepted += 1;
        // whatever was accepted can be used
        for tensor in checkpoint.tensors() {
            let elements: usize = tensor.shape().iter().product();
            assert_eq!(tensor.bytes().len(), elements * tensor.dtype().size());
        }
        checkpoint.suspicious(&mut |_, _| true).unwrap();
    }
    assert!(accepted > 10, "the mutations are too wild to reach anything behind the parser");
}

#[test]
fn mutated_indexes_are_read_or_refused() {
    let dir = folder();
    for i in 0..3 {
        let names = [format!("t{i}.weight"), format!("t{i}.scale")];
        let tensors = [(&*names[0], "I8", &[2][..], &[1, 2][..]), (&*names[1], "I8", &[1], &[3])];
        safetensors_writer::write(&dir.path().join(shard_name(i)), &tensors);
    }
    let map: serde_json::Map<_, _> = (0..3)
        .flat_map(|i| ["weight", "scale"].map(|part| (format!("t{i}.{part}"), serde_json::json!(shard_name(i)))))
        .collect();
    crate::tiny_checkpoint::write_index(
        dir.path(),
        &serde_json::json!({"metadata": {"total_size": 9}, "weight_map": map}),
    );
    let good = read_index(dir.path()).to_string();
    let mut random = Random(2);
    let mut accepted = 0;
    for _ in 0..1_000 {
        fs::write(dir.path().join("model.safetensors.index.json"), mutate(good.as_bytes(), &mut random)).unwrap();
        let Ok(checkpoint) = Checkpoint::open(dir.path()) else { continue };
        accepted += 1;
        assert!(checkpoint.tensors().all(|tensor| !tensor.bytes().is_empty()));
    }
    assert!(accepted > 10, "the mutations are too wild to reach anything behind the parser");
}

#[test]
fn mutated_configurations_are_read_or_refused_also_by_resolve() {
    let dir = folder();
    Tiny::new().write_single(dir.path());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let good = config().to_string();
    let mut random = Random(3);
    let (mut accepted, mut resolved) = (0, 0);
    for _ in 0..20_000 {
        let text = mutate(good.as_bytes(), &mut random);
        let Ok(text) = std::str::from_utf8(&text) else { continue };
        let Ok(config) = Config::from_json(text) else { continue };
        accepted += 1;
        resolved += usize::from(Weights::resolve(&config, &checkpoint).is_ok());
    }
    assert!(accepted > 100 && resolved > 10 && resolved < accepted, "{accepted} accepted, {resolved} resolved");
}

#[test]
fn each_byte_of_a_small_header_may_be_anything() {
    let good = safetensors_writer::bytes(r#"{"a":{"dtype":"I8","shape":[2],"data_offsets":[0,2]}}"#, &[1, 2]);
    for at in 0..good.len() {
        for value in [0, b'"', b'0', b'9', b'-', b'{', b'}', b'[', b']', b',', b' ', 0x7F, 0x80, 0xFF] {
            let mut file = good.clone();
            file[at] = value;
            if let Ok(checkpoint) = Checkpoint::from_bytes("mutated", file) {
                assert!(checkpoint.tensors().all(|tensor| tensor.bytes().len() <= good.len()));
            }
        }
    }
}
