//! `Loop`: runs a subgraph repeatedly, with loop-carried values and scan outputs.
//!
//! Inference iterates the body's types to a fixed point, because a carried value may change its
//! shape from one iteration to the next.

use super::V;
use super::merge::{outside, widen};
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::{Graph, SymShape, ValueId, ValueType};
use crate::ops;
use crate::spec::{AttrKind, Flow, Grad, InferCx, OP, OpSpec, TripCount, attr, many_mixed, opt, var};
use crate::{Result, ensure, error};

static LOOP: OpSpec = OpSpec {
    name: "Loop",
    grad: Grad::Rule(super::gradients::of_loop),
    since: 25,
    inputs: &[opt("M", "I"), opt("cond", "B"), many_mixed("v_initial", "V", 0)],
    outputs: &[many_mixed("v_final_and_scan_outputs", "V", 1)],
    types: &[V, var("I", TypeSet::of(&[DType::I64])), var("B", TypeSet::of(&[DType::Bool]))],
    attrs: &[attr::required("body", AttrKind::Graph)],
    infer,
    flow: Some(Flow {
        controls: 2,
        counters: 2,
        conditions: 1,
        carried: |_, inputs| inputs,
        rounds: TripCount::Counted,
        in_front: |_| true,
        to_front: |_, node| Ok(vec![node]),
    }),
    ..OP
};

ops![LOOP];

/// The pass limit for the fixed point of the carried types. Each pass that changes them widens at
/// least one size.
const MAX_PASSES: usize = 64;

/// Infers a body to the fixed point of its loop-carried types. `fixed` are the types of the inputs
/// before the carried ones, `inputs` of those after; the first `skipped_outputs` outputs are not
/// carried. Returns the types of all outputs.
pub(super) fn settle(
    cx: &mut InferCx<'_>,
    body: usize,
    fixed: &[ValueType],
    carried: &mut [ValueType],
    (inputs, skipped_outputs): (&[ValueType], usize),
) -> Result<Vec<ValueType>> {
    for _ in 0..MAX_PASSES {
        let given: Vec<ValueType> = fixed.iter().chain(carried.iter()).chain(inputs).cloned().collect();
        let formal = cx.subgraph(body).map_or(0, |body| body.graph.inputs.len());
        ensure!(
            formal == given.len(),
            InvalidGraph,
            "the body has {formal} inputs, expected {}",
            given.len()
        );
        let outputs = cx.infer_subgraph(body, &given)?;
        ensure!(
            outputs.len() >= skipped_outputs + carried.len(),
            InvalidGraph,
            "the body has {} outputs, fewer than its loop-carried values",
            outputs.len()
        );
        let mut changed = false;
        for (before, after) in carried.iter_mut().zip(outputs.iter().skip(skipped_outputs)) {
            let wider = widen(before, after)?;
            changed |= wider != *before;
            *before = wider;
        }
        if !changed {
            return Ok(outputs);
        }
    }
    Err(error!(InvalidGraph, "the types of the loop-carried values do not converge"))
}

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let body = cx.find_subgraph("body").ok_or_else(|| error!(InvalidGraph, "'body' is missing"))?;
    let first: Vec<ValueType> =
        (2..cx.input_count()).map(|index| cx.input_type(index).cloned().unwrap_or_default()).collect();
    let mut carried = first.clone();
    let fixed = [counter_type(cx, body, 0, DType::I64), counter_type(cx, body, 1, DType::Bool)];
    let outputs = settle(cx, body, &fixed, &mut carried, (&[], 1))?;
    let count = carried.len();
    ensure!(
        // The body returns the condition before the values, so it has one output more than the
        // node.
        outputs.len() > cx.output_count().max(count),
        InvalidGraph,
        "the body has {} outputs, too few for {} of the node",
        outputs.len(),
        cx.output_count()
    );
    for (index, (ty, after)) in carried.iter().zip(outputs.iter().skip(1)).enumerate() {
        // A body may take an optional and return the value that it holds. After an iteration the
        // value is then no longer optional.
        let ty = match (ty, after) {
            (ty, ValueType::Optional(_) | ValueType::Unknown) => ty,
            (ValueType::Optional(held), _) => held,
            (ty, _) => ty,
        };
        cx.set_type(index, outside(ty));
    }
    let trips = trips(cx, body);
    for index in count..cx.output_count() {
        let Some(output) = outputs.get(index + 1) else { continue };
        let Some(tensor) = output.as_tensor() else { continue };
        // A scan output stacks the values of all iterations along a new leading axis.
        let leading = trips.clone().unwrap_or_else(Dim::unknown);
        let shape = outside(output).shape().map(|shape| prepend(leading, shape));
        cx.set(index, tensor.dtype, shape);
    }
    Ok(())
}

fn prepend(leading: Dim, shape: &[Dim]) -> SymShape {
    std::iter::once(leading).chain(shape.iter().cloned()).collect()
}

/// Returns the type of the iteration number or the condition: a scalar, unless the body declares a
/// vector of size 1.
fn counter_type(cx: &InferCx<'_>, body: usize, position: usize, dtype: DType) -> ValueType {
    let declared = cx.subgraph(body).and_then(|body| {
        let input = body.graph.inputs.get(position)?;
        body.graph.value(*input).ty.shape().map(<[Dim]>::len)
    });
    let shape = if declared == Some(1) { vec![Dim::constant(1)] } else { Vec::new() };
    ValueType::tensor(dtype, Some(shape))
}

/// Returns the trip count, if the maximum is known and the condition never ends the loop early.
fn trips(cx: &InferCx<'_>, body: usize) -> Option<Dim> {
    let starts = match cx.has_input(1) {
        true => cx.ints(1).and_then(|condition| condition.first().copied()),
        false => Some(1),
    };
    // A condition that is false at the start means zero iterations, whatever the maximum.
    if starts == Some(0) {
        return Some(Dim::constant(0));
    }
    // Without `M` the condition alone ends the loop, so the trip count depends on data.
    let count = cx.dims(0)?.first().cloned()?;
    let graph = &cx.subgraph(body)?.graph;
    let condition = graph.outputs.first().copied()?;
    // The condition stays true if the body returns a constant true, or the condition that it was
    // given.
    let stays = is_true(graph, condition) || (starts.is_some() && is_input(graph, condition, 1));
    // A negative `M` means zero iterations.
    stays.then(|| count.max(&Dim::constant(0)))
}

fn is_true(graph: &Graph, value: ValueId) -> bool {
    let symbolic = graph.value(value).symbolic.as_ref().and_then(|symbolic| symbolic.as_ints());
    let constant = || graph.constants.get(&value).and_then(|tensor| tensor.view().to_ints().ok());
    symbolic.or_else(constant).is_some_and(|elements| elements.first().is_some_and(|&element| element != 0))
}

/// Returns whether a value is the input at `position`, forwarded through `Identity` nodes only.
fn is_input(graph: &Graph, mut value: ValueId, position: usize) -> bool {
    // Nodes are in topological order, so one pass from the back follows the whole chain.
    let input = graph.inputs.get(position).copied();
    for node in graph.nodes.iter().rev() {
        if node.spec.name == "Identity" && node.outputs.first() == Some(&Some(value)) {
            match node.inputs.first().copied().flatten() {
                Some(source) => value = source,
                None => return false,
            }
        }
    }
    input == Some(value)
}
