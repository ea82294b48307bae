//! Compiling the kernels when a device is opened, for builds made without nvcc.
//!
//! The library is opened and every function looked up before anything runs, so a missing one is an error with a remedy.

use std::ffi::{CString, c_char, c_int, c_void};

use libloading::Library;

use crate::error::{Error, ErrorKind, Result, bail};

/// Names under which the loader finds NVRTC, newest first.
#[cfg(target_os = "windows")]
const LIBRARIES: [&str; 1] = ["nvrtc64_130_0.dll"];
#[cfg(not(target_os = "windows"))]
const LIBRARIES: [&str; 2] = ["libnvrtc.so.13", "libnvrtc.so"];

type Program = *mut c_void;
type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Copy = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;

struct Nvrtc {
    create: Create,
    compile: Compile,
    cubin_size: Size,
    cubin: Copy,
    log_size: Size,
    log: Copy,
    destroy: Destroy,
    /// Kept open while the functions are in use.
    _library: Library,
}

/// Machine code of one source for compute capability `arch`.
///
/// # Errors
/// `Unavailable` if NVRTC is not installed, with the remedy; `Unsupported` with the compiler's words if it refuses.
pub(super) fn compile(name: &str, source: &[u8], headers: &[(&str, &[u8])], arch: (u32, u32)) -> Result<Vec<u8>> {
    Nvrtc::open()?.compile(name, source, headers, arch)
}

impl Nvrtc {
    fn open() -> Result<Self> {
        let mut reasons = Vec::new();
        for name in LIBRARIES {
            // SAFETY: NVRTC's initialisers have no requirements.
            match unsafe { Library::new(name) } {
                Ok(library) => return Self::with(library, name),
                Err(error) => reasons.push(error.to_string()),
            }
        }
        bail!(
            Unavailable,
            "this build of dsv4 holds CUDA kernels as sources only, and NVRTC, which would compile them, was not found \
             ({}): install the CUDA 13 toolkit's NVRTC, or use a build made where nvcc was",
            reasons.join("; ")
        );
    }

    fn with(library: Library, name: &str) -> Result<Self> {
        fn get<T: std::marker::Copy>(library: &Library, name: &str, symbol: &str) -> Result<T> {
            // SAFETY: the types above are those of nvrtc.h.
            match unsafe { library.get::<T>(symbol) } {
                Ok(function) => Ok(*function),
                Err(_) => bail!(Unavailable, "{name} lacks the function {symbol}: install NVRTC of CUDA 13"),
            }
        }
        Ok(Self {
            create: get(&library, name, "nvrtcCreateProgram")?,
            compile: get(&library, name, "nvrtcCompileProgram")?,
            cubin_size: get(&library, name, "nvrtcGetCUBINSize")?,
            cubin: get(&library, name, "nvrtcGetCUBIN")?,
            log_size: get(&library, name, "nvrtcGetProgramLogSize")?,
            log: get(&library, name, "nvrtcGetProgramLog")?,
            destroy: get(&library, name, "nvrtcDestroyProgram")?,
            _library: library,
        })
    }

    fn compile(&self, name: &str, source: &[u8], headers: &[(&str, &[u8])], arch: (u32, u32)) -> Result<Vec<u8>> {
        let text = |bytes: &[u8]| {
            CString::new(bytes).map_err(|_| Error::new(ErrorKind::Unsupported, format!("{name} contains a NUL byte")))
        };
        let (source, file) = (text(source)?, text(name.as_bytes())?);
        let names = headers.iter().map(|(n, _)| text(n.as_bytes())).collect::<Result<Vec<_>>>()?;
        let texts = headers.iter().map(|(_, t)| text(t)).collect::<Result<Vec<_>>>()?;
        let pointers = |of: &[CString]| of.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let (name_pointers, text_pointers) = (pointers(&names), pointers(&texts));
        let mut program = std::ptr::null_mut();
        // SAFETY: NUL-terminated strings that outlive the call, as many as said.
        let status = unsafe {
            (self.create)(
                &raw mut program,
                source.as_ptr(),
                file.as_ptr(),
                headers.len() as c_int,
                text_pointers.as_ptr(),
                name_pointers.as_ptr(),
            )
        };
        if status != 0 {
            return Err(refused(status, format!("NVRTC refused {name}: error {status}")));
        }
        // Hopper's own instructions need its own target
        let own = if arch == (9, 0) { "a" } else { "" };
        let target = format!("--gpu-architecture=sm_{}{}{own}", arch.0, arch.1);
        let options = [text(target.as_bytes())?, text(b"-std=c++17")?];
        let option_pointers = pointers(&options);
        // SAFETY: the program was just made; the options outlive the call.
        let status = unsafe { (self.compile)(program, options.len() as c_int, option_pointers.as_ptr()) };
        let result = if status == 0 {
            self.fetch(program, self.cubin_size, self.cubin)
        } else {
            let log = self.fetch(program, self.log_size, self.log).unwrap_or_default();
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
            Err(refused(status, format!("NVRTC cannot compile {name} for sm_{}{}: {log}", arch.0, arch.1)))
        };
        // SAFETY: made above, destroyed once.
        let _ = unsafe { (self.destroy)(&raw mut program) };
        result
    }

    fn fetch(&self, program: Program, size: Size, copy: Copy) -> Result<Vec<u8>> {
        let mut len = 0;
        // SAFETY: the program lives; the pointer outlives the call.
        let mut status = unsafe { size(program, &raw mut len) };
        let mut bytes = crate::alloc::zeroed::<u8>("compiled kernels", len)?;
        if status == 0 {
            // SAFETY: the buffer has the size that was just given.
            status = unsafe { copy(program, bytes.as_mut_ptr().cast()) };
        }
        if status != 0 {
            return Err(refused(status, format!("NVRTC does not hand out what it compiled: error {status}")));
        }
        Ok(bytes)
    }
}

/// NVRTC's refusal; its first error is that of memory.
fn refused(status: c_int, message: String) -> Error {
    Error::new(if status == 1 { ErrorKind::OutOfMemory } else { ErrorKind::Unsupported }, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pitfall 104.
    #[test]
    fn without_nvrtc_there_is_a_remedy_and_with_it_errors_are_the_compilers_words() {
        match compile("broken.cu", b"this is no kernel", &[], (8, 0)) {
            Err(error) if error.kind() == ErrorKind::Unavailable => {
                assert!(error.message().contains("NVRTC") && error.message().contains("nvcc"), "{error}");
            }
            Err(error) => assert!(error.message().contains("broken.cu"), "{error}"),
            Ok(_) => panic!("that compiled"),
        }
    }

    /// Where NVRTC is installed, the sources compile with it alone.
    #[test]
    #[expect(clippy::print_stderr, reason = "a skipped test says so")]
    fn every_kernel_compiles_with_nvrtc_where_it_is_installed() {
        if Nvrtc::open().is_err() {
            eprintln!("skipped: NVRTC is not installed");
            return;
        }
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels");
        let (mut sources, mut headers) = (Vec::new(), Vec::new());
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let Some(extension) = path.extension() else { continue };
            match extension.to_str() {
                Some("cu") => sources.push((name, std::fs::read(&path).unwrap())),
                Some("cuh") => headers.push((name, std::fs::read(&path).unwrap())),
                _ => {}
            }
        }
        let headers: Vec<(&str, &[u8])> = headers.iter().map(|(n, t)| (n.as_str(), t.as_slice())).collect();
        assert!(sources.len() >= 8);
        for (name, text) in &sources {
            for arch in [(8, 0), (9, 0)] {
                let cubin = compile(name, text, &headers, arch).unwrap_or_else(|e| panic!("{e}"));
                assert!(cubin.starts_with(b"\x7fELF"), "{name}");
                for (kernel, file) in [(&b"attend_hopper\0"[..], "attention_sm90.cu"), (b"linear_wide_e4m3", "wide.cu")]
                {
                    let has = cubin.windows(kernel.len()).any(|w| w == kernel);
                    assert_eq!(has, name == file && arch == (9, 0), "{name} for {arch:?}");
                }
            }
        }
    }
}
