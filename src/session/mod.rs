//! One token timeline and what belongs to it.

#![forbid(unsafe_code)]

pub mod stop;
