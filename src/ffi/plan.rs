//! Plan
//!
//! What a model takes, before any of it is loaded.

use super::args::{OutStruct, SizedStruct, count, object, options};
use super::engine::{self, dsv4_engine_options};
use super::guard::guard;
use super::model::dsv4_model;
use super::status::{dsv4_error, dsv4_status};
use crate::cache::CachePlan;
use crate::engine::{DeviceChoice, EngineOptions};
use crate::error::{Result, bail};
use crate::model::Model;
use crate::weights::Category;

/// Memory of a model and of one session, in bytes. Set `size` to `sizeof(dsv4_plan)` before the call.
///
/// Weights are mapped, not copied: the operating system reads a page when it is first used and may drop it again.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dsv4_plan {
    /// `sizeof(dsv4_plan)`.
    pub size: usize,
    /// All weights: the sum of the next seven.
    pub weight_bytes: u64,
    /// Token embedding and output head.
    pub embedding_bytes: u64,
    /// Attention with compressors and indexers.
    pub attention_bytes: u64,
    /// Routed experts: the bulk; a token uses a few of them.
    pub routed_expert_bytes: u64,
    /// Shared experts.
    pub shared_expert_bytes: u64,
    /// Routers, hyper-connections and norms.
    pub other_bytes: u64,
    /// Draft module.
    pub draft_bytes: u64,
    /// Tensors that mean nothing to this library.
    pub unknown_bytes: u64,
    /// Tokens of the session that the next three are for.
    pub context: u64,
    /// Sliding windows of all layers, per session.
    pub window_bytes: u64,
    /// States of the compressors, per session.
    pub state_bytes: u64,
    /// Pages of compressed entries and index keys of a full context, per session.
    pub page_bytes: u64,
    /// What a session takes when it is made, padding of pages included: its windows and states.
    pub session_bytes: u64,
    /// What each further 256 tokens take.
    pub block_bytes: u64,
    /// What each token of `dsv4_session_options.rollback` takes.
    pub rollback_token_bytes: u64,
    /// Windows of the draft module's layers, per session; not part of the other figures.
    pub draft_window_bytes: u64,
    /// The limit of the engine's cache that the next two are for. On a GPU set `cache_bytes`: how much of its memory is free
    /// is known when the engine is made.
    pub cache_bytes: u64,
    /// Tokens of the longest session that fits under the limit alone.
    pub longest_context: u64,
    /// Sessions of `context` tokens that fit under the limit together.
    pub sessions: u64,
}

// SAFETY: `repr(C)`, `size` first, plain fields without padding.
unsafe impl SizedStruct for dsv4_plan {
    const NAME: &'static str = "dsv4_plan";
}

/// What `model` takes on an engine with `engine_options`, and each session of `context` tokens (0 is the model's
/// `max_position_embeddings`) on it. Nothing is loaded or allocated. `engine_options` may be NULL.
///
/// Errors: `INVALID_ARGUMENT`, also for a context longer than the model's.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_model_get_plan(
    model: *const dsv4_model,
    engine_options: *const dsv4_engine_options,
    context: u64,
    plan: *mut dsv4_plan,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let plan = unsafe { OutStruct::new(plan, "plan") };
    guard("dsv4_model_get_plan", err, || {
        // SAFETY: as above.
        let model = unsafe { object(model, "model") }?.get()?;
        // SAFETY: as above.
        let options = unsafe { options(engine_options) }?;
        plan.check()?;
        // SAFETY: as above; the text is read during this call only.
        let options = unsafe { engine::read(&options) }?;
        plan.set(make(&model.model, &options, count(context, "context")?)?);
        Ok(())
    })
}

fn make(model: &Model, options: &EngineOptions, context: usize) -> Result<dsv4_plan> {
    let longest = model.config().max_position_embeddings;
    if context > longest {
        bail!(InvalidArgument, "context is {context}; the model's max_position_embeddings is {longest}");
    }
    let context = if context == 0 { longest } else { context };
    let inventory = model.checkpoint().inventory();
    let bytes = |wanted: &[Category]| {
        inventory.by_category.iter().filter(|(c, _)| wanted.contains(c)).map(|(_, share)| share.bytes).sum()
    };
    let plan = if options.device == DeviceChoice::Cpu { CachePlan::new } else { CachePlan::in_page_memory };
    let cache = plan(model.config(), options.kv_format(), context, options.cache_limit());
    Ok(dsv4_plan {
        size: size_of::<dsv4_plan>(),
        weight_bytes: inventory.total.bytes,
        embedding_bytes: bytes(&[Category::Embedding, Category::Head]),
        attention_bytes: bytes(&[Category::Attention, Category::Compressor]),
        routed_expert_bytes: bytes(&[Category::RoutedExperts]),
        shared_expert_bytes: bytes(&[Category::SharedExperts]),
        other_bytes: bytes(&[Category::Router, Category::HyperConnections, Category::Norms]),
        draft_bytes: bytes(&[Category::Draft]),
        unknown_bytes: bytes(&[Category::Other]),
        context: context as u64,
        window_bytes: cache.bytes.window,
        state_bytes: cache.bytes.state,
        page_bytes: cache.bytes.pages,
        session_bytes: cache.sequence,
        block_bytes: cache.block,
        rollback_token_bytes: cache.rollback_token,
        draft_window_bytes: cache.draft_windows,
        cache_bytes: cache.limit,
        longest_context: cache.longest_context as u64,
        sessions: cache.sequences,
    })
}
