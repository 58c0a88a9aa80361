//! What placement decides: the device of each node, and for control flow the memories of its
//! values.

use std::sync::Arc;

use ort_alloc::DeviceId;
use smallvec::SmallVec;

use super::Reason;
use crate::ep::Claim;
use crate::ir::{Graph, ValueId};

/// Which device runs each node, and what it claimed.
#[derive(Clone, Debug, Default)]
pub struct Partition {
    /// By node: the index of the device, and its claim.
    pub nodes: Vec<(usize, Claim)>,
    /// By node: why it runs there.
    pub reasons: Vec<Reason>,
    /// By node: where the values of control flow are, and its bodies; none for other nodes.
    pub(crate) flows: Vec<Option<Arc<ControlFlowPlacement>>>,
}

/// Control flow in one of its ways.
#[derive(Clone, Debug)]
pub(crate) struct ControlFlowPlacement {
    /// The place of the device whose kernel runs the bodies.
    pub(crate) driver: usize,
    /// Whether that is another device than the one on which the node is.
    pub(crate) is_on_device: bool,
    /// The memory of each input and output of the node.
    pub(crate) inputs: Vec<DeviceId>,
    pub(crate) outputs: Vec<DeviceId>,
    /// One for each subgraph.
    pub(crate) bodies: Vec<Body>,
    /// What the placement of the bodies costs in all rounds.
    pub(crate) cost: u64,
}

/// A subgraph as it is compiled.
#[derive(Clone, Debug)]
pub(crate) struct Body {
    /// With the captured constants as its own, and without what no device claims.
    pub(crate) graph: Arc<Graph>,
    /// What else it captures.
    pub(crate) captures: Vec<Captured>,
    pub(crate) partition: Partition,
    /// The memory of each input and output.
    pub(crate) inputs: Vec<DeviceId>,
    pub(crate) outputs: Vec<DeviceId>,
}

/// A captured value.
#[derive(Clone, Debug)]
pub(crate) struct Captured {
    pub(crate) outer: ValueId,
    pub(crate) inner: ValueId,
    /// The memories in which the body reads it; none where that is the same everywhere, as of its
    /// shape.
    pub(crate) memories: SmallVec<[DeviceId; 2]>,
}
