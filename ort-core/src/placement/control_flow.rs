//! Placement of control flow: which memories hold its values, and where its bodies run.
//!
//! A host device claims each node with subgraphs, and runs the subgraphs one after the other. The
//! node's kernel reads conditions, and forwards the other values without reading them. So these may
//! be in the memory of another device D: loop-carried values stay there between iterations, scanned
//! slices are views of a tensor there, and the outputs of iterations are stacked there.
//!
//! If the bodies cost less that way than with all of their inputs and outputs on the host, the
//! search gets one more choice for the node, with the index of D. The host still runs the node's
//! kernel. Only values that bodies compute or read on the device are kept there. Trip counts,
//! conditions, and values other than tensors of fixed-size elements stay on the host.

#![allow(
    clippy::indexing_slicing,
    reason = "bodies, and the memories of their ends, are made in step with the node's subgraphs"
)]

use std::sync::Arc;

use ort_alloc::DeviceId;
use smallvec::SmallVec;

use super::cost::Estimates;
use super::lowering::claim_all;
use super::search::{Boundary, Choice, Choices, PlacementSearch, first_choices, is_mixed, place};
use crate::ep::{Claim, Device, NodeView, guard};
use crate::ir::{Graph, Node, Subgraph, ValueId, ValueType};
use crate::program::{Body, Captured, ControlFlowPlacement, Partition};
use crate::spec::{Flow, TripCount};
use crate::{Result, Within};

/// A subgraph in which each node is claimed, with the choices for its nodes.
struct Claimed {
    graph: Arc<Graph>,
    captured: Vec<(ValueId, ValueId)>,
    choices: Vec<Choices>,
}

/// For each body, the memories of its inputs and of its outputs.
type Memories = Vec<(Vec<DeviceId>, Vec<DeviceId>)>;

/// Returns the choices for each node, given the first claim of each.
pub(super) fn choices(
    graph: &Graph,
    devices: &[Arc<dyn Device>],
    claimed: Vec<(usize, Claim)>,
) -> Result<Vec<Choices>> {
    let is_mixed = is_mixed(devices);
    let nodes = graph.nodes.iter().zip(claimed);
    let node_memories = nodes.map(|(node, first)| {
        let view = NodeView { graph, node };
        // With a single memory the first claim is taken, so no other device is asked.
        let later = devices.iter().enumerate().skip(first.0 + 1).filter(|_| is_mixed);
        let later = later.filter_map(|(index, device)| Some((index, guard::claim(&**device, &view).ok()?)));
        let claims = std::iter::once(first).chain(later);
        match node.subgraphs.is_empty() {
            true => Ok(claims.map(|(device, claim)| Choice { device, claim, flow: None }).collect()),
            false => placements(view, devices, &claims.collect::<SmallVec<[_; 2]>>()).within(|| node.place()),
        }
    });
    node_memories.collect()
}

/// Returns the choices for a node with subgraphs that these devices claim.
pub(super) fn placements(
    view: NodeView<'_>,
    devices: &[Arc<dyn Device>],
    claims: &[(usize, Claim)],
) -> Result<Choices> {
    let NodeView { graph, node } = view;
    let bodies = node.subgraphs.iter().map(|subgraph| {
        Claimed::of(graph, subgraph, devices)
            .map_err(|problem| problem.help("check its attributes and the types of its inputs"))
            .within(|| subgraph.attr)
    });
    let bodies: Vec<Claimed> = bodies.collect::<Result<_>>()?;
    let on_host: Memories = bodies.iter().map(Claimed::on_host).collect();
    let (placed, cost) = place_bodies(&bodies, devices, &on_host);
    let is_mixed = is_mixed(devices);
    let repeats = node.spec.flow.filter(|flow| is_mixed && flow.rounds != TripCount::Once);
    // The cost of the bodies is that of one iteration.
    let rounds = repeats.map_or(1, |flow| Estimates::new(graph).rounds(node, flow.rounds));
    let mut choices = Choices::new();
    for &(device, claim) in claims {
        let memory = devices[device].memory();
        let input = |index| if claim.host_inputs.contains(&index) { DeviceId::HOST } else { memory };
        let flow = ControlFlowPlacement {
            driver: device,
            is_on_device: false,
            inputs: (0..node.inputs.len()).map(input).collect(),
            outputs: vec![memory; node.outputs.len()],
            bodies: placed.clone(),
            cost: cost.saturating_mul(rounds),
        };
        choices.push(Choice { device, claim, flow: Some(Arc::new(flow)) });
    }
    let host = claims.iter().find(|(device, _)| devices[*device].memory() == DeviceId::HOST);
    if let (Some(&(driver, claim)), Some(flow), true) = (host, node.spec.flow, is_mixed)
        && let Some((device, memories)) = on_device(node, flow, &bodies, devices)
        // A device that claims the node itself is among the choices already.
        && !claims.iter().any(|(claiming, _)| *claiming == device)
    {
        let (placed, less) = self::place_bodies(&bodies, devices, &memories);
        if less < cost {
            let (inputs, outputs) = node_memories(node, flow, &memories[0]);
            let cost = less.saturating_mul(rounds);
            let flow =
                ControlFlowPlacement { driver, is_on_device: true, inputs, outputs, bodies: placed, cost };
            choices.push(Choice { device, claim, flow: Some(Arc::new(flow)) });
            // Choices are in the session's order of devices.
            choices.sort_by_key(|choice| choice.device);
        }
    }
    Ok(choices)
}

/// Places the bodies with their inputs and outputs in these memories. Returns them with the cost of
/// one iteration.
fn place_bodies(bodies: &[Claimed], devices: &[Arc<dyn Device>], memories: &Memories) -> (Vec<Body>, u64) {
    let mut cost = 0u64;
    let placed = bodies.iter().zip(memories).map(|(body, (inputs, outputs))| {
        let Claimed { graph, captured, choices } = body;
        let (inputs, outputs) = (inputs.clone(), outputs.clone());
        // Inference rejected the body, so it never runs.
        if graph.broken.is_some() {
            let partition = Partition::default();
            return Body { graph: graph.clone(), captures: Vec::new(), partition, inputs, outputs };
        }
        if !is_mixed(devices) {
            let captures = captured.iter();
            let captures =
                captures.map(|&(outer, inner)| Captured { outer, inner, memories: SmallVec::new() });
            let (captures, partition) = (captures.collect(), first_choices(choices.clone()));
            return Body { graph: graph.clone(), captures, partition, inputs, outputs };
        }
        let search = place(graph, devices, Boundary::At(&inputs, &outputs), choices.clone());
        cost = cost.saturating_add(search.score());
        let captures = captured.iter().map(|&(outer, inner)| {
            let memories = search.read_memories(inner);
            Captured { outer, inner, memories }
        });
        let captures = captures.collect();
        Body { graph: graph.clone(), captures, partition: search.partition(), inputs, outputs }
    });
    (placed.collect(), cost)
}

/// Finds a device that the bodies would use if transfers of their inputs and outputs were free.
/// Returns the device, and the memories of these inputs and outputs if values that are computed or
/// read on the device stay there.
fn on_device(
    node: &Node,
    flow: Flow,
    bodies: &[Claimed],
    devices: &[Arc<dyn Device>],
) -> Option<(usize, Memories)> {
    // Slices along another axis than the first are not contiguous, so they cannot be views.
    if !(flow.in_front)(&node.attrs) {
        return None;
    }
    let whole = bodies.iter().filter(|body| body.graph.broken.is_none());
    let open: Vec<(&Graph, PlacementSearch<'_>)> =
        whole.map(|body| (&*body.graph, self::open(body, devices))).collect();
    let device = open.iter().filter_map(|(_, search)| search.first_device()).min()?;
    let there = CopyMemory { memory: devices[device].memory(), alignment: devices[device].copy_alignment() };
    let carried = (flow.carried)(&node.attrs, node.inputs.len().saturating_sub(flow.controls));
    let mut memories: Memories = bodies.iter().map(Claimed::on_host).collect();
    for index in 0..node.outputs.len().max(carried) {
        let (to, from) = (flow.conditions + index, flow.counters + index);
        let is_carried = index < carried;
        // An output that is not carried is stacked, one slice for each iteration.
        let is_stacked = !is_carried && flow.rounds != TripCount::Once;
        let fits = open.iter().all(|(graph, _)| {
            there.holds(graph, graph.outputs.get(to), is_stacked)
                && (!is_carried || there.holds(graph, graph.inputs.get(from), false))
        });
        let is_used = open.iter().any(|(graph, search)| {
            there.makes(search, graph.outputs.get(to))
                || (is_carried && there.reads(search, graph.inputs.get(from)))
        });
        // A value must be in the same memory for all bodies.
        for (inputs, outputs) in memories.iter_mut().filter(|_| fits && is_used) {
            set(outputs, to, there.memory);
            if is_carried {
                set(inputs, from, there.memory);
            }
        }
    }
    for ((graph, search), (inputs, _)) in open.iter().zip(&mut memories) {
        // The inputs after the carried ones are scanned.
        for (index, input) in graph.inputs.iter().enumerate().skip(flow.counters + carried) {
            if there.holds(graph, Some(input), true) && there.reads(search, Some(input)) {
                set(inputs, index, there.memory);
            }
        }
    }
    Some((device, memories))
}

/// Places a body as if transfers of its inputs and outputs were free.
fn open<'a>(body: &'a Claimed, devices: &[Arc<dyn Device>]) -> PlacementSearch<'a> {
    place(&body.graph, devices, Boundary::Open, body.choices.clone())
}

/// Derives the memories of the node's inputs and outputs from those of a body.
fn node_memories(
    node: &Node,
    flow: Flow,
    (inputs, outputs): &(Vec<DeviceId>, Vec<DeviceId>),
) -> (Vec<DeviceId>, Vec<DeviceId>) {
    let of = |memories: &[DeviceId], index: Option<usize>| {
        index.and_then(|index| memories.get(index).copied()).unwrap_or(DeviceId::HOST)
    };
    let input =
        |index: usize| of(inputs, index.checked_sub(flow.controls).map(|index| index + flow.counters));
    let output = |index: usize| of(outputs, Some(index + flow.conditions));
    ((0..node.inputs.len()).map(input).collect(), (0..node.outputs.len()).map(output).collect())
}

fn set(memories: &mut [DeviceId], index: usize, memory: DeviceId) {
    if let Some(place) = memories.get_mut(index) {
        *place = memory;
    }
}

/// A memory, and the alignment of copies within it.
#[derive(Clone, Copy)]
struct CopyMemory {
    memory: DeviceId,
    alignment: usize,
}

impl CopyMemory {
    /// Whether the memory may hold a value, or contiguous slices of it if `is_sliced`.
    fn holds(self, graph: &Graph, value: Option<&ValueId>, is_sliced: bool) -> bool {
        let bytes = value.and_then(|value| match &graph.value(*value).ty {
            ValueType::Tensor(tensor) => tensor.dtype.byte_size(),
            _ => None,
        });
        bytes.is_some_and(|bytes| !is_sliced || bytes.is_multiple_of(self.alignment))
    }

    /// Whether the searched placement produces a value in this memory.
    fn makes(self, search: &PlacementSearch<'_>, value: Option<&ValueId>) -> bool {
        value.is_some_and(|value| search.is_made_in(*value, self.memory))
    }

    /// Whether the searched placement reads the value in this memory.
    fn reads(self, search: &PlacementSearch<'_>, value: Option<&ValueId>) -> bool {
        value.is_some_and(|value| search.read_memories(*value).contains(&self.memory))
    }
}

impl Claimed {
    /// Claims every node of a subgraph. Captured constants become the subgraph's own, so that its
    /// kernels can pack them.
    fn of(graph: &Graph, subgraph: &Subgraph, devices: &[Arc<dyn Device>]) -> Result<Claimed> {
        let mut inner = subgraph.graph.clone();
        let mut captured = Vec::new();
        if inner.broken.is_some() {
            // No node of it runs: a run that takes this branch fails with the error that inference
            // found.
            return Ok(Claimed { graph: Arc::new(inner), captured, choices: Vec::new() });
        }
        for capture in &subgraph.captures {
            match graph.constants.get(&capture.outer) {
                Some(tensor) => {
                    inner.constants.insert(capture.inner, tensor.clone());
                }
                None => captured.push((capture.outer, capture.inner)),
            }
        }
        let mut graph = Arc::new(inner);
        let claimed = claim_all(&mut graph, devices)?;
        let choices = choices(&graph, devices, claimed)?;
        Ok(Claimed { graph, captured, choices })
    }

    /// The memories of the inputs and outputs if all of them are on the host.
    fn on_host(&self) -> (Vec<DeviceId>, Vec<DeviceId>) {
        let Graph { inputs, outputs, .. } = &*self.graph;
        (vec![DeviceId::HOST; inputs.len()], vec![DeviceId::HOST; outputs.len()])
    }
}
