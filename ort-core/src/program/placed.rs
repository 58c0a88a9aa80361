//! The result of placement: the device of each node, and the memories of control-flow values.

use std::sync::Arc;

use ort_alloc::DeviceId;
use smallvec::SmallVec;

use super::Reason;
use crate::ep::Claim;
use crate::ir::{Graph, ValueId};

/// The device that runs each node, and what it claimed.
#[derive(Clone, Debug, Default)]
pub struct Partition {
    /// By node, the index of the device, and its claim.
    pub nodes: Vec<(usize, Claim)>,
    /// By node, why it runs there.
    pub reasons: Vec<Reason>,
    /// By node, the placement of control flow; `None` for other nodes.
    pub(crate) flows: Vec<Option<Arc<ControlFlowPlacement>>>,
}

/// One possible placement of a control-flow node.
#[derive(Clone, Debug)]
pub(crate) struct ControlFlowPlacement {
    /// The index of the device whose kernel runs the bodies.
    pub(crate) driver: usize,
    /// Whether the node counts as running on another device than the driver.
    pub(crate) is_on_device: bool,
    /// The memory of each input of the node.
    pub(crate) inputs: Vec<DeviceId>,
    /// The memory of each output of the node.
    pub(crate) outputs: Vec<DeviceId>,
    /// One for each subgraph.
    pub(crate) bodies: Vec<Body>,
    /// The cost of the bodies' placement over all iterations.
    pub(crate) cost: u64,
}

/// A subgraph, ready to be compiled.
#[derive(Clone, Debug)]
pub(crate) struct Body {
    /// The graph, in which captured constants are its own and nodes that no device claims are
    /// decomposed.
    pub(crate) graph: Arc<Graph>,
    /// The captured values that are not constants.
    pub(crate) captures: Vec<Captured>,
    pub(crate) partition: Partition,
    /// The memory of each input.
    pub(crate) inputs: Vec<DeviceId>,
    /// The memory of each output.
    pub(crate) outputs: Vec<DeviceId>,
}

/// A value that a body captures from the enclosing graph.
#[derive(Clone, Debug)]
pub(crate) struct Captured {
    pub(crate) outer: ValueId,
    pub(crate) inner: ValueId,
    /// The memories in which the body reads it. Empty if any will do, for example because the body
    /// reads only its shape.
    pub(crate) memories: SmallVec<[DeviceId; 2]>,
}
