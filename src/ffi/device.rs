//! Devices
//!
//! The CPU is always there and needs no entry. No CUDA library is linked: the driver is looked for when devices are
//! listed, and its absence is a status with a reason, never a failure to load this library.

use std::ffi::c_char;

use super::args::{Out, OutStruct, SizedStruct, copy_text};
use super::guard::guard;
use super::status::{dsv4_error, dsv4_status};
use crate::backend::{Device, cuda_devices};
use crate::error::{Error, ErrorKind};

/// A GPU. Set `size` to `sizeof(dsv4_device_info)` before the call that fills it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dsv4_device_info {
    /// `sizeof(dsv4_device_info)`.
    pub size: usize,
    /// Total memory in bytes; 0 where it is not known.
    pub memory_bytes: u64,
    /// What `dsv4_engine_options.device` takes: `"cuda:0"`. Ends with a NUL.
    pub id: [c_char; 32],
    /// Name for people; ends with a NUL.
    pub name: [c_char; 256],
}

// SAFETY: `repr(C)`, `size` first, plain fields without padding.
unsafe impl SizedStruct for dsv4_device_info {
    const NAME: &'static str = "dsv4_device_info";
}

/// Number of GPUs.
///
/// Errors: `UNAVAILABLE` if there is none, with the reason and the remedy: no driver, a driver that is too old or
/// refuses, no device, or a library built without CUDA. `*count` is 0 then, and the CPU works all the same.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_device_count(count: *mut usize, err: *mut dsv4_error) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let count = unsafe { Out::new(count, "count") };
    guard("dsv4_device_count", err, || {
        count.check()?;
        count.set(cuda_devices()?.len());
        Ok(())
    })
}

/// Describes GPU number `index`, counted from 0.
///
/// Errors: `NOT_FOUND` if there is no such GPU, `UNAVAILABLE` as for `dsv4_device_count`.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn dsv4_device_get_info(
    index: usize,
    info: *mut dsv4_device_info,
    err: *mut dsv4_error,
) -> dsv4_status {
    // SAFETY: NULL or a valid output by the header's contract.
    let info = unsafe { OutStruct::new(info, "info") };
    guard("dsv4_device_get_info", err, || {
        info.check()?;
        let devices = cuda_devices()?;
        let missing = || Error::new(ErrorKind::NotFound, format!("device {index} of {}", devices.len()));
        info.set(describe(devices.get(index).ok_or_else(missing)?));
        Ok(())
    })
}

fn describe(device: &Device) -> dsv4_device_info {
    let mut info = dsv4_device_info {
        size: size_of::<dsv4_device_info>(),
        memory_bytes: device.memory_bytes,
        id: [0; 32],
        name: [0; 256],
    };
    copy_text(&device.id, &mut info.id);
    copy_text(&device.name, &mut info.name);
    info
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_device_name_is_cut_at_a_character_border() {
        let device = Device { id: "cuda:3".into(), name: "é".repeat(200), memory_bytes: 7 };
        let info = describe(&device);
        let bytes = |text: &[c_char]| text.iter().map(|&c| c as u8).take_while(|&b| b != 0).collect::<Vec<u8>>();
        assert_eq!(bytes(&info.id), b"cuda:3");
        assert_eq!(bytes(&info.name), "é".repeat(127).as_bytes());
    }
}
