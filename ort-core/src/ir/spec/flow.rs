//! Control flow: how a node maps its inputs and outputs to those of its subgraphs.

use crate::Result;
use crate::ir::{Attributes, Graph, Node};

/// Maps the inputs and outputs of a control-flow node to those of its subgraphs. Subgraphs take the
/// node's inputs after `controls` and produce the node's outputs, each in the same order.
#[derive(Debug, Clone, Copy)]
pub struct Flow {
    /// Number of leading node inputs that control which subgraph runs, or how often.
    pub controls: usize,
    /// Number of leading subgraph inputs that the node provides itself: the iteration number and
    /// the condition.
    pub counters: usize,
    /// Number of leading subgraph outputs that are not outputs of the node: the condition.
    pub conditions: usize,
    /// Number of loop-carried inputs after `controls`: an iteration's outputs for them are the next
    /// one's inputs.
    pub carried: fn(&Attributes, usize) -> usize,
    /// How often the node runs a subgraph.
    pub rounds: TripCount,
    /// Whether all scanned inputs and outputs are scanned along axis 0, so that each slice is
    /// contiguous.
    pub in_front: fn(&Attributes) -> bool,
    /// Returns the same node with the nodes around it that make its slices contiguous. Returns the
    /// node alone if too little is known about the shapes.
    pub to_front: fn(&mut Graph, Node) -> Result<Vec<Node>>,
}

/// How often a control-flow node runs a subgraph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TripCount {
    /// One of the subgraphs, once.
    Once,
    /// At most as often as the first input of the node says.
    Counted,
    /// Once for each slice of the last input.
    Slices,
}
