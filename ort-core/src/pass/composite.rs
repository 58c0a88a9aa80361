//! Decomposition of composite nodes on the path of a gradient, if they have no gradient rule of
//! their own.

use std::collections::HashMap;

use super::ancestors::{ancestors, nodes};
use super::sequences::{is_reader, without_sequence};
use crate::ir::{Graph, Node, NodeId, ValueId};
use crate::spec::{BackwardPass, Draft, Grad, infer_graph};
use crate::{ErrorKind, Result, Within};

/// Maximum nesting depth of composites: each step takes apart one level.
const MAX_STEPS: usize = 16;

/// Decomposes the composite nodes on the path from `xs` to `y`; returns whether there were any. The
/// forward pass of the parts then keeps the intermediates that the backward pass needs. Composites
/// off the path stay whole. The graph stays inferred.
pub(super) fn take_apart(graph: &mut Graph, y: ValueId, xs: &[ValueId]) -> Result<bool> {
    let mut changed = false;
    for _ in 0..MAX_STEPS {
        let forward = nodes(graph, &ancestors(graph, y, xs));
        let varying = BackwardPass { forward: &forward, xs, boundary: xs }.varying(graph);
        let is_on_the_way = |node: &Node| {
            let outputs = node.outputs.iter().flatten();
            node.reads().any(|read| varying.contains(&read))
                && outputs.into_iter().any(|id| varying.contains(id))
        };
        // Readers of sequences count as composites: their parts read the tensors in the sequence.
        let of_parts = |node: &Node| is_composite(node) || is_reader(node);
        let composites = forward.iter().filter(|(_, node)| of_parts(node) && is_on_the_way(node));
        let ids: Vec<NodeId> = composites.map(|(id, _)| *id).collect();
        let mut readers = Vec::new();
        for (id, node) in forward.iter().filter(|(id, node)| is_reader(node) && ids.contains(id)) {
            readers.extend(without_sequence(graph, node)?.map(|parts| (*id, parts)));
        }
        if ids.is_empty() || !replace(graph, &ids, readers)? {
            break;
        }
        // The types of the parts decide which of them carry a gradient.
        infer_graph(graph)?;
        changed = true;
    }
    Ok(changed)
}

fn is_composite(node: &Node) -> bool {
    matches!(node.spec.grad, Grad::Derived) && node.spec.scalar.is_none() && node.spec.lower.is_some()
}

/// Replaces these nodes, given in graph order, by their parts. A node that cannot be decomposed
/// stays; the backward pass reports it.
fn replace(graph: &mut Graph, ids: &[NodeId], readers: Vec<(NodeId, Vec<Node>)>) -> Result<bool> {
    let mut changed = !readers.is_empty();
    let mut readers: HashMap<NodeId, Vec<Node>> = readers.into_iter().collect();
    for (index, node) in std::mem::take(&mut graph.nodes).into_iter().enumerate() {
        if let Some(parts) = readers.remove(&NodeId(index as u32)) {
            graph.nodes.extend(parts);
            continue;
        }
        // `forward` is in graph order, and so are the ids: the binary search is valid.
        let lower = node.spec.lower.filter(|_| ids.binary_search(&NodeId(index as u32)).is_ok());
        let Some(lower) = lower else {
            graph.nodes.push(node);
            continue;
        };
        let mut draft = Draft::of_node(graph, node.clone());
        match lower(&mut draft).and_then(|()| draft.finish()) {
            Ok(parts) => {
                graph.nodes.extend(parts);
                changed = true;
            }
            Err(problem) if problem.kind() == ErrorKind::NotImplemented => graph.nodes.push(node),
            Err(problem) => return Err(problem).within(|| node.place()),
        }
    }
    Ok(changed)
}
