//! `config.json`: the one source of a model's dimensions.

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
        /// Draft stages (`mtp.0` ..), from the tensors: the config's own count is stale.
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
#[expect(missing_docs, reason = "each field is the config.json key of the same name; model.md section 1 describes them")]
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
    pub expert_dtype: ExpertDtype,
    pub bos_token_id: u32,
    pub eos_token_id: u32,
    /// `compress_ratios` of the trunk layers; `num_hidden_layers` entries.
    pub layers: Vec<LayerKind>,
    /// What the config says of a draft module; [`Draft::None`] when the checkpoint has no `mtp.*` tensors.
    pub draft: Draft,
}
