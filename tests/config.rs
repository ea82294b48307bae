//! `config.json`: the official files, and every value that must be refused.

#![allow(clippy::unwrap_used, reason = "a failed call is a failed test")]

#[path = "common/shared.rs"]
mod shared;

use dsv4::KvFormat;
use dsv4::cache::CachePlan;
use dsv4::error::ErrorKind::{self, Config as ConfigKind, NotFound, UnsupportedModel};
use dsv4::error::{Error, Result};
use dsv4::model::config::{Config, Draft, ExpertDtype, LayerKind};
use serde_json::{Value, json};

/// The configuration of V4-Flash with few layers; every key of the official file.
fn good() -> Value {
    let text = r#"{
        "architectures": ["DeepseekV4ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 0, "eos_token_id": 1, "expert_dtype": "fp4", "hc_eps": 1e-06, "hc_mult": 4,
        "hc_sinkhorn_iters": 20, "head_dim": 512, "hidden_act": "silu", "hidden_size": 4096, "index_head_dim": 128,
        "index_n_heads": 64, "index_topk": 512, "initializer_range": 0.02, "max_position_embeddings": 1048576,
        "model_type": "deepseek_v4", "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "norm_topk_prob": true, "num_attention_heads": 64, "num_experts_per_tok": 6, "num_hidden_layers": 4,
        "num_hash_layers": 3, "num_key_value_heads": 1, "num_nextn_predict_layers": 1, "o_groups": 8,
        "o_lora_rank": 1024, "q_lora_rank": 1024, "qk_rope_head_dim": 64,
        "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
            "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536,
            "type": "yarn"},
        "rope_theta": 10000, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "sliding_window": 128,
        "swiglu_limit": 10.0, "tie_word_embeddings": false, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
        "transformers_version": "4.57.1", "use_cache": true, "vocab_size": 129280, "compress_rope_theta": 160000,
        "compress_ratios": [0, 0, 4, 128, 0]
    }"#;
    serde_json::from_str(text).expect("the text is JSON")
}

/// Whole numbers the arithmetic depends on.
const COUNTS: [&str; 20] = [
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "hc_mult",
    "hc_sinkhorn_iters",
    "max_position_embeddings",
    "rope_scaling.original_max_position_embeddings",
];

/// Other numbers.
const NUMBERS: [&str; 8] = [
    "routed_scaling_factor",
    "hc_eps",
    "rms_norm_eps",
    "rope_theta",
    "compress_rope_theta",
    "rope_scaling.factor",
    "rope_scaling.beta_fast",
    "rope_scaling.beta_slow",
];

/// Keys with the only value they may have.
const CONSTANTS: [(&str, &str); 15] = [
    ("scoring_func", r#""sqrtsoftplus""#),
    ("topk_method", r#""noaux_tc""#),
    ("hidden_act", r#""silu""#),
    ("norm_topk_prob", "true"),
    ("tie_word_embeddings", "false"),
    ("attention_bias", "false"),
    ("n_shared_experts", "1"),
    ("num_key_value_heads", "1"),
    ("hc_mult", "4"),
    ("rope_scaling.type", r#""yarn""#),
    ("quantization_config.quant_method", r#""fp8""#),
    ("quantization_config.fmt", r#""e4m3""#),
    ("quantization_config.scale_fmt", r#""ue8m0""#),
    ("quantization_config.activation_scheme", r#""dynamic""#),
    ("quantization_config.weight_block_size", "[128,128]"),
];

/// Where `key`, with a dot for a nested one, lies in `config`.
fn slot<'a>(config: &'a mut Value, key: &str) -> &'a mut Value {
    key.split('.').fold(config, |value, part| &mut value[part])
}

/// Reads the good configuration with `changes`.
fn with(changes: &[(&str, Value)]) -> Result<Config> {
    let mut config = good();
    for (key, value) in changes {
        *slot(&mut config, key) = value.clone();
    }
    Config::from_json(&config.to_string())
}

/// Reads the good configuration without `key`.
fn without(key: &str) -> Result<Config> {
    let mut config = good();
    let (outer, inner) = key.rsplit_once('.').unwrap_or(("", key));
    let object = if outer.is_empty() { &mut config } else { slot(&mut config, outer) };
    object.as_object_mut().expect("an object").shift_remove(inner).expect("the key is there");
    Config::from_json(&config.to_string())
}

#[track_caller]
fn assert_error(result: Result<Config>, kind: ErrorKind, parts: &[&str]) -> Error {
    let Err(error) = result else { panic!("no error; expected {kind:?} with {parts:?}") };
    assert_eq!(error.kind(), kind, "{error}");
    for part in parts {
        assert!(error.message().contains(part), "{part:?} is not in: {error}");
    }
    error
}

#[test]
fn good_configuration_is_read_field_by_field() {
    let config = with(&[]).unwrap();
    assert_eq!(config.layers, [LayerKind::Window, LayerKind::Window, LayerKind::C4a, LayerKind::C128a]);
    assert_eq!((config.hidden_size, config.head_dim, config.qk_rope_head_dim), (4096, 512, 64));
    assert_eq!((config.routed_scaling_factor, config.swiglu_limit, config.hc_eps), (1.5, 10.0, 1e-6));
    assert_eq!((config.rope_theta, config.compress_rope_theta, config.rope_scaling.factor), (1e4, 1.6e5, 16.0));
    assert_eq!(config.rope_scaling.original_max_position_embeddings, 65536);
    assert_eq!((config.bos_token_id, config.eos_token_id, config.expert_dtype), (0, 1, Some(ExpertDtype::Fp4)));
    assert_eq!(config.draft, Draft::Mtp);
}

#[test]
fn official_configurations_are_read() {
    let test = "official_configurations_are_read";
    let cases = [
        ("V4-Flash", 43, 4096, 21, 512),
        ("V4-Flash-Base", 43, 4096, 21, 512),
        ("V4-Flash-0731", 43, 4096, 21, 512),
        ("V4-Pro", 61, 7168, 30, 1024),
        ("V4-Pro-0813", 61, 7168, 30, 1024),
    ];
    for (name, layers, hidden, c4a, topk) in cases {
        let file = format!("data/config/DeepSeek-{name}.config.json");
        let Some(path) = shared::shared(test, &file) else { return };
        let config = Config::from_file(&path).unwrap();
        assert_eq!((config.layers.len(), config.hidden_size, config.index_topk), (layers, hidden, topk), "{name}");
        assert_eq!(config.layers.iter().filter(|kind| **kind == LayerKind::C4a).count(), c4a, "{name}");
        let expert_dtype = if name.ends_with("Base") { ExpertDtype::Fp8 } else { ExpertDtype::Fp4 };
        assert_eq!(config.expert_dtype, Some(expert_dtype), "{name}");
        let is_dspark = matches!(config.draft, Draft::Dspark { stages: 3, block_size: 5, noise_token_id: 128_799, .. });
        assert_eq!(is_dspark, name.ends_with("0731") || name.ends_with("0813"), "{name}: {:?}", config.draft);
    }
}

#[test]
fn the_official_configurations_give_the_published_cache_sizes() {
    let test = "the_official_configurations_give_the_published_cache_sizes";
    let (gib, tokens) = (f64::from(1 << 30), 1 << 20);
    // windows and pages at 1,048,576 tokens in GiB, and bytes a token
    for (name, format, size, per_token) in [
        ("V4-Pro", KvFormat::Bf16, 9.6246, 9848.0),
        ("V4-Pro", KvFormat::Fp8, 4.918, 5031.4),
        ("V4-Flash", KvFormat::Bf16, 6.724, 6880.0),
        ("V4-Flash", KvFormat::Fp8, 3.435, 3514.25),
    ] {
        let file = format!("data/config/DeepSeek-{name}.config.json");
        let Some(path) = shared::shared(test, &file) else { return };
        let plan = CachePlan::new(&Config::from_file(&path).unwrap(), format, tokens, 64 << 30);
        let bytes = (plan.bytes.window + plan.bytes.pages) as f64 / gib;
        assert!((bytes - size).abs() < 6e-5 * size, "{name} {format}: {bytes} GiB");
        assert!((plan.block as f64 / 256.0 - per_token).abs() < 0.05, "{name} {format}: {} a block", plan.block);
        let most = if name == "V4-Pro" { 11_000_000 } else { 7_000_000 };
        assert!(format != KvFormat::Fp8 || plan.sequence < most, "{name}: {} for an empty session", plan.sequence);
        assert_eq!(plan.sequences, (64 << 30) / plan.pages(tokens));
    }
}

#[test]
fn inference_configurations_are_refused_with_what_is_needed_instead() {
    let inference = json!({"dim": 7168, "n_layers": 61, "n_heads": 128, "vocab_size": 129_280});
    let parts = ["inference code", "dim", "n_layers", "config.json", "hidden_size"];
    assert_error(Config::from_json(&inference.to_string()), ConfigKind, &parts);
    let v41 = json!({"dim": 5120, "n_layers": 40, "kv_source_layers": [2, 8, 14, 20], "vocab_size": 129_280});
    assert_error(Config::from_json(&v41.to_string()), UnsupportedModel, &["DeepSeek-V4.1", "deepseek_v41"]);
    let test = "inference_configurations_are_refused_with_what_is_needed_instead";
    for (name, kind, part) in
        [("V4-Pro", ConfigKind, "inference code"), ("V4.1-Flash", UnsupportedModel, "deepseek_v41")]
    {
        let file = format!("data/config/DeepSeek-{name}.inference_config.json");
        let Some(path) = shared::shared(test, &file) else { return };
        assert_error(Config::from_file(&path), kind, &[part, path.to_str().unwrap()]);
    }
}

#[test]
fn other_models_are_refused_by_name_with_this_version() {
    // pitfalls A15, A16
    let version = env!("CARGO_PKG_VERSION");
    let v41 = with(&[("model_type", json!("deepseek_v41"))]);
    assert_error(v41, UnsupportedModel, &["deepseek_v41", "another architecture", version]);
    for name in ["deepseek_v3", "deepseek_v32", "deepseek_v5", "deepseek-v4", "DEEPSEEK_V4", "llama", ""] {
        let quoted = format!("{name:?}");
        assert_error(with(&[("model_type", json!(name))]), UnsupportedModel, &[&quoted, version, "deepseek_v4"]);
    }
    // the name alone decides, before any other key is looked at
    assert_error(Config::from_json(r#"{"model_type":"deepseek_v6"}"#), UnsupportedModel, &["deepseek_v6"]);
    let vision = with(&[("architectures", json!(["DeepseekV4ForConditionalGeneration"]))]);
    assert_error(vision, UnsupportedModel, &["DeepseekV4ForConditionalGeneration", version]);
    for value in [json!(4), json!(null), json!(["deepseek_v4"])] {
        assert_error(with(&[("model_type", value.clone())]), ConfigKind, &["model_type", &value.to_string()]);
    }
    assert_error(without("model_type"), ConfigKind, &["model_type is missing"]);
}

#[test]
fn impossible_whole_numbers_name_key_and_value() {
    // pitfall A13
    for key in COUNTS {
        for value in [
            json!(0),
            json!(-1),
            json!(i64::MIN),
            json!(2_147_483_648u32),
            json!(u64::MAX),
            json!(1.5),
            json!(4096.0),
            json!("64"),
            json!(true),
            json!(null),
            json!([64]),
            json!({}),
        ] {
            let shown = match &value {
                Value::Array(_) => "[64]".to_owned(),
                Value::Object(_) => "an object".to_owned(),
                other => other.to_string(),
            };
            assert_error(with(&[(key, value)]), ConfigKind, &[key, &format!("is {shown}")]);
        }
    }
    for key in ["num_hash_layers", "num_nextn_predict_layers", "bos_token_id", "eos_token_id"] {
        for value in [json!(-1), json!(2_147_483_648u32), json!(0.5), json!("1"), json!([1])] {
            assert_error(with(&[(key, value.clone())]), ConfigKind, &[key, &format!("is {value}")]);
        }
    }
    for key in ["bos_token_id", "eos_token_id"] {
        assert_error(with(&[(key, json!(129_280))]), ConfigKind, &[key, "129280"]);
    }
}

#[test]
fn impossible_numbers_name_key_and_value() {
    for key in NUMBERS {
        for value in [json!(0), json!(-1.5), json!("1"), json!("NaN"), json!(null), json!([1.0]), json!(1e300)] {
            if value == json!(1e300) && (key.starts_with("rope") || key.starts_with("compress")) {
                continue; // large, but a double can compute with it
            }
            let shown = if value == json!(1e300) { "e+300".to_owned() } else { value.to_string() };
            assert_error(with(&[(key, value)]), ConfigKind, &[key, &shown]);
        }
    }
    for value in [json!(-0.5), json!("10"), json!(null)] {
        assert_error(with(&[("swiglu_limit", value.clone())]), ConfigKind, &["swiglu_limit", &value.to_string()]);
    }
    assert_error(with(&[("hc_eps", json!(1e-60))]), ConfigKind, &["hc_eps"]);
    assert_error(with(&[("rope_theta", json!(1))]), ConfigKind, &["rope_theta is 1"]);
    assert_error(with(&[("rope_scaling.factor", json!(0.5))]), ConfigKind, &["rope_scaling.factor is 0.5"]);
    assert_error(with(&[("rope_scaling.beta_slow", json!(33))]), ConfigKind, &["beta_fast", "32", "33"]);
    assert_eq!(with(&[("swiglu_limit", json!(0))]).unwrap().swiglu_limit, 0.0);
}

#[test]
fn not_a_number_and_infinity_name_the_key() {
    // pitfall A14: Python writes them into JSON, where they do not exist
    for value in ["NaN", "Infinity", "-Infinity", "1e999"] {
        for key in ["rope_theta", "swiglu_limit", "hidden_size", "an_unknown_key"] {
            let mut config = good();
            config[key] = json!("HERE");
            let text = config.to_string().replace("\"HERE\"", value);
            assert_error(Config::from_json(&text), ConfigKind, &[key]);
        }
    }
}

#[test]
fn dimensions_that_do_not_fit_each_other_are_refused() {
    type Case<'a> = (&'a [(&'a str, Value)], &'a [&'a str]);
    let cases: [Case<'_>; 20] = [
        (&[("qk_rope_head_dim", json!(576))], &["qk_rope_head_dim is 576", "head_dim (512)"]),
        (&[("qk_rope_head_dim", json!(512))], &["qk_rope_head_dim is 512", "head_dim (512)"]),
        (&[("qk_rope_head_dim", json!(192))], &["qk_rope_head_dim is 192", "index_head_dim (128)"]),
        (&[("qk_rope_head_dim", json!(63))], &["qk_rope_head_dim is 63", "2"]),
        (&[("qk_rope_head_dim", json!(32))], &["head_dim is 512", "qk_rope_head_dim 32", "480", "64"]),
        (&[("index_head_dim", json!(32))], &["qk_rope_head_dim is 64", "index_head_dim (32)"]),
        (&[("index_head_dim", json!(96))], &["index_head_dim is 96", "power of two"]),
        (&[("index_head_dim", json!(80))], &["index_head_dim is 80", "32"]),
        (&[("num_experts_per_tok", json!(257))], &["num_experts_per_tok is 257", "n_routed_experts (256)"]),
        (&[("n_routed_experts", json!(5))], &["num_experts_per_tok is 6", "n_routed_experts (5)"]),
        (&[("o_groups", json!(7))], &["num_attention_heads is 64", "7", "o_groups"]),
        (&[("o_groups", json!(128))], &["num_attention_heads is 64", "128"]),
        (&[("hidden_size", json!(4097))], &["hidden_size is 4097", "128"]),
        (&[("q_lora_rank", json!(1000))], &["q_lora_rank is 1000", "128"]),
        (&[("moe_intermediate_size", json!(2000))], &["moe_intermediate_size is 2000", "128"]),
        (&[("o_lora_rank", json!(1)), ("o_groups", json!(64))], &["o_lora_rank is 64", "128"]),
        (&[("num_hash_layers", json!(5))], &["num_hash_layers is 5", "num_hidden_layers (4)"]),
        (&[("num_hidden_layers", json!(6))], &["compress_ratios has 5 entries", "num_hidden_layers 6"]),
        (&[("num_hidden_layers", json!(2))], &["compress_ratios[2] is 4", "2 layers"]),
        (
            &[("head_dim", json!(192)), ("num_attention_heads", json!(8)), ("index_head_dim", json!(64))],
            &["head_dim is 192", "multiple of 128"],
        ),
    ];
    for (changes, parts) in cases {
        assert_error(with(changes), ConfigKind, parts);
    }
}

#[test]
fn ratios_other_than_0_4_and_128_are_refused() {
    for ratio in [1, 2, 3, 5, 64, 127] {
        let ratios = json!([0, 0, ratio, 128, 0]);
        assert_error(with(&[("compress_ratios", ratios)]), ConfigKind, &["compress_ratios[2]", &ratio.to_string()]);
    }
    for (value, shown) in [
        (json!([0, 0, 129, 128, 0]), "compress_ratios[2] is 129"),
        (json!([0, 0, -4, 128, 0]), "compress_ratios[2] is -4"),
        (json!([0, 0, 4.0, 128, 0]), "compress_ratios[2] is 4.0"),
        (json!([0, 0, null, 128, 0]), "compress_ratios[2] is null"),
        (json!([0, 0, [4], 128, 0]), "compress_ratios[2] is [4]"),
        (json!("0,0,4,128"), "compress_ratios is"),
        (json!({}), "compress_ratios is an object"),
        (json!([]), "compress_ratios has 0 entries"),
    ] {
        assert_error(with(&[("compress_ratios", value)]), ConfigKind, &[shown]);
    }
}

#[test]
fn variants_that_would_be_computed_wrongly_are_refused() {
    for (key, only) in CONSTANTS {
        let only: Value = serde_json::from_str(only).expect("the table has JSON");
        with(&[(key, only)]).unwrap_or_else(|e| panic!("{e}"));
        let others = [
            json!("softmax"),
            json!("linear"),
            json!(0),
            json!(2),
            json!(8),
            json!([64, 64]),
            json!([128]),
            json!([128, 128, 128]),
            json!({}),
            if key == "norm_topk_prob" { json!(false) } else { json!(true) },
        ];
        for value in others {
            assert_error(with(&[(key, value)]), ConfigKind, &[key]);
        }
    }
    for value in [json!("int4"), json!("FP4"), json!(4), json!(true)] {
        assert_error(with(&[("expert_dtype", value.clone())]), ConfigKind, &["expert_dtype", &value.to_string()]);
    }
    for key in ["rope_scaling", "quantization_config"] {
        for value in [json!(null), json!([]), json!("yarn"), json!(false)] {
            assert_error(with(&[(key, value)]), ConfigKind, &[key]);
        }
    }
}

#[test]
fn every_required_key_is_missed_by_name() {
    let optional = [
        "architectures",
        "attention_bias",
        "attention_dropout",
        "expert_dtype",
        "initializer_range",
        "num_nextn_predict_layers",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    ];
    let config = good();
    let mut keys: Vec<String> = Vec::new();
    for (key, value) in config.as_object().expect("an object") {
        keys.push(key.clone());
        keys.extend(value.as_object().into_iter().flatten().map(|(inner, _)| format!("{key}.{inner}")));
    }
    assert!(keys.len() > 45);
    for key in &keys {
        if optional.contains(&key.as_str()) {
            without(key).unwrap_or_else(|e| panic!("{key}: {e}"));
        } else {
            assert_error(without(key), ConfigKind, &[&format!("{key} is missing")]);
        }
    }
    assert_eq!(without("expert_dtype").unwrap().expert_dtype, None);
    assert_eq!(with(&[("expert_dtype", json!(null))]).unwrap().expert_dtype, None);
}

#[test]
fn unknown_keys_are_ignored_whatever_they_hold() {
    // pitfall A14
    let mut config = good();
    for i in 0..50 {
        let value = [json!(null), json!({"deep": [null, {"er": null}]}), json!(-1e300), json!("𝄞"), json!([[]])];
        config[format!("unknown_{i}")] = value[i % 5].clone();
        config["rope_scaling"][format!("unknown_{i}")] = json!(null);
        config["quantization_config"][format!("unknown_{i}")] = json!([null]);
    }
    assert_eq!(Config::from_json(&config.to_string()).unwrap(), with(&[]).unwrap());
}

#[test]
fn unknown_keys_are_logged_once_by_name() {
    let log = log::collect(|| {
        with(&[("surprising_key", json!(1)), ("rope_scaling.mscale", json!(1))]).unwrap();
    });
    assert!(log.contains("surprising_key") && log.contains("mscale"), "{log}");
    assert!(!log.contains("use_cache") && !log.contains("hidden_size"), "{log}");
    assert_eq!(log::collect(|| drop(with(&[]).unwrap())), "");
}

#[test]
fn key_given_twice_is_refused() {
    // pitfall A14: which of the two counts differs from reader to reader
    let text = good().to_string();
    let twice = text.replacen('{', r#"{"hidden_size": 128,"#, 1);
    assert_error(Config::from_json(&twice), ConfigKind, &["hidden_size", "twice"]);
    let nested = text.replace(r#""factor":16"#, r#""factor":16,"factor":32"#);
    assert_ne!(nested, text);
    assert_error(Config::from_json(&nested), ConfigKind, &["rope_scaling", "factor", "twice"]);
}

#[test]
fn text_that_is_no_object_is_refused() {
    for text in ["", "null", "[]", "7", "\"deepseek_v4\"", "{", "{}}", "{\"model_type\":}", "\u{feff}{}"] {
        assert_error(Config::from_json(text), ConfigKind, &["JSON"]);
    }
    let deep = format!("{{\"a\":{}", "[".repeat(200_000));
    assert_error(Config::from_json(&deep), ConfigKind, &["JSON"]);
    assert_error(Config::from_json("{}"), ConfigKind, &["model_type is missing"]);
}

#[test]
fn file_errors_name_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.json");
    assert_error(Config::from_file(&path), NotFound, &[path.to_str().unwrap()]);
    std::fs::write(&path, b"{\"model_type\": \"\xFF\"}").unwrap();
    assert_error(Config::from_file(&path), ConfigKind, &[path.to_str().unwrap(), "UTF-8"]);
    std::fs::write(&path, good().to_string().replace("4096", "0")).unwrap();
    assert_error(Config::from_file(&path), ConfigKind, &[path.to_str().unwrap(), "hidden_size is 0"]);
    assert_error(Config::from_file(dir.path()), ErrorKind::Io, &["not a regular file"]);
}

#[test]
fn dspark_keys_come_together_and_in_range() {
    let dspark = || {
        let mut config = good();
        config["compress_ratios"] = json!([0, 0, 4, 128, 0, 0, 0]);
        config["dspark_block_size"] = json!(5);
        config["dspark_markov_rank"] = json!(256);
        config["dspark_noise_token_id"] = json!(128_799);
        config["dspark_target_layer_ids"] = json!([1, 2, 3]);
        config
    };
    let expected = Draft::Dspark {
        stages: 3,
        block_size: 5,
        markov_rank: 256,
        noise_token_id: 128_799,
        target_layer_ids: vec![1, 2, 3],
    };
    assert_eq!(Config::from_json(&dspark().to_string()).unwrap().draft, expected);
    for key in ["dspark_block_size", "dspark_markov_rank", "dspark_noise_token_id", "dspark_target_layer_ids"] {
        let mut config = dspark();
        config.as_object_mut().unwrap().shift_remove(key);
        assert_error(Config::from_json(&config.to_string()), ConfigKind, &[key, "missing"]);
    }
    for (key, value) in [
        ("dspark_block_size", json!(0)),
        ("dspark_block_size", json!(1 << 20)),
        ("dspark_markov_rank", json!(0)),
        ("dspark_noise_token_id", json!(129_280)),
        ("dspark_target_layer_ids", json!([])),
        ("dspark_target_layer_ids", json!([1, 2, 4])),
        ("dspark_target_layer_ids", json!([1, 1, 2])),
        ("dspark_target_layer_ids", json!(3)),
    ] {
        let mut config = dspark();
        config[key] = value;
        assert_error(Config::from_json(&config.to_string()), ConfigKind, &[key]);
    }
}

#[test]
fn model_of_other_dimensions_is_read() {
    let config = with(&[
        ("hidden_size", json!(128)),
        ("num_attention_heads", json!(3)),
        ("o_groups", json!(3)),
        ("head_dim", json!(128)),
        ("sliding_window", json!(7)),
        ("index_head_dim", json!(64)),
        ("n_routed_experts", json!(6)),
        ("num_hash_layers", json!(0)),
        ("compress_ratios", json!([128, 4, 4, 0])),
        ("num_nextn_predict_layers", json!(0)),
    ])
    .unwrap();
    assert_eq!((config.sliding_window, config.draft), (7, Draft::None));
}

/// Collects what the library logs.
mod log {
    use std::fmt::Write;
    use std::sync::{Arc, Mutex};

    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    /// All events during `work`, one a line.
    pub(super) fn collect(work: impl FnOnce()) -> String {
        let text = Arc::new(Mutex::new(String::new()));
        tracing::subscriber::with_default(Collector(Arc::clone(&text)), work);
        let text = text.lock().expect("no test panics while logging");
        text.clone()
    }

    struct Collector(Arc<Mutex<String>>);

    impl Subscriber for Collector {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, event: &Event<'_>) {
            let mut text = self.0.lock().expect("no test panics while logging");
            event.record(&mut Line(&mut text));
            text.push('\n');
        }
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    struct Line<'a>(&'a mut String);

    impl Visit for Line<'_> {
        fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
            let _ = write!(self.0, "{}={value:?} ", field.name());
        }
    }
}
