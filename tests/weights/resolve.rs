//! Tensors against the configuration.

use dsv4::error::ErrorKind::{Config as ConfigKind, Corrupt, InvalidArgument, NotFound};
use dsv4::model::config::{Config, Draft, ExpertDtype};
use dsv4::model::weights::{DraftWeights, Routing, Weights};
use dsv4::tensor::format::{bf16_bits, bf16_value};
use dsv4::tensor::{MatrixFormat, Scales};
use serde_json::json;

use super::{assert_error, folder, load};
use crate::tiny_checkpoint::Tiny;

/// Spoils a good checkpoint and loads it.
fn spoiled(change: impl FnOnce(&mut Tiny)) -> dsv4::error::Result<Weights> {
    let mut tiny = Tiny::new();
    change(&mut tiny);
    let dir = folder();
    tiny.write_single(dir.path());
    load(dir.path()).map(|(_, _, weights)| weights)
}

#[test]
fn every_layer_kind_has_its_parts() {
    let weights = spoiled(|_| {}).unwrap();
    let parts: Vec<_> =
        weights.layers.iter().map(|l| (l.attn.compressor.is_some(), l.attn.indexer.is_some())).collect();
    assert_eq!(parts, [(false, false), (true, true), (true, false)]);
    assert!(matches!(weights.layers[0].ffn.routing, Routing::Hash(_)));
    assert!(matches!(weights.layers[1].ffn.routing, Routing::Bias(_)));
    assert_eq!(weights.layers[1].ffn.experts.len(), 2);
    let compressor = weights.layers[1].attn.compressor.as_ref().unwrap();
    assert_eq!((compressor.ape.len(), compressor.wkv.rows()), (4 * 256, 256));
    assert!(matches!(weights.draft, DraftWeights::Mtp(_)));
}

#[test]
fn matrices_lend_their_bytes_and_scales() {
    let weights = spoiled(|tiny| {
        tiny.get("layers.0.attn.wq_b.weight").3[5] = 0x38;
        tiny.get("layers.0.attn.wq_b.scale").3 = vec![127, 128];
        tiny.get("layers.0.ffn.experts.1.w2.scale").3[4] = 99;
    })
    .unwrap();
    let wq_b = weights.layers[0].attn.wq_b.view();
    assert_eq!((wq_b.format, wq_b.rows, wq_b.cols, wq_b.first_row), (MatrixFormat::E4m3, 256, 128, 0));
    assert_eq!((wq_b.data.len(), wq_b.data[5]), (256 * 128, 0x38));
    assert!(matches!(wq_b.scales, Scales::E8m0([127, 128])));
    assert!(!wq_b.round_to_bf16);
    let w2 = weights.layers[0].ffn.experts[1].w2.view();
    assert_eq!((w2.format, w2.rows, w2.cols, w2.data.len()), (MatrixFormat::E2m1, 128, 128, 128 * 64));
    let Scales::E8m0(scales) = w2.scales else { panic!("{:?}", w2.scales) };
    assert_eq!((scales.len(), scales[4]), (128 * 4, 99));
    assert_eq!(weights.layers[0].ffn.experts[1].w2.byte_len(), 128 * 64 + 128 * 4);
    let mix = weights.hc_head.mix.view();
    assert_eq!((mix.format, mix.rows, mix.cols, mix.data.len()), (MatrixFormat::F32, 4, 512, 4 * 512 * 4));
    assert_eq!(weights.embed.view().format, MatrixFormat::Bf16);
}

#[test]
fn vectors_widen_exactly_and_only_once() {
    let values = [1.0f32, -2.5, 3.0e-5, f32::MAX];
    let weights = spoiled(|tiny| {
        tiny.get("norm.weight").3 = values.iter().cycle().take(128).flat_map(|v| bf16_bits(*v).to_le_bytes()).collect();
        tiny.get("layers.0.attn.attn_sink").3 =
            [0.1f32, f32::MIN_POSITIVE].iter().flat_map(|v| v.to_le_bytes()).collect();
    })
    .unwrap();
    let expected: Vec<f32> = values.iter().map(|v| bf16_value(bf16_bits(*v))).collect();
    assert_eq!(weights.norm.values()[..4], expected[..]);
    assert_eq!(weights.norm.values().len(), 128);
    assert_eq!(weights.layers[0].attn.sink.values(), [0.1, f32::MIN_POSITIVE]);
    let first = weights.norm.values().as_ptr();
    weights.prepare().unwrap();
    assert_eq!(weights.norm.values().as_ptr(), first);
}

#[test]
fn missing_tensor_is_named_with_its_shape() {
    for (name, shape) in [
        ("embed.weight", "BF16 [8, 128]"),
        ("norm.weight", "BF16 [128]"),
        ("hc_head_fn", "F32 [4, 512]"),
        ("layers.2.hc_ffn_scale", "F32 [3]"),
        ("layers.1.attn.indexer.compressor.ape", "F32 [4, 128]"),
        ("layers.1.ffn.experts.1.w3.weight", "I8 [128, 64]"),
        ("layers.0.ffn.gate.tid2eid", "I64 [8, 1]"),
        ("mtp.0.h_proj.weight", "F8_E4M3 [128, 128]"),
    ] {
        let result = spoiled(|tiny| {
            tiny.remove(name);
        });
        assert_error(result, NotFound, &[name, shape, "missing"]);
    }
}

#[test]
fn each_single_missing_tensor_is_noticed() {
    for i in 0..Tiny::new().tensors.len() {
        let mut name = String::new();
        let result = spoiled(|tiny| name = tiny.tensors.remove(i).0);
        assert_error(result, NotFound, &[&name]);
    }
}

#[test]
fn wrong_shape_is_named_with_both_shapes() {
    for (name, dtype, shape) in [
        ("embed.weight", "BF16", vec![9, 128]),
        ("head.weight", "BF16", vec![128, 8]),
        ("norm.weight", "BF16", vec![1, 128]),
        ("hc_head_scale", "F32", vec![]),
        ("layers.0.attn.wkv.weight", "F8_E4M3", vec![64, 128]),
        ("layers.1.attn.compressor.ape", "F32", vec![4, 128]),
        ("layers.0.ffn.experts.0.w1.weight", "I8", vec![128, 128]),
        ("layers.0.ffn.gate.tid2eid", "I64", vec![8, 2]),
    ] {
        let result = spoiled(|tiny| tiny.reshape(name, dtype, &shape));
        assert_error(result, Corrupt, &[name, &format!("{shape:?}"), "config.json"]);
    }
}

#[test]
fn wrong_dtype_is_named_with_both_dtypes() {
    for (name, dtype, needed) in [
        ("embed.weight", "F32", "BF16"),
        ("layers.0.attn_norm.weight", "F32", "BF16"),
        ("layers.0.attn.wq_a.weight", "BF16", "F8_E4M3"),
        ("layers.0.attn.attn_sink", "BF16", "F32"),
        ("layers.0.ffn.experts.0.w1.weight", "F8_E4M3", "I8"),
        ("layers.0.ffn.gate.tid2eid", "I8", "I64"),
    ] {
        let result = spoiled(|tiny| {
            let shape = tiny.get(name).2.clone();
            tiny.reshape(name, dtype, &shape);
        });
        assert_error(result, Corrupt, &[name, &format!("dtype {dtype}"), needed]);
    }
}

#[test]
fn weight_without_scale_names_the_pair() {
    // pitfall A10
    for name in ["layers.0.attn.wo_a", "layers.2.ffn.experts.1.w2", "layers.1.attn.indexer.wq_b", "mtp.0.e_proj"] {
        let (weight, scale) = (format!("{name}.weight"), format!("{name}.scale"));
        let result = spoiled(|tiny| {
            tiny.remove(&scale);
        });
        assert_error(result, NotFound, &[&weight, &scale]);
    }
}

#[test]
fn scale_of_wrong_shape_is_named_with_both_shapes() {
    let result = spoiled(|tiny| tiny.reshape("layers.0.attn.wq_b.scale", "F8_E8M0", &[1, 2]));
    assert_error(result, Corrupt, &["layers.0.attn.wq_b.scale", "[1, 2]", "[2, 1]", "[256, 128]"]);
    let result = spoiled(|tiny| tiny.reshape("layers.0.ffn.experts.0.w1.scale", "F8_E8M0", &[1, 1]));
    assert_error(result, Corrupt, &["layers.0.ffn.experts.0.w1.scale", "[1, 1]", "[128, 4]"]);
}

#[test]
fn scales_are_e8m0_or_for_fp8_float32() {
    let weights = spoiled(|tiny| tiny.reshape("layers.0.attn.wq_b.scale", "F32", &[2, 1])).unwrap();
    assert!(matches!(weights.layers[0].attn.wq_b.view().scales, Scales::F32(bytes) if bytes.len() == 8));
    let result = spoiled(|tiny| tiny.reshape("layers.0.attn.wq_b.scale", "BF16", &[2, 1]));
    assert_error(result, Corrupt, &["layers.0.attn.wq_b.scale", "BF16", "F8_E8M0 or F32"]);
    let result = spoiled(|tiny| tiny.reshape("layers.0.ffn.experts.0.w1.scale", "F32", &[128, 4]));
    assert_error(result, Corrupt, &["layers.0.ffn.experts.0.w1.scale", "F32", "F8_E8M0"]);
}

/// Turns the experts into FP8 with float32 scales, as in the `-Base` releases.
fn with_fp8_experts(tiny: &mut Tiny) {
    let names: Vec<_> = tiny.tensors.iter().map(|t| t.0.clone()).filter(|n| n.contains(".experts.")).collect();
    for name in names {
        if name.ends_with(".weight") {
            tiny.reshape(&name, "F8_E4M3", &[128, 128]);
        } else {
            tiny.reshape(&name, "F32", &[1, 1]);
        }
    }
}

#[test]
fn fp8_experts_with_float32_scales_resolve() {
    let weights = spoiled(|tiny| {
        with_fp8_experts(tiny);
        tiny.config["expert_dtype"] = json!("fp8");
    })
    .unwrap();
    let w1 = &weights.layers[1].ffn.experts[0].w1;
    assert_eq!(w1.format(), MatrixFormat::E4m3);
    assert!(matches!(w1.view().scales, Scales::F32(_)));
    let result = spoiled(with_fp8_experts);
    assert_error(result, Corrupt, &["layers.0.ffn.experts.0.w1.weight", "F8_E4M3", "I8"]);
}

#[test]
fn absent_expert_dtype_is_told_by_the_tensors() {
    for fp8 in [false, true] {
        let mut tiny = Tiny::new();
        tiny.config.as_object_mut().unwrap().shift_remove("expert_dtype");
        if fp8 {
            with_fp8_experts(&mut tiny);
        }
        let dir = folder();
        tiny.write_single(dir.path());
        let (checkpoint, config, weights) = load(dir.path()).unwrap();
        let expected = if fp8 { ExpertDtype::Fp8 } else { ExpertDtype::Fp4 };
        assert_eq!(config.expert_dtype, None);
        assert_eq!(config.with_checkpoint(&checkpoint).unwrap().expert_dtype, Some(expected));
        assert_eq!(weights.layers[0].ffn.experts[0].w1.format() == MatrixFormat::E4m3, fp8);
    }
}

#[test]
fn layers_that_do_not_match_the_tensors_are_an_error() {
    // pitfall A13
    let result = spoiled(|tiny| {
        tiny.config["num_hidden_layers"] = json!(2);
        tiny.config["compress_ratios"] = json!([0, 4, 0]);
    });
    assert_error(result, ConfigKind, &["layers.2.", "num_hidden_layers is 2"]);
    let result = spoiled(|tiny| {
        tiny.config["num_hidden_layers"] = json!(4);
        tiny.config["compress_ratios"] = json!([0, 4, 128, 0, 0]);
    });
    assert_error(result, NotFound, &["layers.3."]);
}

#[test]
fn layer_kinds_that_do_not_match_the_tensors_are_an_error() {
    let ratios = |ratios: serde_json::Value| spoiled(move |tiny| tiny.config["compress_ratios"] = ratios);
    assert_error(ratios(json!([0, 0, 128, 0])), ConfigKind, &["layers.1.attn.", "compress_ratios[1] is 0"]);
    assert_error(ratios(json!([0, 4, 4, 0])), Corrupt, &["layers.2.attn.compressor.ape", "[128, 128]", "[4, 256]"]);
    assert_error(ratios(json!([4, 4, 128, 0])), NotFound, &["layers.0.attn.compressor.ape", "compress_ratios[0] is 4"]);
}

#[test]
fn router_kinds_that_do_not_match_the_tensors_are_an_error() {
    let hashed = |n: usize| spoiled(move |tiny| tiny.config["num_hash_layers"] = json!(n));
    assert_error(hashed(0), NotFound, &["layers.0.ffn.gate.bias", "num_hash_layers is 0"]);
    assert_error(hashed(2), NotFound, &["layers.1.ffn.gate.tid2eid", "num_hash_layers is 2"]);
    let result = spoiled(|tiny| tiny.add("layers.0.ffn.gate.bias", "F32", &[2]));
    assert_error(result, ConfigKind, &["layers.0.ffn.gate.bias", "num_hash_layers is 1"]);
}

#[test]
fn expert_counts_that_do_not_match_the_tensors_are_an_error() {
    let result = spoiled(|tiny| tiny.add("layers.0.ffn.experts.2.w1.weight", "I8", &[128, 64]));
    assert_error(result, ConfigKind, &["layers.0.ffn.experts.2.w1.weight", "n_routed_experts is 2"]);
    let result = spoiled(|tiny| tiny.config["n_routed_experts"] = json!(65536));
    assert_error(result, Corrupt, &["layers.0.ffn.gate.weight", "[65536, 128]"]);
}

#[test]
fn tensors_outside_the_blocks_are_ignored() {
    let weights = spoiled(|tiny| {
        tiny.add("vision.patch_embed.weight", "BF16", &[2, 3, 4, 5]);
        // the -Base releases seem to carry copies of the trunk's tables
        tiny.add("mtp.0.emb.tok_emb.weight", "BF16", &[8, 128]);
        tiny.add("mtp.0.head.weight", "BF16", &[8, 128]);
    })
    .unwrap();
    assert!(matches!(weights.draft, DraftWeights::Mtp(_)));
    let result = spoiled(|tiny| tiny.add("mtp.0.surprise", "BF16", &[8, 128]));
    assert_error(result, ConfigKind, &["mtp.0.surprise"]);
}

#[test]
fn checkpoint_without_mtp_tensors_has_no_drafter() {
    let weights = spoiled(|tiny| tiny.tensors.retain(|t| !t.0.starts_with("mtp."))).unwrap();
    assert!(matches!(weights.draft, DraftWeights::None));
}

#[test]
fn dspark_stages_are_counted_in_the_tensors() {
    let dir = folder();
    let mut tiny = Tiny::new().into_dspark();
    tiny.config["compress_ratios"] = json!([0, 4, 128, 0]); // stale
    tiny.write_sharded(dir.path());
    let (checkpoint, config, weights) = load(dir.path()).unwrap();
    let Draft::Dspark { stages: 3, markov_rank: 16, .. } = config.with_checkpoint(&checkpoint).unwrap().draft else {
        panic!("the drafter was not counted")
    };
    let DraftWeights::Dspark(dspark) = weights.draft else { panic!("no DSpark weights") };
    assert_eq!((dspark.stages.len(), dspark.main_proj.cols(), dspark.confidence.cols()), (3, 384, 144));
    assert_eq!(dspark.markov_w1.rows(), 8);
}

#[test]
fn draft_tensors_that_do_not_match_the_keys_are_an_error() {
    let load_dspark = |change: fn(&mut Tiny)| {
        let mut tiny = Tiny::new().into_dspark();
        change(&mut tiny);
        let dir = folder();
        tiny.write_single(dir.path());
        load(dir.path())
    };
    let without_keys = load_dspark(|tiny| {
        tiny.config.as_object_mut().unwrap().retain(|key, _| !key.starts_with("dspark"));
    });
    assert_error(without_keys, ConfigKind, &["dspark_block_size", "mtp.0.main_proj.weight"]);
    let gap = load_dspark(|tiny| tiny.tensors.retain(|t| !t.0.starts_with("mtp.1.")));
    assert_error(gap, Corrupt, &["mtp.1"]);
    let shorter = load_dspark(|tiny| tiny.config["dspark_target_layer_ids"] = json!([0, 1]));
    assert_error(shorter, Corrupt, &["mtp.0.main_proj.weight", "[128, 384]", "[128, 256]"]);
    let numbered = spoiled(|tiny| tiny.add("mtp.zero.x", "I8", &[1]));
    assert_error(numbered, Corrupt, &["mtp.zero.x"]);
    let classic = spoiled(|tiny| {
        let blocks: Vec<_> = tiny.tensors.iter().filter(|t| t.0.starts_with("mtp.0.")).cloned().collect();
        tiny.tensors.extend(blocks.into_iter().map(|t| (t.0.replace("mtp.0.", "mtp.1."), t.1, t.2, t.3)));
    });
    assert_error(classic, ConfigKind, &["2 mtp blocks", "dspark_"]);
}

#[test]
fn hash_table_rows_are_checked_when_they_are_read() {
    let table = |ids: [i64; 8]| {
        let weights = spoiled(|tiny| {
            tiny.get("layers.0.ffn.gate.tid2eid").3 = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        });
        let Routing::Hash(table) = weights.unwrap().layers[0].ffn.routing.clone() else { panic!("not hash-routed") };
        table
    };
    let good = table([0, 1, 0, 1, 1, 1, 0, 0]);
    assert_eq!(good.row(3).unwrap().collect::<Vec<_>>(), [1]);
    assert_eq!(good.row(7).unwrap().collect::<Vec<_>>(), [0]);
    for token in [8, u32::MAX] {
        assert_error(good.row(token).map(|_| ()), InvalidArgument, &[&token.to_string(), "8 rows"]);
    }
    for id in [2, -1, i64::MAX, i64::MIN, 1 << 32] {
        let bad = table([0, 0, 0, 0, 0, id, 0, 0]);
        assert_eq!(bad.row(4).unwrap().len(), 1);
        let parts = ["row 5", "layers.0.ffn.gate.tid2eid", &id.to_string(), "n_routed_experts"];
        assert_error(bad.row(5).map(|_| ()), Corrupt, &parts);
    }
}

#[test]
fn checkpoint_of_the_official_maker_resolves() {
    // the small trained model of the shared folder, if it is there
    let test = "checkpoint_of_the_official_maker_resolves";
    let Some(dir) = crate::shared::shared(test, "models/tiny-v4") else { return };
    let (checkpoint, config, weights) = load(&dir).unwrap();
    assert_eq!((checkpoint.len(), checkpoint.shards().len(), weights.layers.len()), (585, 3, 6));
    assert_eq!(config.with_checkpoint(&checkpoint).unwrap().draft, Draft::Mtp);
    assert!(checkpoint.suspicious(&mut |_, _| true).unwrap().is_empty());
}

#[test]
fn resolving_needs_only_the_configuration_as_read() {
    let dir = folder();
    Tiny::new().write_single(dir.path());
    let (checkpoint, config, _) = load(dir.path()).unwrap();
    let settled: Config = config.clone().with_checkpoint(&checkpoint).unwrap();
    assert_eq!(settled.clone().with_checkpoint(&checkpoint).unwrap(), settled);
    Weights::resolve(&settled, &checkpoint).unwrap();
}
