//! Loop-invariant code motion for the state of `Loop` and `Scan`: values that the body passes
//! through unchanged.
//!
//! Exporters carry weights this way. Each iteration copies what it carries, and the body knows no
//! elements of it. So the body captures the initial value instead, or has it as a constant, and
//! later nodes read the initial value in place of the final one. That is exact for zero iterations,
//! too.

use rustc_hash::FxHashMap;

use super::cse::rename;
use super::nodes::new_node;
use super::report::Report;
use crate::ir::{Capture, Graph, Node, NodeId, ValueId, ValueType};
use crate::spec::{ONNX, infer_at};
use crate::tensor::Tensor;
use crate::{Result, Within};

/// The rule name of this pass.
pub(super) const RULE: &str = "loop_invariant";

/// Maps the final value of a state to its initial value.
type InitialOf = FxHashMap<ValueId, ValueId>;

/// A state that no iteration changes.
struct Invariant {
    /// Its position among the carried values.
    position: usize,
    initial: ValueId,
    /// The input of the body.
    inner: ValueId,
    /// The initial value, if it is a constant.
    constant: Option<Tensor>,
}

/// Moves invariant state out of the loops of an inferred graph and of its subgraphs; returns
/// whether there was any.
pub(super) fn apply(graph: &mut Graph, report: &mut Report) -> Result<bool> {
    let mut changed = false;
    let mut initial_of = InitialOf::default();
    for index in 0..graph.nodes.len() {
        let Some(node) = graph.nodes.get_mut(index) else { continue };
        // Subgraphs first: what an inner loop passes through, the outer one may pass through, too.
        for subgraph in node.subgraphs.iter_mut().filter(|subgraph| subgraph.graph.broken.is_none()) {
            changed |= apply(&mut subgraph.graph, report).within(|| subgraph.attr)?;
        }
        rename(node, &initial_of);
        for replaced in move_out(graph, index) {
            report.count(RULE);
            changed = true;
            if let (Some(last), initial) = replaced {
                initial_of.insert(last, initial);
            }
        }
    }
    // An output of the graph keeps its name, so it is a copy.
    let mut outputs: Vec<ValueId> = graph.outputs.clone();
    outputs.sort_unstable();
    outputs.dedup();
    for (output, initial) in outputs.into_iter().filter_map(|id| Some((id, *initial_of.get(&id)?))) {
        let name = format!("{}/{RULE}", graph.value(output).name);
        graph.nodes.push(new_node(ONNX, "Identity", &name, &[Some(initial)], &[Some(output)], Vec::new())?);
        infer_at(graph, graph.nodes.len() - 1)?;
    }
    Ok(changed)
}

/// Moves the invariant state out of one node. Returns the final and the initial value of each.
/// Without inference of the result, the node stays as it was.
fn move_out(graph: &mut Graph, index: usize) -> Vec<(Option<ValueId>, ValueId)> {
    let Some(before) = graph.nodes.get(index) else { return Vec::new() };
    let invariants = invariants(graph, before);
    let Some(flow) = before.spec.flow.filter(|_| !invariants.is_empty()) else { return Vec::new() };
    // A loop with no other output stays: without it, a run would end that never ends by itself.
    let is_other = |position: usize| invariants.iter().all(|invariant| invariant.position != position);
    let mut outputs = before.outputs.iter().enumerate();
    if !outputs.any(|(position, output)| output.is_some() && is_other(position)) {
        return Vec::new();
    }
    let before = before.clone();
    let mut node = before.clone();
    let Some(body) = node.subgraphs.first_mut() else { return Vec::new() };
    let mut replaced = Vec::with_capacity(invariants.len());
    // From the last one on, so that positions stay valid.
    for Invariant { position, initial, inner, constant } in invariants.into_iter().rev() {
        node.inputs.remove(flow.controls + position);
        body.graph.inputs.remove(flow.counters + position);
        body.graph.input_defaults.remove(&inner);
        body.graph.outputs.remove(flow.conditions + position);
        // Trailing outputs may be omitted.
        let last = (position < node.outputs.len()).then(|| node.outputs.remove(position));
        replaced.push((last.flatten(), initial));
        match constant {
            Some(tensor) => {
                body.graph.value_mut(inner).ty = graph.value(initial).ty.clone();
                body.graph.constants.insert(inner, tensor);
            }
            None => body.captures.push(Capture { outer: initial, inner }),
        }
    }
    graph.nodes.get_mut(index).into_iter().for_each(|place| *place = node.clone());
    // The body now knows the elements of small integers.
    if let Err(problem) = infer_at(graph, index) {
        tracing::debug!(node = &*before.name, %problem, "loop-invariant state stays");
        graph.nodes.get_mut(index).into_iter().for_each(|place| *place = before.clone());
        replaced.clear();
    }
    replaced
}

/// Finds the states that the body of a node passes through unchanged.
fn invariants(graph: &Graph, node: &Node) -> Vec<Invariant> {
    let (Some(flow), [body]) = (node.spec.flow, node.subgraphs.as_slice()) else { return Vec::new() };
    let carried = (flow.carried)(&node.attrs, node.inputs.len().saturating_sub(flow.controls));
    if carried == 0 || body.graph.broken.is_some() {
        return Vec::new();
    }
    let producers = body.graph.producers();
    let invariant = |position: usize| {
        let initial = node.inputs.get(flow.controls + position).copied().flatten()?;
        let inner = *body.graph.inputs.get(flow.counters + position)?;
        let last = *body.graph.outputs.get(flow.conditions + position)?;
        // An optional input of the body may be given a plain value, which it must not capture.
        let is_same = match (&graph.value(initial).ty, &body.graph.value(inner).ty) {
            (ValueType::Tensor(outer), ValueType::Tensor(own)) => outer.dtype == own.dtype,
            (outer, own) => outer == own && *outer != ValueType::Unknown,
        };
        let constant = graph.constants.get(&initial).cloned();
        let unchanged = is_same && source(&body.graph, &producers, last) == inner;
        unchanged.then_some(Invariant { position, initial, inner, constant })
    };
    (0..carried).filter_map(invariant).collect()
}

/// Follows a value back through `Identity` nodes.
fn source(graph: &Graph, producers: &[Option<NodeId>], mut value: ValueId) -> ValueId {
    let made_by = |value: ValueId| {
        let producer = producers.get(value.index()).copied().flatten()?;
        let node = graph.nodes.get(producer.index())?;
        (node.spec.domain == ONNX && node.spec.name == "Identity").then_some(node)
    };
    while let Some(Some(input)) = made_by(value).and_then(|node| node.inputs.first().copied()) {
        value = input;
    }
    value
}
