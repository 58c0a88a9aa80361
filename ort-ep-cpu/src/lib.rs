//! The CPU execution provider of ort-runtime.
//!
//! `simd`, `vector`, `gemm`, `conv` and `attention` are plain functions over slices; `kernels`
//! wraps them as kernels of the graph's operators, each registered next to its code.

// In tests such a panic is a failure like any other; here it would be a defect.
#![warn(
    clippy::exit,
    clippy::indexing_slicing,
    clippy::mem_forget,
    clippy::string_slice,
    clippy::unchecked_time_subtraction,
    clippy::unreachable
)]

pub mod attention;
pub mod conv;
mod device;
mod environment;
pub mod gemm;
mod heap;
mod interrupt;
mod kept;
pub mod kernels;
pub mod parallel;
mod pool;
mod processors;
pub mod simd;
mod sync;
pub mod vector;

#[doc(hidden)]
pub use inventory;

pub use device::{CpuKernel, CpuProvider};
