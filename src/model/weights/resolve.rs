//! Finds every tensor a configuration asks for and checks its dtype and shape.

#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::sync::OnceLock;

use once_cell::sync::OnceCell;

use super::{
    AttentionWeights, CompressorWeights, DraftWeights, DsparkWeights, ExpertWeights, HashTable, HyperWeights,
    IndexerWeights, LayerWeights, Matrix, MoeWeights, MtpWeights, Routing, Vector, Weights,
};
use crate::alloc;
use crate::error::{Error, ErrorKind, Result, bail};
use crate::model::config::{Config, Draft, ExpertDtype, LayerKind};
use crate::tensor::{DType, MatrixFormat};
use crate::weights::{Checkpoint, Tensor};

/// Side of an E4M3 scale tile.
const TILE: usize = 128;
/// Columns per E2M1 scale.
const FP4_BLOCK: usize = 32;

impl Config {
    /// Settles what only the tensors can tell: the draft module (a checkpoint without `mtp.*` has none, which is logged;
    /// the number of DSpark stages, of which the config's count is stale) and the experts' storage if the key is absent.
    ///
    /// # Errors
    /// `Config` if the tensors contradict the keys.
    pub fn with_checkpoint(mut self, checkpoint: &Checkpoint) -> Result<Self> {
        if self.expert_dtype.is_none() {
            self.expert_dtype = infer_expert_dtype(checkpoint)?;
        }
        let stages = draft_stages(checkpoint)?;
        let is_dspark = checkpoint.position("mtp.0.main_proj.weight").is_some();
        self.draft = match (self.draft, stages) {
            (Draft::None, 0) => Draft::None,
            (_, 0) => {
                tracing::info!(dir = %checkpoint.dir().display(), "the checkpoint has no mtp.* tensors: no drafter");
                Draft::None
            }
            (Draft::Dspark { block_size, markov_rank, noise_token_id, target_layer_ids, .. }, stages) => {
                Draft::Dspark { stages, block_size, markov_rank, noise_token_id, target_layer_ids }
            }
            (_, _) if is_dspark => {
                bail!(
                    Config,
                    "dspark_block_size is missing, but the checkpoint has a DSpark drafter (mtp.0.main_proj.weight)"
                )
            }
            (_, 1) => Draft::Mtp,
            (_, stages) => {
                bail!(Config, "the checkpoint has {stages} mtp blocks, but no dspark_* key says what they are")
            }
        };
        Ok(self)
    }
}

impl Weights {
    /// Finds and checks every tensor of the model that `config` describes; touches no page of the weights.
    ///
    /// `config` need not have been through [`Config::with_checkpoint`].
    ///
    /// # Errors
    /// `NotFound` for a missing tensor or scale, `Corrupt` for a wrong dtype or shape (both are named), `Config` for
    /// tensors that contradict the configuration, such as layers beyond `num_hidden_layers`. Messages start with the
    /// folder.
    pub fn resolve(config: &Config, checkpoint: &Checkpoint) -> Result<Self> {
        let with_folder = |e: Error| e.context(checkpoint.dir().display());
        let config = config.clone().with_checkpoint(checkpoint).map_err(with_folder)?;
        let used = alloc::zeroed("the list of used tensors", checkpoint.len())?;
        let resolver = Resolver { config: &config, checkpoint, used: RefCell::new(used) };
        let weights = resolver.model().map_err(with_folder)?;
        resolver.check_leftovers().map_err(with_folder)?;
        Ok(weights)
    }
}

/// Storage of the experts by the first of them, if there is any.
fn infer_expert_dtype(checkpoint: &Checkpoint) -> Result<Option<ExpertDtype>> {
    let Some(tensor) = checkpoint.tensor("layers.0.ffn.experts.0.w1.weight") else { return Ok(None) };
    let dtype = match tensor.dtype() {
        DType::I8 => ExpertDtype::Fp4,
        DType::F8E4M3 => ExpertDtype::Fp8,
        other => bail!(Corrupt, "tensor {} has dtype {other}; experts are I8 (packed FP4) or F8_E4M3", tensor.name()),
    };
    tracing::info!(?dtype, "expert_dtype is not in config.json: taken from the tensors");
    Ok(Some(dtype))
}

/// Number of draft blocks `mtp.0`, `mtp.1`, ..; they must be consecutive.
fn draft_stages(checkpoint: &Checkpoint) -> Result<usize> {
    let mut present = Vec::new();
    for name in checkpoint.names().filter(|name| name.starts_with("mtp.")) {
        let number = name["mtp.".len()..].split('.').next().and_then(|n| n.parse::<usize>().ok());
        let Some(number) = number.filter(|&n| n < 64) else {
            bail!(Corrupt, "tensor {name}: mtp blocks are numbered from 0 and fewer than 64");
        };
        if !present.contains(&number) {
            present.push(number);
        }
    }
    let count = present.len();
    if let Some(gap) = (0..count).find(|n| !present.contains(n)) {
        bail!(Corrupt, "there are {count} mtp blocks, but none of them is mtp.{gap}");
    }
    Ok(count)
}

/// Looks tensors up and remembers which were asked for.
struct Resolver<'a> {
    config: &'a Config,
    checkpoint: &'a Checkpoint,
    used: RefCell<Vec<bool>>,
}

impl Resolver<'_> {
    fn model(&self) -> Result<Weights> {
        let c = self.config;
        let mut layers = alloc::with_capacity("the list of layers", c.layers.len())?;
        let embed = self.plain("embed.weight", DType::Bf16, c.vocab_size, c.hidden_size)?;
        for (i, &kind) in c.layers.iter().enumerate() {
            layers.push(self.layer(&format!("layers.{i}."), kind, i < c.num_hash_layers)?);
        }
        Ok(Weights {
            embed,
            head: self.plain("head.weight", DType::Bf16, c.vocab_size, c.hidden_size)?,
            norm: self.norm("norm", c.hidden_size)?,
            hc_head: self.hyper_head("")?,
            layers,
            draft: self.draft()?,
        })
    }

    fn draft(&self) -> Result<DraftWeights> {
        let c = self.config;
        let d = c.hidden_size;
        match &c.draft {
            Draft::None => Ok(DraftWeights::None),
            Draft::Mtp => Ok(DraftWeights::Mtp(Box::new(MtpWeights {
                block: self.layer("mtp.0.", LayerKind::Window, false)?,
                e_proj: self.fp8("mtp.0.e_proj", d, d)?,
                h_proj: self.fp8("mtp.0.h_proj", d, d)?,
                enorm: self.norm("mtp.0.enorm", d)?,
                hnorm: self.norm("mtp.0.hnorm", d)?,
                norm: self.norm("mtp.0.norm", d)?,
                hc_head: self.hyper_head("mtp.0.")?,
            }))),
            &Draft::Dspark { stages: count, markov_rank: rank, ref target_layer_ids, .. } => {
                let mut stages = alloc::with_capacity("the list of draft stages", count)?;
                for i in 0..count {
                    stages.push(self.layer(&format!("mtp.{i}."), LayerKind::Window, false)?);
                }
                let last = format!("mtp.{}.", count - 1);
                let markov = |w| self.plain(&format!("{last}markov_head.{w}.weight"), DType::Bf16, c.vocab_size, rank);
                Ok(DraftWeights::Dspark(Box::new(DsparkWeights {
                    stages,
                    main_proj: self.fp8("mtp.0.main_proj", d, d * target_layer_ids.len())?,
                    main_norm: self.norm("mtp.0.main_norm", d)?,
                    norm: self.norm(&format!("{last}norm"), d)?,
                    hc_head: self.hyper_head(&last)?,
                    markov_w1: markov("markov_w1")?,
                    markov_w2: markov("markov_w2")?,
                    confidence: self.plain(&format!("{last}confidence_head.proj.weight"), DType::Bf16, 1, d + rank)?,
                })))
            }
        }
    }

    fn layer(&self, prefix: &str, kind: LayerKind, hashed: bool) -> Result<LayerWeights> {
        let c = self.config;
        let rows = c.hc_mult * (2 + c.hc_mult);
        Ok(LayerWeights {
            attn_norm: self.norm(&format!("{prefix}attn_norm"), c.hidden_size)?,
            ffn_norm: self.norm(&format!("{prefix}ffn_norm"), c.hidden_size)?,
            hc_attn: self.hyper(&format!("{prefix}hc_attn"), rows, 3)?,
            hc_ffn: self.hyper(&format!("{prefix}hc_ffn"), rows, 3)?,
            attn: self.attention(&format!("{prefix}attn."), kind)?,
            ffn: self.moe(&format!("{prefix}ffn."), hashed)?,
        })
    }

    fn attention(&self, prefix: &str, kind: LayerKind) -> Result<AttentionWeights> {
        let c = self.config;
        let name = |suffix: &str| format!("{prefix}{suffix}");
        let heads_dim = c.num_attention_heads * c.head_dim;
        let compressor = match kind {
            LayerKind::Window => None,
            _ => Some(self.compressor(&name("compressor."), kind, c.head_dim)?),
        };
        let indexer = match kind {
            LayerKind::C4a => Some(IndexerWeights {
                wq_b: self.fp8(&name("indexer.wq_b"), c.index_n_heads * c.index_head_dim, c.q_lora_rank)?,
                weights_proj: self.plain(
                    &name("indexer.weights_proj.weight"),
                    DType::Bf16,
                    c.index_n_heads,
                    c.hidden_size,
                )?,
                compressor: self.compressor(&name("indexer.compressor."), kind, c.index_head_dim)?,
            }),
            _ => None,
        };
        Ok(AttentionWeights {
            sink: self.vector(&name("attn_sink"), DType::F32, &[c.num_attention_heads])?,
            wq_a: self.fp8(&name("wq_a"), c.q_lora_rank, c.hidden_size)?,
            q_norm: self.norm(&name("q_norm"), c.q_lora_rank)?,
            wq_b: self.fp8(&name("wq_b"), heads_dim, c.q_lora_rank)?,
            wkv: self.fp8(&name("wkv"), c.head_dim, c.hidden_size)?,
            kv_norm: self.norm(&name("kv_norm"), c.head_dim)?,
            wo_a: self.fp8(&name("wo_a"), c.o_groups * c.o_lora_rank, heads_dim / c.o_groups)?,
            wo_b: self.fp8(&name("wo_b"), c.hidden_size, c.o_groups * c.o_lora_rank)?,
            compressor,
            indexer,
        })
    }

    fn compressor(&self, prefix: &str, kind: LayerKind, entry: usize) -> Result<CompressorWeights> {
        let width = if kind == LayerKind::C4a { 2 * entry } else { entry };
        let d = self.config.hidden_size;
        Ok(CompressorWeights {
            ape: self.vector(&format!("{prefix}ape"), DType::F32, &[kind.ratio(), width])?,
            wkv: self.plain(&format!("{prefix}wkv.weight"), DType::Bf16, width, d)?,
            wgate: self.plain(&format!("{prefix}wgate.weight"), DType::Bf16, width, d)?,
            norm: self.norm(&format!("{prefix}norm"), entry)?,
        })
    }

    fn moe(&self, prefix: &str, hashed: bool) -> Result<MoeWeights> {
        let c = self.config;
        let gate = self.plain(&format!("{prefix}gate.weight"), DType::Bf16, c.n_routed_experts, c.hidden_size)?;
        let routing = if hashed {
            let shape = [c.vocab_size, c.num_experts_per_tok];
            let tensor = self.tensor(&format!("{prefix}gate.tid2eid"), DType::I64, &shape)?;
            Routing::Hash(HashTable { tensor, experts: c.n_routed_experts })
        } else {
            Routing::Bias(self.vector(&format!("{prefix}gate.bias"), DType::F32, &[c.n_routed_experts])?)
        };
        let is_fp4 = c.expert_dtype != Some(ExpertDtype::Fp8);
        let shared = self.expert(&format!("{prefix}shared_experts."), false)?;
        let mut experts = alloc::with_capacity("the list of experts", c.n_routed_experts)?;
        for e in 0..c.n_routed_experts {
            experts.push(self.expert(&format!("{prefix}experts.{e}."), is_fp4)?);
        }
        Ok(MoeWeights { gate, routing, experts, shared })
    }

    fn expert(&self, prefix: &str, is_fp4: bool) -> Result<ExpertWeights> {
        let (d, i) = (self.config.hidden_size, self.config.moe_intermediate_size);
        let matrix = |w: &str, rows, cols| {
            let name = format!("{prefix}{w}");
            if is_fp4 { self.fp4(&name, rows, cols) } else { self.fp8(&name, rows, cols) }
        };
        Ok(ExpertWeights { w1: matrix("w1", i, d)?, w2: matrix("w2", d, i)?, w3: matrix("w3", i, d)? })
    }

    fn hyper_head(&self, prefix: &str) -> Result<HyperWeights> {
        self.hyper(&format!("{prefix}hc_head"), self.config.hc_mult, 1)
    }

    fn hyper(&self, name: &str, rows: usize, scales: usize) -> Result<HyperWeights> {
        let cols = self.config.hc_mult * self.config.hidden_size;
        Ok(HyperWeights {
            mix: self.plain(&format!("{name}_fn"), DType::F32, rows, cols)?,
            base: self.vector(&format!("{name}_base"), DType::F32, &[rows])?,
            scale: self.vector(&format!("{name}_scale"), DType::F32, &[scales])?,
        })
    }

    fn norm(&self, name: &str, len: usize) -> Result<Vector> {
        self.vector(&format!("{name}.weight"), DType::Bf16, &[len])
    }

    fn vector(&self, name: &str, dtype: DType, shape: &[usize]) -> Result<Vector> {
        Ok(Vector { tensor: self.tensor(name, dtype, shape)?, values: OnceLock::new(), bad: OnceLock::new() })
    }

    /// A matrix without scales.
    fn plain(&self, name: &str, dtype: DType, rows: usize, cols: usize) -> Result<Matrix> {
        let format = if dtype == DType::F32 { MatrixFormat::F32 } else { MatrixFormat::Bf16 };
        Ok(Matrix {
            tensor: self.tensor(name, dtype, &[rows, cols])?,
            scale: None,
            format,
            rows,
            cols,
            populated: OnceCell::new(),
        })
    }

    /// An E4M3 matrix; its scales are E8M0 or F32 (`-Base` releases).
    fn fp8(&self, name: &str, rows: usize, cols: usize) -> Result<Matrix> {
        let tensor = self.tensor(&format!("{name}.weight"), DType::F8E4M3, &[rows, cols])?;
        let tiles = [rows.div_ceil(TILE), cols.div_ceil(TILE)];
        let scale = self.scale(name, &tensor, &[DType::F8E8M0, DType::F32], &tiles)?;
        Ok(Matrix { tensor, scale: Some(scale), format: MatrixFormat::E4m3, rows, cols, populated: OnceCell::new() })
    }

    /// A packed E2M1 matrix; its scales are E8M0.
    fn fp4(&self, name: &str, rows: usize, cols: usize) -> Result<Matrix> {
        let tensor = self.tensor(&format!("{name}.weight"), DType::I8, &[rows, cols / 2])?;
        let scale = self.scale(name, &tensor, &[DType::F8E8M0], &[rows, cols / FP4_BLOCK])?;
        Ok(Matrix { tensor, scale: Some(scale), format: MatrixFormat::E2m1, rows, cols, populated: OnceCell::new() })
    }

    /// The scales that belong to `weight`.
    fn scale(&self, name: &str, weight: &Tensor, dtypes: &[DType], shape: &[usize]) -> Result<Tensor> {
        let scale = format!("{name}.scale");
        let Some(tensor) = self.find(&scale) else {
            bail!(
                NotFound,
                "tensor {} ({}) has no scales: {scale} is missing{}",
                weight.name(),
                weight.dtype(),
                self.whereabouts(&scale)
            );
        };
        if !dtypes.contains(&tensor.dtype()) {
            let allowed = dtypes.iter().map(DType::to_string).collect::<Vec<_>>().join(" or ");
            bail!(
                Corrupt,
                "tensor {scale} has dtype {}; the scales of {} are {allowed}",
                tensor.dtype(),
                weight.name()
            );
        }
        if tensor.shape() != shape {
            bail!(
                Corrupt,
                "tensor {scale} has shape {:?}; {} of shape {:?} needs scales of shape {shape:?}",
                tensor.shape(),
                weight.name(),
                weight.shape()
            );
        }
        Ok(tensor)
    }

    fn tensor(&self, name: &str, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let Some(tensor) = self.find(name) else {
            let message = format!(
                "tensor {name} ({dtype} {shape:?}) is missing{}{}",
                self.whereabouts(name),
                self.reason(name).map_or(String::new(), |reason| format!("; {reason}"))
            );
            return Err(Error::new(ErrorKind::NotFound, message));
        };
        if tensor.dtype() != dtype {
            bail!(Corrupt, "tensor {name} has dtype {}, but must be {dtype} {shape:?}", tensor.dtype());
        }
        if tensor.shape() != shape {
            bail!(Corrupt, "tensor {name} has shape {:?}, but config.json makes it {shape:?}", tensor.shape());
        }
        Ok(tensor)
    }

    fn find(&self, name: &str) -> Option<Tensor> {
        let position = self.checkpoint.position(name)?;
        self.used.borrow_mut()[position] = true;
        Some(self.checkpoint.at(position))
    }

    /// For a missing tensor: the shard that holds it although the index does not say so.
    fn whereabouts(&self, name: &str) -> String {
        let file = self.checkpoint.unlisted(name);
        file.map_or(String::new(), |file| format!(" ({file} holds it, but the index does not name it)"))
    }

    /// Refuses tensors that the configuration has no place for, where ignoring them would compute something else.
    fn check_leftovers(&self) -> Result<()> {
        let used = self.used.borrow();
        let mut ignored = self.checkpoint.names().zip(used.iter()).filter(|&(_, &used)| !used).map(|(name, _)| name);
        let mut count = 0;
        let mut first = None;
        for name in &mut ignored {
            // the reference's converter skips these: copies of the trunk's embedding and head
            let is_copy = name.starts_with("mtp.") && (name.contains("emb") || name.ends_with("head.weight"));
            if (name.starts_with("layers.") || name.starts_with("mtp.")) && !is_copy {
                let reason = self.reason(name).unwrap_or_else(|| "no such tensor is known".to_owned());
                bail!(Config, "tensor {name} has no place in the model that config.json describes: {reason}");
            }
            count += 1;
            first.get_or_insert(name);
        }
        if let Some(first) = first {
            tracing::warn!(count, first, "tensors of no use to this model are ignored");
        }
        Ok(())
    }

    /// The key of config.json that decides whether tensor `name` exists, with its value.
    fn reason(&self, name: &str) -> Option<String> {
        let c = self.config;
        let (block, rest) = name.split_once('.')?;
        let (number, rest) = rest.split_once('.')?;
        let number: usize = number.parse().ok()?;
        if block == "layers" && number >= c.num_hidden_layers {
            return Some(format!("num_hidden_layers is {}", c.num_hidden_layers));
        }
        if let Some(expert) = rest.strip_prefix("ffn.experts.") {
            let expert: usize = expert.split('.').next()?.parse().ok()?;
            return (expert >= c.n_routed_experts || block == "layers")
                .then(|| format!("n_routed_experts is {}", c.n_routed_experts));
        }
        if block != "layers" {
            return None;
        }
        if rest.starts_with("ffn.gate.") {
            return Some(format!("num_hash_layers is {}", c.num_hash_layers));
        }
        (rest.starts_with("attn.compressor.") || rest.starts_with("attn.indexer."))
            .then(|| format!("compress_ratios[{number}] is {}", c.layers[number].ratio()))
    }
}
