//! `kernels/moe.cu`: router, grouping by expert, grouped products, SwiGLU, sum.

use std::ops::Range;

use super::super::memory::{Arena, Buffer};
use super::super::stream::Stream;
use super::linear::{Job, RawJob, check, linear, many_shared, stream_blocks, stream_shared, streams, weight_bytes};
use super::{Launch, Params, at_least, chain, exact, multiple, rows, wide, word};
use crate::error::{Result, bail};

/// Limits of the kernels' registers and shared memory.
const MAX_EXPERTS: usize = 512;
const MAX_TOP_K: usize = 16;
/// Places that a block takes at a time where there are few.
const FEW_PLACES: usize = 8;
/// Tokens up to which one block a (row tile, expert) is used instead of tiles of 64 places.
pub(super) const FEW_TOKENS: usize = 64;

/// How experts are chosen.
pub(crate) enum Routing<'a> {
    /// By affinity plus this bias `[experts]`.
    Bias(&'a Buffer<f32>),
    /// By token id: table `[vocab, top_k]`.
    Hash(&'a Buffer<i64>),
}

/// Arguments of [`route`].
pub(crate) struct Route<'a> {
    /// `[tokens, experts]`.
    pub(crate) logits: &'a Buffer<f32>,
    pub(crate) routing: Routing<'a>,
    /// `[tokens]` ids; [`super::IDLE`] chooses nobody, which is expert `experts`.
    pub(crate) tokens: &'a Buffer<u32>,
    /// `[tokens, top_k]`, best first.
    pub(crate) ids: &'a Buffer<u32>,
    /// `[tokens, top_k]`.
    pub(crate) weights: &'a Buffer<f32>,
    pub(crate) experts: usize,
    pub(crate) top_k: usize,
    pub(crate) scale: f32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct RouteParams {
    logits: u64,
    bias: u64,
    table: u64,
    tokens: u64,
    ids: u64,
    weights: u64,
    count: u32,
    experts: u32,
    top_k: u32,
    scale: f32,
}
// SAFETY: mirrors `RouteParams`.
unsafe impl Params for RouteParams {}

fn check_experts(experts: usize, top_k: usize) -> Result<()> {
    if experts == 0 || experts > MAX_EXPERTS || top_k == 0 || top_k > MAX_TOP_K.min(experts) {
        bail!(Unsupported, "top {top_k} of {experts} experts; the GPU kernels take {MAX_TOP_K} of {MAX_EXPERTS}");
    }
    Ok(())
}

/// Experts of each token and their weights.
pub(crate) fn route(stream: &Stream, a: &Route<'_>) -> Result<()> {
    check_experts(a.experts, a.top_k)?;
    let tokens = a.ids.len() / a.top_k;
    exact("the expert ids", a.ids, tokens * a.top_k)?;
    exact("the expert weights", a.weights, tokens * a.top_k)?;
    exact("the router logits", a.logits, tokens * a.experts)?;
    exact("the token ids", a.tokens, tokens)?;
    let (mut bias, mut table) = (0, 0);
    match a.routing {
        Routing::Bias(b) => {
            exact("the router bias", b, a.experts)?;
            bias = b.address();
        }
        // token ids were checked against the vocabulary when the step was made
        Routing::Hash(t) => {
            multiple("the length of the routing table", t.len(), a.top_k)?;
            table = t.address();
        }
    }
    let params = RouteParams {
        logits: a.logits.address(),
        bias,
        table,
        tokens: a.tokens.address(),
        ids: a.ids.address(),
        weights: a.weights.address(),
        count: word("tokens", tokens)?,
        experts: a.experts as u32,
        top_k: a.top_k as u32,
        scale: a.scale,
    };
    let kernel = stream.gpu().kernel("route")?;
    // SAFETY: sizes checked above.
    unsafe { stream.launch(kernel, rows(tokens.div_ceil(4), 128), &params) }
}

/// Assignments sorted by expert. All buffers but `ids` are written by [`group`].
#[derive(Clone)]
pub(crate) struct Grouping {
    /// `[assignments]` expert of each; from the number of experts on, nobody's.
    pub(crate) ids: Buffer<u32>,
    /// `[assignments]` assignment of each place.
    pub(crate) order: Buffer<u32>,
    /// `[assignments]` place of each assignment.
    pub(crate) places: Buffer<u32>,
    /// `[experts + 1]` first place of each expert, and of nobody's.
    pub(crate) bounds: Buffer<u32>,
    /// `[experts]`.
    pub(crate) active: Buffer<u32>,
    /// `[experts + 1]` first place of each of them, and of nobody's behind the last.
    pub(crate) active_first: Buffer<u32>,
    /// `[experts + 1]` eights of places of the active experts before each, and of all; an eight that is begun counts.
    pub(crate) active_eights: Buffer<u32>,
    /// `[2, assignments / 64 rounded up + experts]`: expert and first place of each tile.
    pub(crate) tiles: Buffer<u32>,
    /// `[3]`: active experts, tiles, eights.
    pub(crate) totals: Buffer<u32>,
    experts: usize,
    /// Whether the rows are prompts', whose sums have the order of `kernels/chain.cu` where there is a kernel for them.
    is_prompt: bool,
}

impl Grouping {
    /// Room for the grouping of `ids`.
    pub(crate) fn new(arena: &mut Arena, ids: Buffer<u32>, experts: usize) -> Result<Self> {
        check_experts(experts, 1)?;
        let n = ids.len();
        let mut take = |what, len| arena.take(what, len);
        Ok(Self {
            order: take("the order of assignments", n)?,
            places: take("the places of assignments", n)?,
            bounds: take("the bounds of experts", experts + 1)?,
            active: take("the active experts", experts)?,
            active_first: take("the bounds of active experts", experts + 1)?,
            active_eights: take("the eights of active experts", experts + 1)?,
            tiles: take("the expert tiles", 2 * (n.div_ceil(64) + experts))?,
            totals: take("the expert totals", 3)?,
            ids,
            experts,
            is_prompt: false,
        })
    }

    /// Some of the assignments by themselves; what is not theirs alone serves one part after the other.
    pub(crate) fn part(&self, assignments: Range<usize>, is_prompt: bool) -> Result<Self> {
        Ok(Self {
            ids: self.ids.slice(assignments.clone())?,
            order: self.order.slice(assignments.clone())?,
            places: self.places.slice(assignments)?,
            is_prompt,
            ..self.clone()
        })
    }

    /// `[1]`: the first place that is nobody's.
    pub(crate) fn used(&self) -> Result<Buffer<u32>> {
        self.bounds.slice(self.experts..self.experts + 1)
    }

    pub(super) fn most_tiles(&self) -> usize {
        self.ids.len().div_ceil(64) + self.experts
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct GroupParams {
    ids: u64,
    order: u64,
    places: u64,
    bounds: u64,
    active: u64,
    active_first: u64,
    active_eights: u64,
    tile_expert: u64,
    tile_first: u64,
    totals: u64,
    count: u32,
    experts: u32,
}
// SAFETY: mirrors `GroupParams`.
unsafe impl Params for GroupParams {}

/// Sorts assignments by expert, then by token.
pub(crate) fn group(stream: &Stream, g: &Grouping) -> Result<()> {
    let params = GroupParams {
        ids: g.ids.address(),
        order: g.order.address(),
        places: g.places.address(),
        bounds: g.bounds.address(),
        active: g.active.address(),
        active_first: g.active_first.address(),
        active_eights: g.active_eights.address(),
        tile_expert: g.tiles.address(),
        tile_first: g.tiles.address() + 4 * g.most_tiles() as u64,
        totals: g.totals.address(),
        count: word("assignments", g.ids.len())?,
        experts: g.experts as u32,
    };
    let kernel = stream.gpu().kernel("group")?;
    // SAFETY: sizes checked above.
    unsafe { stream.launch(kernel, rows(g.experts + 1, 256), &params) }
}

/// Whether tiles of 64 places are better than 8 places at a time, where there are kernels for Hopper: for many tokens, and for
/// fewer where experts have more than 8 on average.
pub(crate) fn is_for_tiles(tokens: usize, places: usize, experts: usize) -> bool {
    tokens > FEW_TOKENS || places > FEW_PLACES * experts
}

/// One matrix of every expert.
pub(crate) struct Experts<'a> {
    /// `[experts]` addresses of `[rows, cols]` weights on the device.
    pub(crate) data: &'a Buffer<u64>,
    /// `[experts]` addresses of their scales.
    pub(crate) scales: &'a Buffer<u64>,
}

/// Arguments of [`expert_product`].
pub(crate) struct Product<'a> {
    /// w1 and w3, whose outputs stand side by side, or w2.
    pub(crate) matrices: &'a [Experts<'a>],
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// E2M1 with a scale per row and 32 columns, or E4M3 with one per tile: E8M0, or float32.
    pub(crate) format: ExpertFormat,
    /// `[tokens, cols]` if `top_k` is given, else `[places, cols]`.
    pub(crate) x: &'a Buffer<u16>,
    pub(crate) top_k: Option<usize>,
    /// `[places, matrices * rows]`.
    pub(crate) y: &'a Buffer<u16>,
    /// Tokens of the step: decides how the work is cut, not what comes out.
    pub(crate) tokens: usize,
}

/// Storage of routed experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpertFormat {
    E2m1,
    E4m3,
    E4m3F32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct ExpertParams {
    pub(super) data: [u64; 2],
    pub(super) scales: [u64; 2],
    pub(super) x: u64,
    pub(super) order: u64,
    pub(super) bounds: u64,
    active: u64,
    active_first: u64,
    active_eights: u64,
    pub(super) tile_expert: u64,
    pub(super) tile_first: u64,
    pub(super) totals: u64,
    pub(super) y: u64,
    pub(super) halves: u32,
    pub(super) rows: u32,
    pub(super) cols: u32,
    pub(super) top_k: u32,
    pub(super) format: u32,
    experts: u32,
    beside: RawJob,
    inputs: u32,
    pad: u32,
}
// SAFETY: mirrors `ExpertParams`.
unsafe impl Params for ExpertParams {}

/// The grouped product of all assignments with their experts' weights. The addresses in `matrices` must be those of
/// matrices of the given shape, which is the caller's promise.
///
/// `workspace`, of [`Grouping::images_len`] of the columns, lets many tokens use the kernels for Hopper; without it, or with
/// a smaller one, the product is slower, never different; prompts need it. A product `beside` it, of the same tokens and with
/// a workspace as of [`linear`], shares the launch of a single token; prompts have none.
pub(crate) fn expert_product(
    stream: &Stream,
    g: &Grouping,
    a: &Product<'_>,
    workspace: Option<&Buffer<f32>>,
    beside: Option<(Job<'_>, Option<&Buffer<f32>>)>,
) -> Result<()> {
    multiple("the rows of an expert", a.rows, 128)?;
    multiple("the columns of an expert", a.cols, 128)?;
    let (halves, places) = (a.matrices.len(), g.ids.len());
    if halves == 0 || halves > 2 {
        bail!(InvalidArgument, "{halves} matrices of an expert in one product");
    }
    exact("the experts' output", a.y, places * halves * a.rows)?;
    let inputs = a.top_k.map_or(places, |k| places / k);
    exact("the experts' input", a.x, inputs * a.cols)?;
    let (mut data, mut scales) = ([0; 2], [0; 2]);
    for (i, m) in a.matrices.iter().enumerate() {
        exact("the addresses of the experts", m.data, g.experts)?;
        exact("the addresses of the experts' scales", m.scales, g.experts)?;
        (data[i], scales[i]) = (m.data.address(), m.scales.address());
    }
    let mut params = ExpertParams {
        data,
        scales,
        x: a.x.address(),
        order: if a.top_k.is_some() { g.order.address() } else { 0 },
        bounds: g.bounds.address(),
        active: g.active.address(),
        active_first: g.active_first.address(),
        active_eights: g.active_eights.address(),
        tile_expert: g.tiles.address(),
        tile_first: g.tiles.address() + 4 * g.most_tiles() as u64,
        totals: g.totals.address(),
        y: a.y.address(),
        halves: halves as u32,
        rows: word("rows of an expert", a.rows)?,
        cols: word("columns of an expert", a.cols)?,
        top_k: a.top_k.unwrap_or(1) as u32,
        format: match a.format {
            ExpertFormat::E4m3 => 0,
            ExpertFormat::E4m3F32 => 1,
            ExpertFormat::E2m1 => 2,
        },
        experts: g.experts as u32,
        beside: RawJob::default(),
        inputs: word("inputs of experts", inputs)?,
        pad: 0,
    };
    if g.is_prompt && chain::has_experts(stream, a.format) {
        let Some(workspace) = workspace else { bail!(InvalidArgument, "experts of a prompt without a workspace") };
        // SAFETY: sizes checked above; the experts' addresses are the caller's promise.
        return unsafe { chain::experts(stream, g, a, &params, workspace) };
    }
    if is_for_tiles(a.tokens, places, g.experts)
        && let Some(workspace) = workspace.filter(|w| wide::suits_experts(stream, g, a.cols, w))
    {
        beside.map_or(Ok(()), |(job, workspace)| linear(stream, &[job], a.tokens, workspace))?;
        // SAFETY: sizes checked above; the experts' addresses are the caller's promise.
        return unsafe { wide::experts(stream, g, &params, workspace) };
    }
    let (outputs, e2m1) = (halves * a.rows, a.format == ExpertFormat::E2m1);
    let (name, launch) = if a.tokens <= FEW_TOKENS {
        let most = g.experts.min(places) * outputs;
        let bytes = most * a.cols / if e2m1 { 2 } else { 1 };
        let mut blocks = stream_blocks(stream, bytes).min(most / 16);
        let is_one = a.tokens == 1;
        let mut shared = stream_shared(a.cols, if is_one { 1 } else { FEW_PLACES });
        match beside {
            Some((job, _)) if is_one && streams(stream, &job) => {
                params.beside = check(&job, 1)?;
                let own = weight_bytes(&job);
                let share = (blocks * own).div_ceil(own + bytes).clamp(1, job.rows / 16);
                params.beside.first_tile = word("blocks", share)?;
                blocks = blocks.max(share + 1);
                shared = shared.max(stream_shared(job.cols, 1));
            }
            Some((job, workspace)) => linear(stream, &[job], a.tokens, workspace)?,
            None => {}
        }
        let name = match (is_one, e2m1) {
            (true, true) => "expert_one_e2m1",
            (true, false) => "expert_one_e4m3",
            (false, true) => "expert_few_e2m1",
            (false, false) => "expert_few_e4m3",
        };
        (name, Launch { grid: [blocks, 1, 1], block: 256, shared })
    } else {
        beside.map_or(Ok(()), |(job, workspace)| linear(stream, &[job], a.tokens, workspace))?;
        let (name, shared) =
            if e2m1 { ("expert_many_e2m1", many_shared(64, 512)) } else { ("expert_many_e4m3", many_shared(128, 0)) };
        (name, Launch { grid: [outputs / 128, g.most_tiles(), 1], block: 256, shared })
    };
    let kernel = stream.gpu().kernel(name)?;
    // SAFETY: sizes checked above; the experts' addresses are the caller's promise.
    unsafe { stream.launch(kernel, launch, &params) }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct SwigluParams {
    gate_up: [u64; 2],
    out: [u64; 2],
    weights: u64,
    order: u64,
    rows: u32,
    width: u32,
    limit: f32,
    quantise: u32,
}
// SAFETY: mirrors `SwigluParams`.
unsafe impl Params for SwigluParams {}

/// Arguments of [`swiglu`]: rows of gate and up values `[rows, 2 width]`, and where their activations go `[rows, width]`.
pub(crate) struct Swiglu<'a> {
    /// Rows of routed experts, the assignments' weights and the assignment of each row.
    pub(crate) routed: Option<Activation<'a>>,
    pub(crate) routes: (&'a Buffer<f32>, &'a Buffer<u32>),
    /// Rows of the shared expert.
    pub(crate) shared: Option<Activation<'a>>,
    pub(crate) width: usize,
    /// 0: none.
    pub(crate) limit: f32,
    /// Round to the E4M3 grid as the input of the next product.
    pub(crate) quantise: bool,
}

/// Gate and up values, and where their activations go.
pub(crate) type Activation<'a> = (&'a Buffer<u16>, &'a Buffer<u16>);

/// `out[r] = weight * silu(min(gate, limit)) * clamp(up)`; the weight of a routed row r is `weights[order[r]]`, of a shared
/// one 1.
pub(crate) fn swiglu(stream: &Stream, a: &Swiglu<'_>) -> Result<()> {
    multiple("moe_intermediate_size", a.width, 128)?;
    let mut params = SwigluParams {
        gate_up: [0; 2],
        out: [0; 2],
        weights: a.routes.0.address(),
        order: a.routes.1.address(),
        rows: 0,
        width: word("moe_intermediate_size", a.width)?,
        limit: a.limit,
        quantise: u32::from(a.quantise),
    };
    let mut all = 0;
    for (kind, (gate_up, out)) in [a.routed, a.shared].into_iter().enumerate().filter_map(|(i, a)| Some((i, a?))) {
        let count = out.len() / a.width;
        exact("the activated values", out, count * a.width)?;
        exact("the gate and up values", gate_up, 2 * count * a.width)?;
        if kind == 0 {
            exact("the order of assignments", a.routes.1, count)?;
            exact("the expert weights", a.routes.0, count)?;
            params.rows = word("rows of experts", count)?;
        }
        (params.gate_up[kind], params.out[kind]) = (gate_up.address(), out.address());
        all += count;
    }
    let kernel = stream.gpu().kernel("swiglu")?;
    // SAFETY: sizes checked above.
    unsafe { stream.launch(kernel, rows(all, 256), &params) }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct CombineParams {
    routed: u64,
    shared: u64,
    places: u64,
    used: u64,
    out: u64,
    width: u32,
    top_k: u32,
}
// SAFETY: mirrors `CombineParams`.
unsafe impl Params for CombineParams {}

/// Adds each token's experts in order of id, then the shared expert: `[tokens, width]`. Places from `used` `[1]` on count
/// for nothing.
pub(crate) fn combine(
    stream: &Stream,
    routed: &Buffer<u16>,
    shared: &Buffer<u16>,
    (places, used): (&Buffer<u32>, &Buffer<u32>),
    out: &Buffer<u16>,
    width: usize,
) -> Result<()> {
    multiple("hidden_size", width, 8)?;
    let tokens = out.len() / width;
    exact("the feed-forward output", out, tokens * width)?;
    exact("the shared expert's output", shared, tokens * width)?;
    exact("the experts' output", routed, places.len() * width)?;
    let top_k = places.len().checked_div(tokens).unwrap_or(0);
    if top_k * tokens != places.len() || top_k > MAX_TOP_K {
        bail!(InvalidArgument, "{} places for {tokens} tokens", places.len());
    }
    at_least("the places of assignments", places, tokens)?;
    exact("the number of places", used, 1)?;
    let params = CombineParams {
        routed: routed.address(),
        shared: shared.address(),
        places: places.address(),
        used: used.address(),
        out: out.address(),
        width: word("hidden_size", width)?,
        top_k: top_k as u32,
    };
    let kernel = stream.gpu().kernel("combine")?;
    let grid = [tokens, width.div_ceil(1024), 1];
    // SAFETY: sizes checked above.
    unsafe { stream.launch(kernel, Launch { grid, block: 128, shared: 0 }, &params) }
}
