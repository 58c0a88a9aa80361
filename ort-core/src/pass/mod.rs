//! Passes over the canonical graph, between inference and partition.

mod blocking;
mod composite;
mod gradient;
mod sequences;

pub use blocking::{Blocking, blocking_nodes};
pub use gradient::{add_backward, expand_gradients};
