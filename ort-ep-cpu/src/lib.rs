//! The CPU execution provider of ort-runtime.

pub mod gemm;
pub mod parallel;
pub mod simd;
