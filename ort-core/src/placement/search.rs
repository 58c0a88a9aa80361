//! Device placement by local search: a cluster of nodes moves to another device if the transfers
//! saved outweigh the work added.
//!
//! Each node has a preferred device, where it starts: the host if it computes shapes, else the
//! first device that claims it. Control flow starts where its bodies cost least. The cost of a
//! placement is the transfers, plus the work of all nodes that are not on their preferred device. A
//! value is transferred once to each memory in which nodes read it, other than the one in which it
//! is produced.
//!
//! Transfers of the caller's inputs and outputs do not count, because they are needed wherever the
//! nodes are. So a model that one device can run completely stays on that device. Constants are
//! uploaded once, when the session is built, and do not count either. The inputs and outputs of a
//! subgraph do count, because other nodes produce and read them in each iteration of a loop. A
//! captured value is transferred before the node runs, once to each memory in which the subgraph
//! reads it.
//!
//! A cluster is a connected group of movable nodes on one device. Each cluster is tried on the
//! other devices that claim all of its nodes, small clusters first, until no move lowers the cost
//! or after eight rounds. GEMMs and convolutions never move, because accelerating them is what a
//! device is for. Control flow is on a device if the values of its bodies are in that device's
//! memory (`control_flow.rs`).

#![allow(
    clippy::indexing_slicing,
    reason = "nodes and values are those of one graph, and every table has an entry for each"
)]

use std::sync::Arc;

use ort_alloc::DeviceId;
use smallvec::SmallVec;

use super::Scope;
use super::cost::{COPIED_BYTE, COPY, Estimates};
use super::disjoint_sets::DisjointSets;
use crate::ep::{Claim, Device};
use crate::ir::{Graph, Node, NodeId, ValueId};
use crate::program::{Cluster, ControlFlowPlacement, Partition, Reason};
use crate::spec::Cost;

/// The location of a graph's inputs and outputs.
#[derive(Clone, Copy)]
pub(super) enum Boundary<'a> {
    /// With the caller: their transfers do not count.
    Open,
    /// In these memories: those of the inputs, and those of the outputs.
    At(&'a [DeviceId], &'a [DeviceId]),
    /// All of them in host memory, captured values included.
    Host,
}

impl From<Scope> for Boundary<'_> {
    fn from(scope: Scope) -> Self {
        match scope {
            Scope::Model => Boundary::Open,
            Scope::Subgraph => Boundary::Host,
        }
    }
}

/// One way to run a node: a device with its claim.
#[derive(Clone)]
pub(super) struct Choice {
    /// The index of the device.
    pub(super) device: usize,
    pub(super) claim: Claim,
    /// For control flow, where its values are and how its bodies are placed.
    pub(super) flow: Option<Arc<ControlFlowPlacement>>,
}

/// The choices for one node, in the session's order of devices.
pub(super) type Choices = SmallVec<[Choice; 2]>;

/// Places each node on the first device that claims it, for sessions without transfers.
pub(super) fn first_choices(choices: Vec<Choices>) -> Partition {
    let mut partition = Partition::default();
    for Choice { device, claim, flow } in choices.into_iter().filter_map(|own| own.into_iter().next()) {
        partition.nodes.push((device, claim));
        partition.reasons.push(Reason::FirstClaim);
        partition.flows.push(flow);
    }
    partition
}

/// Returns the cost of the placement in `places`, which has the index of a device for each node.
pub(super) fn cost_in(
    graph: &Graph,
    devices: &[Arc<dyn Device>],
    scope: Scope,
    choices: Vec<Choices>,
    places: &[usize],
) -> u64 {
    let mut search = PlacementSearch::new(graph, devices, scope.into(), choices);
    for (node, &device) in (0..graph.nodes.len()).zip(places) {
        // The caller has checked that the device claims the node.
        search.put_all(&[node], device);
    }
    search.totals.score()
}

/// Whether a node is shape arithmetic. Such a node prefers the host, which needs its few numbers.
fn on_shapes(graph: &Graph, node: &Node) -> bool {
    node.outputs.iter().flatten().all(|&id| graph.value(id).symbolic.is_some())
}

/// Whether the devices have more than one memory. Otherwise there are no transfers.
pub(super) fn is_mixed(devices: &[Arc<dyn Device>]) -> bool {
    let mut memories = devices.iter().map(|device| device.memory());
    let first = memories.next();
    !memories.all(|memory| Some(memory) == first)
}

/// Places the nodes of a graph whose inputs and outputs are where `ends` says.
pub(super) fn place<'a>(
    graph: &'a Graph,
    devices: &[Arc<dyn Device>],
    ends: Boundary<'_>,
    choices: Vec<Choices>,
) -> PlacementSearch<'a> {
    let mut search = PlacementSearch::new(graph, devices, ends, choices);
    search.improve();
    search
}

/// The search state of a node.
struct NodeState {
    choices: Choices,
    /// The index in `choices` of the choice that the session prefers.
    preferred: usize,
    /// The index of the current choice.
    at: usize,
    /// The cost of the node at any choice but the preferred one.
    work: u64,
    /// Whether the node may not move.
    is_pinned: bool,
    /// Whether the plan folds the node's outputs, so that it does not run.
    is_planned: bool,
    reason: Reason,
    /// The reason for the preferred choice.
    preference: Reason,
}

impl NodeState {
    fn new(graph: &Graph, node: NodeId, devices: &[Arc<dyn Device>], choices: Choices) -> NodeState {
        let node = &graph.nodes[node.index()];
        let on_host = |choice: &Choice| devices[choice.device].memory() == DeviceId::HOST;
        let on_shapes = on_shapes(graph, node);
        // Shape arithmetic prefers the host, control flow the choice whose bodies cost least, and
        // other nodes the first device that claims them.
        let host = choices.iter().position(on_host).filter(|_| on_shapes);
        let costs =
            choices.iter().enumerate().filter_map(|(at, choice)| Some((choice.flow.as_ref()?.cost, at)));
        let cheapest = costs.min().map_or(0, |(_, at)| at);
        let preferred = host.unwrap_or(cheapest);
        let known = |id: &ValueId| {
            let elements = graph.value(*id).symbolic.as_ref().map(|symbolic| symbolic.elements.iter());
            elements.is_some_and(|mut elements| !elements.any(|element| element.has_unknown()))
        };
        let mut outputs = node.outputs.iter().flatten();
        // The plan folds such a node, so moving it would change nothing.
        let is_planned = host.is_some() && !node.outputs.is_empty() && outputs.all(known);
        let is_heavy = node.spec.cost == Cost::Compute;
        let preference = match (preferred, &choices[preferred].flow) {
            (_, Some(flow)) if flow.is_on_device => Reason::Bodies,
            (0, _) => Reason::FirstClaim,
            _ => Reason::Shapes,
        };
        NodeState {
            is_pinned: is_planned || is_heavy || choices.len() < 2,
            choices,
            preferred,
            at: preferred,
            work: 0,
            is_planned,
            reason: preference,
            preference,
        }
    }

    /// The device of the current choice.
    fn device(&self) -> usize {
        self.choices[self.at].device
    }

    /// The index of the choice for a device, if there is one.
    fn place_of(&self, device: usize) -> Option<usize> {
        self.choices.iter().position(|choice| choice.device == device)
    }
}

/// The cost of a placement, by cause.
#[derive(Clone, Copy, Default)]
struct Totals {
    work: u64,
    copies: u64,
    bytes: u64,
}

impl Totals {
    fn score(&self) -> u64 {
        self.work + self.copies * COPY + self.bytes * COPIED_BYTE
    }
}

/// The search state of a value.
#[derive(Clone, Default)]
struct ValueState {
    /// The memory in which it is produced. `None` for the caller's inputs and for constants, whose
    /// transfers do not count.
    memory: Option<usize>,
    bytes: u64,
    /// Whether the caller reads the value in host memory, so that it is transferred there in any
    /// case.
    is_output: bool,
    /// The number of readers in each memory.
    readers: SmallVec<[u32; 2]>,
}

impl ValueState {
    /// The number of transfers of the value.
    fn copies(&self) -> u64 {
        let Some(home) = self.memory else { return 0 };
        let elsewhere = |memory: usize| memory != home && self.readers[memory] > 0;
        let devices = (HOST + 1..self.readers.len()).filter(|memory| elsewhere(*memory)).count();
        // A transfer between two devices is staged through the host.
        let at_host = home != HOST && !self.is_output && (elsewhere(HOST) || devices > 0);
        devices as u64 + u64::from(at_host)
    }
}

/// The index of host memory among the memories.
const HOST: usize = 0;

/// A placement with its cost: the state of the local search.
pub(super) struct PlacementSearch<'a> {
    graph: &'a Graph,
    nodes: Vec<NodeState>,
    values: Vec<ValueState>,
    /// The memories, host memory first.
    known: Vec<DeviceId>,
    /// By device: the index of its memory in `known`.
    memories: Vec<usize>,
    producers: Vec<Option<NodeId>>,
    totals: Totals,
}

impl<'a> PlacementSearch<'a> {
    /// Starts the search with each node on its preferred device.
    fn new(
        graph: &'a Graph,
        devices: &[Arc<dyn Device>],
        ends: Boundary<'_>,
        choices: Vec<Choices>,
    ) -> PlacementSearch<'a> {
        let mut known = vec![DeviceId::HOST];
        let mut memories = Vec::with_capacity(devices.len());
        for device in devices {
            let memory = device.memory();
            let place = known.iter().position(|other| *other == memory).unwrap_or_else(|| {
                known.push(memory);
                known.len() - 1
            });
            memories.push(place);
        }
        let nodes = (0u32..).map(NodeId).zip(choices);
        let nodes = nodes.map(|(node, choices)| NodeState::new(graph, node, devices, choices)).collect();
        let unread = ValueState { readers: SmallVec::from_elem(0, known.len()), ..ValueState::default() };
        let values = vec![unread; graph.value_count()];
        let (producers, totals) = (graph.producers(), Totals::default());
        let mut search = PlacementSearch { graph, nodes, values, known, memories, producers, totals };
        search.set_up(ends);
        search
    }

    /// Computes the state of the values and the totals of the initial placement.
    fn set_up(&mut self, ends: Boundary<'_>) {
        let graph = self.graph;
        let mut estimates = Estimates::new(graph);
        for (index, node) in graph.nodes.iter().enumerate() {
            let at = self.nodes[index].at;
            for (position, output) in outputs(node) {
                let memory = self.made_in(index, at, position);
                let held = &mut self.values[output.index()];
                (held.memory, held.bytes) = (Some(memory), estimates.bytes(output));
            }
            let state = &mut self.nodes[index];
            if state.choices.len() > 1 {
                // The preferred choice of control flow has the cheapest bodies. The others cost at
                // most this much more.
                let costs = state.choices.iter().filter_map(|choice| Some(choice.flow.as_ref()?.cost));
                state.work = match costs.clone().max().zip(costs.min()) {
                    Some((most, least)) => most - least,
                    None => estimates.work(node),
                };
            }
            // A node that does not run reads nothing.
            if self.nodes[index].is_planned {
                continue;
            }
            for (value, memory) in self.reads(index, at) {
                self.values[value.index()].readers[memory] += 1;
            }
        }
        self.set_up_ends(ends, &mut estimates);
        for held in &self.values {
            self.totals.copies += held.copies();
            self.totals.bytes += held.copies() * held.bytes;
        }
    }

    /// Records where the graph's inputs are, and where its outputs are read.
    fn set_up_ends(&mut self, ends: Boundary<'_>, estimates: &mut Estimates<'_>) {
        let graph = self.graph;
        let host = DeviceId::HOST;
        for (position, output) in graph.outputs.iter().enumerate() {
            let memory = match ends {
                Boundary::Open => {
                    self.values[output.index()].is_output = true;
                    continue;
                }
                Boundary::At(_, outputs) => self.index_of(outputs.get(position).copied().unwrap_or(host)),
                Boundary::Host => HOST,
            };
            self.values[output.index()].readers[memory] += 1;
        }
        let given: Vec<(ValueId, usize)> = match ends {
            Boundary::Open => Vec::new(),
            Boundary::At(inputs, _) => {
                let inputs = graph.inputs.iter().zip(inputs);
                inputs.map(|(input, memory)| (*input, self.index_of(*memory))).collect()
            }
            Boundary::Host => {
                let is_given = |value: &ValueId| {
                    self.producers[value.index()].is_none() && !graph.constants.contains_key(value)
                };
                graph.value_ids().filter(is_given).map(|value| (value, HOST)).collect()
            }
        };
        for (value, memory) in given {
            let held = &mut self.values[value.index()];
            (held.memory, held.bytes) = (Some(memory), estimates.bytes(value));
        }
    }

    /// The index of a memory in `known`.
    fn index_of(&self, memory: DeviceId) -> usize {
        self.known.iter().position(|known| *known == memory).unwrap_or(HOST)
    }

    /// The cost of the placement.
    pub(super) fn score(&self) -> u64 {
        self.totals.score()
    }

    /// The first device with memory of its own that has a node.
    pub(super) fn first_device(&self) -> Option<usize> {
        let devices = self.nodes.iter().map(NodeState::device);
        devices.filter(|device| self.memories[*device] != HOST).min()
    }

    /// Whether a value is produced in a memory. For a value that no node produces, whether it is
    /// read there.
    pub(super) fn is_made_in(&self, value: ValueId, memory: DeviceId) -> bool {
        let held = &self.values[value.index()];
        let memory = self.index_of(memory);
        held.memory.map_or(held.readers[memory] > 0, |home| home == memory)
    }

    /// The memories in which a value is read.
    pub(super) fn read_memories(&self, value: ValueId) -> SmallVec<[DeviceId; 2]> {
        let readers = self.values[value.index()].readers.iter();
        let read = readers.zip(&self.known).filter(|(readers, _)| **readers > 0);
        read.map(|(_, memory)| *memory).collect()
    }

    /// The inputs of a node that are present, with their positions.
    fn inputs(&self, node: usize) -> impl Iterator<Item = (usize, ValueId)> + use<'a> {
        let inputs = self.graph.nodes[node].inputs.iter().enumerate();
        inputs.filter_map(|(position, value)| Some((position, (*value)?)))
    }

    /// The memory in which a node reads an input with one of its choices.
    fn read_in(&self, node: usize, at: usize, position: usize) -> usize {
        let Choice { device, claim, flow } = &self.nodes[node].choices[at];
        match flow.as_ref().and_then(|flow| flow.inputs.get(position)) {
            Some(memory) => self.index_of(*memory),
            None if claim.host_inputs.contains(&position) => HOST,
            None => self.memories[*device],
        }
    }

    /// The memory in which a node produces an output with one of its choices.
    fn made_in(&self, node: usize, at: usize, position: usize) -> usize {
        let Choice { device, flow, .. } = &self.nodes[node].choices[at];
        let memory = flow.as_ref().and_then(|flow| flow.outputs.get(position));
        memory.map_or(self.memories[*device], |memory| self.index_of(*memory))
    }

    /// The values that a node reads, each with its memory: the node's inputs, and the captures of
    /// its subgraphs.
    fn reads(&self, node: usize, at: usize) -> SmallVec<[(ValueId, usize); 4]> {
        let inputs = self.inputs(node).map(|(position, value)| (value, self.read_in(node, at, position)));
        let flow = self.nodes[node].choices[at].flow.iter();
        let captures = flow.flat_map(|flow| &flow.bodies).flat_map(|body| &body.captures);
        let captured = captures.flat_map(|capture| {
            capture.memories.iter().map(|memory| (capture.outer, self.index_of(*memory)))
        });
        inputs.chain(captured).collect()
    }

    /// Changes the state of a value and updates the totals.
    fn change(&mut self, value: ValueId, change: impl FnOnce(&mut ValueState)) {
        let held = &mut self.values[value.index()];
        let before = held.copies();
        change(held);
        let after = held.copies();
        self.totals.copies = self.totals.copies + after - before;
        self.totals.bytes = self.totals.bytes + after * held.bytes - before * held.bytes;
    }

    /// Moves a node to another of its choices.
    fn put(&mut self, node: usize, at: usize) {
        let state = &self.nodes[node];
        let (old, work) = (state.at, |at| if at == state.preferred { 0 } else { state.work });
        self.totals.work = self.totals.work + work(at) - work(old);
        // As in `set_up`: a node that the plan folds reads nothing.
        if !state.is_planned {
            for (value, memory) in self.reads(node, old) {
                self.change(value, |held| held.readers[memory] -= 1);
            }
            for (value, memory) in self.reads(node, at) {
                self.change(value, |held| held.readers[memory] += 1);
            }
        }
        let graph = self.graph;
        for (position, output) in outputs(&graph.nodes[node]) {
            let memory = self.made_in(node, at, position);
            self.change(output, |held| held.memory = Some(memory));
        }
        self.nodes[node].at = at;
    }

    /// Moves clusters, until no move lowers the cost or after `MOST_ROUNDS` rounds.
    fn improve(&mut self) {
        // Small clusters come first. They merge with their neighbours before large clusters are
        // tried, so a few rounds suffice. More rounds could take more than linear time in the
        // number of nodes.
        const MOST_ROUNDS: usize = 8;
        for _ in 0..MOST_ROUNDS {
            let before = self.totals.score();
            // Try preferred devices first: a cluster that moves there may keep other clusters
            // there.
            for way in [Direction::Earlier, Direction::Later] {
                for grouping in [Grouping::Chains, Grouping::Readers] {
                    // No transfers are left to save.
                    if self.totals.copies == 0 {
                        return;
                    }
                    for cluster in self.clusters(grouping) {
                        self.move_if_cheaper(&cluster, way);
                    }
                }
            }
            if self.totals.score() == before {
                return;
            }
        }
    }

    /// Moves a cluster to the device that gives the lowest cost, if that is lower than the current
    /// cost.
    fn move_if_cheaper(&mut self, cluster: &[usize], way: Direction) {
        let Some(&first) = cluster.first() else { return };
        let (home, before) = (self.nodes[first].device(), self.totals);
        let mut best: Option<(usize, Totals)> = None;
        let others = match way {
            Direction::Earlier => 0..home,
            Direction::Later => home + 1..self.memories.len(),
        };
        for device in others {
            // A trial is a move: the totals are updated incrementally.
            if !self.put_all(cluster, device) {
                continue;
            }
            let least = best.map_or(before, |(_, totals)| totals);
            if self.totals.score() < least.score() {
                best = Some((device, self.totals));
            }
        }
        let (device, after) = best.unwrap_or((home, before));
        self.put_all(cluster, device);
        if device == home {
            return;
        }
        let moved = Cluster {
            nodes: cluster.len(),
            copies: before.copies.cast_signed() - after.copies.cast_signed(),
            bytes: before.bytes.cast_signed() - after.bytes.cast_signed(),
        };
        tracing::debug!(node = &*self.graph.nodes[first].name, "{moved}");
        for &node in cluster {
            let state = &mut self.nodes[node];
            state.reason =
                if state.at == state.preferred { state.preference } else { Reason::Cluster(moved) };
        }
    }

    /// Moves all nodes to a device. Returns false and moves none if the device does not claim all
    /// of them.
    fn put_all(&mut self, nodes: &[usize], device: usize) -> bool {
        let claims = |node: &usize| self.nodes[*node].place_of(device).is_some();
        if !nodes.iter().all(claims) {
            return false;
        }
        for &node in nodes {
            if let Some(at) = self.nodes[node].place_of(device) {
                self.put(node, at);
            }
        }
        true
    }

    /// Returns the clusters of movable nodes, small ones first.
    fn clusters(&self, grouping: Grouping) -> Vec<Vec<usize>> {
        let count = self.nodes.len();
        let mut joined = DisjointSets::new(count);
        let by_reader = if grouping == Grouping::Readers { self.values.len() } else { 0 };
        let mut last_reader = vec![None; by_reader * self.memories.len()];
        for node in (0..count).filter(|node| !self.nodes[*node].is_pinned) {
            let device = self.nodes[node].device();
            for (position, value) in self.inputs(node) {
                let maker = self.producers[value.index()].map(NodeId::index);
                // A node joins the producer of its input if both are on one device.
                let is_alike =
                    |maker: &usize| !self.nodes[*maker].is_pinned && self.nodes[*maker].device() == device;
                if let Some(maker) = maker.filter(is_alike) {
                    joined.join(maker, node);
                }
                let here = self.read_in(node, self.nodes[node].at, position);
                let is_copy = self.values[value.index()].memory.is_some_and(|home| home != here);
                if grouping == Grouping::Readers && is_copy {
                    // Readers on one device share the copy in the device's memory.
                    let last = &mut last_reader[value.index() * self.memories.len() + device];
                    if let Some(other) = last.replace(node) {
                        joined.join(other, node);
                    }
                }
            }
        }
        let mut clusters: Vec<Vec<usize>> = vec![Vec::new(); count];
        for node in (0..count).filter(|node| !self.nodes[*node].is_pinned) {
            clusters[joined.root(node)].push(node);
        }
        clusters.retain(|cluster| !cluster.is_empty());
        // A stable sort, so that clusters of one size stay in the order of the graph.
        clusters.sort_by_key(Vec::len);
        clusters
    }

    /// Returns the placement, with the reason for each node.
    pub(super) fn partition(self) -> Partition {
        let mut partition = Partition::default();
        for mut state in self.nodes {
            let Choice { device, claim, flow } = state.choices.swap_remove(state.at);
            partition.nodes.push((device, claim));
            partition.reasons.push(state.reason);
            partition.flows.push(flow);
        }
        partition
    }
}

/// The outputs of a node that are present, with their positions.
fn outputs(node: &Node) -> impl Iterator<Item = (usize, ValueId)> + use<'_> {
    node.outputs.iter().enumerate().filter_map(|(position, value)| Some((position, (*value)?)))
}

/// The direction of a move in the session's order of devices.
#[derive(Clone, Copy)]
enum Direction {
    Earlier,
    Later,
}

/// What connects the nodes of a cluster.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Grouping {
    /// A node and the producers of its inputs.
    Chains,
    /// As `Chains`, plus all readers of the same copy, because the copy is saved only if all of
    /// them move.
    Readers,
}
