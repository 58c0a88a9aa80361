//! Where each node runs, of the devices that claim it: islands move where that saves more copies than it costs work.
//!
//! Each node begins where the session prefers it: on the first device that claims it, or on the host where it computes
//! shapes. A placement costs the work of the nodes that are not where they are preferred, and the copies of values that
//! nodes of one memory make and nodes of another read; a value is copied once into each memory. What the caller gives and gets does not
//! count: it comes from the host and goes there wherever the nodes are, so that a device keeps a model that it can run alone. Constants are
//! uploaded once, when the session is built. What a subgraph gets and gives does count: other nodes make and read it, in each round of a loop.
//!
//! An island is what hangs together of the nodes on one device that may move. Islands are tried on the other
//! devices that claim all of their nodes, small ones first, until none gets cheaper. Products and convolutions never move, nor does control
//! flow: a device is there for them.

#![allow(
    clippy::indexing_slicing,
    reason = "nodes and values are those of one graph, and every table has an entry for each"
)]

use std::sync::Arc;

use ort_alloc::DeviceId;
use smallvec::SmallVec;

use super::claim::on_shapes;
use super::cost::{COPIED_BYTE, COPY, Estimates};
use super::{Claim, Device, Island, NodeView, Partition, Reason};
use crate::ir::{Graph, NodeId, ValueId};
use crate::spec::Cost;
use crate::{Result, error};

/// Whose a graph is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The model's: what the caller gives and gets does not count as copied.
    Model,
    /// A node's: what it is given and gives are values of other nodes, in the host's memory.
    Subgraph,
}

/// Chooses the device of each node; `claimed` is the first that claims it.
pub(super) fn settle(
    graph: &Graph,
    devices: &[Arc<dyn Device>],
    scope: Scope,
    claimed: Vec<(usize, Claim)>,
) -> Partition {
    let mut memories = devices.iter().map(|device| device.memory());
    let first = memories.next();
    if memories.all(|memory| Some(memory) == first) {
        // Nothing is ever copied.
        let reasons = vec![Reason::FirstClaim; claimed.len()];
        return Partition { nodes: claimed, reasons };
    }
    let claims = graph.nodes.iter().zip(claimed).map(|(node, first)| {
        let view = NodeView { graph, node };
        let later = devices.iter().enumerate().skip(first.0 + 1);
        let later = later.filter_map(|(index, device)| Some((index, device.claim(&view).ok()?)));
        std::iter::once(first).chain(later).collect()
    });
    let mut board = Board::new(graph, devices, scope, claims.collect());
    board.improve();
    board.partition()
}

/// What it costs to run each node on the device at its place in `places`, in the bytes that the host could read or write meanwhile: what a
/// session makes small. Compare it only with that of other places for the same nodes. The arithmetic of products and convolutions is left out, as
/// a session never moves them.
///
/// ```
/// # use ort_core::{Result, ep::{Device, Scope, placement_cost}, ir::Graph};
/// # use std::sync::Arc;
/// fn is_cheaper_on_the_second(graph: &Graph, devices: &[Arc<dyn Device>]) -> Result<bool> {
///     let all_on = |device| placement_cost(graph, devices, Scope::Model, &vec![device; graph.nodes.len()]);
///     Ok(all_on(1)? < all_on(0)?)
/// }
/// ```
///
/// # Errors
///
/// A node has no place, or one of a device that does not claim it.
pub fn placement_cost(
    graph: &Graph,
    devices: &[Arc<dyn Device>],
    scope: Scope,
    places: &[usize],
) -> Result<u64> {
    let unclaimed = |device: Option<usize>, place: String| {
        let problem = match device {
            Some(device) => error!(InvalidArgument, "device {device} does not claim {place}"),
            None => error!(InvalidArgument, "there is no place for {place}"),
        };
        problem.help("name a device for each node that claims it")
    };
    let mut claims = Vec::with_capacity(graph.nodes.len());
    for (index, node) in graph.nodes.iter().enumerate() {
        let view = NodeView { graph, node };
        let own = devices.iter().enumerate();
        let own: Claims =
            own.filter_map(|(device, opened)| Some((device, opened.claim(&view).ok()?))).collect();
        let device = places.get(index).copied();
        if !own.iter().any(|(claiming, _)| Some(*claiming) == device) {
            return Err(unclaimed(device, node.place()));
        }
        claims.push(own);
    }
    let mut board = Board::new(graph, devices, scope, claims);
    for (node, &device) in (0..graph.nodes.len()).zip(places) {
        board.put_all(&[node], device);
    }
    Ok(board.totals.score())
}

/// The claims for one node: each with the place of its device, in the session's order.
type Claims = SmallVec<[(usize, Claim); 2]>;

/// A node on the board.
struct Piece {
    claims: Claims,
    /// The claim that the session prefers, and the one that is taken so far: their places in `claims`.
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

impl Piece {
    fn new(graph: &Graph, node: NodeId, devices: &[Arc<dyn Device>], claims: Claims) -> Piece {
        let node = &graph.nodes[node.index()];
        let on_host = |(device, _): &(usize, Claim)| devices[*device].memory() == DeviceId::HOST;
        let on_shapes = on_shapes(graph, node);
        let host = claims.iter().position(on_host).filter(|_| on_shapes);
        let preferred = host.unwrap_or(0);
        let known = |id: &ValueId| {
            let elements = graph.value(*id).symbolic.as_ref().map(|symbolic| symbolic.elements.iter());
            elements.is_some_and(|mut elements| !elements.any(|element| element.has_unknown()))
        };
        let mut outputs = node.outputs.iter().flatten();
        let is_planned = host.is_some() && !node.outputs.is_empty() && outputs.all(known);
        let is_heavy = node.spec.cost == Cost::Compute || !node.subgraphs.is_empty();
        let preference = if preferred == 0 { Reason::FirstClaim } else { Reason::Shapes };
        Piece {
            stays: is_planned || is_heavy || claims.len() < 2,
            claims,
            preferred,
            at: preferred,
            work: 0,
            is_planned,
            reason: preference,
            preference,
        }
    }

    fn device(&self) -> usize {
        self.claims[self.at].0
    }

    fn place_of(&self, device: usize) -> Option<usize> {
        self.claims.iter().position(|(index, _)| *index == device)
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

/// A value on the board.
#[derive(Clone, Default)]
struct Held {
    /// The memory that it is made in; none for what the caller gives and for constants, whose copies do not count.
    memory: Option<usize>,
    bytes: u64,
    /// Whether the caller gets it from the host's memory, so that it is copied there in any case.
    is_output: bool,
    /// How often it is read in each memory.
    readers: SmallVec<[u32; 2]>,
}

impl Held {
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
struct Board<'a> {
    graph: &'a Graph,
    pieces: Vec<Piece>,
    values: Vec<Held>,
    /// By device: the place of its memory.
    memories: Vec<usize>,
    producers: Vec<Option<NodeId>>,
    totals: Totals,
}

impl<'a> Board<'a> {
    /// Each node where it is preferred.
    fn new(graph: &'a Graph, devices: &[Arc<dyn Device>], scope: Scope, claims: Vec<Claims>) -> Board<'a> {
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
        let nodes = (0u32..).map(NodeId).zip(claims);
        let pieces = nodes.map(|(node, claims)| Piece::new(graph, node, devices, claims)).collect();
        let unread = Held { readers: SmallVec::from_elem(0, known.len()), ..Held::default() };
        let values = vec![unread; graph.value_count()];
        let (producers, totals) = (graph.producers(), Totals::default());
        let mut board = Board { graph, pieces, values, memories, producers, totals };
        board.set_up(scope);
        board
    }

    fn set_up(&mut self, scope: Scope) {
        let graph = self.graph;
        let mut estimates = Estimates::new(graph);
        for (index, node) in graph.nodes.iter().enumerate() {
            let memory = self.memories[self.pieces[index].device()];
            for output in node.outputs.iter().flatten() {
                let held = &mut self.values[output.index()];
                (held.memory, held.bytes) = (Some(memory), estimates.bytes(*output));
            }
            if self.pieces[index].claims.len() > 1 {
                self.pieces[index].work = estimates.work(node);
            }
            if self.pieces[index].is_planned {
                continue;
            }
            let captured = node.subgraphs.iter().flat_map(|subgraph| &subgraph.captures);
            for capture in captured {
                self.values[capture.outer.index()].readers[HOST] += 1;
            }
            for (position, value) in self.inputs(index) {
                let memory = self.read_in(index, self.pieces[index].at, position);
                self.values[value.index()].readers[memory] += 1;
            }
        }
        for output in &graph.outputs {
            let held = &mut self.values[output.index()];
            match scope {
                Scope::Model => held.is_output = true,
                Scope::Subgraph => held.readers[HOST] += 1,
            }
        }
        for value in graph.value_ids().filter(|_| scope == Scope::Subgraph) {
            if self.producers[value.index()].is_none() && !graph.constants.contains_key(&value) {
                let held = &mut self.values[value.index()];
                (held.memory, held.bytes) = (Some(HOST), estimates.bytes(value));
            }
        }
        for held in &self.values {
            self.totals.copies += held.copies();
            self.totals.bytes += held.copies() * held.bytes;
        }
    }

    fn inputs(&self, node: usize) -> impl Iterator<Item = (usize, ValueId)> + use<'a> {
        let inputs = self.graph.nodes[node].inputs.iter().enumerate();
        inputs.filter_map(|(position, value)| Some((position, (*value)?)))
    }

    /// The memory in which a node reads an input, by one of its claims.
    fn read_in(&self, node: usize, at: usize, position: usize) -> usize {
        let (device, claim) = &self.pieces[node].claims[at];
        if claim.host_inputs.contains(&position) { HOST } else { self.memories[*device] }
    }

    /// Changes what is known of a value, and the totals with it.
    fn change(&mut self, value: ValueId, change: impl FnOnce(&mut Held)) {
        let held = &mut self.values[value.index()];
        let before = held.copies();
        change(held);
        let after = held.copies();
        self.totals.copies = self.totals.copies + after - before;
        self.totals.bytes = self.totals.bytes + after * held.bytes - before * held.bytes;
    }

    /// Takes another claim for a node.
    fn put(&mut self, node: usize, at: usize) {
        let piece = &self.pieces[node];
        let (old, work) = (piece.at, |at| if at == piece.preferred { 0 } else { piece.work });
        self.totals.work = self.totals.work + work(at) - work(old);
        if !piece.is_planned {
            for (position, value) in self.inputs(node) {
                let (from, to) = (self.read_in(node, old, position), self.read_in(node, at, position));
                self.change(value, |held| {
                    held.readers[from] -= 1;
                    held.readers[to] += 1;
                });
            }
        }
        let memory = self.memories[self.pieces[node].claims[at].0];
        let graph = self.graph;
        for output in graph.nodes[node].outputs.iter().flatten() {
            self.change(*output, |held| held.memory = Some(memory));
        }
        self.pieces[node].at = at;
    }

    /// Moves islands until none gets cheaper.
    fn improve(&mut self) {
        // Small islands come first, so that those between them have grown together when it is their turn: a few rounds do.
        // More could take time beyond proportion to the nodes.
        const MOST_ROUNDS: usize = 8;
        for _ in 0..MOST_ROUNDS {
            let before = self.totals.score();
            // What can come to a device that the session prefers comes first: it may be what keeps others there.
            for way in [Way::Earlier, Way::Later] {
                for grouping in [Grouping::Chains, Grouping::Readers] {
                    if self.totals.copies == 0 {
                        return;
                    }
                    for island in self.islands(grouping) {
                        self.move_if_cheaper(&island, way);
                    }
                }
            }
            if self.totals.score() == before {
                return;
            }
        }
    }

    /// Moves an island to the device where the placement costs least, if that is less than where it is.
    fn move_if_cheaper(&mut self, island: &[usize], way: Way) {
        let Some(&first) = island.first() else { return };
        let (home, before) = (self.pieces[first].device(), self.totals);
        let mut best: Option<(usize, Totals)> = None;
        let others = match way {
            Way::Earlier => 0..home,
            Way::Later => home + 1..self.memories.len(),
        };
        for device in others {
            if !self.put_all(island, device) {
                continue;
            }
            let least = best.map_or(before, |(_, totals)| totals);
            if self.totals.score() < least.score() {
                best = Some((device, self.totals));
            }
        }
        let (device, after) = best.unwrap_or((home, before));
        self.put_all(island, device);
        if device == home {
            return;
        }
        let moved = Island {
            nodes: island.len(),
            copies: before.copies.cast_signed() - after.copies.cast_signed(),
            bytes: before.bytes.cast_signed() - after.bytes.cast_signed(),
        };
        tracing::debug!(node = &*self.graph.nodes[first].name, "{moved}");
        for &node in island {
            let piece = &mut self.pieces[node];
            piece.reason = if piece.at == piece.preferred { piece.preference } else { Reason::Island(moved) };
        }
    }

    /// Puts all nodes on a device; false where it does not claim all of them.
    fn put_all(&mut self, nodes: &[usize], device: usize) -> bool {
        let claims = |node: &usize| self.pieces[*node].place_of(device).is_some();
        if !nodes.iter().all(claims) {
            return false;
        }
        for &node in nodes {
            if let Some(at) = self.pieces[node].place_of(device) {
                self.put(node, at);
            }
        }
        true
    }

    /// The islands of nodes that may move, small ones first.
    fn islands(&self, grouping: Grouping) -> Vec<Vec<usize>> {
        let count = self.pieces.len();
        let mut joined = Joined((0..count).collect());
        let by_reader = if grouping == Grouping::Readers { self.values.len() } else { 0 };
        let mut last_reader = vec![None; by_reader * self.memories.len()];
        for node in (0..count).filter(|node| !self.pieces[*node].stays) {
            let device = self.pieces[node].device();
            for (position, value) in self.inputs(node) {
                let maker = self.producers[value.index()].map(NodeId::index);
                let is_alike =
                    |maker: &usize| !self.pieces[*maker].stays && self.pieces[*maker].device() == device;
                if let Some(maker) = maker.filter(is_alike) {
                    joined.join(maker, node);
                }
                let here = self.read_in(node, self.pieces[node].at, position);
                let is_copy = self.values[value.index()].memory.is_some_and(|home| home != here);
                if grouping == Grouping::Readers && is_copy {
                    let last = &mut last_reader[value.index() * self.memories.len() + device];
                    if let Some(other) = last.replace(node) {
                        joined.join(other, node);
                    }
                }
            }
        }
        let mut islands: Vec<Vec<usize>> = vec![Vec::new(); count];
        for node in (0..count).filter(|node| !self.pieces[*node].stays) {
            islands[joined.root(node)].push(node);
        }
        islands.retain(|island| !island.is_empty());
        islands.sort_by_key(Vec::len);
        islands
    }

    fn partition(self) -> Partition {
        let reasons = self.pieces.iter().map(|piece| piece.reason).collect();
        let nodes = self.pieces.iter().map(|piece| piece.claims[piece.at]).collect();
        Partition { nodes, reasons }
    }
}

/// Where to in the session's order of devices.
#[derive(Clone, Copy)]
enum Way {
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
struct Joined(Vec<usize>);

impl Joined {
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
