//! Finding the CUDA driver and its devices without ever panicking.
//!
//! cudarc panics when the driver library or one of its symbols is missing. So the library is opened and asked for every
//! symbol needed here first, through `libloading`; only then do cudarc's own calls run.

use std::ffi::CStr;

use cudarc::driver::sys;
use once_cell::sync::OnceCell;

use super::device::plain;
use crate::backend::Device;
use crate::error::{Result, bail};

/// The oldest driver API that CUDA 13 code runs on.
const OLDEST_DRIVER: i32 = 13_000;

/// Names under which the loader finds the driver.
#[cfg(target_os = "windows")]
const LIBRARIES: [&str; 1] = ["nvcuda.dll"];
#[cfg(not(target_os = "windows"))]
const LIBRARIES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// Every driver function that this backend calls; cudarc panics on one that is missing.
const SYMBOLS: &[&str] = &[
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime_v2",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncGetName",
    "cuFuncGetParamInfo",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuInit",
    "cuLaunchKernelEx",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemFreeHost",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuModuleEnumerateFunctions",
    "cuModuleGetFunctionCount",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
];

/// Outcome of the one attempt to open the driver; a failure is remembered, since the library search does not change.
static DRIVER: OnceCell<Result<()>> = OnceCell::new();

/// All CUDA devices, in the driver's order.
///
/// # Errors
/// `Unavailable` with the reason and the remedy: no driver library, a symbol it lacks, a driver that is too old, one
/// that refuses to start, or no device.
pub fn devices() -> Result<Vec<Device>> {
    ensure()?;
    let mut count = 0;
    // SAFETY: the driver is initialised, and the pointer outlives the call.
    plain("counting devices (cuDeviceGetCount)", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
    if count == 0 {
        bail!(Unavailable, "the NVIDIA driver reports no CUDA device (is CUDA_VISIBLE_DEVICES empty?)");
    }
    (0..count).map(device).collect()
}

/// Opens the driver, once.
pub(super) fn ensure() -> Result<()> {
    DRIVER.get_or_init(open).clone()
}

fn device(ordinal: i32) -> Result<Device> {
    let (mut handle, mut memory) = (0, 0usize);
    // SAFETY: as above.
    plain("finding a device (cuDeviceGet)", unsafe { sys::cuDeviceGet(&raw mut handle, ordinal) })?;
    // SAFETY: as above; `handle` was just returned by the driver.
    let status = unsafe { sys::cuDeviceTotalMem_v2(&raw mut memory, handle) };
    plain("asking for a device's memory (cuDeviceTotalMem)", status)?;
    Ok(Device { id: format!("cuda:{ordinal}"), name: device_name(handle)?, memory_bytes: memory as u64 })
}

/// Name of a device for people.
pub(super) fn device_name(handle: sys::CUdevice) -> Result<String> {
    let mut name = [0u8; 256];
    // SAFETY: the buffer has the size that is given; `handle` came from the driver.
    let status = unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), 255, handle) };
    plain("asking for a device's name (cuDeviceGetName)", status)?;
    Ok(CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned())
}

fn open() -> Result<()> {
    probe()?;
    // SAFETY: `probe` found the library and its symbols, so cudarc does not panic; `cuInit(0)` may be called any time.
    plain("starting the NVIDIA driver (cuInit)", unsafe { sys::cuInit(0) })?;
    let mut version = 0i32;
    // SAFETY: `version` outlives the call.
    let status = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    plain("asking for the driver's version (cuDriverGetVersion)", status)?;
    check_version(version)
}

/// Opens the driver library by itself and looks each needed symbol up.
fn probe() -> Result<()> {
    let mut reasons = Vec::new();
    for name in LIBRARIES {
        // SAFETY: the driver library's initialisers are those that any CUDA program runs when it starts.
        match unsafe { libloading::Library::new(name) } {
            Ok(library) => {
                return symbols(name, |symbol| {
                    // SAFETY: the symbol is only looked up, never called through this type.
                    unsafe { library.get::<unsafe extern "C" fn()>(symbol) }.is_ok()
                });
            }
            // the system's own words, which name the library; libloading's say only that it could not be opened
            Err(error) => reasons.push(std::error::Error::source(&error).unwrap_or(&error).to_string()),
        }
    }
    bail!(Unavailable, "no NVIDIA driver: {}; the CPU works without one", reasons.join("; "));
}

fn symbols(library: &str, has: impl Fn(&str) -> bool) -> Result<()> {
    match SYMBOLS.iter().find(|symbol| !has(symbol)) {
        Some(symbol) => {
            bail!(Unavailable, "{library} lacks the function {symbol}: install NVIDIA driver R580 or newer")
        }
        None => Ok(()),
    }
}

/// Whether the driver of API version `version` can run what this library brings.
fn check_version(version: i32) -> Result<()> {
    if version < OLDEST_DRIVER {
        bail!(
            Unavailable,
            "the NVIDIA driver supports CUDA {}.{}, but CUDA 13.0 is needed: install driver R580 or newer",
            version / 1000,
            version % 1000 / 10
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    /// Pitfall 103.
    #[test]
    fn a_machine_without_a_driver_gets_a_reason_not_a_panic() {
        match devices() {
            Ok(devices) => assert!(devices.iter().all(|d| d.memory_bytes > 0 && !d.name.is_empty())),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Unavailable);
                assert!(error.message().contains("driver") || error.message().contains("device"), "{error}");
            }
        }
    }
    #[test]
    fn a_driver_that_lacks_a_function_is_refused_by_that_name() {
        let error = symbols("libcuda.so.1", |symbol| symbol != "cuFuncGetParamInfo").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.message().contains("cuFuncGetParamInfo") && error.message().contains("R580"), "{error}");
        symbols("libcuda.so.1", |_| true).unwrap();
    }

    #[test]
    fn a_driver_that_is_too_old_is_refused_with_both_versions() {
        let error = check_version(12_080).unwrap_err();
        assert!(error.message().contains("CUDA 12.8") && error.message().contains("CUDA 13.0"), "{error}");
        check_version(13_000).unwrap();
    }

    /// Pitfalls 99, 103: the list must name every driver function in this folder's sources, or a missing one would panic
    /// inside cudarc.
    #[test]
    fn every_driver_function_that_is_called_is_probed_first() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/backend/cuda");
        let mut called = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let Ok(text) = std::fs::read_to_string(&path) else { continue };
            for call in text.split("sys::cu").skip(1) {
                let name: String = call.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
                if call[name.len()..].starts_with('(') {
                    called += 1;
                    assert!(SYMBOLS.contains(&format!("cu{name}").as_str()), "cu{name} of {}", path.display());
                }
            }
        }
        assert!(called > 30, "only {called} calls found: is the pattern right?");
    }
}
