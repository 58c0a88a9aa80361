//! The CPU execution provider of ort-runtime.

pub mod simd;
pub mod vector;
