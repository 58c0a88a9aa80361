//! Where each node runs, of the devices that claim it: clusters move where that saves more copies
//! than it costs work.
//!
//! Each node begins where the session prefers it: on the first device that claims it, or on the
//! host where it computes shapes. A placement costs the work of the nodes that are not where they
//! are preferred, and the copies of values that nodes of one memory make and nodes of another read;
//! a value is copied once into each memory. What the caller gives and gets does not count: it comes
//! from the host and goes there wherever the nodes are, so that a device keeps a model that it can
//! run alone. Constants are uploaded once, when the session is built. What a subgraph gets and
//! gives does count: other nodes make and read it, in each round of a loop. What it captures is
//! brought once to each memory in which it is read, before the node runs.
//!
//! An cluster is what hangs together of the nodes on one device that may move. Clusters are tried on
//! the other devices that claim all of their nodes, small ones first, until none gets cheaper.
//! Products and convolutions never move: a device is there for them. Control flow is on a device
//! where the values of its bodies lie there (`control_flow.rs`).

#![allow(
    clippy::indexing_slicing,
    reason = "nodes and values are those of one graph, and every table has an entry for each"
)]

use std::sync::Arc;

use ort_alloc::DeviceId;
use smallvec::SmallVec;

use super::Scope;
use super::cost::{COPIED_BYTE, COPY, Estimates};
use crate::ep::{Claim, Device};
use crate::ir::{Graph, Node, NodeId, ValueId};
use crate::program::{Cluster, ControlFlowPlacement, Partition, Reason};
use crate::spec::Cost;

/// Where what a graph is given, and what it gives, lies.
#[derive(Clone, Copy)]
pub(super) enum Boundary<'a> {
    /// With the caller: it does not count as copied.
    Open,
    /// In these memories: inputs, and outputs.
    At(&'a [DeviceId], &'a [DeviceId]),
    /// All of it in memory of the host, captured values included.
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

/// A way to run a node.
#[derive(Clone)]
pub(super) struct Choice {
    /// The place of its device.
    pub(super) device: usize,
    pub(super) claim: Claim,
    /// Where the values of control flow are.
    pub(super) flow: Option<Arc<ControlFlowPlacement>>,
}

/// The ways to run one node, in the session's order of devices.
pub(super) type Choices = SmallVec<[Choice; 2]>;

/// Each node where it is claimed first, as where nothing is ever copied.
pub(super) fn first_choices(choices: Vec<Choices>) -> Partition {
    let mut partition = Partition::default();
    for Choice { device, claim, flow } in choices.into_iter().filter_map(|own| own.into_iter().next()) {
        partition.nodes.push((device, claim));
        partition.reasons.push(Reason::FirstClaim);
        partition.flows.push(flow);
    }
    partition
}

/// What it costs to have each node on the device at its place.
pub(super) fn cost_in(
    graph: &Graph,
    devices: &[Arc<dyn Device>],
    scope: Scope,
    choices: Vec<Choices>,
    places: &[usize],
) -> u64 {
    let mut search = PlacementSearch::new(graph, devices, scope.into(), choices);
    for (node, &device) in (0..graph.nodes.len()).zip(places) {
        search.put_all(&[node], device);
    }
    search.totals.score()
}

/// Whether a node is arithmetic on shapes. It stays on the host: the host needs the numbers, and
/// they are few.
fn on_shapes(graph: &Graph, node: &Node) -> bool {
    node.outputs.iter().flatten().all(|&id| graph.value(id).symbolic.is_some())
}

/// Whether the devices have several memories: else nothing is ever copied.
pub(super) fn is_mixed(devices: &[Arc<dyn Device>]) -> bool {
    let mut memories = devices.iter().map(|device| device.memory());
    let first = memories.next();
    !memories.all(|memory| Some(memory) == first)
}

/// Places the nodes of a graph whose ends lie where they are said to.
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

/// A node on the search.
struct NodeState {
    choices: Choices,
    /// The choice that the session prefers, and the one that is taken so far: their places in
    /// `choices`.
    preferred: usize,
    at: usize,
    /// What it costs anywhere but where it is preferred.
    work: u64,
    stays: bool,
    /// Whether the plan knows its outputs, so that it does not run.
    is_planned: bool,
    reason: Reason,
    /// Why it is where it is preferred.
    preference: Reason,
}

impl NodeState {
    fn new(graph: &Graph, node: NodeId, devices: &[Arc<dyn Device>], choices: Choices) -> NodeState {
        let node = &graph.nodes[node.index()];
        let on_host = |choice: &Choice| devices[choice.device].memory() == DeviceId::HOST;
        let on_shapes = on_shapes(graph, node);
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
        let is_planned = host.is_some() && !node.outputs.is_empty() && outputs.all(known);
        let is_heavy = node.spec.cost == Cost::Compute;
        let preference = match (preferred, &choices[preferred].flow) {
            (_, Some(flow)) if flow.is_on_device => Reason::Bodies,
            (0, _) => Reason::FirstClaim,
            _ => Reason::Shapes,
        };
        NodeState {
            stays: is_planned || is_heavy || choices.len() < 2,
            choices,
            preferred,
            at: preferred,
            work: 0,
            is_planned,
            reason: preference,
            preference,
        }
    }

    fn device(&self) -> usize {
        self.choices[self.at].device
    }

    fn place_of(&self, device: usize) -> Option<usize> {
        self.choices.iter().position(|choice| choice.device == device)
    }
}

/// What a placement costs.
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

/// A value on the search.
#[derive(Clone, Default)]
struct ValueState {
    /// The memory that it is made in; none for what the caller gives and for constants, whose
    /// copies do not count.
    memory: Option<usize>,
    bytes: u64,
    /// Whether the caller gets it from the host's memory, so that it is copied there in any case.
    is_output: bool,
    /// How often it is read in each memory.
    readers: SmallVec<[u32; 2]>,
}

impl ValueState {
    /// How many copies are made of it.
    fn copies(&self) -> u64 {
        let Some(home) = self.memory else { return 0 };
        let elsewhere = |memory: usize| memory != home && self.readers[memory] > 0;
        let devices = (HOST + 1..self.readers.len()).filter(|memory| elsewhere(*memory)).count();
        // Between two devices the way leads over the host.
        let at_host = home != HOST && !self.is_output && (elsewhere(HOST) || devices > 0);
        devices as u64 + u64::from(at_host)
    }
}

/// The place of the host's memory among the memories.
const HOST: usize = 0;

/// A placement, and what it costs.
pub(super) struct PlacementSearch<'a> {
    graph: &'a Graph,
    nodes: Vec<NodeState>,
    values: Vec<ValueState>,
    /// The memories, the host's first.
    known: Vec<DeviceId>,
    /// By device: the place of its memory.
    memories: Vec<usize>,
    producers: Vec<Option<NodeId>>,
    totals: Totals,
}

impl<'a> PlacementSearch<'a> {
    /// Each node where it is preferred.
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
                let costs = state.choices.iter().filter_map(|choice| Some(choice.flow.as_ref()?.cost));
                state.work = match costs.clone().max().zip(costs.min()) {
                    Some((most, least)) => most - least,
                    None => estimates.work(node),
                };
            }
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

    /// Where what the graph is given lies, and where what it gives is read.
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

    /// The place of a memory among those of the devices.
    fn index_of(&self, memory: DeviceId) -> usize {
        self.known.iter().position(|known| *known == memory).unwrap_or(HOST)
    }

    /// What the placement costs.
    pub(super) fn score(&self) -> u64 {
        self.totals.score()
    }

    /// The first device with memory of its own that a node is on.
    pub(super) fn first_device(&self) -> Option<usize> {
        let devices = self.nodes.iter().map(NodeState::device);
        devices.filter(|device| self.memories[*device] != HOST).min()
    }

    /// Whether a value is computed in a memory; one that no node computes, whether it is read
    /// there.
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

    fn inputs(&self, node: usize) -> impl Iterator<Item = (usize, ValueId)> + use<'a> {
        let inputs = self.graph.nodes[node].inputs.iter().enumerate();
        inputs.filter_map(|(position, value)| Some((position, (*value)?)))
    }

    /// The memory in which a node reads an input, by one of its choices.
    fn read_in(&self, node: usize, at: usize, position: usize) -> usize {
        let Choice { device, claim, flow } = &self.nodes[node].choices[at];
        match flow.as_ref().and_then(|flow| flow.inputs.get(position)) {
            Some(memory) => self.index_of(*memory),
            None if claim.host_inputs.contains(&position) => HOST,
            None => self.memories[*device],
        }
    }

    /// The memory in which a node makes an output.
    fn made_in(&self, node: usize, at: usize, position: usize) -> usize {
        let Choice { device, flow, .. } = &self.nodes[node].choices[at];
        let memory = flow.as_ref().and_then(|flow| flow.outputs.get(position));
        memory.map_or(self.memories[*device], |memory| self.index_of(*memory))
    }

    /// What a node reads, and in which memory: its inputs, and what its subgraphs capture.
    fn reads(&self, node: usize, at: usize) -> SmallVec<[(ValueId, usize); 4]> {
        let inputs = self.inputs(node).map(|(position, value)| (value, self.read_in(node, at, position)));
        let flow = self.nodes[node].choices[at].flow.iter();
        let captures = flow.flat_map(|flow| &flow.bodies).flat_map(|body| &body.captures);
        let captured = captures.flat_map(|capture| {
            capture.memories.iter().map(|memory| (capture.outer, self.index_of(*memory)))
        });
        inputs.chain(captured).collect()
    }

    /// Changes what is known of a value, and the totals with it.
    fn change(&mut self, value: ValueId, change: impl FnOnce(&mut ValueState)) {
        let held = &mut self.values[value.index()];
        let before = held.copies();
        change(held);
        let after = held.copies();
        self.totals.copies = self.totals.copies + after - before;
        self.totals.bytes = self.totals.bytes + after * held.bytes - before * held.bytes;
    }

    /// Takes another claim for a node.
    fn put(&mut self, node: usize, at: usize) {
        let state = &self.nodes[node];
        let (old, work) = (state.at, |at| if at == state.preferred { 0 } else { state.work });
        self.totals.work = self.totals.work + work(at) - work(old);
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

    /// Moves clusters until none gets cheaper.
    fn improve(&mut self) {
        // Small clusters come first, so that those between them have grown together when it is their
        // turn: a few rounds do. More could take time beyond proportion to the nodes.
        const MOST_ROUNDS: usize = 8;
        for _ in 0..MOST_ROUNDS {
            let before = self.totals.score();
            // What can come to a device that the session prefers comes first: it may be what keeps
            // others there.
            for way in [Direction::Earlier, Direction::Later] {
                for grouping in [Grouping::Chains, Grouping::Readers] {
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

    /// Moves an cluster to the device where the placement costs least, if that is less than where it
    /// is.
    fn move_if_cheaper(&mut self, cluster: &[usize], way: Direction) {
        let Some(&first) = cluster.first() else { return };
        let (home, before) = (self.nodes[first].device(), self.totals);
        let mut best: Option<(usize, Totals)> = None;
        let others = match way {
            Direction::Earlier => 0..home,
            Direction::Later => home + 1..self.memories.len(),
        };
        for device in others {
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

    /// Puts all nodes on a device; false where it does not claim all of them.
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

    /// The clusters of nodes that may move, small ones first.
    fn clusters(&self, grouping: Grouping) -> Vec<Vec<usize>> {
        let count = self.nodes.len();
        let mut joined = DisjointSets((0..count).collect());
        let by_reader = if grouping == Grouping::Readers { self.values.len() } else { 0 };
        let mut last_reader = vec![None; by_reader * self.memories.len()];
        for node in (0..count).filter(|node| !self.nodes[*node].stays) {
            let device = self.nodes[node].device();
            for (position, value) in self.inputs(node) {
                let maker = self.producers[value.index()].map(NodeId::index);
                let is_alike =
                    |maker: &usize| !self.nodes[*maker].stays && self.nodes[*maker].device() == device;
                if let Some(maker) = maker.filter(is_alike) {
                    joined.join(maker, node);
                }
                let here = self.read_in(node, self.nodes[node].at, position);
                let is_copy = self.values[value.index()].memory.is_some_and(|home| home != here);
                if grouping == Grouping::Readers && is_copy {
                    let last = &mut last_reader[value.index() * self.memories.len() + device];
                    if let Some(other) = last.replace(node) {
                        joined.join(other, node);
                    }
                }
            }
        }
        let mut clusters: Vec<Vec<usize>> = vec![Vec::new(); count];
        for node in (0..count).filter(|node| !self.nodes[*node].stays) {
            clusters[joined.root(node)].push(node);
        }
        clusters.retain(|cluster| !cluster.is_empty());
        clusters.sort_by_key(Vec::len);
        clusters
    }

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

/// The outputs of a node that somebody may read, with their positions.
fn outputs(node: &Node) -> impl Iterator<Item = (usize, ValueId)> + use<'_> {
    node.outputs.iter().enumerate().filter_map(|(position, value)| Some((position, (*value)?)))
}

/// Where to in the session's order of devices.
#[derive(Clone, Copy)]
enum Direction {
    Earlier,
    Later,
}

/// What hangs together.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Grouping {
    /// Nodes that read what others of them make.
    Chains,
    /// Those that read the same copy, too: one of them alone could not save it.
    Readers,
}

/// Sets of nodes, each known by its first node.
struct DisjointSets(Vec<usize>);

impl DisjointSets {
    fn root(&mut self, node: usize) -> usize {
        let mut at = node;
        while self.0[at] != at {
            self.0[at] = self.0[self.0[at]];
            at = self.0[at];
        }
        at
    }

    fn join(&mut self, one: usize, other: usize) {
        let (one, other) = (self.root(one), self.root(other));
        self.0[one.max(other)] = one.min(other);
    }
}
