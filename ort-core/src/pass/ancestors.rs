//! Backward slice of a graph: the nodes that a value depends on.

use std::collections::HashSet;

use crate::ir::{Graph, Node, NodeId, ValueId};

/// Returns the nodes with these ids.
pub(super) fn nodes(graph: &Graph, ids: &[NodeId]) -> Vec<(NodeId, Node)> {
    ids.iter().filter_map(|&id| graph.nodes.get(id.index()).map(|node| (id, node.clone()))).collect()
}

/// Returns the nodes that compute `y` from `ends`, in the order of the graph.
pub(super) fn ancestors(graph: &Graph, y: ValueId, ends: &[ValueId]) -> Vec<NodeId> {
    let producers = graph.producers();
    let mut seen: HashSet<ValueId> = ends.iter().copied().collect();
    let mut found = Vec::new();
    let mut work = vec![y];
    while let Some(value) = work.pop() {
        let producer = producers.get(value.index()).copied().flatten();
        let Some(producer) = producer.filter(|_| seen.insert(value)) else { continue };
        found.push(producer);
        work.extend(graph.nodes.get(producer.index()).into_iter().flat_map(Node::reads));
    }
    // Ids are positions in the graph, so this is topological order.
    found.sort_unstable();
    found.dedup();
    found
}
