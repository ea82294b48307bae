//! A panic inside each function becomes its documented result, and its object is poisoned.

use std::ffi::{CStr, c_char};

use dsv4::ffi::testing::panic_in;

use super::functions::FUNCTIONS;
use super::signatures::Signature;
use super::world::{World, is_object};
use super::{PANIC, POISONED, hook};

/// Pitfall 100.
#[test]
fn a_panic_in_any_function_is_stopped_and_reported_and_poisons_its_object() {
    let _turn = hook::panics_are_mine();
    for signature in Signature::all() {
        let mut world = World::new();
        let name = FUNCTIONS.iter().find(|(known, _)| *known == signature.name).expect("compared with the header").0;
        panic_in(name);
        let outcome = world.call(&signature, None);
        match (outcome.status, signature.result.as_str()) {
            (Some(status), _) => {
                assert_eq!((status, world.code()), (PANIC, PANIC), "{name}: {}", world.message());
                let message = world.message();
                assert!(message.contains(name) && message.contains("injected by a test"), "{name}: {message}");
                assert!(message.contains("src/ffi/"), "{name} tells where: {message}");
                assert!(outcome.outputs_are_zero, "{name}: outputs are zero after a panic");
            }
            (None, "const char *") => {
                // SAFETY: such functions return static text, also after a panic.
                let text = unsafe { CStr::from_ptr(outcome.value as *const c_char) };
                assert!(text.is_empty() || text == c"UNKNOWN", "{name}: {text:?}");
            }
            (None, "uint32_t") => assert_eq!(outcome.value as u32, 0, "{name}"),
            (None, "void") => {}
            (None, other) => panic!("{name} returns {other}: say here what it returns after a panic"),
        }
        let object = signature.parameters.first().map(|p| p.kind.trim_start_matches("const ").trim_end_matches(" *"));
        // cancelling touches one flag, which a panic cannot break
        if object.is_some_and(is_object) && outcome.status.is_some() && !name.ends_with("_cancel") {
            let again = world.call(&signature, None);
            assert_eq!(again.status, Some(POISONED), "{name} after a panic: {}", world.message());
            assert!(again.outputs_are_zero, "{name}: outputs are zero when the object is poisoned");
            assert!(world.message().contains("can only be freed"), "{name}: {}", world.message());
        }
    }
}
