//! Serialization of values of every kind (tensor, sparse tensor, sequence, optional, map) as in
//! ONNX test data files.

use bytes::Bytes;
use prost::Message;

use super::external::ExternalData;
use super::proto::sequence_proto::DataType as Kind;
use super::proto::{MapProto, OptionalProto, SequenceProto, SparseTensorProto, TensorProto};
use super::tensor::{sparse_from_proto, sparse_to_proto, tensor_from_proto, tensor_to_proto};
use super::types::dtype_from_code;
use crate::dtype::DType;
use crate::ir::{TensorType, ValueType};
use crate::tensor::{MapKeys, MapValue, OptionalValue, SequenceValue, SparseTensor, Tensor, Value};
use crate::{Result, Within, ensure, error};

/// Reads a value of type `ty` from the bytes of a test data file. The file does not say which
/// message it holds, so the type must. An unknown type is read as a tensor.
///
/// ```
/// use ort_core::ir::ValueType;
/// use ort_core::onnx::{value_from_bytes, value_to_bytes};
/// use ort_core::tensor::{Tensor, Value};
/// let value = Value::Tensor(Tensor::from_slice(&[2], &[1.0f32, 2.0])?);
/// let bytes = value_to_bytes("x", &value)?;
/// let back = value_from_bytes(bytes.into(), &ValueType::Unknown)?;
/// assert_eq!(back.tensor()?.to_vec::<f32>()?, [1.0, 2.0]);
/// # Ok::<(), ort_core::Error>(())
/// ```
pub fn value_from_bytes(bytes: Bytes, ty: &ValueType) -> Result<Value> {
    match ty {
        ValueType::Unknown | ValueType::Tensor(_) => read_tensor(decode(bytes)?),
        ValueType::Sparse(_) => read_sparse(decode(bytes)?),
        ValueType::Sequence(element) => read_sequence(decode(bytes)?, Some(element)),
        ValueType::Optional(element) => read_optional(decode(bytes)?, Some(element)),
        ValueType::Map(..) => read_map(decode(bytes)?),
    }
}

/// Returns the name stored in a tensor file, if the bytes are a tensor and it has one.
pub fn tensor_name(bytes: Bytes) -> Option<String> {
    TensorProto::decode(bytes).ok()?.name.filter(|name| !name.is_empty())
}

/// Serializes a value as the bytes of a test data file.
pub fn value_to_bytes(name: &str, value: &Value) -> Result<Vec<u8>> {
    Ok(match value {
        Value::Tensor(tensor) => tensor_to_proto(name, tensor)?.encode_to_vec(),
        Value::Sparse(sparse) => sparse_to_proto(name, sparse)?.encode_to_vec(),
        Value::Sequence(sequence) => write_sequence(name, sequence)?.encode_to_vec(),
        Value::Optional(optional) => write_optional(name, optional)?.encode_to_vec(),
        Value::Map(map) => write_map(name, map)?.encode_to_vec(),
    })
}

fn decode<M: Message + Default>(bytes: Bytes) -> Result<M> {
    M::decode(bytes).map_err(|problem| error!(InvalidProtobuf, "the data file is damaged: {problem}"))
}

/// Test data cannot refer to external files.
fn read_tensor(proto: TensorProto) -> Result<Value> {
    tensor_from_proto(proto, &mut ExternalData::unavailable()).map(Value::Tensor)
}

fn read_sparse(proto: SparseTensorProto) -> Result<Value> {
    sparse_from_proto(proto, &mut ExternalData::unavailable()).map(|sparse| Value::Sparse(Box::new(sparse)))
}

fn kind_of(code: i32) -> Result<Kind> {
    Kind::try_from(code).map_err(|_| error!(NotImplemented, "value kind {code} is not known"))
}

fn read_sequence(proto: SequenceProto, element: Option<&ValueType>) -> Result<Value> {
    // Inner sequences get no declared type: their elements show it.
    let elements: Result<Vec<Value>> = match kind_of(proto.elem_type())? {
        Kind::Undefined => Ok(Vec::new()),
        Kind::Tensor => proto.tensor_values.into_iter().map(read_tensor).collect(),
        Kind::SparseTensor => proto.sparse_tensor_values.into_iter().map(read_sparse).collect(),
        Kind::Sequence => proto.sequence_values.into_iter().map(|inner| read_sequence(inner, None)).collect(),
        Kind::Map => proto.map_values.into_iter().map(read_map).collect(),
        Kind::Optional => proto.optional_values.into_iter().map(|inner| read_optional(inner, None)).collect(),
    };
    let elements = elements.within(|| format!("sequence '{}'", proto.name.unwrap_or_default()))?;
    let element_type = element_type(element, elements.first());
    Ok(Value::Sequence(SequenceValue { element_type, elements }))
}

fn read_optional(proto: OptionalProto, element: Option<&ValueType>) -> Result<Value> {
    let inner = match kind_of(proto.elem_type())? {
        Kind::Undefined => None,
        // A kind whose field is not set counts as empty.
        Kind::Tensor => proto.tensor_value.map(|inner| read_tensor(*inner)),
        Kind::SparseTensor => proto.sparse_tensor_value.map(|inner| read_sparse(*inner)),
        Kind::Sequence => proto.sequence_value.map(|inner| read_sequence(*inner, None)),
        Kind::Map => proto.map_value.map(|inner| read_map(*inner)),
        Kind::Optional => proto.optional_value.map(|inner| read_optional(*inner, None)),
    };
    let inner = inner.transpose().within(|| format!("optional '{}'", proto.name.unwrap_or_default()))?;
    let element_type = element_type(element, inner.as_ref());
    Ok(Value::Optional(OptionalValue { element_type, element: inner.map(Box::new) }))
}

fn read_map(proto: MapProto) -> Result<Value> {
    let dtype = dtype_from_code(proto.key_type()).within(|| "map keys")?;
    let values = proto.values.unwrap_or_default();
    let Value::Sequence(values) = read_sequence(values, None)? else {
        return Err(error!(Fail, "the values of a map are not a sequence"));
    };
    let keys = if dtype == DType::String {
        let text = |bytes: Bytes| {
            String::from_utf8(bytes.to_vec()).map_err(|_| error!(InvalidGraph, "a map key is not UTF-8"))
        };
        MapKeys::Strings(proto.string_keys.into_iter().map(text).collect::<Result<_>>()?)
    } else {
        MapKeys::Ints(dtype, proto.keys)
    };
    let count = match &keys {
        MapKeys::Ints(_, keys) => keys.len(),
        MapKeys::Strings(keys) => keys.len(),
    };
    ensure!(
        values.elements.len() == count,
        InvalidGraph,
        "a map has {count} keys and {} values",
        values.elements.len()
    );
    Ok(Value::Map(MapValue { keys, values: Box::new(stack(values)?) }))
}

/// Stacks the values of a map into one tensor if each is a single element. Otherwise returns the
/// sequence unchanged.
fn stack(values: SequenceValue) -> Result<Value> {
    let tensors: Option<Vec<&Tensor>> = values.elements.iter().map(|value| value.tensor().ok()).collect();
    let tensors = tensors.unwrap_or_default();
    let Some(dtype) = tensors.first().map(|tensor| tensor.dtype()) else {
        return Ok(Value::Sequence(values));
    };
    // Packed elements would have to be shifted to share bytes.
    let single =
        |tensor: &&Tensor| tensor.dtype() == dtype && tensor.element_count() == 1 && !dtype.is_packed();
    if !tensors.iter().all(single) {
        return Ok(Value::Sequence(values));
    }
    let shape = [tensors.len()];
    let stacked = if dtype == DType::String {
        let strings: Result<Vec<_>> = tensors.iter().map(|tensor| tensor.strings()).collect();
        Tensor::from_strings(&shape, strings?.concat())?
    } else {
        // Tensors of a data file are in host memory, so none is skipped.
        let bytes: Vec<&[u8]> = tensors.iter().filter_map(|tensor| tensor.bytes().map(|b| &b[..])).collect();
        Tensor::from_bytes(dtype, &shape, bytes.concat().into())?
    };
    Ok(Value::Tensor(stacked))
}

fn element_type(declared: Option<&ValueType>, first: Option<&Value>) -> ValueType {
    match declared {
        // The declared type comes first, because an empty sequence has no element to show one.
        Some(declared) if *declared != ValueType::Unknown => declared.clone(),
        _ => first.map(type_of).unwrap_or_default(),
    }
}

/// Returns the type of a value. Shapes are left open, because the elements of a sequence may differ
/// in shape.
fn type_of(value: &Value) -> ValueType {
    let open = |dtype| TensorType { dtype, shape: None };
    match value {
        Value::Tensor(tensor) => ValueType::Tensor(open(tensor.dtype())),
        Value::Sparse(sparse) => ValueType::Sparse(open(sparse.values.dtype())),
        Value::Sequence(sequence) => ValueType::Sequence(Box::new(sequence.element_type.clone())),
        Value::Optional(optional) => ValueType::Optional(Box::new(optional.element_type.clone())),
        Value::Map(map) => {
            let key = match &map.keys {
                MapKeys::Ints(dtype, _) => *dtype,
                MapKeys::Strings(_) => DType::String,
            };
            ValueType::Map(key, Box::new(type_of(&map.values)))
        }
    }
}

fn kind_of_type(ty: &ValueType) -> Kind {
    match ty {
        ValueType::Unknown => Kind::Undefined,
        ValueType::Tensor(_) => Kind::Tensor,
        ValueType::Sparse(_) => Kind::SparseTensor,
        ValueType::Sequence(_) => Kind::Sequence,
        ValueType::Optional(_) => Kind::Optional,
        ValueType::Map(..) => Kind::Map,
    }
}

fn name_field(name: &str) -> Option<String> {
    (!name.is_empty()).then(|| name.to_string())
}

fn write_sequence(name: &str, sequence: &SequenceValue) -> Result<SequenceProto> {
    // The elements decide, because the declared type may be unknown.
    let first = sequence.elements.first().map(type_of);
    let kind = kind_of_type(first.as_ref().unwrap_or(&sequence.element_type));
    let mut proto =
        SequenceProto { name: name_field(name), elem_type: Some(kind as i32), ..SequenceProto::default() };
    for element in &sequence.elements {
        ensure!(
            kind_of_type(&type_of(element)) == kind,
            InvalidArgument,
            "a sequence holds values of two kinds"
        );
        match element {
            Value::Tensor(tensor) => proto.tensor_values.push(tensor_to_proto("", tensor)?),
            Value::Sparse(sparse) => proto.sparse_tensor_values.push(write_sparse(sparse)?),
            Value::Sequence(inner) => proto.sequence_values.push(write_sequence("", inner)?),
            Value::Optional(inner) => proto.optional_values.push(write_optional("", inner)?),
            Value::Map(inner) => proto.map_values.push(write_map("", inner)?),
        }
    }
    Ok(proto)
}

fn write_sparse(sparse: &SparseTensor) -> Result<SparseTensorProto> {
    sparse_to_proto("", sparse)
}

fn write_optional(name: &str, optional: &OptionalValue) -> Result<OptionalProto> {
    let mut proto = OptionalProto { name: name_field(name), ..OptionalProto::default() };
    let Some(element) = &optional.element else {
        // ONNX marks an empty optional by the kind `Undefined`.
        proto.elem_type = Some(Kind::Undefined as i32);
        return Ok(proto);
    };
    proto.elem_type = Some(kind_of_type(&type_of(element)) as i32);
    match &**element {
        Value::Tensor(tensor) => proto.tensor_value = Some(Box::new(tensor_to_proto("", tensor)?)),
        Value::Sparse(sparse) => proto.sparse_tensor_value = Some(Box::new(write_sparse(sparse)?)),
        Value::Sequence(inner) => proto.sequence_value = Some(Box::new(write_sequence("", inner)?)),
        Value::Optional(inner) => proto.optional_value = Some(Box::new(write_optional("", inner)?)),
        Value::Map(inner) => proto.map_value = Some(Box::new(write_map("", inner)?)),
    }
    Ok(proto)
}

fn write_map(name: &str, map: &MapValue) -> Result<MapProto> {
    // The file holds a sequence of values, whether they are stacked here or not.
    let values = match &*map.values {
        Value::Sequence(sequence) => write_sequence("", sequence)?,
        Value::Tensor(tensor) => write_sequence("", &unstack(tensor)?)?,
        other => return Err(error!(InvalidArgument, "the values of a map are {}", other.kind_name())),
    };
    let mut proto = MapProto { name: name_field(name), values: Some(values), ..MapProto::default() };
    match &map.keys {
        MapKeys::Ints(dtype, keys) => {
            proto.key_type = Some(dtype.onnx_code());
            proto.keys = keys.clone();
        }
        MapKeys::Strings(keys) => {
            proto.key_type = Some(DType::String.onnx_code());
            proto.string_keys = keys.iter().map(|key| Bytes::from(key.clone())).collect();
        }
    }
    Ok(proto)
}

/// Splits a tensor along its first dimension.
fn unstack(tensor: &Tensor) -> Result<SequenceValue> {
    let (&count, rest) = tensor
        .shape()
        .split_first()
        .ok_or_else(|| error!(InvalidArgument, "map values have no dimension"))?;
    let size: usize = rest.iter().product();
    let part = |index: usize| Ok(Value::Tensor(tensor.slice(index * size, rest)?));
    let elements = (0..count).map(part).collect::<Result<Vec<Value>>>()?;
    Ok(SequenceValue { element_type: ValueType::tensor(tensor.dtype(), None), elements })
}
