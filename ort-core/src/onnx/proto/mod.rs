//! The ONNX protobuf messages, written by hand from the field numbers of `onnx.proto` (IR version
//! 14).
//!
//! Three choices differ from generated code; none is visible on the wire:
//!
//! - `bytes` fields are [`bytes::Bytes`], so that decoding a mapped file is zero-copy for weights;
//! - `doc_string` is bytes, not a string: exporters store whole stack traces in it, which need
//!   neither a copy nor valid UTF-8 for the model to run;
//! - enumerations are plain `i32`, so that a value from a newer standard is an error only when it
//!   is used.
//!
//! The messages have no semantics here; the loader in `onnx::load` interprets them.

mod device;
mod entry;
mod tensor;
mod types;
mod values;

use bytes::Bytes;

pub use device::{
    DeviceConfigurationProto, IntIntListEntryProto, NodeDeviceConfigurationProto, ShardedDimProto,
    ShardingSpecProto, SimpleShardedDimProto, simple_sharded_dim_proto,
};
pub use entry::StringStringEntryProto;
pub use tensor::{SparseTensorProto, TensorProto, tensor_proto};
pub use types::{TensorShapeProto, TypeProto, ValueInfoProto, tensor_shape_proto, type_proto};
pub use values::{MapProto, OptionalProto, SequenceProto, sequence_proto};

/// The newest IR version whose fields are all known here.
pub const IR_VERSION: i64 = 14;

/// A model: one graph, the operator sets it imports, and its local functions.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ModelProto {
    /// The IR version that the model was written against; required.
    #[prost(int64, optional, tag = "1")]
    pub ir_version: Option<i64>,
    /// The tool that wrote the model.
    #[prost(string, optional, tag = "2")]
    pub producer_name: Option<String>,
    /// The version of that tool.
    #[prost(string, optional, tag = "3")]
    pub producer_version: Option<String>,
    /// The model's namespace as a reverse-DNS name.
    #[prost(string, optional, tag = "4")]
    pub domain: Option<String>,
    /// The version of the model itself.
    #[prost(int64, optional, tag = "5")]
    pub model_version: Option<i64>,
    /// Human-readable documentation.
    #[prost(bytes = "bytes", optional, tag = "6")]
    pub doc_string: Option<Bytes>,
    /// The graph to run.
    #[prost(message, optional, tag = "7")]
    pub graph: Option<GraphProto>,
    /// The imported operator sets, at most one version per domain.
    #[prost(message, repeated, tag = "8")]
    pub opset_import: Vec<OperatorSetIdProto>,
    /// Named metadata.
    #[prost(message, repeated, tag = "14")]
    pub metadata_props: Vec<StringStringEntryProto>,
    /// Initialization and training algorithms, in execution order.
    #[prost(message, repeated, tag = "20")]
    pub training_info: Vec<TrainingInfoProto>,
    /// Functions local to the model, identified by (domain, name, overload).
    #[prost(message, repeated, tag = "25")]
    pub functions: Vec<FunctionProto>,
    /// Device configurations that nodes refer to by name.
    #[prost(message, repeated, tag = "26")]
    pub configuration: Vec<DeviceConfigurationProto>,
}

/// The operator set of one domain at one version.
#[derive(Clone, PartialEq, prost::Message)]
pub struct OperatorSetIdProto {
    /// The domain; empty means the standard's own, `ai.onnx`.
    #[prost(string, optional, tag = "1")]
    pub domain: Option<String>,
    /// The version; required.
    #[prost(int64, optional, tag = "2")]
    pub version: Option<i64>,
}

/// A training algorithm: graphs that initialize and update the model's state.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TrainingInfoProto {
    /// A graph without inputs, whose outputs are the initial values.
    #[prost(message, optional, tag = "1")]
    pub initialization: Option<GraphProto>,
    /// One training step.
    #[prost(message, optional, tag = "2")]
    pub algorithm: Option<GraphProto>,
    /// Maps an initializer (key) to the output of `initialization` that sets it (value).
    #[prost(message, repeated, tag = "3")]
    pub initialization_binding: Vec<StringStringEntryProto>,
    /// Maps an initializer (key) to the output of `algorithm` that updates it (value).
    #[prost(message, repeated, tag = "4")]
    pub update_binding: Vec<StringStringEntryProto>,
}

/// A graph: nodes in topological order, with inputs, outputs and constants.
#[derive(Clone, PartialEq, prost::Message)]
pub struct GraphProto {
    /// The nodes. Each value is written before it is read.
    #[prost(message, repeated, tag = "1")]
    pub node: Vec<NodeProto>,
    /// The graph's name.
    #[prost(string, optional, tag = "2")]
    pub name: Option<String>,
    /// Named constants. One with the name of a graph input is that input's default.
    #[prost(message, repeated, tag = "5")]
    pub initializer: Vec<TensorProto>,
    /// Human-readable documentation.
    #[prost(bytes = "bytes", optional, tag = "10")]
    pub doc_string: Option<Bytes>,
    /// The graph's inputs.
    #[prost(message, repeated, tag = "11")]
    pub input: Vec<ValueInfoProto>,
    /// The graph's outputs.
    #[prost(message, repeated, tag = "12")]
    pub output: Vec<ValueInfoProto>,
    /// Types and shapes of intermediate values, if known.
    #[prost(message, repeated, tag = "13")]
    pub value_info: Vec<ValueInfoProto>,
    /// Names of the scale and zero point of tensors.
    #[prost(message, repeated, tag = "14")]
    pub quantization_annotation: Vec<TensorAnnotation>,
    /// Named constants in sparse form. Each is named by its `values`.
    #[prost(message, repeated, tag = "15")]
    pub sparse_initializer: Vec<SparseTensorProto>,
    /// Named metadata.
    #[prost(message, repeated, tag = "16")]
    pub metadata_props: Vec<StringStringEntryProto>,
}

/// Quantization parameters of one tensor.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TensorAnnotation {
    /// The annotated tensor.
    #[prost(string, optional, tag = "1")]
    pub tensor_name: Option<String>,
    /// Maps a parameter (key: `SCALE_TENSOR` or `ZERO_POINT_TENSOR`) to the tensor that contains it
    /// (value).
    #[prost(message, repeated, tag = "2")]
    pub quant_parameter_tensor_names: Vec<StringStringEntryProto>,
}

/// One call of an operator or function.
#[derive(Clone, PartialEq, prost::Message)]
pub struct NodeProto {
    /// Names of the inputs. An empty name is an omitted optional input.
    #[prost(string, repeated, tag = "1")]
    pub input: Vec<String>,
    /// Names of the outputs. An empty name is an omitted optional output.
    #[prost(string, repeated, tag = "2")]
    pub output: Vec<String>,
    /// The node's name, often empty and not always unique.
    #[prost(string, optional, tag = "3")]
    pub name: Option<String>,
    /// The operator's name within its domain.
    #[prost(string, optional, tag = "4")]
    pub op_type: Option<String>,
    /// The attributes.
    #[prost(message, repeated, tag = "5")]
    pub attribute: Vec<AttributeProto>,
    /// Human-readable documentation.
    #[prost(bytes = "bytes", optional, tag = "6")]
    pub doc_string: Option<Bytes>,
    /// The operator's domain; empty means the standard's own.
    #[prost(string, optional, tag = "7")]
    pub domain: Option<String>,
    /// The overload of the model-local function to call.
    #[prost(string, optional, tag = "8")]
    pub overload: Option<String>,
    /// Named metadata.
    #[prost(message, repeated, tag = "9")]
    pub metadata_props: Vec<StringStringEntryProto>,
    /// The node's sharding in each device configuration.
    #[prost(message, repeated, tag = "10")]
    pub device_configurations: Vec<NodeDeviceConfigurationProto>,
}

/// A named attribute. `type` says which one of the value fields is set.
///
/// Large, rare values are boxed, because a node has several attributes and nearly all are small.
#[derive(Clone, PartialEq, prost::Message)]
pub struct AttributeProto {
    /// The attribute's name.
    #[prost(string, optional, tag = "1")]
    pub name: Option<String>,
    /// A float.
    #[prost(float, optional, tag = "2")]
    pub f: Option<f32>,
    /// An integer.
    #[prost(int64, optional, tag = "3")]
    pub i: Option<i64>,
    /// UTF-8 text, as bytes like in the standard.
    #[prost(bytes = "bytes", optional, tag = "4")]
    pub s: Option<Bytes>,
    /// A tensor.
    #[prost(message, optional, boxed, tag = "5")]
    pub t: Option<Box<TensorProto>>,
    /// A subgraph.
    #[prost(message, optional, boxed, tag = "6")]
    pub g: Option<Box<GraphProto>>,
    /// A list of floats.
    // ONNX is proto2, which packs a list only if it says so; prost would pack. Decoding accepts
    // both.
    #[prost(float, repeated, packed = "false", tag = "7")]
    pub floats: Vec<f32>,
    /// A list of integers.
    #[prost(int64, repeated, packed = "false", tag = "8")]
    pub ints: Vec<i64>,
    /// A list of texts.
    #[prost(bytes = "bytes", repeated, tag = "9")]
    pub strings: Vec<Bytes>,
    /// A list of tensors.
    #[prost(message, repeated, tag = "10")]
    pub tensors: Vec<TensorProto>,
    /// A list of subgraphs.
    #[prost(message, repeated, tag = "11")]
    pub graphs: Vec<GraphProto>,
    /// Human-readable documentation.
    #[prost(bytes = "bytes", optional, tag = "13")]
    pub doc_string: Option<Bytes>,
    /// A type.
    #[prost(message, optional, boxed, tag = "14")]
    pub tp: Option<Box<TypeProto>>,
    /// A list of types.
    #[prost(message, repeated, tag = "15")]
    pub type_protos: Vec<TypeProto>,
    /// The value field in use, an [`attribute_proto::AttributeType`]; missing in IR version 1.
    #[prost(int32, optional, tag = "20")]
    pub r#type: Option<i32>,
    /// In a function body: the attribute of the function that supplies the value.
    #[prost(string, optional, tag = "21")]
    pub ref_attr_name: Option<String>,
    /// A sparse tensor.
    #[prost(message, optional, boxed, tag = "22")]
    pub sparse_tensor: Option<Box<SparseTensorProto>>,
    /// A list of sparse tensors.
    #[prost(message, repeated, tag = "23")]
    pub sparse_tensors: Vec<SparseTensorProto>,
}

/// The enumeration of [`AttributeProto`].
pub mod attribute_proto {
    /// The value field of an attribute that is in use.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
    #[repr(i32)]
    pub enum AttributeType {
        /// Not specified.
        Undefined = 0,
        /// `f`
        Float = 1,
        /// `i`
        Int = 2,
        /// `s`
        String = 3,
        /// `t`
        Tensor = 4,
        /// `g`
        Graph = 5,
        /// `floats`
        Floats = 6,
        /// `ints`
        Ints = 7,
        /// `strings`
        Strings = 8,
        /// `tensors`
        Tensors = 9,
        /// `graphs`
        Graphs = 10,
        /// `sparse_tensor`
        SparseTensor = 11,
        /// `sparse_tensors`
        SparseTensors = 12,
        /// `tp`
        TypeProto = 13,
        /// `type_protos`
        TypeProtos = 14,
    }
}

/// A model-local function, called by nodes with its (domain, name, overload).
#[derive(Clone, PartialEq, prost::Message)]
pub struct FunctionProto {
    /// The function's name.
    #[prost(string, optional, tag = "1")]
    pub name: Option<String>,
    /// Names of its inputs.
    #[prost(string, repeated, tag = "4")]
    pub input: Vec<String>,
    /// Names of its outputs.
    #[prost(string, repeated, tag = "5")]
    pub output: Vec<String>,
    /// Names of its attributes without a default.
    #[prost(string, repeated, tag = "6")]
    pub attribute: Vec<String>,
    /// The nodes of its body.
    #[prost(message, repeated, tag = "7")]
    pub node: Vec<NodeProto>,
    /// Human-readable documentation.
    #[prost(bytes = "bytes", optional, tag = "8")]
    pub doc_string: Option<Bytes>,
    /// Operator sets of its body.
    #[prost(message, repeated, tag = "9")]
    pub opset_import: Vec<OperatorSetIdProto>,
    /// Its domain.
    #[prost(string, optional, tag = "10")]
    pub domain: Option<String>,
    /// Its attributes that have a default.
    #[prost(message, repeated, tag = "11")]
    pub attribute_proto: Vec<AttributeProto>,
    /// Types and shapes of values in its body, if known.
    #[prost(message, repeated, tag = "12")]
    pub value_info: Vec<ValueInfoProto>,
    /// The overload that this function is.
    #[prost(string, optional, tag = "13")]
    pub overload: Option<String>,
    /// Named metadata.
    #[prost(message, repeated, tag = "14")]
    pub metadata_props: Vec<StringStringEntryProto>,
}
