//! Portable GPU execution provider of ort-runtime: WGSL compute shaders on any GPU that Vulkan,
//! Metal, D3D12 or GL exposes, through wgpu.
//!
//! - `gpu` opens an adapter. `memory` allocates its storage buffers; `staging` and `recorder` carry
//!   bytes and commands to it.
//! - `shader` generates the WGSL around a kernel's code. Accessor functions hide the element type
//!   of each tensor, so a kernel is written once for all types. `formula` renders scalar formulas.
//! - `pipelines` caches compute pipelines by their WGSL text. `pipeline_cache` persists what a
//!   later process compiles ahead, including the driver's own pipeline cache (`driver_cache`).
//! - `launch` is a kernel's view of its node, `node` runs a compiled node, and `kernels` has the
//!   operators by family.
//!
//! # Example
//!
//! ```
//! use ort_core::ep::{ExecutionProvider, ProviderOptions};
//!
//! match ort_ep_wgpu::WgpuProvider.devices() {
//!     // Without a GPU or its driver it says what to install.
//!     Err(problem) => println!("no adapter: {problem}"),
//!     Ok(adapters) => {
//!         let device = ort_ep_wgpu::WgpuDevice::open(0, &ProviderOptions::new())?;
//!         println!("{} of {}: {:?}", device.adapter(), adapters.len(), device.counters());
//!     }
//! }
//! # Ok::<(), ort_core::Error>(())
//! ```

// `deny` rather than `forbid`: `driver_cache` alone needs unsafe code, and says why.
#![deny(unsafe_code)]
// Tests may panic: there a panic is an ordinary failure. In library code it would be a bug.
#![warn(
    clippy::exit,
    clippy::indexing_slicing,
    clippy::mem_forget,
    clippy::string_slice,
    clippy::unchecked_time_subtraction,
    clippy::unreachable
)]

mod adapters;
mod bindings;
mod common;
mod device;
mod device_state;
mod driver_cache;
mod formula;
mod gpu;
pub mod kernels;
mod launch;
mod memory;
mod node;
mod options;
mod pipeline_cache;
mod pipelines;
mod program;
mod provider;
mod recorder;
mod shader;
mod staging;

#[doc(hidden)]
pub use inventory;

pub use device::{Counters, WgpuDevice, kernel_table};
pub use provider::WgpuProvider;
