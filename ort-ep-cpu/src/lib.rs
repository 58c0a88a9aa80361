//! The CPU execution provider of ort-runtime.
//!
//! kernels of the graph's operators, each registered next to its code.

mod device;
pub mod kernels;
pub mod simd;
pub mod vector;

#[doc(hidden)]
pub use inventory;

pub use device::{CpuKernel, CpuProvider};
