//! CPU execution provider.
//!
//! `simd`, `vector`, `gemm`, `conv` and `attention` are plain functions over slices that know no
//! graph. `kernels` wraps them as operator kernels, and each file there registers its own kernels.

// A panic in a test merely fails the test; a panic in this code would be a defect.
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
