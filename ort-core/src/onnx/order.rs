//! Topological sort of a graph's nodes, stable with respect to the file's order.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::proto::{GraphProto, NodeProto};
use crate::{Result, error};

/// Returns how messages name a node: by its name, or by its operator and index.
pub(super) fn node_label(node: &NodeProto, index: usize) -> String {
    match node.name() {
        "" => format!("{}_{index}", node.op_type()),
        name => name.to_string(),
    }
}

/// The order in which nodes are built.
pub(super) enum Order {
    /// The file's order.
    AsGiven,
    /// A permutation, as indices into the file.
    Sorted(Vec<usize>),
}

impl Order {
    /// Returns the nodes in this order, each with its index in the file.
    pub(super) fn of<'a>(&self, nodes: &'a [NodeProto]) -> impl Iterator<Item = (usize, &'a NodeProto)> {
        (0..nodes.len()).filter_map(move |place| {
            let index = match self {
                Order::AsGiven => place,
                Order::Sorted(order) => *order.get(place)?,
            };
            nodes.get(index).map(|node| (index, node))
        })
    }
}

/// Sorts the nodes topologically. `writer` returns the node that writes a name, if one does. The
/// first `built` nodes keep their places, because they are known to depend on no later node.
///
/// Errors: a cycle, with its nodes.
pub(super) fn schedule(
    nodes: &[NodeProto],
    built: usize,
    writer: impl Fn(&str) -> Option<usize>,
) -> Result<Order> {
    let comes_later = |index: usize, name: &str| writer(name).is_some_and(|writer| writer >= index);
    let mut sorted = true;
    for (index, node) in nodes.iter().enumerate().skip(built) {
        for_each_read(node, &mut |name| sorted &= !comes_later(index, name));
    }
    // Fast path: nothing reads the output of a later node.
    if sorted {
        return Ok(Order::AsGiven);
    }
    // Kahn's algorithm. The ready set is ordered, so the node first in the file goes first.
    // Built nodes need nothing and have the lowest indices, so they leave `ready` first.
    let mut needs: Vec<Vec<usize>> = vec![Vec::new(); built];
    needs.extend(nodes.iter().skip(built).map(|node| needed_nodes(node, &writer)));
    let mut waits: Vec<usize> = needs.iter().map(Vec::len).collect();
    let mut readers: Vec<Vec<usize>> = vec![Vec::new(); nodes.len()];
    for (index, needs) in needs.iter().enumerate() {
        for &need in needs {
            readers.get_mut(need).into_iter().for_each(|readers| readers.push(index));
        }
    }
    let mut ready: BTreeSet<usize> = indices_where(&waits, |waiting| waiting == 0).collect();
    let mut order = Vec::with_capacity(nodes.len());
    while let Some(index) = ready.pop_first() {
        order.push(index);
        for &reader in readers.get(index).into_iter().flatten() {
            let Some(waiting) = waits.get_mut(reader) else { continue };
            *waiting -= 1;
            if *waiting == 0 {
                ready.insert(reader);
            }
        }
    }
    match indices_where(&waits, |waiting| waiting > 0).next() {
        None => Ok(Order::Sorted(order)),
        Some(start) => {
            let cycle = find_cycle(start, &needs, &waits);
            let label = |&at: &usize| nodes.get(at).map(|node| node_label(node, at));
            let shown: Vec<String> = cycle.iter().take(8).filter_map(label).collect();
            let more = if cycle.len() > shown.len() { " -> ..." } else { "" };
            Err(error!(Fail, "the graph is not acyclic: {}{more}", shown.join(" -> "))
                .help("a node can only read what does not depend on it; use Loop or Scan for repetition"))
        }
    }
}

fn indices_where(counts: &[usize], holds: impl Fn(usize) -> bool) -> impl Iterator<Item = usize> {
    counts.iter().enumerate().filter(move |(_, count)| holds(**count)).map(|(index, _)| index)
}

/// Walks along nodes that wait for each other from `start` until one repeats.
fn find_cycle(start: usize, needs: &[Vec<usize>], waits: &[usize]) -> Vec<usize> {
    let mut path = vec![start];
    let mut places = HashMap::from([(start, 0)]);
    let mut at = start;
    let is_waiting = |&&need: &&usize| waits.get(need).is_some_and(|&waiting| waiting > 0);
    // A node that waits does so for another waiting node, so the walk always closes a cycle.
    while let Some(&next) = needs.get(at).and_then(|needs| needs.iter().find(is_waiting)) {
        if let Some(&place) = places.get(&next) {
            let mut cycle = path.split_off(place);
            cycle.push(next);
            // The walk went from readers to writers. Messages follow the data.
            cycle.reverse();
            return cycle;
        }
        places.insert(next, path.len());
        path.push(next);
        at = next;
    }
    path
}

fn needed_nodes(node: &NodeProto, writer: &impl Fn(&str) -> Option<usize>) -> Vec<usize> {
    let mut needs = Vec::new();
    for_each_read(node, &mut |name| needs.extend(writer(name)));
    // Each writer once, because it wakes a reader once.
    needs.sort_unstable();
    needs.dedup();
    needs
}

/// Calls `visit` with each name of the graph that the node or a subgraph of it reads.
fn for_each_read(node: &NodeProto, visit: &mut impl FnMut(&str)) {
    node.input.iter().for_each(|name| visit(name));
    let mut names = Vec::new();
    for_each_subgraph(node, &mut |graph| outer_reads(graph, &mut names));
    names.into_iter().for_each(visit);
}

/// Calls `visit` with each graph in the node's attributes.
pub(super) fn for_each_subgraph<'a>(node: &'a NodeProto, visit: &mut impl FnMut(&'a GraphProto)) {
    for attribute in &node.attribute {
        attribute.g.iter().for_each(|graph| visit(graph));
        attribute.graphs.iter().for_each(&mut *visit);
    }
}

/// Adds the names that `graph` captures: those it reads but does not define.
fn outer_reads<'a>(graph: &'a GraphProto, names: &mut Vec<&'a str>) {
    let mut own: HashSet<&str> = graph.input.iter().map(|value| value.name()).collect();
    // Names that the graph defines hide those of the graphs around it.
    own.extend(graph.initializer.iter().map(|tensor| tensor.name()));
    let sparse = graph.sparse_initializer.iter().filter_map(|tensor| tensor.values.as_ref());
    own.extend(sparse.map(|values| values.name()));
    own.extend(graph.node.iter().flat_map(|node| node.output.iter().map(String::as_str)));
    let mut read: Vec<&str> = graph.output.iter().map(|value| value.name()).collect();
    for node in &graph.node {
        read.extend(node.input.iter().map(String::as_str));
        // Recursion goes through a plain function, or the closure types would nest without end.
        for_each_subgraph(node, &mut |inner| collect_outer(inner, &mut read));
    }
    names.extend(read.into_iter().filter(|name| !own.contains(name)));
}

fn collect_outer<'a>(graph: &'a GraphProto, names: &mut Vec<&'a str>) {
    outer_reads(graph, names);
}
