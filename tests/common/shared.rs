//! Where the large shared test files are, if they are there at all.

use std::io::Write;
use std::path::{Path, PathBuf};

/// `path` inside the shared folder (`DSV4_SHARED`, else `../shared` beside the repository), or `None` with a visible
/// message that `test` skips it.
pub(crate) fn shared(test: &str, path: &str) -> Option<PathBuf> {
    let root = std::env::var_os("DSV4_SHARED")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared"), PathBuf::from);
    let full = root.join(path);
    if full.exists() {
        return Some(full);
    }
    say(&format!("SKIPPED {test}: {} is not there (set DSV4_SHARED)", full.display()));
    None
}

/// Writes a line past the test harness's capture, so that it is seen even if the test passes.
pub(crate) fn say(line: &str) {
    writeln!(std::io::stderr(), "{line}").expect("standard error is open");
}
