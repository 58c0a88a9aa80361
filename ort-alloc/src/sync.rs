//! What the budget's threads share, in one place: the models in `ort-loom` have the same names and
//! try all orders.

pub(crate) use std::sync::atomic::{AtomicUsize, Ordering};

pub(crate) use parking_lot::Mutex;
