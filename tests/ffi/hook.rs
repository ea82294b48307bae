//! Panics inside the library are silent, those of the host are its own.

use std::process::Command;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::{env, panic, thread};

use dsv4::ffi::status::dsv4_abi_check;
use dsv4::ffi::testing::panic_in;

use super::PANIC;

const CHILD: &str = "DSV4_TEST_HOOK_CHILD";

/// A panic is armed for the whole process, so tests that arm one run without those that expect none.
static TURN: RwLock<()> = RwLock::new(());

/// For tests that arm panics.
pub(crate) fn panics_are_mine() -> RwLockWriteGuard<'static, ()> {
    TURN.write().unwrap_or_else(PoisonError::into_inner)
}

/// For tests that call functions and expect no panic.
pub(crate) fn no_panics_armed() -> RwLockReadGuard<'static, ()> {
    TURN.read().unwrap_or_else(PoisonError::into_inner)
}

/// Pitfall 102.
#[test]
fn panics_inside_print_nothing_and_the_hosts_hook_goes_on() {
    let child = Command::new(env::current_exe().expect("this test"))
        .args(["--exact", "hook::what_the_child_does", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .expect("the test can start itself");
    let printed = String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success(), "{printed}");
    let lines: Vec<&str> = printed.lines().filter(|line| line.contains("panic")).collect();
    assert_eq!(lines, ["host hook: the host's own panic"], "{printed}");
}

/// Does something only when the test above starts it, in a process whose stderr can be read.
#[test]
#[expect(clippy::print_stderr, reason = "this is what the parent looks for")]
fn what_the_child_does() {
    if env::var_os(CHILD).is_none() {
        return;
    }
    panic::set_hook(Box::new(|info| {
        let text = info.payload().downcast_ref::<&str>().copied().unwrap_or("another panic");
        eprintln!("host hook: {text}");
    }));
    panic_in("dsv4_abi_check");
    // SAFETY: NULL is allowed.
    assert_eq!(unsafe { dsv4_abi_check(1 << 8, std::ptr::null_mut()) } as i32, PANIC);
    // as the engine's threads are called
    let worker = thread::Builder::new().name("dsv4-0".to_owned()).spawn(|| panic!("panic of a worker"));
    assert!(worker.expect("a thread").join().is_err());
    assert!(panic::catch_unwind(|| panic!("the host's own panic")).is_err());
}
