//! Names the shared library's version, forbids undefined symbols in it, and tells dependants where the header is.

use std::env;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let get = |name: &str| env::var(name).unwrap_or_default();
    // for dsv4_build_info()
    println!("cargo::rustc-env=DSV4_TARGET={}", get("TARGET"));
    println!("cargo::rustc-env=DSV4_PROFILE={}", get("PROFILE"));
    println!("cargo::rustc-env=DSV4_CUDA={}", if env::var_os("CARGO_FEATURE_CUDA").is_some() { "on" } else { "off" });
    // for build scripts of crates that depend on this one: DEP_DSV4_INCLUDE
    println!("cargo::metadata=include={}/include", get("CARGO_MANIFEST_DIR"));

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
