//! The CPU execution provider of ort-runtime.
//!
//! `simd`, `vector`, `gemm` and `conv` are plain functions over slices; `kernels` wraps them as
//! kernels of the graph's operators, each registered next to its code.

pub mod conv;
mod device;
pub mod gemm;
pub mod kernels;
pub mod parallel;
pub mod simd;
pub mod vector;

#[doc(hidden)]
pub use inventory;

pub use device::{CpuKernel, CpuProvider};
