//! The inventory and the search for suspicious weights.

use dsv4::error::ErrorKind::Cancelled;
use dsv4::tensor::DType;
use dsv4::weights::{Category, Checkpoint, Finding, Suspicion};

use super::{assert_error, folder};
use crate::tiny_checkpoint::Tiny;

fn scan(change: impl FnOnce(&mut Tiny)) -> Vec<Suspicion> {
    let mut tiny = Tiny::new();
    change(&mut tiny);
    let dir = folder();
    tiny.write_sharded(dir.path());
    let checkpoint = Checkpoint::open(dir.path()).expect("the checkpoint is good");
    checkpoint.suspicious(&mut |_, _| true).expect("the checkpoint can be read")
}

#[test]
fn good_weights_are_not_suspicious() {
    assert_eq!(scan(|_| {}), []);
    // untrained biases and sinks are zero, and an index table is no weight
    let zeros = ["layers.1.ffn.gate.bias", "layers.1.attn.attn_sink", "layers.0.ffn.gate.tid2eid", "hc_head_base"];
    assert_eq!(scan(|tiny| zeros.iter().for_each(|name| tiny.get(name).3.fill(0))), []);
}

#[test]
fn tensors_of_zeros_are_found() {
    // pitfall A17: a writer left whole tensors as zeros
    for name in ["layers.1.attn_norm.weight", "embed.weight", "layers.0.ffn.experts.1.w2.weight", "hc_head_fn"] {
        let found = scan(|tiny| tiny.get(name).3.fill(0));
        assert_eq!(found, [Suspicion { tensor: name.into(), finding: Finding::AllZero }]);
        assert!(found[0].to_string().contains(name));
    }
    assert_eq!(scan(|tiny| tiny.get("embed.weight").3[1..].fill(0)), [], "one element is not zero");
}

#[test]
fn values_that_are_no_numbers_are_found_in_every_format() {
    let cases: [(&str, &[u8], u64); 6] = [
        ("layers.0.attn.wq_a.scale", &[0xFF], 1),
        ("layers.0.attn.wq_a.weight", &[0x7F, 0xFF, 0x7E], 2),
        ("norm.weight", &[0x80, 0x7F, 0xC0, 0xFF, 0x7F, 0x7F], 2),
        ("hc_head_fn", &[0, 0, 0x80, 0x7F, 0, 0, 0xC0, 0xFF, 0xFF, 0xFF, 0x7F, 0x7F], 2),
        ("layers.0.ffn.experts.0.w1.scale", &[0xFE, 0xFF], 1),
        ("layers.0.ffn.experts.0.w1.weight", &[0x7F, 0xFF], 0),
    ];
    for (name, bytes, count) in cases {
        let found = scan(|tiny| tiny.get(name).3[..bytes.len()].copy_from_slice(bytes));
        let expected = Suspicion { tensor: name.into(), finding: Finding::NotFinite(count) };
        assert_eq!(found, if count == 0 { vec![] } else { vec![expected] });
    }
}

#[test]
fn scan_reports_progress_and_stops_on_request() {
    let dir = folder();
    Tiny::new().write_sharded(dir.path());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let mut last = 0;
    let ascending = &mut |done: u64, total| {
        assert!(done > last && done <= total && total == checkpoint.total_bytes());
        last = done;
        true
    };
    checkpoint.suspicious(ascending).unwrap();
    assert_eq!(last, checkpoint.total_bytes());
    let mut calls = 0;
    let stopped = checkpoint.suspicious(&mut |_, _| {
        calls += 1;
        calls < 5
    });
    assert_error(stopped, Cancelled, &["stopped"]);
    assert_eq!(calls, 5);
}

#[test]
fn inventory_adds_up() {
    let dir = folder();
    let tiny = Tiny::new();
    tiny.write_sharded(dir.path());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let inventory = checkpoint.inventory();
    assert_eq!((inventory.total.tensors, inventory.total.bytes), (checkpoint.len(), checkpoint.total_bytes()));
    assert_eq!(inventory.by_dtype.iter().map(|(_, s)| s.bytes).sum::<u64>(), checkpoint.total_bytes());
    assert_eq!(inventory.by_category.iter().map(|(_, s)| s.tensors).sum::<usize>(), checkpoint.len());
    let i64s = inventory.by_dtype.iter().find(|(d, _)| *d == DType::I64).unwrap().1;
    assert_eq!((i64s.tensors, i64s.bytes), (1, 64));
    let routed = inventory.by_category.iter().find(|(c, _)| *c == Category::RoutedExperts).unwrap().1;
    assert_eq!((routed.tensors, routed.bytes), (3 * 2 * 3 * 2, 3 * 2 * 3 * (128 * 64 + 128 * 4)));
    assert!(inventory.by_category.iter().all(|(c, s)| (*c == Category::Other) == (s.tensors == 0)), "{inventory:?}");
}
