//! The architecture's rules about who may know whom, checked on the source text (ARCHITECTURE.md, "Invariants").

#![allow(clippy::unwrap_used, reason = "a failed call is a failed test")]

use std::fs;
use std::path::{Path, PathBuf};

/// Which modules a module may name in `crate::` paths. `error`, `alloc`, `file` and `tensor` are leaves that all may use.
const ALLOWED: &[(&str, &[&str])] = &[
    ("alloc", &[]),
    ("error", &[]),
    ("file", &[]),
    ("tensor", &[]),
    ("weights", &[]),
    ("cache", &["model::config"]),
    ("backend", &["cache", "model::config", "sampler"]),
    ("model", &["weights", "cache", "backend", "tokenizer"]),
    ("engine", &["TokenId", "model", "cache", "backend", "sampler"]),
    ("tokenizer", &["TokenId"]),
    ("sampler", &["TokenId", "tokenizer"]),
    ("chat", &["TokenId", "tokenizer"]),
    ("session", &["TokenId", "engine", "cache", "model", "sampler", "tokenizer"]),
];

const LEAVES: &[&str] = &["error", "alloc", "file", "tensor"];

fn source_files(dir: &Path, out: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            source_files(&path, out);
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.push(path);
        }
    }
}

/// (path below src with forward slashes, code without comments and test modules)
fn sources() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    source_files(&root, &mut files);
    files
        .into_iter()
        .map(|path| {
            let name = path.strip_prefix(&root).unwrap().to_string_lossy().replace('\\', "/");
            let text = fs::read_to_string(&path).unwrap();
            let text = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
            let code: Vec<&str> = text.lines().map(|l| l.split("//").next().unwrap_or_default()).collect();
            (name, code.join("\n"))
        })
        .collect()
}

fn only_in(needle: &str, places: &[&str]) {
    for (name, code) in sources() {
        if code.contains(needle) {
            assert!(
                places.iter().any(|p| name.starts_with(p)),
                "src/{name} contains `{needle}`, which belongs only in {places:?}"
            );
        }
    }
}

#[test]
fn the_c_abi_is_defined_in_ffi_only() {
    only_in("extern \"C\"", &["ffi/", "backend/cuda/", "bin/"]);
    only_in("no_mangle", &["ffi/"]);
}

#[test]
fn crates_with_a_single_home_stay_there() {
    only_in("cudarc", &["backend/cuda/"]);
    only_in("libloading", &["backend/cuda/"]);
    only_in("memmap2", &["weights/mmap.rs"]);
    only_in("clap", &["bin/"]);
    only_in("indicatif", &["bin/"]);
}

#[test]
fn unsafe_code_has_few_homes() {
    only_in("unsafe {", &["ffi/", "backend/cuda/", "backend/cpu/simd/", "weights/mmap.rs", "bin/"]);
    only_in("unsafe fn", &["ffi/", "backend/cuda/", "backend/cpu/simd/", "weights/mmap.rs", "bin/"]);
}

/// Pitfalls 96, 102.
#[test]
fn the_library_never_prints_or_exits() {
    for needle in ["println!(", "eprintln!(", "print!(", "eprint!(", "process::exit", "process::abort", "dbg!("] {
        only_in(needle, &["bin/"]);
    }
}

#[test]
fn model_has_no_build_time_switches() {
    for (name, code) in sources() {
        assert!(!(name.starts_with("model/") && code.contains("cfg(feature")), "src/{name} depends on a feature");
    }
}

#[test]
fn modules_use_each_other_only_along_the_arrows() {
    for (name, code) in sources() {
        let module = name.split(['/', '.']).next().unwrap_or_default();
        let Some((_, allowed)) = ALLOWED.iter().find(|(m, _)| *m == module) else {
            assert!(matches!(module, "lib" | "ffi" | "bin"), "module {module} is missing from the table of arrows");
            continue;
        };
        for used in code.split("crate::").skip(1) {
            let used: &str = used.split(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':')).next().unwrap_or("");
            let fits = |m: &&str| used == *m || used.starts_with(&format!("{m}::"));
            assert!(
                fits(&module) || LEAVES.iter().any(fits) || allowed.iter().any(fits),
                "src/{name} uses crate::{used}, but {module} may use only {allowed:?} and {LEAVES:?}"
            );
        }
    }
}
