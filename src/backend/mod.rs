//! Where the arithmetic happens. The CPU backend is the reference and the fallback; every operation exists there first.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;

use crate::error::Result;

/// A device that an engine can run on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// `cpu`, `cuda:0`, ...
    pub id: String,
    /// Name for people.
    pub name: String,
    /// Total memory in bytes; 0 where it is not known.
    pub memory_bytes: u64,
}

/// The CUDA devices of this machine, or in words why there are none.
///
/// # Errors
/// `Unavailable`: no driver, a driver that is too old or refuses, or a build without the `cuda` feature.
pub fn cuda_devices() -> Result<Vec<Device>> {
    #[cfg(feature = "cuda")]
    return cuda::devices();
    #[cfg(not(feature = "cuda"))]
    crate::error::bail!(Unavailable, "this build of dsv4 has no CUDA support (feature `cuda` is off)");
}
