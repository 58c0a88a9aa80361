//! Diagnosis of gradients: which nodes block differentiation, and why.

use super::gradient::backward;
use crate::Result;
use crate::ir::{Graph, ValueId};

/// An operator that blocks a gradient, at one or more nodes for one reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocking {
    /// The operator, with its domain unless that is ONNX's own.
    pub operator: String,
    /// Why it has no gradient.
    pub reason: String,
    /// The names of the nodes, the last in the graph first.
    pub nodes: Vec<String>,
}

/// Returns all nodes on the path from `xs` to `y` that have no gradient, by operator and reason.
/// There are none if `add_backward` succeeds. The graph must be inferred and does not change.
///
/// ```no_run
/// use ort_core::dtype::DType;
/// use ort_core::ir::GraphBuilder;
/// use ort_core::pass::blocking_nodes;
///
/// let mut builder = GraphBuilder::new("noise");
/// let x = builder.input("x", DType::F32, &["n"]);
/// let y = builder.node("Relu", &[x], &[])?;
/// let graph = builder.finish(&[y])?;
/// assert!(blocking_nodes(&graph, y, &[x])?.is_empty());
/// # Ok::<(), ort_core::Error>(())
/// ```
///
/// Errors: the graph is inconsistent.
pub fn blocking_nodes(graph: &Graph, y: ValueId, xs: &[ValueId]) -> Result<Vec<Blocking>> {
    let mut obstacles = Vec::new();
    // On a copy, because the backward pass adds nodes.
    backward(&mut graph.clone(), y, xs, &mut obstacles)?;
    let mut found: Vec<Blocking> = Vec::new();
    for obstacle in obstacles {
        let same =
            |known: &&mut Blocking| known.operator == obstacle.operator && known.reason == obstacle.reason;
        match found.iter_mut().find(same) {
            Some(known) => known.nodes.push(obstacle.node),
            None => found.push(Blocking {
                operator: obstacle.operator,
                reason: obstacle.reason,
                nodes: vec![obstacle.node],
            }),
        }
    }
    Ok(found)
}
