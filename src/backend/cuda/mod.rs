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
//! # The step (what the launchers were cut for)
//!
//! * **Memory.** One arena a device, sized by the plan before anything is allocated: dense weights, expert weights, the
//!   three page buckets, and the scratch of the largest step. The plan is the allocating code run on a counting arena.
//!   Weights keep the checkpoint's bytes (only `wo_a` of the `-Base` releases becomes bf16 when uploaded, since the
//!   official code rounds it so). Experts are reached through tables of addresses, so any subset may be resident.
//! * **Activations** are bf16 between operations; inputs of FP8 and FP4 products are bf16 values on the E4M3 grid, which
//!   is exact, so one kernel serves `reference`, `served` and `kvquant`.
//! * **Rows and sequences.** A step is `rows` tokens of several sequences: per row its sequence and position, per sequence
//!   start, first row and count. Rotation tables are made once a step, for rows and for the entries they complete.
//! * **Pages.** All buckets are one buffer (`pages`); a page is `base + id * page_bytes` in 64 bits. Per layer and step there are
//!   tables of 32-bit page ids `[sequences, pitch]`: ring, entries, keys, state and new state. They are written by the
//!   host into one staging buffer and copied once a step, so a graph sees fixed addresses.
//! * **Transaction.** Window rows of a step go to a linear buffer, compressor states to pages of their own, entries and
//!   keys to places of owned pages behind the committed length. Nothing committed is overwritten until `window_commit`
//!   and the swap of state tables at the end; a failed or cancelled step leaves the sequence as it was.
//!   Taking tokens back needs what they overwrote: the commit kernel is the place to copy ring rows aside, and the old
//!   state pages are the undo of the states.
//! * **Streams.** In c4a layers the index compressor, the index queries, scores and top-k run on a second stream beside
//!   window insertion and the main compressor; two events join them before attention.
//! * **Graphs.** A decode step is captured per bucket of rows (1, 2, 4, 8, ..), padded with rows of a sequence that owns
//!   spare pages. Grids depend on the bucket and on a bound of the context only, and kernels read all lengths from device
//!   memory; a new bound (doubling) is a new capture.
//! * **Order of sums** is fixed by dimensions and key counts, never by batch or chunk: `kernels/product.cuh` says how
//!   products do it. Only attention has two orders, one for decode (`Split`) and one for prefill (`Whole`).

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
