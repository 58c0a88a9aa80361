//! Graph verifier: the invariants of every graph, as a table of rules.

use super::Graph;
use crate::{Result, Within, ensure};

/// A rule: its name and its check.
type Rule = (&'static str, fn(&Graph) -> Result<()>);

const RULES: &[Rule] = &[
    ("every value has one origin", one_origin),
    ("nodes come after what they read", in_order),
    ("inputs and outputs count as the operator allows", arity),
];

/// Checks every rule on the graph and its subgraphs.
pub(crate) fn verify(graph: &Graph) -> Result<()> {
    for (name, rule) in RULES {
        rule(graph)
            .within(|| format!("graph '{}'", graph.name))
            .map_err(|e| e.help(format!("rule: {name}")))?;
    }
    for node in &graph.nodes {
        for subgraph in &node.subgraphs {
            verify(&subgraph.graph).within(|| node.place())?;
        }
    }
    Ok(())
}

impl Graph {
    /// Checks that the graph is well formed: unique definitions, topological order, arity.
    pub fn verify(&self) -> Result<()> {
        verify(self)
    }
}

fn one_origin(graph: &Graph) -> Result<()> {
    let mut seen = vec![false; graph.value_count()];
    let produced = graph.nodes.iter().flat_map(|node| node.outputs.iter().flatten().copied());
    // Inputs and constants are definitions, too: no node may write them.
    let given = graph.inputs.iter().copied().chain(graph.constants.keys().copied());
    for id in given.chain(produced) {
        let name = &graph.value(id).name;
        // An id without an entry is invalid, and counts as a duplicate.
        let twice = seen.get_mut(id.index()).is_none_or(|seen| std::mem::replace(seen, true));
        ensure!(!twice, InvalidGraph, "'{name}' is defined twice");
    }
    Ok(())
}

fn in_order(graph: &Graph) -> Result<()> {
    let producers = graph.producers();
    for (index, node) in graph.nodes.iter().enumerate() {
        for value in node.reads() {
            let producer = producers.get(value.index()).copied().flatten();
            let late = producer.is_some_and(|producer| producer.index() >= index);
            let name = &graph.value(value).name;
            ensure!(!late, InvalidGraph, "{} reads '{name}' before it is computed", node.place());
        }
    }
    Ok(())
}

fn arity(graph: &Graph) -> Result<()> {
    graph.nodes.iter().try_for_each(|node| node.spec.check_arity(node).within(|| node.place()))
}
