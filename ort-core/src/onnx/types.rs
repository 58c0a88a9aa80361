//! Conversion between `TypeProto` and [`ValueType`].

use super::proto::tensor_shape_proto::{Dimension, dimension};
use super::proto::{TensorShapeProto, TypeProto, type_proto};
use crate::dim::Dim;
use crate::dtype::DType;
use crate::ir::{SymShape, TensorType, ValueType};
use crate::{Result, ensure, error};

/// The deepest nesting of types accepted: `seq(seq(...))`.
const DEPTH_LIMIT: usize = 16;

/// Returns the element type of an ONNX code. Undefined and unknown codes are errors.
pub(super) fn dtype_from_code(code: i32) -> Result<DType> {
    DType::from_onnx(code).ok_or_else(|| match code {
        0 => error!(InvalidArgument, "the element type is not given")
            .help("set it to one of TensorProto.DataType"),
        _ => error!(InvalidArgument, "element type {code} is not known: the model is newer than this build")
            .help("use a newer build, or another element type"),
    })
}

/// Reads a type. `unnamed` supplies the dimension of an axis that has neither size nor name.
pub(super) fn type_from_proto(proto: &TypeProto, unnamed: &dyn Fn(usize) -> Dim) -> Result<ValueType> {
    type_at_depth(proto, unnamed, 0)
}

fn type_at_depth(proto: &TypeProto, unnamed: &dyn Fn(usize) -> Dim, depth: usize) -> Result<ValueType> {
    use type_proto::Value;
    ensure!(
        depth < DEPTH_LIMIT,
        InvalidGraph,
        help = "no operator takes more: declare a plainer type",
        "a type is nested more than {DEPTH_LIMIT} deep"
    );
    // A container may leave its element type open.
    let inner = |element: &Option<Box<TypeProto>>| -> Result<Box<ValueType>> {
        let element = element.as_deref().map(|element| type_at_depth(element, unnamed, depth + 1));
        Ok(Box::new(element.transpose()?.unwrap_or_default()))
    };
    let tensor = |code: i32, shape: &Option<TensorShapeProto>| -> Result<TensorType> {
        let shape = shape.as_ref().map(|shape| shape_from_proto(shape, unnamed));
        Ok(TensorType { dtype: dtype_from_code(code)?, shape })
    };
    Ok(match &proto.value {
        None => ValueType::Unknown,
        // An undefined element type declares nothing, so inference decides.
        Some(Value::TensorType(ty)) if ty.elem_type() == 0 => ValueType::Unknown,
        Some(Value::TensorType(ty)) => ValueType::Tensor(tensor(ty.elem_type(), &ty.shape)?),
        Some(Value::SparseTensorType(ty)) => ValueType::Sparse(tensor(ty.elem_type(), &ty.shape)?),
        Some(Value::SequenceType(ty)) => ValueType::Sequence(inner(&ty.elem_type)?),
        Some(Value::OptionalType(ty)) => ValueType::Optional(inner(&ty.elem_type)?),
        Some(Value::MapType(ty)) => ValueType::Map(dtype_from_code(ty.key_type())?, inner(&ty.value_type)?),
        Some(Value::OpaqueType(_)) => return Err(error!(NotImplemented, "opaque types are not supported")),
    })
}

fn shape_from_proto(shape: &TensorShapeProto, unnamed: &dyn Fn(usize) -> Dim) -> SymShape {
    let dim = |(axis, dim): (usize, &Dimension)| match &dim.value {
        // Some old exporters write a negative number for an unknown size.
        Some(dimension::Value::DimValue(value)) if *value >= 0 => Dim::constant(*value),
        // Equal names are equal sizes, but an empty name and `?` name nothing.
        Some(dimension::Value::DimParam(name)) if !matches!(name.trim(), "" | "?") => {
            match Dim::parse(name) {
                // `parse` reads digits as a constant, but a dim_param is a name.
                dim if dim.as_constant().is_some() => Dim::named(name),
                dim => dim,
            }
        }
        _ => unnamed(axis),
    };
    shape.dim.iter().enumerate().map(dim).collect()
}

/// Writes a type. An unknown type is not written.
pub(super) fn type_to_proto(ty: &ValueType) -> Option<TypeProto> {
    use type_proto::Value;
    let boxed = |ty: &ValueType| type_to_proto(ty).map(Box::new);
    let value = match ty {
        ValueType::Unknown => return None,
        ValueType::Tensor(tensor) => Value::TensorType(type_proto::Tensor {
            elem_type: Some(tensor.dtype.onnx_code()),
            shape: tensor.shape.as_deref().map(shape_to_proto),
        }),
        ValueType::Sparse(tensor) => Value::SparseTensorType(type_proto::SparseTensor {
            elem_type: Some(tensor.dtype.onnx_code()),
            shape: tensor.shape.as_deref().map(shape_to_proto),
        }),
        ValueType::Sequence(element) => {
            Value::SequenceType(type_proto::Sequence { elem_type: boxed(element) })
        }
        ValueType::Optional(element) => {
            Value::OptionalType(type_proto::Optional { elem_type: boxed(element) })
        }
        ValueType::Map(key, value) => {
            Value::MapType(type_proto::Map { key_type: Some(key.onnx_code()), value_type: boxed(value) })
        }
    };
    Some(TypeProto { denotation: None, value: Some(value) })
}

fn shape_to_proto(shape: &[Dim]) -> TensorShapeProto {
    let dim = |dim: &Dim| {
        let value = match dim.as_constant() {
            Some(value) => Some(dimension::Value::DimValue(value)),
            // ONNX has no notation for an unknown inside an expression, so the whole dimension is
            // open.
            None if dim.has_unknown() => None,
            None => Some(dimension::Value::DimParam(dim.to_string())),
        };
        Dimension { denotation: None, value }
    };
    TensorShapeProto { dim: shape.iter().map(dim).collect() }
}
