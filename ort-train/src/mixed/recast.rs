//! Cast rematerialization: the backward pass repeats casts instead of keeping their results.

use std::collections::{HashMap, HashSet};

use ort_core::ir::{Graph, Node, ValueId};

/// Adds a second cast before the backward readers of a cast's result, if the cast's input stays
/// alive anyway or is narrower than the result. An input stays alive if it is a parameter, a
/// constant, or a value that the backward pass reads itself. The bits are the same, and less memory
/// is kept. The first output of the graph must be the loss.
pub(crate) fn recast(mut graph: Graph) -> Graph {
    let Some(&loss) = graph.outputs.first() else { return graph };
    // A node is forward if the loss depends on it, and backward otherwise.
    let forward = ancestors(&graph, loss);
    let backward = |index: &usize| !forward.contains(index);
    let read: HashSet<ValueId> = (0..graph.nodes.len())
        .filter(backward)
        .filter_map(|index| graph.nodes.get(index))
        .flat_map(Node::reads)
        .collect();
    let inputs: HashSet<ValueId> = graph.inputs.iter().copied().collect();
    let mut again: HashMap<ValueId, Node> = HashMap::new();
    for node in forward.iter().filter_map(|index| graph.nodes.get(*index)) {
        let (Some(Some(from)), Some(Some(to))) = (node.inputs.first(), node.outputs.first()) else {
            continue;
        };
        if node.spec.domain.is_empty() && node.spec.name == "Cast" && read.contains(to) {
            let stays = inputs.contains(from) || graph.constants.contains_key(from) || read.contains(from);
            if stays || is_narrower(&graph, *from, *to) {
                again.insert(*to, node.clone());
            }
        }
    }
    let mut clones: HashMap<ValueId, ValueId> = HashMap::new();
    let nodes = std::mem::take(&mut graph.nodes);
    for (index, mut node) in nodes.into_iter().enumerate() {
        if backward(&index) {
            for value in node.reads().collect::<Vec<_>>() {
                add_clone(&mut graph, &again, &mut clones, value);
            }
            let now = |value: &mut ValueId| *value = clones.get(value).copied().unwrap_or(*value);
            node.inputs.iter_mut().flatten().for_each(now);
            let captures = node.subgraphs.iter_mut().flat_map(|subgraph| &mut subgraph.captures);
            captures.for_each(|capture| now(&mut capture.outer));
        }
        graph.nodes.push(node);
    }
    graph
}

/// Adds the clone of the cast that produces `value`, if it is to be repeated and has no clone yet.
/// If the cast's input comes from another repeated cast, its clone is added first.
fn add_clone(
    graph: &mut Graph,
    again: &HashMap<ValueId, Node>,
    clones: &mut HashMap<ValueId, ValueId>,
    value: ValueId,
) {
    let mut chain = Vec::new();
    let mut next = Some(value);
    while let Some(value) = next.take() {
        let Some(node) = again.get(&value).filter(|_| !clones.contains_key(&value)) else { break };
        chain.push((value, node));
        next = node.inputs.first().copied().flatten();
    }
    // Innermost cast first: each clone reads the clone before it.
    for (value, node) in chain.into_iter().rev() {
        let mut node = node.clone();
        node.name = format!("{}_again", node.name).into();
        let info = graph.value(value).clone();
        let clone = graph.add_value(format!("{}_again", info.name), info.ty);
        for input in node.inputs.iter_mut().flatten() {
            *input = clones.get(input).copied().unwrap_or(*input);
        }
        node.outputs.iter_mut().for_each(|output| *output = Some(clone));
        graph.nodes.push(node);
        clones.insert(value, clone);
    }
}

/// Whether elements of `one` have fewer bits than those of `other`.
fn is_narrower(graph: &Graph, one: ValueId, other: ValueId) -> bool {
    let bits = |value: ValueId| graph.value(value).ty.dtype().and_then(|dtype| dtype.bits());
    matches!((bits(one), bits(other)), (Some(one), Some(other)) if one < other)
}

/// Returns the indices of the nodes that a value depends on.
fn ancestors(graph: &Graph, value: ValueId) -> HashSet<usize> {
    let producers = graph.producers();
    let (mut found, mut work) = (HashSet::new(), vec![value]);
    while let Some(value) = work.pop() {
        let Some(producer) = producers.get(value.index()).copied().flatten() else { continue };
        if found.insert(producer.index()) {
            work.extend(graph.nodes.get(producer.index()).into_iter().flat_map(Node::reads));
        }
    }
    found
}
