//! Graph verifier: the invariants of every graph, as a table of rules.

use super::Graph;
use crate::{Result, Within, ensure, error};

/// A rule: its name and its check.
type Rule = (&'static str, fn(&Graph) -> Result<()>);

const RULES: &[Rule] = &[
    // First, because the other rules look values up.
    ("every value has an entry", has_entries),
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

fn has_entries(graph: &Graph) -> Result<()> {
    let given = graph.inputs.iter().chain(&graph.outputs).chain(graph.constants.keys());
    let given = given.chain(graph.input_defaults.keys()).copied();
    let used = graph.nodes.iter().flat_map(|node| node.reads().chain(node.outputs.iter().flatten().copied()));
    match given.chain(used).find(|id| id.index() >= graph.value_count()) {
        None => Ok(()),
        Some(id) => Err(error!(InvalidGraph, "value {} has no entry", id.0)),
    }
}

fn one_origin(graph: &Graph) -> Result<()> {
    let mut seen = vec![false; graph.value_count()];
    let produced = graph.nodes.iter().flat_map(|node| node.outputs.iter().flatten().copied());
    // Inputs and constants are definitions, too: no node may write them.
    let given = graph.inputs.iter().copied().chain(graph.constants.keys().copied());
    for id in given.chain(produced) {
        let name = &graph.value(id).name;
        let twice = seen.get_mut(id.index()).is_some_and(|seen| std::mem::replace(seen, true));
        ensure!(!twice, Fail, "'{name}' is defined twice");
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
            ensure!(!late, Fail, "{} reads '{name}' before it is computed", node.place());
        }
    }
    Ok(())
}

fn arity(graph: &Graph) -> Result<()> {
    graph.nodes.iter().try_for_each(|node| node.spec.check_arity(node).within(|| node.place()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::ir::{GraphBuilder, ValueId};

    #[test]
    fn values_without_an_entry_are_refused() -> Result<()> {
        let mut builder = GraphBuilder::new("g");
        let x = builder.input("x", DType::F32, &["2"]);
        let y = builder.node("Relu", &[x], &[])?;
        let graph = builder.finish(&[y])?;
        let changes: [fn(&mut Graph, ValueId); 4] = [
            |graph, id| graph.inputs.push(id),
            |graph, id| graph.outputs.push(id),
            |graph, id| graph.nodes[0].inputs[0] = Some(id),
            |graph, id| graph.nodes[0].outputs[0] = Some(id),
        ];
        for change in changes {
            let mut graph = graph.clone();
            change(&mut graph, ValueId(9));
            let problem = graph.verify().unwrap_err().to_string();
            assert!(problem.contains("value 9 has no entry"), "{problem}");
        }
        Ok(())
    }
}
