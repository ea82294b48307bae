//! Pitfall 106: a processor without AVX, FMA and F16C, as an emulator gives it.

#![cfg(all(feature = "cli", target_os = "linux", target_arch = "x86_64"))]
#![expect(clippy::print_stderr, reason = "a skipped test says so")]

use std::path::Path;
use std::process::Command;

#[test]
fn a_processor_without_vector_extensions_runs_the_portable_kernels() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models/tiny-v4");
    let mut emulator = Command::new("qemu-x86_64");
    emulator.args(["-cpu", "Nehalem", env!("CARGO_BIN_EXE_dsv4"), "run"]).arg(model);
    emulator.args(["--prompt", "Once upon a time", "--max-tokens", "4", "--greedy", "--verbose"]);
    let Ok(output) = emulator.output() else {
        eprintln!("SKIPPED a_processor_without_vector_extensions: qemu-x86_64 is not installed (Debian: qemu-user)");
        return;
    };
    let (text, log) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{log}", output.status);
    assert!(log.contains("simd portable"), "{log}");
    assert!(text.split_whitespace().count() >= 2, "{text}");
}
