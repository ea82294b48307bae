//! What the host does where a GPU has no room for all experts.

use std::time::Duration;

use super::super::Engine;
use crate::error::{Result, bail};

/// What the host did for a GPU's steps, since the engine's beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostFigures {
    /// Layers that asked for experts, a prompt's and single tokens' parts of a step each for itself.
    pub layers: u64,
    /// Experts that were computed, each once for all its rows in a layer.
    pub experts: u64,
    /// Time in which the host waited for a layer's question.
    pub waited: Duration,
    /// Time in which it computed.
    pub computed: Duration,
    /// Bytes of experts whose pages are mapped by now, and of those that will be mapped ahead of their use.
    pub mapped: (u64, u64),
}

impl HostFigures {
    /// Those of `engine`; `None` where the host computes no experts for a GPU.
    pub fn of(engine: &Engine) -> Option<Self> {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = engine.gpu() {
            return gpu.host_figures();
        }
        let _ = engine;
        None
    }
}

/// Bytes a second that a copy within the memory of the engine's GPU reads and writes together.
///
/// # Errors
/// `Unsupported` on the CPU; those of the device.
pub fn device_bandwidth(engine: &Engine) -> Result<f64> {
    #[cfg(feature = "cuda")]
    if let Some(gpu) = engine.gpu() {
        return gpu.bandwidth();
    }
    let _ = engine;
    bail!(Unsupported, "the memory of GPUs only is measured by copies")
}
