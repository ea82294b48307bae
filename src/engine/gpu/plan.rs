//! What an engine takes of a device's memory, decided before anything is allocated.

use super::choices::EDITS;
use super::scratch::{Scratch, Size};
use super::tables::table_blocks;
use super::weights::{DeviceWeights, Placer};
use crate::backend::cuda::device::Gpu;
use crate::backend::cuda::memory::Arena;
use crate::backend::cuda::ops::{DrawWords, EditWords, HEAD_DIM, INDEX_DIM, MAX_WIDTH, ROPE_DIM};
use crate::cache::{BLOCK_TOKENS, CacheLayout, KvFormat};
use crate::engine::EngineOptions;
use crate::error::{Error, ErrorKind, Result, bail};
use crate::model::config::Config;
use crate::model::{Model, Numerics};

/// Tokens of a step where the options leave it open.
const ROWS: usize = 2048;
/// Tokens of a step whose attention always cuts keys; its workspace is large.
const INVARIANT_ROWS: usize = super::scratch::SPLIT_ROWS;
/// Of what dense weights and steps leave, the cache has this part before experts get any, where not all fit.
const CACHE_SHARE: u64 = 8;
/// Left to the driver, to kernels' stacks and to other programs.
const RESERVE: u64 = 512 << 20;
/// The two frequency tables.
const FREQUENCY_BYTES: u64 = 1024;
/// Sequences of a step.
pub(super) const SEQUENCES: usize = 256;
/// Blocks of all sequences of a step together for which there are page tables, unless one sequence may be longer.
const TABLE_BLOCKS: usize = 16_384;

/// Bytes of each purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// Weights, as stored.
    pub(super) weights: u64,
    /// Experts of each layer among them.
    pub(super) experts: usize,
    /// Memory of the largest step.
    pub(super) step: u64,
    /// Tables of rows, sequences and pages.
    pub(super) tables: u64,
    /// Words of those that are written every step; the page tables come behind them.
    pub(super) small_words: usize,
    /// Blocks of all sequences of a step together, each with as many as the longest, for which there are page tables.
    pub(super) table_blocks: usize,
    /// Pages.
    pub(super) cache: u64,
    /// Tokens of the largest step.
    pub(super) rows: usize,
}

impl Plan {
    /// Words of all tables.
    pub(super) fn words(&self) -> usize {
        (self.tables - FREQUENCY_BYTES) as usize / 4
    }

    /// The plan for what is free on `gpu` now.
    pub(super) fn new(gpu: &Gpu, model: &Model, options: &EngineOptions, layout: &CacheLayout) -> Result<Self> {
        let config = model.config();
        let weights_with = |experts: usize| -> Result<u64> {
            let mut arena = Arena::counting();
            DeviceWeights::place(model.weights(), &mut Placer { arena: &mut arena, experts, upload: None, done: 0 })?;
            Ok(arena.used())
        };
        let rows = match (options.prefill_chunk, options.batch_invariant) {
            (0, false) => ROWS,
            (0, true) => INVARIANT_ROWS,
            (chunk, false) => chunk,
            (chunk, true) => chunk.min(INVARIANT_ROWS),
        };
        let mut arena = Arena::counting();
        let positions = config.max_position_embeddings;
        let blocks = table_blocks(positions.div_ceil(BLOCK_TOKENS));
        Scratch::new(&mut arena, config, Size { rows, visible: blocks * BLOCK_TOKENS / 4, is_shared_out: true })?;
        let step = arena.used();

        let small_words = small_words(layout, rows);
        let table_blocks = blocks.max(TABLE_BLOCKS);
        let page_words = 2 * table_blocks * layout.layers.len();
        let tables = FREQUENCY_BYTES + 4 * (small_words + page_words) as u64;

        let (free, total) = gpu.memory()?;
        let budget = if options.gpu_bytes == 0 { free } else { free.min(options.gpu_bytes) };
        let beside = step + tables + RESERVE;
        let refused = |what: &str, bytes: u64, weights: u64| {
            Error::new(
                ErrorKind::OutOfMemory,
                format!(
                    "{what}: {bytes} bytes do not fit on {} ({free} of {total} bytes are free, {budget} may be used): {weights} \
                     bytes of weights, {step} for steps of {rows} tokens (prefill_chunk), {RESERVE} left alone",
                    gpu.limits().name
                ),
            )
        };
        let (dense, all, slab) = (weights_with(0)?, config.n_routed_experts, layout.slab_bytes());
        let experts = match options.gpu_experts {
            Some(experts) if experts > all => {
                bail!(InvalidArgument, "gpu_experts is {experts}; a layer has {all} experts")
            }
            Some(experts) => experts,
            None => {
                let room = budget.saturating_sub(dense + beside);
                let cache = if options.cache_bytes == 0 { room / CACHE_SHARE } else { options.cache_bytes };
                fitting(all, room.saturating_sub(cache / slab * slab), |experts| Ok(weights_with(experts)? - dense))?
            }
        };
        let weights = if experts == 0 { dense } else { weights_with(experts)? };
        let fixed = weights + beside;
        let room = budget.checked_sub(fixed).ok_or_else(|| refused("the model", fixed, weights))?;
        let wanted = match options.cache_bytes {
            // what is left over serves nobody else
            0 if options.gpu_experts.is_none() && experts < all => room,
            0 => room / 2,
            bytes => bytes,
        };
        let cache = wanted / slab * slab;
        if cache > room {
            return Err(refused("cache_bytes", wanted, weights));
        }
        if cache == 0 {
            bail!(
                InvalidArgument,
                "a cache of {wanted} bytes; on a GPU it grows by {slab} bytes, so at least that many"
            );
        }
        Ok(Self { weights, experts, step, tables, small_words, table_blocks, cache, rows })
    }
}

/// The largest number of `all` experts a layer whose bytes fit into `room`.
fn fitting(all: usize, room: u64, bytes: impl Fn(usize) -> Result<u64>) -> Result<usize> {
    if bytes(all)? <= room {
        return Ok(all);
    }
    // `low` fits, `high` does not
    let (mut low, mut high) = (0, all);
    while high - low > 1 {
        let middle = low.midpoint(high);
        if bytes(middle)? <= room {
            low = middle;
        } else {
            high = middle;
        }
    }
    Ok(low)
}

/// Words of the tables of rows and sequences in the largest step of `rows` tokens.
fn small_words(layout: &CacheLayout, rows: usize) -> usize {
    let sequences = rows.min(SEQUENCES);
    let of_sequence: usize = (0..layout.layers.len())
        .map(|i| layout.ring_pages() + 2 * layout.main_state_pages(i).1 + 2 * layout.index_state_pages(i))
        .sum();
    // a row has an id, a position, a sequence, perhaps logits, and in the worst case a group, a zero and a list of its own; a
    // sequence two entries in lists, and perhaps a draw; each table may leave three words unused
    let of_choices = sequences * size_of::<DrawWords>() / 4 + EDITS * size_of::<EditWords>() / 4;
    let unused = 4 * (11 + 4 * layout.layers.len() + 3 * sequences);
    (rows * (4 + 4 + 1 + 4) + sequences * (4 + 4 + 8 + of_sequence) + of_choices + unused).next_multiple_of(64)
}

/// Whether the GPU's kernels are written for the model and the options.
pub(super) fn check_model(c: &Config, options: &EngineOptions, format: KvFormat) -> Result<()> {
    if options.numerics == Numerics::Exact {
        bail!(Unsupported, "numerics exact computes in float32, which the GPU kernels do not: use device cpu");
    }
    if format != KvFormat::Fp8 {
        bail!(Unsupported, "the GPU kernels read a cache of format fp8 only, not {format}: use device cpu for others");
    }
    let exactly = [
        ("head_dim", c.head_dim, HEAD_DIM),
        ("qk_rope_head_dim", c.qk_rope_head_dim, ROPE_DIM),
        ("index_head_dim", c.index_head_dim, INDEX_DIM),
    ];
    for (key, value, needed) in exactly {
        if value != needed {
            bail!(Unsupported, "{key} is {value}; the GPU kernels are written for {needed}");
        }
    }
    let at_most = [
        ("hidden_size", c.hidden_size, MAX_WIDTH),
        ("q_lora_rank", c.q_lora_rank, MAX_WIDTH),
        ("o_groups", c.o_groups, 16),
        ("n_routed_experts", c.n_routed_experts, 512),
        ("num_experts_per_tok", c.num_experts_per_tok, 16),
        ("index_n_heads", c.index_n_heads, 64),
        ("index_topk", c.index_topk, 1024),
    ];
    for (key, value, most) in at_most {
        if value > most {
            bail!(Unsupported, "{key} is {value}; the GPU kernels take at most {most}");
        }
    }
    for (key, value, of) in [("o_lora_rank", c.o_lora_rank, 128), ("index_n_heads", c.index_n_heads, 8)] {
        if !value.is_multiple_of(of) {
            bail!(Unsupported, "{key} is {value}; the GPU kernels need a multiple of {of}");
        }
    }
    Ok(())
}
