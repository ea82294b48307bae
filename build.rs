//! Compiles the CUDA kernels if nvcc is there, names the shared library's version, forbids undefined symbols in it, and
//! tells dependants where the header is.
//!
//! nvcc is never required: without it the sources are embedded, and NVRTC compiles them when an engine starts. It is
//! looked for in `DSV4_NVCC`, on the PATH and in /usr/local/cuda; `DSV4_CUDA_ARCHS` names the architectures.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, thread};

/// Machine code for these, and PTX of the first for later ones. `a`: this very chip; `f`: its family.
const ARCHS: &str = "80,86,89,90a,100f,120f";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let get = |name: &str| env::var(name).unwrap_or_default();
    let cuda = env::var_os("CARGO_FEATURE_CUDA").is_some();
    // for dsv4_build_info()
    println!("cargo::rustc-env=DSV4_TARGET={}", get("TARGET"));
    println!("cargo::rustc-env=DSV4_PROFILE={}", get("PROFILE"));
    // for build scripts of crates that depend on this one: DEP_DSV4_INCLUDE
    println!("cargo::metadata=include={}/include", get("CARGO_MANIFEST_DIR"));
    let folder = PathBuf::from(get("CARGO_MANIFEST_DIR")).join("kernels");
    let held = if cuda { kernels(&folder, &PathBuf::from(get("OUT_DIR"))) } else { "off".into() };
    println!("cargo::rustc-env=DSV4_CUDA={held}");

    if get("CARGO_CFG_TARGET_OS") == "linux" {
        // while the version is 0.x every minor version is an ABI of its own
        let major = get("CARGO_PKG_VERSION_MAJOR");
        let abi = if major == "0" { format!("0.{}", get("CARGO_PKG_VERSION_MINOR")) } else { major };
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libdsv4.so.{abi}");
        // the sanitizers' own functions stay undefined in a shared library
        if env::var_os("CARGO_CFG_SANITIZE").is_none() {
            println!("cargo::rustc-cdylib-link-arg=-Wl,-z,defs");
        }
    }
}

/// Writes `kernels.rs`, which `src/backend/cuda/kernels.rs` includes: images or sources, and their architectures. Says in
/// words what that is.
fn kernels(folder: &Path, out: &Path) -> String {
    println!("cargo::rerun-if-changed=kernels");
    println!("cargo::rerun-if-env-changed=DSV4_NVCC");
    println!("cargo::rerun-if-env-changed=DSV4_CUDA_ARCHS");
    let mut files: Vec<PathBuf> = fs::read_dir(folder).expect("kernels/").flatten().map(|e| e.path()).collect();
    files.sort();
    let with = |extension: &str| -> Vec<&PathBuf> {
        files.iter().filter(|f| f.extension().is_some_and(|e| e == extension)).collect()
    };
    let (sources, headers) = (with("cu"), with("cuh"));
    let archs = env::var("DSV4_CUDA_ARCHS").unwrap_or_else(|_| ARCHS.into());
    let archs: Vec<&str> = archs.split(',').map(str::trim).filter(|a| !a.is_empty()).collect();
    let nvcc = find_nvcc().filter(|_| !archs.is_empty());
    let files: Vec<PathBuf> = match &nvcc {
        Some(nvcc) => compile(nvcc, &sources, &archs, out),
        None => sources.iter().map(|s| (*s).clone()).collect(),
    };
    let entry = |file: &Path, name: &Path| {
        let name = name.file_name().unwrap_or_default().to_string_lossy();
        format!("    ({name:?}, include_bytes!({file:?})),\n")
    };
    let list = |of: &[String]| of.concat();
    let images: Vec<String> = files.iter().zip(&sources).map(|(file, source)| entry(file, source)).collect();
    let headers: Vec<String> = if nvcc.is_some() { Vec::new() } else { headers.iter().map(|h| entry(h, h)).collect() };
    let archs = if nvcc.is_some() { archs } else { Vec::new() };
    let text = format!(
        "/// Architectures of the embedded machine code; empty if the sources are embedded.\n\
         pub(super) const ARCHS: &[&str] = &{archs:?};\n\
         pub(super) const IMAGES: &[(&str, &[u8])] = &[\n{}];\n\
         pub(super) const HEADERS: &[(&str, &[u8])] = &[\n{}];\n",
        list(&images),
        list(&headers)
    );
    fs::write(out.join("kernels.rs"), text).expect("writing to OUT_DIR");
    if archs.is_empty() { "on (kernels as sources)".into() } else { format!("on (kernels for {})", archs.join(" ")) }
}

fn find_nvcc() -> Option<PathBuf> {
    if let Some(path) = env::var_os("DSV4_NVCC") {
        let path = PathBuf::from(path);
        // an empty value means: do without
        assert!(path.as_os_str().is_empty() || path.is_file(), "DSV4_NVCC={} does not exist", path.display());
        return path.is_file().then_some(path);
    }
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain([PathBuf::from("/usr/local/cuda/bin")]);
    folders.map(|folder| folder.join("nvcc")).find(|nvcc| nvcc.is_file())
}

/// One fatbin a source, as many at a time as cargo allows jobs.
fn compile(nvcc: &Path, sources: &[&PathBuf], archs: &[&str], out: &Path) -> Vec<PathBuf> {
    let jobs = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(1usize).max(1);
    let target = |source: &Path| out.join(source.file_stem().unwrap_or_default()).with_extension("fatbin");
    for batch in sources.chunks(jobs) {
        thread::scope(|scope| {
            for &source in batch {
                let target = &target;
                scope.spawn(move || {
                    let mut command = Command::new(nvcc);
                    command.args(["-std=c++17", "-O3", "-fatbin", "-compress-mode=size", "-o"]).arg(target(source));
                    for arch in archs {
                        command.arg(format!("-gencode=arch=compute_{arch},code=sm_{arch}"));
                    }
                    let ptx = archs[0].trim_end_matches(['a', 'f']);
                    command.arg(format!("-gencode=arch=compute_{ptx},code=compute_{ptx}")).arg(source);
                    let output = command.output().unwrap_or_else(|e| panic!("{}: {e}", nvcc.display()));
                    let errors = String::from_utf8_lossy(&output.stderr);
                    assert!(output.status.success(), "{} failed:\n{errors}", source.display());
                });
            }
        });
    }
    sources.iter().map(|source| target(source)).collect()
}
