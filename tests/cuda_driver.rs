//! Machines whose NVIDIA driver is broken in one way or another: each gives a reason in words, never a panic, and the CPU
//! goes on working. The drivers are stubs in C, made here; without a C compiler the tests say so and pass.

#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "a failed call is a failed test; a skipped one says so")]

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Names of all driver functions that the library looks up.
fn symbols() -> Vec<String> {
    let source = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/src/backend/cuda/driver.rs")).unwrap();
    let list = source.split("const SYMBOLS: &[&str] = &[").nth(1).unwrap().split("];").next().unwrap();
    list.split('"').skip(1).step_by(2).map(str::to_owned).collect()
}

/// A driver whose functions succeed, except that `special` (name, body) differ and `missing` is not there.
fn stub(dir: &Path, special: &[(&str, &str)], missing: &str) -> bool {
    const WELL: &[(&str, &str)] = &[
        ("cuDriverGetVersion", "*(int *)a = 13000; return 0;"),
        ("cuDeviceGetCount", "*(int *)a = 1; return 0;"),
        ("cuDeviceGetName", "((char *)a)[0] = 'X'; ((char *)a)[1] = 0; return 0;"),
        ("cuDeviceTotalMem_v2", "*(unsigned long *)a = 1ul << 34; return 0;"),
        ("cuGetErrorName", "*(const char **)b = \"CUDA_ERROR_STUB\"; return 0;"),
        ("cuGetErrorString", "*(const char **)b = \"a stub said so\"; return 0;"),
    ];
    let names = symbols();
    assert!(names.len() > 40, "{names:?}");
    let mut source = String::new();
    for name in names.iter().filter(|n| *n != missing) {
        let body = special.iter().chain(WELL).find(|(n, _)| n == name).map_or("return 0;", |(_, body)| body);
        writeln!(source, "int {name}(void *a, void *b, void *c) {{ (void)a, (void)b, (void)c; {body} }}").unwrap();
    }
    fs::write(dir.join("stub.c"), source).unwrap();
    let library = dir.join("libcuda.so.1");
    let compiled = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(dir.join("stub.c")).output();
    match compiled {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
        Err(_) => {
            eprintln!("skipped: no C compiler");
            return false;
        }
    }
    fs::copy(&library, dir.join("libcuda.so")).unwrap();
    true
}

/// Output of `dsv4` with the stub in front of any real driver.
fn dsv4(dir: &Path, args: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_dsv4")).args(args).env("LD_LIBRARY_PATH", dir).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&text).into_owned())
}

/// Both the list of devices and the attempt to use one end with `reason`.
fn refused(special: &[(&str, &str)], missing: &str, reason: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    if !stub(dir.path(), special, missing) {
        return;
    }
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/models/tiny-v4");
    let (code, info) = dsv4(dir.path(), &["info", model]);
    assert_eq!(code, Some(0), "{info}");
    let (code, test) = dsv4(dir.path(), &["selftest"]);
    assert_eq!(code, Some(1), "{test}");
    for text in [&info, &test] {
        assert!(!text.contains("panicked"), "{text}");
        assert!(reason.iter().all(|part| text.contains(part)), "{text}");
    }
    let (code, text) = dsv4(dir.path(), &["run", model, "--prompt", "Once", "--max-tokens", "2", "--greedy"]);
    assert_eq!(code, Some(0), "the CPU works all the same: {text}");
}

/// Pitfalls 99, 103.
#[test]
fn a_driver_that_lacks_any_one_function_is_refused_by_its_name() {
    for name in ["cuInit", "cuLaunchKernelEx", "cuFuncGetParamInfo", "cuEventElapsedTime_v2"] {
        refused(&[], name, &[name, "R580"]);
    }
}

/// Pitfall 103.
#[test]
fn a_driver_that_does_not_start_says_its_error() {
    // 35 and 4321 are no errors of the driver's that cudarc knows
    for (code, number) in [
        ("return 100;", "error 100"),
        ("return 999;", "error 999"),
        ("return 35;", "error 35"),
        ("return 4321;", "error 4321"),
    ] {
        refused(&[("cuInit", code)], "", &["cuInit", number, "a stub said so"]);
    }
}

/// Pitfall 103.
#[test]
fn an_old_driver_is_refused_with_both_versions() {
    refused(&[("cuDriverGetVersion", "*(int *)a = 12040; return 0;")], "", &["12.4", "13.0", "R580"]);
}

/// Pitfall 103.
#[test]
fn a_driver_without_devices_is_told_from_no_driver() {
    refused(&[("cuDeviceGetCount", "*(int *)a = 0; return 0;")], "", &["no CUDA device"]);
}

/// Pitfall 103.
#[test]
fn a_device_of_an_old_or_an_unknown_architecture_is_a_reason() {
    let dir = tempfile::tempdir().unwrap();
    // attributes are (int *value, attribute, device); capability 7.5 is attributes 75 and 76
    let turing = "*(int *)a = (long)b == 75 ? 7 : (long)b == 76 ? 5 : 1; return 0;";
    if !stub(dir.path(), &[("cuDeviceGetAttribute", turing)], "") {
        return;
    }
    let (code, text) = dsv4(dir.path(), &["selftest"]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("7.5") && text.contains("8.0") && !text.contains("panicked"), "{text}");

    // an architecture that no code fits: the driver refuses the module
    let future = "*(int *)a = (long)b == 75 ? 99 : 1; return 0;";
    stub(dir.path(), &[("cuDeviceGetAttribute", future), ("cuModuleLoadData", "return 209;")], "");
    let (code, text) = dsv4(dir.path(), &["selftest"]);
    assert_eq!(code, Some(1), "{text}");
    let sources = text.contains("NVRTC"); // a build without nvcc never gets to the driver
    assert!((text.contains("99.1") || sources) && !text.contains("panicked"), "{text}");
}
