//! Host memory for routed experts, as the options bound it.
#![forbid(unsafe_code)]

use std::sync::Arc;

use crate::error::{Result, bail};
use crate::model::Model;
use crate::model::deepseek_v4::home::{ExpertTier, TierPlan};

use super::options::{EngineOptions, available_memory};

/// The host's experts where `elsewhere`, of all layers, are not its own; `None` if they are used where they are
/// mapped.
///
/// # Errors
/// `InvalidArgument` for `host_bytes` below the experts of a token; `OutOfMemory` if the machine does not have that much.
pub(super) fn tier(model: &Model, options: &EngineOptions, elsewhere: usize) -> Result<Option<Arc<ExpertTier>>> {
    let (weights, config) = (model.weights(), model.config());
    let Some(plan) = TierPlan::new(weights, config, options.host_bytes, elsewhere)? else { return Ok(None) };
    if let Some(available) = available_memory()
        && available < plan.bytes()
    {
        bail!(
            OutOfMemory,
            "host_bytes is {}, of which experts take {}, but {available} bytes of memory are available; what is above that \
             would be swapped",
            options.host_bytes,
            plan.bytes()
        );
    }
    tracing::info!(?plan, "experts are read from the files when they are needed");
    Ok(Some(Arc::new(ExpertTier::new(weights, config, plan)?)))
}
