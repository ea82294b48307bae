//! Finding the CUDA driver and its devices without ever panicking.
//!
//! cudarc panics when the driver library or one of its symbols is missing. So the library is opened and asked for every
//! symbol needed here first, through `libloading`; only then do cudarc's own calls run.

use cudarc::driver::{result, sys};
use once_cell::sync::OnceCell;

use crate::backend::Device;
use crate::error::{Error, ErrorKind, Result, bail};

/// The oldest driver API that CUDA 13 code runs on.
const OLDEST_DRIVER: i32 = 13_000;

/// Names under which the loader finds the driver.
#[cfg(target_os = "windows")]
const LIBRARIES: [&str; 1] = ["nvcuda.dll"];
#[cfg(not(target_os = "windows"))]
const LIBRARIES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// Driver functions that device listing calls.
const SYMBOLS: [&str; 6] =
    ["cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceTotalMem_v2"];

/// Outcome of the one attempt to open the driver; a failure is remembered, since the library search does not change.
static DRIVER: OnceCell<Result<()>> = OnceCell::new();

/// All CUDA devices, in the driver's order.
///
/// # Errors
/// `Unavailable` with the reason and the remedy: no driver library, a symbol it lacks, a driver that is too old, one
/// that refuses to start, or no device.
pub fn devices() -> Result<Vec<Device>> {
    DRIVER.get_or_init(open).clone()?;
    let count = result::device::get_count().map_err(|e| refused("cuDeviceGetCount", e))?;
    if count == 0 {
        bail!(Unavailable, "the NVIDIA driver reports no CUDA device (is CUDA_VISIBLE_DEVICES empty?)");
    }
    (0..count).map(device).collect()
}

fn device(ordinal: i32) -> Result<Device> {
    let handle = result::device::get(ordinal).map_err(|e| refused("cuDeviceGet", e))?;
    let name = result::device::get_name(handle).map_err(|e| refused("cuDeviceGetName", e))?;
    let mut memory = 0usize;
    // SAFETY: `memory` outlives the call and `handle` was just returned by the driver.
    let status = unsafe { sys::cuDeviceTotalMem_v2(&raw mut memory, handle) };
    status.result().map_err(|e| refused("cuDeviceTotalMem", e))?;
    Ok(Device { id: format!("cuda:{ordinal}"), name, memory_bytes: memory as u64 })
}

fn open() -> Result<()> {
    probe()?;
    // SAFETY: `probe` found the library and its symbols, so cudarc does not panic; `cuInit(0)` may be called any time.
    unsafe { sys::cuInit(0) }.result().map_err(|e| refused("cuInit", e))?;
    let mut version = 0i32;
    // SAFETY: `version` outlives the call.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result().map_err(|e| refused("cuDriverGetVersion", e))?;
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

/// Opens the driver library by itself and looks each needed symbol up.
fn probe() -> Result<()> {
    let mut reasons = Vec::new();
    for name in LIBRARIES {
        // SAFETY: the driver library's initialisers are those that any CUDA program runs when it starts.
        match unsafe { libloading::Library::new(name) } {
            Ok(library) => return symbols(&library, name),
            // the system's own words, which name the library; libloading's say only that it could not be opened
            Err(error) => reasons.push(std::error::Error::source(&error).unwrap_or(&error).to_string()),
        }
    }
    bail!(Unavailable, "no NVIDIA driver: {}; the CPU works without one", reasons.join("; "));
}

fn symbols(library: &libloading::Library, name: &str) -> Result<()> {
    for symbol in SYMBOLS {
        // SAFETY: the symbol is only looked up, never called through this type.
        let found = unsafe { library.get::<unsafe extern "C" fn()>(symbol) };
        if found.is_err() {
            bail!(Unavailable, "{name} lacks the function {symbol}: install NVIDIA driver R580 or newer");
        }
    }
    Ok(())
}

fn refused(call: &str, error: result::DriverError) -> Error {
    Error::new(ErrorKind::Unavailable, format!("the NVIDIA driver refused {call}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
