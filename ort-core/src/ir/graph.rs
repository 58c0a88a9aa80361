//! Nodes, values and subgraphs.

use std::collections::HashMap;
use std::sync::Arc;

use indexmap::IndexMap;
use rustc_hash::FxBuildHasher;
use smallvec::SmallVec;

use super::{Attributes, ValueType};
use crate::spec::{OpSpec, SymTensor};
use crate::tensor::Tensor;
use crate::{Error, Result, error};

/// A value of one graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub u32);

impl ValueId {
    /// Its place in a table with an entry for each value.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A node of one graph: its place in [`Graph::nodes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u32);

impl NodeId {
    /// Its place in [`Graph::nodes`].
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// What is known of a value before anything runs.
#[derive(Clone, Debug, Default)]
pub struct ValueInfo {
    /// Its name in the model; unique within its graph.
    pub name: Arc<str>,
    /// Its type.
    pub ty: ValueType,
    /// The elements of a small integer tensor, as far as inference knows them.
    pub symbolic: Option<Arc<SymTensor>>,
}

/// A value of an enclosing graph that a subgraph reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capture {
    /// The value in the enclosing graph.
    pub outer: ValueId,
    /// The value that stands for it in the subgraph.
    pub inner: ValueId,
}

/// A graph inside a node, as `If`, `Loop` and `Scan` have.
#[derive(Clone, Debug)]
pub struct Subgraph {
    /// The attribute that holds it, for example `then_branch`.
    pub attr: &'static str,
    /// The graph; captured values are not among its inputs.
    pub graph: Graph,
    /// What it reads of the enclosing graph.
    pub captures: Vec<Capture>,
}

/// What a node reads or writes, by position; what is left out is none. Two lie in the node itself:
/// a large graph would spend more on lists of their own than on its nodes.
pub type ValueIds = SmallVec<[Option<ValueId>; 2]>;

/// One operation.
#[derive(Clone, Debug)]
pub struct Node {
    /// Its name; unique within its graph.
    pub name: Arc<str>,
    /// The operator's record.
    pub spec: &'static OpSpec,
    /// Inputs by position; an optional one that is left out is none.
    pub inputs: ValueIds,
    /// Outputs by position; one that nobody wants is none.
    pub outputs: ValueIds,
    /// Attributes, defaults filled in.
    pub attrs: Attributes,
    /// Graphs it may run.
    pub subgraphs: Vec<Subgraph>,
}

impl Node {
    /// All values of the enclosing graph that the node reads: inputs, and captures of its
    /// subgraphs.
    pub fn reads(&self) -> impl Iterator<Item = ValueId> + '_ {
        let captured = self.subgraphs.iter().flat_map(|sub| sub.captures.iter().map(|capture| capture.outer));
        self.inputs.iter().flatten().copied().chain(captured)
    }

    /// How errors name it: `node 'conv_1' (Conv)`.
    pub fn place(&self) -> String {
        format!("node '{}' ({})", self.name, self.spec.name)
    }

    /// The subgraph held by the attribute `attr`.
    pub fn subgraph(&self, attr: &str) -> Option<(usize, &Subgraph)> {
        self.subgraphs.iter().enumerate().find(|(_, subgraph)| subgraph.attr == attr)
    }
}

/// A graph of nodes in topological order.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    /// Its name in the model.
    pub name: String,
    /// The nodes; each reads only what comes before it.
    pub nodes: Vec<Node>,
    values: Vec<ValueInfo>,
    /// Values that the caller gives.
    pub inputs: Vec<ValueId>,
    /// Values that the caller gets.
    pub outputs: Vec<ValueId>,
    /// Values known now: weights and other constants.
    pub constants: IndexMap<ValueId, Tensor, FxBuildHasher>,
    /// Inputs that the caller may leave out, with the value they then have.
    pub input_defaults: HashMap<ValueId, Tensor>,
    /// Why inference refused it, where it is a branch that another may stand in for: an error only
    /// once it is taken.
    pub broken: Option<Error>,
}

impl Graph {
    /// An empty graph.
    pub fn new(name: impl Into<String>) -> Graph {
        Graph { name: name.into(), ..Graph::default() }
    }

    /// Adds a value that nothing produces yet.
    pub fn add_value(&mut self, name: impl Into<Arc<str>>, ty: ValueType) -> ValueId {
        let id = ValueId(self.values.len() as u32);
        self.values.push(ValueInfo { name: name.into(), ty, symbolic: None });
        id
    }

    /// Adds a constant.
    pub fn add_constant(&mut self, name: impl Into<Arc<str>>, tensor: Tensor) -> ValueId {
        let shape = tensor.shape().iter().map(|&size| crate::dim::Dim::constant(size as i64)).collect();
        let id = self.add_value(name, ValueType::tensor(tensor.dtype(), Some(shape)));
        self.constants.insert(id, tensor);
        id
    }

    /// What is known of a value.
    #[allow(
        clippy::indexing_slicing,
        reason = "ids are made by `add_value` of the same graph, which never forgets one"
    )]
    pub fn value(&self, id: ValueId) -> &ValueInfo {
        &self.values[id.index()]
    }

    /// What is known of a value, to change.
    #[allow(
        clippy::indexing_slicing,
        reason = "ids are made by `add_value` of the same graph, which never forgets one"
    )]
    pub fn value_mut(&mut self, id: ValueId) -> &mut ValueInfo {
        &mut self.values[id.index()]
    }

    /// The number of values; ids run from 0.
    pub fn value_count(&self) -> usize {
        self.values.len()
    }

    /// All value ids.
    pub fn value_ids(&self) -> impl Iterator<Item = ValueId> + use<> {
        (0..self.values.len() as u32).map(ValueId)
    }

    /// The value with this name.
    pub fn find_value(&self, name: &str) -> Option<ValueId> {
        self.value_ids().find(|&id| &*self.value(id).name == name)
    }

    /// The node that produces each value, by value index.
    pub fn producers(&self) -> Vec<Option<NodeId>> {
        let mut producers = vec![None; self.values.len()];
        for (index, node) in self.nodes.iter().enumerate() {
            for output in node.outputs.iter().flatten() {
                producers
                    .get_mut(output.index())
                    .into_iter()
                    .for_each(|node| *node = Some(NodeId(index as u32)));
            }
        }
        producers
    }

    /// The nodes that read each value (captures included), by value index, each node once.
    pub fn consumers(&self) -> Vec<Vec<NodeId>> {
        let mut consumers: Vec<Vec<NodeId>> = vec![Vec::new(); self.values.len()];
        for (index, node) in self.nodes.iter().enumerate() {
            let id = NodeId(index as u32);
            for value in node.reads() {
                let Some(readers) = consumers.get_mut(value.index()) else { continue };
                if readers.last() != Some(&id) {
                    readers.push(id);
                }
            }
        }
        consumers
    }

    /// Sorts the nodes so that each reads only what comes before it, keeping the given order where
    /// it can. A cycle is an error that names its nodes.
    #[allow(
        clippy::indexing_slicing,
        reason = "nodes are counted here, and tables by value have an entry for each"
    )]
    pub fn sort(&mut self) -> Result<()> {
        let producers = self.producers();
        let consumers = self.consumers();
        let mut waits: Vec<usize> = self
            .nodes
            .iter()
            .map(|node| {
                let mut needed: Vec<NodeId> = node.reads().filter_map(|v| producers[v.index()]).collect();
                needed.sort_unstable();
                needed.dedup();
                needed.len()
            })
            .collect();
        let ready = waits.iter().enumerate().filter(|(_, count)| **count == 0);
        let mut ready: std::collections::BTreeSet<usize> = ready.map(|(index, _)| index).collect();
        let mut order = Vec::with_capacity(self.nodes.len());
        while let Some(index) = ready.pop_first() {
            order.push(index);
            let mut woken: Vec<NodeId> = Vec::new();
            for output in self.nodes[index].outputs.iter().flatten() {
                woken.extend(&consumers[output.index()]);
            }
            woken.sort_unstable();
            woken.dedup();
            for reader in woken {
                waits[reader.index()] -= 1;
                if waits[reader.index()] == 0 {
                    ready.insert(reader.index());
                }
            }
        }
        if order.len() < self.nodes.len() {
            let stuck = (0..self.nodes.len()).filter(|index| waits[*index] > 0);
            let names: Vec<String> = stuck.take(5).map(|index| self.nodes[index].place()).collect();
            return Err(error!(InvalidGraph, "the graph has a cycle through {}", names.join(", ")));
        }
        let mut nodes: Vec<Option<Node>> = std::mem::take(&mut self.nodes).into_iter().map(Some).collect();
        self.nodes = order.into_iter().filter_map(|index| nodes[index].take()).collect();
        Ok(())
    }

    /// Bytes of all constants, those of subgraphs included.
    pub fn weight_bytes(&self) -> usize {
        let own: usize = self.constants.values().map(Tensor::byte_count).sum();
        let inner: usize =
            self.nodes.iter().flat_map(|node| &node.subgraphs).map(|sub| sub.graph.weight_bytes()).sum();
        own + inner
    }
}
