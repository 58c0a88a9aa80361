//! Streaming of weights and constants that a memory limit cannot hold all at once.
//!
//! [`weights`] packs weights on the host right before their step. [`constants`] uploads constants
//! to device memory, and [`residency`] chooses which of them stay there.

mod constants;
mod residency;
mod weights;

pub(crate) use constants::{OnDevices, RunWindows, Shares, WindowCursor, Windows};
pub(crate) use weights::{AvailableMemory, Streaming, Streams, WeightLock, WeightResidency, compile_packed};
