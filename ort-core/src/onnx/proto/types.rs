//! Types and shapes of values: `ValueInfoProto`, `TypeProto`, `TensorShapeProto`.

use bytes::Bytes;

use super::StringStringEntryProto;

/// A value's name, type and shape.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ValueInfoProto {
    /// The value's name.
    #[prost(string, optional, tag = "1")]
    pub name: Option<String>,
    /// Its type; required for inputs and outputs of the main graph.
    #[prost(message, optional, tag = "2")]
    pub r#type: Option<TypeProto>,
    /// Human-readable documentation.
    #[prost(bytes = "bytes", optional, tag = "3")]
    pub doc_string: Option<Bytes>,
    /// Named metadata.
    #[prost(message, repeated, tag = "4")]
    pub metadata_props: Vec<StringStringEntryProto>,
}

/// A shape whose dimensions are numbers, names or unknown.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TensorShapeProto {
    /// The dimensions.
    #[prost(message, repeated, tag = "1")]
    pub dim: Vec<tensor_shape_proto::Dimension>,
}

/// The messages of [`TensorShapeProto`].
pub mod tensor_shape_proto {
    /// One dimension; unknown without a value.
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Dimension {
        /// The meaning of the dimension, such as `DATA_BATCH`.
        #[prost(string, optional, tag = "3")]
        pub denotation: Option<String>,
        /// The size as a number or name.
        #[prost(oneof = "dimension::Value", tags = "1, 2")]
        pub value: Option<dimension::Value>,
    }

    /// The `oneof` of [`Dimension`].
    pub mod dimension {
        /// A size as a number or name.
        #[derive(Clone, PartialEq, prost::Oneof)]
        pub enum Value {
            /// A size known when the model was written.
            #[prost(int64, tag = "1")]
            DimValue(i64),
            /// A symbolic dimension; equal names are equal sizes.
            #[prost(string, tag = "2")]
            DimParam(String),
        }
    }
}

/// The type of a value.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TypeProto {
    /// The meaning of the value, such as `IMAGE`.
    #[prost(string, optional, tag = "6")]
    pub denotation: Option<String>,
    /// The kind of value.
    #[prost(oneof = "type_proto::Value", tags = "1, 4, 5, 7, 8, 9")]
    pub value: Option<type_proto::Value>,
}

/// The messages of [`TypeProto`].
pub mod type_proto {
    use super::{TensorShapeProto, TypeProto};

    /// A dense tensor.
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Tensor {
        /// The element type, a [`DataType`](super::super::tensor_proto::DataType).
        #[prost(int32, optional, tag = "1")]
        pub elem_type: Option<i32>,
        /// The shape; missing if even the rank is unknown.
        #[prost(message, optional, tag = "2")]
        pub shape: Option<TensorShapeProto>,
    }

    /// A list of values of one type.
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Sequence {
        /// The type of each value.
        #[prost(message, optional, boxed, tag = "1")]
        pub elem_type: Option<Box<TypeProto>>,
    }

    /// A map from integers or strings to values of one type.
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Map {
        /// The type of the keys, a [`DataType`](super::super::tensor_proto::DataType).
        #[prost(int32, optional, tag = "1")]
        pub key_type: Option<i32>,
        /// The type of each value.
        #[prost(message, optional, boxed, tag = "2")]
        pub value_type: Option<Box<TypeProto>>,
    }

    /// A value that may be absent.
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Optional {
        /// The type of the value.
        #[prost(message, optional, boxed, tag = "1")]
        pub elem_type: Option<Box<TypeProto>>,
    }

    /// A sparse tensor.
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct SparseTensor {
        /// The element type, a [`DataType`](super::super::tensor_proto::DataType).
        #[prost(int32, optional, tag = "1")]
        pub elem_type: Option<i32>,
        /// The shape of the dense tensor.
        #[prost(message, optional, tag = "2")]
        pub shape: Option<TensorShapeProto>,
    }

    /// An opaque type, known only to its author.
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Opaque {
        /// Its domain; the model's if missing.
        #[prost(string, optional, tag = "1")]
        pub domain: Option<String>,
        /// Its name.
        #[prost(string, optional, tag = "2")]
        pub name: Option<String>,
    }

    /// The kinds of value.
    #[derive(Clone, PartialEq, prost::Oneof)]
    pub enum Value {
        /// A dense tensor.
        #[prost(message, tag = "1")]
        TensorType(Tensor),
        /// A list.
        #[prost(message, tag = "4")]
        SequenceType(Sequence),
        /// A map.
        #[prost(message, tag = "5")]
        MapType(Map),
        /// An opaque type.
        #[prost(message, tag = "7")]
        OpaqueType(Opaque),
        /// A sparse tensor.
        #[prost(message, tag = "8")]
        SparseTensorType(SparseTensor),
        /// A value that may be absent.
        #[prost(message, tag = "9")]
        OptionalType(Optional),
    }
}
