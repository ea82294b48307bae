//! Memory of one step, laid out for its number of rows and sequences.
//!
//! The plan is this same layout on a counting arena with the largest step. What attention and the feed-forward half use
//! lies at the same place, since they are never at work together.

use std::ops::Range;

use super::DECODE_ROWS;
use super::tables::Part;
use crate::backend::cuda::memory::{Arena, Buffer, Plain};
use crate::backend::cuda::ops::{
    Compressor, GROUP_ROWS, Grouping, HEAD_DIM, INDEX_DIM, MIX_FLOATS, ROW_BYTES, STREAMS, highest_len, is_for_tiles,
    parts_len, top_k_parts,
};
use crate::error::Result;
use crate::model::config::{Config, LayerKind};

/// Rows whose attention is cut by keys: more fill a device by themselves.
pub(super) const SPLIT_ROWS: usize = 64;
/// Rows whose logits are computed at once.
pub(super) const LOGIT_ROWS: usize = 128;
/// float32 index scores kept at once, where the context is not so long that a group of rows needs more.
const SCORES: usize = 16 << 20;
/// float32 values of workspace for products of few tokens.
const WORKSPACE: usize = 16 << 20;
/// Runs of keys in the attention workspace.
const RUNS: usize = 32;
/// Tokens of a step that can be taken back.
const UNDO_ROWS: usize = 64;
/// Pairs of a rotation.
const TURNS: usize = 32;
/// Most candidates of a top-k over several blocks, in rows of k: scores kept at once over those that a block sees, twice,
/// since a row's last block may be nearly empty.
const CANDIDATES: usize = 2 * SCORES / 16_384;

/// Sizes of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Size {
    /// Tokens.
    pub(super) rows: usize,
    /// Bound of the compressed entries of ratio 4 that any row sees, at least 1.
    pub(super) visible: usize,
    /// Whether the host computes some experts.
    pub(super) is_shared_out: bool,
}

/// Buffers of a step.
#[derive(Clone)]
pub(super) struct Scratch {
    /// `[4, rows, 32]`, see `ops::rotations`.
    pub(super) turns: Buffer<[f32; 2]>,
    /// The step's flag, and tokens chosen from `LOGIT_ROWS` rows at once: together, and each alone.
    pub(super) outcome: Buffer<u32>,
    /// 1: set if a value is not finite.
    pub(super) bad: Buffer<u32>,
    pub(super) tokens: Buffer<u32>,
    /// Residual streams `[rows, STREAMS, D]`, read and written in turn.
    pub(super) streams: [Buffer<u16>; 2],
    /// `[rows, 24]`.
    pub(super) mixes: Buffer<f32>,
    pub(super) parts: Buffer<f32>,
    /// A half's input `[rows, D]`, its copy on the E4M3 grid, and its output.
    pub(super) input: Buffer<u16>,
    pub(super) quantised: Buffer<u16>,
    pub(super) output: Buffer<u16>,
    /// New window rows `[layers, rows, ROW_BYTES]`.
    pub(super) staged: Buffer<u8>,
    pub(super) workspace: Buffer<f32>,
    /// A compressor state, and window rows `[tokens, layers]`, for taking tokens back.
    pub(super) undo_state: Buffer<u8>,
    pub(super) undo_rows: Buffer<u8>,
    pub(super) attention: Attention,
    pub(super) ffn: Ffn,
    /// Hidden states `[LOGIT_ROWS, D]` and logits `[LOGIT_ROWS, vocab]` of rows that are wanted.
    pub(super) hidden: Buffer<u16>,
    pub(super) logits: Buffer<f32>,
}

/// Buffers of the attention half.
#[derive(Clone)]
pub(super) struct Attention {
    /// `[rows, q_lora_rank]`: as projected, normalised, and on the E4M3 grid.
    pub(super) q_lora: [Buffer<u16>; 3],
    /// `[rows, heads, 512]`.
    pub(super) q: Buffer<u16>,
    pub(super) out: Buffer<u16>,
    /// `[rows, 512]`.
    pub(super) kv: Buffer<u16>,
    /// Values and gates of the main compressor, up to `[rows, 1024]`, and of the index compressor `[rows, 256]`.
    pub(super) main: [Buffer<f32>; 2],
    pub(super) index: [Buffer<f32>; 2],
    /// `[rows, index heads, 128]` and `[rows, index heads]`.
    pub(super) index_q: Buffer<u16>,
    pub(super) index_weights: Buffer<u16>,
    /// `[rows, index_topk]` and `[rows]`.
    pub(super) selected: Buffer<u32>,
    pub(super) counts: Buffer<u32>,
    /// `[score rows, visible]`, their highest `[score rows, highest_len]`, and the candidates of a top-k in several blocks.
    pub(super) scores: Buffer<f32>,
    pub(super) highest: Buffer<u16>,
    pub(super) part_scores: Buffer<f32>,
    pub(super) part_ids: Buffer<u32>,
    /// Partial outputs and sums of split attention.
    pub(super) split: Buffer<f32>,
    pub(super) split_sums: Buffer<[f32; 2]>,
    /// `[rows, groups * rank]`, and its copy on the E4M3 grid.
    pub(super) low: [Buffer<u16>; 2],
}

/// Buffers of the feed-forward half.
#[derive(Clone)]
pub(super) struct Ffn {
    /// `[rows, experts]`.
    pub(super) logits: Buffer<f32>,
    /// `[rows, top_k]`: the router's choice, of which the grouping may have the device's part alone.
    pub(super) ids: Buffer<u32>,
    pub(super) weights: Buffer<f32>,
    pub(super) groups: Grouping,
    /// Inputs of the experts as Hopper's kernels read them.
    pub(super) images: Buffer<f32>,
    /// `[rows * top_k, 2 * inter]`, `[rows * top_k, inter]`, `[rows * top_k, D]`.
    pub(super) gate_up: Buffer<u16>,
    pub(super) active: Buffer<u16>,
    pub(super) routed: Buffer<u16>,
    /// The same of the shared expert, `[rows, ..]`.
    pub(super) shared_gate_up: Buffer<u16>,
    pub(super) shared_active: Buffer<u16>,
    pub(super) shared: Buffer<u16>,
}

impl Scratch {
    /// Takes the buffers of a step of `size` from the start of `arena`.
    ///
    /// # Errors
    /// `OutOfMemory` if the plan was made for smaller steps.
    pub(super) fn new(arena: &mut Arena, c: &Config, size: Size) -> Result<Self> {
        arena.restart();
        let rows = size.rows;
        let d = c.hidden_size;
        let logit_rows = rows.min(LOGIT_ROWS);
        let kinds = [Compressor::Main4, Compressor::Index4, Compressor::Main128];
        let undo_state = kinds.map(|kind| kind.state_pages() * kind.page_bytes()).into_iter().max().unwrap_or(0);
        let (attention, ffn) = arena
            .overlap(|arena| Attention::new(arena, c, size), |arena| Ffn::new(arena, c, rows, size.is_shared_out))?;
        let outcome = arena.take("a flag and tokens", 1 + LOGIT_ROWS)?;
        let mut bf16 = |what, len| arena.take::<u16>(what, len);
        Ok(Self {
            attention,
            ffn,
            bad: outcome.slice(0..1)?,
            tokens: outcome.slice(1..1 + LOGIT_ROWS)?,
            outcome,
            streams: [bf16("residual streams", rows * STREAMS * d)?, bf16("residual streams", rows * STREAMS * d)?],
            input: bf16("sub-layer input", rows * d)?,
            quantised: bf16("quantised sub-layer input", rows * d)?,
            output: bf16("sub-layer output", rows * d)?,
            hidden: bf16("final hidden states", logit_rows * d)?,
            turns: arena.take("rotations", 4 * rows * TURNS)?,
            mixes: arena.take("mixing coefficients", rows * MIX_FLOATS)?,
            parts: arena.take("partial sums of projections", parts_len(rows, d))?,
            staged: arena.take("staged window rows", c.num_hidden_layers * rows * ROW_BYTES)?,
            workspace: arena.take("workspace of products", WORKSPACE)?,
            undo_state: arena.take("a compressor state", undo_state)?,
            undo_rows: arena.take("window rows to keep", rows.min(UNDO_ROWS) * c.num_hidden_layers * ROW_BYTES)?,
            logits: arena.take("logits", logit_rows * c.vocab_size)?,
        })
    }
}

impl Scratch {
    /// The same with the rows of `part` alone where the feed-forward half has rows.
    ///
    /// # Errors
    /// If there are fewer.
    pub(super) fn ffn_part(&self, c: &Config, part: &Part) -> Result<Self> {
        let Range { start, end } = part.rows;
        fn of<T: Plain>(buffer: &Buffer<T>, (start, end): (usize, usize), width: usize) -> Result<Buffer<T>> {
            buffer.slice(start * width..end * width)
        }
        let (d, inter, top_k) = (c.hidden_size, c.moe_intermediate_size, c.num_experts_per_tok);
        let (rows, b) = ((start, end), &self.ffn);
        let ffn = Ffn {
            logits: of(&b.logits, rows, c.n_routed_experts)?,
            ids: of(&b.ids, rows, top_k)?,
            weights: of(&b.weights, rows, top_k)?,
            groups: b.groups.part(start * top_k..end * top_k, part.is_prompt)?,
            images: b.images.clone(),
            gate_up: of(&b.gate_up, rows, top_k * 2 * inter)?,
            active: of(&b.active, rows, top_k * inter)?,
            routed: of(&b.routed, rows, top_k * d)?,
            shared_gate_up: of(&b.shared_gate_up, rows, 2 * inter)?,
            shared_active: of(&b.shared_active, rows, inter)?,
            shared: of(&b.shared, rows, d)?,
        };
        Ok(Self {
            ffn,
            input: of(&self.input, rows, d)?,
            quantised: of(&self.quantised, rows, d)?,
            output: of(&self.output, rows, d)?,
            ..self.clone()
        })
    }
}

impl Attention {
    fn new(arena: &mut Arena, c: &Config, size: Size) -> Result<Self> {
        let Size { rows, visible, .. } = size;
        let (width, index_heads) = (c.num_attention_heads * HEAD_DIM, c.index_n_heads);
        let has_index = c.layers.contains(&LayerKind::C4a);
        // rows of what only some layers have
        let (compressed, indexed) = (
            if has_index || c.layers.contains(&LayerKind::C128a) { rows } else { 0 },
            if has_index { rows } else { 0 },
        );
        let candidates = match top_k_parts(visible, c.index_topk) {
            0 => 0,
            parts => (CANDIDATES * c.index_topk).max(GROUP_ROWS * parts),
        };
        let scores = if has_index { SCORES.max(GROUP_ROWS * visible) } else { 0 };
        let split = rows.min(SPLIT_ROWS) * RUNS * c.num_attention_heads;
        let mut bf16 = |what, len| arena.take::<u16>(what, len);
        let q_lora = [
            bf16("low-rank queries", rows * c.q_lora_rank)?,
            bf16("low-rank queries", rows * c.q_lora_rank)?,
            bf16("low-rank queries", rows * c.q_lora_rank)?,
        ];
        let low_width = c.o_groups * c.o_lora_rank;
        Ok(Self {
            q_lora,
            q: bf16("queries", rows * width)?,
            out: bf16("attention output", rows * width)?,
            kv: bf16("KV rows", rows * HEAD_DIM)?,
            index_q: bf16("index queries", indexed * index_heads * INDEX_DIM)?,
            index_weights: bf16("index weights", indexed * index_heads)?,
            highest: bf16("highest index scores", highest_len(scores) + indexed)?,
            low: [bf16("low-rank output", rows * low_width)?, bf16("low-rank output", rows * low_width)?],
            main: [
                arena.take("compressor values", compressed * 2 * HEAD_DIM)?,
                arena.take("compressor gates", compressed * 2 * HEAD_DIM)?,
            ],
            index: [
                arena.take("index compressor values", indexed * 2 * INDEX_DIM)?,
                arena.take("index compressor gates", indexed * 2 * INDEX_DIM)?,
            ],
            selected: arena.take("selected entries", indexed * c.index_topk)?,
            counts: arena.take("counts of selected entries", indexed)?,
            scores: arena.take("index scores", scores)?,
            part_scores: arena.take("top-k candidates", candidates)?,
            part_ids: arena.take("top-k candidates", candidates)?,
            split: arena.take("partial attention", split * HEAD_DIM)?,
            split_sums: arena.take("sums of partial attention", split)?,
        })
    }
}

impl Ffn {
    fn new(arena: &mut Arena, c: &Config, rows: usize, is_shared_out: bool) -> Result<Self> {
        let (d, inter, places) = (c.hidden_size, c.moe_intermediate_size, rows * c.num_experts_per_tok);
        let ids = arena.take("expert ids", places)?;
        let own = if is_shared_out { arena.take("expert ids of the device", places)? } else { Buffer::clone(&ids) };
        let groups = Grouping::new(arena, own, c.n_routed_experts)?;
        // a prompt needs them, however short
        let in_tiles = rows > DECODE_ROWS || is_for_tiles(rows, places, c.n_routed_experts);
        let images = if in_tiles { groups.images_len(d.max(inter)) } else { 0 };
        Ok(Self {
            ids,
            logits: arena.take("router logits", rows * c.n_routed_experts)?,
            weights: arena.take("expert weights", places)?,
            groups,
            images: arena.take("arranged expert inputs", images)?,
            gate_up: arena.take("expert gates", places * 2 * inter)?,
            active: arena.take("expert activations", places * inter)?,
            routed: arena.take("expert outputs", places * d)?,
            shared_gate_up: arena.take("shared expert gates", rows * 2 * inter)?,
            shared_active: arena.take("shared expert activations", rows * inter)?,
            shared: arena.take("shared expert output", rows * d)?,
        })
    }
}
