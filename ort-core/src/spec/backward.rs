//! Reverse accumulation over nodes of a graph: what a backward pass and the rules of operators with
//! graphs of their own share.

use std::collections::{HashMap, HashSet};

use super::gradient::{GradCx, NodeEmitter};
use crate::dtype::TypeSet;
use crate::ir::{Graph, Node, NodeId, ValueId, ValueType};
use crate::{Error, ErrorKind, Result, Within, error};

/// The most operators that one error names.
const MOST_NAMED: usize = 12;
/// The most characters of one reason in an error.
const MOST_LETTERS: usize = 300;

/// A node through which no gradient goes.
#[derive(Debug, Clone)]
pub(crate) struct NotDifferentiable {
    /// The operator, with its domain where that is not ONNX's own.
    pub operator: String,
    /// The node's name.
    pub node: String,
    /// Why.
    pub reason: String,
}

/// What a backward pass goes over.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BackwardPass<'a> {
    /// The nodes, in order.
    pub forward: &'a [(NodeId, Node)],
    /// The values to differentiate by.
    pub xs: &'a [ValueId],
    /// The values at which it ends, `xs` among them.
    pub boundary: &'a [ValueId],
}

impl BackwardPass<'_> {
    /// The values that depend on `xs` and can carry a gradient.
    pub(crate) fn varying(&self, graph: &Graph) -> HashSet<ValueId> {
        let boundary: HashSet<ValueId> = self.boundary.iter().copied().collect();
        let mut varying: HashSet<ValueId> =
            self.xs.iter().copied().filter(|&x| is_continuous(graph, x)).collect();
        for (_, node) in self.forward {
            if node.reads().any(|value| varying.contains(&value)) {
                let outputs = node.outputs.iter().flatten().copied();
                varying.extend(outputs.filter(|id| !boundary.contains(id) && is_continuous(graph, *id)));
            }
        }
        varying
    }

    /// Adds the nodes that compute the gradients of the sum of all seeds, each a value and its
    /// gradient. Returns the gradients, by value, where there is one. Nodes that stand in the way
    /// go to `obstacles`, and the pass goes on as if their gradient were 0.
    pub(crate) fn accumulate(
        &self,
        graph: &mut Graph,
        seeds: &[(ValueId, ValueId)],
        obstacles: &mut Vec<NotDifferentiable>,
    ) -> Result<HashMap<ValueId, ValueId>> {
        let boundary: HashSet<ValueId> = self.boundary.iter().copied().collect();
        let varying = self.varying(graph);
        let mut totals: HashMap<ValueId, ValueId> = HashMap::new();
        for &(value, seed) in seeds.iter().filter(|(value, _)| varying.contains(value)) {
            add(graph, &mut totals, (value, seed), "seed")?;
        }
        for (id, node) in self.forward.iter().rev() {
            let inner = |output: &Option<ValueId>| output.filter(|id| !boundary.contains(id));
            let total = |output| inner(output).and_then(|id| totals.get(&id).copied());
            let upstream: Vec<Option<ValueId>> = node.outputs.iter().map(total).collect();
            if upstream.iter().all(Option::is_none) {
                continue;
            }
            let shares = match GradCx::run(graph, (*id, node), &upstream, &varying) {
                Err(problem) if problem.kind() == ErrorKind::NotImplemented => {
                    obstacles.push(NotDifferentiable::new(node, &problem));
                    zeros(graph, node, &varying)?
                }
                shares => shares.within(|| node.place())?,
            };
            for share in shares {
                add(graph, &mut totals, share, &node.name)?;
            }
        }
        Ok(totals)
    }
}

/// Adds a share to the gradient of a value.
fn add(
    graph: &mut Graph,
    totals: &mut HashMap<ValueId, ValueId>,
    (value, share): (ValueId, ValueId),
    name: &str,
) -> Result<()> {
    let total = match totals.get(&value) {
        None => share,
        Some(&total) => NodeEmitter { graph, name: name.into() }.emit("Add", &[total, share], &[])?,
    };
    totals.insert(value, total);
    Ok(())
}

/// Zeros for what a node reads, so that what stands before it is looked at as well.
fn zeros(graph: &mut Graph, node: &Node, varying: &HashSet<ValueId>) -> Result<Vec<(ValueId, ValueId)>> {
    let tensor = |id: &ValueId| varying.contains(id) && graph.value(*id).ty.as_tensor().is_some();
    let values: Vec<ValueId> = node.reads().filter(tensor).collect();
    let mut pen = NodeEmitter { graph, name: node.name.clone() };
    values.into_iter().map(|value| Ok((value, pen.filled(0.0, value)?))).collect()
}

/// Whether a value can carry a gradient: floats do, integers and booleans do not. Of what is no
/// tensor it is not known, and its operators will say so.
pub(crate) fn is_continuous(graph: &Graph, id: ValueId) -> bool {
    match &graph.value(id).ty {
        ValueType::Tensor(tensor) => TypeSet::FLOATS.contains(tensor.dtype),
        _ => true,
    }
}

impl NotDifferentiable {
    pub(crate) fn new(node: &Node, problem: &Error) -> NotDifferentiable {
        NotDifferentiable {
            operator: node.spec.full_name(),
            node: node.name.to_string(),
            reason: problem.message().to_string(),
        }
    }

    /// One error for all of them; none where there is none.
    pub(crate) fn refuse(obstacles: &[NotDifferentiable]) -> Result<()> {
        if obstacles.is_empty() {
            return Ok(());
        }
        let mut groups: Vec<(&NotDifferentiable, usize)> = Vec::new();
        for obstacle in obstacles {
            let same = |known: &&mut (&NotDifferentiable, usize)| {
                known.0.operator == obstacle.operator && known.0.reason == obstacle.reason
            };
            match groups.iter_mut().find(same) {
                Some((_, count)) => *count += 1,
                None => groups.push((obstacle, 1)),
            }
        }
        let mut lines: Vec<String> = groups.iter().take(MOST_NAMED).map(|group| line(*group)).collect();
        if let Some(more) = groups.len().checked_sub(MOST_NAMED).filter(|&more| more > 0) {
            lines.push(format!("and {more} more"));
        }
        Err(error!(NotImplemented, "no gradient through {}", lines.join("; "))
            .help("differentiate by what comes after these nodes, or replace them"))
    }
}

fn line((obstacle, count): (&NotDifferentiable, usize)) -> String {
    let NotDifferentiable { operator, node, reason } = obstacle;
    let reason: String = reason.chars().take(MOST_LETTERS).collect();
    let nodes = if count == 1 { "node" } else { "nodes" };
    format!("{operator}: {reason} ({count} {nodes}, first '{node}')")
}

/// Takes away the nodes from `start` on that nothing but each other reads, `roots` aside.
pub(crate) fn prune(graph: &mut Graph, start: usize, roots: impl IntoIterator<Item = ValueId>) {
    let mut needed: HashSet<ValueId> = roots.into_iter().collect();
    // Only the added nodes are visited. This runs once per differentiated node, so a pass over the
    // whole graph would be quadratic.
    let added = graph.nodes.split_off(start.min(graph.nodes.len()));
    let mut kept = Vec::with_capacity(added.len());
    for node in added.into_iter().rev() {
        if node.outputs.iter().flatten().any(|id| needed.contains(id)) {
            needed.extend(node.reads());
            kept.push(node);
        }
    }
    graph.nodes.extend(kept.into_iter().rev());
}
