//! Values: Python objects as the values that a model's inputs take, and results as Python objects.

use numpy::PyUntypedArray;
use ort_runtime::ir::ValueType;
use ort_runtime::tensor::{MapKeys, MapValue, OptionalValue, SequenceValue};
use ort_runtime::{DType, ErrorKind, Tensor, Value};
use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};

use crate::arrays::{self, array_of, tensor_of};
use crate::dtypes;
use crate::error::{OrRaise, exception};
use crate::metadata::type_text;
use crate::ort_value::OrtValue;

/// Reads what a caller gives for an input of this type. `None` stands for an absent optional.
///
/// Arrays are never cast: an array of another element type is refused. Nested lists become arrays
/// of the model's type.
pub(crate) fn value_of(name: &str, ty: &ValueType, given: &Bound<'_, PyAny>) -> PyResult<Value> {
    if let Some(value) = OrtValue::inside(given)? {
        return checked(given.py(), name, ty, value.get().value(given.py())?);
    }
    match ty {
        ValueType::Tensor(tensor) => {
            let value = Value::Tensor(tensor_for(name, tensor.dtype, given)?);
            checked(given.py(), name, ty, value)
        }
        ValueType::Sequence(element) => sequence_of(name, element, given),
        ValueType::Map(key, value) => map_of(name, *key, value, given),
        ValueType::Optional(element) => {
            let element_type = (**element).clone();
            let element = match given.is_none() {
                true => None,
                false => Some(Box::new(value_of(name, element, given)?)),
            };
            Ok(Value::Optional(OptionalValue { element_type, element }))
        }
        ValueType::Sparse(_) | ValueType::Unknown => Ok(Value::Tensor(tensor_of(&as_array(name, given)?)?)),
    }
}

/// Refuses a tensor of another element type, in onnxruntime's words.
fn checked(py: Python<'_>, name: &str, expected: &ValueType, value: Value) -> PyResult<Value> {
    let actual = value.value_type();
    let fits = match (expected, &value) {
        (ValueType::Tensor(expected), Value::Tensor(tensor)) => expected.dtype == tensor.dtype(),
        (ValueType::Tensor(_), _) => false,
        (ValueType::Sequence(_) | ValueType::Map(..), Value::Tensor(_)) => {
            let kind = if matches!(expected, ValueType::Map(..)) { 2 } else { 3 };
            let text =
                format!("input with name: '{name}' expected to be of type: {kind} but received a tensor");
            return Err(exception(py, ErrorKind::InvalidArgument, &text));
        }
        _ => true,
    };
    if fits {
        return Ok(value);
    }
    let (actual, expected) = (type_text(&actual), type_text(expected));
    let text = format!("Unexpected input data type. Actual: ({actual}) , expected: ({expected})");
    Err(exception(py, ErrorKind::InvalidArgument, &text))
}

/// Reads an array, or nested lists as an array of the model's type.
fn tensor_for(name: &str, dtype: DType, given: &Bound<'_, PyAny>) -> PyResult<Tensor> {
    if let Ok(array) = given.cast::<PyUntypedArray>() {
        return tensor_of(array);
    }
    if let Ok(list) = given.cast::<PyList>() {
        return from_list(dtype, list);
    }
    if given.is_instance_of::<PyTuple>() || given.is_instance_of::<PyString>() {
        return Err(not_a_value(name, given)?);
    }
    tensor_of(&as_array(name, given)?)
}

/// Converts nested lists to the model's type: integers become floats, and floats are truncated.
fn from_list(dtype: DType, list: &Bound<'_, PyList>) -> PyResult<Tensor> {
    let py = list.py();
    let refused = |_: PyErr| PyRuntimeError::new_err("Could not create tensor from given input list");
    let descr = dtypes::descr_of(py, dtype)?;
    let array = arrays::numpy(py)?.call_method1(intern!(py, "array"), (list, descr)).map_err(refused)?;
    tensor_of(array.cast::<PyUntypedArray>()?)
}

/// Takes what has an array in it: `__array__`, `__dlpack__`, buffers, numpy's scalars.
fn as_array<'py>(name: &str, given: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyUntypedArray>> {
    let py = given.py();
    if let Ok(array) = given.cast::<PyUntypedArray>() {
        return Ok(array.clone());
    }
    let numpy = arrays::numpy(py)?;
    for (attribute, function) in [("__array__", "asarray"), ("__dlpack__", "from_dlpack")] {
        if given.hasattr(attribute)? {
            return Ok(numpy.call_method1(function, (given,))?.cast_into()?);
        }
    }
    if given.is_instance_of::<pyo3::types::PyMemoryView>() {
        return Ok(numpy.call_method1(intern!(py, "asarray"), (given,))?.cast_into()?);
    }
    Err(not_a_value(name, given)?)
}

/// The refusal of an object that is no value, in onnxruntime's words.
fn not_a_value(name: &str, given: &Bound<'_, PyAny>) -> PyResult<PyErr> {
    let class = given.get_type();
    let is_iterable = given.hasattr("__iter__")? && !given.is_instance_of::<PyString>();
    Ok(PyRuntimeError::new_err(if given.is_instance_of::<PyFloat>() || given.is_instance_of::<PyInt>() {
        format!("Unable to handle object of type {}", class.as_any().str()?)
    } else if is_iterable {
        format!("Iterable of {} should be given as array for input '{name}'.", class.as_any().str()?)
    } else {
        format!("Input must be a list of dictionaries or a single numpy array for input '{name}'.")
    }))
}

fn sequence_of(name: &str, element: &ValueType, given: &Bound<'_, PyAny>) -> PyResult<Value> {
    let Ok(list) = given.cast::<PyList>() else {
        let value = Value::Tensor(tensor_of(&as_array(name, given)?)?);
        return checked(given.py(), name, &ValueType::Sequence(Box::new(element.clone())), value);
    };
    let elements = list.iter().map(|given| value_of(name, element, &given)).collect::<PyResult<_>>()?;
    Ok(Value::Sequence(SequenceValue { element_type: element.clone(), elements }))
}

fn map_of(name: &str, key: DType, value: &ValueType, given: &Bound<'_, PyAny>) -> PyResult<Value> {
    let py = given.py();
    let refused =
        || PyRuntimeError::new_err(format!("Input '{name}' is a map: give a dict that is not empty"));
    let dict = given.cast::<PyDict>().map_err(|_| refused())?;
    if dict.is_empty() {
        return Err(refused());
    }
    let keys = match key {
        DType::String => {
            MapKeys::Strings(dict.keys().iter().map(|key| key.extract()).collect::<PyResult<_>>()?)
        }
        key => MapKeys::Ints(key, dict.keys().iter().map(|key| key.extract()).collect::<PyResult<_>>()?),
    };
    let values = match value {
        ValueType::Tensor(tensor) => {
            Value::Tensor(from_list(tensor.dtype, &dict.values())?.reshape(&[dict.len()]).or_raise(py)?)
        }
        other => sequence_of(name, other, dict.values().as_any())?,
    };
    Ok(Value::Map(MapValue { keys, values: Box::new(values) }))
}

/// Returns a result as programs expect it: arrays, lists, dicts, `None`.
pub(crate) fn object_of<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    match value {
        Value::Tensor(tensor) => array_of(py, tensor),
        Value::Sequence(sequence) => {
            let elements = sequence.elements.iter().map(|value| object_of(py, value));
            Ok(PyList::new(py, elements.collect::<PyResult<Vec<_>>>()?)?.into_any())
        }
        Value::Optional(optional) => match &optional.element {
            Some(value) => object_of(py, value),
            None => Ok(py.None().into_bound(py)),
        },
        Value::Map(map) => dict_of(py, map),
        Value::Sparse(sparse) => {
            Ok(Bound::new(py, crate::sparse::SparseTensor::new(sparse.clone()))?.into_any())
        }
    }
}

/// A map of scalars becomes a dict of Python's numbers.
fn dict_of<'py>(py: Python<'py>, map: &MapValue) -> PyResult<Bound<'py, PyAny>> {
    let keys = match &map.keys {
        MapKeys::Ints(_, keys) => PyList::new(py, keys)?,
        MapKeys::Strings(keys) => PyList::new(py, keys)?,
    };
    let values = object_of(py, &map.values)?;
    let values = match values.cast::<PyUntypedArray>() {
        Ok(array) => array.call_method0(intern!(py, "tolist"))?,
        Err(_) => values,
    };
    let dict = PyDict::new(py);
    for (key, value) in keys.iter().zip(values.cast::<PyList>()?.iter()) {
        dict.set_item(key, value)?;
    }
    Ok(dict.into_any())
}
