//! The C API called as C calls it, function by function, driven by the header: a new function is tested here without a new
//! line, and fails if it lacks a fence, a NULL check, or outputs that are zero after a failure.

mod functions;
mod hook;
mod nulls;
mod panics;
mod signatures;
mod world;

use std::collections::BTreeSet;

use functions::FUNCTIONS;
use signatures::Signature;
use world::World;

// `DSV4_STATUS_*` as C sees them.
const OK: i32 = 0;
const INVALID_ARGUMENT: i32 = 1;
const POISONED: i32 = 16;
const PANIC: i32 = 17;

#[test]
fn this_table_and_the_header_name_the_same_functions() {
    let table: BTreeSet<&str> = FUNCTIONS.iter().map(|(name, _)| *name).collect();
    let signatures = Signature::all();
    let header: BTreeSet<&str> = signatures.iter().map(|s| s.name.as_str()).collect();
    assert_eq!(table, header);
}

#[test]
fn every_function_succeeds_with_valid_arguments() {
    let _turn = hook::no_panics_armed();
    for signature in Signature::all() {
        let mut world = World::new();
        let Some(status) = world.call(&signature, None).status else { continue };
        // where there is no GPU the device list says so
        let is_fine = status == OK || signature.name.starts_with("dsv4_device_");
        assert!(is_fine, "{}: {status}: {}", signature.name, world.message());
        assert_eq!(status, world.code(), "{}: the error repeats the status", signature.name);
    }
}
