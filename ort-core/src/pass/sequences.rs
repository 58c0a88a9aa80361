//! Elimination of sequences on the path of a gradient: sequences of known length become the tensors
//! they hold. Exporters write `chunk`, `unbind` and `stack` with them.

use crate::dim::Dim;
use crate::ir::{Attribute, Attributes, Graph, Node, NodeId, ValueId};
use crate::spec::{Draft, known_ints};
use crate::tensor::Tensor;
use crate::{Result, ensure, error};

/// Whether a node takes a tensor out of a sequence.
pub(super) fn is_reader(node: &Node) -> bool {
    node.spec.domain.is_empty() && matches!(node.spec.name, "SequenceAt" | "ConcatFromSequence")
}

/// Returns nodes that compute the same without the sequence; `None` if the sequence or the position
/// is unknown.
pub(super) fn without_sequence(graph: &mut Graph, node: &Node) -> Result<Option<Vec<Node>>> {
    let Some(maker) = maker_of(graph, node) else { return Ok(None) };
    match (node.spec.name, maker.spec.name) {
        ("SequenceAt", "SequenceConstruct") => {
            let count = maker.inputs.len() as i64;
            let Some(place) = position(graph, node, Some(count))? else { return Ok(None) };
            let element = maker.inputs.get(place).copied().flatten();
            let element =
                element.ok_or_else(|| error!(InvalidGraph, "position {place} of {count} elements"))?;
            replaced(graph, node, |draft| draft.emit("Identity", &[element], &[])).map(Some)
        }
        ("SequenceAt", "SplitToSequence") => part(graph, node, &maker),
        ("ConcatFromSequence", "SequenceConstruct") => {
            let mut elements: Vec<ValueId> = maker.inputs.iter().flatten().copied().collect();
            let axis = node.attrs.int("axis")?;
            let stacks = node.attrs.flag("new_axis")?;
            replaced(graph, node, |draft| {
                if stacks {
                    let axes = draft.constant_ints(&[axis])?;
                    for element in &mut elements {
                        *element = draft.emit("Unsqueeze", &[*element, axes], &[])?;
                    }
                }
                draft.emit("Concat", &elements, &[("axis", Attribute::Int(axis))])
            })
            .map(Some)
        }
        _ => Ok(None),
    }
}

/// Returns the node that makes the sequence that a node reads.
fn maker_of(graph: &Graph, node: &Node) -> Option<Node> {
    let sequence = node.inputs.first().copied().flatten()?;
    let producer: NodeId = graph.producers().get(sequence.index()).copied().flatten()?;
    graph.nodes.get(producer.index()).cloned()
}

/// Returns the position that `SequenceAt` reads, counted from the front; `None` if it is unknown.
/// It is within the sequence if the number of elements, `count`, is known.
fn position(graph: &Graph, node: &Node, count: Option<i64>) -> Result<Option<usize>> {
    let input = node.inputs.get(1).copied().flatten();
    let known = input.and_then(|input| known_ints(graph.constants.get(&input).map(Tensor::view)));
    let Some(given) = known.and_then(|ints| ints.first().copied()) else { return Ok(None) };
    let Some(count) = count else { return Ok(usize::try_from(given).ok()) };
    ensure!(
        (-count..count).contains(&given),
        InvalidGraph,
        "position {given} is out of range for a sequence of {count} elements"
    );
    Ok(usize::try_from(if given < 0 { given + count } else { given }).ok())
}

/// Returns nodes that compute one part of a split tensor: a slice, or one element of the axis,
/// which is dropped.
fn part(graph: &mut Graph, node: &Node, maker: &Node) -> Result<Option<Vec<Node>>> {
    let Some(input) = maker.inputs.first().copied().flatten() else { return Ok(None) };
    let Some(shape) = graph.value(input).ty.shape().map(<[Dim]>::to_vec) else { return Ok(None) };
    let axis = crate::spec::axis_of(maker.attrs.int("axis")?, shape.len())?;
    let size = shape.get(axis).and_then(Dim::as_constant);
    let split = maker.inputs.get(1).copied().flatten();
    let attr = [("axis", Attribute::Int(axis as i64))];
    let (start, length) = match split {
        None => {
            let Some(place) = position(graph, node, size)? else { return Ok(None) };
            if !maker.attrs.flag("keepdims")? {
                let index = Tensor::scalar(place as i64)?;
                let gather = |draft: &mut Draft<'_>| {
                    let index = draft.constant(index);
                    draft.emit("Gather", &[input, index], &attr)
                };
                return replaced(graph, node, gather).map(Some);
            }
            (place as i64, 1)
        }
        Some(split) => {
            let is_scalar = graph.value(split).ty.shape().is_some_and(<[Dim]>::is_empty);
            let Some(sizes) = known_ints(graph.constants.get(&split).map(Tensor::view)) else {
                return Ok(None);
            };
            // A scalar is the size of all parts but the last, a vector lists the size of each.
            let step = sizes.first().copied().filter(|step| is_scalar && *step > 0);
            let count = match step {
                Some(step) => size.map(|size| size / step + i64::from(size % step != 0)),
                None => Some(sizes.len() as i64),
            };
            let Some(place) = position(graph, node, count)? else { return Ok(None) };
            match step {
                Some(step) => ((place as i64).saturating_mul(step), step),
                None => {
                    let before = sizes.iter().take(place).copied();
                    let start = before.fold(0, i64::saturating_add);
                    (start, sizes.get(place).copied().unwrap_or(0))
                }
            }
        }
    };
    // `Slice` clamps both ends to the axis, so ends that saturate are right.
    let end = start.saturating_add(length);
    let slice = |draft: &mut Draft<'_>| {
        let (start, end) = (draft.constant_ints(&[start])?, draft.constant_ints(&[end])?);
        let axes = draft.constant_ints(&[axis as i64])?;
        draft.emit("Slice", &[input, start, end, axes], &[])
    };
    replaced(graph, node, slice).map(Some)
}

/// Builds the nodes that replace a node.
fn replaced(
    graph: &mut Graph,
    node: &Node,
    build: impl FnOnce(&mut Draft<'_>) -> Result<ValueId>,
) -> Result<Vec<Node>> {
    let mut node = node.clone();
    node.attrs = Attributes::default();
    let mut draft = Draft::of_node(graph, node);
    let value = build(&mut draft)?;
    draft.replace(&[value])?;
    draft.finish()
}
