//! One GPU in use: its primary context, its limits, its kernels, and the state that a fault leaves behind.
//!
//! Invariant: a call that the driver refuses is an error that names the stage. A fault that makes the context unusable
//! (an illegal address, a trap) is remembered with the first stage that saw it; every later call answers `Poisoned` with
//! that stage, and dropping the objects still works.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::sys::{self, CUdevice_attribute, CUresult};

use super::driver;
use super::kernels::{Kernel, Kernels};
use crate::error::{Error, ErrorKind, Result, bail};

/// Oldest compute capability that the kernels are written for.
const OLDEST: (u32, u32) = (8, 0);
/// Stages remembered since the last time that the device was known to be well.
const REMEMBERED: usize = 256;

/// A GPU in use. Clones are the same device.
#[derive(Clone)]
pub(crate) struct Gpu {
    inner: Arc<Inner>,
}

struct Inner {
    context: Context,
    /// Figures that launchers decide by.
    limits: Limits,
    kernels: Kernels,
    fault: OnceLock<String>,
    launched: Mutex<Vec<Arc<str>>>,
    careful: AtomicBool,
    prefer: AtomicU8,
}

impl Drop for Inner {
    fn drop(&mut self) {
        let current = enter(&self.context);
        self.kernels.unload();
        drop(current);
    }
}

/// What launchers choose where several kernels give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Prefer {
    Fastest,
    /// Those that every architecture has.
    Portable,
    /// Those of this architecture, however few the tokens.
    Own,
}

/// What the launchers and the plan must know of a device.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    /// Name for people.
    pub(crate) name: String,
    /// Compute capability.
    pub(crate) arch: (u32, u32),
    /// Multiprocessors.
    pub(crate) multiprocessors: u32,
    /// Bytes of shared memory that a block can opt in to.
    pub(crate) shared_bytes: u32,
    /// Bytes of the L2 cache.
    pub(crate) l2_bytes: u64,
}

/// A retained primary context.
struct Context {
    device: sys::CUdevice,
    raw: sys::CUcontext,
}

// SAFETY: a context handle may be used from any thread; it is made current around each call.
unsafe impl Send for Context {}
// SAFETY: as above; the driver serialises what must be.
unsafe impl Sync for Context {}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `Gpu::open`. After a fault the call fails, which changes nothing.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// The context is current on this thread while this lives; then the host's own is again.
pub(crate) struct Current(());

impl Drop for Current {
    fn drop(&mut self) {
        let mut previous = std::ptr::null_mut();
        // SAFETY: pops what `Gpu::enter` pushed on this thread.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut previous) };
    }
}

impl Gpu {
    /// Opens device `ordinal` and loads the kernels.
    ///
    /// # Errors
    /// `Unavailable` with the reason: no driver, no such device, or it refuses. `Unsupported`: an architecture that the
    /// kernels are not written for, or that this build holds no code for.
    pub(crate) fn open(ordinal: u32) -> Result<Self> {
        driver::ensure()?;
        let stage = "opening the device";
        let mut device = 0;
        // SAFETY: the driver is initialised, and the pointers outlive the calls.
        plain(stage, unsafe { sys::cuDeviceGet(&raw mut device, ordinal.cast_signed()) })?;
        let limits = Limits::of(device, ordinal)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: as above.
        plain(stage, unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut raw, device) })?;
        let context = Context { device, raw };
        let current = enter(&context)?;
        let kernels = Kernels::load(&limits)?;
        drop(current);
        let (fault, launched, careful) = (OnceLock::new(), Mutex::default(), AtomicBool::new(false));
        let prefer = AtomicU8::new(Prefer::Fastest as u8);
        Ok(Self { inner: Arc::new(Inner { context, limits, kernels, fault, launched, careful, prefer }) })
    }

    /// What launchers decide by.
    pub(crate) fn limits(&self) -> &Limits {
        &self.inner.limits
    }

    /// A kernel by its name in the sources.
    ///
    /// # Errors
    /// `Unsupported` if the build has no such kernel.
    pub(super) fn kernel(&self, name: &str) -> Result<&Kernel> {
        self.inner.kernels.get(name)
    }

    /// Whether there is a kernel of this name for this device.
    pub(super) fn has(&self, name: &str) -> bool {
        self.inner.kernels.get(name).is_ok()
    }

    /// Changes what launchers choose from now on; for the self-test.
    pub(super) fn prefer(&self, kernels: Prefer) {
        self.inner.prefer.store(kernels as u8, Ordering::Relaxed);
    }

    pub(super) fn prefers(&self, kernels: Prefer) -> bool {
        self.inner.prefer.load(Ordering::Relaxed) == kernels as u8
    }

    /// Waits for each launch, so that a fault names its very kernel. Slow; for the self-test and for bug reports.
    pub(crate) fn set_careful(&self, on: bool) {
        self.inner.careful.store(on, Ordering::Relaxed);
    }

    /// Whether each launch is waited for.
    pub(crate) fn is_careful(&self) -> bool {
        self.inner.careful.load(Ordering::Relaxed)
    }

    /// Free and total bytes of device memory.
    pub(crate) fn memory(&self) -> Result<(u64, u64)> {
        let _current = self.enter()?;
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: the pointers outlive the call; the context is current.
        self.check("asking for free memory", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
        Ok((free as u64, total as u64))
    }

    /// Makes the context current on this thread.
    ///
    /// # Errors
    /// `Poisoned` after a fault.
    pub(super) fn enter(&self) -> Result<Current> {
        if let Some(fault) = self.inner.fault.get() {
            bail!(Poisoned, "the device is unusable after a fault: {fault}");
        }
        enter(&self.inner.context)
    }

    /// As [`Self::enter`], for dropping things after a fault too.
    pub(super) fn enter_to_free(&self) -> Option<Current> {
        enter(&self.inner.context).ok()
    }

    /// Turns a driver status into a result; a sticky one poisons the device with `stage`.
    pub(super) fn check(&self, stage: &str, status: CUresult) -> Result<()> {
        let Err(error) = plain(stage, status) else { return Ok(()) };
        if !is_sticky(status) {
            return Err(error);
        }
        let launched = std::mem::take(&mut *self.launched());
        let among = match launched.as_slice() {
            [] => String::new(),
            [only] => format!("; launched since the last check: {only}"),
            [first, .., last] => {
                format!("; launched since the last check: {first} to {last}, {} kernels", launched.len())
            }
        };
        let fault = self.inner.fault.get_or_init(|| format!("{}{among}", error.message()));
        bail!(Poisoned, "{fault}");
    }

    /// Notes a launch, for the message of a later fault.
    pub(super) fn note_launch(&self, kernel: &Arc<str>) {
        let mut launched = self.launched();
        if launched.len() == REMEMBERED {
            launched.drain(..REMEMBERED / 2);
        }
        launched.push(Arc::clone(kernel));
    }

    /// Everything launched so far has ended well.
    pub(super) fn note_well(&self) {
        self.launched().clear();
    }

    fn launched(&self) -> MutexGuard<'_, Vec<Arc<str>>> {
        self.inner.launched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Limits {
    fn of(device: sys::CUdevice, ordinal: u32) -> Result<Self> {
        let attribute = |which: CUdevice_attribute| {
            let mut value = 0;
            // SAFETY: the pointer outlives the call; `device` came from the driver.
            plain("reading a device attribute", unsafe { sys::cuDeviceGetAttribute(&raw mut value, which, device) })?;
            Ok::<u32, Error>(value.max(0).cast_unsigned())
        };
        let name = driver::device_name(device)?;
        let arch = (
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        check_arch(arch, &name, ordinal)?;
        Ok(Self {
            name,
            arch,
            multiprocessors: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_bytes: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            l2_bytes: u64::from(attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?),
        })
    }
}

fn check_arch(arch: (u32, u32), name: &str, ordinal: u32) -> Result<()> {
    if arch < OLDEST {
        bail!(
            Unsupported,
            "cuda:{ordinal} ({name}) has compute capability {}.{}; the kernels need {}.{} (Ampere) or newer",
            arch.0,
            arch.1,
            OLDEST.0,
            OLDEST.1
        );
    }
    Ok(())
}

fn enter(context: &Context) -> Result<Current> {
    // SAFETY: the context is retained while `context` lives.
    plain("making the context current", unsafe { sys::cuCtxPushCurrent_v2(context.raw) })?;
    Ok(Current(()))
}

/// A driver status as a result; the number decides, since a newer driver may have errors that cudarc has no name for.
/// Without judging whether the device survives it.
pub(super) fn plain(stage: &str, status: CUresult) -> Result<()> {
    if status == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let kind = match status {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => ErrorKind::OutOfMemory,
        CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU => ErrorKind::Unsupported,
        _ => ErrorKind::Unavailable,
    };
    Err(Error::new(kind, format!("{stage}: CUDA error {} ({})", status as u32, describe(status))))
}

fn describe(status: CUresult) -> String {
    let text = |call: unsafe fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: the pointer outlives the call, and the driver sets it to a string of its own or to null.
        let status = unsafe { call(status, &raw mut text) };
        if status != CUresult::CUDA_SUCCESS || text.is_null() {
            return String::new();
        }
        // SAFETY: a static, NUL-terminated string of the driver.
        unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    format!("{}: {}", text(sys::cuGetErrorName), text(sys::cuGetErrorString))
}

/// Whether the context cannot be used any more after this status.
fn is_sticky(status: CUresult) -> bool {
    let number = status as u32;
    matches!(number, 214 | 220 | 226 | 999) || (number == 700 || number == 702 || (709..=721).contains(&number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_too_old_is_refused_with_both_capabilities() {
        let error = check_arch((7, 5), "NVIDIA T4", 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("cuda:1") && error.message().contains("7.5"), "{error}");
        check_arch((8, 0), "A100", 0).unwrap();
        check_arch((12, 1), "Spark", 0).unwrap();
    }

    /// Pitfall 53.
    #[test]
    fn faults_are_sticky_and_refusals_are_not() {
        for sticky in [CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, CUresult::CUDA_ERROR_LAUNCH_FAILED] {
            assert!(is_sticky(sticky));
        }
        for passing in [
            CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            CUresult::CUDA_ERROR_INVALID_VALUE,
            CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
        ] {
            assert!(!is_sticky(passing));
        }
    }

    #[test]
    fn a_machine_without_the_device_gets_a_reason() {
        if let Err(error) = Gpu::open(4095) {
            assert!(matches!(error.kind(), ErrorKind::Unavailable), "{error:?}");
            assert!(!error.message().is_empty());
        } else {
            panic!("device 4095 exists");
        }
    }
}
