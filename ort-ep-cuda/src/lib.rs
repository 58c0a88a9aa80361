//! The CUDA provider of ort-runtime: NVIDIA's GPUs, with nothing on the machine but their driver.
//!
//! - `driver` has the calls of the driver's library, which is looked for when it is first asked
//!   for.
//! - `libraries` has NVIDIA's libraries over the driver, where they are found; with `driver` it is
//!   what has unsafe code.
//! - `queue` has the order of what a device is asked for: its streams, `staging` between host and
//!   device, and `graphs` of what comes again.
//! - `memory` is the device's memory, `modules` its code: PTX of the families in `cu/`, and what
//!   `formula` renders of scalar formulas.
//! - `launch` is what a kernel sees of its node and answers with, `node` runs it; `kernels` has the
//!   operators by family.
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

// Two modules have some, and say why: `driver` and `libraries`.
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

mod choices;
mod device;
#[allow(unsafe_code, reason = "functions of the driver's library are called")]
mod driver;
mod formula;
mod graphs;
pub mod kernels;
mod launch;
#[allow(unsafe_code, reason = "functions of NVIDIA's libraries are called")]
mod libraries;
mod memory;
mod modules;
mod node;
mod pool;
mod provider;
mod queue;
mod staging;
mod stopwatch;
mod uploads;
mod uses;

#[doc(hidden)]
pub use inventory;

pub use device::{CudaDevice, kernel_table};
pub use driver::{Counters, Limits};
pub use libraries::{FoundLibrary, LibraryReport};
pub use provider::CudaProvider;
