//! Which device runs which node.

use std::sync::Arc;

use super::bodies::Flowing;
use super::regions::settle;
use super::{Claim, Device, Reason, Scope, guard};
use crate::dim::Dim;
use crate::dtype::DType;
use crate::ir::{Attributes, Graph, Node, NodeId, SymShape, ValueId, ValueType};
use crate::spec::{Draft, bind_types, infer_graph};
use crate::tensor::Tensor;
use crate::{Error, Result, Within, error};

/// A node of an inferred graph, as providers see it.
#[derive(Clone, Copy, Debug)]
pub struct NodeView<'a> {
    /// The graph it is in.
    pub graph: &'a Graph,
    /// The node.
    pub node: &'a Node,
}

impl<'a> NodeView<'a> {
    /// The attributes.
    pub fn attrs(&self) -> &'a Attributes {
        &self.node.attrs
    }

    /// The value given as an input.
    pub fn input(&self, index: usize) -> Option<ValueId> {
        self.node.inputs.get(index).copied().flatten()
    }

    /// The type of an input; unknown where it is left out.
    pub fn input_type(&self, index: usize) -> ValueType {
        self.input(index).map_or(ValueType::Unknown, |id| self.graph.value(id).ty.clone())
    }

    /// The type of an output; unknown where nobody wants it.
    pub fn output_type(&self, index: usize) -> ValueType {
        self.output(index).map_or(ValueType::Unknown, |id| self.graph.value(id).ty.clone())
    }

    fn output(&self, index: usize) -> Option<ValueId> {
        self.node.outputs.get(index).copied().flatten()
    }

    /// The element type of an input.
    pub fn dtype(&self, index: usize) -> Option<DType> {
        self.input(index).and_then(|id| self.graph.value(id).ty.dtype())
    }

    /// The element type of an output.
    pub fn output_dtype(&self, index: usize) -> Option<DType> {
        self.output(index).and_then(|id| self.graph.value(id).ty.dtype())
    }

    /// The symbolic shape of an input, where its rank is known.
    pub fn shape(&self, index: usize) -> Option<SymShape> {
        self.input(index).and_then(|id| self.graph.value(id).ty.shape().map(<[Dim]>::to_vec))
    }

    /// The shape of an input, where every size is a number.
    pub fn fixed_shape(&self, index: usize) -> Option<Vec<usize>> {
        let sizes = self.shape(index)?;
        sizes.iter().map(|size| size.as_constant().and_then(|s| usize::try_from(s).ok())).collect()
    }

    /// The rank of an input, where it is known.
    pub fn rank(&self, index: usize) -> Option<usize> {
        self.input(index).and_then(|id| self.graph.value(id).ty.shape().map(<[Dim]>::len))
    }

    /// The constant that an input is, where it is one.
    pub fn constant(&self, index: usize) -> Option<&'a Tensor> {
        self.input(index).and_then(|id| self.graph.constants.get(&id))
    }

    /// The element type that a type variable (or a fixed type) of the operator has at this node.
    pub fn bound_dtype(&self, var: &str) -> Option<DType> {
        static UNKNOWN: ValueType = ValueType::Unknown;
        let type_of = |index| self.input(index).map_or(&UNKNOWN, |id| &self.graph.value(id).ty);
        let bound = bind_types(self.node.spec, self.node, type_of).ok()?;
        let from_inputs = bound.iter().find(|(name, _)| *name == var).and_then(|(_, ty)| ty.dtype());
        from_inputs.or_else(|| {
            let index = self.node.spec.outputs.iter().position(|param| param.ty == var)?;
            self.output_dtype(index)
        })
    }
}

/// Which device runs each node, and what it claimed.
#[derive(Clone, Debug, Default)]
pub struct Partition {
    /// By node: the index of the device, and its claim.
    pub nodes: Vec<(usize, Claim)>,
    /// By node: why it runs there.
    pub reasons: Vec<Reason>,
    /// By node: where the values of control flow are, and its bodies; none for other nodes.
    pub(crate) flows: Vec<Option<Arc<Flowing>>>,
}

/// Gives every node of an inferred graph to a device: the first that claims it, but for shapes, which the host computes, and for
/// islands that save less than copying their values costs. A node that no device claims is decomposed one step and its
/// parts are offered again; what is left after that is one error that lists every such operator. A shared graph is
/// copied only where something is decomposed.
pub fn partition(graph: &mut Arc<Graph>, devices: &[Arc<dyn Device>], scope: Scope) -> Result<Partition> {
    let claimed = claim_all(graph, devices)?;
    settle(graph, devices, scope, claimed)
}

/// The first claim for each node of a graph in which all that nobody claims is decomposed.
pub(super) fn claim_all(graph: &mut Arc<Graph>, devices: &[Arc<dyn Device>]) -> Result<Vec<(usize, Claim)>> {
    bring_slices_to_front(graph)?;
    let claims = lower_unclaimed(graph, devices);
    // A device that broke while it was asked has refused for no reason.
    devices.iter().try_for_each(|device| {
        guard::check(&**device).within(|| format!("provider {}", device.info().provider))
    })?;
    claims
}

/// Whether a node is arithmetic on shapes. It stays on the host: the host needs the numbers, and they are few.
pub(super) fn on_shapes(graph: &Graph, node: &Node) -> bool {
    node.outputs.iter().flatten().all(|&id| graph.value(id).symbolic.is_some())
}

fn first_claim(devices: &[Arc<dyn Device>], view: &NodeView<'_>) -> Result<(usize, Claim), String> {
    let mut reasons = Vec::new();
    for (index, device) in devices.iter().enumerate() {
        match guard::claim(&**device, view) {
            Ok(claim) => return Ok((index, claim)),
            Err(reason) => reasons.push(format!("{}: {reason}", device.info().provider)),
        }
    }
    Err(reasons.join("; "))
}

/// Decomposes what nobody claims until everything is claimed or nothing more can be decomposed; returns the claim for
/// each node.
fn lower_unclaimed(graph: &mut Arc<Graph>, devices: &[Arc<dyn Device>]) -> Result<Vec<(usize, Claim)>> {
    const MAX_STEPS: usize = 16;
    for _ in 0..MAX_STEPS {
        let (claims, refused) = claims(graph, devices);
        if refused.is_empty() {
            return Ok(claims);
        }
        let lowers = |id: &NodeId| graph.nodes.get(id.index()).is_some_and(|node| node.spec.lower.is_some());
        let stuck: Vec<(NodeId, String)> = refused.iter().filter(|(id, _)| !lowers(id)).cloned().collect();
        if !stuck.is_empty() {
            return Err(unsupported(graph, &stuck));
        }
        let ids: Vec<NodeId> = refused.into_iter().map(|(id, _)| id).collect();
        let graph = Arc::make_mut(graph);
        lower_nodes(graph, &ids)?;
        infer_graph(graph)?;
    }
    Err(error!(Fail, "decomposing operators does not come to an end"))
}

/// Decomposes the nodes that are not `kept`, those of subgraphs included, until none is left that can be decomposed.
pub(crate) fn lower_all_but(graph: &mut Graph, kept: fn(&Node) -> bool) -> Result<()> {
    for node in &mut graph.nodes {
        for subgraph in &mut node.subgraphs {
            lower_all_but(&mut subgraph.graph, kept)?;
        }
    }
    const MAX_STEPS: usize = 16;
    for _ in 0..MAX_STEPS {
        let nodes = graph.nodes.iter().enumerate();
        let others = nodes.filter(|(_, node)| node.spec.lower.is_some() && !kept(node));
        let ids: Vec<NodeId> = others.map(|(index, _)| NodeId(index as u32)).collect();
        if ids.is_empty() {
            break;
        }
        lower_nodes(graph, &ids)?;
        infer_graph(graph)?;
    }
    Ok(())
}

/// Has what control flow scans along other axes lie so that each slice is one piece, of which a device can take a part, and what is moved is in the
/// plan.
fn bring_slices_to_front(graph: &mut Arc<Graph>) -> Result<()> {
    let is_across = |node: &Node| node.spec.flow.is_some_and(|flow| !(flow.in_front)(&node.attrs));
    if !graph.nodes.iter().any(is_across) {
        return Ok(());
    }
    let graph = Arc::make_mut(graph);
    for node in std::mem::take(&mut graph.nodes) {
        match node.spec.flow.filter(|_| is_across(&node)) {
            Some(flow) => {
                let place = node.place();
                let nodes = (flow.to_front)(graph, node).within(|| place)?;
                graph.nodes.extend(nodes);
            }
            None => graph.nodes.push(node),
        }
    }
    infer_graph(graph)
}

/// Puts the parts of these nodes, which are in the order of the graph, in their place.
fn lower_nodes(graph: &mut Graph, ids: &[NodeId]) -> Result<()> {
    let nodes = std::mem::take(&mut graph.nodes);
    for (index, node) in nodes.into_iter().enumerate() {
        match node.spec.lower {
            Some(lower) if ids.binary_search(&NodeId(index as u32)).is_ok() => {
                let place = node.place();
                let mut draft = Draft::of_node(graph, node);
                let parts = lower(&mut draft).and_then(|()| draft.finish()).within(|| place)?;
                graph.nodes.extend(parts);
            }
            _ => graph.nodes.push(node),
        }
    }
    Ok(())
}

/// An operator that no device runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unclaimed {
    /// The operator, with its domain where that is not ONNX's own.
    pub operator: String,
    /// Why each provider refused it.
    pub reason: String,
    /// The number of nodes refused for this reason.
    pub count: usize,
    /// The first of those nodes, with its input types.
    pub first_node: String,
}

/// Every operator of an inferred graph and its subgraphs that no device runs, decompositions tried: each with its
/// count and first node.
pub fn unclaimed(graph: &Graph, devices: &[Arc<dyn Device>]) -> Result<Vec<Unclaimed>> {
    let mut graph = graph.clone();
    let mut found = Vec::new();
    const MAX_STEPS: usize = 16;
    for _ in 0..MAX_STEPS {
        let (_, refused) = claims(&graph, devices);
        let lowers = |id: &NodeId| graph.nodes.get(id.index()).is_some_and(|node| node.spec.lower.is_some());
        let (open, stuck): (Vec<_>, Vec<_>) = refused.into_iter().partition(|(id, _)| lowers(id));
        if open.is_empty() {
            collect(&graph, &stuck, &mut found);
            break;
        }
        let open: Vec<NodeId> = open.into_iter().map(|(id, _)| id).collect();
        lower_nodes(&mut graph, &open)?;
        infer_graph(&mut graph)?;
    }
    let subgraphs = graph.nodes.iter().flat_map(|node| &node.subgraphs);
    for subgraph in subgraphs.filter(|subgraph| subgraph.graph.broken.is_none()) {
        found.extend(unclaimed(&subgraph.graph, devices)?);
    }
    Ok(found)
}

/// The claims for the nodes that some device claims, and the other nodes with the reasons.
fn claims(graph: &Graph, devices: &[Arc<dyn Device>]) -> (Vec<(usize, Claim)>, Vec<(NodeId, String)>) {
    let mut claims = Vec::with_capacity(graph.nodes.len());
    let mut refused = Vec::new();
    for (index, node) in graph.nodes.iter().enumerate() {
        match first_claim(devices, &NodeView { graph, node }) {
            Ok(claim) => claims.push(claim),
            Err(reason) => refused.push((NodeId(index as u32), reason)),
        }
    }
    (claims, refused)
}

fn collect(graph: &Graph, stuck: &[(NodeId, String)], found: &mut Vec<Unclaimed>) {
    for (id, reason) in stuck {
        let Some(node) = graph.nodes.get(id.index()) else { continue };
        let domain =
            if node.spec.domain.is_empty() { String::new() } else { format!("{}.", node.spec.domain) };
        let operator = format!("{domain}{}", node.spec.name);
        match found.iter_mut().find(|known| known.operator == operator && known.reason == *reason) {
            Some(known) => known.count += 1,
            None => {
                let types = node.inputs.iter().flatten().map(|&input| graph.value(input).ty.to_string());
                let types: Vec<String> = types.collect();
                let first_node = format!("'{}' of ({})", node.name, types.join(", "));
                found.push(Unclaimed { operator, reason: reason.clone(), count: 1, first_node });
            }
        }
    }
}

/// One error for all nodes that nothing can run.
fn unsupported(graph: &Graph, stuck: &[(NodeId, String)]) -> Error {
    let mut found = Vec::new();
    collect(graph, stuck, &mut found);
    let lines = found.iter().map(|one| {
        let nodes = if one.count == 1 { "node" } else { "nodes" };
        format!("{}: {} ({} {nodes}, first {})", one.operator, one.reason, one.count, one.first_node)
    });
    let lines: Vec<String> = lines.collect();
    error!(NotImplemented, "no execution provider runs {}", lines.join("; "))
        .help("`ort check MODEL` lists everything that is unsupported")
}
