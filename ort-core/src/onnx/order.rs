//! The order of a graph's nodes: each after what it reads, as near to the file's order as that allows.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::proto::{GraphProto, NodeProto};
use crate::{Result, error};

/// How messages name a node: its name, or its operator and place.
pub(super) fn node_label(node: &NodeProto, index: usize) -> String {
    match node.name() {
        "" => format!("{}_{index}", node.op_type()),
        name => name.to_string(),
    }
}

/// The order in which nodes are built; `producers` says which node writes each value of this graph.
///
/// Errors: a cycle, with its nodes.
pub(super) fn schedule(nodes: &[NodeProto], producers: &HashMap<&str, usize>) -> Result<Vec<usize>> {
    let needs: Vec<Vec<usize>> = nodes.iter().map(|node| needed_nodes(node, producers)).collect();
    let sorted = |(index, needs): (usize, &Vec<usize>)| needs.iter().all(|&need| need < index);
    if needs.iter().enumerate().all(sorted) {
        return Ok((0..nodes.len()).collect());
    }
    let mut waits: Vec<usize> = needs.iter().map(Vec::len).collect();
    let mut readers: Vec<Vec<usize>> = vec![Vec::new(); nodes.len()];
    for (index, needs) in needs.iter().enumerate() {
        needs.iter().for_each(|&need| readers[need].push(index));
    }
    let mut ready: BTreeSet<usize> = (0..nodes.len()).filter(|&index| waits[index] == 0).collect();
    let mut order = Vec::with_capacity(nodes.len());
    while let Some(index) = ready.pop_first() {
        order.push(index);
        for &reader in &readers[index] {
            waits[reader] -= 1;
            if waits[reader] == 0 {
                ready.insert(reader);
            }
        }
    }
    match waits.iter().position(|&waiting| waiting > 0) {
        None => Ok(order),
        Some(start) => {
            let cycle = find_cycle(start, &needs, &waits);
            let shown: Vec<String> = cycle.iter().take(8).map(|&at| node_label(&nodes[at], at)).collect();
            let more = if cycle.len() > shown.len() { " -> ..." } else { "" };
            Err(error!(InvalidGraph, "the graph has a cycle: {}{more}", shown.join(" -> "))
                .help("a node can only read what does not depend on it; use Loop or Scan for repetition"))
        }
    }
}

/// Follows nodes that wait for each other from `start` until one comes again.
fn find_cycle(start: usize, needs: &[Vec<usize>], waits: &[usize]) -> Vec<usize> {
    let mut path = vec![start];
    let mut places = HashMap::from([(start, 0)]);
    let mut at = start;
    // What a node still waits for is itself waiting, so the path never ends before it closes.
    while let Some(&next) = needs[at].iter().find(|&&need| waits[need] > 0) {
        if let Some(&place) = places.get(&next) {
            let mut cycle = path.split_off(place);
            cycle.push(next);
            cycle.reverse();
            return cycle;
        }
        places.insert(next, path.len());
        path.push(next);
        at = next;
    }
    path
}

fn needed_nodes(node: &NodeProto, producers: &HashMap<&str, usize>) -> Vec<usize> {
    let mut names: Vec<&str> = node.input.iter().map(String::as_str).collect();
    for_each_subgraph(node, &mut |graph| outer_reads(graph, &mut names));
    let mut needs: Vec<usize> = names.into_iter().filter_map(|name| producers.get(name).copied()).collect();
    needs.sort_unstable();
    needs.dedup();
    needs
}

/// Calls `visit` with each graph in the node's attributes.
pub(super) fn for_each_subgraph<'a>(node: &'a NodeProto, visit: &mut impl FnMut(&'a GraphProto)) {
    for attribute in &node.attribute {
        attribute.g.iter().for_each(|graph| visit(graph));
        attribute.graphs.iter().for_each(&mut *visit);
    }
}

/// Adds the names that `graph` reads and does not define.
fn outer_reads<'a>(graph: &'a GraphProto, names: &mut Vec<&'a str>) {
    let mut own: HashSet<&str> = graph.input.iter().map(|value| value.name()).collect();
    own.extend(graph.initializer.iter().map(|tensor| tensor.name()));
    own.extend(graph.node.iter().flat_map(|node| node.output.iter().map(String::as_str)));
    let mut read: Vec<&str> = graph.output.iter().map(|value| value.name()).collect();
    for node in &graph.node {
        read.extend(node.input.iter().map(String::as_str));
        // A plain function pointer ends what would be an endless chain of closure types.
        for_each_subgraph(node, &mut |inner| collect_outer(inner, &mut read));
    }
    names.extend(read.into_iter().filter(|name| !own.contains(name)));
}

fn collect_outer<'a>(graph: &'a GraphProto, names: &mut Vec<&'a str>) {
    outer_reads(graph, names);
}
