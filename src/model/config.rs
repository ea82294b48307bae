//! `config.json`: the one source of a model's dimensions.
//!
//! Invariant: a [`Config`] that was read has dimensions that fit each other and the number formats, small enough that no
//! product of them overflows 64 bits. Every key of the official files that the arithmetic depends on is required, except
//! `expert_dtype`; keys that this library does not know are ignored and logged.

#![forbid(unsafe_code)]

mod fields;

use std::path::Path;

use self::fields::{Fields, Json, Object};
use crate::error::{Error, ErrorKind, Result, bail};
use crate::file;

/// Which keys a trunk layer attends to besides the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// The sliding window only (`compress_ratios` entry 0).
    Window,
    /// c4a: one compressed entry per 4 tokens, the best of them chosen by the indexer (entry 4).
    C4a,
    /// c128a: one compressed entry per 128 tokens, all of them (entry 128).
    C128a,
}

impl LayerKind {
    /// Tokens per compressed entry; 0 for window-only layers.
    pub const fn ratio(self) -> usize {
        match self {
            Self::Window => 0,
            Self::C4a => 4,
            Self::C128a => 128,
        }
    }
}

/// Storage of the routed experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExpertDtype {
    /// Packed E2M1 with E8M0 scales per row and 32 columns.
    Fp4,
    /// E4M3 with one scale per 128x128 tile (the `-Base` releases).
    Fp8,
}

/// YaRN parameters (`rope_scaling`), used in every layer that has compressed entries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// Context extension factor.
    pub factor: f64,
    /// Rotations above which a frequency is left alone.
    pub beta_fast: f64,
    /// Rotations below which a frequency is divided by `factor`.
    pub beta_slow: f64,
    /// Context length before extension, in tokens.
    pub original_max_position_embeddings: usize,
}

/// The draft module that follows the trunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Draft {
    /// No `mtp.*` tensors.
    None,
    /// One classic MTP block (April 2026 releases).
    Mtp,
    /// DSpark block drafter (0731 and 0813 releases).
    Dspark {
        /// Draft stages (`mtp.0` ..): the entries of `compress_ratios` behind the trunk's until
        /// [`Config::with_checkpoint`] counts the tensors. (`num_nextn_predict_layers` is stale.)
        stages: usize,
        /// Tokens drafted at once.
        block_size: usize,
        /// Rank of the Markov head.
        markov_rank: usize,
        /// Id that fills the block behind its first token.
        noise_token_id: u32,
        /// Trunk layers whose outputs feed the drafter.
        target_layer_ids: Vec<usize>,
    },
}

/// The model's dimensions and constants, validated. Field names are the keys of `config.json`.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "each field is the config.json key of the same name")]
pub struct Config {
    pub hidden_size: usize,
    pub vocab_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub head_dim: usize,
    pub qk_rope_head_dim: usize,
    pub q_lora_rank: usize,
    pub o_groups: usize,
    pub o_lora_rank: usize,
    pub sliding_window: usize,
    pub n_routed_experts: usize,
    pub num_experts_per_tok: usize,
    pub num_hash_layers: usize,
    pub moe_intermediate_size: usize,
    pub routed_scaling_factor: f32,
    /// 0 means no clamp.
    pub swiglu_limit: f32,
    pub index_n_heads: usize,
    pub index_head_dim: usize,
    pub index_topk: usize,
    pub hc_mult: usize,
    pub hc_sinkhorn_iters: usize,
    pub hc_eps: f32,
    pub rms_norm_eps: f32,
    pub rope_theta: f64,
    pub compress_rope_theta: f64,
    pub rope_scaling: Yarn,
    pub max_position_embeddings: usize,
    /// `None` if the key is absent and the tensors have not been asked ([`Config::with_checkpoint`]).
    pub expert_dtype: Option<ExpertDtype>,
    pub bos_token_id: u32,
    pub eos_token_id: u32,
    /// `compress_ratios` of the trunk layers; `num_hidden_layers` entries.
    pub layers: Vec<LayerKind>,
    /// What the config says of a draft module; [`Draft::None`] when the checkpoint has no `mtp.*` tensors.
    pub draft: Draft,
}

/// The only `model_type` that is loaded.
const MODEL_TYPE: &str = "deepseek_v4";
/// The only entry of `architectures` that is loaded.
const ARCHITECTURE: &str = "DeepseekV4ForCausalLM";

// Largest values accepted, far above any release; their products stay below 2^63.
const MAX_WIDTH: usize = 1 << 20;
const MAX_HEADS: usize = 1 << 14;
const MAX_HEAD_DIM: usize = 1 << 14;
const MAX_EXPERTS: usize = 1 << 16;
const MAX_LAYERS: usize = 1 << 14;
const MAX_VOCAB: usize = 1 << 24;
const MAX_POSITIONS: usize = (1 << 31) - 1;

/// Columns per scale of an FP8 linear, and per scale of its quantised input.
const LINEAR_BLOCK: usize = 128;
/// Values per scale in an FP8 cache entry.
const CACHE_BLOCK: usize = 64;
/// Values per scale in an FP4 index key.
const INDEX_BLOCK: usize = 32;
/// Parallel residual streams; the mHC kernels are written for this number.
const STREAMS: usize = 4;

/// Keys of the official files that do not change what is computed, or were looked at before.
const HARMLESS: &[&str] = &[
    "architectures",
    "attention_dropout",
    "initializer_range",
    "model_type",
    "torch_dtype",
    "transformers_version",
    "use_cache",
];

impl Config {
    /// Reads and validates a `config.json`.
    ///
    /// # Errors
    /// As [`Self::from_json`], with the path in front, and `NotFound` or `Io` if the file cannot be read.
    pub fn from_file(path: &Path) -> Result<Self> {
        let text = file::read(path, file::CONFIG)?;
        let text = std::str::from_utf8(&text)
            .map_err(|e| Error::new(ErrorKind::Config, format!("{}: not UTF-8: {e}", path.display())))?;
        Self::from_json(text).map_err(|e| e.context(path.display()))
    }

    /// Reads and validates the text of a `config.json`.
    ///
    /// # Errors
    /// `UnsupportedModel` for another `model_type`, naming it; `Config` for anything else, naming key and value.
    pub fn from_json(text: &str) -> Result<Self> {
        // a value of two characters becomes one of 40 bytes, in a list that grows by doubling
        crate::alloc::probe("config.json", text.len().saturating_mul(64))?;
        let json: Json =
            serde_json::from_str(text).map_err(|e| Error::new(ErrorKind::Config, format!("not valid JSON: {e}")))?;
        let Json::Object(object) = json else { bail!(Config, "not a JSON object, but {json}") };
        check_model_type(&object)?;
        let fields = Fields::new(&object, "");
        check_constants(&fields)?;
        let mut config = read_dimensions(&fields)?;
        config.read_layers(&fields)?;
        config.check_dimensions()?;
        fields.log_unknown(HARMLESS);
        Ok(config)
    }

    /// Reads `compress_ratios` and what it says of the draft module.
    fn read_layers(&mut self, fields: &Fields<'_>) -> Result<()> {
        let key = "compress_ratios";
        let ratios = fields.counts(key, 0..=LINEAR_BLOCK)?;
        if ratios.len() < self.num_hidden_layers {
            bail!(Config, "{key} has {} entries for num_hidden_layers {}", ratios.len(), self.num_hidden_layers);
        }
        for (i, &ratio) in ratios.iter().enumerate() {
            let kind = match ratio {
                0 => LayerKind::Window,
                4 => LayerKind::C4a,
                128 => LayerKind::C128a,
                other => bail!(Config, "{key}[{i}] is {other}; it must be 0, 4 or 128"),
            };
            if i < self.num_hidden_layers {
                self.layers.push(kind);
            } else if kind != LayerKind::Window {
                bail!(Config, "{key}[{i}] is {ratio}; behind the {} layers it must be 0", self.num_hidden_layers);
            }
        }
        let stages = ratios.len() - self.num_hidden_layers;
        let nextn = fields.optional_count("num_nextn_predict_layers", 0..=64)?.unwrap_or(0);
        self.draft = self.read_draft(fields, stages, nextn)?;
        Ok(())
    }

    fn read_draft(&self, fields: &Fields<'_>, stages: usize, nextn: usize) -> Result<Draft> {
        let keys = ["dspark_block_size", "dspark_markov_rank", "dspark_noise_token_id", "dspark_target_layer_ids"];
        if keys.iter().all(|key| fields.optional(key).is_none()) {
            return Ok(if stages.max(nextn) == 0 { Draft::None } else { Draft::Mtp });
        }
        let target_layer_ids = fields.counts(keys[3], 0..=self.num_hidden_layers - 1)?;
        if target_layer_ids.is_empty() || target_layer_ids.windows(2).any(|pair| pair[0] >= pair[1]) {
            bail!(Config, "{} is {target_layer_ids:?}; it must be a list of ascending layer numbers", keys[3]);
        }
        Ok(Draft::Dspark {
            stages: stages.max(1),
            block_size: fields.count(keys[0], 1..=1024)?,
            markov_rank: fields.count(keys[1], 1..=MAX_WIDTH)?,
            noise_token_id: fields.count(keys[2], 0..=self.vocab_size - 1)? as u32,
            target_layer_ids,
        })
    }

    /// Checks that the dimensions fit each other and the blocks of the number formats.
    fn check_dimensions(&self) -> Result<()> {
        let multiples = [
            ("hidden_size", self.hidden_size, LINEAR_BLOCK, "inputs of an FP8 linear"),
            ("q_lora_rank", self.q_lora_rank, LINEAR_BLOCK, "inputs of an FP8 linear"),
            ("moe_intermediate_size", self.moe_intermediate_size, LINEAR_BLOCK, "inputs of an FP8 linear"),
            ("o_groups x o_lora_rank", self.o_groups * self.o_lora_rank, LINEAR_BLOCK, "inputs of an FP8 linear"),
            ("num_attention_heads", self.num_attention_heads, self.o_groups, "o_groups"),
            ("index_head_dim", self.index_head_dim, INDEX_BLOCK, "values per scale of an index key"),
            ("qk_rope_head_dim", self.qk_rope_head_dim, 2, "rotated in pairs"),
        ];
        for (key, value, block, why) in multiples {
            if !value.is_multiple_of(block) {
                bail!(Config, "{key} is {value}; it must be a multiple of {block} ({why})");
            }
        }
        let group = self.num_attention_heads / self.o_groups * self.head_dim;
        if !group.is_multiple_of(LINEAR_BLOCK) {
            bail!(
                Config,
                "head_dim is {}: num_attention_heads / o_groups x head_dim is {group}, but must be a multiple of \
                 {LINEAR_BLOCK} (inputs of an FP8 linear)",
                self.head_dim
            );
        }
        if self.qk_rope_head_dim >= self.head_dim {
            bail!(
                Config,
                "qk_rope_head_dim is {}; it must be less than head_dim ({})",
                self.qk_rope_head_dim,
                self.head_dim
            );
        }
        let unrotated = self.head_dim - self.qk_rope_head_dim;
        if !unrotated.is_multiple_of(CACHE_BLOCK) {
            bail!(
                Config,
                "head_dim is {} and qk_rope_head_dim {}: their difference {unrotated} must be a multiple of {CACHE_BLOCK} \
                 (values per scale of a cache entry)",
                self.head_dim,
                self.qk_rope_head_dim
            );
        }
        if self.qk_rope_head_dim > self.index_head_dim {
            bail!(
                Config,
                "qk_rope_head_dim is {}; it must be at most index_head_dim ({})",
                self.qk_rope_head_dim,
                self.index_head_dim
            );
        }
        if !self.index_head_dim.is_power_of_two() {
            bail!(Config, "index_head_dim is {}; it must be a power of two (Hadamard rotation)", self.index_head_dim);
        }
        if self.num_experts_per_tok > self.n_routed_experts {
            bail!(
                Config,
                "num_experts_per_tok is {}; it must be at most n_routed_experts ({})",
                self.num_experts_per_tok,
                self.n_routed_experts
            );
        }
        if self.num_hash_layers > self.num_hidden_layers {
            bail!(
                Config,
                "num_hash_layers is {}; it must be at most num_hidden_layers ({})",
                self.num_hash_layers,
                self.num_hidden_layers
            );
        }
        Ok(())
    }
}

/// Refuses everything that is not DeepSeek-V4, by name.
fn check_model_type(object: &Object) -> Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    match object.get("model_type") {
        Some(Json::Text(name)) if name == MODEL_TYPE => {}
        Some(Json::Text(name)) if name == "deepseek_v41" => bail!(
            UnsupportedModel,
            "model_type is \"deepseek_v41\": DeepSeek-V4.1 is another architecture (cache and index shared between \
             layers, other compression ratios, n-gram tables); dsv4 {version} runs {MODEL_TYPE} only"
        ),
        Some(Json::Text(_)) => bail!(
            UnsupportedModel,
            "model_type is {}; dsv4 {version} runs {MODEL_TYPE} only",
            object.get("model_type").unwrap_or(&Json::Null)
        ),
        Some(value) => bail!(Config, "model_type is {value}; it must be a text"),
        None => return Err(without_model_type(object)),
    }
    match object.get("architectures") {
        None | Some(Json::Null) => Ok(()),
        Some(Json::List(list)) if list.iter().any(|a| matches!(a, Json::Text(name) if name == ARCHITECTURE)) => Ok(()),
        Some(value) => bail!(UnsupportedModel, "architectures is {value}; dsv4 {version} runs {ARCHITECTURE} only"),
    }
}

/// The error for a file without `model_type`, which may be the one of the inference code.
fn without_model_type(object: &Object) -> Error {
    let is_inference_config = ["dim", "n_layers"].iter().all(|key| object.has(key));
    let is_v41 =
        ["kv_source_layers", "index_source_layers", "candidate_source_layer"].iter().any(|key| object.has(key));
    let version = env!("CARGO_PKG_VERSION");
    if is_v41 {
        let message = format!(
            "this is the inference code's configuration of DeepSeek-V4.1 (deepseek_v41: it has kv_source_layers), another \
             architecture; dsv4 {version} runs {MODEL_TYPE} only"
        );
        return Error::new(ErrorKind::UnsupportedModel, message);
    }
    let message = if is_inference_config {
        "model_type is missing: this is the configuration of the inference code (keys dim, n_layers, ..); the config.json \
         beside the shards is needed (keys hidden_size, num_hidden_layers, ..)"
    } else {
        "model_type is missing"
    };
    Error::new(ErrorKind::Config, message)
}

/// Refuses variants of the architecture that no V4 release has and that would be computed wrongly.
fn check_constants(fields: &Fields<'_>) -> Result<()> {
    fields.must_be_text("scoring_func", "sqrtsoftplus")?;
    fields.must_be_text("topk_method", "noaux_tc")?;
    fields.must_be_text("hidden_act", "silu")?;
    fields.must_be("norm_topk_prob", true)?;
    fields.must_be("tie_word_embeddings", false)?;
    fields.may_be("attention_bias", false)?;
    fields.count("n_shared_experts", 1..=1)?;
    fields.count("num_key_value_heads", 1..=1)?;
    fields.count("hc_mult", STREAMS..=STREAMS)?;
    let quantisation = fields.object("quantization_config", "quantization_config.")?;
    quantisation.must_be_text("quant_method", "fp8")?;
    quantisation.must_be_text("fmt", "e4m3")?;
    quantisation.must_be_text("scale_fmt", "ue8m0")?;
    quantisation.must_be_text("activation_scheme", "dynamic")?;
    let block = quantisation.counts("weight_block_size", 1..=MAX_WIDTH)?;
    if block != [LINEAR_BLOCK; 2] {
        bail!(Config, "quantization_config.weight_block_size is {block:?}; it must be [128, 128]");
    }
    quantisation.log_unknown(&[]);
    Ok(())
}

/// Reads every key that has a bound of its own.
fn read_dimensions(fields: &Fields<'_>) -> Result<Config> {
    let vocab_size = fields.count("vocab_size", 1..=MAX_VOCAB)?;
    Ok(Config {
        hidden_size: fields.count("hidden_size", 1..=MAX_WIDTH)?,
        vocab_size,
        num_hidden_layers: fields.count("num_hidden_layers", 1..=MAX_LAYERS)?,
        num_attention_heads: fields.count("num_attention_heads", 1..=MAX_HEADS)?,
        head_dim: fields.count("head_dim", 1..=MAX_HEAD_DIM)?,
        qk_rope_head_dim: fields.count("qk_rope_head_dim", 1..=MAX_HEAD_DIM)?,
        q_lora_rank: fields.count("q_lora_rank", 1..=MAX_WIDTH)?,
        o_groups: fields.count("o_groups", 1..=MAX_HEADS)?,
        o_lora_rank: fields.count("o_lora_rank", 1..=MAX_WIDTH)?,
        sliding_window: fields.count("sliding_window", 1..=MAX_WIDTH)?,
        n_routed_experts: fields.count("n_routed_experts", 1..=MAX_EXPERTS)?,
        num_experts_per_tok: fields.count("num_experts_per_tok", 1..=MAX_EXPERTS)?,
        num_hash_layers: fields.count("num_hash_layers", 0..=MAX_LAYERS)?,
        moe_intermediate_size: fields.count("moe_intermediate_size", 1..=MAX_WIDTH)?,
        routed_scaling_factor: fields.number_f32("routed_scaling_factor", "a positive number", |n| n > 0.0)?,
        swiglu_limit: fields.number_f32("swiglu_limit", "a number from 0 (no limit)", |n| n >= 0.0)?,
        index_n_heads: fields.count("index_n_heads", 1..=MAX_HEADS)?,
        index_head_dim: fields.count("index_head_dim", 1..=MAX_HEAD_DIM)?,
        index_topk: fields.count("index_topk", 1..=MAX_POSITIONS)?,
        hc_mult: STREAMS,
        hc_sinkhorn_iters: fields.count("hc_sinkhorn_iters", 1..=1000)?,
        hc_eps: fields.number_f32("hc_eps", "a positive number below 1", |n| n > 0.0 && n < 1.0)?,
        rms_norm_eps: fields.number_f32("rms_norm_eps", "a positive number below 1", |n| n > 0.0 && n < 1.0)?,
        rope_theta: fields.number("rope_theta", "a number above 1", |n| n > 1.0)?,
        compress_rope_theta: fields.number("compress_rope_theta", "a number above 1", |n| n > 1.0)?,
        rope_scaling: read_yarn(&fields.object("rope_scaling", "rope_scaling.")?)?,
        max_position_embeddings: fields.count("max_position_embeddings", 1..=MAX_POSITIONS)?,
        expert_dtype: read_expert_dtype(fields)?,
        bos_token_id: fields.count("bos_token_id", 0..=vocab_size - 1)? as u32,
        eos_token_id: fields.count("eos_token_id", 0..=vocab_size - 1)? as u32,
        layers: Vec::new(),
        draft: Draft::None,
    })
}

fn read_yarn(fields: &Fields<'_>) -> Result<Yarn> {
    fields.must_be_text("type", "yarn")?;
    let positive = |key| fields.number(key, "a positive number", |n| n > 0.0);
    let yarn = Yarn {
        factor: fields.number("factor", "a number from 1", |n| n >= 1.0)?,
        beta_fast: positive("beta_fast")?,
        beta_slow: positive("beta_slow")?,
        original_max_position_embeddings: fields.count("original_max_position_embeddings", 1..=MAX_POSITIONS)?,
    };
    if yarn.beta_fast < yarn.beta_slow {
        bail!(
            Config,
            "rope_scaling.beta_fast is {}; it must be at least beta_slow ({})",
            yarn.beta_fast,
            yarn.beta_slow
        );
    }
    fields.log_unknown(&[]);
    Ok(yarn)
}

/// `expert_dtype` is the one key that an official upload lacked; the tensors tell then.
fn read_expert_dtype(fields: &Fields<'_>) -> Result<Option<ExpertDtype>> {
    let key = "expert_dtype";
    match fields.optional_text(key)? {
        None => Ok(None),
        Some("fp4") => Ok(Some(ExpertDtype::Fp4)),
        Some("fp8") => Ok(Some(ExpertDtype::Fp8)),
        Some(other) => bail!(Config, "{key} is {other:?}; it must be \"fp4\" or \"fp8\""),
    }
}
