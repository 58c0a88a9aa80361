//! CUDA execution provider: runs on NVIDIA GPUs and needs nothing but their driver installed.
//!
//! - `driver` calls the CUDA driver library, which is loaded on first use.
//! - `libraries` calls cuBLASLt and cuDNN if they are found. It and `driver` hold all unsafe code.
//! - `queue` orders the work of a device: its streams, `staging` copies between host and device,
//!   and `graphs` for repeated sequences.
//! - `memory` is the device's memory. `modules` is its code: PTX of the `families` in `cu/`, and
//!   what `formula` generates from scalar formulas.
//! - `launch` is the interface between a kernel and its node, and `node` runs the launches.
//!   `kernels` holds the operators by family.
//!
//! # Example
//!
//! ```
//! use ort_core::ep::{ExecutionProvider, ProviderOptions};
//!
//! match ort_ep_cuda::CudaProvider.devices() {
//!     Ok(_) => {
//!         let device = ort_ep_cuda::CudaDevice::open(0, &ProviderOptions::new())?;
//!         println!("{}", device.stats());
//!     }
//!     Err(problem) => println!("{problem}"),
//! }
//! # Ok::<(), ort_core::Error>(())
//! ```

// `driver` and `libraries` allow unsafe code and give their reason.
#![deny(unsafe_code)]
// Lints against panics. In tests a panic is an ordinary failure; in the provider it would be a bug.
#![warn(
    clippy::exit,
    clippy::indexing_slicing,
    clippy::mem_forget,
    clippy::string_slice,
    clippy::unchecked_time_subtraction,
    clippy::unreachable
)]

mod choices;
mod device;
mod device_info;
mod device_state;
#[allow(unsafe_code, reason = "functions of the driver's library are called")]
mod driver;
mod families;
mod formula;
mod graphs;
mod hazards;
pub mod kernels;
mod launch;
#[allow(unsafe_code, reason = "functions of NVIDIA's libraries are called")]
mod libraries;
mod memory;
mod modules;
mod node;
mod options;
mod pool;
mod provider;
mod queue;
mod staging;
mod stopwatch;
mod uploads;

#[doc(hidden)]
pub use inventory;

pub use device::{CudaDevice, kernel_table};
pub use driver::{Counters, Limits};
pub use libraries::{FoundLibrary, LibraryReport};
pub use provider::CudaProvider;
