//! CPU execution provider: its device, and the crates that hold its kernels.
//!
//! [`vector`], [`depthwise`], [`gemm`] and [`conv`] are plain functions over slices that know no
//! graph, and so is [`attention`], one engine in the terms of the problem descriptors of
//! `ort-core`. [`parallel`] splits them over the thread pool. The crates `ort-cpu-elementwise`,
//! `-reduce`, `-linalg`, `-nn`, `-contrib` and `-media` wrap them as operator kernels. They share
//! `ort-cpu-kernel`, and those with matrices `ort-cpu-matmul`. Each of their files registers its
//! own kernels. Separate crates compile side by side, and an edit of a kernel compiles its crate
//! alone.

// A panic in a test merely fails the test; a panic in this code would be a defect.
#![warn(
    clippy::exit,
    clippy::indexing_slicing,
    clippy::mem_forget,
    clippy::string_slice,
    clippy::unchecked_time_subtraction,
    clippy::unreachable
)]

mod device;

// Linked for the kernels that they register.
use {
    ort_cpu_contrib as _, ort_cpu_elementwise as _, ort_cpu_linalg as _, ort_cpu_media as _, ort_cpu_nn as _,
    ort_cpu_reduce as _,
};

pub use device::CpuProvider;
pub use ort_cpu_kernel::{CpuKernel, DerivedKernels, cpu_kernels};
pub use ort_cpu_threads::parallel;
pub use ort_cpu_vector::simd;
pub use {
    ort_cpu_attention as attention, ort_cpu_conv as conv, ort_cpu_depthwise as depthwise,
    ort_cpu_gemm as gemm, ort_cpu_kernel as kernel, ort_cpu_vector as vector,
};

#[doc(hidden)]
pub use ort_cpu_kernel::inventory;
