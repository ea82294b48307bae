//! dsv4: DeepSeek-V4 inside your own process
//!
//! Open an official checkpoint folder, make an engine on it, feed a session, generate. No daemon, no Python, no
//! conversion, no second copy of the weights.
//!
//! ```c
//! dsv4_error err = {0};
//! dsv4_model *model; dsv4_engine *engine; dsv4_session *session; dsv4_sampler *sampler;
//! if (dsv4_model_open("DeepSeek-V4-Flash", NULL, &model, &err)) { puts(err.message); return 1; }
//! ```
//!
//! `bindings/c/README.md` is the guide and `examples/c/chat.c` a whole program. This header is the reference.
//!
//! INSTALL AND LINK
//!
//! `cmake -S bindings/c -B build && cmake --build build && cmake --install build --prefix P` installs this header, the
//! shared and the static library, `dsv4.pc` and a CMake package. Then `pkg-config --cflags --libs dsv4`, or
//! `find_package(dsv4)` with the targets `dsv4::dsv4` (shared) and `dsv4::static`. Link the installed tree, not
//! `target/release`: programs look for the library under its soname, `libdsv4.so.0.1`, which is a link that the
//! installation makes (`ln -s libdsv4.so target/release/libdsv4.so.0.1` is enough for a trial). The library
//! needs libc, libm and `libgcc_s`, no CUDA and no C++ library; the NVIDIA driver is opened at run time where there is one.
//! A program can link one static library that was written in Rust; where another one is linked already, take the shared
//! library.
//!
//! CONVENTIONS
//!
//! Names are `dsv4_<object>_<verb>`. Arguments come in the order: the object, inputs, outputs, `err`. Text is UTF-8; with
//! a length it may hold any character, without one it ends with a NUL. Counts are numbers of elements, sizes are bytes,
//! tokens are `uint32_t` ids. Fields and parameters that hold a number of an enum have the type `int32_t` and are
//! checked.
//!
//! Structs begin with `size`, so that old programs run with new libraries and the other way round. Fill options with
//! their `dsv4_<object>_options_init`, which sets `size` and every default; NULL options are the defaults; fields that
//! this library does not know must be zero. Set `size` of structs that a call fills:
//! `dsv4_piece piece = {0}; piece.size = sizeof piece;`. The header needs C99 or C++11.
//!
//! ERRORS
//!
//! Every fallible function returns a `dsv4_status`, 0 for success, and writes code and message to `err`, its last
//! parameter, which may be NULL everywhere. Outputs are written only on success and are zero after a failure; with
//! `BUFFER_TOO_SMALL` the required length is written. A NULL that is not allowed is `INVALID_ARGUMENT` and named. Each
//! function's "Errors:" lists what it returns besides `INVALID_ARGUMENT`, `POISONED` and `PANIC`.
//!
//! OWNERSHIP
//!
//! What a function gives through `out` belongs to the caller, who ends it with the `_free` of its type; `_free(NULL)` does
//! nothing. Objects hold what they are made from: a model may be freed before its engine, an engine before its sessions.
//! Everything else that a function points to belongs to an object and lives as long as the function says. Inputs are
//! read during the call only.
//!
//! THREAD SAFETY
//!
//! A function that takes an object as `const` may run on several threads at once. One that takes it without `const` is for
//! one thread at a time: a second one gets `BUSY` at once. `_free` needs an object that no other call uses. Callbacks run
//! on the calling thread, except the log's. Signals may arrive at any time; calls go on. Programs that have no thread for
//! each session submit calls as requests: see "Event loops".
//!
//! After `fork()` the parent goes on. In the child, engines, sessions, generations and requests that it inherited are of no
//! use: every call with one returns `UNAVAILABLE` at once, and freeing it does nothing. Models may be used, also for engines of
//! the child's own.
//!
//! PANICS
//!
//! The library never exits or aborts on purpose, installs no signal handler, and writes nothing to stdout or stderr. A
//! defect that shows as a Rust panic is stopped: the call returns `PANIC` with place and text, the object it was called
//! on is poisoned, from then on refuses every call with `POISONED`, and can be freed; other objects go on. In functions
//! without a status the value after a panic is 0, NULL or the text that their description names. Programs that are
//! themselves written in Rust keep their panic hook for their own panics.
//!
//! MEMORY
//!
//! Whatever grows with model, context, batch or file is reserved in a way that can fail, and a refusal is
//! `OUT_OF_MEMORY` with the bytes asked for; the objects are as before the call. The parts that read JSON and encode text
//! allocate without asking; for those the most that the input can take is asked for first and given back, so the bytes
//! in the message can be far more than the text has. What remains are small allocations of fixed size inside the Rust
//! standard library and other libraries, and what other threads take in between: if the system refuses one of those, the
//! process aborts, as it does in most programs.
//!
//! MAPPED FILES
//!
//! Weights are mapped read-only. Sizes are checked when a model is opened and again with each step, and pages are brought in
//! where they are used first, so that a disk error is an `IO`; a file that another process truncates within a step makes the
//! system raise SIGBUS, as with any mapped file. Experts that are read because of `host_bytes` are not mapped: there a shorter
//! file is a `CORRUPT` that names it. Replace checkpoints by renaming folders, never by writing into files that are in use.

// This documentation and that of the files below is, in the order of `SECTIONS`, the text of include/dsv4.h; tests/header.rs
// writes it. Each file here is one section, and the functions in it are the section's.
#![expect(non_camel_case_types, reason = "these are the names that C sees")]
#![expect(clippy::missing_safety_doc, reason = "the contract of all functions is the text above")]

mod args;
pub mod cache;
pub mod call;
pub mod chat;
pub mod device;
pub mod engine;
pub mod generate;
mod guard;
mod handle;
pub mod log;
pub mod metrics;
pub mod model;
pub mod plan;
pub mod request;
pub mod sampler;
pub mod session;
pub mod session_file;
pub mod status;
pub mod tokenizer;
pub mod version;

/// Hooks for the tests of the C API; no part of it.
#[doc(hidden)]
pub mod testing {
    use std::sync::Arc;

    use super::model::dsv4_model;
    use crate::error::Result;
    use crate::model::Model;

    /// The sections of the header, which are the files of this folder, in reading order.
    pub const SECTIONS: &[&str] = &[
        "version",
        "status",
        "log",
        "device",
        "model",
        "tokenizer",
        "engine",
        "session",
        "call",
        "session_file",
        "sampler",
        "generate",
        "request",
        "chat",
        "cache",
        "metrics",
        "plan",
    ];

    /// The next call of the exported function called `function` panics inside.
    pub fn panic_in(function: &'static str) {
        super::guard::arm(function);
    }

    /// A handle, as `dsv4_model_open` gives it, on a model that may lie in memory.
    pub fn model_handle(model: Arc<Model>) -> Result<*mut dsv4_model> {
        Ok(Box::into_raw(Box::new(dsv4_model::new(model)?)))
    }
}
