//! What several test binaries share.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part")]

pub mod at_end;
pub mod checkpoint;
pub mod draw;
pub mod golden;
pub mod long;
pub mod metrics;
pub mod shared;
pub mod subject;
pub mod truth;
