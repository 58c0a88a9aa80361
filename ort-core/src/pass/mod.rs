//! Passes over the canonical graph, between inference and partition.

mod gradient;

pub use gradient::expand_gradients;
