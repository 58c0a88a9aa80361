//! What ort-runtime's own tests share: suites as data, and a second execution provider.
//!
//! [`OpaqueProvider`] keeps its memory where the host cannot touch it, so that the core learns
//! nothing from the habits of the CPU: buffers are handles, and every byte goes in and out through
//! `Device::copy`. A [`Suite`] is a list of [`Case`]s that runs on any [`Target`], with a list of
//! cases to ignore that must be exactly right. [`sample`] asks providers which types of an operator
//! they take. A [`ClaimingDevice`] answers for hardware that is not here. [`run_device_cases`] runs
//! cases on a GPU, [`on_device`] has operators at the edges of their kernels, [`device_models`]
//! runs models there on [`made_up`] inputs, [`device_limits`] holds sessions to limits of memory. A
//! [`DecomposingDevice`] has no kernels of chosen operators, so that their decompositions run.
//! [`skip_test`] is for tests that need what the machine lacks.

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
pub mod sample;
mod skip;
mod suite;

pub use claiming::ClaimingDevice;
pub use configurations::{Outcome, Verdict, check_configurations};
pub use decomposing::DecomposingDevice;
pub use device_cases::{built_provider, device_cases_as_told, run_device_cases};
pub use opaque::{OpaqueDevice, OpaqueProvider, Transfers};
pub use skip::skip_test;
pub use suite::{Case, Report, Suite, Target, read_case};
