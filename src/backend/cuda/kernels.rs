//! The embedded kernels: machine code made by build.rs, or sources that NVRTC compiles when a device is opened.

use std::collections::HashMap;
use std::ffi::CStr;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use cudarc::driver::sys;

use super::device::{Limits, plain};
use super::nvrtc;
use crate::backend::CudaKernels;
use crate::error::{Result, bail};

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// The kernels of this build.
pub fn kernels() -> CudaKernels {
    CudaKernels {
        files: IMAGES.iter().map(|(name, _)| name.trim_end_matches(".cu")).collect(),
        architectures: ARCHS.to_vec(),
        bytes: IMAGES.iter().chain(HEADERS).map(|(_, bytes)| bytes.len() as u64).sum(),
    }
}

/// A kernel that is loaded.
pub(super) struct Kernel {
    /// Its name in the sources.
    pub(super) name: Arc<str>,
    pub(super) function: Function,
    /// Bytes of its parameter struct.
    pub(super) params: usize,
    /// Dynamic shared memory it has been allowed so far.
    pub(super) shared: AtomicU32,
}

/// Handle of a function; it lives as long as its module.
pub(super) struct Function(pub(super) sys::CUfunction);

// SAFETY: function handles may be used from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

struct Module(sys::CUmodule);

// SAFETY: module handles may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// All kernels of a device.
pub(super) struct Kernels {
    functions: HashMap<Arc<str>, Kernel>,
    modules: Vec<Module>,
}

impl Kernels {
    /// Loads everything; the context is current.
    pub(super) fn load(limits: &Limits) -> Result<Self> {
        let mut kernels = Self { functions: HashMap::new(), modules: Vec::new() };
        for (file, image) in IMAGES {
            let compiled;
            let image = if ARCHS.is_empty() {
                compiled = nvrtc::compile(file, image, HEADERS, limits.arch)?;
                &compiled
            } else {
                *image
            };
            kernels.add(file, image, limits)?;
        }
        Ok(kernels)
    }

    pub(super) fn get(&self, name: &str) -> Result<&Kernel> {
        match self.functions.get(name) {
            Some(kernel) => Ok(kernel),
            None => bail!(Unsupported, "this build has no kernel {name}"),
        }
    }

    /// Gives the modules up; the context is current, if it still can be. After a fault the calls fail, which changes
    /// nothing.
    pub(super) fn unload(&mut self) {
        self.functions.clear();
        for module in self.modules.drain(..) {
            // SAFETY: loaded in `add`, unloaded once, and its functions are gone.
            let _ = unsafe { sys::cuModuleUnload(module.0) };
        }
    }

    fn add(&mut self, file: &str, image: &[u8], limits: &Limits) -> Result<()> {
        let stage = format!(
            "loading the kernels of {file} on a device of compute capability {}.{} (this build holds: {})",
            limits.arch.0,
            limits.arch.1,
            if ARCHS.is_empty() { "sources".to_owned() } else { ARCHS.join(", ") }
        );
        // the driver reads images by 8 bytes
        let mut aligned = crate::alloc::zeroed::<u64>("a kernel image", image.len().div_ceil(8))?;
        for (word, bytes) in aligned.iter_mut().zip(image.chunks(8)) {
            *word = u64::from_le_bytes(std::array::from_fn(|i| bytes.get(i).copied().unwrap_or(0)));
        }
        let mut module = std::ptr::null_mut();
        // SAFETY: the image is a fatbin or cubin, which says its own length; the context is current.
        plain(&stage, unsafe { sys::cuModuleLoadData(&raw mut module, aligned.as_ptr().cast()) })?;
        self.modules.push(Module(module));
        let mut count = 0;
        // SAFETY: the module was just loaded; the pointer outlives the call.
        plain(&stage, unsafe { sys::cuModuleGetFunctionCount(&raw mut count, module) })?;
        if count == 0 {
            return Ok(()); // a file whose kernels are for another architecture
        }
        let mut functions = vec![std::ptr::null_mut(); count as usize];
        // SAFETY: the vector has room for `count` handles.
        plain(&stage, unsafe { sys::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, module) })?;
        for function in functions {
            let (mut name, mut offset, mut size) = (std::ptr::null(), 0, 0);
            // SAFETY: the function belongs to the module; the pointers outlive the calls.
            plain(&stage, unsafe { sys::cuFuncGetName(&raw mut name, function) })?;
            // SAFETY: as above; every kernel has one parameter.
            plain(&stage, unsafe { sys::cuFuncGetParamInfo(function, 0, &raw mut offset, &raw mut size) })?;
            // SAFETY: a NUL-terminated string that lives as long as the module.
            let name: Arc<str> = unsafe { CStr::from_ptr(name) }.to_string_lossy().into();
            let (shared, params) = (AtomicU32::new(0), size);
            let kernel = Kernel { name: Arc::clone(&name), function: Function(function), params, shared };
            self.functions.insert(name, kernel);
        }
        Ok(())
    }
}

impl Drop for Kernels {
    /// Loading that ended early, in a context that is current; otherwise everything was given up before.
    fn drop(&mut self) {
        self.unload();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_says_which_kernels_and_architectures_it_holds() {
        let inventory = kernels();
        let files = [
            "attention",
            "attention_runs_sm90",
            "attention_sm90",
            "compressor",
            "exchange",
            "hybrid",
            "hyper",
            "indexer",
            "indexer_sm90",
            "insert",
            "linear",
            "moe",
            "norm",
            "sample",
            "unfused",
            "wide",
        ];
        for file in files {
            assert!(inventory.files.contains(&file), "{file} in {:?}", inventory.files);
        }
        assert_eq!(inventory.architectures.is_empty(), !HEADERS.is_empty(), "sources come with their headers");
        assert!(inventory.bytes > 10_000);
    }
}
