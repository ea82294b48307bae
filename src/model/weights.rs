//! The typed weights of a model: which tensor is which matrix or vector, checked against the configuration.
//!
//! Invariant: every handle of a [`Weights`] has the dtype and shape that the configuration asks for, and every quantised
//! matrix has its scales. Resolving touches no page of the weights. Names and shapes are the
//! checkpoint's.
//!
//! Arithmetic on the weights is not here; a [`Matrix`] only lends a [`MatrixRef`].

#![forbid(unsafe_code)]

mod resolve;

use std::fmt;
use std::sync::OnceLock;

use once_cell::sync::OnceCell;

use crate::alloc;
use crate::error::{Result, bail};
use crate::tensor::format::bf16_value;
use crate::tensor::{DType, MatrixFormat, MatrixRef, Scales};
use crate::weights::Tensor;

/// A weight matrix `[rows, cols]` in checkpoint storage, with its scales.
#[derive(Clone, Debug)]
pub struct Matrix {
    tensor: Tensor,
    scale: Option<Tensor>,
    format: MatrixFormat,
    rows: usize,
    cols: usize,
    /// Set once its pages have been read in.
    populated: OnceCell<()>,
}

impl Matrix {
    /// The matrix, its pages read in at the first call: so a disk error, or a file that shrank, is an error here and not
    /// a signal in the middle of a product.
    ///
    /// # Errors
    /// `Io`, naming the file.
    pub fn ready(&self) -> Result<MatrixRef<'_>> {
        self.populated.get_or_try_init(|| {
            self.tensor.populate(0..self.tensor.byte_len())?;
            self.scale.iter().try_for_each(|scale| scale.populate(0..scale.byte_len()))
        })?;
        Ok(self.view())
    }

    /// The matrix as the operations take it. Reading it may touch the disk.
    pub fn view(&self) -> MatrixRef<'_> {
        self.over(self.tensor.bytes(), self.scale.as_ref().map_or(&[], Tensor::bytes))
    }

    /// The matrix over other bytes, those of its two tensors elsewhere in memory.
    pub(crate) fn over<'a>(&self, data: &'a [u8], scales: &'a [u8]) -> MatrixRef<'a> {
        let scales = match &self.scale {
            None => Scales::None,
            Some(scale) if scale.dtype() == DType::F32 => Scales::F32(scales),
            Some(_) => Scales::E8m0(scales),
        };
        let Self { format, rows, cols, .. } = *self;
        MatrixRef { format, rows, cols, data, scales, first_row: 0, round_to_bf16: false }
    }

    /// Number of outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Storage form.
    pub fn format(&self) -> MatrixFormat {
        self.format
    }

    /// Bytes in the checkpoint, scales included.
    pub fn byte_len(&self) -> usize {
        self.tensor.byte_len() + self.scale.as_ref().map_or(0, Tensor::byte_len)
    }

    /// The tensor of the elements.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// The tensor of the scales, for quantised matrices.
    pub fn scale(&self) -> Option<&Tensor> {
        self.scale.as_ref()
    }
}

/// A small weight tensor that is used as float32: a norm, bias, sink or position table, flattened row-major.
#[derive(Clone)]
pub struct Vector {
    tensor: Tensor,
    values: OnceLock<Vec<f32>>,
    /// The first element that is not finite, once it was looked for.
    bad: OnceLock<Option<usize>>,
}

impl Vector {
    /// The elements, widened exactly to float32 at the first call, which allocates them unless [`Self::prepare`] did.
    pub fn values(&self) -> &[f32] {
        self.values.get_or_init(|| {
            let mut values = Vec::with_capacity(self.len());
            self.widen_into(&mut values);
            values
        })
    }

    /// The elements, for operations in which one that is not finite would not show: choices made by comparing.
    ///
    /// # Errors
    /// `Numeric`, naming the tensor and the first such element.
    pub fn finite(&self) -> Result<&[f32]> {
        let values = self.values();
        let bad = *self.bad.get_or_init(|| values.iter().position(|v| !v.is_finite()));
        match bad {
            None => Ok(values),
            Some(i) => {
                bail!(
                    Numeric,
                    "element {i} of {} is {}; `dsv4 verify --scan` tells more",
                    self.tensor.name(),
                    values[i]
                )
            }
        }
    }

    /// Widens the elements now, with memory that is reserved fallibly.
    ///
    /// # Errors
    /// `OutOfMemory`, naming the tensor and the bytes; `Io` and `Corrupt` of the file.
    pub fn prepare(&self) -> Result<()> {
        if self.values.get().is_none() {
            self.tensor.populate(0..self.tensor.byte_len())?;
            let mut values = alloc::with_capacity(self.tensor.name(), self.len())?;
            self.widen_into(&mut values);
            // another thread may have been faster, with the same values
            drop(self.values.set(values));
        }
        Ok(())
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.tensor.shape().iter().product()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The tensor in the checkpoint.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    fn widen_into(&self, values: &mut Vec<f32>) {
        let bytes = self.tensor.bytes();
        if self.tensor.dtype() == DType::Bf16 {
            values.extend(bytes.chunks_exact(2).map(|b| bf16_value(u16::from_le_bytes([b[0], b[1]]))));
        } else {
            values.extend(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
        }
    }
}

impl fmt::Debug for Vector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.tensor.fmt(f)
    }
}

/// The table of a hash-routed layer: `[vocab_size, num_experts_per_tok]` expert ids (I64).
#[derive(Clone, Debug)]
pub struct HashTable {
    tensor: Tensor,
    experts: usize,
}

impl HashTable {
    /// The experts of `token`, in the order of the table. Ids are checked here, since opening reads no weights.
    ///
    /// # Errors
    /// `InvalidArgument` for a token outside the table, `Corrupt` for an expert id outside `0..n_routed_experts`, naming
    /// the tensor and the row; `Io` and `Corrupt` of the file.
    pub fn row(&self, token: u32) -> Result<impl ExactSizeIterator<Item = usize> + '_> {
        let &[rows, per_token] = self.tensor.shape() else {
            unreachable!("resolve checked that the table has two dimensions")
        };
        if token as usize >= rows {
            bail!(InvalidArgument, "token {token} is outside the {rows} rows of {}", self.tensor.name());
        }
        let part = token as usize * per_token * 8..(token as usize + 1) * per_token * 8;
        self.tensor.populate(part.clone())?;
        let row = &self.tensor.bytes()[part];
        let ids = row.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().expect("chunks of 8 bytes")));
        for id in ids.clone() {
            if usize::try_from(id).is_ok_and(|id| id < self.experts) {
                continue;
            }
            bail!(
                Corrupt,
                "row {token} of {} has expert id {id}, outside 0..{} (n_routed_experts)",
                self.tensor.name(),
                self.experts
            );
        }
        Ok(ids.map(|id| id as usize))
    }

    /// Reads the whole table and checks every id, for `dsv4 verify`; running checks the rows that it uses.
    ///
    /// # Errors
    /// `Corrupt` as [`Self::row`], `Io`.
    pub fn check(&self) -> Result<()> {
        self.tensor.populate(0..self.tensor.byte_len())?;
        let rows = self.tensor.shape()[0] as u32;
        (0..rows).try_for_each(|token| self.row(token).map(drop))
    }

    /// The tensor in the checkpoint.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

/// All weights of a model. Field names are those of the checkpoint's tensors.
#[derive(Debug)]
#[expect(missing_docs, reason = "each field is the checkpoint tensor of the same name")]
pub struct Weights {
    /// BF16 `[vocab_size, hidden_size]`.
    pub embed: Matrix,
    /// BF16 `[vocab_size, hidden_size]`.
    pub head: Matrix,
    pub norm: Vector,
    pub hc_head: HyperWeights,
    /// The trunk; `num_hidden_layers` of them.
    pub layers: Vec<LayerWeights>,
    pub draft: DraftWeights,
}

/// One hyper-connection (mHC): `hc_*_fn`, `hc_*_base`, `hc_*_scale`.
#[derive(Clone, Debug)]
pub struct HyperWeights {
    /// `hc_*_fn`, F32 `[hc (2 + hc), hc D]` around a half layer, `[hc, hc D]` in a head.
    pub mix: Matrix,
    /// As many elements as `mix` has rows.
    pub base: Vector,
    /// 3 elements around a half layer, 1 in a head.
    pub scale: Vector,
}

/// One block: attention and mixture of experts.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "each field is the checkpoint tensor of the same name")]
pub struct LayerWeights {
    pub attn_norm: Vector,
    pub ffn_norm: Vector,
    pub hc_attn: HyperWeights,
    pub hc_ffn: HyperWeights,
    pub attn: AttentionWeights,
    pub ffn: MoeWeights,
}

/// `attn.*` of one block.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "each field is the checkpoint tensor of the same name")]
pub struct AttentionWeights {
    /// `attn_sink`, one logit a head.
    pub sink: Vector,
    pub wq_a: Matrix,
    pub q_norm: Vector,
    pub wq_b: Matrix,
    pub wkv: Matrix,
    pub kv_norm: Vector,
    /// `o_groups` matrices `[o_lora_rank, heads head_dim / o_groups]`, one below the other.
    pub wo_a: Matrix,
    pub wo_b: Matrix,
    /// In layers with compressed entries.
    pub compressor: Option<CompressorWeights>,
    /// In c4a layers.
    pub indexer: Option<IndexerWeights>,
}

/// A compressor; `width` is twice the entry's size in c4a layers, whose groups overlap.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "each field is the checkpoint tensor of the same name")]
pub struct CompressorWeights {
    /// `[ratio, width]`.
    pub ape: Vector,
    pub wkv: Matrix,
    pub wgate: Matrix,
    pub norm: Vector,
}

/// The indexer of a c4a layer.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "each field is the checkpoint tensor of the same name")]
pub struct IndexerWeights {
    pub wq_b: Matrix,
    pub weights_proj: Matrix,
    pub compressor: CompressorWeights,
}

/// `ffn.*` of one block.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "each field is the checkpoint tensor of the same name")]
pub struct MoeWeights {
    pub gate: Matrix,
    pub routing: Routing,
    /// `n_routed_experts` of them.
    pub experts: Vec<ExpertWeights>,
    pub shared: ExpertWeights,
}

/// How a block chooses its experts.
#[derive(Clone, Debug)]
pub enum Routing {
    /// By score; `gate.bias` is added for the selection only.
    Bias(Vector),
    /// By token id (`gate.tid2eid`).
    Hash(HashTable),
}

/// One expert: `w1` is the gate, `w3` the up and `w2` the down projection.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "each field is the checkpoint tensor of the same name")]
pub struct ExpertWeights {
    pub w1: Matrix,
    pub w2: Matrix,
    pub w3: Matrix,
}

/// `mtp.*`.
#[derive(Clone, Debug)]
pub enum DraftWeights {
    /// The checkpoint has none.
    None,
    /// The classic block of the April releases.
    Mtp(Box<MtpWeights>),
    /// The block drafter of the 0731 and 0813 releases.
    Dspark(Box<DsparkWeights>),
}

/// `mtp.0` of the April releases.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "each field is the checkpoint tensor of the same name")]
pub struct MtpWeights {
    pub block: LayerWeights,
    pub e_proj: Matrix,
    pub h_proj: Matrix,
    pub enorm: Vector,
    pub hnorm: Vector,
    pub norm: Vector,
    pub hc_head: HyperWeights,
}

/// `mtp.0` .. of the DSpark releases. `main_*` belong to the first stage, `norm` and the heads to the last.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "each field is the checkpoint tensor of the same name")]
pub struct DsparkWeights {
    pub stages: Vec<LayerWeights>,
    /// `[D, target layers x D]`.
    pub main_proj: Matrix,
    pub main_norm: Vector,
    pub norm: Vector,
    pub hc_head: HyperWeights,
    /// `[vocab_size, rank]`.
    pub markov_w1: Matrix,
    /// `[vocab_size, rank]`.
    pub markov_w2: Matrix,
    /// `confidence_head.proj`, `[1, D + rank]`.
    pub confidence: Matrix,
}

impl Weights {
    /// Widens every vector (a few megabytes) with memory that is reserved fallibly; after it, [`Vector::values`] never
    /// allocates.
    ///
    /// # Errors
    /// `OutOfMemory`, naming the tensor; `Io` and `Corrupt` of the file.
    pub fn prepare(&self) -> Result<()> {
        self.for_each_vector(&mut Vector::prepare)
    }

    /// The tables of the layers that choose experts by token id.
    pub fn hash_tables(&self) -> impl Iterator<Item = &HashTable> {
        let draft = match &self.draft {
            DraftWeights::None => &[],
            DraftWeights::Mtp(mtp) => std::slice::from_ref(&mtp.block),
            DraftWeights::Dspark(dspark) => &dspark.stages[..],
        };
        self.layers.iter().chain(draft).filter_map(|layer| match &layer.ffn.routing {
            Routing::Hash(table) => Some(table),
            Routing::Bias(_) => None,
        })
    }

    /// Calls `f` for every vector of the model until it fails.
    fn for_each_vector(&self, f: Visit<'_>) -> Result<()> {
        f(&self.norm)?;
        self.hc_head.for_each_vector(f)?;
        for layer in &self.layers {
            layer.for_each_vector(f)?;
        }
        match &self.draft {
            DraftWeights::None => Ok(()),
            DraftWeights::Mtp(mtp) => {
                mtp.block.for_each_vector(f)?;
                mtp.hc_head.for_each_vector(f)?;
                [&mtp.enorm, &mtp.hnorm, &mtp.norm].into_iter().try_for_each(f)
            }
            DraftWeights::Dspark(dspark) => {
                for stage in &dspark.stages {
                    stage.for_each_vector(f)?;
                }
                dspark.hc_head.for_each_vector(f)?;
                [&dspark.main_norm, &dspark.norm].into_iter().try_for_each(f)
            }
        }
    }
}

/// What is done to each vector.
type Visit<'a> = &'a mut dyn FnMut(&Vector) -> Result<()>;

impl HyperWeights {
    fn for_each_vector(&self, f: Visit<'_>) -> Result<()> {
        [&self.base, &self.scale].into_iter().try_for_each(f)
    }
}

impl LayerWeights {
    fn for_each_vector(&self, f: Visit<'_>) -> Result<()> {
        let attn = &self.attn;
        for vector in [&self.attn_norm, &self.ffn_norm, &attn.sink, &attn.q_norm, &attn.kv_norm] {
            f(vector)?;
        }
        self.hc_attn.for_each_vector(f)?;
        self.hc_ffn.for_each_vector(f)?;
        let indexer = attn.indexer.as_ref().map(|indexer| &indexer.compressor);
        for compressor in attn.compressor.iter().chain(indexer) {
            f(&compressor.ape)?;
            f(&compressor.norm)?;
        }
        match &self.ffn.routing {
            Routing::Bias(bias) => f(bias),
            Routing::Hash(_) => Ok(()),
        }
    }
}
