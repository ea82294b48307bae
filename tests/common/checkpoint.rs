//! Writes random, well-conditioned checkpoints in the official format, byte for byte those of the oracle's
//! `make_checkpoint.py`: the goldens keep no weights, only the sha256 of the files that this module makes again.
//!
//! A checkpoint follows from a [`Recipe`]: preset, seed and overrides of config.json. Gains are chosen so that the
//! swiglu clamp, the attention sinks, the router and the index selection all matter.
#![forbid(unsafe_code)]

use super::draw::{Stream, Z8, Z16, bf16_code, e2m1_code, e4m3_code};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// What a checkpoint is made from.
#[derive(Clone, Debug)]
pub struct Recipe {
    pub preset: String,
    pub seed: u64,
    /// Keys of config.json that differ from the preset.
    pub set: Map<String, Value>,
}

const OFFICIAL: &str = r#"{"architectures":["DeepseekV4ForCausalLM"],"attention_bias":false,"attention_dropout":0.0,
"bos_token_id":0,"eos_token_id":1,"expert_dtype":"fp4","hc_eps":1e-6,"hc_mult":4,"hc_sinkhorn_iters":20,"head_dim":512,
"hidden_act":"silu","hidden_size":4096,"index_head_dim":128,"index_n_heads":64,"index_topk":512,
"initializer_range":0.02,"max_position_embeddings":1048576,"model_type":"deepseek_v4","moe_intermediate_size":2048,
"n_routed_experts":256,"n_shared_experts":1,"norm_topk_prob":true,"num_attention_heads":64,"num_experts_per_tok":6,
"num_hidden_layers":43,"num_hash_layers":3,"num_key_value_heads":1,"num_nextn_predict_layers":1,"o_groups":8,
"o_lora_rank":1024,"q_lora_rank":1024,"qk_rope_head_dim":64,"quantization_config":{"activation_scheme":"dynamic",
"fmt":"e4m3","quant_method":"fp8","scale_fmt":"ue8m0","weight_block_size":[128,128]},"rms_norm_eps":1e-6,
"rope_scaling":{"beta_fast":32,"beta_slow":1,"factor":16,"original_max_position_embeddings":65536,"type":"yarn"},
"rope_theta":10000,"routed_scaling_factor":1.5,"scoring_func":"sqrtsoftplus","sliding_window":128,"swiglu_limit":10.0,
"tie_word_embeddings":false,"topk_method":"noaux_tc","torch_dtype":"bfloat16","transformers_version":"4.57.1",
"use_cache":true,"vocab_size":129280,"compress_rope_theta":160000}"#;

const SMALL: &str = r#"{"hidden_size":128,"num_attention_heads":8,"o_groups":2,"q_lora_rank":128,"o_lora_rank":128,
"moe_intermediate_size":128,"n_routed_experts":4,"num_experts_per_tok":2,"num_hash_layers":1,"index_n_heads":16,
"index_topk":16,"vocab_size":384}"#;

/// What each preset changes in `SMALL`, in the order of the original (the order shows in config.json).
const PRESETS: [(&str, &str); 4] = [
    (
        "flash-mini",
        r#"{"hidden_size":256,"num_attention_heads":16,"o_groups":4,"n_routed_experts":8,"num_experts_per_tok":3,
        "num_hash_layers":3,"compress_ratios":[0,0,4,128,4,0]}"#,
    ),
    (
        "pro-mini",
        r#"{"n_routed_experts":8,"num_experts_per_tok":6,"num_hash_layers":3,"index_topk":32,
        "routed_scaling_factor":2.5,"compress_ratios":[128,128,4,128,4,0]}"#,
    ),
    (
        "dspark-mini",
        r#"{"compress_ratios":[0,0,4,0,0,0],"dspark_block_size":5,"dspark_markov_rank":64,
        "dspark_noise_token_id":300,"dspark_target_layer_ids":[0,1,2]}"#,
    ),
    ("base-mini", r#"{"expert_dtype":"fp8","compress_ratios":[0,4,0]}"#),
];

/// config.json of a recipe.
pub fn config(recipe: &Recipe) -> Map<String, Value> {
    let parse = |text: &str| serde_json::from_str::<Map<String, Value>>(text).expect("the presets are JSON objects");
    let preset = PRESETS.iter().find(|(name, _)| *name == recipe.preset).expect("a known preset").1;
    let mut config = parse(OFFICIAL);
    for (key, value) in [parse(SMALL), parse(preset), recipe.set.clone()].into_iter().flatten() {
        config.insert(key, value);
    }
    let blocks = config["compress_ratios"].as_array().expect("a list").len();
    config.insert("num_hidden_layers".into(), (blocks - stages(&config)).into());
    config
}

/// Draft blocks: three DSpark stages or one MTP block.
fn stages(config: &Map<String, Value>) -> usize {
    if config.contains_key("dspark_block_size") { 3 } else { 1 }
}

/// The checkpoint of `recipe` under the build folder, made on first use, its files checked against `sha256`
/// (file name to hex digest).
pub fn cached(name: &str, recipe: &Recipe, sha256: &BTreeMap<String, String>) -> PathBuf {
    let family = Sha256::digest(format!("{recipe:?} {sha256:?}"));
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("checkpoints");
    let home = root.join(format!("{name}-{}", hex(&family[..6])));
    if home.is_dir() {
        return home;
    }
    fs::create_dir_all(&root).expect("the build folder is writable");
    let draft = tempfile::tempdir_in(&root).expect("the build folder is writable");
    write(recipe, draft.path());
    for (file, want) in sha256 {
        let bytes = fs::read(draft.path().join(file)).unwrap_or_else(|e| panic!("{name}: {file}: {e}"));
        assert_eq!(&hex(&Sha256::digest(bytes)), want, "{name}: {file} differs from the golden's checkpoint");
    }
    // Test processes may race to make the same checkpoint: whoever renames first wins, the others' drafts go away.
    if let Err(error) = fs::rename(draft.path(), &home) {
        assert!(home.is_dir(), "{}: {error}", home.display());
    }
    home
}

/// Hex digest of a file.
pub fn sha256(path: &Path) -> String {
    hex(&Sha256::digest(fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Writes the checkpoint of `recipe` into the existing folder `dir`.
pub fn write(recipe: &Recipe, dir: &Path) {
    let config = config(recipe);
    let mut builder = Builder::new(&config, recipe.seed);
    builder.model();
    let count = builder.shards.len();
    let mut places = BTreeMap::new();
    let mut total = 0;
    for (i, shard) in builder.shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{count:05}.safetensors", i + 1);
        fs::write(dir.join(&name), shard_bytes(shard)).expect("shard written");
        for tensor in shard {
            total += tensor.bytes.len();
            places.insert(tensor.name.clone(), name.clone());
        }
    }
    let vocabulary = builder.size("vocab_size");
    let index = json!({"metadata": {"total_size": total}, "weight_map": places});
    fs::write(dir.join("model.safetensors.index.json"), index.to_string()).expect("index written");
    let pretty = serde_json::to_string_pretty(&config).expect("a JSON object").replace("1e-6", "1e-06");
    fs::write(dir.join("config.json"), pretty).expect("config written");
    let generation = json!({"_from_model_config": true, "bos_token_id": 0, "eos_token_id": 1, "do_sample": true,
        "temperature": 1.0, "top_p": 1.0, "transformers_version": "4.57.1"});
    let pretty = serde_json::to_string_pretty(&generation).expect("a JSON object");
    fs::write(dir.join("generation_config.json"), pretty).expect("generation config written");
    if (300..=512).contains(&vocabulary) {
        fs::write(dir.join("tokenizer.json"), tokenizer(vocabulary).to_string()).expect("tokenizer written");
    }
}

fn shard_bytes(shard: &[Tensor]) -> Vec<u8> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut end = 0;
    for t in shard {
        let start = end;
        end += t.bytes.len();
        header.insert(t.name.clone(), json!({"dtype": t.dtype, "shape": t.shape, "data_offsets": [start, end]}));
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header);
    shard.iter().for_each(|t| out.extend(&t.bytes));
    out
}

struct Tensor {
    name: String,
    dtype: &'static str,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

struct Builder<'a> {
    config: &'a Map<String, Value>,
    seed: u64,
    float_scales: bool,
    shards: Vec<Vec<Tensor>>,
}

impl<'a> Builder<'a> {
    fn new(config: &'a Map<String, Value>, seed: u64) -> Self {
        Self { config, seed, float_scales: config["expert_dtype"] == "fp8", shards: Vec::new() }
    }

    fn size(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap_or_else(|| panic!("{key} is a count")) as usize
    }

    fn model(&mut self) {
        let [hidden, vocabulary, layers, streams] =
            ["hidden_size", "vocab_size", "num_hidden_layers", "hc_mult"].map(|key| self.size(key));
        let hashed = self.size("num_hash_layers");
        self.shards.push(Vec::new());
        self.bf16("embed.weight", &[vocabulary, hidden], 1.0, 0.0);
        for l in 0..layers {
            self.shards.push(Vec::new());
            let ratio = self.config["compress_ratios"][l].as_u64().expect("a ratio");
            self.block(&format!("layers.{l}."), ratio as usize, l < hashed);
        }
        self.shards.push(Vec::new());
        self.norm("norm", hidden, 1.0);
        self.bf16("head.weight", &[vocabulary, hidden], 2.0 / (hidden as f64).sqrt(), 0.0);
        self.hyper("hc_head_", streams);
        self.shards.push(Vec::new());
        let stages = stages(self.config);
        for s in 0..stages {
            self.block(&format!("mtp.{s}."), 0, false);
        }
        let last = format!("mtp.{}.", stages - 1);
        self.norm(&format!("{last}norm"), hidden, 1.0);
        self.hyper(&format!("{last}hc_head_"), streams);
        if stages == 1 {
            for w in ["e_proj", "h_proj"] {
                self.fp8(&format!("mtp.0.{w}"), hidden, hidden, 0.7);
            }
            for w in ["enorm", "hnorm"] {
                self.norm(&format!("mtp.0.{w}"), hidden, 1.0);
            }
            return;
        }
        let rank = self.size("dspark_markov_rank");
        let taps = self.config["dspark_target_layer_ids"].as_array().expect("a list").len();
        self.fp8("mtp.0.main_proj", hidden, hidden * taps, 1.0);
        self.norm("mtp.0.main_norm", hidden, 1.0);
        self.bf16(&format!("{last}markov_head.markov_w1.weight"), &[vocabulary, rank], 1.0, 0.0);
        self.bf16(&format!("{last}markov_head.markov_w2.weight"), &[vocabulary, rank], 1.0 / (rank as f64).sqrt(), 0.0);
        let wide = hidden + rank;
        self.bf16(&format!("{last}confidence_head.proj.weight"), &[1, wide], 1.0 / (wide as f64).sqrt(), 0.0);
    }

    fn block(&mut self, p: &str, ratio: usize, hashed: bool) {
        let [hidden, heads, head, q_rank, groups, o_rank, streams] =
            ["hidden_size", "num_attention_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "hc_mult"]
                .map(|key| self.size(key));
        let a = format!("{p}attn.");
        self.norm(&format!("{p}attn_norm"), hidden, 1.0);
        self.norm(&format!("{p}ffn_norm"), hidden, 1.0);
        for half in ["attn", "ffn"] {
            self.hyper(&format!("{p}hc_{half}_"), streams * (2 + streams));
        }
        self.f32(&format!("{a}attn_sink"), &[heads], 1.5, 3.0);
        self.fp8(&format!("{a}wq_a"), q_rank, hidden, 1.0);
        self.norm(&format!("{a}q_norm"), q_rank, 1.0);
        self.fp8(&format!("{a}wq_b"), heads * head, q_rank, 1.0);
        self.fp8(&format!("{a}wkv"), head, hidden, 1.0);
        self.norm(&format!("{a}kv_norm"), head, 1.3);
        self.fp8(&format!("{a}wo_a"), groups * o_rank, heads * head / groups, 1.2);
        self.fp8(&format!("{a}wo_b"), hidden, groups * o_rank, 1.0);
        if ratio > 0 {
            self.compressor(&format!("{a}compressor."), ratio, head, 1.3);
        }
        if ratio == 4 {
            let [index_heads, index_head] = ["index_n_heads", "index_head_dim"].map(|key| self.size(key));
            self.fp8(&format!("{a}indexer.wq_b"), index_heads * index_head, q_rank, 1.0);
            let std = 1.5 / (hidden as f64).sqrt();
            self.bf16(&format!("{a}indexer.weights_proj.weight"), &[index_heads, hidden], std, 0.0);
            self.compressor(&format!("{a}indexer.compressor."), 4, index_head, 1.0);
        }
        self.experts(&format!("{p}ffn."), hashed);
    }

    fn experts(&mut self, f: &str, hashed: bool) {
        let [hidden, inner, experts] =
            ["hidden_size", "moe_intermediate_size", "n_routed_experts"].map(|key| self.size(key));
        self.bf16(&format!("{f}gate.weight"), &[experts, hidden], 1.5 / (hidden as f64).sqrt(), 0.0);
        if hashed {
            self.hash_table(&format!("{f}gate.tid2eid"), experts);
        } else {
            self.f32(&format!("{f}gate.bias"), &[experts], 0.3, 0.0);
        }
        // the gains of w1 and w3 make the swiglu clamp bite sometimes
        let parts = |down: f64| [("w1", inner, hidden, 4.0), ("w2", hidden, inner, down), ("w3", inner, hidden, 4.0)];
        for e in 0..experts {
            for (w, rows, columns, gain) in parts(0.04) {
                let name = format!("{f}experts.{e}.{w}");
                if self.float_scales {
                    self.fp8(&name, rows, columns, gain);
                } else {
                    self.fp4(&name, rows, columns, gain);
                }
            }
        }
        for (w, rows, columns, gain) in parts(0.02) {
            self.fp8(&format!("{f}shared_experts.{w}"), rows, columns, gain);
        }
    }

    fn compressor(&mut self, p: &str, ratio: usize, dim: usize, mean: f64) {
        let hidden = self.size("hidden_size");
        let wide = if ratio == 4 { 2 * dim } else { dim };
        self.f32(&format!("{p}ape"), &[ratio, wide], 1.0, 0.0);
        for w in ["wkv", "wgate"] {
            self.bf16(&format!("{p}{w}.weight"), &[wide, hidden], 1.0 / (hidden as f64).sqrt(), 0.0);
        }
        self.norm(&format!("{p}norm"), dim, mean);
    }

    fn hyper(&mut self, prefix: &str, rows: usize) {
        let streams = self.size("hc_mult");
        let wide = streams * self.size("hidden_size");
        self.f32(&format!("{prefix}fn"), &[rows, wide], 1.0 / (wide as f64).sqrt(), 0.0);
        self.f32(&format!("{prefix}base"), &[rows], 0.6, 0.0);
        self.f32(&format!("{prefix}scale"), &[if rows == streams { 1 } else { 3 }], 0.2, 0.8);
    }

    fn norm(&mut self, name: &str, dim: usize, mean: f64) {
        self.bf16(&format!("{name}.weight"), &[dim], 0.2 * mean, mean);
    }

    fn bf16(&mut self, name: &str, shape: &[usize], std: f64, mean: f64) {
        let table: Vec<u16> = Z16.iter().map(|z| bf16_code(mean + std * z)).collect();
        self.add(name, "BF16", shape, |draw, out| out.extend(table[draw].to_le_bytes()));
    }

    fn f32(&mut self, name: &str, shape: &[usize], std: f64, mean: f64) {
        self.add(name, "F32", shape, |draw, out| out.extend(((mean + std * Z16[draw]) as f32).to_le_bytes()));
    }

    fn fp8(&mut self, name: &str, rows: usize, columns: usize, gain: f64) {
        let (std, exponent) = split(gain / (columns as f64).sqrt() / SPREAD, 52.0);
        let table: Vec<u8> = Z16.iter().map(|z| e4m3_code(std * z)).collect();
        self.add(&format!("{name}.weight"), "F8_E4M3", &[rows, columns], |draw, out| out.push(table[draw]));
        self.scales(name, &[rows.div_ceil(128), columns.div_ceil(128)], exponent);
    }

    fn fp4(&mut self, name: &str, rows: usize, columns: usize, gain: f64) {
        let (std, exponent) = split(gain / (columns as f64).sqrt() / SPREAD, 1.4);
        let nibbles: Vec<u8> = Z8.iter().map(|z| e2m1_code(std * z)).collect();
        self.add(&format!("{name}.weight"), "I8", &[rows, columns / 2], |draw, out| {
            out.push(nibbles[draw & 255] | nibbles[draw >> 8] << 4);
        });
        self.scales(name, &[rows, columns / 32], exponent);
    }

    /// Block scales: powers of two that vary by one either way, or arbitrary float32 factors (the Base releases).
    fn scales(&mut self, name: &str, shape: &[usize], exponent: i32) {
        const JITTER: [i32; 4] = [0, 0, 1, -1];
        let name = format!("{name}.scale");
        if self.float_scales {
            let step = 2.0 / 65_535.0;
            self.add(&name, "F32", shape, |draw, out| {
                let power = if draw == 65_535 { 1.0 } else { draw as f64 * step - 1.0 };
                out.extend(((2.0_f64.powi(exponent) * power.exp2()) as f32).to_le_bytes());
            });
        } else {
            self.add(&name, "F8_E8M0", shape, |draw, out| out.push((JITTER[draw & 3] + exponent + 127) as u8));
        }
    }

    /// Distinct experts per token id: the order of `experts` random values, ties to the lower number.
    fn hash_table(&mut self, name: &str, experts: usize) {
        let [rows, chosen] = ["vocab_size", "num_experts_per_tok"].map(|key| self.size(key));
        let mut bytes = Vec::with_capacity(rows * chosen * 8);
        for row in Stream::new(self.seed, name).draw(rows * experts).chunks(experts) {
            let mut order: Vec<usize> = (0..experts).collect();
            order.sort_by_key(|&e| row[e]);
            order[..chosen].iter().for_each(|&e| bytes.extend((e as i64).to_le_bytes()));
        }
        self.push(Tensor { name: name.into(), dtype: "I64", shape: vec![rows, chosen], bytes });
    }

    fn add(&mut self, name: &str, dtype: &'static str, shape: &[usize], mut encode: impl FnMut(usize, &mut Vec<u8>)) {
        let count = shape.iter().product();
        // the original draws larger tensors in pieces of this size, which changes the stream
        assert!(count <= 1 << 23, "{name}: {count} elements are more than one piece");
        let mut bytes = Vec::new();
        for value in Stream::new(self.seed, name).draw(count) {
            encode(usize::from(value), &mut bytes);
        }
        self.push(Tensor { name: name.into(), dtype, shape: shape.to_vec(), bytes });
    }

    fn push(&mut self, tensor: Tensor) {
        self.shards.last_mut().expect("a shard is begun before its tensors").push(tensor);
    }
}

/// Root mean square of 2^jitter over the four jitters of a block scale.
const SPREAD: f64 = 1.25;

/// `sigma` as `c * 2^e` with c in [low, 2 low).
fn split(sigma: f64, low: f64) -> (f64, i32) {
    let exponent = (sigma / low).log2().floor() as i32;
    (sigma / 2.0_f64.powi(exponent), exponent)
}

/// A byte-level tokenizer without merges: ids 0-2 BOS, EOS and PAD, 3-258 the bytes, then the chat markers.
fn tokenizer(vocabulary: usize) -> Value {
    let special = ["begin▁of▁sentence", "end▁of▁sentence", "▁pad▁"].map(|name| format!("<｜{name}｜>"));
    let marks = ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>"];
    let fillers = (0..vocabulary - 259 - marks.len()).map(|i| format!("<｜place▁holder▁no▁{i}｜>"));
    let marks: Vec<String> = marks.into_iter().map(String::from).chain(fillers).collect();
    let printable = |b: u32| matches!(b, 33..=126 | 161..=172 | 174..=255);
    let mut spare = 256..;
    let bytes = (0..256_u32).map(|b| {
        let code = if printable(b) { b } else { spare.next().expect("an open range") };
        char::from_u32(code).expect("a code below 512").to_string()
    });
    let table: Map<String, Value> =
        special.iter().cloned().chain(bytes).enumerate().map(|(i, token)| (token, i.into())).collect();
    let entry = |id: usize, content: &String, special: bool| {
        json!({"id": id, "content": content, "special": special, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false})
    };
    let added = special.iter().enumerate().map(|(i, t)| entry(i, t, true));
    let added: Vec<Value> = added.chain(marks.iter().enumerate().map(|(i, t)| entry(259 + i, t, false))).collect();
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": bytes, "post_processor": null, "decoder": bytes,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": table, "merges": []}})
}
