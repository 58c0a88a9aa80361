//! Placement scope: a model's graph, or a subgraph.

/// Whether a graph is the model's or a subgraph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The model's graph: transfers of the caller's inputs and outputs do not count.
    Model,
    /// A node's subgraph: its inputs and outputs are values of other nodes in host memory, so their
    /// transfers count.
    Subgraph,
}
