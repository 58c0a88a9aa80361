//! Reverse accumulation over the nodes of a graph.
//!
//! Shared by the backward pass of a graph and by the gradient rules of control-flow operators.

use std::collections::{HashMap, HashSet};

use super::gradient::GradCx;
use super::node_emitter::NodeEmitter;
use crate::dtype::TypeSet;
use crate::ir::{Graph, Node, NodeId, ValueId, ValueType};
use crate::{Error, ErrorKind, Result, Within, error};

/// Maximum number of operators that one error names.
const MOST_NAMED: usize = 12;
/// Maximum length of one reason in an error, in characters.
const MAX_REASON_CHARS: usize = 300;

/// A node that gradients cannot flow through.
#[derive(Debug, Clone)]
pub(crate) struct NotDifferentiable {
    /// The operator, qualified with its domain unless it is the standard one.
    pub operator: String,
    /// The name of the node.
    pub node: String,
    /// The reason.
    pub reason: String,
}

/// The range of a backward pass.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BackwardPass<'a> {
    /// The forward nodes, in order.
    pub forward: &'a [(NodeId, Node)],
    /// The values to differentiate with respect to.
    pub xs: &'a [ValueId],
    /// The values at which the pass stops, including `xs`.
    pub boundary: &'a [ValueId],
}

impl BackwardPass<'_> {
    /// Returns the values that depend on `xs` and can carry a gradient.
    pub(crate) fn varying(&self, graph: &Graph) -> HashSet<ValueId> {
        let boundary: HashSet<ValueId> = self.boundary.iter().copied().collect();
        let mut varying: HashSet<ValueId> =
            self.xs.iter().copied().filter(|&x| is_continuous(graph, x)).collect();
        for (_, node) in self.forward {
            if node.reads().any(|value| varying.contains(&value)) {
                let outputs = node.outputs.iter().flatten().copied();
                // A boundary value counts as independent, even if a node of the pass computes it.
                varying.extend(outputs.filter(|id| !boundary.contains(id) && is_continuous(graph, *id)));
            }
        }
        varying
    }

    /// Adds the nodes that compute the gradients. Each seed is a value and its gradient; their
    /// contributions are summed. Returns the gradient of each value that has one. Nodes without a
    /// gradient are added to `obstacles`, and the pass continues with zeros for them.
    pub(crate) fn accumulate(
        &self,
        graph: &mut Graph,
        seeds: &[(ValueId, ValueId)],
        obstacles: &mut Vec<NotDifferentiable>,
    ) -> Result<HashMap<ValueId, ValueId>> {
        let boundary: HashSet<ValueId> = self.boundary.iter().copied().collect();
        let varying = self.varying(graph);
        let mut totals: HashMap<ValueId, ValueId> = HashMap::new();
        // Other seeds would only add nodes without a reader.
        for &(value, seed) in seeds.iter().filter(|(value, _)| varying.contains(value)) {
            add(graph, &mut totals, (value, seed), "seed")?;
        }
        // In reverse, every reader of an output comes before its producer, so its total is
        // complete.
        for (id, node) in self.forward.iter().rev() {
            // Gradients of boundary values are results, so they do not flow into the producers.
            let inner = |output: &Option<ValueId>| output.filter(|id| !boundary.contains(id));
            let total = |output| inner(output).and_then(|id| totals.get(&id).copied());
            let upstream: Vec<Option<ValueId>> = node.outputs.iter().map(total).collect();
            if upstream.iter().all(Option::is_none) {
                continue;
            }
            let shares = match GradCx::run(graph, (*id, node), &upstream, &varying) {
                // Collect instead of failing, so that one error names all obstacles. Other errors
                // end the pass.
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

/// Adds a contribution to the gradient of a value.
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

/// Returns zero gradients for what a node reads, so that the pass goes on and finds the obstacles
/// before it too.
fn zeros(graph: &mut Graph, node: &Node, varying: &HashSet<ValueId>) -> Result<Vec<(ValueId, ValueId)>> {
    let tensor = |id: &ValueId| varying.contains(id) && graph.value(*id).ty.as_tensor().is_some();
    let values: Vec<ValueId> = node.reads().filter(tensor).collect();
    let mut pen = NodeEmitter { graph, name: node.name.clone() };
    values.into_iter().map(|value| Ok((value, pen.filled(0.0, value)?))).collect()
}

/// Returns whether a value can carry a gradient: floats can, integers and booleans cannot. For
/// other types this is unknown here, so the operators decide.
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

    /// Returns one error for all obstacles, if there are any.
    pub(crate) fn refuse(obstacles: &[NotDifferentiable]) -> Result<()> {
        if obstacles.is_empty() {
            return Ok(());
        }
        // A model repeats its layers, so group equal reasons.
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
    let reason: String = reason.chars().take(MAX_REASON_CHARS).collect();
    let nodes = if count == 1 { "node" } else { "nodes" };
    format!("{operator}: {reason} ({count} {nodes}, first '{node}')")
}

/// Dead-code elimination among the nodes from `start` on, which keeps what `roots` need.
pub(crate) fn prune(graph: &mut Graph, start: usize, roots: impl IntoIterator<Item = ValueId>) {
    let mut needed: HashSet<ValueId> = roots.into_iter().collect();
    // Visit only the added nodes. This runs once per differentiated node, so a pass over the whole
    // graph would be quadratic.
    let added = graph.nodes.split_off(start.min(graph.nodes.len()));
    let mut kept = Vec::with_capacity(added.len());
    for node in added.into_iter().rev() {
        // In reverse, the readers of a node are visited before it.
        if node.outputs.iter().flatten().any(|id| needed.contains(id)) {
            needed.extend(node.reads());
            kept.push(node);
        }
    }
    graph.nodes.extend(kept.into_iter().rev());
}
