//! A model message that is being changed, and the weights that it will have.

use std::collections::{BTreeMap, BTreeSet};

use ort_core::Result;
use ort_core::onnx::proto::attribute_proto::AttributeType;
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
        Ok(Draft { message, nodes, initializers, places, parts, jobs, values, node_names, inputs })
    }

    /// The constant of this name. `None` for a computed value, and for a default, which a caller
    /// may override.
    pub(super) fn constant(&self, name: &str) -> Option<&TensorProto> {
        if self.inputs.contains(name) {
            return None;
        }
        self.initializers.get(*self.places.get(name)?)
    }

    /// Drops initializers that no node reads any more, of those that nodes read before.
    pub(super) fn drop_unread(&mut self, read_before: &BTreeSet<String>) {
        let mut read = reads(&self.nodes);
        let graph = self.message.graph.get_or_insert_default();
        read.extend(graph.output.iter().map(|output| output.name().to_string()));
        self.initializers
            .retain(|tensor| read.contains(tensor.name()) || !read_before.contains(tensor.name()));
        // The places are those of the list before.
        self.places.clear();
        for (place, tensor) in self.initializers.iter().enumerate() {
            self.places.insert(tensor.name().to_string(), place);
        }
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

fn subgraphs(node: &NodeProto) -> impl Iterator<Item = &GraphProto> {
    node.attribute.iter().flat_map(|attribute| attribute.g.as_deref().into_iter().chain(&attribute.graphs))
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
