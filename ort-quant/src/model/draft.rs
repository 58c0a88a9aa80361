//! A model message that is being changed, and the weights that it will have.

use std::collections::{BTreeMap, BTreeSet};

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::onnx::proto::attribute_proto::AttributeType;
use ort_core::onnx::proto::tensor_proto::DataLocation;
use ort_core::onnx::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto,
};
use ort_core::onnx::{Source, to_proto};
use ort_core::session::Model;

use super::weights::Job;

/// Before this IR version, files had to list every weight as an input, too. They are constants all
/// the same.
const FIRST_WITH_CONSTANTS: i64 = 4;

/// The model, in editing.
pub(super) struct Draft {
    /// Its nodes are [`Draft::nodes`] and its initializers [`Draft::initializers`] meanwhile.
    pub(super) message: ModelProto,
    pub(super) nodes: Vec<NodeProto>,
    /// The float model's initializers by name, in the order of the file.
    pub(super) initializers: Vec<TensorProto>,
    places: BTreeMap<String, usize>,
    /// The initializers that something of the same name replaces.
    replaced: BTreeSet<String>,
    /// The initializers that were those of bodies, or computed by nodes.
    moved: BTreeSet<String>,
    /// The initializers to add.
    pub(super) parts: Vec<Part>,
    pub(super) jobs: Vec<Job>,
    /// Names of values and of nodes, each in use.
    values: BTreeSet<String>,
    node_names: BTreeSet<String>,
    /// The names of inputs. One may also be an initializer, which then is a default.
    inputs: BTreeSet<String>,
}

/// An initializer to add.
#[derive(Clone)]
pub(super) struct Part {
    /// Everything but the data, if that is computed.
    pub(super) header: TensorProto,
    /// The job and which of its results this is.
    pub(super) from: Option<(usize, usize)>,
}

impl Draft {
    /// Starts from a model. `least_opset` is the oldest operator set that has the new operators; an
    /// older model is upgraded.
    pub(super) fn new(source: &Source, model: &Model, least_opset: i64) -> Result<Draft> {
        let mut message = source.decode()?;
        let standard = |opset: &&OperatorSetIdProto| matches!(opset.domain(), "" | "ai.onnx");
        let opset = message.opset_import.iter().find(standard).map_or(1, |opset| opset.version());
        if opset < least_opset {
            message = to_proto(model.graph(), model.info())?;
            let oldest = message.opset_import.iter_mut().find(|opset| opset.domain().is_empty());
            oldest.into_iter().for_each(|opset| opset.version = opset.version.max(Some(least_opset)));
        }
        let is_old = message.ir_version() < FIRST_WITH_CONSTANTS;
        let graph = message.graph.get_or_insert_default();
        let nodes = std::mem::take(&mut graph.node);
        let initializers = std::mem::take(&mut graph.initializer);
        if is_old {
            let names: BTreeSet<&str> = initializers.iter().map(|tensor| tensor.name()).collect();
            graph.input.retain(|input| !names.contains(input.name()));
            message.ir_version = Some(FIRST_WITH_CONSTANTS);
        }
        let graph = message.graph.get_or_insert_default();
        let mut values = BTreeSet::new();
        let mut node_names = BTreeSet::new();
        note_names(graph, &nodes, &initializers, &mut values, &mut node_names);
        let inputs = graph.input.iter().map(|input| input.name().to_string()).collect();
        let places = initializers.iter().enumerate();
        let places = places.map(|(place, tensor)| (tensor.name().to_string(), place)).collect();
        let (parts, jobs) = (Vec::new(), Vec::new());
        let (replaced, moved) = (BTreeSet::new(), BTreeSet::new());
        Ok(Draft {
            message,
            nodes,
            initializers,
            places,
            replaced,
            moved,
            parts,
            jobs,
            values,
            node_names,
            inputs,
        })
    }

    /// The constant of this name. `None` for a computed value, and for a default, which a caller
    /// may override.
    pub(super) fn constant(&self, name: &str) -> Option<&TensorProto> {
        if self.inputs.contains(name) {
            return None;
        }
        self.initializers.get(*self.places.get(name)?)
    }

    /// Adds a constant, which rules find from now on.
    pub(super) fn add_constant(&mut self, tensor: TensorProto) {
        self.places.insert(tensor.name().to_string(), self.initializers.len());
        self.initializers.push(tensor);
    }

    /// Adds a constant that nodes computed before. It stays only if something reads it.
    pub(super) fn add_folded(&mut self, tensor: TensorProto) {
        self.moved.insert(tensor.name().to_string());
        self.add_constant(tensor);
    }

    /// Moves the weights of a body, those of at least `least_rank` axes, to the model's graph,
    /// where bodies can read them. They get new names, because those of a body may be in use in
    /// another one.
    pub(super) fn take_weights(&mut self, graph: &mut GraphProto, least_rank: usize) {
        let bound = graph.input.iter().chain(&graph.output).map(|value| value.name().to_string());
        let bound: BTreeSet<String> = bound.collect();
        let mut renamed = Vec::new();
        for tensor in std::mem::take(&mut graph.initializer) {
            if !is_weight(&tensor, least_rank) || bound.contains(tensor.name()) {
                graph.initializer.push(tensor);
                continue;
            }
            let name = self.value_name(tensor.name());
            rename_reads(&mut graph.node, tensor.name(), &name);
            self.moved.insert(name.clone());
            self.add_constant(TensorProto { name: Some(name), ..tensor });
        }
        for node in std::mem::take(&mut graph.node) {
            match constant_weight(&node, least_rank).filter(|(output, _)| !bound.contains(*output)) {
                Some((output, tensor)) => {
                    let name = self.value_name(output);
                    renamed.push((output.to_string(), name.clone()));
                    self.moved.insert(name.clone());
                    self.add_constant(TensorProto { name: Some(name), ..tensor.clone() });
                }
                None => graph.node.push(node),
            }
        }
        for (from, to) in renamed {
            rename_reads(&mut graph.node, &from, &to);
        }
    }

    /// Drops an initializer when the rewrite ends, because a new one has its name.
    pub(super) fn replace(&mut self, name: &str) {
        self.replaced.insert(name.to_string());
    }

    /// Drops initializers that were replaced, and those that no node reads any more, of those that
    /// nodes read before.
    pub(super) fn drop_unread(&mut self, read_before: &BTreeSet<String>) {
        let mut read = reads(&self.nodes);
        let graph = self.message.graph.get_or_insert_default();
        read.extend(graph.output.iter().map(|output| output.name().to_string()));
        let (replaced, moved) = (&self.replaced, &self.moved);
        self.initializers.retain(|tensor| {
            let name = tensor.name();
            let was_read = read_before.contains(name) || moved.contains(name);
            !replaced.contains(name) && (read.contains(name) || !was_read)
        });
        // The places are those of the list before.
        self.places.clear();
        for (place, tensor) in self.initializers.iter().enumerate() {
            self.places.insert(tensor.name().to_string(), place);
        }
    }

    /// The bytes of the initializers that are in data files.
    pub(super) fn external_bytes(&self) -> usize {
        let is_outside = |tensor: &&TensorProto| tensor.data_location() == DataLocation::External as i32;
        let bytes = |tensor: &TensorProto| {
            let size = DType::from_onnx(tensor.data_type()).and_then(DType::byte_size).unwrap_or(1);
            tensor.dims.iter().map(|size| *size as usize).product::<usize>() * size
        };
        self.initializers.iter().filter(is_outside).map(bytes).sum()
    }

    /// Takes a name for a value: the wanted one, with a number if it is in use.
    pub(super) fn value_name(&mut self, wanted: &str) -> String {
        free_name(&mut self.values, wanted)
    }

    /// Takes a name for a node.
    pub(super) fn node_name(&mut self, wanted: &str) -> String {
        free_name(&mut self.node_names, wanted)
    }

    /// Makes sure that the model imports a domain.
    pub(super) fn import(&mut self, domain: &str, version: i64) {
        let imports = &mut self.message.opset_import;
        if !imports.iter().any(|opset| opset.domain() == domain) {
            let (domain, version) = (Some(domain.to_string()), Some(version));
            imports.push(OperatorSetIdProto { domain, version });
        }
    }
}

/// Whether a tensor is floating point and has at least `least_rank` axes.
fn is_weight(tensor: &TensorProto, least_rank: usize) -> bool {
    let is_float = [DType::F32, DType::F16].map(DType::onnx_code).contains(&tensor.data_type());
    is_float && tensor.dims.len() >= least_rank
}

/// The output and the tensor of a `Constant` node that is a weight.
fn constant_weight(node: &NodeProto, least_rank: usize) -> Option<(&str, &TensorProto)> {
    if node.op_type() != "Constant" || !matches!(node.domain(), "" | "ai.onnx") {
        return None;
    }
    let tensor = node.attribute.iter().find_map(|attribute| attribute.t.as_deref())?;
    let tensor = Some(tensor).filter(|tensor| is_weight(tensor, least_rank))?;
    Some((node.output.first()?, tensor))
}

/// Takes a name that is not in use.
fn free_name(taken: &mut BTreeSet<String>, wanted: &str) -> String {
    let mut name = wanted.to_string();
    let mut number = 1;
    while !taken.insert(name.clone()) {
        number += 1;
        name = format!("{wanted}_{number}");
    }
    name
}

fn note_names(
    graph: &GraphProto,
    nodes: &[NodeProto],
    initializers: &[TensorProto],
    values: &mut BTreeSet<String>,
    names: &mut BTreeSet<String>,
) {
    values.extend(graph.input.iter().chain(&graph.output).map(|value| value.name().to_string()));
    values.extend(initializers.iter().map(|tensor| tensor.name().to_string()));
    let sparse = graph.sparse_initializer.iter().filter_map(|tensor| tensor.values.as_ref());
    values.extend(sparse.map(|tensor| tensor.name().to_string()));
    for node in nodes {
        values.extend(node.input.iter().chain(&node.output).cloned());
        names.insert(node.name().to_string());
        for graph in subgraphs(node) {
            note_names(graph, &graph.node, &graph.initializer, values, names);
        }
    }
}

/// All values that nodes read, including those in subgraphs.
pub(super) fn reads(nodes: &[NodeProto]) -> BTreeSet<String> {
    let mut read = BTreeSet::new();
    note_reads(nodes, &mut read);
    read
}

fn note_reads(nodes: &[NodeProto], read: &mut BTreeSet<String>) {
    for node in nodes {
        read.extend(node.input.iter().cloned());
        for graph in subgraphs(node) {
            note_reads(&graph.node, read);
            // An outer value may be the output of a subgraph.
            read.extend(graph.output.iter().map(|output| output.name().to_string()));
        }
    }
}

/// Whether a node of a graph or of its bodies is of this kind.
pub(super) fn any_node(nodes: &[NodeProto], is: &dyn Fn(&NodeProto) -> bool) -> bool {
    nodes.iter().any(|node| is(node) || subgraphs(node).any(|graph| any_node(&graph.node, is)))
}

/// Renames a value that nodes read, and that their bodies do.
pub(super) fn rename_reads(nodes: &mut [NodeProto], from: &str, to: &str) {
    for node in nodes {
        node.input.iter_mut().filter(|input| *input == from).for_each(|input| *input = to.to_string());
        for attribute in &mut node.attribute {
            for graph in attribute.g.as_deref_mut().into_iter().chain(&mut attribute.graphs) {
                rename_reads(&mut graph.node, from, to);
            }
        }
    }
}

/// The bodies of a node.
pub(super) fn subgraphs(node: &NodeProto) -> impl Iterator<Item = &GraphProto> {
    node.attribute.iter().flat_map(|attribute| attribute.g.as_deref().into_iter().chain(&attribute.graphs))
}

/// The bodies of a node, to change them.
pub(super) fn subgraphs_mut(node: &mut NodeProto) -> impl Iterator<Item = &mut GraphProto> {
    let attributes = node.attribute.iter_mut();
    attributes.flat_map(|attribute| attribute.g.as_deref_mut().into_iter().chain(&mut attribute.graphs))
}

/// Whether a node is of an operator of the standard.
pub(super) fn is_standard(node: &NodeProto, operator: &str) -> bool {
    node.op_type() == operator && matches!(node.domain(), "" | "ai.onnx")
}

/// Creates a node.
pub(super) fn node(
    (domain, op): (&str, &str),
    name: String,
    inputs: &[&str],
    outputs: &[&str],
    attributes: Vec<AttributeProto>,
) -> NodeProto {
    NodeProto {
        input: inputs.iter().map(ToString::to_string).collect(),
        output: outputs.iter().map(ToString::to_string).collect(),
        name: Some(name),
        op_type: Some(op.to_string()),
        domain: (!domain.is_empty()).then(|| domain.to_string()),
        attribute: attributes,
        ..NodeProto::default()
    }
}

/// Creates an attribute with an integer.
pub(super) fn integer(name: &str, value: i64) -> AttributeProto {
    AttributeProto {
        name: Some(name.to_string()),
        i: Some(value),
        r#type: Some(AttributeType::Int as i32),
        ..AttributeProto::default()
    }
}

/// The integer of an attribute.
pub(super) fn integer_of(node: &NodeProto, name: &str, default: i64) -> i64 {
    node.attribute.iter().find(|attribute| attribute.name() == name).map_or(default, |found| found.i())
}

/// The number of an attribute.
pub(super) fn float_of(node: &NodeProto, name: &str, default: f32) -> f32 {
    node.attribute.iter().find(|attribute| attribute.name() == name).map_or(default, |found| found.f())
}

/// The integers of an attribute; none without it.
pub(super) fn integers_of<'n>(node: &'n NodeProto, name: &str) -> &'n [i64] {
    let found = node.attribute.iter().find(|attribute| attribute.name() == name);
    found.map(|found| &found.ints[..]).unwrap_or_default()
}

/// The text of an attribute; empty without it, or if it is not UTF-8.
pub(super) fn string_of<'n>(node: &'n NodeProto, name: &str) -> &'n str {
    let found = node.attribute.iter().find(|attribute| attribute.name() == name);
    found.and_then(|found| std::str::from_utf8(found.s()).ok()).unwrap_or_default()
}
