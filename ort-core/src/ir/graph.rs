//! Graph, nodes, values and subgraphs.

use std::collections::HashMap;
use std::sync::Arc;

use indexmap::IndexMap;
use rustc_hash::FxBuildHasher;
use smallvec::SmallVec;

use super::{Attribute, Attributes, ValueType};
use crate::spec::{NodeRequirement, OpSpec, SymTensor};
use crate::tensor::Tensor;
use crate::{Error, Result, Within, error};

/// Identifies a value of one graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub u32);

impl ValueId {
    /// Returns the index into tables with one entry per value.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Identifies a node of one graph: its index in [`Graph::nodes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u32);

impl NodeId {
    /// Returns the index into [`Graph::nodes`].
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Static facts about a value.
#[derive(Clone, Debug, Default)]
pub struct ValueInfo {
    /// The name in the model, unique within the graph.
    pub name: Arc<str>,
    /// The type.
    pub ty: ValueType,
    /// The elements of a small integer tensor as expressions, if inference tracks them.
    pub symbolic: Option<Arc<SymTensor>>,
}

/// A value of the enclosing graph that a subgraph reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capture {
    /// The value in the enclosing graph.
    pub outer: ValueId,
    /// The corresponding value in the subgraph.
    pub inner: ValueId,
}

/// A graph owned by a node, such as the body of `Loop` or a branch of `If`.
#[derive(Clone, Debug)]
pub struct Subgraph {
    /// The attribute that holds it, such as `then_branch`.
    pub attr: &'static str,
    /// The graph. Captured values are not among its inputs.
    pub graph: Graph,
    /// The values it captures from the enclosing graph.
    pub captures: Vec<Capture>,
}

/// Inputs or outputs of a node by position; `None` if omitted. Two are stored inline: in a large
/// graph, separate heap lists would cost more than the nodes themselves.
pub type ValueIds = SmallVec<[Option<ValueId>; 2]>;

/// An operation of a graph.
#[derive(Clone, Debug)]
pub struct Node {
    /// The name, unique within the graph.
    pub name: Arc<str>,
    /// The operator's record.
    pub spec: &'static OpSpec,
    /// Inputs by position. `None` is an omitted optional input.
    pub inputs: ValueIds,
    /// Outputs by position. `None` is an output without a reader.
    pub outputs: ValueIds,
    /// Attributes, with defaults filled in.
    pub attrs: Attributes,
    /// Subgraphs that the node may run.
    pub subgraphs: Vec<Subgraph>,
}

impl Node {
    /// Returns all values of the enclosing graph that the node reads: its inputs and the captures
    /// of its subgraphs.
    pub fn reads(&self) -> impl Iterator<Item = ValueId> + '_ {
        let captured = self.subgraphs.iter().flat_map(|sub| sub.captures.iter().map(|capture| capture.outer));
        self.inputs.iter().flatten().copied().chain(captured)
    }

    /// Returns the node as error messages name it: `node 'conv_1' (Conv)`.
    pub fn place(&self) -> String {
        format!("node '{}' ({})", self.name, self.spec.name)
    }

    /// Returns the subgraph held by the attribute `attr`, with its index.
    pub fn subgraph(&self, attr: &str) -> Option<(usize, &Subgraph)> {
        self.subgraphs.iter().enumerate().find(|(_, subgraph)| subgraph.attr == attr)
    }
}

/// A graph of nodes in topological order.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    /// The name in the model.
    pub name: String,
    /// The nodes. Each reads only values computed before it.
    pub nodes: Vec<Node>,
    values: Vec<ValueInfo>,
    /// Values that the caller provides.
    pub inputs: Vec<ValueId>,
    /// Values returned to the caller.
    pub outputs: Vec<ValueId>,
    /// Constants: weights and other values known before a run.
    pub constants: IndexMap<ValueId, Tensor, FxBuildHasher>,
    /// Default values of inputs that the caller may omit.
    pub input_defaults: HashMap<ValueId, Tensor>,
    /// The inference error of a broken branch. It is raised only if the branch is taken.
    pub broken: Option<Error>,
    /// What the nodes that a model was loaded with require of sizes that inference did not compare.
    /// Rewrites keep the list, because it holds whatever becomes of the nodes.
    pub requirements: Vec<NodeRequirement>,
}

impl Graph {
    /// Returns an empty graph.
    pub fn new(name: impl Into<String>) -> Graph {
        Graph { name: name.into(), ..Graph::default() }
    }

    /// Adds a value without a producer.
    pub fn add_value(&mut self, name: impl Into<Arc<str>>, ty: ValueType) -> ValueId {
        let id = ValueId(self.values.len() as u32);
        self.values.push(ValueInfo { name: name.into(), ty, symbolic: None });
        id
    }

    /// Creates a node with `outputs` new values as its outputs. Adds the values to the graph, but
    /// not the node.
    pub(crate) fn new_node(
        &mut self,
        spec: &'static OpSpec,
        name: Arc<str>,
        inputs: &[Option<ValueId>],
        attrs: &[(&str, Attribute)],
        outputs: usize,
    ) -> Result<(Node, Vec<ValueId>)> {
        let given = attrs.iter().map(|(name, value)| (name.to_string(), value.clone())).collect();
        let attrs = Attributes::new(spec, given).within(|| format!("node '{name}' ({})", spec.name))?;
        let value = |index| self.add_value(format!("{name}.{index}"), ValueType::Unknown);
        let values: Vec<ValueId> = (0..outputs).map(value).collect();
        let outputs = values.iter().copied().map(Some).collect();
        let node = Node { name, spec, inputs: inputs.into(), outputs, attrs, subgraphs: Vec::new() };
        Ok((node, values))
    }

    /// Returns a graph of one of the nodes alone, which has no subgraphs, with the constants that
    /// it reads.
    pub(crate) fn of_node(&self, node: &Node) -> Graph {
        let mut alone = Graph::new(&*self.name);
        let mut node = node.clone();
        let mut added: HashMap<ValueId, ValueId> = HashMap::new();
        for id in node.inputs.iter_mut().chain(&mut node.outputs).flatten() {
            *id = *added.entry(*id).or_insert_with(|| {
                let own = ValueId(alone.values.len() as u32);
                alone.values.push(self.value(*id).clone());
                alone.constants.extend(self.constants.get(id).map(|tensor| (own, tensor.clone())));
                own
            });
        }
        alone.nodes.push(node);
        alone
    }

    /// Adds a constant.
    pub fn add_constant(&mut self, name: impl Into<Arc<str>>, tensor: Tensor) -> ValueId {
        let shape = tensor.shape().iter().map(|&size| crate::dim::Dim::constant(size as i64)).collect();
        let id = self.add_value(name, ValueType::tensor(tensor.dtype(), Some(shape)));
        self.constants.insert(id, tensor);
        id
    }

    /// Returns the facts about a value.
    #[allow(
        clippy::indexing_slicing,
        reason = "ids are made by `add_value` of the same graph, which never forgets one"
    )]
    pub fn value(&self, id: ValueId) -> &ValueInfo {
        &self.values[id.index()]
    }

    /// Returns the facts about a value, for changes.
    #[allow(
        clippy::indexing_slicing,
        reason = "ids are made by `add_value` of the same graph, which never forgets one"
    )]
    pub fn value_mut(&mut self, id: ValueId) -> &mut ValueInfo {
        &mut self.values[id.index()]
    }

    /// Returns the number of values. Ids run from 0.
    pub fn value_count(&self) -> usize {
        self.values.len()
    }

    /// Returns all value ids.
    pub fn value_ids(&self) -> impl Iterator<Item = ValueId> + use<> {
        (0..self.values.len() as u32).map(ValueId)
    }

    /// Returns the value of this name, by linear search.
    pub fn find_value(&self, name: &str) -> Option<ValueId> {
        self.value_ids().find(|&id| &*self.value(id).name == name)
    }

    /// Returns the producer of each value, by value index.
    pub fn producers(&self) -> Vec<Option<NodeId>> {
        let mut producers = vec![None; self.values.len()];
        for (index, node) in self.nodes.iter().enumerate() {
            // Of two producers the later one is kept. `verify` refuses such a graph.
            for output in node.outputs.iter().flatten() {
                producers
                    .get_mut(output.index())
                    .into_iter()
                    .for_each(|node| *node = Some(NodeId(index as u32)));
            }
        }
        producers
    }

    /// Returns the readers of each value (captures included), by value index, each reader once.
    pub fn consumers(&self) -> Vec<Vec<NodeId>> {
        let mut consumers: Vec<Vec<NodeId>> = vec![Vec::new(); self.values.len()];
        for (index, node) in self.nodes.iter().enumerate() {
            let id = NodeId(index as u32);
            for value in node.reads() {
                let Some(readers) = consumers.get_mut(value.index()) else { continue };
                // Nodes are visited in order, so a repeated read of this node is the last entry.
                if readers.last() != Some(&id) {
                    readers.push(id);
                }
            }
        }
        consumers
    }

    /// Sorts the nodes topologically, keeping the given order where possible. For a cycle, the
    /// error names up to five of the nodes that cannot be ordered, on the cycle or after it.
    #[allow(
        clippy::indexing_slicing,
        reason = "nodes are counted here, and tables by value have an entry for each"
    )]
    pub fn sort(&mut self) -> Result<()> {
        let producers = self.producers();
        let consumers = self.consumers();
        // Kahn's algorithm. `waits` counts the producers that are not ordered yet, each once.
        let mut waits: Vec<usize> = self
            .nodes
            .iter()
            .map(|node| {
                // Inputs and constants have no producer and are ready from the start.
                let mut needed: Vec<NodeId> = node.reads().filter_map(|v| producers[v.index()]).collect();
                needed.sort_unstable();
                needed.dedup();
                needed.len()
            })
            .collect();
        // Ready nodes leave in index order, which keeps a graph that is already sorted unchanged.
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
                // A reader counted this producer once, and each producer leaves `ready` once, so no
                // count wraps.
                waits[reader.index()] -= 1;
                if waits[reader.index()] == 0 {
                    ready.insert(reader.index());
                }
            }
        }
        if order.len() < self.nodes.len() {
            // Nodes after a cycle wait as well, although they are not on it.
            let stuck = (0..self.nodes.len()).filter(|index| waits[*index] > 0);
            let names: Vec<String> = stuck.take(5).map(|index| self.nodes[index].place()).collect();
            return Err(error!(Fail, "the graph is not acyclic: a cycle leads through {}", names.join(", ")));
        }
        let mut nodes: Vec<Option<Node>> = std::mem::take(&mut self.nodes).into_iter().map(Some).collect();
        self.nodes = order.into_iter().filter_map(|index| nodes[index].take()).collect();
        Ok(())
    }

    /// Returns the bytes of all constants, including those of subgraphs.
    pub fn weight_bytes(&self) -> usize {
        let own: usize = self.constants.values().map(Tensor::byte_count).sum();
        let inner: usize =
            self.nodes.iter().flat_map(|node| &node.subgraphs).map(|sub| sub.graph.weight_bytes()).sum();
        own + inner
    }
}
