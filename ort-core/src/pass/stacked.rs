//! Elimination of sequences that control flow builds element by element: they become stacked
//! tensors. Exporters write `EmbeddingBag` with them.
//!
//! A `SequenceMap` over split tensors becomes a `Scan`. What each iteration of a `Loop` appends to
//! a sequence becomes a scan output. Both have gradients, and shapes, which a sequence lacks.
//! Elements of different sizes cannot be stacked: the run reports an error.

use std::collections::HashMap;

use crate::ir::{
    Attribute, Attributes, Capture, Graph, Node, NodeId, Subgraph, ValueId, ValueIds, ValueType,
};
use crate::spec::{NodeEmitter, Registry, axis_of, infer_at, infer_graph, known_ints};
use crate::tensor::Tensor;
use crate::{Result, error};

use super::sequences::is_reader;

/// Makes `ConcatFromSequence` and `SequenceAt` read stacked tensors, if a `SequenceMap` or `Loop`
/// of the graph builds their sequence and its ranks are known. The graph must be inferred and stays
/// so.
pub fn stack_sequences(graph: &mut Graph) -> Result<()> {
    let mut stacks = Stacks::default();
    let mut changed = false;
    for index in 0..graph.nodes.len() {
        let Some(node) = graph.nodes.get(index).filter(|node| is_reader(node)).cloned() else { continue };
        let Some(sequence) = node.inputs.first().copied().flatten() else { continue };
        let makes_elements = |maker: &Node| ["SequenceMap", "Loop", "Identity"].contains(&maker.spec.name);
        // Only what control flow builds: a sequence that is split or listed needs no stack.
        if !maker_of(graph, sequence).is_some_and(|(_, maker)| makes_elements(&maker)) {
            continue;
        }
        let Some(stack) = stacks.of(graph, sequence)? else { continue };
        let Some(value) = read(graph, &node, stack)? else { continue };
        let spec = Registry::global()?.find("", "Identity");
        let spec = spec.ok_or_else(|| error!(Fail, "operator Identity is not known"))?;
        let inputs = ValueIds::from_slice(&[Some(value)]);
        let same = Node { spec, inputs, attrs: Attributes::default(), ..node };
        graph.nodes.get_mut(index).into_iter().for_each(|node| *node = same.clone());
        changed = true;
    }
    if changed {
        graph.sort()?;
        infer_graph(graph)?;
    }
    Ok(())
}

fn maker_of(graph: &Graph, value: ValueId) -> Option<(NodeId, Node)> {
    let id = graph.producers().get(value.index()).copied().flatten()?;
    graph.nodes.get(id.index()).map(|node| (id, node.clone()))
}

/// A tensor whose slices along `axis`, with that axis dropped, are the elements of a sequence.
#[derive(Clone, Copy)]
struct Stack {
    value: ValueId,
    axis: usize,
}

/// The stacks of the sequences visited so far; `None` for a sequence that has none.
#[derive(Default)]
struct Stacks(HashMap<ValueId, Option<Stack>>);

impl Stacks {
    fn of(&mut self, graph: &mut Graph, sequence: ValueId) -> Result<Option<Stack>> {
        if let Some(known) = self.0.get(&sequence) {
            return Ok(*known);
        }
        // Entered before the search: a sequence that depends on itself has no stack.
        self.0.insert(sequence, None);
        let Some((id, node)) = maker_of(graph, sequence) else { return Ok(None) };
        let position = node.outputs.iter().position(|output| *output == Some(sequence)).unwrap_or(0);
        let stack = match (node.spec.domain, node.spec.name) {
            ("", "Identity") => match node.inputs.first().copied().flatten() {
                Some(input) => self.of(graph, input)?,
                None => None,
            },
            ("", "SplitToSequence") => of_split(graph, &node)?,
            ("", "SequenceConstruct") => of_elements(graph, &node)?,
            ("", "SequenceMap") => self.of_map(graph, &node, position)?,
            ("", "Loop") => of_loop(graph, id, position)?,
            _ => None,
        };
        self.0.insert(sequence, stack);
        Ok(stack)
    }

    /// Adds a `Scan` that computes what a `SequenceMap` does, and returns the stack of one output.
    fn of_map(&mut self, graph: &mut Graph, node: &Node, position: usize) -> Result<Option<Stack>> {
        let Some((_, body)) = node.subgraph("body") else { return Ok(None) };
        let mut inner = body.graph.clone();
        let mut captures = body.captures.clone();
        let (mut scanned, mut axes, mut inputs) = (Vec::new(), Vec::new(), Vec::new());
        for (input, &value) in node.inputs.iter().zip(&body.graph.inputs) {
            let Some(outer) = *input else { return Ok(None) };
            // A tensor is the same in each iteration, so the body captures it.
            if !matches!(graph.value(outer).ty, ValueType::Sequence(_)) {
                captures.push(Capture { outer, inner: value });
                continue;
            }
            let Some(stack) = self.of(graph, outer)? else { return Ok(None) };
            scanned.push(Some(stack.value));
            axes.push(stack.axis as i64);
            inputs.push(value);
        }
        let output = inner.outputs.get(position).copied();
        if output.is_none_or(|output| inner.value(output).ty.shape().is_none()) {
            return Ok(None);
        }
        inner.inputs = inputs;
        let count = inner.outputs.len();
        let attrs = [
            ("num_scan_inputs", Attribute::Int(scanned.len() as i64)),
            ("scan_input_axes", Attribute::Ints(axes)),
        ];
        let body = Subgraph { attr: "body", graph: inner, captures };
        let mut emitter = NodeEmitter { graph, name: node.name.clone() };
        let values = emitter.emit_flow(("Scan", &scanned), &attrs, count, vec![body])?;
        let stacks = node.outputs.iter().zip(&values);
        self.0
            .extend(stacks.filter_map(|(output, &value)| Some(((*output)?, Some(Stack { value, axis: 0 })))));
        Ok(values.get(position).map(|&value| Stack { value, axis: 0 }))
    }
}

/// Returns the stack of a tensor split into slices of size 1: the tensor itself, with an axis of
/// size 1 added if the slices keep the split axis.
fn of_split(graph: &mut Graph, node: &Node) -> Result<Option<Stack>> {
    let Some(value) = node.inputs.first().copied().flatten() else { return Ok(None) };
    let Some(rank) = graph.value(value).ty.shape().map(<[_]>::len) else { return Ok(None) };
    let axis = axis_of(node.attrs.int("axis")?, rank)?;
    let keeps = match node.inputs.get(1).copied().flatten() {
        None => node.attrs.flag("keepdims")?,
        Some(split) => {
            let sizes = known_ints(graph.constants.get(&split).map(Tensor::view));
            if !sizes.is_some_and(|sizes| !sizes.is_empty() && sizes.iter().all(|size| *size == 1)) {
                return Ok(None);
            }
            true
        }
    };
    if !keeps {
        return Ok(Some(Stack { value, axis }));
    }
    let mut emitter = NodeEmitter { graph, name: node.name.clone() };
    let axes = emitter.constant(Tensor::from_slice(&[1], &[axis as i64 + 1])?);
    Ok(Some(Stack { value: emitter.emit("Unsqueeze", &[value, axes], &[])?, axis }))
}

/// Stacks tensors of one shape on a new first axis.
fn of_elements(graph: &mut Graph, node: &Node) -> Result<Option<Stack>> {
    let elements: Vec<ValueId> = node.inputs.iter().flatten().copied().collect();
    let shape_of = |element: &ValueId| graph.value(*element).ty.shape();
    let first = elements.first().and_then(shape_of);
    // `Concat` needs equal sizes. Equal expressions are proven equal for every run.
    if first.is_none() || elements.iter().any(|element| shape_of(element) != first) {
        return Ok(None);
    }
    let mut emitter = NodeEmitter { graph, name: node.name.clone() };
    let axes = emitter.constant(Tensor::from_slice(&[1], &[0i64])?);
    let mut rows = Vec::with_capacity(elements.len());
    for element in elements {
        rows.push(emitter.emit("Unsqueeze", &[element, axes], &[])?);
    }
    let value = emitter.emit("Concat", &rows, &[("axis", Attribute::Int(0))])?;
    Ok(Some(Stack { value, axis: 0 }))
}

/// Returns the stack of a sequence that a `Loop` carries, empty at first. Each iteration must
/// append one element and not read the sequence otherwise. The elements become a scan output, and
/// the loop-carried sequence goes away.
fn of_loop(graph: &mut Graph, id: NodeId, position: usize) -> Result<Option<Stack>> {
    let Some(mut node) = graph.nodes.get(id.index()).cloned() else { return Ok(None) };
    let Some(sequence) = node.outputs.get(position).copied().flatten() else { return Ok(None) };
    let consumers = graph.consumers();
    let mut readers = consumers.get(sequence.index()).into_iter().flatten();
    let is_read = |id: &NodeId| graph.nodes.get(id.index()).is_some_and(is_reader);
    // The sequence goes away, so every reader must be able to read the stack instead.
    if !readers.all(is_read) || graph.outputs.contains(&sequence) {
        return Ok(None);
    }
    // The trip count and the condition come before the loop-carried inputs.
    let first = node.inputs.get(2 + position).copied().flatten().and_then(|first| maker_of(graph, first));
    if first.is_none_or(|(_, maker)| maker.spec.name != "SequenceEmpty") {
        return Ok(None);
    }
    let Some(body) = node.subgraphs.iter_mut().find(|subgraph| subgraph.attr == "body") else {
        return Ok(None);
    };
    let Some(element) = take_appended(&mut body.graph, position) else { return Ok(None) };
    let mut emitter = NodeEmitter { graph: &mut body.graph, name: format!("{}/stacked", node.name).into() };
    let row = emitter.emit("Identity", &[element], &[])?;
    body.graph.outputs.push(row);
    let outputs = body.graph.outputs.len() - 1;
    let value = graph.add_value(format!("{}/stacked_{position}", node.name), ValueType::Unknown);
    node.inputs.remove(2 + position);
    node.outputs.remove(position);
    // Trailing outputs may be omitted, but the new scan output comes last.
    node.outputs.resize(outputs - 1, None);
    node.outputs.push(Some(value));
    graph.nodes.get_mut(id.index()).into_iter().for_each(|place| *place = node.clone());
    infer_at(graph, id.index())?;
    Ok(Some(Stack { value, axis: 0 }))
}

/// Removes an append-only sequence from the loop-carried values of a body, and returns the element
/// that is appended. `None`, with nothing changed, if the body does something else with it.
fn take_appended(body: &mut Graph, position: usize) -> Option<ValueId> {
    let (carried, output) = (*body.inputs.get(2 + position)?, *body.outputs.get(1 + position)?);
    let reads = |value: ValueId| {
        let nodes = body.nodes.iter().flat_map(Node::reads).filter(|read| *read == value).count();
        nodes + body.outputs.iter().filter(|output| **output == value).count()
    };
    let place = body.nodes.iter().position(|node| node.outputs.contains(&Some(output)))?;
    let insert = body.nodes.get(place)?;
    // An insert with a position need not append.
    let is_appended = insert.spec.name == "SequenceInsert"
        && insert.inputs.first() == Some(&Some(carried))
        && insert.inputs.get(2).copied().flatten().is_none();
    let element = insert.inputs.get(1).copied().flatten()?;
    body.value(element).ty.shape()?;
    if !is_appended || reads(carried) != 1 || reads(output) != 1 {
        return None;
    }
    body.nodes.remove(place);
    body.inputs.remove(2 + position);
    body.outputs.remove(1 + position);
    Some(element)
}

/// Builds what a node reads from a sequence out of the stack of its elements; `None` if a rank is
/// unknown.
fn read(graph: &mut Graph, node: &Node, Stack { value, axis }: Stack) -> Result<Option<ValueId>> {
    let Some(rank) = graph.value(value).ty.shape().map(<[_]>::len) else { return Ok(None) };
    if node.spec.name == "SequenceAt" {
        let Some(place) = node.inputs.get(1).copied().flatten() else { return Ok(None) };
        if graph.value(place).ty.shape().is_none_or(|shape| !shape.is_empty()) {
            return Ok(None);
        }
        let mut emitter = NodeEmitter { graph, name: node.name.clone() };
        return emitter.emit("Gather", &[value, place], &[("axis", Attribute::Int(axis as i64))]).map(Some);
    }
    // `ConcatFromSequence`: move the stacked axis into place, then merge it with the axis behind it
    // unless it is to be a new one.
    let stacks = node.attrs.flag("new_axis")?;
    let to = axis_of(node.attrs.int("axis")?, if stacks { rank } else { rank - 1 })?;
    let mut order: Vec<i64> = (0..rank).filter(|place| *place != axis).map(|place| place as i64).collect();
    order.insert(to, axis as i64);
    let mut emitter = NodeEmitter { graph, name: node.name.clone() };
    let moved = match to == axis {
        true => value,
        false => emitter.emit("Transpose", &[value], &[("perm", Attribute::Ints(order))])?,
    };
    if stacks {
        return Ok(Some(moved));
    }
    merged(&mut emitter, moved, to).map(Some)
}

/// Merges an axis with the one behind it.
fn merged(emitter: &mut NodeEmitter<'_>, value: ValueId, axis: usize) -> Result<ValueId> {
    let axis = axis as i64;
    let mut sizes = |start: i64, end: Option<i64>| {
        let mut attrs = vec![("start", Attribute::Int(start))];
        attrs.extend(end.map(|end| ("end", Attribute::Int(end))));
        emitter.emit("Shape", &[value], &attrs)
    };
    let [front, one, other] =
        [sizes(0, Some(axis))?, sizes(axis, Some(axis + 1))?, sizes(axis + 1, Some(axis + 2))?];
    let back = sizes(axis + 2, None)?;
    let both = emitter.emit("Mul", &[one, other], &[])?;
    let shape = emitter.emit("Concat", &[front, both, back], &[("axis", Attribute::Int(0))])?;
    // A 0 in the shape is a size, not one to copy.
    emitter.emit("Reshape", &[value, shape], &[("allowzero", Attribute::Int(1))])
}
