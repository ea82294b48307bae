//! Version
//!
//! The header and the library that is loaded at run time can be of different versions; `dsv4_abi_check` below tells in
//! words whether they fit.

use std::ffi::c_char;

use super::guard::guard_value;
use crate::error::{Result, bail};

/// Version of the library as text, for example `"0.1.0"`. Static text; never NULL.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn dsv4_version() -> *const c_char {
    guard_value("dsv4_version", c"".as_ptr(), || concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast())
}

/// Version of the library as a number that grows: `major << 16 | minor << 8 | patch`. Compare with
/// `DSV4_VERSION_NUMBER`, the version of this header.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn dsv4_version_number() -> u32 {
    guard_value("dsv4_version_number", 0, || VERSION)
}

/// How the library was built, for bug reports: version, target, features. Static text; never NULL.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn dsv4_build_info() -> *const c_char {
    guard_value("dsv4_build_info", c"".as_ptr(), || BUILD_INFO.as_ptr().cast())
}

pub(super) const VERSION: u32 = number(
    decimal(env!("CARGO_PKG_VERSION_MAJOR")),
    decimal(env!("CARGO_PKG_VERSION_MINOR")),
    decimal(env!("CARGO_PKG_VERSION_PATCH")),
);

const BUILD_INFO: &str = concat!(
    "dsv4 ",
    env!("CARGO_PKG_VERSION"),
    ", ",
    env!("DSV4_TARGET"),
    ", ",
    env!("DSV4_PROFILE"),
    ", cuda ",
    env!("DSV4_CUDA"),
    "\0"
);

const fn number(major: u32, minor: u32, patch: u32) -> u32 {
    major << 16 | minor << 8 | patch
}

const fn decimal(text: &str) -> u32 {
    let (digits, mut value, mut i) = (text.as_bytes(), 0, 0);
    while i < digits.len() {
        value = value * 10 + (digits[i] - b'0') as u32;
        i += 1;
    }
    value
}

/// See `dsv4_abi_check`.
pub(super) fn check(header: u32, library: u32) -> Result<()> {
    let parts = |version: u32| (version >> 16, version >> 8 & 255, version & 255);
    let ((major, minor, patch), (lib_major, lib_minor, lib_patch)) = (parts(header), parts(library));
    let same_line = major == lib_major && (major > 0 || minor == lib_minor);
    if same_line && minor <= lib_minor {
        return Ok(());
    }
    let remedy = if (major, minor) > (lib_major, lib_minor) {
        "the library is too old: install the version of the header, or compile against the library's own header"
    } else {
        "the program is too old: compile it again with the library's header"
    };
    bail!(
        Unsupported,
        "the program was compiled with dsv4.h {major}.{minor}.{patch}, but the library is {lib_major}.{lib_minor}.{lib_patch}; {remedy}"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_fit_within_a_line_and_mismatches_say_who_is_too_old() {
        let v = number;
        let fits = |header, library| check(header, library).is_ok();
        assert!(fits(v(0, 1, 0), v(0, 1, 0)) && fits(v(0, 1, 7), v(0, 1, 2)) && fits(v(1, 2, 0), v(1, 5, 0)));
        assert!(!fits(v(0, 1, 0), v(0, 2, 0)) && !fits(v(1, 3, 0), v(1, 2, 9)) && !fits(v(0, 9, 0), v(1, 9, 0)));
        let message = |header, library| check(header, library).unwrap_err().message().to_owned();
        assert!(
            message(v(0, 2, 0), v(0, 1, 3)).contains("dsv4.h 0.2.0, but the library is 0.1.3; the library is too old")
        );
        assert!(message(v(0, 1, 0), v(0, 2, 0)).contains("the program is too old"));
    }
}
