//! `TensorProto` and `SparseTensorProto`: serialized constants.

use bytes::Bytes;

use super::StringStringEntryProto;

/// A tensor: shape, element type, and data in one of several forms.
///
/// The data is in the file that `external_data` names if `data_location` says so. Else it is in
/// `raw_data` if that is set, or in the typed field for `data_type`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TensorProto {
    /// The shape.
    #[prost(int64, repeated, packed = "false", tag = "1")]
    pub dims: Vec<i64>,
    /// The element type, a [`tensor_proto::DataType`].
    #[prost(int32, optional, tag = "2")]
    pub data_type: Option<i32>,
    /// The part of a larger tensor that this is. No known exporter uses it.
    #[prost(message, optional, tag = "3")]
    pub segment: Option<tensor_proto::Segment>,
    /// Elements of float; (real, imaginary) pairs of complex64.
    #[prost(float, repeated, tag = "4")]
    pub float_data: Vec<f32>,
    /// Elements of int32, narrower integers, bool, and the bits of narrow floats. Sub-byte elements
    /// are packed into bytes, except 6-bit floats, which are stored one per entry.
    #[prost(int32, repeated, tag = "5")]
    pub int32_data: Vec<i32>,
    /// Elements of string, in UTF-8.
    #[prost(bytes = "bytes", repeated, tag = "6")]
    pub string_data: Vec<Bytes>,
    /// Elements of int64.
    #[prost(int64, repeated, tag = "7")]
    pub int64_data: Vec<i64>,
    /// The tensor's name.
    #[prost(string, optional, tag = "8")]
    pub name: Option<String>,
    /// Elements of any type except string, little-endian, with sub-byte elements packed from the
    /// low bits up.
    #[prost(bytes = "bytes", optional, tag = "9")]
    pub raw_data: Option<Bytes>,
    /// Elements of double; (real, imaginary) pairs of complex128.
    #[prost(double, repeated, tag = "10")]
    pub double_data: Vec<f64>,
    /// Elements of uint64 and uint32.
    #[prost(uint64, repeated, tag = "11")]
    pub uint64_data: Vec<u64>,
    /// Human-readable documentation.
    #[prost(bytes = "bytes", optional, tag = "12")]
    pub doc_string: Option<Bytes>,
    /// The location of external data: keys `location`, `offset`, `length`, `checksum`.
    #[prost(message, repeated, tag = "13")]
    pub external_data: Vec<StringStringEntryProto>,
    /// Whether the data is in the message or external, a [`tensor_proto::DataLocation`].
    #[prost(int32, optional, tag = "14")]
    pub data_location: Option<i32>,
    /// Named metadata.
    #[prost(message, repeated, tag = "16")]
    pub metadata_props: Vec<StringStringEntryProto>,
}

/// The message and enumerations of [`TensorProto`].
pub mod tensor_proto {
    /// A part of a larger tensor, as a range of its elements.
    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub struct Segment {
        /// The first element.
        #[prost(int64, optional, tag = "1")]
        pub begin: Option<i64>,
        /// One past the last element.
        #[prost(int64, optional, tag = "2")]
        pub end: Option<i64>,
    }

    /// The element types.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
    #[repr(i32)]
    #[allow(missing_docs)] // The names are the standard's and say it all.
    pub enum DataType {
        Undefined = 0,
        Float = 1,
        Uint8 = 2,
        Int8 = 3,
        Uint16 = 4,
        Int16 = 5,
        Int32 = 6,
        Int64 = 7,
        String = 8,
        Bool = 9,
        Float16 = 10,
        Double = 11,
        Uint32 = 12,
        Uint64 = 13,
        Complex64 = 14,
        Complex128 = 15,
        Bfloat16 = 16,
        Float8e4m3fn = 17,
        Float8e4m3fnuz = 18,
        Float8e5m2 = 19,
        Float8e5m2fnuz = 20,
        Uint4 = 21,
        Int4 = 22,
        Float4e2m1 = 23,
        Float8e8m0 = 24,
        Uint2 = 25,
        Int2 = 26,
        Float6e2m3 = 27,
        Float6e3m2 = 28,
    }

    /// The location of a tensor's data.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
    #[repr(i32)]
    pub enum DataLocation {
        /// In the message.
        Default = 0,
        /// In the file that `external_data` names.
        External = 1,
    }
}

/// A tensor given by its elements that are not zero (or not the empty string).
#[derive(Clone, PartialEq, prost::Message)]
pub struct SparseTensorProto {
    /// The elements, shape `[n]`; its name is the name of the sparse tensor.
    #[prost(message, optional, tag = "1")]
    pub values: Option<TensorProto>,
    /// Their positions, ascending: `[n]` linear ones, or `[n, rank]` coordinates.
    #[prost(message, optional, tag = "2")]
    pub indices: Option<TensorProto>,
    /// The shape of the dense tensor.
    #[prost(int64, repeated, packed = "false", tag = "3")]
    pub dims: Vec<i64>,
}
