//! Passes over the canonical graph, between inference and partition: gradients, and the sequences
//! in their way.

mod ancestors;
mod blocking;
mod composite;
mod gradient;
mod sequences;
mod stacked;

pub use blocking::{Blocking, blocking_nodes};
pub(crate) use gradient::holds_gradient;
pub use gradient::{add_backward, expand_gradients};
pub use stacked::stack_sequences;
