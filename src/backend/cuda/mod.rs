//! The CUDA backend. Nothing is linked: the driver library is opened at run time, and a machine without one has an
//! empty device list with the reason in words.

mod driver;

pub use driver::devices;
