//! Values other than tensors, as in test data files (`onnx-data.proto`).

use bytes::Bytes;

use super::{SparseTensorProto, TensorProto};

/// A list of values of one kind. `elem_type` says which field contains them.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SequenceProto {
    /// The list's name.
    #[prost(string, optional, tag = "1")]
    pub name: Option<String>,
    /// The kind of its values, a [`sequence_proto::DataType`].
    #[prost(int32, optional, tag = "2")]
    pub elem_type: Option<i32>,
    /// Tensors.
    #[prost(message, repeated, tag = "3")]
    pub tensor_values: Vec<TensorProto>,
    /// Sparse tensors.
    #[prost(message, repeated, tag = "4")]
    pub sparse_tensor_values: Vec<SparseTensorProto>,
    /// Lists.
    #[prost(message, repeated, tag = "5")]
    pub sequence_values: Vec<SequenceProto>,
    /// Maps.
    #[prost(message, repeated, tag = "6")]
    pub map_values: Vec<MapProto>,
    /// Values that may be absent.
    #[prost(message, repeated, tag = "7")]
    pub optional_values: Vec<OptionalProto>,
}

/// The enumeration of [`SequenceProto`] and [`OptionalProto`].
pub mod sequence_proto {
    /// Kinds of values.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
    #[repr(i32)]
    pub enum DataType {
        /// Not specified, or empty.
        Undefined = 0,
        /// A dense tensor.
        Tensor = 1,
        /// A sparse tensor.
        SparseTensor = 2,
        /// A list.
        Sequence = 3,
        /// A map.
        Map = 4,
        /// A value that may be absent.
        Optional = 5,
    }
}

/// A map: keys, and one value per key.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MapProto {
    /// The map's name.
    #[prost(string, optional, tag = "1")]
    pub name: Option<String>,
    /// The type of its keys, a [`DataType`](super::tensor_proto::DataType).
    #[prost(int32, optional, tag = "2")]
    pub key_type: Option<i32>,
    /// Keys of integer types.
    #[prost(int64, repeated, packed = "false", tag = "3")]
    pub keys: Vec<i64>,
    /// Keys of string type.
    #[prost(bytes = "bytes", repeated, tag = "4")]
    pub string_keys: Vec<Bytes>,
    /// The values, in the order of the keys.
    #[prost(message, optional, tag = "5")]
    pub values: Option<SequenceProto>,
}

/// A value that may be absent. `elem_type` says which field contains it.
#[derive(Clone, PartialEq, prost::Message)]
pub struct OptionalProto {
    /// The value's name.
    #[prost(string, optional, tag = "1")]
    pub name: Option<String>,
    /// The kind of the value, a [`sequence_proto::DataType`].
    #[prost(int32, optional, tag = "2")]
    pub elem_type: Option<i32>,
    /// A tensor.
    #[prost(message, optional, boxed, tag = "3")]
    pub tensor_value: Option<Box<TensorProto>>,
    /// A sparse tensor.
    #[prost(message, optional, boxed, tag = "4")]
    pub sparse_tensor_value: Option<Box<SparseTensorProto>>,
    /// A list.
    #[prost(message, optional, boxed, tag = "5")]
    pub sequence_value: Option<Box<SequenceProto>>,
    /// A map.
    #[prost(message, optional, boxed, tag = "6")]
    pub map_value: Option<Box<MapProto>>,
    /// A value that may itself be absent.
    #[prost(message, optional, boxed, tag = "7")]
    pub optional_value: Option<Box<OptionalProto>>,
}
