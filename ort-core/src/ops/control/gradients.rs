//! Reverse-mode gradients of `If`, `Loop` and `Scan`.
//!
//! The backward pass is control flow itself: its bodies recompute the forward body and
//! differentiate it. A forward loop stores its loop-carried values at the start of each iteration
//! as additional scan outputs. The backward pass is a `Scan` over them from the last iteration to
//! the first. It carries the gradients of the carried values and accumulates those of captured
//! values.

use std::collections::HashMap;

use crate::dim::Dim;
use crate::ir::{Attribute, Attributes, Capture, Graph, Node, NodeId, Subgraph, ValueId, ValueType};
use crate::spec::{BackwardPass, GradCx, NodeEmitter, NotDifferentiable, is_continuous, prune};
use crate::tensor::Tensor;
use crate::{Result, Within, ensure, error};

/// Collects the nodes of a graph for a [`BackwardPass`].
fn forward(graph: &Graph) -> Vec<(NodeId, Node)> {
    graph.nodes.iter().enumerate().map(|(index, node)| (NodeId(index as u32), node.clone())).collect()
}

/// Differentiates a body: appends the nodes that compute the gradients of `xs` from `seeds`, pairs
/// of a value and its gradient. A node without a gradient is an error.
fn differentiate(
    body: &mut Graph,
    xs: &[ValueId],
    boundary: &[ValueId],
    seeds: &[(ValueId, ValueId)],
) -> Result<HashMap<ValueId, ValueId>> {
    let forward = forward(body);
    let mut obstacles = Vec::new();
    let totals = BackwardPass { forward: &forward, xs, boundary }.accumulate(body, seeds, &mut obstacles)?;
    NotDifferentiable::refuse(&obstacles)?;
    Ok(totals)
}

/// The layout of a loop's node and body.
struct Flow {
    /// The index of the first carried value in the inputs of the node and of the body.
    first_input: usize,
    /// The index of the first carried value in the outputs of the body.
    first_output: usize,
    /// The number of loop-carried values.
    states: usize,
    /// The axis and direction of each scanned input; a direction is 0 for forward or 1 for reverse.
    inputs: Vec<(i64, i64)>,
    /// The axis and direction of each scan output.
    outputs: Vec<(i64, i64)>,
}

/// The gradient of `Scan`.
pub(super) fn of_scan(cx: &mut GradCx<'_>) -> Result<()> {
    let attrs = cx.attrs();
    let scanned = usize::try_from(attrs.int("num_scan_inputs")?).unwrap_or(0);
    let states = cx.input_count().checked_sub(scanned);
    let states =
        states.ok_or_else(|| error!(InvalidGraph, "num_scan_inputs does not match the number of inputs"))?;
    let pairs = |count: usize, axes: &str, directions: &str| {
        let at = |name: &str, index: usize| {
            attrs.find_ints(name).and_then(|list| list.get(index)).copied().unwrap_or(0)
        };
        // Any direction other than 0 is backwards, and counts as 1 here.
        (0..count).map(|index| (at(axes, index), i64::from(at(directions, index) != 0))).collect()
    };
    let outputs = body_of(cx)?.graph.outputs.len().saturating_sub(states);
    let flow = Flow {
        first_input: 0,
        first_output: 0,
        states,
        inputs: pairs(scanned, "scan_input_axes", "scan_input_directions"),
        outputs: pairs(outputs, "scan_output_axes", "scan_output_directions"),
    };
    of_iterations(cx, &flow)
}

/// The gradient of `Loop`, whose scan outputs always stack along axis 0, in order.
pub(super) fn of_loop(cx: &mut GradCx<'_>) -> Result<()> {
    let states = cx.input_count().saturating_sub(2);
    let outputs = body_of(cx)?.graph.outputs.len().saturating_sub(1 + states);
    let flow =
        Flow { first_input: 2, first_output: 1, states, inputs: Vec::new(), outputs: vec![(0, 0); outputs] };
    of_iterations(cx, &flow)
}

fn body_of<'a>(cx: &GradCx<'a>) -> Result<&'a Subgraph> {
    let body = cx.node.subgraph("body").map(|(_, body)| body);
    body.ok_or_else(|| error!(InvalidGraph, "'body' is missing"))
}

/// The backward body under construction: the nodes of the forward body, then those of its gradient.
struct Backward {
    graph: Graph,
    captures: Vec<Capture>,
    /// Loop-carried values in the body, with their initial values outside.
    states: Vec<(ValueId, ValueId)>,
    /// Scanned values in the body, the outer tensors that they slice, and axis and direction.
    scanned: Vec<(ValueId, ValueId, (i64, i64))>,
}

impl Backward {
    /// Adds a body input with the type of `like`.
    fn input(&mut self, name: &str, like: ValueId) -> ValueId {
        let ty = self.graph.value(like).ty.clone();
        let name = format!("{name}_{}", self.graph.value_count());
        self.graph.add_value(name, ty)
    }

    /// Makes `inner` the slices of `outer`, in the reverse of the forward direction.
    fn scan(&mut self, inner: ValueId, outer: ValueId, (axis, direction): (i64, i64)) {
        // The standard encodes a direction as 0 for forward and 1 for reverse.
        self.scanned.push((inner, outer, (axis, 1 - direction)));
    }
}

/// Builds the gradient of a loop. The backward body returns the gradients of the varying states, of
/// the captures, and of the wanted scanned inputs, in this order.
fn of_iterations(cx: &mut GradCx<'_>, flow: &Flow) -> Result<()> {
    // The backward body starts as a copy of the forward body, which it recomputes.
    let body = body_of(cx)?;
    let graph = body.graph.clone();
    let mut back =
        Backward { graph, captures: body.captures.clone(), states: Vec::new(), scanned: Vec::new() };
    let inputs = back.graph.inputs.clone();
    let carried = slice(&inputs, flow.first_input, flow.states)?;
    let scanned = slice(&inputs, flow.first_input + flow.states, flow.inputs.len())?;
    let varying = varying_states(cx, flow, &back)?;
    let wanted: Vec<usize> =
        (0..scanned.len()).filter(|&index| cx.wants(flow.first_input + flow.states + index)).collect();
    let captures: Vec<Capture> =
        back.captures.iter().copied().filter(|it| cx.wants_captured(it.outer)).collect();

    let seeds = seeds(cx, flow, &mut back, &varying)?;
    // Every iteration reads the captured values, so their gradients accumulate in carried sums.
    let mut sums = Vec::with_capacity(captures.len());
    for capture in &captures {
        let sum = back.input("sum", capture.inner);
        // The gradient of a capture has the shape of the capture, in every iteration.
        let zeros = cx.filled(0.0, capture.outer)?;
        back.states.push((sum, zeros));
        sums.push(sum);
    }
    // The order of `xs` is that of the backward body's outputs.
    let xs: Vec<ValueId> = varying
        .iter()
        .filter_map(|&state| carried.get(state).copied())
        .chain(captures.iter().map(|capture| capture.inner))
        .chain(wanted.iter().filter_map(|&index| scanned.get(index).copied()))
        .collect();
    let boundary: Vec<ValueId> =
        inputs.iter().copied().chain(back.captures.iter().map(|it| it.inner)).collect();
    let name = cx.node.name.clone();
    let totals = differentiate(&mut back.graph, &xs, &boundary, &seeds).within(|| "body")?;
    let mut pen = NodeEmitter { graph: &mut back.graph, name };
    let mut results = Vec::with_capacity(xs.len());
    for (index, x) in xs.iter().enumerate() {
        let total = totals.get(x).copied();
        // Only the captures, which follow the states in `xs`, have a carried sum.
        let sum = index.checked_sub(varying.len()).and_then(|index| sums.get(index)).copied();
        // `Identity` makes each result a value of its own, because two of them may be the same
        // gradient or an input of the body.
        results.push(match (sum, total) {
            (Some(sum), Some(total)) => pen.emit("Add", &[sum, total], &[])?,
            (Some(same), None) | (None, Some(same)) => pen.emit("Identity", &[same], &[])?,
            (None, None) => pen.filled(0.0, *x)?,
        });
    }
    back.graph.outputs = results.clone();
    // Of the recomputed forward body, only the nodes that the gradients read remain.
    prune(&mut back.graph, 0, results);
    keep_what_is_read(cx, flow, &mut back, (carried, scanned))?;
    let directions: Vec<(i64, i64)> = wanted
        .iter()
        .filter_map(|&index| flow.inputs.get(index))
        .map(|&(axis, direction)| (axis, 1 - direction))
        .collect();
    let gradients = emit_scan(cx, back, &directions)?;
    hand_over(cx, flow, gradients, (&varying, &captures, &wanted));
    Ok(())
}

/// Assigns the outputs of the backward loop: the gradients of initial values, of captured values,
/// and of scanned inputs.
fn hand_over(
    cx: &mut GradCx<'_>,
    flow: &Flow,
    gradients: Vec<ValueId>,
    (varying, captures, wanted): (&[usize], &[Capture], &[usize]),
) {
    let mut gradients = gradients.into_iter();
    for (state, gradient) in varying.iter().zip(gradients.by_ref()) {
        // A state may vary through captures or other states alone, and its initial value then wants
        // no gradient.
        if cx.wants(flow.first_input + state) {
            cx.set(flow.first_input + state, gradient);
        }
    }
    for (capture, gradient) in captures.iter().zip(gradients.by_ref()) {
        cx.add_captured(capture.outer, gradient);
    }
    for (index, gradient) in wanted.iter().zip(gradients) {
        cx.set(flow.first_input + flow.states + index, gradient);
    }
}

fn slice(values: &[ValueId], start: usize, count: usize) -> Result<&[ValueId]> {
    let found = values.get(start..start + count);
    found.ok_or_else(|| error!(InvalidGraph, "the body has {} inputs, fewer than it is given", values.len()))
}

/// Finds the carried values that depend on a value to differentiate by, in any iteration.
fn varying_states(cx: &GradCx<'_>, flow: &Flow, back: &Backward) -> Result<Vec<usize>> {
    let graph = &back.graph;
    let captured = back.captures.iter().filter(|it| cx.wants_captured(it.outer)).map(|it| it.inner);
    let mut xs: Vec<ValueId> = captured.collect();
    let wanted = (flow.first_input..cx.input_count()).filter(|&index| cx.wants(index));
    xs.extend(wanted.filter_map(|index| graph.inputs.get(index)));
    let forward = forward(graph);
    // A carried value may become varying only through another one, an iteration later, so we
    // iterate to a fixed point.
    loop {
        let varying = BackwardPass { forward: &forward, xs: &xs, boundary: &xs }.varying(graph);
        let pairs = graph.inputs.iter().skip(flow.first_input).take(flow.states);
        let pairs = pairs.zip(graph.outputs.iter().skip(flow.first_output));
        let more: Vec<ValueId> = pairs
            .filter(|(input, output)| {
                varying.contains(output) && !xs.contains(input) && is_continuous(graph, **input)
            })
            .map(|(input, _)| *input)
            .collect();
        if more.is_empty() {
            break;
        }
        xs.extend(more);
    }
    let varies =
        |&state: &usize| graph.inputs.get(flow.first_input + state).is_some_and(|input| xs.contains(input));
    let states: Vec<usize> = (0..flow.states).filter(varies).collect();
    for &state in &states {
        let input = slice(&graph.inputs, flow.first_input + state, 1)?;
        let is_tensor = input.iter().all(|input| graph.value(*input).ty.as_tensor().is_some());
        ensure!(is_tensor, NotImplemented, "a loop-carried value of {} is not a tensor", cx.operator());
    }
    Ok(states)
}

/// Seeds the gradients of the body's outputs. Those of carried values come from the following
/// iteration; those of scan outputs are scanned from the upstream gradient.
fn seeds(
    cx: &mut GradCx<'_>,
    flow: &Flow,
    back: &mut Backward,
    varying: &[usize],
) -> Result<Vec<(ValueId, ValueId)>> {
    let outputs = back.graph.outputs.clone();
    let mut seeds = Vec::new();
    for &state in varying {
        let output = outputs.get(flow.first_output + state).copied();
        let output = output.ok_or_else(|| error!(InvalidGraph, "the body has too few outputs"))?;
        let inner = back.input("carried", output);
        // The backward scan starts at the last iteration, whose gradient is that of the node's
        // output.
        let first = match cx.find_upstream(state) {
            Some(upstream) => upstream,
            None => {
                let like = like_final(cx, flow, back, state)?;
                cx.filled(0.0, like)?
            }
        };
        back.states.push((inner, first));
        seeds.push((output, inner));
    }
    for (index, &place) in flow.outputs.iter().enumerate() {
        let Some(upstream) = cx.find_upstream(flow.states + index) else { continue };
        let output = outputs.get(flow.first_output + flow.states + index).copied();
        let output = output.ok_or_else(|| error!(InvalidGraph, "the body has too few outputs"))?;
        let inner = back.input("upstream", output);
        back.scan(inner, upstream, place);
        seeds.push((output, inner));
    }
    Ok(seeds)
}

/// Returns a value outside with the shape that a carried value has after the last iteration.
fn like_final(cx: &mut GradCx<'_>, flow: &Flow, back: &Backward, state: usize) -> Result<ValueId> {
    let inner = back.graph.inputs.get(flow.first_input + state).copied();
    let shape = inner.and_then(|inner| back.graph.value(inner).ty.shape());
    // Inference widens what changes from one iteration to the next, so a known shape is that of all
    // of them. The initial value serves then, and the forward loop needs no further output.
    match shape.is_some_and(|shape| !shape.iter().any(Dim::has_unknown)) {
        true => cx.input(flow.first_input + state),
        false => cx.demand_output(state),
    }
}

/// Provides what the backward body reads of the forward one: it scans the scanned inputs again, and
/// the carried values that the forward loop stores.
fn keep_what_is_read(
    cx: &mut GradCx<'_>,
    flow: &Flow,
    back: &mut Backward,
    (carried, scanned): (&[ValueId], &[ValueId]),
) -> Result<()> {
    let reads: Vec<ValueId> = back.graph.nodes.iter().flat_map(Node::reads).collect();
    let is_read = |value: &ValueId| reads.contains(value);
    for (index, inner) in scanned.iter().enumerate().filter(|(_, inner)| is_read(inner)) {
        let outer = cx.input(flow.first_input + flow.states + index)?;
        let place = flow.inputs.get(index).copied().unwrap_or_default();
        back.scan(*inner, outer, place);
    }
    for inner in carried.iter().filter(|inner| is_read(inner)) {
        let kept = keep(cx, *inner)?;
        back.scan(*inner, kept, (0, 0));
    }
    // A `Loop` body starts with the iteration number and the condition. The condition is true in
    // every iteration that runs, so it becomes a constant.
    let [counter, condition] = body_of(cx)?.graph.inputs.get(..flow.first_input).unwrap_or_default() else {
        ensure!(!back.scanned.is_empty(), Fail, "Scan has no scan inputs");
        back.captures.retain(|capture| reads.contains(&capture.inner));
        return Ok(());
    };
    if is_read(condition) {
        let rank = back.graph.value(*condition).ty.shape().map_or(0, <[Dim]>::len);
        back.graph.constants.insert(*condition, Tensor::from_slice(vec![1; rank].as_slice(), &[true])?);
    }
    // The stored iteration numbers also give the backward scan its trip count, if it scans nothing
    // else.
    if is_read(counter) || back.scanned.is_empty() {
        let kept = keep(cx, *counter)?;
        back.scan(*counter, kept, (0, 0));
    }
    // Pruning removed readers, and a capture without one would keep its outer value alive.
    back.captures.retain(|capture| reads.contains(&capture.inner));
    Ok(())
}

/// Makes the forward loop output an input of its body for every iteration, as an additional scan
/// output.
fn keep(cx: &mut GradCx<'_>, inner: ValueId) -> Result<ValueId> {
    let is_tensor = body_of(cx)?.graph.value(inner).ty.as_tensor().is_some();
    ensure!(is_tensor, NotImplemented, "a loop-carried value of {} is not a tensor", cx.operator());
    let name = format!("{}/gradient/kept_{}", cx.node.name, cx.pen.graph.value_count());
    let kept = cx.pen.graph.add_value(name, ValueType::Unknown);
    let gone = || error!(Fail, "a node of the forward pass is gone");
    let node = cx.pen.graph.nodes.get_mut(cx.id.index()).ok_or_else(gone)?;
    // The condition is the first output of a `Loop` body and no output of the node.
    let carried_first = usize::from(node.spec.name == "Loop");
    let body = node.subgraphs.iter_mut().find(|subgraph| subgraph.attr == "body").ok_or_else(gone)?;
    // The node may leave out trailing outputs, and the new one must come after all the body's
    // outputs.
    while node.outputs.len() + carried_first < body.graph.outputs.len() {
        node.outputs.push(None);
    }
    let mut pen = NodeEmitter { graph: &mut body.graph, name: format!("{}/kept", node.name).into() };
    let same = pen.emit("Identity", &[inner], &[])?;
    body.graph.outputs.push(same);
    node.outputs.push(Some(kept));
    let mut attrs: Vec<(String, Attribute)> =
        node.attrs.iter().map(|(name, value)| (name.to_string(), value.clone())).collect();
    for (name, value) in &mut attrs {
        // The new output is stacked along axis 0, forward, which the attribute lists encode as 0.
        if let (true, Attribute::Ints(list)) = (name.starts_with("scan_output_"), value) {
            list.push(0);
        }
    }
    node.attrs = Attributes::new(node.spec, attrs)?;
    let id = cx.id;
    cx.infer_again(id)?;
    Ok(kept)
}

/// Emits the backward `Scan`; returns its outputs.
fn emit_scan(cx: &mut GradCx<'_>, back: Backward, outputs: &[(i64, i64)]) -> Result<Vec<ValueId>> {
    let Backward { mut graph, captures, states, scanned } = back;
    graph.inputs =
        states.iter().map(|(inner, _)| *inner).chain(scanned.iter().map(|(inner, ..)| *inner)).collect();
    // The defaults belong to the inputs of the forward body.
    graph.input_defaults.clear();
    let outer: Vec<Option<ValueId>> = states
        .iter()
        .map(|(_, outer)| Some(*outer))
        .chain(scanned.iter().map(|(_, outer, _)| Some(*outer)))
        .collect();
    let axes = |places: &[(i64, i64)]| Attribute::Ints(places.iter().map(|place| place.0).collect());
    let directions = |places: &[(i64, i64)]| Attribute::Ints(places.iter().map(|place| place.1).collect());
    let inputs: Vec<(i64, i64)> = scanned.iter().map(|(.., place)| *place).collect();
    let attrs = [
        ("num_scan_inputs", Attribute::Int(scanned.len() as i64)),
        ("scan_input_axes", axes(&inputs)),
        ("scan_input_directions", directions(&inputs)),
        ("scan_output_axes", axes(outputs)),
        ("scan_output_directions", directions(outputs)),
    ];
    let count = graph.outputs.len();
    let subgraph = Subgraph { attr: "body", graph, captures };
    cx.pen.emit_flow(("Scan", &outer), &attrs, count, vec![subgraph])
}

/// The gradient of `If`: the branch that was taken, recomputed and differentiated. A branch that
/// does not read a value returns zeros for its gradient.
pub(super) fn of_if(cx: &mut GradCx<'_>) -> Result<()> {
    let mut wanted: Vec<ValueId> = Vec::new();
    for capture in cx.node.subgraphs.iter().flat_map(|branch| &branch.captures) {
        if cx.wants_captured(capture.outer) && !wanted.contains(&capture.outer) {
            wanted.push(capture.outer);
        }
    }
    let node = cx.node;
    let branches = node.subgraphs.iter().map(|branch| backward_branch(cx, branch, &wanted));
    let branches = branches.collect::<Result<Vec<Subgraph>>>()?;
    let gradients = cx.pen.emit_flow(("If", &[Some(cx.input(0)?)]), &[], wanted.len(), branches)?;
    for (outer, gradient) in wanted.into_iter().zip(gradients) {
        cx.add_captured(outer, gradient);
    }
    Ok(())
}

/// Builds the backward graph of one branch, with one output for each wanted value.
fn backward_branch(cx: &GradCx<'_>, branch: &Subgraph, wanted: &[ValueId]) -> Result<Subgraph> {
    let name = format!("{}/{}", cx.node.name, branch.attr);
    // An inconsistent branch is never taken, so an empty graph that returns zeros will do.
    let (mut graph, mut captures) = match &branch.graph.broken {
        None => (branch.graph.clone(), branch.captures.clone()),
        Some(_) => (Graph::new(branch.graph.name.clone()), Vec::new()),
    };
    let capture = |graph: &mut Graph, outer: ValueId, captures: &mut Vec<Capture>| {
        let known = captures.iter().find(|capture| capture.outer == outer).map(|capture| capture.inner);
        known.unwrap_or_else(|| {
            let value = cx.pen.graph.value(outer);
            let inner = graph.add_value(format!("{name}/{}", value.name), value.ty.clone());
            captures.push(Capture { outer, inner });
            inner
        })
    };
    let mut seeds = Vec::new();
    for (index, output) in graph.outputs.clone().into_iter().enumerate() {
        if let Some(upstream) = cx.find_upstream(index) {
            seeds.push((output, capture(&mut graph, upstream, &mut captures)));
        }
    }
    // A branch may capture one outer value several times, as for a weight and its alias, so the
    // gradients of all the captures are summed.
    let mut places: Vec<Vec<ValueId>> = Vec::with_capacity(wanted.len());
    for &outer in wanted {
        capture(&mut graph, outer, &mut captures);
        places.push(captures.iter().filter(|it| it.outer == outer).map(|it| it.inner).collect());
    }
    let xs = places.concat();
    let boundary: Vec<ValueId> = captures.iter().map(|capture| capture.inner).collect();
    let totals = differentiate(&mut graph, &xs, &boundary, &seeds).within(|| branch.attr)?;
    let mut pen = NodeEmitter { graph: &mut graph, name: name.as_str().into() };
    let mut outputs = Vec::with_capacity(places.len());
    for places in &places {
        let mut sum = None;
        for &total in places.iter().filter_map(|x| totals.get(x)) {
            sum = Some(match sum {
                Some(sum) => pen.emit("Add", &[sum, total], &[])?,
                None => total,
            });
        }
        outputs.push(match (sum, places.first()) {
            (Some(sum), _) => pen.emit("Identity", &[sum], &[])?,
            (None, Some(&x)) => pen.filled(0.0, x)?,
            (None, None) => return Err(error!(Fail, "a value that a branch captures is not in it")),
        });
    }
    graph.outputs.clone_from(&outputs);
    prune(&mut graph, 0, outputs);
    let reads: Vec<ValueId> = graph.nodes.iter().flat_map(Node::reads).collect();
    captures.retain(|capture| reads.contains(&capture.inner));
    Ok(Subgraph { attr: branch.attr, graph, captures })
}
