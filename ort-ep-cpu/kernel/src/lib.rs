//! What operator kernels of the CPU provider share: their registration, broadcasting, weights,
//! workspaces and conversions.

// A panic in a test merely fails the test; a panic in this code would be a defect.
#![warn(
    clippy::exit,
    clippy::indexing_slicing,
    clippy::mem_forget,
    clippy::string_slice,
    clippy::unchecked_time_subtraction,
    clippy::unreachable
)]

pub mod activation;
pub mod axis_lanes;
pub mod broadcast;
pub mod dynamic_quantize;
pub mod half_precision;
pub mod heap;
pub mod idioms;
pub mod lane_fn;
pub mod layout;
pub mod number;
pub mod packed;
pub mod quantized_byte;
pub mod quantized_convert;
pub mod units;
pub mod workspace;

use ort_core::ep::KernelDef;

#[doc(hidden)]
pub use inventory;

/// A kernel definition as a kernel file submits it, through the `cpu_kernels!` macro.
#[derive(Debug)]
pub struct CpuKernel(pub KernelDef);

inventory::collect!(CpuKernel);

/// Kernels that follow from operator records ([`ort_core::ep::formula`]), computed when the
/// provider is first used.
#[derive(Debug)]
pub struct DerivedKernels(pub fn() -> &'static [KernelDef]);

inventory::collect!(DerivedKernels);

/// Registers kernels with the CPU provider. Each is a [`KernelDef`] written with struct update over
/// [`KernelDef::BASE`].
#[macro_export]
macro_rules! cpu_kernels {
    ($($def:expr),* $(,)?) => {
        $($crate::inventory::submit! { $crate::CpuKernel($def) })*
    };
}
