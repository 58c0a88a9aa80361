//! Values: Python objects as the values that a model's inputs take, and results as Python objects.

use numpy::PyUntypedArray;
use ort_runtime::ir::ValueType;
use ort_runtime::onnxruntime::{self, in_optional};
use ort_runtime::tensor::{MapKeys, MapValue, OptionalValue, SequenceValue};
use ort_runtime::{DType, ErrorKind, Tensor, Value};
use pyo3::exceptions::{PyException, PyRuntimeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{
    PyByteArray, PyBytes, PyComplex, PyDict, PyList, PyMapping, PyMemoryView, PyString, PyTuple, PyType,
};

use crate::arrays::{self, array_of, tensor_of};
use crate::dtypes;
use crate::error::{OrRaise, exception};
use crate::ort_value::OrtValue;

/// Reads what a caller gives for an input of this type, and checks that it fits. `None` stands for
/// an absent optional.
///
/// Arrays are never cast: an array of another element type is refused. Nested lists become arrays
/// of the model's type.
pub(crate) fn value_of(name: &str, ty: &ValueType, given: &Bound<'_, PyAny>) -> PyResult<Value> {
    let value = any_value_of(name, ty, given)?;
    let refusal = |text: String| exception(given.py(), ErrorKind::InvalidArgument, &text);
    onnxruntime::fit(name, ty, value).map_err(refusal)
}

/// Reads what a caller gives; it may be of another type than the input's.
pub(crate) fn any_value_of(name: &str, ty: &ValueType, given: &Bound<'_, PyAny>) -> PyResult<Value> {
    // Arrays are by far the most frequent.
    if let Ok(array) = given.cast::<PyUntypedArray>() {
        return Ok(in_optional(ty, Value::Tensor(tensor_of(array)?)));
    }
    if let Some(value) = OrtValue::inside(given)? {
        return Ok(in_optional(ty, value.get().value(given.py())?));
    }
    if is_mapping(given)? {
        return map_of(name, given);
    }
    match ty {
        ValueType::Tensor(tensor) => Ok(Value::Tensor(tensor_for(name, tensor.dtype, given)?)),
        ValueType::Sequence(element) => sequence_of(name, element, given),
        ValueType::Optional(_) if given.is_none() => Ok(optional(ty, None)),
        ValueType::Optional(element) => Ok(optional(ty, Some(any_value_of(name, element, given)?))),
        _ => Ok(Value::Tensor(tensor_of(&as_array(name, given)?)?)),
    }
}

fn optional(ty: &ValueType, element: Option<Value>) -> Value {
    let element_type = match ty {
        ValueType::Optional(element) => (**element).clone(),
        other => other.clone(),
    };
    Value::Optional(OptionalValue { element_type, element: element.map(Box::new) })
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
    // Ctrl-C and the like are no fault of the list.
    let refused = |problem: PyErr| match problem.is_instance_of::<PyException>(py) {
        true => PyRuntimeError::new_err("Could not create tensor from given input list"),
        false => problem,
    };
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
    // A class has the methods of its objects, but no data.
    if !given.is_instance_of::<PyType>() {
        for (attribute, function) in [("__array__", "asarray"), ("__dlpack__", "from_dlpack")] {
            if given.hasattr(attribute)? {
                return Ok(numpy.call_method1(function, (given,))?.cast_into()?);
            }
        }
        let is_text = given.is_instance_of::<PyBytes>() || given.is_instance_of::<PyByteArray>();
        if !is_text && let Ok(view) = PyMemoryView::from(given) {
            return Ok(numpy.call_method1(intern!(py, "asarray"), (view,))?.cast_into()?);
        }
    }
    Err(not_a_value(name, given)?)
}

/// The refusal of an object that is no value, in onnxruntime's words.
fn not_a_value(name: &str, given: &Bound<'_, PyAny>) -> PyResult<PyErr> {
    if given.is_instance_of::<PyType>() || !given.hasattr("__iter__")? {
        let class = given.get_type();
        return Ok(PyRuntimeError::new_err(format!("Unable to handle object of type {class}")));
    }
    // What an iterable gives first decides.
    Ok(PyRuntimeError::new_err(match given.try_iter()?.next().transpose()? {
        None => format!("Input '{name}' must not be empty."),
        Some(first) if first.is_instance_of::<PyUntypedArray>() => {
            let class = first.get_type();
            format!("Iterable of {class} should be given as array for input '{name}'.")
        }
        Some(_) => {
            format!("Input must be a list of dictionaries or a single numpy array for input '{name}'.")
        }
    }))
}

/// Reads a list of arrays of one element type.
fn sequence_of(name: &str, element: &ValueType, given: &Bound<'_, PyAny>) -> PyResult<Value> {
    let Ok(list) = given.cast::<PyList>() else {
        return Ok(Value::Tensor(tensor_of(&as_array(name, given)?)?));
    };
    let mut elements = Vec::with_capacity(list.len());
    for given in list.iter() {
        let value = element_of(name, element, &given)?;
        if let (ValueType::Tensor(expected), Value::Tensor(tensor)) = (element, &value)
            && expected.dtype != tensor.dtype()
        {
            let [actual, expected] = [tensor.dtype(), expected.dtype].map(dtypes::type_name);
            return Err(PyRuntimeError::new_err(format!(
                "an array in the list for input '{name}' has a different data type: {actual}, expected {expected}"
            )));
        }
        elements.push(value);
    }
    Ok(Value::Sequence(SequenceValue { element_type: element.clone(), elements }))
}

/// Reads an element of a sequence: an array or a value, or a dict in a sequence of maps.
fn element_of(name: &str, ty: &ValueType, given: &Bound<'_, PyAny>) -> PyResult<Value> {
    if let Ok(array) = given.cast::<PyUntypedArray>() {
        return Ok(Value::Tensor(tensor_of(array)?));
    }
    if let Some(value) = OrtValue::inside(given)? {
        return value.get().value(given.py());
    }
    if matches!(ty, ValueType::Map(..)) && is_mapping(given)? {
        return map_of(name, given);
    }
    if given.hasattr(intern!(given.py(), "__array__"))? {
        return Ok(Value::Tensor(tensor_of(&as_array(name, given)?)?));
    }
    let class = given.get_type();
    let text = format!("Input is not a tensor: {class} in the list for input '{name}'");
    Err(PyRuntimeError::new_err(text))
}

/// Whether an object is a dict, or another mapping.
fn is_mapping(given: &Bound<'_, PyAny>) -> PyResult<bool> {
    Ok(given.is_instance_of::<PyDict>() || given.cast::<PyMapping>().is_ok())
}

/// Reads a dict of numbers, with texts or integers as keys.
fn map_of(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Value> {
    let mapping = given.cast::<PyMapping>()?;
    let (keys, values) = (mapping.keys()?, mapping.values()?);
    if keys.is_empty() {
        let text = "Size of dictionary is empty, unable to run the prediction.";
        return Err(PyRuntimeError::new_err(text));
    }
    if keys.len() != values.len() {
        let text =
            format!("the mapping for input '{name}' has {} keys and {} values", keys.len(), values.len());
        return Err(PyRuntimeError::new_err(text));
    }
    let numbers = values.iter().map(|value| map_number(name, &value)).collect::<PyResult<Vec<f32>>>()?;
    let keys = map_keys(name, &keys)?;
    let values = Tensor::from_slice(&[numbers.len()], &numbers).or_raise(given.py())?;
    Ok(Value::Map(MapValue { keys, values: Box::new(Value::Tensor(values)) }))
}

/// Reads a number of a dict. What its conversion raises becomes a `Fail`, as in onnxruntime.
fn map_number(name: &str, value: &Bound<'_, PyAny>) -> PyResult<f32> {
    let py = value.py();
    value.extract().map_err(|problem: PyErr| match is_number(value) {
        Err(problem) => problem,
        Ok(true) if problem.is_instance_of::<PyException>(py) => {
            let text = format!("{}: {}", problem.get_type(py), problem.value(py));
            exception(py, ErrorKind::Fail, &text)
        }
        Ok(true) => problem,
        Ok(false) => {
            let class = value.get_type();
            PyRuntimeError::new_err(format!(
                "Unexpected value type  {class}, it cannot be linked to C type float for input '{name}'."
            ))
        }
    })
}

/// Whether Python takes an object for a number, such as `numpy.float32` or an array.
fn is_number(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    let class = value.get_type();
    for name in ["__float__", "__index__", "__int__"] {
        if class.hasattr(name)? {
            return Ok(true);
        }
    }
    Ok(value.is_instance_of::<PyComplex>())
}

/// Reads keys; the first one decides of which type all are.
fn map_keys(name: &str, keys: &Bound<'_, PyList>) -> PyResult<MapKeys> {
    let first = keys.get_item(0)?;
    let expected = if first.is_instance_of::<PyString>() { "string" } else { "int64_t" };
    let unexpected = |key: &Bound<'_, PyAny>| {
        let class = key.get_type();
        PyRuntimeError::new_err(format!(
            "Unexpected key type  {class}, it cannot be linked to C type {expected} for input '{name}'."
        ))
    };
    if first.is_instance_of::<PyString>() {
        let texts = keys.iter().map(|key| key.extract().map_err(|_| unexpected(&key)));
        return Ok(MapKeys::Strings(texts.collect::<PyResult<_>>()?));
    }
    // A number that is no int of 64 bits is an unexpected key, as of an int map.
    if !is_number(&first)? {
        let text = format!("Key type must be int or string (not {}) for input '{name}'.", first.get_type());
        return Err(PyRuntimeError::new_err(text));
    }
    let numbers = keys.iter().map(|key| key.extract().map_err(|_| unexpected(&key)));
    Ok(MapKeys::Ints(DType::I64, numbers.collect::<PyResult<_>>()?))
}

/// Copies the tensors in a sequence or an optional that are in the memory of inputs: results never
/// share it. Those of tensors do not, as the engine copies them.
pub(crate) fn apart_from_inputs(value: Value, inputs: &[(&str, Value)]) -> ort_runtime::Result<Value> {
    match value {
        Value::Sequence(mut sequence) => {
            let elements = sequence.elements.into_iter().map(|element| copied(element, inputs));
            sequence.elements = elements.collect::<ort_runtime::Result<_>>()?;
            Ok(Value::Sequence(sequence))
        }
        Value::Optional(mut optional) => {
            let element = optional.element.map(|element| copied(*element, inputs)).transpose()?;
            optional.element = element.map(Box::new);
            Ok(Value::Optional(optional))
        }
        other => Ok(other),
    }
}

fn copied(value: Value, inputs: &[(&str, Value)]) -> ort_runtime::Result<Value> {
    match value {
        Value::Tensor(tensor) if inputs.iter().any(|(_, input)| holds(input, &tensor)) => {
            Ok(Value::Tensor(tensor.to_owned_copy()?))
        }
        other => apart_from_inputs(other, inputs),
    }
}

/// Whether a tensor is in the memory of a value.
fn holds(value: &Value, tensor: &Tensor) -> bool {
    match value {
        Value::Tensor(other) => match (other.bytes(), tensor.bytes()) {
            (Some(whole), Some(part)) => {
                let range = whole.as_ptr_range();
                !part.is_empty() && range.contains(&part.as_ptr())
            }
            _ => false,
        },
        Value::Sequence(sequence) => sequence.elements.iter().any(|element| holds(element, tensor)),
        Value::Optional(optional) => optional.element.as_ref().is_some_and(|element| holds(element, tensor)),
        _ => false,
    }
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
            Ok(Bound::new(py, crate::sparse::SparseTensor::new((**sparse).clone()))?.into_any())
        }
    }
}

/// A map of scalars becomes a dict of Python's numbers. Its keys are sorted, as onnxruntime's are:
/// programs make tables of such dicts, whose columns follow the order of the first.
fn dict_of<'py>(py: Python<'py>, map: &MapValue) -> PyResult<Bound<'py, PyAny>> {
    let (keys, order) = match &map.keys {
        MapKeys::Ints(_, keys) => (PyList::new(py, keys)?, sorted_places(keys)),
        MapKeys::Strings(keys) => (PyList::new(py, keys)?, sorted_places(keys)),
    };
    let values = object_of(py, &map.values)?;
    let values = match values.cast::<PyUntypedArray>() {
        Ok(array) => array.call_method0(intern!(py, "tolist"))?,
        Err(_) => values,
    };
    let (values, dict) = (values.cast::<PyList>()?, PyDict::new(py));
    for place in order {
        dict.set_item(keys.get_item(place)?, values.get_item(place)?)?;
    }
    Ok(dict.into_any())
}

/// Returns the places of keys in ascending order of the keys.
fn sorted_places<T: Ord>(keys: &[T]) -> Vec<usize> {
    let mut places: Vec<usize> = (0..keys.len()).collect();
    // Stable: of equal keys the last one counts.
    places.sort_by_key(|place| keys.get(*place));
    places
}
