//! Shapes as a model declares them, before inference replaces their sizes.

use super::proto::tensor_shape_proto::{Dimension, dimension};
use super::proto::{TensorShapeProto, TypeProto, ValueInfoProto, type_proto};

/// A size as a model declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeclaredSize {
    /// A number.
    Number(i64),
    /// A name, or an expression such as `past + 1`, to the letter.
    Name(String),
    /// Nothing.
    Open,
}

/// The names of inputs or outputs with their declared shapes.
pub type DeclaredShapes = Vec<(String, Vec<DeclaredSize>)>;

/// Returns the declared shapes of values. Those that declare none are left out.
pub(super) fn declared_shapes(values: &[ValueInfoProto]) -> DeclaredShapes {
    let declared = |value: &ValueInfoProto| {
        let shape = shape_of(value.r#type.as_ref()?)?;
        Some((value.name().to_owned(), shape.dim.iter().map(size_of).collect()))
    };
    values.iter().filter_map(declared).collect()
}

/// The shape of a tensor, also of one that may be absent.
fn shape_of(ty: &TypeProto) -> Option<&TensorShapeProto> {
    match ty.value.as_ref()? {
        type_proto::Value::TensorType(tensor) => tensor.shape.as_ref(),
        type_proto::Value::SparseTensorType(tensor) => tensor.shape.as_ref(),
        // Only one level: sequences in an optional have no shape of their own.
        type_proto::Value::OptionalType(optional) => match optional.elem_type.as_ref()?.value.as_ref()? {
            type_proto::Value::TensorType(tensor) => tensor.shape.as_ref(),
            _ => None,
        },
        _ => None,
    }
}

fn size_of(dim: &Dimension) -> DeclaredSize {
    match &dim.value {
        Some(dimension::Value::DimValue(size)) if *size >= 0 => DeclaredSize::Number(*size),
        Some(dimension::Value::DimParam(name)) if !name.is_empty() => DeclaredSize::Name(name.clone()),
        // Exporters also write -1 for a size that they do not know.
        _ => DeclaredSize::Open,
    }
}
