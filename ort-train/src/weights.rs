//! Weight canonicalization and tying: each weight becomes one constant of the main graph.
//!
//! A file may hold one parameter in several places: bodies of `Loop`, `If` and `Scan` have copies
//! of what they capture, and exporters fold the transpose of a tied embedding. A file may also hold
//! several parameters in one: exporters merge equal initializers, such as the statistics and scales
//! of fresh normalizations. This module undoes the copies for captures and the merging for
//! statistics. It reports the other places where either may have happened, and ties or unties
//! weights on request.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use ort_core::dtype::{DType, TypeSet};
use ort_core::ir::{Attribute, Capture, Graph, GraphBuilder, Node, NodeId, Subgraph, ValueId};
use ort_core::session::Model;
use ort_core::tensor::Tensor;
use ort_core::{Result, ensure};

use crate::TrainingOptions;
use crate::equal_tensors::{Pair, equal_pairs};
use crate::options::Patterns;
use crate::values::is_standard;

/// The inputs of `BatchNormalization` for the running mean and variance.
const STATISTICS: [usize; 2] = [3, 4];

/// A weight that several nodes read, and that is therefore trained as one parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedWeight {
    /// The name of the weight.
    pub name: String,
    /// The names of the nodes that read it, in graph order.
    pub readers: Vec<String>,
    /// Whether several normalizations scale or shift by it. Then it may be merged by the exporter,
    /// because the initializers of fresh normalizations are all equal.
    pub by_normalizations: bool,
}

/// Two weights with equal values that are trained separately.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EqualWeights {
    /// The one that comes first in the file.
    pub first: String,
    /// The other one.
    pub second: String,
    /// Whether the second is the transpose of the first.
    pub transposed: bool,
}

/// A graph with every weight as a constant or input default of its own, outside of bodies.
pub(crate) struct TrainableGraph {
    pub(crate) graph: Graph,
    /// The weights among its constants. The others are outputs of `Constant` nodes.
    pub(crate) weights: HashSet<ValueId>,
    /// The weights that are not parameters, according to a mark in the file or their names.
    pub(crate) buffers: HashSet<ValueId>,
}

impl TrainableGraph {
    /// Prepares the graph of a model, with weights tied and untied as the options ask.
    ///
    /// # Errors
    ///
    /// A pattern of weights to tie or untie has no effect.
    pub(crate) fn of(model: &Model, options: &TrainingOptions) -> Result<TrainableGraph> {
        let mut graph = model.graph().clone();
        let initializers = Initializers::of(model);
        lift_weights(&mut graph, &initializers);
        merge_aliases(&mut graph, &initializers);
        let given = graph.constants.keys().chain(graph.input_defaults.keys());
        let weights: HashSet<ValueId> =
            given.filter(|id| initializers.contains(&graph.value(**id).name)).copied().collect();
        let marked: HashSet<&str> = model.info().buffers.iter().map(String::as_str).collect();
        let is_buffer = |name: &str| marked.contains(name) || is_name_of_constant(name);
        let buffers = weights.iter().filter(|id| is_buffer(&graph.value(**id).name)).copied().collect();
        let mut copies = Copies::of(&graph, weights, buffers);
        copies.separate_statistics(&mut graph);
        // Untying comes first, and `tie` leaves its copies alone: they still hold equal values.
        copies.untie(&mut graph, &options.untied)?;
        let graph = tie(graph, &options.tied, &copies.separated)?;
        Ok(TrainableGraph { graph, weights: copies.weights, buffers: copies.buffers })
    }
}

/// Whether PyTorch's exporters give this name to a constant in the model's code, and never to a
/// parameter: the output of a `Constant` node that became an initializer, or a lifted tensor.
fn is_name_of_constant(name: &str) -> bool {
    let last = name.rsplit('/').next().unwrap_or(name);
    let node = last.strip_suffix("_output_0").filter(|_| name.starts_with('/'));
    let is_node = |node: &str| {
        let number = node.strip_prefix("ConstantOfShape").or_else(|| node.strip_prefix("Constant"));
        // An example is `/layer/Constant_3_output_0`.
        number.is_some_and(|number| number.is_empty() || number.strip_prefix('_').is_some_and(is_number))
    };
    let last = name.rsplit('.').next().unwrap_or(name);
    let lifted = ["lifted_tensor_", "c_lifted_tensor_", "_lifted_tensor_constant", "_tensor_constant"];
    node.is_some_and(is_node) || lifted.iter().any(|it| last.strip_prefix(it).is_some_and(is_number))
}

/// Whether an exporter generated this name, from a number or from the node that reads a folded
/// value.
fn is_made_up(name: &str) -> bool {
    let of_reader = name.strip_prefix("onnx::").and_then(|name| name.rsplit_once('_'));
    let number = of_reader.map(|(_, number)| number).or_else(|| name.strip_prefix("val_"));
    // Examples are `onnx::MatMul_123`, `val_7` and `/layer/Mul_output_0`.
    number.is_some_and(is_number) || name.starts_with('/') && name.ends_with("_output_0")
}

/// Whether a text consists of decimal digits.
fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns the weights among `trained` that may be constants of the model's code: exporters
/// generated their names, and only elementwise arithmetic reads them. They may also be folded
/// parameters, such as a reshaped scale.
pub(crate) fn doubtful_weights(graph: &Graph, trained: &[ValueId]) -> Vec<String> {
    const ARITHMETIC: [&str; 7] = ["Add", "Div", "Max", "Min", "Mul", "Pow", "Sub"];
    let consumers = graph.consumers();
    let is_arithmetic = |id: &NodeId| {
        let node = graph.nodes.get(id.index());
        node.is_some_and(|node| ARITHMETIC.iter().any(|op| is_standard(node, op)))
    };
    let is_doubtful = |id: &ValueId| {
        let readers = consumers.get(id.index()).map_or(&[][..], Vec::as_slice);
        is_made_up(&graph.value(*id).name) && !readers.is_empty() && readers.iter().all(is_arithmetic)
    };
    trained.iter().filter(|id| is_doubtful(id)).map(|id| graph.value(*id).name.to_string()).collect()
}

/// The names of the initializers of a model.
struct Initializers<'m>(HashSet<&'m str>);

impl<'m> Initializers<'m> {
    /// Collects the names.
    fn of(model: &'m Model) -> Initializers<'m> {
        Initializers(model.info().initializers.iter().map(String::as_str).collect())
    }

    /// Whether a constant of this name is a weight. If the model lists no initializers, all its
    /// constants are.
    fn contains(&self, name: &str) -> bool {
        self.0.is_empty() || self.0.contains(name)
    }
}

/// Hoists the weights in control-flow bodies to the surrounding graph, and makes the bodies capture
/// them.
fn lift_weights(graph: &mut Graph, initializers: &Initializers<'_>) {
    if graph.nodes.iter().all(|node| node.subgraphs.is_empty()) {
        return;
    }
    let is_weight = |(id, _): &(&ValueId, &Tensor)| initializers.contains(&graph.value(**id).name);
    let own = graph.constants.iter().filter(is_weight);
    let mut known: HashMap<Memory, ValueId> =
        own.filter_map(|(id, tensor)| Some((Memory::of(tensor)?, *id))).collect();
    let mut names = UniqueNames::of(graph);
    let mut nodes = std::mem::take(&mut graph.nodes);
    let mut bodies: Vec<&mut Subgraph> = nodes.iter_mut().flat_map(|node| &mut node.subgraphs).collect();
    // Innermost bodies first: each call lifts weights by one level.
    bodies.iter_mut().for_each(|subgraph| lift_weights(&mut subgraph.graph, initializers));
    // First we register all weights by memory. A copy under another name, such as that of an
    // `Identity` which loading resolved, may come before the one with the weight's name.
    for subgraph in &bodies {
        for (inner, tensor) in &subgraph.graph.constants {
            let name = &subgraph.graph.value(*inner).name;
            let Some(memory) = Memory::of(tensor).filter(|_| initializers.contains(name)) else { continue };
            let names = &mut names;
            known.entry(memory).or_insert_with(|| graph.add_constant(names.unique(name), tensor.clone()));
        }
    }
    for subgraph in bodies {
        let captures = &mut subgraph.captures;
        subgraph.graph.constants.retain(|inner, tensor| {
            let outer = Memory::of(tensor).and_then(|memory| known.get(&memory));
            captures.extend(outer.map(|outer| Capture { outer: *outer, inner: *inner }));
            outer.is_none()
        });
    }
    graph.nodes = nodes;
}

/// Redirects the readers of a weight's copies to the weight itself. Exporters merge equal
/// initializers and write the others as `Identity` nodes, which loading resolves to constants in
/// the weight's memory.
fn merge_aliases(graph: &mut Graph, initializers: &Initializers<'_>) {
    let (mut known, mut instead) = (HashMap::new(), HashMap::new());
    let is_weight = |id: &ValueId| initializers.contains(&graph.value(*id).name);
    // The first weight in the graph's order stands for all constants in its memory.
    for (id, tensor) in graph.constants.iter().filter(|(id, _)| is_weight(id)) {
        if let Some(memory) = Memory::of(tensor) {
            known.entry(memory).or_insert(*id);
        }
    }
    // A graph output keeps its name, so it is not merged.
    let others = graph.constants.iter().filter(|(id, _)| !is_weight(id) && !graph.outputs.contains(id));
    for (id, tensor) in others {
        let weight = Memory::of(tensor).and_then(|memory| known.get(&memory));
        instead.extend(weight.map(|weight| (*id, *weight)));
    }
    redirect(graph, &instead);
    graph.constants.retain(|value, _| !instead.contains_key(value));
}

/// Replaces captures of constants in control-flow bodies by the constants themselves, so that
/// kernels can pack them and rewrites can fold them.
pub(crate) fn sink_constants(graph: &mut Graph) {
    let constants = &graph.constants;
    for subgraph in graph.nodes.iter_mut().flat_map(|node| &mut node.subgraphs) {
        let inner = &mut subgraph.graph;
        subgraph.captures.retain(|capture| match constants.get(&capture.outer) {
            Some(tensor) => {
                inner.constants.insert(capture.inner, tensor.clone());
                false
            }
            None => true,
        });
        sink_constants(inner);
    }
}

/// The identity of a tensor's memory. Constants that the loader copied into a body share it.
#[derive(PartialEq, Eq, Hash)]
struct Memory {
    address: usize,
    shape: Vec<usize>,
    dtype: DType,
}

impl Memory {
    /// Returns `None` for types that are not trained, and for empty tensors, which have no address.
    fn of(tensor: &Tensor) -> Option<Memory> {
        let is_float = TypeSet::FLOATS.contains(tensor.dtype());
        let view = tensor.view();
        let bytes = view.bytes().ok().filter(|bytes| is_float && !bytes.is_empty())?;
        let (address, shape) = (bytes.as_ptr().addr(), tensor.shape().to_vec());
        Some(Memory { address, shape, dtype: tensor.dtype() })
    }
}

/// The names in a graph, for picking new ones.
struct UniqueNames {
    taken: HashSet<Arc<str>>,
    /// The next suffix to try for each name that was taken. Without it N requests for one name
    /// would take O(N^2) probes.
    numbers: HashMap<Arc<str>, usize>,
}

impl UniqueNames {
    /// Collects the names of all values.
    fn of(graph: &Graph) -> UniqueNames {
        let taken = graph.value_ids().map(|id| graph.value(id).name.clone()).collect();
        UniqueNames { taken, numbers: HashMap::new() }
    }

    /// Returns the name, with a numeric suffix if it is taken.
    fn unique(&mut self, name: &str) -> Arc<str> {
        let mut found: Arc<str> = name.into();
        if !self.taken.contains(name) {
            self.taken.insert(found.clone());
            return found;
        }
        let number = self.numbers.entry(found.clone()).or_insert(2);
        while self.taken.contains(&found) {
            found = format!("{name}.{number}").into();
            *number += 1;
        }
        self.taken.insert(found.clone());
        found
    }
}

/// Returns the running statistics of all batch normalizations, including those in bodies.
pub(crate) fn all_running_statistics(graph: &Graph) -> HashSet<ValueId> {
    let mut all: HashSet<ValueId> = graph.nodes.iter().flat_map(running_statistics).collect();
    for subgraph in graph.nodes.iter().flat_map(|node| &node.subgraphs) {
        let inner = all_running_statistics(&subgraph.graph);
        let captured = subgraph.captures.iter().filter(|capture| inner.contains(&capture.inner));
        all.extend(captured.map(|capture| capture.outer));
    }
    all
}

/// Returns the running statistics of a node, if it is a batch normalization.
fn running_statistics(node: &Node) -> impl Iterator<Item = ValueId> {
    let positions = STATISTICS.into_iter().filter(|_| is_standard(node, "BatchNormalization"));
    positions.filter_map(|input| node.inputs.get(input).copied().flatten())
}

/// Copy-on-demand of weights for the nodes that read them.
struct Copies {
    names: UniqueNames,
    /// The number of readers of each value: node inputs, captures and graph outputs.
    reads: Vec<usize>,
    /// The weights, including copies.
    weights: HashSet<ValueId>,
    /// The weights that are not parameters.
    buffers: HashSet<ValueId>,
    /// Untied weights and their copies.
    separated: HashSet<ValueId>,
}

impl Copies {
    /// Counts the readers of all values.
    fn of(graph: &Graph, weights: HashSet<ValueId>, buffers: HashSet<ValueId>) -> Copies {
        let mut reads = vec![0; graph.value_count()];
        for read in graph.nodes.iter().flat_map(Node::reads).chain(graph.outputs.iter().copied()) {
            reads.get_mut(read.index()).into_iter().for_each(|count| *count += 1);
        }
        Copies { names: UniqueNames::of(graph), reads, weights, buffers, separated: HashSet::new() }
    }

    /// Gives each batch normalization running statistics of its own, because it updates them.
    fn separate_statistics(&mut self, graph: &mut Graph) {
        for index in 0..graph.nodes.len() {
            let running: HashSet<ValueId> =
                graph.nodes.get(index).into_iter().flat_map(running_statistics).collect();
            self.copy_reads(graph, index, |_, read| running.contains(&read));
        }
    }

    /// Gives each reader of a matching weight a copy of its own.
    fn untie(&mut self, graph: &mut Graph, patterns: &[String]) -> Result<()> {
        // Each pattern is tried alone, so that the error names the one without effect.
        for pattern in patterns {
            let asked = Patterns::new(std::slice::from_ref(pattern));
            let mut found = false;
            for index in 0..graph.nodes.len() {
                let is_asked = |graph: &Graph, read: ValueId| asked.matches(&graph.value(read).name);
                let copied = self.copy_reads(graph, index, is_asked);
                found |= !copied.is_empty();
                self.separated.extend(copied.into_iter().flatten());
            }
            ensure!(
                found,
                InvalidArgument,
                help = "name a weight that several nodes read",
                "no weight that matches '{pattern}' is read by several nodes, so there is nothing to untie"
            );
        }
        Ok(())
    }

    /// Makes the inputs and captures of a node read copies of the constants that `is_asked`
    /// selects, unless the node is their only reader. Returns pairs of constant and copy.
    fn copy_reads(
        &mut self,
        graph: &mut Graph,
        index: usize,
        is_asked: impl Fn(&Graph, ValueId) -> bool,
    ) -> Vec<[ValueId; 2]> {
        let reads: Vec<ValueId> = graph.nodes.get(index).into_iter().flat_map(Node::reads).collect();
        let copies: Vec<Option<ValueId>> = reads
            .iter()
            .map(|read| if is_asked(graph, *read) { self.copy_of(graph, *read) } else { None })
            .collect();
        if let Some(node) = graph.nodes.get_mut(index) {
            let captures = node.subgraphs.iter_mut().flat_map(|subgraph| &mut subgraph.captures);
            // In the order of `Node::reads`, so that each slot meets its own copy.
            let slots = node.inputs.iter_mut().flatten().chain(captures.map(|capture| &mut capture.outer));
            slots.zip(&copies).for_each(|(slot, copy)| *slot = copy.unwrap_or(*slot));
        }
        reads.into_iter().zip(copies).filter_map(|(read, copy)| Some([read, copy?])).collect()
    }

    /// Copies a constant for one of its readers, if it has others. The last reader keeps the
    /// original.
    fn copy_of(&mut self, graph: &mut Graph, value: ValueId) -> Option<ValueId> {
        let reads = self.reads.get_mut(value.index()).filter(|reads| **reads > 1)?;
        let tensor = graph.constants.get(&value).or_else(|| graph.input_defaults.get(&value)).cloned()?;
        *reads -= 1;
        let name = self.names.unique(&graph.value(value).name.clone());
        let copy = graph.add_constant(name, tensor);
        for kind in [&mut self.weights, &mut self.buffers] {
            if kind.contains(&value) {
                kind.insert(copy);
            }
        }
        self.reads.resize(graph.value_count(), 0);
        self.reads.get_mut(copy.index()).into_iter().for_each(|reads| *reads = 1);
        Some(copy)
    }
}

/// Merges weights that match a pattern and have equal values, including transposed ones. Weights in
/// `separated` stay apart.
fn tie(graph: Graph, patterns: &[String], separated: &HashSet<ValueId>) -> Result<Graph> {
    if patterns.is_empty() {
        return Ok(graph);
    }
    // Running statistics never merge: each normalization updates its own.
    let statistics = all_running_statistics(&graph);
    let mut defaults: Vec<_> = graph.input_defaults.iter().collect();
    // The map has no order, and the first weight of a pair is the one that stays.
    defaults.sort_by_key(|(id, _)| **id);
    let weights = graph.constants.iter().chain(defaults);
    let weights = weights.filter(|(id, _)| !statistics.contains(id) && !separated.contains(id));
    let candidates: Vec<(ValueId, Tensor)> = weights.map(|(id, tensor)| (*id, tensor.clone())).collect();
    let asked = Patterns::new(patterns);
    let is_asked = |id: ValueId| asked.matches(&graph.value(id).name);
    let mut pairs = equal_pairs(&candidates, |_| true);
    pairs.retain(|pair| is_asked(pair.first) && is_asked(pair.second));
    // The pairs are of all patterns together, but each must take part in one.
    for pattern in patterns {
        let asked = Patterns::new(std::slice::from_ref(pattern));
        let is_asked = |id: ValueId| asked.matches(&graph.value(id).name);
        ensure!(
            pairs.iter().any(|pair| is_asked(pair.first) || is_asked(pair.second)),
            InvalidArgument,
            help = "give patterns that match two weights with equal elements",
            "no weight that matches '{pattern}' has the same elements as another one, so there is nothing to tie"
        );
    }
    let outputs = graph.outputs.clone();
    let mut builder = GraphBuilder::extend(graph);
    builder.set_scope("tied");
    let mut instead: HashMap<ValueId, ValueId> = HashMap::with_capacity(pairs.len());
    for Pair { first, second, transposed } in pairs {
        let order = [("perm", Attribute::Ints(vec![1, 0]))];
        let one = if transposed { builder.node("Transpose", &[first], &order)? } else { first };
        instead.insert(second, one);
    }
    let mut graph = builder.finish(&outputs)?;
    redirect(&mut graph, &instead);
    graph.constants.retain(|value, _| !instead.contains_key(value));
    graph.input_defaults.retain(|value, _| !instead.contains_key(value));
    graph.inputs.retain(|value| !instead.contains_key(value));
    // A new `Transpose` was appended behind its readers.
    graph.sort()?;
    Ok(graph)
}

/// Redirects all readers of each key of `instead` to its value.
fn redirect(graph: &mut Graph, instead: &HashMap<ValueId, ValueId>) {
    let now = |id: &mut ValueId| *id = instead.get(id).copied().unwrap_or(*id);
    for node in &mut graph.nodes {
        node.inputs.iter_mut().flatten().for_each(now);
        let captures = node.subgraphs.iter_mut().flat_map(|subgraph| &mut subgraph.captures);
        captures.for_each(|capture| now(&mut capture.outer));
    }
    graph.outputs.iter_mut().for_each(now);
}

/// Returns the weights among `trained` that several nodes read.
pub(crate) fn shared_weights(graph: &Graph, trained: &[ValueId]) -> Vec<SharedWeight> {
    let consumers = graph.consumers();
    let mut found = Vec::new();
    for &weight in trained {
        let readers = consumers.get(weight.index()).map_or(&[][..], Vec::as_slice);
        if readers.len() < 2 {
            continue;
        }
        let nodes: Vec<&Node> = readers.iter().filter_map(|id| graph.nodes.get(id.index())).collect();
        let normalizes = |node: &&&Node| node.spec.name.ends_with("Normalization");
        found.push(SharedWeight {
            name: graph.value(weight).name.to_string(),
            by_normalizations: nodes.iter().filter(normalizes).count() > 1,
            readers: nodes.iter().map(|node| node.name.to_string()).collect(),
        });
    }
    found
}

/// Returns the weights among `trained` whose values equal those of an earlier one. Tensors filled
/// with a single value, such as fresh biases and scales, are left out.
pub(crate) fn equal_weights(graph: &Graph, trained: &[(ValueId, Tensor)]) -> Vec<EqualWeights> {
    let name = |id: ValueId| graph.value(id).name.to_string();
    let pairs = equal_pairs(trained, |content| content.varies()).into_iter();
    pairs
        .map(|pair| EqualWeights {
            first: name(pair.first),
            second: name(pair.second),
            transposed: pair.transposed,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_constants_and_names_that_exporters_make_up() {
        let constants = [
            "/Constant_output_0",
            "/encoder/layer.0/Constant_12_output_0",
            "/mask/ConstantOfShape_output_0",
            "lifted_tensor_0",
            "decoder._tensor_constant3",
        ];
        let others = [
            "fc.weight",
            "Constant_output_0",
            "/ConstantPadding_output_0",
            "/Transpose_output_0",
            "lifted_tensor_scale",
            "onnx::MatMul_12",
            "val_7",
        ];
        assert!(constants.iter().all(|name| is_name_of_constant(name)));
        assert!(!others.iter().any(|name| is_name_of_constant(name)));
        assert!(["onnx::Mul_12", "val_7", "/Transpose_output_0"].iter().all(|name| is_made_up(name)));
        assert!(!["fc.weight", "val_scale", "onnx::Mul", "value_7"].iter().any(|name| is_made_up(name)));
    }
}
