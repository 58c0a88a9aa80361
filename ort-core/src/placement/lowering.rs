//! Lowering: replaces nodes that no device claims with their decompositions, until each node has a
//! claim.

use std::sync::Arc;

use crate::ep::{Claim, Device, NodeView, guard};
use crate::ir::{Graph, Node, NodeId};
use crate::spec::{Draft, infer_graph};
use crate::{Error, Result, Within, error};

/// Decomposes the nodes of a graph that no device claims. Returns the first claim for each node.
pub(super) fn claim_all(graph: &mut Arc<Graph>, devices: &[Arc<dyn Device>]) -> Result<Vec<(usize, Claim)>> {
    // Comes first, because a device has to claim the transpositions that it adds.
    move_scan_axes_to_front(graph)?;
    let claims = lower_unclaimed(graph, devices);
    // A failed device may have refused nodes only because it failed, so report the failure first.
    devices.iter().try_for_each(|device| {
        guard::check(&**device).within(|| format!("provider {}", device.info().provider))
    })?;
    claims
}

/// Returns the first device that claims a node, or each device's reason for refusing it.
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

/// Decomposes unclaimed nodes until each node is claimed; fails if one of them has no
/// decomposition. Returns the claim for each node.
fn lower_unclaimed(graph: &mut Arc<Graph>, devices: &[Arc<dyn Device>]) -> Result<Vec<(usize, Claim)>> {
    // A bound, because decompositions may contain each other's operators.
    const MAX_STEPS: usize = 16;
    for _ in 0..MAX_STEPS {
        let (claims, refused) = claims(graph, devices);
        if refused.is_empty() {
            return Ok(claims);
        }
        let lowers = |id: &NodeId| graph.nodes.get(id.index()).is_some_and(|node| node.spec.lower.is_some());
        let stuck: Vec<(NodeId, String)> = refused.iter().filter(|(id, _)| !lowers(id)).cloned().collect();
        // No device can run these nodes, so decomposing the others would be in vain.
        if !stuck.is_empty() {
            return Err(unsupported(graph, &stuck));
        }
        let ids: Vec<NodeId> = refused.into_iter().map(|(id, _)| id).collect();
        let graph = Arc::make_mut(graph);
        lower_nodes(graph, &ids)?;
        // Devices need types and shapes to claim nodes, and the new nodes have none yet.
        infer_graph(graph)?;
    }
    Err(error!(Fail, "operator decomposition does not terminate"))
}

/// Decomposes all nodes that are not `kept`, in subgraphs as well, until no such node can be
/// decomposed further.
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

/// Transposes tensors that control flow scans along another axis, so that the scan axis comes
/// first. Each slice is then contiguous, so a device can take a view of it, and the plan counts the
/// transposed tensors.
fn move_scan_axes_to_front(graph: &mut Arc<Graph>) -> Result<()> {
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

/// Replaces these nodes with their decompositions. `ids` is in the order of the graph.
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
    /// The operator, with its domain if that is not ONNX's own.
    pub operator: String,
    /// Why each provider refused it.
    pub reason: String,
    /// The number of nodes refused for this reason.
    pub count: usize,
    /// The first of those nodes, with its input types.
    pub first_node: String,
}

/// Returns every operator of an inferred graph and its subgraphs that no device runs even after
/// decomposition, each with its count and first node.
pub fn unclaimed(graph: &Graph, devices: &[Arc<dyn Device>]) -> Result<Vec<Unclaimed>> {
    let mut graph = graph.clone();
    let mut found = Vec::new();
    const MAX_STEPS: usize = 16;
    for _ in 0..MAX_STEPS {
        let (_, refused) = claims(&graph, devices);
        let lowers = |id: &NodeId| graph.nodes.get(id.index()).is_some_and(|node| node.spec.lower.is_some());
        // Nodes that cannot be decomposed are refused again in the last round, so only that round
        // collects them.
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

/// Returns the first claim of each node that some device claims, and the other nodes with the
/// reasons.
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

/// Adds these nodes to `found`, grouped by operator and reason.
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

/// Returns one error for all nodes that no device can run.
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
