//! Saving: from the graph back to an ONNX file, with the weights inside or in a data file beside
//! it.
//!
//! Files are written atomically ([`files`](crate::files)), a model and its data file as a pair.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::Write;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use indexmap::IndexMap;
use prost::Message;

use super::external::Location;
use super::load::{ModelInfo, buffer_mark};
use super::proto::attribute_proto::AttributeType;
use super::proto::tensor_proto::DataLocation;
use super::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, StringStringEntryProto,
    TensorProto, ValueInfoProto,
};
use super::tensor::{sparse_to_proto, tensor_to_proto};
use super::types::type_to_proto;
use crate::dtype::DType;
use crate::files::{Complete, NewFile, is_plain_name, publish_pair};
use crate::ir::{Attribute, Graph, Node, ValueId};
use crate::spec::{AttrDefault, ONNX, OpSpec, canonical_domain};
use crate::tensor::Tensor;
use crate::{Error, Result, Within, ensure, error};

/// The largest message that other protobuf readers accept, in bytes.
pub const MESSAGE_LIMIT: usize = i32::MAX as usize;
/// The alignment of small tensors in a data file: a cache line.
const ALIGNMENT: u64 = 64;
/// The alignment of tensors of at least one page, so that they can be mapped and advised
/// separately.
const PAGE: u64 = 4096;

/// Where the weights are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Weights {
    /// In the model file, 2 GiB in total at most.
    Inside,
    /// In a data file beside the model, named like it plus `.data`.
    Beside {
        /// Smaller tensors stay in the model file. Other readers infer shapes from small constants
        /// and need them there. 1024 bytes is a good bound.
        least: usize,
    },
    /// In a data file of another name in the folder of the model file.
    Named {
        /// The name, without a folder.
        name: String,
        /// Smaller tensors stay in the model file.
        least: usize,
    },
}

/// Writes `graph` as a model file at `path`.
///
/// `info` is the metadata of the file that the graph was loaded from. Its metadata is kept. Its
/// operator sets are raised only if upgraded or new operators require it. Use the default for a
/// graph that does not come from a file.
///
/// Errors: the folder is not writable, a weight is in device memory, the message would exceed 2
/// GiB.
pub fn save(graph: &Graph, info: &ModelInfo, path: impl AsRef<Path>, weights: &Weights) -> Result<()> {
    let path = path.as_ref();
    save_at(graph, info, path, weights).within(|| format!("saving '{}'", path.display()))
}

fn save_at(graph: &Graph, info: &ModelInfo, path: &Path, weights: &Weights) -> Result<()> {
    let mut model = to_proto(graph, info)?;
    let data = data_file(path, weights)?.and_then(|(name, least)| {
        let parts = move_out(&mut model, &name, least);
        (!parts.is_empty()).then(|| (path.with_file_name(&name), parts))
    });
    write_model(&model, path, data)
}

/// Writes `graph` as [`save`] does, with weights in data files that the caller writes. `locate`
/// gets the name and the value of each initializer, and returns where its data is; `None` keeps it
/// in the model file. Strings and initializers of subgraphs stay there unasked.
pub(crate) fn save_located(
    graph: &Graph,
    info: &ModelInfo,
    path: &Path,
    mut locate: impl FnMut(&str, &Tensor) -> Result<Option<Location>>,
) -> Result<()> {
    let mut save = || {
        let mut model = to_proto(graph, info)?;
        for proto in model.graph.iter_mut().flat_map(|graph| graph.initializer.iter_mut()) {
            let (Some(raw), Some(dtype)) = (proto.raw_data.clone(), DType::from_onnx(proto.data_type()))
            else {
                continue;
            };
            let shape: Vec<usize> = proto.dims.iter().map(|&size| size as usize).collect();
            let tensor = Tensor::from_bytes(dtype, &shape, raw)?;
            if let Some(location) = locate(proto.name(), &tensor)? {
                let file = location.path.to_str();
                let file = file.ok_or_else(|| error!(InvalidArgument, "the name is not UTF-8"))?;
                let length = location.length.unwrap_or(tensor.byte_count() as u64);
                proto.raw_data = None;
                refer_to(proto, file, location.offset, length);
            }
        }
        write_model(&model, path, None)
    };
    save().within(|| format!("saving '{}'", path.display()))
}

/// Writes a model file, and its data file if there is one, as a pair.
fn write_model(model: &ModelProto, path: &Path, data: Option<(PathBuf, Vec<(u64, Bytes)>)>) -> Result<()> {
    let length = model.encoded_len();
    if length > MESSAGE_LIMIT {
        return Err(error!(
            InvalidArgument,
            "the model takes {length} bytes, a message at most {MESSAGE_LIMIT}"
        )
        .help("save the weights beside the model"));
    }
    let write =
        |(path, parts): (PathBuf, Vec<(u64, Bytes)>)| write_aside(&path, |file| write_parts(file, &parts));
    let data = data.map(write).transpose()?;
    // Both files are written before either gets its name: a full disk leaves the old pair in place.
    let wire = model.encode_to_vec();
    let model = write_aside(path, |file| file.write_all(&wire))?;
    match data {
        Some(data) => publish_pair(model, data),
        None => model.publish(),
    }
    .map_err(|problem| cannot_write(path, &problem))
}

/// Returns the name of the data file beside the model file `path`, and the least size in bytes of
/// the tensors in it.
///
/// Errors: the name is not UTF-8, leads to another folder, or is that of the model file.
pub fn data_file(path: &Path, weights: &Weights) -> Result<Option<(String, usize)>> {
    match weights {
        Weights::Inside => Ok(None),
        Weights::Beside { least } => {
            let mut name = path.file_name().unwrap_or_default().to_os_string();
            name.push(".data");
            let name = name.into_string().map_err(|_| error!(InvalidArgument, "the name is not UTF-8"))?;
            Ok(Some((name, *least)))
        }
        Weights::Named { name, least } => {
            ensure!(
                is_plain_name(name),
                InvalidArgument,
                help = "give the name of a file, which is put into the model's folder",
                "the data file '{name}' is not a file name"
            );
            // Some file systems ignore the case of names.
            let is_model = path.file_name().is_some_and(|own| own.eq_ignore_ascii_case(name));
            ensure!(
                !is_model,
                InvalidArgument,
                help = "give the data file another name",
                "the data file '{name}' would replace the model file"
            );
            Ok(Some((name.clone(), *least)))
        }
    }
}

/// Moves the data of large initializers out of the model. Returns each with its offset in the data
/// file.
fn move_out(model: &mut ModelProto, location: &str, least: usize) -> Vec<(u64, Bytes)> {
    let mut parts = Vec::new();
    let mut end = 0u64;
    // Initializers of subgraphs stay in the model file.
    let initializers = model.graph.iter_mut().flat_map(|graph| graph.initializer.iter_mut());
    for tensor in initializers {
        // There is nothing to move of an empty tensor. Strings have no raw data and stay inside.
        let Some(raw) = tensor.raw_data.take_if(|raw| raw.len() >= least.max(1)) else { continue };
        let alignment = if raw.len() as u64 >= PAGE { PAGE } else { ALIGNMENT };
        let offset = end.next_multiple_of(alignment);
        end = offset + raw.len() as u64;
        refer_to(tensor, location, offset, raw.len() as u64);
        parts.push((offset, raw));
    }
    parts
}

/// Says where the data of a tensor is, in a file beside the model. Raw data in the message stays.
pub fn refer_to(tensor: &mut TensorProto, location: &str, offset: u64, length: u64) {
    let entry =
        |key: &str, value: String| StringStringEntryProto { key: Some(key.into()), value: Some(value) };
    tensor.data_location = Some(DataLocation::External as i32);
    tensor.external_data = vec![
        entry("location", location.to_string()),
        entry("offset", offset.to_string()),
        entry("length", length.to_string()),
    ];
}

fn write_parts(file: &mut NewFile, parts: &[(u64, Bytes)]) -> std::io::Result<()> {
    let mut written = 0;
    for (offset, bytes) in parts {
        // Less than a page, because each offset is the next multiple of at most a page.
        let gap = vec![0; (offset - written) as usize];
        file.write_all(&gap)?;
        file.write_all(bytes)?;
        written = offset + bytes.len() as u64;
    }
    Ok(())
}

/// Writes a file completely, but does not publish it under its name yet.
fn write_aside(path: &Path, write: impl FnOnce(&mut NewFile) -> std::io::Result<()>) -> Result<Complete> {
    let written = NewFile::create(path).and_then(|mut file| {
        write(&mut file)?;
        file.complete()
    });
    written.map_err(|problem| cannot_write(path, &problem))
}

fn cannot_write(path: &Path, problem: &std::io::Error) -> Error {
    error!(Fail, "cannot write '{}': {problem}", path.display())
        .help("check that its folder exists, its permissions, and the free disk space")
}

/// Converts a graph to a model message, whose weights share the graph's memory. See [`save`] for
/// `info`.
pub fn to_proto(graph: &Graph, info: &ModelInfo) -> Result<ModelProto> {
    let mut writer = Writer {
        initializers: info.initializers.iter().map(String::as_str).collect(),
        buffers: info.buffers.iter().map(String::as_str).collect(),
        taken: HashSet::new(),
        shared: HashMap::new(),
        domains: BTreeMap::new(),
        newest_type: DType::F32,
    };
    let mut graph = writer.graph(graph, &HashMap::new())?;
    // Every model must import the standard's domain, even if it uses none of its operators.
    writer.domains.entry(ONNX).or_insert(OpsetNeeds { newest: 1, upgraded: 1 });
    let (ir_version, standard) = versions_with(writer.newest_type);
    let opset = |(domain, needs): (&str, OpsetNeeds)| {
        let loaded = info.opsets.iter().find(|(name, _)| canonical_domain(name) == domain);
        // The version of the file is kept if it suffices, so that a saved model runs where the old
        // one did.
        let version = loaded.map_or(needs.newest, |(_, version)| needs.upgraded.max(*version));
        let version = if domain == ONNX { version.max(standard) } else { version };
        OperatorSetIdProto { domain: Some(domain.to_string()), version: Some(version) }
    };
    let given = |text: &String| (!text.is_empty()).then(|| text.clone());
    let described = |text: &String| given(text).map(Bytes::from);
    graph.doc_string = described(&info.graph_description);
    let entry = |(key, value): &(String, String)| StringStringEntryProto {
        key: Some(key.clone()),
        value: Some(value.clone()),
    };
    Ok(ModelProto {
        ir_version: Some(ir_version),
        producer_name: Some("ort-runtime".into()),
        producer_version: Some(env!("CARGO_PKG_VERSION").into()),
        domain: given(&info.domain),
        doc_string: described(&info.description),
        model_version: info.model_version,
        metadata_props: info.metadata.iter().map(entry).collect(),
        opset_import: writer.domains.into_iter().map(opset).collect(),
        graph: Some(graph),
        ..ModelProto::default()
    })
}

/// The versions of a domain that the operators in use require.
#[derive(Clone, Copy)]
struct OpsetNeeds {
    /// The newest version among the records, which suits all operators.
    newest: i64,
    /// The version at which all operators exist in the form after their last upgrade.
    upgraded: i64,
}

/// Returns the oldest IR version and standard operator set whose operators support an element type.
/// ONNX numbers types in the order of their introduction. Operator sets below 21 support fewer of
/// the older types than the records say.
fn versions_with(newest: DType) -> (i64, i64) {
    match newest.onnx_code() {
        ..=22 => (10, 21),
        23 => (11, 23),
        24 => (12, 24),
        25..=26 => (13, 25),
        _ => (14, 28),
    }
}

struct Writer<'i> {
    /// The names of the initializers in the file that the graph was loaded from.
    initializers: HashSet<&'i str>,
    /// The initializers marked as buffers, which stay so.
    buffers: HashSet<&'i str>,
    /// Names in use, across all graphs: a name in a subgraph must not shadow an outer one.
    taken: HashSet<String>,
    /// The names of constants of the enclosing graphs, by their memory. Loading gives each subgraph
    /// its own constants that share memory; saving must not write them twice.
    shared: HashMap<ConstantKey, String>,
    /// The domains in use.
    domains: BTreeMap<&'static str, OpsetNeeds>,
    newest_type: DType,
}

/// The identity of a constant: address, type and shape.
type ConstantKey = (usize, DType, Vec<usize>);

fn memory_of(tensor: &Tensor) -> Option<ConstantKey> {
    // Empty tensors may share an address without being one constant.
    let bytes = tensor.bytes().filter(|bytes| !bytes.is_empty())?;
    Some((bytes.as_ptr().addr(), tensor.dtype(), tensor.shape().to_vec()))
}

/// The name of each value of one graph.
type NamesById = HashMap<ValueId, String>;

impl Writer<'_> {
    /// Converts a graph. `captured` maps captured values to their outer names.
    fn graph(&mut self, graph: &Graph, captured: &NamesById) -> Result<GraphProto> {
        let mut names = captured.clone();
        let around = self.shared.clone();
        for (id, tensor) in &graph.constants {
            if let Some(name) = memory_of(tensor).and_then(|memory| around.get(&memory)) {
                names.insert(*id, name.clone());
            }
        }
        // A subgraph output must be computed inside it, so outer values go through an `Identity`.
        let mut handed_on: Vec<(ValueId, String)> =
            graph.outputs.iter().filter_map(|id| Some((*id, names.remove(id)?))).collect();
        let is_outer = |id| names.contains_key(&id) || handed_on.iter().any(|(handed, _)| *handed == id);
        let copies = self.copies(graph, is_outer);
        // Inputs and outputs are named first, because callers know their names.
        for &id in graph.inputs.iter().chain(&graph.outputs) {
            self.name(graph, id, &mut names);
        }
        for (&copy, &original) in &copies {
            self.name(graph, original, &mut names);
            let name = name_of(&names, original).to_string();
            // Each output needs a name of its own, so a copy that is an output goes through an
            // `Identity`.
            if graph.outputs.contains(&copy) {
                handed_on.push((copy, name));
            } else {
                names.insert(copy, name);
            }
        }
        graph.value_ids().for_each(|id| self.name(graph, id, &mut names));
        let mut proto = GraphProto {
            name: Some(if graph.name.is_empty() { "graph".into() } else { graph.name.clone() }),
            input: graph.inputs.iter().map(|&id| self.info(graph, id, &names)).collect(),
            output: graph.outputs.iter().map(|&id| self.info(graph, id, &names)).collect(),
            ..GraphProto::default()
        };
        let mut defaults: Vec<(&ValueId, &Tensor)> = graph.input_defaults.iter().collect();
        // The order of a `HashMap` is random, and the same graph must give the same file.
        defaults.sort_unstable_by_key(|(id, _)| **id);
        for (id, tensor) in graph.constants.iter().chain(defaults) {
            let memory = memory_of(tensor);
            let name = name_of(&names, *id);
            let is_outer =
                memory.as_ref().is_some_and(|memory| around.get(memory).is_some_and(|outer| outer == name));
            let is_handed_on = handed_on.iter().any(|(handed, _)| handed == id);
            if is_outer || is_handed_on || copies.contains_key(id) {
                continue;
            }
            proto.initializer.push(self.tensor(name, tensor)?);
            if self.buffers.contains(&*graph.value(*id).name) {
                let info = self.info(graph, *id, &names);
                proto.value_info.push(ValueInfoProto { metadata_props: vec![buffer_mark()], ..info });
            }
            // A caller may override a default, so no constant is written as a reference to one.
            let constant = graph.constants.contains_key(id);
            self.shared.extend(memory.filter(|_| constant).map(|memory| (memory, name.to_string())));
        }
        let mut node_names = HashSet::new();
        proto.node.extend(handed_on.iter().map(|(id, outer)| identity(outer, name_of(&names, *id))));
        for node in &graph.nodes {
            proto.node.push(self.node(graph, node, &names, &mut node_names).within(|| node.place())?);
            for &id in node.outputs.iter().flatten().filter(|id| !graph.outputs.contains(id)) {
                let info = self.info(graph, id, &names);
                proto.value_info.extend(info.r#type.is_some().then_some(info));
            }
        }
        // Only subgraphs see the constants of this graph, not the graphs beside it.
        self.shared = around;
        Ok(proto)
    }

    /// Finds constants that duplicate another constant of the graph, and maps each to the one that
    /// is written. Loading creates them from `Identity` nodes, sharing the weight's memory.
    /// Constants that were initializers of the file stay separate even if they share memory.
    /// Constants of enclosing graphs are left out.
    fn copies(&self, graph: &Graph, is_outer: impl Fn(ValueId) -> bool) -> IndexMap<ValueId, ValueId> {
        let is_initializer = |id: &ValueId| self.initializers.contains(&*graph.value(*id).name);
        let constants = || graph.constants.iter().filter(|(id, _)| !is_outer(**id));
        let mut originals: HashMap<ConstantKey, ValueId> = HashMap::new();
        // Initializers first, so that the original of a group is an initializer if there is one.
        let (first, others): (Vec<_>, Vec<_>) = constants().partition(|(id, _)| is_initializer(id));
        for (id, tensor) in first.into_iter().chain(others) {
            if let Some(memory) = memory_of(tensor) {
                originals.entry(memory).or_insert(*id);
            }
        }
        let original_of = |(id, tensor): (&ValueId, &Tensor)| {
            let original = *originals.get(&memory_of(tensor)?)?;
            (original != *id && !is_initializer(id)).then_some((*id, original))
        };
        constants().filter_map(original_of).collect()
    }

    fn name(&mut self, graph: &Graph, id: ValueId, names: &mut NamesById) {
        if names.contains_key(&id) {
            return;
        }
        let wanted = &*graph.value(id).name;
        let wanted = if wanted.is_empty() { format!("value_{}", id.0) } else { wanted.to_string() };
        let mut name = wanted.clone();
        let mut number = 1;
        while !self.taken.insert(name.clone()) {
            number += 1;
            name = format!("{wanted}_{number}");
        }
        names.insert(id, name);
    }

    fn info(&mut self, graph: &Graph, id: ValueId, names: &NamesById) -> ValueInfoProto {
        let ty = &graph.value(id).ty;
        self.note_type(ty.dtype());
        ValueInfoProto {
            name: Some(name_of(names, id).to_string()),
            r#type: type_to_proto(ty),
            ..ValueInfoProto::default()
        }
    }

    fn note_type(&mut self, dtype: Option<DType>) {
        self.newest_type = self.newest_type.max(dtype.unwrap_or(DType::F32));
    }

    fn tensor(&mut self, name: &str, tensor: &Tensor) -> Result<TensorProto> {
        self.note_type(Some(tensor.dtype()));
        tensor_to_proto(name, tensor)
    }

    fn node(
        &mut self,
        graph: &Graph,
        node: &Node,
        names: &NamesById,
        node_names: &mut HashSet<String>,
    ) -> Result<NodeProto> {
        let needs = self.domains.entry(node.spec.domain).or_insert(OpsetNeeds { newest: 1, upgraded: 1 });
        needs.newest = needs.newest.max(node.spec.since);
        let upgrades = node.spec.upgrades.iter().map(|upgrade| upgrade.before);
        let reached = upgrades.filter(|before| *before <= node.spec.since).max();
        needs.upgraded = needs.upgraded.max(reached.unwrap_or(1)).max(node.spec.first);
        let name = node.name.to_string();
        ensure!(node_names.insert(name.clone()), InvalidGraph, "two nodes have the name '{name}'");
        let listed = |ids: &[Option<ValueId>]| {
            ids.iter().map(|id| id.map_or(String::new(), |id| name_of(names, id).to_string())).collect()
        };
        // Do not write defaults: an older version of the operator may lack the attribute.
        let telling = node.attrs.iter().filter(|(name, value)| {
            let is_internal = node.spec.internal_attrs.iter().any(|attr| attr.name == *name);
            !is_internal && !is_default(node.spec, name, value)
        });
        let mut attribute =
            telling.map(|(name, value)| self.attribute(name, value)).collect::<Result<Vec<_>>>()?;
        for subgraph in &node.subgraphs {
            let captured = subgraph
                .captures
                .iter()
                .map(|capture| (capture.inner, name_of(names, capture.outer).to_string()))
                .collect();
            let proto = self.graph(&subgraph.graph, &captured).within(|| subgraph.attr)?;
            attribute.push(AttributeProto {
                g: Some(Box::new(proto)),
                ..typed(subgraph.attr, AttributeType::Graph)
            });
        }
        tracing::trace!(graph = graph.name, node = name, "written");
        Ok(NodeProto {
            input: listed(&node.inputs),
            output: listed(&node.outputs),
            name: Some(name),
            op_type: Some(node.spec.name.into()),
            domain: (!node.spec.domain.is_empty()).then(|| node.spec.domain.to_string()),
            attribute,
            ..NodeProto::default()
        })
    }

    fn attribute(&mut self, name: &str, value: &Attribute) -> Result<AttributeProto> {
        let text = |text: &String| Bytes::from(text.clone());
        Ok(match value {
            Attribute::Int(value) => AttributeProto { i: Some(*value), ..typed(name, AttributeType::Int) },
            Attribute::Float(value) => {
                AttributeProto { f: Some(*value), ..typed(name, AttributeType::Float) }
            }
            Attribute::String(value) => {
                AttributeProto { s: Some(text(value)), ..typed(name, AttributeType::String) }
            }
            Attribute::Bytes(value) => {
                AttributeProto { s: Some(Bytes::from(value.clone())), ..typed(name, AttributeType::String) }
            }
            Attribute::Tensor(value) => {
                let tensor = self.tensor("", value)?;
                AttributeProto { t: Some(Box::new(tensor)), ..typed(name, AttributeType::Tensor) }
            }
            Attribute::Sparse(value) => {
                let sparse = sparse_to_proto("", value)?;
                AttributeProto {
                    sparse_tensor: Some(Box::new(sparse)),
                    ..typed(name, AttributeType::SparseTensor)
                }
            }
            Attribute::Type(value) => AttributeProto {
                tp: type_to_proto(value).map(Box::new),
                ..typed(name, AttributeType::TypeProto)
            },
            Attribute::Ints(value) => {
                AttributeProto { ints: value.clone(), ..typed(name, AttributeType::Ints) }
            }
            Attribute::Floats(value) => {
                AttributeProto { floats: value.clone(), ..typed(name, AttributeType::Floats) }
            }
            Attribute::Strings(value) => AttributeProto {
                strings: value.iter().map(text).collect(),
                ..typed(name, AttributeType::Strings)
            },
            Attribute::Tensors(value) => {
                let tensors = value.iter().map(|tensor| self.tensor("", tensor)).collect::<Result<_>>()?;
                AttributeProto { tensors, ..typed(name, AttributeType::Tensors) }
            }
        })
    }
}

/// Creates an unnamed `Identity` node. Without a name it cannot collide with another node's name.
fn identity(input: &str, output: &str) -> NodeProto {
    NodeProto {
        input: vec![input.to_string()],
        output: vec![output.to_string()],
        op_type: Some("Identity".into()),
        ..NodeProto::default()
    }
}

fn is_default(spec: &OpSpec, name: &str, value: &Attribute) -> bool {
    let default = spec.attrs.iter().find(|attr| attr.name == name).map(|attr| attr.default);
    match (default, value) {
        (Some(AttrDefault::Int(default)), Attribute::Int(value)) => default == *value,
        // By bits: -0.0 is not the default 0.0, and NaN is equal to itself.
        (Some(AttrDefault::Float(default)), Attribute::Float(value)) => default.to_bits() == value.to_bits(),
        (Some(AttrDefault::String(default)), Attribute::String(value)) => default == value,
        (Some(AttrDefault::Ints(default)), Attribute::Ints(value)) => default == value,
        (Some(AttrDefault::Floats(default)), Attribute::Floats(value)) => default == value,
        (Some(AttrDefault::Strings(default)), Attribute::Strings(value)) => default == value,
        _ => false,
    }
}

fn name_of(names: &NamesById, id: ValueId) -> &str {
    names.get(&id).map_or("", String::as_str)
}

fn typed(name: &str, ty: AttributeType) -> AttributeProto {
    AttributeProto { name: Some(name.to_string()), r#type: Some(ty as i32), ..AttributeProto::default() }
}
