//! Portable vectors with run-time dispatch.

pub mod isa;
