//! How the values of a control-flow node are those of its subgraphs.

use crate::Result;
use crate::ir::{Attributes, Graph, Node};

/// Which inputs and outputs of a control-flow node its subgraphs take and give. Subgraphs take the
/// node's inputs behind `controls`, and give its outputs, each in the same order.
#[derive(Debug, Clone, Copy)]
pub struct Flow {
    /// The node's first inputs, which say which subgraph runs, or how often.
    pub controls: usize,
    /// The first inputs of a subgraph, which are the node's own: the number of the iteration, and
    /// whether the condition holds.
    pub counters: usize,
    /// The first outputs of a subgraph, which are no outputs of the node: the condition.
    pub conditions: usize,
    /// How many of a node's inputs behind `controls` are carried: what an iteration gives for them
    /// is what the next one takes.
    pub carried: fn(&Attributes, usize) -> usize,
    /// How often it runs a subgraph.
    pub rounds: TripCount,
    /// Whether all slices of what is scanned, and of what comes out of iterations, lie in one
    /// piece.
    pub in_front: fn(&Attributes) -> bool,
    /// The same node with others around it, so that they do; the node alone where too little is
    /// known of the shapes.
    pub to_front: fn(&mut Graph, Node) -> Result<Vec<Node>>,
}

/// How often a control-flow node runs a subgraph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TripCount {
    /// One of them, once.
    Once,
    /// At most as often as the node's first input says.
    Counted,
    /// For each slice of its last input.
    Slices,
}
