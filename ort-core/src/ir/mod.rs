//! The graph that everything after loading speaks: nodes over values, in topological order.
//!
//! A graph holds canonical nodes only: their operators are records of this build ([`crate::spec`]),
//! upgraded to the newest version, with typed attributes. Names and opsets of the file matter no
//! more.

mod attribute;
mod builder;
mod display;
mod graph;
mod verify;

pub use crate::tensor::types::{SymShape, TensorType, ValueType};
pub(crate) use attribute::unknown_attribute;
pub use attribute::{Attribute, Attributes};
pub use builder::GraphBuilder;
pub use graph::{Capture, Graph, Node, NodeId, Subgraph, ValueId, ValueIds, ValueInfo};
