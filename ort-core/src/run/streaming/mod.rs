//! Weights and constants that come and go, where a limit cannot hold all of them at once.
//!
//! [`weights`] are packed on the host right before their step, [`constants`] are uploaded to the
//! memory of a device, and [`residency`] chooses which constants stay there.

mod constants;
mod residency;
mod weights;

pub(crate) use constants::{OnDevices, Passing, RunWindows, Shares, Windows};
pub(crate) use weights::{AvailableMemory, Streaming, Streams, WeightLock, WeightResidency};
