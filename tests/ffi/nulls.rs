//! NULL for each pointer of each function: refused by name, or allowed because the description says so.

use super::signatures::Signature;
use super::world::World;
use super::{INVALID_ARGUMENT, OK, hook};

/// Pitfall 100.
#[test]
fn null_for_any_pointer_is_named_or_documented() {
    let _turn = hook::no_panics_armed();
    let mut refused = 0;
    for signature in Signature::all() {
        for (i, parameter) in signature.parameters.iter().enumerate().filter(|(_, p)| p.is_pointer()) {
            let (function, name) = (&signature.name, &parameter.name);
            let documented = signature.description.contains(&format!("`{name}` may be NULL"));
            let mut world = World::new();
            let outcome = world.call(&signature, Some(i));
            let Some(status) = outcome.status else {
                assert!(documented, "{function} takes NULL for {name}, but does not say so");
                continue;
            };
            if documented || name == "err" {
                let is_fine = status == OK || function.starts_with("dsv4_device_");
                assert!(is_fine, "{function} with {name} = NULL: {status} {}", world.message());
                continue;
            }
            assert_eq!(status, INVALID_ARGUMENT, "{function} with {name} = NULL: {}", world.message());
            assert!(world.message().contains(&format!("{name} is NULL")), "{function}: {}", world.message());
            assert!(outcome.outputs_are_zero, "{function} with {name} = NULL: the other outputs are zero");
            refused += 1;
        }
    }
    assert!(refused > 60, "only {refused} pointers were refused");
}
