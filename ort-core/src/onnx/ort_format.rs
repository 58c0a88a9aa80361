//! ORT format: ONNX Runtime's own model files (`.ort`), the ONNX messages as FlatBuffers.
//!
//! The schema is `ort.fbs` in
//! <https://github.com/microsoft/onnxruntime/tree/main/onnxruntime/core/flatbuffers/schema>. The
//! number of a field is its place there. A file is decoded to the messages of an ONNX model, and
//! everything after that is the same. Weights stay slices of the file.
//!
//! Not read are the edges between nodes and the versions of their operators, which the loader finds
//! by name and operator set; the devices of nodes and the optimizations left for the run, because a
//! session places and optimizes on its own; and the state of a session of older versions. The
//! format has no optional types, no types below 8 bits, no functions and no names of graphs.

use std::collections::HashMap;

use bytes::Bytes;

use super::flatbuffer::{Buffer, Table, damaged};
use super::proto::attribute_proto::AttributeType;
use super::proto::tensor_shape_proto::{Dimension, dimension};
use super::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, SparseTensorProto,
    StringStringEntryProto, TensorProto, TensorShapeProto, TypeProto, ValueInfoProto, type_proto,
};
use crate::limits::at_most;
use crate::{Error, Limits, Result, ensure, error, shown};

/// The memory allowed per byte of the file.
const FACTOR: u64 = 64;
/// The deepest nesting of graphs. Decoding and dropping the messages recurse.
const MOST_GRAPHS: usize = 32;
/// The deepest nesting of types; the loader allows no more.
const MOST_TYPES: usize = 16;
/// The newest version of the format. Older ones differ in what is not read.
const NEWEST: u32 = 6;

/// Returns whether a file is of ORT format: a short offset to the root, then the identifier. In a
/// protobuf file, the third byte may be the tag of the producer's name, and then comes any text.
pub(super) fn is_ort_format(bytes: &[u8]) -> bool {
    bytes.get(2..8) == Some(b"\0\0ORTM")
}

/// Returns the error for a file that is not of ORT format, although it is loaded as one.
pub(super) fn not_ort_format() -> Error {
    damaged("the file has no identifier 'ORTM'")
}

/// Decodes a file to an ONNX model.
pub(super) fn decode(bytes: &Bytes, limits: &Limits) -> Result<ModelProto> {
    let allowed = limits.bytes.max(FACTOR.saturating_mul(bytes.len() as u64));
    let buffer = Buffer::new(bytes.clone(), allowed);
    let session = buffer.root()?;
    check_version(session.text(0)?)?;
    let model = session.table(1)?.ok_or_else(|| missing("Missing Model"))?;
    let graph = model.table(7)?.ok_or_else(|| missing("Graph is null"))?;
    let reader = Reader { most_graphs: limits.nesting.min(MOST_GRAPHS) };
    let graph = GraphProto { doc_string: model.bytes(8)?, ..reader.graph(graph, 0)? };
    let opset_import = model.tables(1, operator_set)?;
    ensure!(!opset_import.is_empty(), Fail, "Model must have opset imports. {INVALID}");
    Ok(ModelProto {
        ir_version: model.int64(0)?,
        opset_import,
        producer_name: model.text(2)?,
        producer_version: model.text(3)?,
        domain: model.text(4)?,
        // ONNX Runtime writes the largest number for a model without a version.
        model_version: model.int64(5)?.filter(|&version| version != i64::MAX),
        doc_string: model.bytes(6)?,
        graph: Some(graph),
        metadata_props: model.tables(9, entry)?,
        ..ModelProto::default()
    })
}

const INVALID: &str = "Invalid ORT format model.";

fn missing(what: &str) -> Error {
    error!(Fail, "{what}. {INVALID}").help("download or copy the file again")
}

/// Refuses versions of the future. ONNX Runtime takes any other text.
fn check_version(version: Option<String>) -> Result<()> {
    let version = version.ok_or_else(|| missing("Serialized version info is null"))?;
    let is_number = !version.is_empty() && version.bytes().all(|byte| byte.is_ascii_digit());
    ensure!(
        !is_number || version.parse().is_ok_and(|version: u32| version <= NEWEST),
        Fail,
        help = "use the ONNX model that it was made from",
        "The ORT format model version [{}] is not supported in this build, which reads up to {NEWEST}",
        shown(&version, 16)
    );
    Ok(())
}

fn operator_set(table: Table<'_>) -> Result<OperatorSetIdProto> {
    Ok(OperatorSetIdProto { domain: table.text(0)?, version: table.int64(1)? })
}

fn entry(table: Table<'_>) -> Result<StringStringEntryProto> {
    Ok(StringStringEntryProto { key: table.text(0)?, value: table.text(1)? })
}

struct Reader {
    most_graphs: usize,
}

impl Reader {
    /// Decodes a graph inside of `depth` others.
    fn graph(&self, table: Table<'_>, depth: usize) -> Result<GraphProto> {
        at_most(depth, self.most_graphs, "nesting", || "subgraphs are nested too deep".to_string())?;
        let values = table.tables(1, value_info)?;
        // The names are moved, not copied.
        let keyed = |mut info: ValueInfoProto| (info.name.take().unwrap_or_default(), info);
        let named = |(name, info)| ValueInfoProto { name: Some(name), ..info };
        let mut types: HashMap<String, ValueInfoProto> = values.into_iter().map(keyed).collect();
        let mut listed = |index: usize| -> Result<Vec<ValueInfoProto>> {
            // Inputs come first. An output that is an input needs no type, and a copy would be
            // memory that nothing counts.
            let info = |name: String| {
                let info = types.remove(&name).unwrap_or_default();
                named((name, info))
            };
            Ok(table.texts(index)?.into_iter().map(info).collect())
        };
        let (input, output) = (listed(5)?, listed(6)?);
        let mut value_info: Vec<ValueInfoProto> = types.into_iter().map(named).collect();
        value_info.sort_by(|a, b| a.name().cmp(b.name()));
        Ok(GraphProto {
            initializer: table.tables(0, tensor)?,
            node: table.tables(2, |node| self.node(node, depth))?,
            input,
            output,
            value_info,
            sparse_initializer: table.tables(7, sparse_tensor)?,
            ..GraphProto::default()
        })
    }

    fn node(&self, table: Table<'_>, depth: usize) -> Result<NodeProto> {
        // A fused node holds code of the provider that made it.
        let is_fused = table.int32(6)?.unwrap_or(0) != 0;
        ensure!(
            !is_fused,
            NotImplemented,
            help = "convert the ONNX model again, without that provider",
            "node '{}' was compiled by another provider",
            table.text(0)?.unwrap_or_default()
        );
        Ok(NodeProto {
            name: table.text(0)?,
            doc_string: table.bytes(1)?,
            domain: table.text(2)?,
            op_type: table.text(5)?,
            input: table.texts(8)?,
            output: table.texts(9)?,
            attribute: table.tables(10, |attribute| self.attribute(attribute, depth))?,
            ..NodeProto::default()
        })
    }

    fn attribute(&self, table: Table<'_>, depth: usize) -> Result<AttributeProto> {
        let kind = table.int32(2)?.unwrap_or(0);
        let graph = |table| self.graph(table, depth + 1);
        let (name, doc_string) = (table.text(0)?, table.bytes(1)?);
        let mut made = AttributeProto { name, doc_string, r#type: Some(kind), ..AttributeProto::default() };
        // A field that has its default is not in the file.
        match AttributeType::try_from(kind) {
            Ok(AttributeType::Float) => made.f = Some(table.float(3)?.unwrap_or(0.0)),
            Ok(AttributeType::Int) => made.i = Some(table.int64(4)?.unwrap_or(0)),
            Ok(AttributeType::String) => made.s = Some(table.bytes(5)?.unwrap_or_default()),
            Ok(AttributeType::Tensor) => made.t = table.boxed(6, tensor)?,
            Ok(AttributeType::Graph) => made.g = table.boxed(7, graph)?,
            Ok(AttributeType::Floats) => made.floats = table.floats(8)?,
            Ok(AttributeType::Ints) => made.ints = table.ints(9)?,
            Ok(AttributeType::Strings) => made.strings = table.byte_strings(10)?,
            Ok(AttributeType::Tensors) => made.tensors = table.tables(11, tensor)?,
            Ok(AttributeType::Graphs) => made.graphs = table.tables(12, graph)?,
            // The loader says that it does not know the kind, or that the value is missing.
            _ => {}
        }
        Ok(made)
    }
}

fn tensor(table: Table<'_>) -> Result<TensorProto> {
    let offset = table.int64(6)?.unwrap_or(-1);
    ensure!(
        offset < 0,
        NotImplemented,
        help = "use the ONNX model that it was made from",
        "weights outside of a file of ORT format"
    );
    Ok(TensorProto {
        name: table.text(0)?,
        doc_string: table.bytes(1)?,
        dims: table.ints(2)?,
        data_type: table.int32(3)?,
        raw_data: table.bytes(4)?,
        string_data: table.byte_strings(5)?,
        ..TensorProto::default()
    })
}

fn sparse_tensor(table: Table<'_>) -> Result<SparseTensorProto> {
    let part = |index: usize| table.table(index)?.map(tensor).transpose();
    Ok(SparseTensorProto { values: part(0)?, indices: part(1)?, dims: table.ints(2)? })
}

fn value_info(table: Table<'_>) -> Result<ValueInfoProto> {
    let ty = table.table(2)?.map(|ty| value_type(ty, 0)).transpose()?;
    let (name, doc_string) = (table.text(0)?, table.bytes(1)?);
    Ok(ValueInfoProto { name, doc_string, r#type: ty, ..ValueInfoProto::default() })
}

/// Decodes a type inside of `depth` others.
fn value_type(table: Table<'_>, depth: usize) -> Result<TypeProto> {
    ensure!(depth < MOST_TYPES, Fail, "a type is nested more than {MOST_TYPES} deep");
    let inner = |table: Table<'_>, index: usize| table.boxed(index, |inner| value_type(inner, depth + 1));
    // Fields 1 and 2 are a union: its kind and its table.
    let value = match (table.byte(1)?.unwrap_or(0), table.table(2)?) {
        (1, Some(table)) => {
            let shape = table.table(1)?.map(shape).transpose()?;
            Some(type_proto::Value::TensorType(type_proto::Tensor { elem_type: table.int32(0)?, shape }))
        }
        (2, Some(table)) => {
            Some(type_proto::Value::SequenceType(type_proto::Sequence { elem_type: inner(table, 0)? }))
        }
        (3, Some(table)) => Some(type_proto::Value::MapType(type_proto::Map {
            key_type: table.int32(0)?,
            value_type: inner(table, 1)?,
        })),
        (0, _) => None,
        (kind, _) => return Err(damaged(&format!("a type of kind {kind}"))),
    };
    Ok(TypeProto { denotation: table.text(0)?, value })
}

fn shape(table: Table<'_>) -> Result<TensorShapeProto> {
    Ok(TensorShapeProto { dim: table.tables(0, dimension)? })
}

fn dimension(table: Table<'_>) -> Result<Dimension> {
    const VALUE: u8 = 1;
    const PARAM: u8 = 2;
    let value = match table.table(0)? {
        Some(value) => match value.byte(0)?.unwrap_or(0) {
            VALUE => Some(dimension::Value::DimValue(value.int64(1)?.unwrap_or(0))),
            PARAM => value.text(2)?.map(dimension::Value::DimParam),
            _ => None,
        },
        None => None,
    };
    Ok(Dimension { denotation: table.text(1)?, value })
}
