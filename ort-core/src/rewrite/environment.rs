//! The optimizer's environment: callbacks that evaluate constants and find the device of a node.

use std::time::Instant;

use crate::Result;
use crate::ir::{Graph, Node};
use crate::tensor::Tensor;

/// Runs a graph without inputs and returns its outputs.
pub(crate) type Evaluate<'a> = &'a dyn Fn(Graph) -> Result<Vec<Tensor>>;

/// Returns the index, in the session's device order, of the first device that claims a node; `None`
/// if no device does.
pub(crate) type FirstClaim<'a> = &'a dyn Fn(&Graph, &Node) -> Option<usize>;

/// What the optimizer needs from the session.
#[derive(Clone, Copy)]
pub(crate) struct Environment<'a> {
    pub(crate) evaluate: Evaluate<'a>,
    /// Finds the device of a node, so that no rewrite moves work to a later device.
    pub(crate) first_claim: FirstClaim<'a>,
    /// Whether each device, in the session's order, prefers NHWC images.
    pub(crate) channels_last: &'a [bool],
    /// The width in bytes of the vectors in which each device reads matrices.
    pub(crate) vector_bytes: &'a [usize],
    /// The deadline: rule sweeps fail once it has passed.
    pub(crate) until: Option<Instant>,
}
