//! Helpers for rewrite passes: building nodes, and checks of their order and of their devices.

use super::environment::FirstClaim;
use crate::ir::{Attribute, Attributes, Graph, Node, ValueId};
use crate::spec::Registry;
use crate::{Result, error};

/// Whether the nodes are in topological order.
pub(super) fn in_order(graph: &Graph) -> bool {
    let producers = graph.producers();
    graph.nodes.iter().enumerate().all(|(index, node)| {
        node.reads().all(|value| {
            producers.get(value.index()).copied().flatten().is_none_or(|producer| producer.index() < index)
        })
    })
}

/// Builds a node of a rewrite, looking up its operator.
pub(super) fn new_node(
    domain: &str,
    op: &str,
    name: &str,
    inputs: &[Option<ValueId>],
    outputs: &[Option<ValueId>],
    attrs: Vec<(String, Attribute)>,
) -> Result<Node> {
    let spec = Registry::global()?.find(domain, op);
    let spec = spec.ok_or_else(|| error!(Fail, "there is no operator {op}"))?;
    let (attrs, subgraphs) = (Attributes::new(spec, attrs)?, Vec::new());
    Ok(Node { name: name.into(), spec, inputs: inputs.into(), outputs: outputs.into(), attrs, subgraphs })
}

/// Whether both nodes are claimed, the second by the same device as the first or an earlier one.
pub(super) fn is_no_later(graph: &Graph, first_claim: FirstClaim<'_>, nodes: [&Node; 2]) -> bool {
    let claims = nodes.map(|node| first_claim(graph, node));
    matches!(claims, [Some(before), Some(after)] if after <= before)
}
