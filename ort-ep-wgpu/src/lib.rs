//! The portable GPU provider of ort-runtime: any GPU that Vulkan, Metal, D3D12 or GL reaches,
//! through wgpu.
//!
//! - `gpu` opens an adapter; `memory` is its memory, `staging` and `recorder` are the way of bytes
//!   and commands to it.
//! - `shader` writes WGSL around a kernel's code: tensors of every element type are read and
//!   written through functions, so that a kernel is written once for all of them. `formula` renders
//!   scalar formulas, `pipelines` compiles, once for each text, and `kept` keeps what a later
//!   process compiles ahead, with the driver's own data (`driver_cache`).
//! - `launch` is what a kernel sees of its node, `node` runs it; `kernels` has the operators by
//!   family.
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

// One module has some, and says why: `driver_cache`.
#![deny(unsafe_code)]
// In tests such a panic is a failure like any other; here it would be a defect.
#![warn(
    clippy::exit,
    clippy::indexing_slicing,
    clippy::mem_forget,
    clippy::string_slice,
    clippy::unchecked_time_subtraction,
    clippy::unreachable
)]

mod bindings;
mod common;
mod device;
mod driver_cache;
mod formula;
mod gpu;
mod kept;
pub mod kernels;
mod launch;
mod memory;
mod node;
mod pipelines;
mod provider;
mod recorder;
mod shader;
mod staging;

#[doc(hidden)]
pub use inventory;

pub use device::{Counters, WgpuDevice, kernel_table};
pub use provider::WgpuProvider;
