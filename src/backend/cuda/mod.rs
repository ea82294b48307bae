//! The CUDA backend. Nothing is linked: the driver library is opened at run time, and a machine without one has an
//! empty device list with the reason in words.
//!
//! Three storeys for every operation: a kernel in `kernels/`, a checked launcher in `ops` that verifies every size the
//! kernel relies on, and the step that calls launchers. The CPU's operation of the same name is the specification, and
//! [`self_test`] compares the two on the device. The layers below: `driver` finds the driver and probes every function
//! before cudarc may call it; `device` has the context, the limits, the loaded kernels and the memory of a fault;
//! `memory` hands out one allocation by a plan; `stream` queues work; `upload` brings weights over; `pages` is where the
//! cache's pages lie.
//!
//! # The step (`crate::engine::gpu`)
//!
//! * **Memory.** The plan is the allocating code run on a counting arena, before anything is allocated: weights, the memory
//!   of the largest step, tables, pages. Weights keep the checkpoint's bytes (only `wo_a` of the `-Base` releases becomes
//!   bf16 when uploaded, since the official code rounds it so). Experts are reached through tables of addresses.
//! * **Activations** are bf16 between operations; inputs of FP8 and FP4 products are bf16 values on the E4M3 grid, which
//!   is exact, so one kernel serves `reference`, `served` and `kvquant`.
//! * **Rows and sequences.** A step is `rows` tokens of several sequences: per row its sequence and position, per sequence
//!   start, first row and count. Rotation tables are made once a step, for rows and for the entries they complete.
//! * **Pages.** One buffer; a page is `base + id * page_bytes` in 64 bits. Per layer there are tables of 32-bit page ids
//!   `[sequences, pitch]`: ring, entries, keys, states and new states. Those of entries and keys stay on the device and
//!   are written when they change; the others go up with each step.
//! * **Transaction.** Window rows of a step go to a linear buffer, compressor states to pages of their own, entries and
//!   keys to places of owned pages behind the committed length. Nothing committed is overwritten until `window_commit`
//!   at the end, which does nothing if a value was not finite; a failed or cancelled step leaves the sequence as it was.
//!   What takes tokens back (window rows about to be overwritten, states before each token) is read back to the host.
//! * **Streams.** In c4a layers the index compressor, the index queries, scores and top-k run on a second stream beside
//!   window insertion and the main compressor; two events join them before attention.
//! * **Graphs.** A step of one token a sequence is captured per number of sequences and bound of the context (a power of
//!   two of blocks). Grids depend on these alone, and kernels read all lengths from device memory.
//! * **Order of sums** is fixed by dimensions and key counts, never by batch or chunk: `kernels/product.cuh` says how
//!   products do it. Only attention has two orders, one for decode (`Split`) and one for prefill (`Whole`); a sequence's
//!   number of new rows says which, so a mixed step has launches of both.
//! * **Choices.** Rows of sequences that generate get a token instead of logits, behind the step's flag and outside the
//!   graph; their final hidden states go to the host with it, for logits that are asked for later.

mod check;
pub(crate) mod device;
mod driver;
mod kernels;
pub(crate) mod memory;
mod nvrtc;
pub(crate) mod ops;
pub(crate) mod pages;
pub(crate) mod stream;
pub(crate) mod upload;

pub use check::{Check, SelfTestOptions, Timing, self_test, timings};
pub use driver::devices;
pub use kernels::kernels;
