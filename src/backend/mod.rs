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

/// What a build brings for GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CudaKernels {
    /// Source files, each a group of kernels; none in a build without the `cuda` feature.
    pub files: Vec<&'static str>,
    /// Architectures with machine code (`80`, `90a`, ..); the first one's PTX serves others. Empty: the build holds
    /// sources, which NVRTC compiles when a device is opened.
    pub architectures: Vec<&'static str>,
    /// Bytes embedded.
    pub bytes: u64,
}

/// The GPU kernels of this build.
pub fn cuda_kernels() -> CudaKernels {
    #[cfg(feature = "cuda")]
    return cuda::kernels();
    #[cfg(not(feature = "cuda"))]
    CudaKernels::default()
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
