//! Graphs that a caller makes as ONNX messages.
//!
//! The weights stay where they are: the message only declares them, as external data, and the
//! loader takes the tensors themselves.

use std::collections::HashSet;
use std::ffi::{CStr, CString};

use std::path::{Path, PathBuf};

use ort_runtime::Tensor;
use ort_runtime::onnx::proto::attribute_proto::AttributeType;
use ort_runtime::onnx::proto::tensor_proto::DataLocation;
use ort_runtime::onnx::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, StringStringEntryProto,
    TensorProto, TensorShapeProto, TypeProto, ValueInfoProto, tensor_shape_proto, type_proto,
};
use ort_runtime::onnx::{Source, tensor_from_proto};
use ort_runtime::spec::canonical_domain;

use prost::Message;

use crate::element_type::of_number;
use crate::entry::Owned;
use crate::graph_objects::{EditedModel, Graph, Initializer, Node, ValueInfo};
use crate::status::{Outcome, code, fail, invalid};
use crate::type_info::{TensorInfo, TypeInfo};

/// The IR version of new models, as in ONNX Runtime.
pub(crate) const IR_VERSION: i64 = 13;

/// A model, and the weights that it declares.
#[derive(Clone, Default)]
pub(crate) struct DeclaredModel {
    proto: ModelProto,
    pub(crate) weights: Vec<(String, Tensor)>,
    /// Where data files of subgraphs are.
    pub(crate) folder: Option<PathBuf>,
}

fn text(text: &CStr) -> String {
    text.to_string_lossy().into_owned()
}

fn texts(texts: &[CString]) -> Vec<String> {
    texts.iter().map(|name| text(name)).collect()
}

/// Declares a weight that the loader takes as a tensor.
pub(crate) fn declare(name: &str, tensor: &Tensor) -> TensorProto {
    let location = StringStringEntryProto { key: Some("location".into()), value: Some("(memory)".into()) };
    TensorProto {
        name: Some(name.to_owned()),
        dims: tensor.shape().iter().map(|size| i64::try_from(*size).unwrap_or(i64::MAX)).collect(),
        data_type: Some(tensor.dtype().onnx_code()),
        data_location: Some(DataLocation::External as i32),
        external_data: vec![location],
        ..TensorProto::default()
    }
}

/// An attribute of a `Constant`, under the name that the standard has for its type. Callers name
/// each of them `value`.
fn constant_value(proto: &AttributeProto) -> AttributeProto {
    let name = match proto.r#type() {
        ty if ty == AttributeType::Float as i32 => "value_float",
        ty if ty == AttributeType::Floats as i32 => "value_floats",
        ty if ty == AttributeType::Int as i32 => "value_int",
        ty if ty == AttributeType::Ints as i32 => "value_ints",
        ty if ty == AttributeType::String as i32 => "value_string",
        ty if ty == AttributeType::Strings as i32 => "value_strings",
        _ => proto.name(),
    };
    AttributeProto { name: Some(name.to_owned()), ..proto.clone() }
}

fn node_proto(node: &Node) -> NodeProto {
    let is_constant = node.operator.as_bytes() == b"Constant" && node.domain.is_empty();
    let attributes = node.attributes.iter().map(|attribute| match is_constant {
        true => constant_value(attribute.proto()),
        false => attribute.proto().clone(),
    });
    NodeProto {
        input: texts(&node.inputs),
        output: texts(&node.outputs),
        name: Some(text(&node.name)),
        op_type: Some(text(&node.operator)),
        domain: Some(text(&node.domain)),
        attribute: attributes.collect(),
        ..NodeProto::default()
    }
}

fn tensor_type(info: &TensorInfo) -> Outcome<(i32, Option<TensorShapeProto>)> {
    use tensor_shape_proto::{Dimension, dimension::Value};
    let dim = |(size, name): (&i64, &CString)| {
        let value = match (*size, name.is_empty()) {
            (0.., _) => Some(Value::DimValue(*size)),
            (_, false) => Some(Value::DimParam(text(name))),
            (_, true) => None,
        };
        Dimension { denotation: None, value }
    };
    let dims = info.dims.iter().zip(info.names()).map(dim).collect();
    let shape = info.has_shape.then_some(TensorShapeProto { dim: dims });
    Ok((of_number(info.element_type)?.onnx_code(), shape))
}

fn value_proto(info: &ValueInfo) -> Outcome<ValueInfoProto> {
    let Some(TypeInfo::Tensor(tensor)) = info.ty.as_ref().map(|ty| &ty.inner) else {
        return fail(code::FAIL, "Only tensor types are supported currently".to_owned());
    };
    let (elem_type, shape) = tensor_type(&tensor.inner)?;
    let tensor = type_proto::Tensor { elem_type: Some(elem_type), shape };
    let ty = TypeProto { denotation: None, value: Some(type_proto::Value::TensorType(tensor)) };
    Ok(ValueInfoProto { name: Some(text(&info.name)), r#type: Some(ty), ..ValueInfoProto::default() })
}

fn value_protos(infos: &[Owned<ValueInfo>]) -> Outcome<Vec<ValueInfoProto>> {
    infos.iter().map(|info| value_proto(info)).collect()
}

/// The tensor of an initializer. Memory that the caller may free after the call is copied.
fn weight(initializer: &Initializer) -> Outcome<Tensor> {
    let keeps_memory = initializer.is_external || !initializer.value.has_memory_of_caller();
    let ort_runtime::Value::Tensor(tensor) = initializer.value.engine()? else {
        return invalid("Only Tensor is currently supported.");
    };
    Ok(if keeps_memory { tensor } else { tensor.to_owned_copy()? })
}

fn import(domain: &CString, version: i32) -> OperatorSetIdProto {
    OperatorSetIdProto { domain: Some(text(domain)), version: Some(i64::from(version)) }
}

/// Domains that ONNX Runtime imports into every model that a caller makes, with their versions.
const KNOWN_DOMAINS: [(&str, i64); 4] =
    [("com.microsoft", 1), ("ai.onnx.ml", 5), ("ai.onnx.training", 1), ("ai.onnx.preview.training", 1)];

/// Refuses names that two things have, and nodes that read what nothing makes.
fn check_names(graph: &GraphProto) -> Outcome {
    let sparse = graph.sparse_initializer.iter().filter_map(|sparse| sparse.values.as_ref());
    let weights = graph.initializer.iter().chain(sparse).map(TensorProto::name);
    let mut known: HashSet<&str> = graph.input.iter().map(ValueInfoProto::name).chain(weights).collect();
    let made = graph.node.iter().flat_map(|node| &node.output).filter(|name| !name.is_empty());
    for name in made {
        if !known.insert(name) {
            let text = format!("This is an invalid model. Error: Duplicate definition of name ({name}).");
            return fail(code::FAIL, text);
        }
    }
    let read = graph.node.iter().flat_map(|node| &node.input).filter(|name| !name.is_empty());
    match read.into_iter().find(|name| !known.contains(name.as_str())) {
        Some(name) => invalid(format!(
            "Invalid model. Node input '{name}' is not a graph input, initializer, or output of a previous node."
        )),
        None => Ok(()),
    }
}

/// Refuses nodes of domains that the model does not import.
fn check_domains(model: &ModelProto, graph: &GraphProto) -> Outcome {
    let is_known = |domain: &str| {
        model.opset_import.iter().any(|known| canonical_domain(known.domain()) == domain)
            || KNOWN_DOMAINS.iter().any(|(known, _)| *known == domain)
    };
    match graph.node.iter().find(|node| !is_known(node.domain())) {
        Some(node) => fail(
            code::INVALID_GRAPH,
            format!(
                "This is an invalid model. In Node, (\"{}\", {}, \"{}\", -1), Error No opset import for domain '{}'",
                node.name(),
                node.op_type(),
                node.domain(),
                node.domain()
            ),
        ),
        None => Ok(()),
    }
}

impl DeclaredModel {
    /// Reads a model. Its weights stay in the file or memory that they are in.
    pub(crate) fn read(source: &Source) -> ort_runtime::Result<DeclaredModel> {
        let (mut proto, mut external) = (source.decode()?, source.external_data()?);
        let folder = source.path().and_then(Path::parent).map(Path::to_path_buf);
        let mut weights = Vec::new();
        for initializer in proto.graph.iter_mut().flat_map(|graph| &mut graph.initializer) {
            let name = initializer.name().to_owned();
            let tensor = tensor_from_proto(std::mem::take(initializer), &mut external)?;
            *initializer = declare(&name, &tensor);
            weights.push((name, tensor));
        }
        Ok(DeclaredModel { proto, weights, folder })
    }

    /// The message, without the weights.
    pub(crate) fn encode(&self) -> Vec<u8> {
        self.proto.encode_to_vec()
    }

    /// The operator sets, by domain.
    pub(crate) fn opsets(&self) -> Vec<(String, i64)> {
        let sets = self.proto.opset_import.iter();
        sets.map(|set| (canonical_domain(set.domain()).to_owned(), set.version())).collect()
    }

    /// The model that a caller made.
    pub(crate) fn of(model: &EditedModel) -> Outcome<DeclaredModel> {
        let Some(graph) = &model.graph else {
            return invalid("The model has no graph: add one with AddGraphToModel");
        };
        if !model.opsets.contains_key(c"") {
            return invalid("The opset for the ONNX domain must be explicitly specified.");
        }
        let mut declared = DeclaredModel::default();
        declared.proto.ir_version = Some(IR_VERSION);
        declared.proto.graph =
            Some(GraphProto { name: Some("ModelEditorGraph".into()), ..GraphProto::default() });
        declared.import(model)?;
        for (domain, version) in KNOWN_DOMAINS {
            let imports = &mut declared.proto.opset_import;
            if !imports.iter().any(|known| known.domain() == domain) {
                let (domain, version) = (Some(domain.to_owned()), Some(version));
                imports.push(OperatorSetIdProto { domain, version });
            }
        }
        declared.add(graph)?;
        Ok(declared)
    }

    /// Adds what a caller made to a model.
    pub(crate) fn change(&mut self, model: &EditedModel) -> Outcome {
        let Some(graph) = &model.graph else {
            return invalid("The model has no graph: add one with AddGraphToModel");
        };
        self.import(model)?;
        self.add(graph)
    }

    fn import(&mut self, model: &EditedModel) -> Outcome {
        for (domain, version) in &model.opsets {
            let mut imports = self.proto.opset_import.iter();
            let known =
                imports.find(|known| canonical_domain(known.domain()).as_bytes() == domain.as_bytes());
            match known {
                Some(known) if known.version() == i64::from(*version) => {}
                Some(known) => {
                    let (domain, known) = (text(domain), known.version());
                    return invalid(format!(
                        "Domain version can not be changed for '{domain}'. Current version: {known}, got {version}"
                    ));
                }
                None => self.proto.opset_import.push(import(domain, *version)),
            }
        }
        Ok(())
    }

    fn add(&mut self, graph: &Graph) -> Outcome {
        let Some(proto) = &mut self.proto.graph else { return invalid("the model has no graph") };
        if graph.inputs.is_some() {
            proto.input = value_protos(graph.inputs())?;
        }
        if graph.outputs.is_some() {
            proto.output = value_protos(graph.outputs())?;
        }
        for initializer in &graph.initializers {
            let name = text(&initializer.name);
            if proto.initializer.iter().any(|known| known.name() == name) {
                return fail(
                    code::INVALID_GRAPH,
                    format!("initializer '{name}' exists already in the graph"),
                );
            }
            let tensor = weight(initializer)?;
            proto.initializer.push(declare(&name, &tensor));
            self.weights.push((name, tensor));
        }
        proto.node.extend(graph.nodes.iter().map(|node| node_proto(node)));
        check_names(proto)?;
        match &self.proto.graph {
            Some(graph) => check_domains(&self.proto, graph),
            None => Ok(()),
        }
    }
}
