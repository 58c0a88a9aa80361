//! Puts the parts of composite nodes in their place where a gradient goes through them and they
//! have no rule of their own.

use std::collections::HashMap;

use super::ancestors::{ancestors, nodes};
use super::sequences::{is_reader, without_sequence};
use crate::ir::{Graph, Node, NodeId, ValueId};
use crate::spec::{BackwardPass, Draft, Grad, infer_graph};
use crate::{ErrorKind, Result, Within};

/// How deep composites may lie within composites.
const MAX_STEPS: usize = 16;

/// Takes apart the composite nodes on the way from `xs` to `y`, and says whether there were any. A
/// forward pass of parts keeps what backward needs of them; others stay whole. The graph stays
/// inferred.
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
        infer_graph(graph)?;
        changed = true;
    }
    Ok(changed)
}

fn is_composite(node: &Node) -> bool {
    matches!(node.spec.grad, Grad::Derived) && node.spec.scalar.is_none() && node.spec.lower.is_some()
}

/// Replaces these nodes, in the order of the graph, by their parts. One that cannot be taken apart
/// stays, and is an obstacle later.
fn replace(graph: &mut Graph, ids: &[NodeId], readers: Vec<(NodeId, Vec<Node>)>) -> Result<bool> {
    let mut changed = !readers.is_empty();
    let mut readers: HashMap<NodeId, Vec<Node>> = readers.into_iter().collect();
    for (index, node) in std::mem::take(&mut graph.nodes).into_iter().enumerate() {
        if let Some(parts) = readers.remove(&NodeId(index as u32)) {
            graph.nodes.extend(parts);
            continue;
        }
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
