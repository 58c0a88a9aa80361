//! Graph IR: nodes over values, in topological order. Everything after loading works on it.
//!
//! A graph holds canonical nodes only. Their operators are records of this build ([`spec`]),
//! upgraded to the canonical version, with typed attributes. Names and opsets of the model file no
//! longer matter.
//!
//! The records are in this folder, because neither can be without the other: a node refers to its
//! record, and the functions of a record take nodes.

mod attribute;
mod builder;
mod display;
mod graph;
pub mod spec;
pub(crate) mod verify;

pub use crate::tensor::types::{SymShape, TensorType, ValueType};
pub use attribute::{Attribute, Attributes};
pub(crate) use attribute::{mismatched_attribute, unknown_attribute};
pub use builder::GraphBuilder;
pub use graph::{Capture, Graph, Node, NodeId, Subgraph, ValueId, ValueIds, ValueInfo};
