//! The synchronization primitives of the budget, in one place: the models in `ort-loom` substitute
//! their own under the same names and explore all interleavings.

pub(crate) use std::sync::atomic::{AtomicUsize, Ordering};

pub(crate) use crate::fork::Mutex;
