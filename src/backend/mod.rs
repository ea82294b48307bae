//! Backends: where the operations of the model run.

pub mod cpu;
