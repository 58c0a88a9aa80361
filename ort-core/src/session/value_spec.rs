//! The inputs and outputs of a model: their names and types, and the check of a value against them.

use crate::dtype::DType;
use crate::ir::ValueType;
use crate::tensor::{MapKeys, Value, ValueView};
use crate::{Result, ensure, error};

/// An input or output of a model.
#[derive(Clone, Debug)]
pub struct ValueSpec {
    /// The name.
    pub name: String,
    /// The type, with symbolic sizes.
    pub ty: ValueType,
    /// Whether the caller may omit it.
    pub has_default: bool,
}

/// Refuses a value of another type. Sizes are compared later, when all of them are known.
pub(super) fn check_type(name: &str, expected: &ValueType, value: &ValueView<'_>) -> Result<()> {
    match (expected, value) {
        (ValueType::Tensor(expected), _) => {
            let tensor = value.tensor().map_err(|problem| problem.within(format!("input '{name}'")))?;
            ensure!(
                expected.dtype == tensor.dtype(),
                InvalidArgument,
                "input '{name}' is {}, expected {}",
                tensor.dtype().name(),
                expected.dtype.name()
            );
        }
        (_, ValueView::Tensor(tensor)) => ensure!(
            fits_dtype(expected, tensor.dtype()),
            InvalidArgument,
            "input '{name}': expected {expected}, got a tensor of {}",
            tensor.dtype().name()
        ),
        (_, ValueView::Value(value)) => {
            if let Some((part, actual)) = misfit(expected, value) {
                let of = if part == expected { String::new() } else { format!(" in {expected}") };
                let actual = actual.value_type();
                return Err(error!(InvalidArgument, "input '{name}': expected {part}{of}, got {actual}"));
            }
        }
    }
    Ok(())
}

/// Whether a tensor of this element type may stand for a value of the expected type. An optional
/// may hold a tensor, and an unknown type accepts any value.
fn fits_dtype(expected: &ValueType, dtype: DType) -> bool {
    match expected {
        ValueType::Unknown => true,
        ValueType::Tensor(expected) => expected.dtype == dtype,
        ValueType::Optional(element) => fits_dtype(element, dtype),
        ValueType::Sequence(_) | ValueType::Map(..) | ValueType::Sparse(_) => false,
    }
}

/// The first part of a value that has another type than expected, and the type that it should have.
fn misfit<'a>(expected: &'a ValueType, value: &'a Value) -> Option<(&'a ValueType, &'a Value)> {
    let fits = match (expected, value) {
        (ValueType::Unknown, _) => true,
        (_, Value::Tensor(tensor)) => fits_dtype(expected, tensor.dtype()),
        (ValueType::Optional(expected), Value::Optional(optional)) => {
            return misfit(expected, optional.element.as_deref()?);
        }
        (ValueType::Optional(expected), _) => return misfit(expected, value),
        (ValueType::Sequence(expected), Value::Sequence(sequence)) => {
            return sequence.elements.iter().find_map(|element| misfit(expected, element));
        }
        (ValueType::Map(key, expected), Value::Map(map)) => {
            let of_keys = match &map.keys {
                MapKeys::Ints(dtype, _) => *dtype,
                MapKeys::Strings(_) => DType::String,
            };
            if *key == of_keys {
                // The elements of one tensor, or one value for each key.
                return match &*map.values {
                    Value::Sequence(values) => {
                        values.elements.iter().find_map(|value| misfit(expected, value))
                    }
                    values => misfit(expected, values),
                };
            }
            false
        }
        (ValueType::Sparse(expected), Value::Sparse(sparse)) => expected.dtype == sparse.values.dtype(),
        _ => false,
    };
    (!fits).then_some((expected, value))
}
