//! What must hold of every graph, checked as a table of rules.

use super::Graph;
use crate::{Result, Within, ensure};

/// A rule: what it is called and what it checks.
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
    /// Checks that the graph is well formed: origins, order and arity.
    pub fn verify(&self) -> Result<()> {
        verify(self)
    }
}

fn one_origin(graph: &Graph) -> Result<()> {
    let mut seen = vec![false; graph.value_count()];
    let produced = graph.nodes.iter().flat_map(|node| node.outputs.iter().flatten().copied());
    let given = graph.inputs.iter().copied().chain(graph.constants.keys().copied());
    for id in given.chain(produced) {
        let name = &graph.value(id).name;
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
