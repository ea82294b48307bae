//! Where the weights of routed experts are while a step uses them: in the mapped checkpoint, or in a bounded part of host
//! memory into which they are read when they were chosen.
//!
//! The bytes are the checkpoint's either way, so results are the same to the last bit. What a mapping has no memory for,
//! the system reads again page by page, and drops pages of others for it; here whole experts are read, those that a layer
//! chose all at once, and what is there stays by how often it is used ([`BufferPool`]).
#![forbid(unsafe_code)]

use crate::alloc;
use crate::error::{Result, bail};
use crate::model::config::Config;
use crate::model::weights::{ExpertWeights, Matrix, MoeWeights, Routing, Weights};
use crate::tensor::MatrixRef;
pub(crate) use crate::weights::PoolStats;
use crate::weights::buffer_pool::{BufferPool, Loaded, Pieces};

/// Tensors of an expert: three matrices with their scales.
const TENSORS: usize = 6;

/// An expert whose weights can be read without touching the disk.
pub(crate) struct ReadyExpert<'a> {
    pub(crate) id: usize,
    pub(crate) w1: MatrixRef<'a>,
    pub(crate) w2: MatrixRef<'a>,
    pub(crate) w3: MatrixRef<'a>,
}

/// Where the experts of a layer are.
#[derive(Clone, Copy)]
pub(crate) struct Home<'a> {
    /// `None` is the mapped checkpoint.
    pub(crate) tier: Option<&'a ExpertTier>,
    /// The layer.
    pub(crate) layer: usize,
}

impl Home<'_> {
    /// Calls `work` with the experts `active`, ascending, in parts: once with all of them, or first with those that are in
    /// memory, perhaps none, and then with more as they come from the disk. Those of a part are in ascending order.
    ///
    /// # Errors
    /// The first of `work`; `Io` and `Corrupt` of weights that cannot be read, naming file and tensor.
    pub(crate) fn with_ready(
        self,
        w: &MoeWeights,
        active: &[usize],
        work: &mut dyn FnMut(&[ReadyExpert<'_>]) -> Result<()>,
    ) -> Result<()> {
        let Some(tier) = self.tier else {
            let mut ready = alloc::with_capacity("the experts of a step", active.len())?;
            for &id in active {
                let ExpertWeights { w1, w2, w3 } = &w.experts[id];
                ready.push(ReadyExpert { id, w1: w1.ready()?, w2: w2.ready()?, w3: w3.ready()? });
            }
            return work(&ready);
        };
        tier.pool.fetch(self.layer, active, &mut |loaded| {
            let mut ready = alloc::with_capacity("the experts of a step", loaded.len())?;
            ready.extend(loaded.iter().map(|(id, loaded)| expert_in(*id, &w.experts[*id], loaded)));
            work(&ready)
        })
    }
}

/// Tensors in the order in which they are in a piece.
fn tensors(expert: &ExpertWeights) -> [(&Matrix, usize); 3] {
    [(&expert.w1, 0), (&expert.w2, 2), (&expert.w3, 4)]
}

fn expert_in<'a>(id: usize, expert: &ExpertWeights, loaded: &'a Loaded) -> ReadyExpert<'a> {
    let [w1, w2, w3] = tensors(expert).map(|(matrix, at)| matrix.over(loaded.bytes(at), loaded.bytes(at + 1)));
    ReadyExpert { id, w1, w2, w3 }
}

/// Routed experts in a bounded part of host memory.
pub(crate) struct ExpertTier {
    pool: BufferPool,
}

/// What an [`ExpertTier`] takes of host memory, decided before anything is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TierPlan {
    /// Experts for which there is room at a time.
    pub(crate) frames: usize,
    /// Bytes for each of them.
    pub(crate) frame_bytes: u64,
}

impl TierPlan {
    /// What `host_bytes` of host memory hold where `elsewhere` experts, of all layers, are not the host's. `None` if there is
    /// no limit, if all others fit, which the mapped checkpoint serves as well, or if the checkpoint is in memory anyway.
    ///
    /// # Errors
    /// `InvalidArgument` if there is no room for the experts of one token, with the bytes of these; `OutOfMemory`.
    pub(crate) fn new(weights: &Weights, config: &Config, host_bytes: u64, elsewhere: usize) -> Result<Option<Self>> {
        let experts = weights.layers.len() * config.n_routed_experts;
        let on_host = experts.saturating_sub(elsewhere);
        let all = weights.layers.iter().flat_map(|layer| layer.ffn.experts.iter().flat_map(tensors));
        // all are of one size
        let bytes = all.map(|(matrix, _)| matrix.byte_len() as u64).sum::<u64>() / experts as u64 * on_host as u64;
        if host_bytes == 0 || bytes <= host_bytes {
            return Ok(None);
        }
        let Some(pieces) = pieces(weights, config.n_routed_experts)? else { return Ok(None) };
        let frame_bytes = pieces.frame_bytes() as u64;
        let least = config.num_experts_per_tok as u64;
        if host_bytes / frame_bytes < least {
            bail!(
                InvalidArgument,
                "host_bytes is {host_bytes}; the {least} experts of a token need {} bytes, {frame_bytes} each, and all \
                 {on_host} experts {bytes} (0 is no limit)",
                least * frame_bytes
            );
        }
        let frames = usize::try_from(host_bytes / frame_bytes).unwrap_or(usize::MAX).min(on_host);
        Ok(Some(Self { frames, frame_bytes }))
    }

    /// Bytes of host memory in all.
    pub(crate) fn bytes(&self) -> u64 {
        self.frames as u64 * self.frame_bytes
    }
}

/// All experts of the trunk as pieces, those of a layer a group.
fn pieces(weights: &Weights, of_layer: usize) -> Result<Option<Pieces>> {
    let mut list = alloc::with_capacity("the list of experts", weights.layers.len() * of_layer * TENSORS)?;
    for (matrix, _) in weights.layers.iter().flat_map(|layer| layer.ffn.experts.iter().flat_map(tensors)) {
        let Some(scale) = matrix.scale() else {
            bail!(Unsupported, "{} has no scales; host_bytes is for quantised experts", matrix.tensor().name());
        };
        list.extend([matrix.tensor().clone(), scale.clone()]);
    }
    Ok(Pieces::new(list, TENSORS, of_layer))
}

impl ExpertTier {
    /// Takes the memory of `plan`, which was made from the same weights.
    ///
    /// # Errors
    /// `OutOfMemory` with the bytes; `Unavailable` if no thread can be started.
    pub(crate) fn new(weights: &Weights, config: &Config, plan: TierPlan) -> Result<Self> {
        let Some(pieces) = pieces(weights, config.n_routed_experts)? else {
            bail!(InvalidArgument, "a plan for experts that are in memory already");
        };
        Ok(Self { pool: BufferPool::new(pieces, plan.frames)? })
    }

    /// Tells that a step with the tokens `ids` begins with `layer`: where experts follow from token ids, those of this layer
    /// and of the next that are the host's (`is_here` of layer and expert) are read ahead, while attention and the other layer
    /// are computed.
    pub(crate) fn expect(
        &self,
        weights: &Weights,
        layer: usize,
        ids: &(impl Iterator<Item = u32> + Clone),
        is_here: impl Fn(usize, usize) -> bool,
    ) {
        for (i, layer_weights) in weights.layers.iter().enumerate().skip(layer).take(2) {
            let Routing::Hash(table) = &layer_weights.ffn.routing else { continue };
            // a token or row that is wrong is an error where it is used
            let chosen = ids.clone().filter_map(|id| table.row(id).ok()).flatten();
            // without room for a list nothing is read ahead
            let Ok(mut experts) = alloc::with_capacity("experts to read ahead", layer_weights.ffn.experts.len()) else {
                return;
            };
            for expert in chosen.filter(|&expert| is_here(i, expert)) {
                if !experts.contains(&expert) {
                    experts.push(expert);
                }
            }
            self.pool.expect(i, &experts);
        }
    }

    /// Figures now.
    pub(crate) fn stats(&self) -> PoolStats {
        self.pool.stats()
    }
}
