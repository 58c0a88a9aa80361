//! Passes over the canonical graph, between inference and partition.

mod gradient;

pub use gradient::{add_backward, expand_gradients};
