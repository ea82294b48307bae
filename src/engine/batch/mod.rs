//! Batching without a thread of its own: calls that wait at the same time share steps.
//!
//! [`lead`] has the calls and the one of their threads that works for all; [`compose`] decides what goes into a step, [`pace`]
//! learns from its time. It knows neither models nor caches.
#![forbid(unsafe_code)]

mod compose;
mod lead;
mod pace;
#[cfg(test)]
mod schedules;
mod sync;
#[cfg(test)]
mod tests;

pub(crate) use compose::{Demand, Limits};
pub(crate) use lead::{Batcher, Between, Call, LOOK, Reply, Runner};
