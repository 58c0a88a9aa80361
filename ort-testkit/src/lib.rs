//! Shared test infrastructure: suites as data, a second execution provider, and checks of device
//! providers.
//!
//! [`OpaqueProvider`] keeps its memory where the host cannot access it: buffers are handles, and
//! every byte passes through `Device::copy`. The core therefore cannot rely on properties of the
//! CPU. A [`Suite`] is a list of [`Case`]s that runs on any [`Target`], with a list of ignored
//! cases that must match exactly. [`sample`] queries which types of an operator providers support.
//!
//! For devices, a [`ClaimingDevice`] answers queries without the hardware. [`run_device_cases`]
//! runs cases on a GPU, [`on_device`] has operators for the edge cases of their kernels,
//! [`device_models`] runs models there on [`made_up`] inputs, and [`device_limits`] checks sessions
//! under memory limits. A [`DecomposingDevice`] has no kernels for chosen operators, so that their
//! decompositions run. [`skip_test`] is for tests that need what the machine lacks.

#![forbid(unsafe_code)]

mod claiming;
mod configurations;
mod decomposing;
mod device_cases;
pub mod device_limits;
pub mod device_models;
pub mod made_up;
pub mod on_device;
mod opaque;
mod random_values;
pub mod sample;
mod skip;
mod suite;

pub use claiming::ClaimingDevice;
pub use configurations::{Outcome, Verdict, check_configurations};
pub use decomposing::DecomposingDevice;
pub use device_cases::{built_provider, device_cases_as_told, run_device_cases};
pub use opaque::{OpaqueDevice, OpaqueProvider, Transfers};
pub use random_values::random_values;
pub use skip::skip_test;
pub use suite::{Case, Report, Suite, Target, read_case};
