//! The model: its configuration, its typed weights, its arithmetic modes.

pub mod config;
pub mod numerics;
pub mod weights;
