//! The CPU execution provider of ort-runtime.

pub mod conv;
pub mod gemm;
pub mod parallel;
pub mod simd;
