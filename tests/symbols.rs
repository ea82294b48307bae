//! `ctest/abi/symbols.txt`, which the C tests compare the built libraries with, lists the functions of the header.

use std::fs;
use std::path::Path;

/// Pitfalls 98, 99.
#[test]
fn the_frozen_symbols_are_the_headers_functions() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let header = fs::read_to_string(root.join("include/dsv4.h")).expect("include/dsv4.h is there");
    let declarations = header.split("\nDSV4_API ").skip(1).map(|rest| rest.split('(').next().unwrap_or_default());
    let mut names: Vec<&str> =
        declarations.map(|head| head.rsplit([' ', '*', '\n']).next().unwrap_or_default()).collect();
    names.sort_unstable();
    let listed = fs::read_to_string(root.join("ctest/abi/symbols.txt")).expect("ctest/abi/symbols.txt is there");
    let listed: Vec<&str> = listed.lines().collect();
    assert_eq!(names, listed, "a new function is added to the list; one that goes breaks programs");
}
