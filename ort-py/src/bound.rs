//! What callers bind: values and memory, and who keeps the memory alive.

use numpy::PyUntypedArray;
use ort_runtime::onnxruntime::in_optional;
use ort_runtime::{DType, ErrorKind, TensorBuffer, Value, ValueSpec, tensor};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrays::{HostMemory, tensor_and_memory};
use crate::convert::any_value_of;
use crate::dtypes;
use crate::error::{OrRaise, exception};
use crate::ort_value::{HostTensor, OrtValue, sizes_of};
use crate::session::{Given, name_of};

/// What a run reads, by the names of inputs.
pub(crate) struct Feed<'a> {
    pub(crate) given: &'a [(&'a str, Value)],
    /// The buffers that the run takes over.
    pub(crate) donated: Vec<(&'a str, TensorBuffer)>,
}

impl<'a> Feed<'a> {
    /// A feed that takes over nothing.
    pub(crate) fn of(given: &'a [(&'a str, Value)]) -> Feed<'a> {
        Feed { given, donated: Vec::new() }
    }
}

/// Returns a tensor that runs write in the memory of a caller.
pub(crate) fn buffer_of(py: Python<'_>, host: &HostTensor) -> PyResult<TensorBuffer> {
    TensorBuffer::from_buffer(host.dtype, &host.shape, host.memory.buffer()?).or_raise(py)
}

/// Reads what a caller gives for an input, and returns the memory that a Python object keeps alive.
pub(crate) fn lasting_value_of(
    spec: &ValueSpec,
    source: &Bound<'_, PyAny>,
) -> PyResult<(Value, Option<HostMemory>)> {
    if let Ok(array) = source.cast::<PyUntypedArray>() {
        let (tensor, memory) = tensor_and_memory(array)?;
        return Ok((in_optional(&spec.ty, Value::Tensor(tensor)), memory));
    }
    if let Some(value) = OrtValue::inside(source)? {
        let (value, memory) = value_and_memory(&value)?;
        return Ok((in_optional(&spec.ty, value), memory));
    }
    Ok((any_value_of(&spec.name, &spec.ty, source)?, None))
}

/// Empties a dict of donated values, and returns their memory as buffers. Values whose memory
/// cannot be written are read as any others.
pub(crate) fn take_donated<'a>(
    donated: &Bound<'_, PyDict>,
    input: impl Fn(&str) -> PyResult<&'a ValueSpec>,
    given: &mut Given<'a>,
) -> PyResult<Vec<(&'a str, TensorBuffer)>> {
    let entries: Vec<(Bound<'_, PyAny>, Bound<'_, PyAny>)> = donated.iter().collect();
    donated.clear();
    let mut buffers = Vec::with_capacity(entries.len());
    for (name, object) in entries {
        let spec = input(name_of(&name)?)?;
        match lasting_value_of(spec, &object)? {
            (Value::Tensor(tensor), Some(memory)) if memory.is_writable() => {
                let buffer = TensorBuffer::from_buffer(tensor.dtype(), tensor.shape(), memory.buffer()?);
                buffers.push((spec.name.as_str(), buffer.or_raise(donated.py())?));
            }
            (value, _) => given.push((&spec.name, value)),
        }
    }
    Ok(buffers)
}

/// Returns what a run reads of a value. Memory of the host is then kept alive by the value, so that
/// the garbage collector follows the reference through it.
pub(crate) fn value_and_memory(value: &Bound<'_, OrtValue>) -> PyResult<(Value, Option<HostMemory>)> {
    let py = value.py();
    let Some(host) = value.get().host() else { return Ok((value.get().value(py)?, None)) };
    let memory = host.memory.lent_by(value.clone().into_any().unbind());
    Ok((Value::Tensor(memory.tensor(py, host.dtype, &host.shape)?), Some(memory)))
}

/// Reads element type and sizes that a caller gives with a pointer.
pub(crate) fn at_pointer(
    py: Python<'_>,
    element_type: &Bound<'_, PyAny>,
    shape: &[i64],
    pointer: usize,
) -> PyResult<HostTensor> {
    let (dtype, shape) = (dtypes::named(py, element_type)?, sizes_of(shape)?);
    if dtype == DType::String {
        return Err(PyRuntimeError::new_err("Only binding non-string Tensors is currently supported"));
    }
    let len = tensor::byte_count(dtype, &shape).or_raise(py)?;
    if pointer == 0 && len > 0 {
        return Err(exception(py, ErrorKind::InvalidArgument, "the address of the memory is 0"));
    }
    Ok(HostTensor { dtype, shape, memory: HostMemory::at(pointer, len) })
}
