//! Values that do not fit an input or output.

use std::fmt::Write;

use ort_core::dtype::DType;
use ort_core::ir::ValueType;
use ort_core::tensor::{MapKeys, OptionalValue, Tensor, Value};

/// Makes a value fit an input, or says why it does not fit.
///
/// A value for an optional input is put into an optional, and a scalar input takes one element of
/// any rank, as in ONNX Runtime.
///
/// # Errors
///
/// The text of ONNX Runtime's error.
pub fn fit(name: &str, ty: &ValueType, value: Value) -> Result<Value, String> {
    let value = as_scalar(ty, in_optional(ty, value));
    match of_value(name, ty, &value) {
        None => Ok(value),
        Some(problem) => Err(problem),
    }
}

/// Puts a value for an optional input into an optional.
pub fn in_optional(ty: &ValueType, value: Value) -> Value {
    match (ty, value) {
        (ValueType::Optional(_), value @ Value::Optional(_)) => value,
        (ValueType::Optional(element), value) => Value::Optional(OptionalValue {
            element_type: (**element).clone(),
            element: Some(Box::new(value)),
        }),
        (_, value) => value,
    }
}

fn as_scalar(ty: &ValueType, value: Value) -> Value {
    let is_scalar = matches!(ty, ValueType::Tensor(_)) && ty.shape().is_some_and(|shape| shape.is_empty());
    match &value {
        Value::Tensor(tensor) if is_scalar && tensor.element_count() == 1 => {
            tensor.reshape(&[]).map_or(value, Value::Tensor)
        }
        _ => value,
    }
}

/// Says why a value does not fit an input; `None` if it does.
fn of_value(name: &str, ty: &ValueType, value: &Value) -> Option<String> {
    match (ty, value) {
        (ValueType::Tensor(_), Value::Tensor(tensor)) => {
            of_tensor("input", name, ty, tensor.dtype(), tensor.shape())
        }
        (ValueType::Optional(element), Value::Optional(optional)) => {
            of_value(name, element, optional.element.as_deref()?)
        }
        (ValueType::Tensor(_), _) => Some(type_mismatch("input", &value.value_type(), ty)),
        (ValueType::Sequence(_) | ValueType::Map(..), Value::Tensor(_)) => {
            let kind = if matches!(ty, ValueType::Map(..)) { 1 } else { 3 };
            Some(format!("input with name: '{name}' expected to be of type: {kind} but received a tensor"))
        }
        (ValueType::Sequence(_), Value::Map(_)) | (ValueType::Map(..), Value::Sequence(_)) => {
            Some(type_mismatch("input", &value.value_type(), ty))
        }
        (ValueType::Map(expected, values), Value::Map(map)) => {
            let actual = match &map.keys {
                MapKeys::Ints(dtype, _) => *dtype,
                MapKeys::Strings(_) => DType::String,
            };
            let of_values = map.values.tensor().ok().map(Tensor::dtype);
            let fits = actual == *expected && of_values == values.dtype();
            (!fits).then(|| type_mismatch("input", &value.value_type(), ty))
        }
        _ => None,
    }
}

/// Says why a tensor of this type and shape does not fit an input or output (`what`).
pub fn of_tensor(what: &str, name: &str, ty: &ValueType, dtype: DType, shape: &[usize]) -> Option<String> {
    let ValueType::Tensor(expected) = ty else { return None };
    if expected.dtype != dtype {
        let [actual, expected] = [dtype, expected.dtype].map(DType::name);
        return Some(format!(
            "Unexpected {what} data type. Actual: (tensor({actual})) , expected: (tensor({expected}))"
        ));
    }
    let dims = expected.shape.as_ref()?;
    if shape.len() != dims.len() {
        let (got, expected) = (shape.len(), dims.len());
        return Some(format!(
            "Invalid rank for {what}: {name} Got: {got} Expected: {expected} Please fix either the \
             inputs/outputs or the model."
        ));
    }
    let mut lines = String::new();
    for (index, (got, dim)) in shape.iter().zip(dims.iter()).enumerate() {
        if let Some(expected) = dim.as_constant().filter(|expected| *expected != *got as i64) {
            // Writing to a string does not fail.
            let _ = writeln!(lines, " index: {index} Got: {got} Expected: {expected}");
        }
    }
    (!lines.is_empty()).then(|| {
        format!(
            "Got invalid dimensions for {what}: {name} for the following indices\n{lines} Please fix either \
             the inputs/outputs or the model."
        )
    })
}

fn type_mismatch(what: &str, actual: &ValueType, expected: &ValueType) -> String {
    // Types that are no tensors are in doubled parentheses.
    let (actual, expected) = (actual.onnx_name(), expected.onnx_name());
    format!("Unexpected {what} data type. Actual: (({actual})) , expected: (({expected}))")
}
