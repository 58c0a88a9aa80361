//! Reverse-mode automatic differentiation: replaces `Gradient` nodes by backward nodes.
//!
//! Reverse accumulation (Griewank & Walther, Evaluating Derivatives, chapter 3) visits the nodes
//! between the independent tensors and `y` last to first. Each adds its contribution to the
//! gradients of its inputs. If a `Gradient` node has other values as inputs than the tensors it
//! names, the part of the graph that depends on them is recomputed from those values. The rest of
//! the forward pass is reused.

use std::collections::HashMap;

use super::ancestors::{ancestors, nodes};
use super::composite::take_apart;
use crate::ir::{Graph, Node, NodeId, ValueId, ValueType};
use crate::spec::{BackwardPass, NodeEmitter, NotDifferentiable, infer_graph};
use crate::{Result, Within, ensure, error};

const DOMAIN: &str = "ai.onnx.preview.training";

/// Maximum number of `Gradient` nodes in a graph, and of nodes that it may grow to. Gradients of
/// gradients multiply, and a small file must not claim all memory.
const MOST_GRADIENTS: usize = 256;
const MOST_NODES: usize = 300_000;

/// Replaces the `Gradient` nodes of an inferred graph and its subgraphs by nodes of the standard
/// domain. The graph is sorted and inferred afterwards. If `y` has several elements, the gradient
/// is that of their sum.
///
/// Errors: a node names a tensor that is not in its graph; nodes on the path from the independent
/// tensors to `y` have no gradient. The error names all of those.
pub fn expand_gradients(graph: &mut Graph) -> Result<()> {
    if !holds_gradient(graph) {
        return Ok(());
    }
    expand(graph)?;
    infer_graph(graph)
}

fn is_gradient(node: &Node) -> bool {
    node.spec.name == "Gradient" && node.spec.domain == DOMAIN
}

/// Whether the graph or one of its subgraphs contains a `Gradient` node.
pub(crate) fn holds_gradient(graph: &Graph) -> bool {
    let subgraphs = |node: &Node| node.subgraphs.iter().any(|subgraph| holds_gradient(&subgraph.graph));
    graph.nodes.iter().any(|node| is_gradient(node) || subgraphs(node))
}

fn expand(graph: &mut Graph) -> Result<()> {
    for node in graph.nodes.iter_mut().filter(|node| !node.subgraphs.is_empty()) {
        let place = node.place();
        for subgraph in &mut node.subgraphs {
            expand(&mut subgraph.graph).within(|| place.clone())?;
        }
    }
    let count = graph.nodes.iter().filter(|node| is_gradient(node)).count();
    ensure!(
        count <= MOST_GRADIENTS,
        NotImplemented,
        "{count} Gradient nodes, at most {MOST_GRADIENTS} are expanded"
    );
    // A node whose `y` depends on another `Gradient` waits until that one is expanded.
    while let Some(place) = graph.nodes.iter().find(|node| is_gradient(node)).map(Node::place) {
        let mut ready = None;
        for (index, node) in graph.nodes.iter().enumerate().filter(|(_, node)| is_gradient(node)) {
            let request = Request::of(graph, node).within(|| node.place())?;
            let is_open = |id: &NodeId| graph.nodes.get(id.index()).is_some_and(is_gradient);
            if !request.forward.iter().any(is_open) {
                ready = Some((index, node.clone(), request));
                break;
            }
        }
        let (index, node, request) = ready.ok_or_else(|| {
            error!(InvalidGraph, "it is part of the gradient that it asks for").within(place)
        })?;
        // Decomposition renumbers nodes, so the request is stale: start over.
        if take_apart(graph, request.y, &request.independent).within(|| node.place())? {
            continue;
        }
        differentiate(graph, &node, &request).within(|| node.place())?;
        // The nodes that `differentiate` added write its outputs now.
        graph.nodes.remove(index);
        let size = graph.nodes.len();
        ensure!(
            size <= MOST_NODES,
            NotImplemented,
            "gradients make {size} nodes, at most {MOST_NODES} are allowed"
        );
        graph.sort()?;
    }
    Ok(())
}

/// A resolved `Gradient` node: its tensor names as values of the graph.
struct Request {
    /// The independent tensors: `xs`, by which to differentiate, then `zs`.
    independent: Vec<ValueId>,
    /// The number of `xs`.
    count: usize,
    y: ValueId,
    /// The nodes that compute `y` from the independent tensors, in order.
    forward: Vec<NodeId>,
}

impl Request {
    fn of(graph: &Graph, node: &Node) -> Result<Request> {
        let find = |name: &str| {
            graph.find_value(name).ok_or_else(|| error!(InvalidGraph, "the graph has no tensor '{name}'"))
        };
        let xs = node.attrs.strings("xs")?;
        let names = xs.iter().chain(node.attrs.find_strings("zs").unwrap_or_default());
        let independent = names.map(|name| find(name)).collect::<Result<Vec<ValueId>>>()?;
        ensure!(
            node.inputs.len() == independent.len(),
            InvalidGraph,
            "{} inputs for {} tensors in xs and zs",
            node.inputs.len(),
            independent.len()
        );
        let y = find(node.attrs.string("y")?)?;
        let forward = ancestors(graph, y, &independent);
        Ok(Request { independent, count: xs.len(), y, forward })
    }
}

/// Adds the nodes that compute the gradient of the sum of `y` with respect to each of `xs`, and
/// returns their results; `None` if `y` does not depend on a tensor. The graph must be inferred and
/// stays so. The nodes come last, in topological order.
///
/// ```no_run
/// use ort_core::dtype::DType;
/// use ort_core::ir::GraphBuilder;
/// use ort_core::pass::add_backward;
///
/// let mut builder = GraphBuilder::new("square");
/// let x = builder.input("x", DType::F32, &["n"]);
/// let y = builder.node("Mul", &[x, x], &[])?;
/// let mut graph = builder.finish(&[y])?;
/// let gradients = add_backward(&mut graph, y, &[x])?;
/// graph.outputs.extend(gradients.into_iter().flatten());
/// # Ok::<(), ort_core::Error>(())
/// ```
///
/// Composite nodes on the path are replaced by their parts. After an error the graph is unusable.
///
/// Errors: nodes on the path from `xs` to `y` have no gradient. The error names them all;
/// `blocking_nodes` lists them.
pub fn add_backward(graph: &mut Graph, y: ValueId, xs: &[ValueId]) -> Result<Vec<Option<ValueId>>> {
    let mut refusals = Vec::new();
    let gradients = backward(graph, y, xs, &mut refusals)?;
    NotDifferentiable::refuse(&refusals)?;
    Ok(gradients)
}

/// Like [`add_backward`], but lists the nodes without a gradient in `refusals`.
pub(super) fn backward(
    graph: &mut Graph,
    y: ValueId,
    xs: &[ValueId],
    refusals: &mut Vec<NotDifferentiable>,
) -> Result<Vec<Option<ValueId>>> {
    take_apart(graph, y, xs)?;
    let forward = nodes(graph, &ancestors(graph, y, xs));
    let totals = accumulate(graph, BackwardPass { forward: &forward, xs, boundary: xs }, y, refusals)?;
    Ok(xs.iter().map(|x| totals.get(x).copied()).collect())
}

/// Adds the backward nodes of one `Gradient` node and writes its outputs.
fn differentiate(graph: &mut Graph, gradient: &Node, request: &Request) -> Result<()> {
    let given: Vec<ValueId> = gradient.inputs.iter().flatten().copied().collect();
    // An omitted input would shift the pairs of tensors and given values.
    ensure!(given.len() == request.independent.len(), InvalidGraph, "an input is left out");
    let Pass { forward, point, y } = forward_at(graph, gradient, request, &given)?;
    let xs = point.get(..request.count).unwrap_or(&point);
    let mut refusals = Vec::new();
    let pass = BackwardPass { forward: &forward, xs, boundary: &point };
    let totals = accumulate(graph, pass, y, &mut refusals)?;
    NotDifferentiable::refuse(&refusals)?;
    deliver(graph, gradient, xs, &totals)
}

/// Adds the backward nodes of a forward pass. Returns the gradient of the sum of `y` for each value
/// that has one.
fn accumulate(
    graph: &mut Graph,
    pass: BackwardPass<'_>,
    y: ValueId,
    refusals: &mut Vec<NotDifferentiable>,
) -> Result<HashMap<ValueId, ValueId>> {
    if !pass.varying(graph).contains(&y) {
        return Ok(HashMap::new());
    }
    // A seed of ones yields the gradient of the sum.
    let name = graph.value(y).name.clone();
    let one = NodeEmitter { graph: &mut *graph, name }.filled(1.0, y)?;
    pass.accumulate(graph, &[(y, one)], refusals)
}

/// A forward pass at one point: the nodes that compute `y` from the values there.
struct Pass {
    forward: Vec<(NodeId, Node)>,
    point: Vec<ValueId>,
    y: ValueId,
}

/// Returns the forward pass from the given values. Nodes that depend on a value given in place of
/// another tensor are duplicated; the others are those of the graph.
fn forward_at(graph: &mut Graph, gradient: &Node, request: &Request, given: &[ValueId]) -> Result<Pass> {
    let mut stands_for: HashMap<ValueId, ValueId> = HashMap::new();
    let mut point = Vec::with_capacity(given.len());
    for (&original, &given) in request.independent.iter().zip(given) {
        if original == given {
            point.push(given);
            continue;
        }
        // Each gets a value of its own, because one value may be given for two tensors, or be used
        // elsewhere in the graph.
        let mut emitter = NodeEmitter { graph: &mut *graph, name: gradient.name.clone() };
        let own = emitter.emit("Identity", &[given], &[])?;
        stands_for.insert(original, own);
        point.push(own);
    }
    let mut nodes = Vec::with_capacity(request.forward.len());
    for id in &request.forward {
        let Some(mut node) = graph.nodes.get(id.index()).cloned() else { continue };
        if !node.reads().any(|value| stands_for.contains_key(&value)) {
            nodes.push((*id, node));
            continue;
        }
        let now = |id: ValueId| stands_for.get(&id).copied().unwrap_or(id);
        node.inputs.iter_mut().flatten().for_each(|input| *input = now(*input));
        let captures = node.subgraphs.iter_mut().flat_map(|subgraph| &mut subgraph.captures);
        captures.for_each(|capture| capture.outer = now(capture.outer));
        // Names are unique in a graph, so a copy gets the name of its `Gradient` node in front.
        node.name = format!("{}/forward/{}", gradient.name, node.name).into();
        for output in node.outputs.iter_mut().flatten() {
            let name = format!("{}/forward/{}", gradient.name, graph.value(*output).name);
            let again = graph.add_value(name, ValueType::Unknown);
            // For an independent tensor the given value stands, even if a node here computes it.
            if !request.independent.contains(output) {
                stands_for.insert(*output, again);
            }
            *output = again;
        }
        NodeEmitter { graph: &mut *graph, name: gradient.name.clone() }.add(node.clone())?;
        nodes.push((NodeId((graph.nodes.len() - 1) as u32), node));
    }
    let y = stands_for.get(&request.y).copied().unwrap_or(request.y);
    Ok(Pass { forward: nodes, point, y })
}

/// Writes the outputs: the gradients, or zeros if `y` does not depend on a tensor.
fn deliver(
    graph: &mut Graph,
    gradient: &Node,
    xs: &[ValueId],
    totals: &HashMap<ValueId, ValueId>,
) -> Result<()> {
    ensure!(
        gradient.outputs.len() <= xs.len(),
        InvalidGraph,
        "{} outputs for {} tensors in xs",
        gradient.outputs.len(),
        xs.len()
    );
    let mut emitter = NodeEmitter { graph, name: gradient.name.clone() };
    for (&x, output) in xs.iter().zip(&gradient.outputs) {
        let Some(output) = *output else { continue };
        let total = match totals.get(&x) {
            Some(&total) => total,
            None => emitter.filled(0.0, x)?,
        };
        let same = emitter.emit("Identity", &[total], &[])?;
        // Make the `Identity` that was just added write the output itself.
        let last = emitter.graph.nodes.last_mut().and_then(|node| node.outputs.first_mut());
        if let Some(slot) = last.filter(|slot| **slot == Some(same)) {
            *slot = Some(output);
        }
        let ty = emitter.graph.value(same).ty.clone();
        emitter.graph.value_mut(output).ty = ty;
    }
    Ok(())
}
