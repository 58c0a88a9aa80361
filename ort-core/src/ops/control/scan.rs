//! `Scan`: runs a subgraph for each slice of its inputs, with loop-carried states and stacked
//! outputs.
//!
//! The opset 8 form, with a batch axis of its own, becomes two nested scans.

use std::sync::Arc;

use super::looping::settle;
use super::merge::outside;
use crate::dim::Dim;
use crate::dtype::TypeSet;
use crate::ir::{
    Attribute, Attributes, Capture, Graph, Node, Subgraph, SymShape, ValueId, ValueIds, ValueType,
};
use crate::ops;
use crate::spec::{
    AttrKind, Draft, Flow, Grad, InferCx, OP, OpSpec, Registry, TripCount, Upgrade, attr, many_mixed, var,
};
use crate::tensor::Tensor;
use crate::{Result, ensure, error};

static SCAN: OpSpec = OpSpec {
    name: "Scan",
    grad: Grad::Rule(super::gradients::of_scan),
    since: 25,
    first: 8,
    inputs: &[many_mixed("initial_state_and_scan_inputs", "V", 1)],
    outputs: &[many_mixed("final_state_and_scan_outputs", "V", 1)],
    types: &[var("V", TypeSet::ALL_TENSOR_IR13)],
    attrs: &[
        attr::required("body", AttrKind::Graph),
        attr::required("num_scan_inputs", AttrKind::Int),
        attr::optional("scan_input_directions", AttrKind::Ints),
        attr::optional("scan_output_directions", AttrKind::Ints),
        attr::optional("scan_input_axes", AttrKind::Ints),
        attr::optional("scan_output_axes", AttrKind::Ints),
    ],
    infer,
    flow: Some(Flow {
        controls: 0,
        counters: 0,
        conditions: 0,
        carried,
        rounds: TripCount::Slices,
        in_front,
        to_front,
    }),
    upgrades: &[Upgrade { before: 9, apply: unbatch }],
    ..OP
};

ops![SCAN];

/// Returns the number of states: the inputs that are not scanned.
fn carried(attrs: &Attributes, inputs: usize) -> usize {
    let scanned = attrs.int("num_scan_inputs").ok().and_then(|count| usize::try_from(count).ok());
    inputs.saturating_sub(scanned.unwrap_or(0))
}

/// Returns whether every scanned axis is the first, so that slices are contiguous.
fn in_front(attrs: &Attributes) -> bool {
    let axes = ["scan_input_axes", "scan_output_axes"].into_iter().filter_map(|name| attrs.find_ints(name));
    // The rank is unknown here, so a negative axis counts as another one, even if it names axis 0.
    axes.flatten().all(|&axis| axis == 0)
}

/// Returns the axis at `index` of an attribute list, normalized to `rank`; 0 if the list is left
/// out.
fn axis(axes: Option<&[i64]>, index: usize, rank: usize) -> Result<usize> {
    let axis = axes.and_then(|axes| axes.get(index).copied()).unwrap_or(0);
    let counted = if axis < 0 { axis.checked_add(rank as i64) } else { Some(axis) };
    let found = counted.and_then(|axis| usize::try_from(axis).ok()).filter(|&axis| axis < rank);
    found.ok_or_else(|| error!(InvalidGraph, "axis {axis} is out of range for rank {rank}"))
}

/// A scan input or output along an axis other than the first.
struct Across {
    is_input: bool,
    index: usize,
    value: ValueId,
    axis: usize,
    rank: usize,
}

/// Collects what is scanned along an axis other than the first. `None` if a rank is unknown.
fn across(graph: &Graph, node: &Node) -> Result<Option<Vec<Across>>> {
    let states = carried(&node.attrs, node.inputs.len());
    let mut found = Vec::new();
    for (is_input, values) in [(true, &node.inputs), (false, &node.outputs)] {
        let axes = node.attrs.find_ints(if is_input { "scan_input_axes" } else { "scan_output_axes" });
        for (index, value) in values.iter().enumerate().skip(states) {
            let Some(value) = *value else { continue };
            let Some(rank) = graph.value(value).ty.shape().map(<[Dim]>::len) else { return Ok(None) };
            let axis = axis(axes, index - states, rank)?;
            if axis > 0 {
                found.push(Across { is_input, index, value, axis, rank });
            }
        }
    }
    Ok(Some(found))
}

/// Transposes the scanned axes of the inputs to the front before the node, and those of the outputs
/// back after it. Slices are then contiguous, and the axis attributes are dropped.
fn to_front(graph: &mut Graph, mut node: Node) -> Result<Vec<Node>> {
    let Some(found) = across(graph, &node)? else { return Ok(vec![node]) };
    let (mut before, mut behind) = (Vec::new(), Vec::new());
    for Across { is_input, index, value, axis, rank } in found {
        let name = format!("{}.{}", graph.value(value).name, if is_input { "slices" } else { "stack" });
        let moved = graph.add_value(name, ValueType::Unknown);
        let mut order: Vec<usize> = (0..rank).collect();
        let (from, to) = if is_input { (axis, 0) } else { (0, axis) };
        let first = order.remove(from);
        order.insert(to, first);
        if is_input {
            set(&mut node.inputs, index, moved);
            before.push(transposition(graph, (value, moved), &order)?);
        } else {
            set(&mut node.outputs, index, moved);
            behind.push(transposition(graph, (moved, value), &order)?);
        }
    }
    let kept = node.attrs.iter().filter(|(name, _)| !name.ends_with("_axes"));
    let kept = kept.map(|(name, value)| (name.to_string(), value.clone())).collect();
    node.attrs = Attributes::new(node.spec, kept)?;
    before.push(node);
    before.extend(behind);
    Ok(before)
}

fn set(values: &mut ValueIds, index: usize, value: ValueId) {
    if let Some(place) = values.get_mut(index) {
        *place = Some(value);
    }
}

fn transposition(graph: &Graph, (from, to): (ValueId, ValueId), order: &[usize]) -> Result<Node> {
    let spec =
        Registry::global()?.find("", "Transpose").ok_or_else(|| error!(Fail, "Transpose is not known"))?;
    let order = Attribute::Ints(order.iter().map(|&axis| axis as i64).collect());
    Ok(Node {
        name: format!("{}/Transpose", graph.value(to).name).into(),
        spec,
        inputs: [Some(from)].as_slice().into(),
        outputs: [Some(to)].as_slice().into(),
        attrs: Attributes::new(spec, vec![("perm".to_string(), order)])?,
        subgraphs: Vec::new(),
    })
}

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let body = cx.find_subgraph("body").ok_or_else(|| error!(InvalidGraph, "'body' is missing"))?;
    let scanned = usize::try_from(cx.attrs.int("num_scan_inputs")?).ok();
    // The standard demands a scan input, because the scanned length is the trip count.
    let states = scanned.filter(|&count| count > 0).and_then(|count| cx.input_count().checked_sub(count));
    let states =
        states.ok_or_else(|| error!(InvalidGraph, "num_scan_inputs does not match the number of inputs"))?;
    let mut carried: Vec<ValueType> =
        (0..states).map(|index| cx.input_type(index).cloned().unwrap_or_default()).collect();
    let mut length: Option<Dim> = None;
    let mut slices = Vec::new();
    for index in states..cx.input_count() {
        let Some(shape) = cx.shape(index) else {
            slices.push(ValueType::tensor(cx.dtype(index)?, None));
            continue;
        };
        let mut slice: SymShape = shape.to_vec();
        let size = slice.remove(axis(cx.attrs.find_ints("scan_input_axes"), index - states, slice.len())?);
        length = Some(match length {
            None => size,
            // All scanned inputs have the same length, so we prefer a constant to a symbol.
            Some(known) if known.as_constant().is_some() => known,
            Some(_) => size,
        });
        slices.push(ValueType::tensor(cx.dtype(index)?, Some(slice)));
    }
    let outputs = settle(cx, body, &[], &mut carried, (&slices, 0))?;
    ensure!(outputs.len() >= cx.output_count(), InvalidGraph, "the body has too few outputs");
    for (index, ty) in carried.iter().enumerate() {
        cx.set_type(index, outside(ty));
    }
    for index in states..cx.output_count() {
        let Some(output) = outputs.get(index) else { continue };
        let Some(tensor) = output.as_tensor() else { continue };
        let axes = cx.attrs.find_ints("scan_output_axes");
        let shape = match outside(output).shape() {
            None => None,
            Some(shape) => {
                let mut shape = shape.to_vec();
                // The axis counts in the stacked output, which has one dimension more than a slice.
                let axis = axis(axes, index - states, shape.len() + 1)?;
                shape.insert(axis, length.clone().unwrap_or_else(Dim::unknown));
                Some(shape)
            }
        };
        cx.set(index, tensor.dtype, shape);
    }
    Ok(())
}

/// Rewrites the opset 8 form, in which every input has a leading batch axis and the scanned ones
/// have their sequence second.
///
/// The result is a stateless scan over the batch, whose body is a scan over the sequence. If the
/// sequences have lengths of their own, the body cuts the scanned inputs to the length and pads the
/// outputs with zeros.
fn unbatch(draft: &mut Draft<'_>) -> Result<()> {
    ensure!(!draft.inputs.is_empty(), InvalidGraph, "Scan without inputs");
    // Input 0 of the opset 8 form is the optional `sequence_lens`.
    let lengths = draft.inputs.remove(0);
    let count = draft.inputs.len();
    let scanned = match draft.attr("num_scan_inputs") {
        Some(Attribute::Int(scanned)) => usize::try_from(*scanned).ok(),
        _ => None,
    };
    let states = scanned.filter(|&scanned| scanned > 0).and_then(|scanned| count.checked_sub(scanned));
    let states =
        states.ok_or_else(|| error!(InvalidGraph, "num_scan_inputs does not match the number of inputs"))?;
    let spec = Registry::global()?.find("", "Scan").ok_or_else(|| error!(Fail, "Scan is not known"))?;
    let position = draft.subgraphs.iter().position(|subgraph| subgraph.attr == "body");
    let position = position.ok_or_else(|| error!(InvalidGraph, "'body' is missing"))?;
    let mut inner = draft.subgraphs.remove(position);

    let mut middle = Graph::new(format!("{}_batch", draft.name));
    let mut captures = Vec::new();
    // The inner scan now captures from the middle graph, which captures from the outer one in turn.
    for capture in &mut inner.captures {
        let name = inner.graph.value(capture.inner).name.clone();
        let value = middle.add_value(name, ValueType::Unknown);
        captures.push(Capture { outer: capture.outer, inner: value });
        capture.outer = value;
    }
    let mut values = |what: &str, count: usize| -> Vec<_> {
        let name = |index| format!("{}.{what}_{index}", draft.name);
        (0..count).map(|index| middle.add_value(name(index), ValueType::Unknown)).collect()
    };
    let mut inputs = values("input", count);
    let mut outputs = values("output", draft.outputs.len());
    let length = lengths.map(|_| middle.add_value(format!("{}.length", draft.name), ValueType::Unknown));
    let mut given: Vec<(String, Attribute)> =
        vec![("num_scan_inputs".to_string(), Attribute::Int((count - states) as i64))];
    // Version 9 renamed the attribute and added one for the outputs.
    if let Some(directions) = draft.take_attr("directions") {
        given.push(("scan_input_directions".to_string(), directions));
    }
    middle.inputs.clone_from(&inputs);
    // The order of the outer scan's inputs: states and sequences, then the lengths.
    middle.inputs.extend(length);
    let length = match (length, inputs.get(states)) {
        (Some(length), Some(first)) => Some(Length::of(&mut middle, length, *first)?),
        _ => None,
    };
    if let Some(length) = &length {
        for sequence in inputs.iter_mut().skip(states) {
            *sequence = length.cut(&mut middle, *sequence)?;
        }
    }
    middle.nodes.push(Node {
        name: Arc::from(format!("{}_sequence", draft.name)),
        spec,
        inputs: inputs.into_iter().map(Some).collect(),
        outputs: outputs.iter().copied().map(Some).collect(),
        attrs: Attributes::new(spec, given)?,
        subgraphs: vec![inner],
    });
    if let Some(length) = &length {
        for sequence in outputs.iter_mut().skip(states) {
            *sequence = length.fill_up(&mut middle, *sequence)?;
        }
    }
    middle.outputs = outputs;
    // The lengths are scanned as well, so that each iteration sees the length of its own batch
    // element.
    draft.inputs.extend(lengths.map(Some));
    draft.set_attr("num_scan_inputs", Attribute::Int(draft.inputs.len() as i64));
    draft.subgraphs.push(Subgraph { attr: "body", graph: middle, captures });
    Ok(())
}

/// The length of one batch element's sequences, as values of that element's graph.
struct Length {
    /// The length of this element's sequences, as a list of one number.
    own: ValueId,
    /// The length of the padded sequences, as a list of one number.
    longest: ValueId,
    zero: ValueId,
}

impl Length {
    /// Builds the values from a scalar length and an uncut sequence.
    fn of(graph: &mut Graph, length: ValueId, sequence: ValueId) -> Result<Length> {
        let mut constant = |name: &str, value: i64| -> Result<ValueId> {
            let name = format!("{}.{name}", graph.name);
            Ok(graph.add_constant(name, Tensor::from_slice(&[1], &[value])?))
        };
        let (zero, one) = (constant("zero", 0)?, constant("one", 1)?);
        let own = emit(graph, "Reshape", &[Some(length), Some(one)], Vec::new())?;
        let shape = emit(graph, "Shape", &[Some(sequence)], Vec::new())?;
        let longest = emit(graph, "Slice", &[Some(shape), Some(zero), Some(one)], Vec::new())?;
        Ok(Length { own, longest, zero })
    }

    /// Cuts a sequence to its own length.
    fn cut(&self, graph: &mut Graph, sequence: ValueId) -> Result<ValueId> {
        // The inputs of `Slice` are data, starts, ends and axes: the same constant is the start and
        // the axis.
        let inputs = [sequence, self.zero, self.own, self.zero].map(Some);
        emit(graph, "Slice", &inputs, Vec::new())
    }

    /// Pads a sequence with zeros to the length of the longest.
    fn fill_up(&self, graph: &mut Graph, sequence: ValueId) -> Result<ValueId> {
        // The pads are [0, missing] on axis 0, and `Pad` fills with zeros by default.
        let missing = emit(graph, "Sub", &[Some(self.longest), Some(self.own)], Vec::new())?;
        let axis = vec![("axis".to_string(), Attribute::Int(0))];
        let pads = emit(graph, "Concat", &[Some(self.zero), Some(missing)], axis)?;
        emit(graph, "Pad", &[Some(sequence), Some(pads), None, Some(self.zero)], Vec::new())
    }
}

/// Appends a node with one output.
fn emit(
    graph: &mut Graph,
    op: &str,
    inputs: &[Option<ValueId>],
    attrs: Vec<(String, Attribute)>,
) -> Result<ValueId> {
    let spec = Registry::global()?.find("", op).ok_or_else(|| error!(Fail, "{op} is not known"))?;
    let name: Arc<str> = format!("{}/{op}_{}", graph.name, graph.nodes.len()).into();
    let output = graph.add_value(format!("{name}.0"), ValueType::Unknown);
    let attrs = Attributes::new(spec, attrs)?;
    let (inputs, outputs) = (inputs.into(), [Some(output)].as_slice().into());
    graph.nodes.push(Node { name, spec, inputs, outputs, attrs, subgraphs: Vec::new() });
    Ok(output)
}
