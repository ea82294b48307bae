//! A complete checkpoint of about one megabyte in the official format, easy to spoil.
//!
//! The list of tensors is written out here from the official checkpoints, not taken from the library.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::safetensors_writer::{self, Entry};

/// Name, dtype, shape, bytes.
pub(crate) type Owned = (String, &'static str, Vec<usize>, Vec<u8>);

/// Configuration and tensors of three layers (window, c4a, c128a; the first hash-routed) and one MTP block.
pub(crate) struct Tiny {
    pub(crate) config: Value,
    pub(crate) tensors: Vec<Owned>,
}

pub(crate) const HIDDEN: usize = 128;
pub(crate) const VOCAB: usize = 8;
const EXPERTS: usize = 2;

impl Tiny {
    pub(crate) fn new() -> Self {
        let mut tiny = Self { config: config(), tensors: Vec::new() };
        for name in ["embed.weight", "head.weight"] {
            tiny.add(name, "BF16", &[VOCAB, HIDDEN]);
        }
        tiny.add("norm.weight", "BF16", &[HIDDEN]);
        tiny.hyper("hc_head", 4, 1);
        for (layer, ratio) in [0, 4, 128].into_iter().enumerate() {
            tiny.block(&format!("layers.{layer}."), ratio, layer == 0);
        }
        tiny.block("mtp.0.", 0, false);
        for name in ["e_proj", "h_proj"] {
            tiny.fp8(&format!("mtp.0.{name}"), HIDDEN, HIDDEN);
        }
        for name in ["enorm", "hnorm", "norm"] {
            tiny.add(&format!("mtp.0.{name}.weight"), "BF16", &[HIDDEN]);
        }
        tiny.hyper("mtp.0.hc_head", 4, 1);
        tiny
    }

    /// The tensor called `name`.
    pub(crate) fn get(&mut self, name: &str) -> &mut Owned {
        self.tensors.iter_mut().find(|t| t.0 == name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    /// Adds a tensor of ones (bytes).
    pub(crate) fn add(&mut self, name: &str, dtype: &'static str, shape: &[usize]) {
        let bytes = vec![1; shape.iter().product::<usize>() * size(dtype)];
        self.tensors.push((name.to_owned(), dtype, shape.to_vec(), bytes));
    }

    /// `config.json` and one `model.safetensors`.
    pub(crate) fn write_single(&self, dir: &Path) {
        fs::create_dir_all(dir).expect("the test folder is writable");
        let entries: Vec<_> = self.tensors.iter().map(entry).collect();
        safetensors_writer::write(&dir.join("model.safetensors"), &entries);
        self.write_config(dir);
    }

    /// `config.json`, three shards and the index. Shard of a tensor: trunk without layers, layers, draft.
    pub(crate) fn write_sharded(&self, dir: &Path) {
        fs::create_dir_all(dir).expect("the test folder is writable");
        let shard = |name: &str| match name.split('.').next() {
            Some("layers") => 1,
            Some("mtp") => 2,
            _ => 0,
        };
        let mut map = Map::new();
        for i in 0..3 {
            let file = shard_name(i);
            let entries: Vec<_> = self.tensors.iter().filter(|t| shard(&t.0) == i).map(entry).collect();
            safetensors_writer::write(&dir.join(&file), &entries);
            map.extend(entries.iter().map(|t| (t.0.to_owned(), json!(file))));
        }
        let total: usize = self.tensors.iter().map(|t| t.3.len()).sum();
        write_index(dir, &json!({"metadata": {"total_size": total}, "weight_map": map}));
        self.write_config(dir);
    }

    pub(crate) fn write_config(&self, dir: &Path) {
        fs::write(dir.join("config.json"), self.config.to_string()).expect("the test folder is writable");
    }

    pub(crate) fn fp8(&mut self, name: &str, rows: usize, cols: usize) {
        self.add(&format!("{name}.weight"), "F8_E4M3", &[rows, cols]);
        self.add(&format!("{name}.scale"), "F8_E8M0", &[rows.div_ceil(128), cols.div_ceil(128)]);
    }

    fn fp4(&mut self, name: &str, rows: usize, cols: usize) {
        self.add(&format!("{name}.weight"), "I8", &[rows, cols / 2]);
        self.add(&format!("{name}.scale"), "F8_E8M0", &[rows, cols / 32]);
    }

    pub(crate) fn hyper(&mut self, name: &str, rows: usize, scales: usize) {
        self.add(&format!("{name}_fn"), "F32", &[rows, 4 * HIDDEN]);
        self.add(&format!("{name}_base"), "F32", &[rows]);
        self.add(&format!("{name}_scale"), "F32", &[scales]);
    }

    fn compressor(&mut self, prefix: &str, ratio: usize, entry: usize) {
        let width = if ratio == 4 { 2 * entry } else { entry };
        self.add(&format!("{prefix}ape"), "F32", &[ratio, width]);
        self.add(&format!("{prefix}wkv.weight"), "BF16", &[width, HIDDEN]);
        self.add(&format!("{prefix}wgate.weight"), "BF16", &[width, HIDDEN]);
        self.add(&format!("{prefix}norm.weight"), "BF16", &[entry]);
    }

    pub(crate) fn block(&mut self, p: &str, ratio: usize, hashed: bool) {
        for (name, len) in [("attn_norm", HIDDEN), ("ffn_norm", HIDDEN), ("attn.q_norm", 128), ("attn.kv_norm", 128)] {
            self.add(&format!("{p}{name}.weight"), "BF16", &[len]);
        }
        self.hyper(&format!("{p}hc_attn"), 24, 3);
        self.hyper(&format!("{p}hc_ffn"), 24, 3);
        self.add(&format!("{p}attn.attn_sink"), "F32", &[2]);
        for (name, rows, cols) in
            [("wq_a", 128, HIDDEN), ("wq_b", 256, 128), ("wkv", 128, HIDDEN), ("wo_a", 128, 256), ("wo_b", HIDDEN, 128)]
        {
            self.fp8(&format!("{p}attn.{name}"), rows, cols);
        }
        if ratio != 0 {
            self.compressor(&format!("{p}attn.compressor."), ratio, 128);
        }
        if ratio == 4 {
            self.fp8(&format!("{p}attn.indexer.wq_b"), 2 * 64, 128);
            self.add(&format!("{p}attn.indexer.weights_proj.weight"), "BF16", &[2, HIDDEN]);
            self.compressor(&format!("{p}attn.indexer.compressor."), 4, 64);
        }
        self.add(&format!("{p}ffn.gate.weight"), "BF16", &[EXPERTS, HIDDEN]);
        if hashed {
            self.add(&format!("{p}ffn.gate.tid2eid"), "I64", &[VOCAB, 1]);
            let table = self.get(&format!("{p}ffn.gate.tid2eid"));
            table.3 = (0..VOCAB as i64).flat_map(|token| (token % EXPERTS as i64).to_le_bytes()).collect();
        } else {
            self.add(&format!("{p}ffn.gate.bias"), "F32", &[EXPERTS]);
        }
        for w in ["w1", "w2", "w3"] {
            self.fp8(&format!("{p}ffn.shared_experts.{w}"), 128, 128);
            for e in 0..EXPERTS {
                self.fp4(&format!("{p}ffn.experts.{e}.{w}"), 128, 128);
            }
        }
    }
}

/// File name of shard `i` of [`Tiny::write_sharded`].
pub(crate) fn shard_name(i: usize) -> String {
    format!("model-{:05}-of-00003.safetensors", i + 1)
}

/// Writes `index` as the index of `dir`.
pub(crate) fn write_index(dir: &Path, index: &Value) {
    fs::write(dir.join("model.safetensors.index.json"), index.to_string()).expect("the test folder is writable");
}

fn entry(tensor: &Owned) -> Entry<'_> {
    (&tensor.0, tensor.1, &tensor.2, &tensor.3)
}

/// Bytes of one element.
pub(crate) fn size(dtype: &str) -> usize {
    match dtype {
        "BF16" => 2,
        "F32" => 4,
        "I64" => 8,
        _ => 1,
    }
}

/// The configuration of [`Tiny::new`]: every key of the official files.
pub(crate) fn config() -> Value {
    let text = r#"{
        "architectures": ["DeepseekV4ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 0, "eos_token_id": 1, "expert_dtype": "fp4", "hc_eps": 1e-6, "hc_mult": 4,
        "hc_sinkhorn_iters": 20, "head_dim": 128, "hidden_act": "silu", "hidden_size": 128, "index_head_dim": 64,
        "index_n_heads": 2, "index_topk": 8, "initializer_range": 0.02, "max_position_embeddings": 4096,
        "model_type": "deepseek_v4", "moe_intermediate_size": 128, "n_routed_experts": 2, "n_shared_experts": 1,
        "norm_topk_prob": true, "num_attention_heads": 2, "num_experts_per_tok": 1, "num_hidden_layers": 3,
        "num_hash_layers": 1, "num_key_value_heads": 1, "num_nextn_predict_layers": 1, "o_groups": 1,
        "o_lora_rank": 128, "q_lora_rank": 128, "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128]
        },
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 256, "type": "yarn"
        },
        "rope_theta": 10000, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "sliding_window": 16,
        "swiglu_limit": 10.0, "tie_word_embeddings": false, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
        "transformers_version": "4.57.1", "use_cache": true, "vocab_size": 8, "compress_rope_theta": 160000,
        "compress_ratios": [0, 4, 128, 0]
    }"#;
    serde_json::from_str(text).expect("the text is JSON")
}
