//! The weights on the device, as the checkpoint stores them.
//!
//! One function places everything. It runs twice: on a counting arena, which gives the bytes, and on the real one, where
//! it also uploads. Only `wo_a` with float32 scales changes: the official code rounds it to bf16 when it is dequantised,
//! so it is stored as bf16.

use crate::alloc;
use crate::backend::cuda::memory::{Arena, Buffer, Plain};
use crate::backend::cuda::ops::{ExpertFormat, Experts, Weight};
use crate::backend::cuda::upload::Uploader;
use crate::error::{Result, bail};
use crate::model::weights::{
    AttentionWeights, CompressorWeights, ExpertWeights, HyperWeights, IndexerWeights, LayerWeights, Matrix, MoeWeights,
    Routing, Vector, Weights,
};
use crate::tensor::format::{E4M3, bf16_bits, bf16_value};
use crate::tensor::{MatrixFormat, MatrixRef, Scales};

/// Rows and columns of an E4M3 scale.
const TILE: usize = 128;

/// All weights of the trunk.
pub(super) struct DeviceWeights {
    /// `[vocab, D]`.
    pub(super) embed: Buffer<u16>,
    pub(super) head: Weight,
    pub(super) norm: Buffer<f32>,
    pub(super) hc_head: Hyper,
    pub(super) layers: Vec<Layer>,
}

/// A hyper-connection.
pub(super) struct Hyper {
    /// `[24 or 4, streams * D]`.
    pub(super) basis: Buffer<f32>,
    pub(super) base: Buffer<f32>,
    pub(super) scale: Buffer<f32>,
}

pub(super) struct Layer {
    pub(super) attn_norm: Buffer<f32>,
    pub(super) ffn_norm: Buffer<f32>,
    pub(super) hc_attn: Hyper,
    pub(super) hc_ffn: Hyper,
    pub(super) attn: Attention,
    pub(super) ffn: Moe,
}

pub(super) struct Attention {
    pub(super) sink: Buffer<f32>,
    pub(super) wq_a: Weight,
    pub(super) q_norm: Buffer<f32>,
    pub(super) wq_b: Weight,
    pub(super) wkv: Weight,
    pub(super) kv_norm: Buffer<f32>,
    pub(super) wo_a: Weight,
    pub(super) wo_b: Weight,
    pub(super) compressor: Option<Compressor>,
    pub(super) indexer: Option<Indexer>,
}

pub(super) struct Compressor {
    pub(super) ape: Buffer<f32>,
    pub(super) wkv: Weight,
    pub(super) wgate: Weight,
    pub(super) norm: Buffer<f32>,
}

pub(super) struct Indexer {
    pub(super) wq_b: Weight,
    pub(super) weights_proj: Weight,
    pub(super) compressor: Compressor,
}

pub(super) struct Moe {
    pub(super) gate: Weight,
    pub(super) routing: Route,
    pub(super) format: ExpertFormat,
    /// Where not all experts are on the device: which are.
    pub(super) here: Option<Here>,
    pub(super) w1: Bank,
    pub(super) w2: Bank,
    pub(super) w3: Bank,
    /// w1, w2, w3 of the shared expert.
    pub(super) shared: [Weight; 3],
}

pub(super) enum Route {
    Bias(Buffer<f32>),
    /// `[vocab, top_k]`.
    Hash(Buffer<i64>),
}

/// Which of a layer's experts are on the device.
pub(super) struct Here {
    /// 1 where one is, 0 where not.
    pub(super) flags: Buffer<u8>,
}

/// One matrix of every expert that is here, by address; 0 for the others.
pub(super) struct Bank {
    data: Buffer<u64>,
    scales: Buffer<u64>,
    /// The memory behind the addresses.
    _kept: Vec<Buffer<u8>>,
}

impl Bank {
    /// As the grouped products take it.
    pub(super) fn experts(&self) -> Experts<'_> {
        Experts { data: &self.data, scales: &self.scales }
    }
}

/// The way to the device, and who is told how many bytes have gone it.
pub(super) struct Upload<'a> {
    pub(super) uploader: &'a mut Uploader,
    pub(super) progress: &'a mut dyn FnMut(u64) -> Result<()>,
}

/// Where weights go: an arena, and the way there unless it is only counted.
pub(super) struct Placer<'a> {
    pub(super) arena: &'a mut Arena,
    /// Experts of each layer that are placed, the first ones.
    pub(super) experts: usize,
    pub(super) upload: Option<Upload<'a>>,
    /// Bytes uploaded so far.
    pub(super) done: u64,
}

impl DeviceWeights {
    /// Places the weights.
    ///
    /// # Errors
    /// `OutOfMemory` if the arena is too small; `Unsupported` for a storage that the kernels do not read, naming the tensor;
    /// `Io`, `Corrupt` and `Numeric` of the checkpoint; whatever the upload's progress says.
    pub(super) fn place(weights: &Weights, p: &mut Placer<'_>) -> Result<Self> {
        let mut layers = alloc::with_capacity("layers on the device", weights.layers.len())?;
        let embed = match p.matrix(&weights.embed)? {
            Weight::Bf16(table) => table,
            _ => bail!(Unsupported, "{} is not bf16", weights.embed.tensor().name()),
        };
        for layer in &weights.layers {
            layers.push(p.layer(layer)?);
        }
        Ok(Self {
            embed,
            layers,
            head: p.matrix(&weights.head)?,
            norm: p.vector(&weights.norm)?,
            hc_head: p.hyper(&weights.hc_head)?,
        })
    }
}

impl Placer<'_> {
    fn layer(&mut self, w: &LayerWeights) -> Result<Layer> {
        Ok(Layer {
            attn_norm: self.vector(&w.attn_norm)?,
            ffn_norm: self.vector(&w.ffn_norm)?,
            hc_attn: self.hyper(&w.hc_attn)?,
            hc_ffn: self.hyper(&w.hc_ffn)?,
            attn: self.attention(&w.attn)?,
            ffn: self.moe(&w.ffn)?,
        })
    }

    fn attention(&mut self, w: &AttentionWeights) -> Result<Attention> {
        Ok(Attention {
            sink: self.vector(&w.sink)?,
            wq_a: self.matrix(&w.wq_a)?,
            q_norm: self.vector(&w.q_norm)?,
            wq_b: self.matrix(&w.wq_b)?,
            wkv: self.matrix(&w.wkv)?,
            kv_norm: self.vector(&w.kv_norm)?,
            wo_a: self.wo_a(&w.wo_a)?,
            wo_b: self.matrix(&w.wo_b)?,
            compressor: w.compressor.as_ref().map(|c| self.compressor(c)).transpose()?,
            indexer: w.indexer.as_ref().map(|i| self.indexer(i)).transpose()?,
        })
    }

    fn compressor(&mut self, w: &CompressorWeights) -> Result<Compressor> {
        Ok(Compressor {
            ape: self.vector(&w.ape)?,
            wkv: self.matrix(&w.wkv)?,
            wgate: self.matrix(&w.wgate)?,
            norm: self.vector(&w.norm)?,
        })
    }

    fn indexer(&mut self, w: &IndexerWeights) -> Result<Indexer> {
        Ok(Indexer {
            wq_b: self.matrix(&w.wq_b)?,
            weights_proj: self.matrix(&w.weights_proj)?,
            compressor: self.compressor(&w.compressor)?,
        })
    }

    fn moe(&mut self, w: &MoeWeights) -> Result<Moe> {
        let routing = match &w.routing {
            Routing::Bias(bias) => Route::Bias(self.vector(bias)?),
            Routing::Hash(table) => {
                if self.upload.is_some() {
                    // the kernel follows the ids unseen
                    table.check()?;
                }
                Route::Hash(self.bytes(table.tensor().name(), table.tensor().bytes())?.cast()?)
            }
        };
        let gate = self.matrix(&w.gate)?;
        let shared = [self.matrix(&w.shared.w1)?, self.matrix(&w.shared.w2)?, self.matrix(&w.shared.w3)?];
        let [w1, w2, w3] = [|e| &e.w1, |e| &e.w2, |e| &e.w3] as [fn(&ExpertWeights) -> &Matrix; 3];
        let format = expert_format(&w.experts)?;
        Ok(Moe {
            gate,
            routing,
            format,
            here: self.here(w.experts.len())?,
            w1: self.bank(&w.experts, w1)?,
            w2: self.bank(&w.experts, w2)?,
            w3: self.bank(&w.experts, w3)?,
            shared,
        })
    }

    /// Which of a layer's `experts` are placed, unless all are.
    fn here(&mut self, experts: usize) -> Result<Option<Here>> {
        if self.experts >= experts {
            return Ok(None);
        }
        let mut flags = alloc::with_capacity("experts on the device", experts)?;
        flags.extend((0..experts).map(|e| u8::from(e < self.experts)));
        Ok(Some(Here { flags: self.bytes("experts on the device", &flags)? }))
    }

    /// Refuses values that are not finite before they go up: kernels decode E4M3 by shifting bits, which makes a number of
    /// NaN, and choose experts and entries by comparing, where one would not show.
    fn check_finite(&self, m: &Matrix) -> Result<()> {
        if self.upload.is_none() {
            return Ok(());
        }
        let bytes = m.tensor().bytes();
        match m.format() {
            MatrixFormat::E4m3 => check(m.tensor().name(), first::<1>(bytes, |[b]| b & 0x7F == 0x7F))?,
            MatrixFormat::Bf16 => {
                check(m.tensor().name(), first::<2>(bytes, |b| !bf16_value(u16::from_le_bytes(b)).is_finite()))?;
            }
            MatrixFormat::F32 => check(m.tensor().name(), first::<4>(bytes, |b| !f32::from_le_bytes(b).is_finite()))?,
            MatrixFormat::E2m1 => {}
        }
        match (m.view().scales, m.scale()) {
            (Scales::E8m0(bytes), Some(scale)) => check(scale.name(), first::<1>(bytes, |[b]| b == 0xFF)),
            (Scales::F32(bytes), Some(scale)) => {
                check(scale.name(), first::<4>(bytes, |b| !f32::from_le_bytes(b).is_finite()))
            }
            _ => Ok(()),
        }
    }

    fn bank(&mut self, experts: &[ExpertWeights], which: fn(&ExpertWeights) -> &Matrix) -> Result<Bank> {
        let mut kept = alloc::with_capacity("experts on the device", 2 * experts.len())?;
        let mut addresses = [
            alloc::with_capacity("expert addresses", experts.len())?,
            alloc::with_capacity("expert addresses", experts.len())?,
        ];
        for (e, expert) in experts.iter().enumerate() {
            if e >= self.experts {
                addresses.iter_mut().for_each(|list| list.push(0));
                continue;
            }
            let matrix = which(expert);
            self.view(matrix)?;
            self.check_finite(matrix)?;
            let Some(scale) = matrix.scale() else {
                bail!(Unsupported, "{} has no scales", matrix.tensor().name());
            };
            for (list, tensor) in addresses.iter_mut().zip([matrix.tensor(), scale]) {
                let buffer = self.bytes(tensor.name(), tensor.bytes())?;
                list.push(buffer.address());
                kept.push(buffer);
            }
        }
        let [data, scales] = addresses;
        Ok(Bank {
            data: self.words("expert addresses", &data)?,
            scales: self.words("expert scales", &scales)?,
            _kept: kept,
        })
    }

    fn hyper(&mut self, w: &HyperWeights) -> Result<Hyper> {
        if w.mix.format() != MatrixFormat::F32 {
            bail!(Unsupported, "{} is not float32", w.mix.tensor().name());
        }
        self.view(&w.mix)?;
        self.check_finite(&w.mix)?;
        Ok(Hyper {
            basis: self.bytes(w.mix.tensor().name(), w.mix.tensor().bytes())?.cast()?,
            base: self.vector(&w.base)?,
            scale: self.vector(&w.scale)?,
        })
    }

    /// The matrix; its pages are read in only where they are about to be uploaded.
    fn view<'m>(&self, m: &'m Matrix) -> Result<MatrixRef<'m>> {
        if self.upload.is_some() { m.ready() } else { Ok(m.view()) }
    }

    fn matrix(&mut self, m: &Matrix) -> Result<Weight> {
        let view = self.view(m)?;
        self.check_finite(m)?;
        let name = m.tensor().name();
        match (m.format(), view.scales) {
            (MatrixFormat::Bf16, _) => Ok(Weight::Bf16(self.bytes(name, view.data)?.cast()?)),
            (MatrixFormat::E4m3, Scales::E8m0(scales)) => {
                Ok(Weight::E4m3 { data: self.bytes(name, view.data)?, scales: self.bytes(name, scales)? })
            }
            (MatrixFormat::E4m3, Scales::F32(scales)) => {
                Ok(Weight::E4m3F32 { data: self.bytes(name, view.data)?, scales: self.bytes(name, scales)?.cast()? })
            }
            (format, _) => bail!(Unsupported, "{name} is stored as {format:?}, which the GPU kernels do not read"),
        }
    }

    /// `wo_a`; with float32 scales as bf16.
    fn wo_a(&mut self, m: &Matrix) -> Result<Weight> {
        let view = self.view(m)?;
        let (MatrixFormat::E4m3, Scales::F32(scales)) = (m.format(), view.scales) else { return self.matrix(m) };
        self.check_finite(m)?;
        let buffer: Buffer<u16> = self.arena.take(m.tensor().name(), m.rows() * m.cols())?;
        if self.upload.is_some() {
            let mut bytes = alloc::with_capacity(m.tensor().name(), 2 * m.rows() * m.cols())?;
            let tiles = m.cols().div_ceil(TILE);
            for (i, &code) in view.data.iter().enumerate() {
                let tile = i / m.cols() / TILE * tiles + i % m.cols() / TILE;
                let scale = f32::from_le_bytes(std::array::from_fn(|b| scales[4 * tile + b]));
                bytes.extend_from_slice(&bf16_bits(E4M3[usize::from(code)] * scale).to_le_bytes());
            }
            self.send(&buffer.as_bytes(), &bytes)?;
        }
        Ok(Weight::Bf16(buffer))
    }

    fn vector(&mut self, v: &Vector) -> Result<Buffer<f32>> {
        let buffer: Buffer<f32> = self.arena.take(v.tensor().name(), v.len())?;
        if self.upload.is_some() {
            self.send_values(&buffer, v.finite()?)?;
        }
        Ok(buffer)
    }

    fn words(&mut self, what: &str, values: &[u64]) -> Result<Buffer<u64>> {
        let buffer: Buffer<u64> = self.arena.take(what, values.len())?;
        if self.upload.is_some() {
            self.send_values(&buffer, values)?;
        }
        Ok(buffer)
    }

    fn bytes(&mut self, what: &str, bytes: &[u8]) -> Result<Buffer<u8>> {
        let buffer = self.arena.take(what, bytes.len())?;
        self.send(&buffer, bytes)?;
        Ok(buffer)
    }

    fn send_values<T: Plain + ToBytes>(&mut self, to: &Buffer<T>, values: &[T]) -> Result<()> {
        let mut bytes = alloc::with_capacity("small weights", size_of_val(values))?;
        values.iter().for_each(|v| v.put(&mut bytes));
        self.send(&to.as_bytes(), &bytes)
    }

    fn send(&mut self, to: &Buffer<u8>, bytes: &[u8]) -> Result<()> {
        let before = self.done;
        let Some(Upload { uploader, progress }) = &mut self.upload else { return Ok(()) };
        uploader.upload(to, bytes, &mut |sent| progress(before + sent))?;
        self.done += bytes.len() as u64;
        Ok(())
    }
}

/// An error that names the element of tensor `name` that is not finite, if one is.
fn check(name: &str, bad: Option<usize>) -> Result<()> {
    match bad {
        None => Ok(()),
        Some(i) => bail!(Numeric, "element {i} of {name} is not finite; `dsv4 verify --scan` tells more"),
    }
}

/// The first element of `N` bytes that is `bad`; a piece at a time, so that the search runs at the speed of memory.
fn first<const N: usize>(bytes: &[u8], bad: impl Fn([u8; N]) -> bool) -> Option<usize> {
    const PIECE: usize = 4096;
    let (elements, _) = bytes.as_chunks::<N>();
    let has = |piece: &[[u8; N]]| piece.iter().fold(false, |found, &element| found | bad(element));
    let piece = elements.chunks(PIECE).position(has)?;
    elements[piece * PIECE..].iter().position(|&element| bad(element)).map(|i| piece * PIECE + i)
}

/// Numbers with a device byte order, which is little-endian.
trait ToBytes: Copy {
    fn put(self, out: &mut Vec<u8>);
}

impl ToBytes for f32 {
    fn put(self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.to_le_bytes());
    }
}

impl ToBytes for u64 {
    fn put(self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.to_le_bytes());
    }
}

fn expert_format(experts: &[ExpertWeights]) -> Result<ExpertFormat> {
    let mut format = None;
    for m in experts.iter().flat_map(|e| [&e.w1, &e.w2, &e.w3]) {
        let found = match (m.format(), m.view().scales) {
            (MatrixFormat::E2m1, Scales::E8m0(_)) => ExpertFormat::E2m1,
            (MatrixFormat::E4m3, Scales::E8m0(_)) => ExpertFormat::E4m3,
            (MatrixFormat::E4m3, Scales::F32(_)) => ExpertFormat::E4m3F32,
            (other, _) => {
                bail!(Unsupported, "{} is stored as {other:?}, which the GPU kernels do not read", m.tensor().name())
            }
        };
        if *format.get_or_insert(found) != found {
            bail!(Unsupported, "{} is stored otherwise than the layer's other experts", m.tensor().name());
        }
    }
    match format {
        Some(format) => Ok(format),
        None => bail!(Unsupported, "a layer without experts"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_bad_element_is_found_in_any_piece() {
        let mut bytes = vec![0u8; 2 * 10_000];
        let seven = |b: [u8; 2]| u16::from_le_bytes(b) == 7;
        assert_eq!(first(&bytes, seven), None);
        for at in [9_999, 4_096, 4_095, 0] {
            bytes[2 * at] = 7;
            assert_eq!(first(&bytes, seven), Some(at));
        }
    }
}
