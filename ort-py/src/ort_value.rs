//! `OrtValue`: a value that lives outside of a run, in host memory or a device's.

use std::sync::Arc;

use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use ort_runtime::{DType, DeviceId, Session, Tensor, TensorBuffer, Value, tensor::byte_count};
use parking_lot::Mutex;
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyList;
use pyo3::{PyTraverseError, PyVisit};
use smallvec::SmallVec;

use crate::arrays::{HostMemory, READ_ONLY, array_of, is_on_host, over, readable, tensor_of};
use crate::cancel::{detached, enter};
use crate::convert::object_of;
use crate::device::require_host;
use crate::error::OrRaise;
use crate::metadata::type_text;
use crate::sparse::SparseTensor;
use crate::{dlpack, dtypes};

/// A tensor in host memory that is read and written where it is.
#[derive(Clone)]
pub(crate) struct HostTensor {
    pub(crate) dtype: DType,
    pub(crate) shape: SmallVec<[usize; 8]>,
    pub(crate) memory: HostMemory,
}

/// What a value holds.
#[derive(Clone)]
enum Held {
    /// Numbers in host memory.
    Host(HostTensor),
    /// Anything else, and results of runs.
    Value(Value),
    /// The output of a binding that did not run yet.
    Nothing,
    /// Memory of a device that runs write to, kept by the session whose device it is.
    Device(DeviceTensor),
    /// A sparse tensor in the format that it was given in.
    Sparse(Box<SparseTensor>),
}

/// What is wrong before a binding has run.
pub(crate) const NOT_COMPUTED: &str = "the outputs are not computed: run the binding first";

/// A tensor in the memory of a session's device, which runs of the session may write.
#[derive(Clone)]
pub(crate) struct DeviceTensor {
    memory: Arc<Mutex<DeviceMemory>>,
    session: Arc<Session>,
}

/// Who has the memory of a [`DeviceTensor`].
enum DeviceMemory {
    /// The value itself.
    Own(TensorBuffer),
    /// A binding, to which it is bound as an output. After a run the value shares it.
    Bound(Option<Value>),
}

impl DeviceTensor {
    fn value(&self, py: Python<'_>) -> PyResult<Value> {
        match &*self.memory.lock() {
            DeviceMemory::Own(buffer) => Ok(Value::Tensor(buffer.tensor().or_raise(py)?)),
            DeviceMemory::Bound(Some(value)) => Ok(value.clone()),
            DeviceMemory::Bound(None) => Err(PyRuntimeError::new_err(
                "the value is bound as an output, and the binding was not run since",
            )),
        }
    }

    /// Hands the memory to a binding. A value that another binding has gets memory of its own.
    pub(crate) fn hand_over(&self, py: Python<'_>) -> PyResult<TensorBuffer> {
        let mut memory = self.memory.lock();
        match std::mem::replace(&mut *memory, DeviceMemory::Bound(None)) {
            DeviceMemory::Own(buffer) => Ok(buffer),
            DeviceMemory::Bound(Some(Value::Tensor(tensor))) => {
                self.session.buffer_on(tensor.memory(), tensor.dtype(), tensor.shape()).or_raise(py)
            }
            DeviceMemory::Bound(_) => {
                Err(PyRuntimeError::new_err("the value is bound as an output of another binding"))
            }
        }
    }

    /// Says what a run wrote; `None` before the next run, which needs the memory for itself.
    pub(crate) fn show(&self, value: Option<Value>) {
        *self.memory.lock() = DeviceMemory::Bound(value);
    }
}

/// A value of the runtime: a tensor in the memory of the host or of a device, a sequence, a map, or
/// a sparse tensor.
#[pyclass(frozen, weakref, module = "ort_runtime.capi.onnxruntime_pybind11_state")]
pub(crate) struct OrtValue(Held);

impl OrtValue {
    /// The output of a binding that did not run yet.
    pub(crate) fn nothing() -> OrtValue {
        OrtValue(Held::Nothing)
    }

    /// Wraps memory of the host.
    pub(crate) fn in_host(tensor: HostTensor) -> OrtValue {
        OrtValue(Held::Host(tensor))
    }

    /// Wraps a tensor whose memory no one may write.
    pub(crate) fn read_only<'py>(py: Python<'py>, tensor: &Tensor) -> PyResult<Bound<'py, OrtValue>> {
        let value = match HostMemory::of_tensor(tensor, false) {
            Some(memory) => {
                let shape = SmallVec::from_slice(tensor.shape());
                OrtValue::in_host(HostTensor { dtype: tensor.dtype(), shape, memory })
            }
            None => OrtValue::of(Value::Tensor(tensor.clone())),
        };
        Bound::new(py, value)
    }

    /// Wraps a result.
    pub(crate) fn of(value: Value) -> OrtValue {
        OrtValue(Held::Value(value))
    }

    /// Returns the native value of an object: one itself, or the one inside of the package's class.
    pub(crate) fn inside<'py>(object: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, OrtValue>>> {
        if let Ok(value) = object.cast::<OrtValue>() {
            return Ok(Some(value.clone()));
        }
        // Arrays are by far the most frequent, and have no such attribute.
        if object.is_instance_of::<PyUntypedArray>() {
            return Ok(None);
        }
        match object.getattr_opt(intern!(object.py(), "_ortvalue"))? {
            Some(inner) => Ok(inner.cast_into::<OrtValue>().ok()),
            None => Ok(None),
        }
    }

    /// Returns what a run reads.
    pub(crate) fn value(&self, py: Python<'_>) -> PyResult<Value> {
        match &self.0 {
            Held::Host(host) => Ok(Value::Tensor(host.memory.tensor(py, host.dtype, &host.shape)?)),
            Held::Value(value) => Ok(value.clone()),
            Held::Device(device) => device.value(py),
            Held::Sparse(sparse) => Ok(Value::Sparse(Box::new(sparse.inner().clone()))),
            Held::Nothing => Err(PyRuntimeError::new_err(NOT_COMPUTED)),
        }
    }

    /// Returns the host memory that a run may write an output to.
    pub(crate) fn host(&self) -> Option<&HostTensor> {
        match &self.0 {
            Held::Host(host) => Some(host),
            _ => None,
        }
    }

    /// Returns the device memory that a run may write an output to.
    pub(crate) fn device(&self) -> Option<&DeviceTensor> {
        match &self.0 {
            Held::Device(device) => Some(device),
            _ => None,
        }
    }

    /// Makes a tensor in the memory of a session's device, or a tensor of zeros on the host.
    pub(crate) fn in_memory(
        py: Python<'_>,
        session: &Arc<Session>,
        memory: DeviceId,
        dtype: DType,
        shape: &[usize],
    ) -> PyResult<OrtValue> {
        if memory == DeviceId::HOST {
            let len = byte_count(dtype, shape).or_raise(py)?;
            let shape = SmallVec::from_slice(shape);
            return Ok(OrtValue(Held::Host(HostTensor { dtype, shape, memory: HostMemory::new(len)? })));
        }
        let buffer = session.buffer_on(memory, dtype, shape).or_raise(py)?;
        let memory = Arc::new(Mutex::new(DeviceMemory::Own(buffer)));
        Ok(OrtValue(Held::Device(DeviceTensor { memory, session: session.clone() })))
    }

    fn tensor(&self, py: Python<'_>, what: &str) -> PyResult<Tensor> {
        match self.value(py)? {
            Value::Tensor(tensor) => Ok(tensor),
            other => {
                let supported = match what {
                    "shape()" | "device_name()" => "Tensors/SparseTensors are currently supported",
                    "numpy()" => "Tensors are convertible to Numpy objects",
                    _ => "Tensors are currently supported",
                };
                let kind = other.kind_name();
                Err(PyRuntimeError::new_err(format!("Only OrtValues that are {supported}: {what} of {kind}")))
            }
        }
    }
}

#[pymethods]
impl OrtValue {
    /// Shows the garbage collector what the value keeps alive. It is not cleared: a value does not
    /// change, so every cycle through it has another object that does.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(self.host().and_then(|host| host.memory.own_object()))
    }

    /// Shares the memory of a contiguous array in host memory, and copies others.
    #[staticmethod]
    #[pyo3(signature = (array, device=None))]
    fn ortvalue_from_numpy(
        array: &Bound<'_, PyAny>,
        device: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<OrtValue> {
        let _call = enter(array.py());
        let Ok(array) = array.cast::<PyUntypedArray>() else {
            return Err(PyRuntimeError::new_err(
                "Creation of OrtValues is currently only supported from non-string numpy arrays",
            ));
        };
        require_host(device)?;
        let descr = array.dtype();
        let dtype = dtypes::of_descr(&descr)?.ok_or_else(|| dtypes::unknown(&descr))?;
        if dtype == DType::String || dtype.bits().is_some_and(|bits| bits < 8) {
            return Ok(OrtValue::of(Value::Tensor(tensor_of(array)?)));
        }
        let array = readable(array)?;
        let shape = array.shape().iter().copied().collect();
        Ok(OrtValue(Held::Host(HostTensor { dtype, shape, memory: HostMemory::of_array(&array) })))
    }

    /// Shares the memory of an array, whose elements are read as another type of the same size.
    #[staticmethod]
    fn ortvalue_from_numpy_with_onnx_type(
        array: &Bound<'_, PyUntypedArray>,
        onnx_element_type: i64,
    ) -> PyResult<OrtValue> {
        let _call = enter(array.py());
        let dtype = dtypes::of_code(onnx_element_type).ok_or_else(|| {
            PyRuntimeError::new_err(format!("tensor type {onnx_element_type} is not supported"))
        })?;
        let descr = array.dtype();
        if descr.has_object() || dtype == DType::String {
            return Err(PyRuntimeError::new_err("an array of Python objects cannot be read as numbers"));
        }
        let (wanted, actual) = (dtype.byte_size(), descr.itemsize());
        if wanted != Some(actual) {
            let name = dtypes::type_name(dtype);
            return Err(PyRuntimeError::new_err(format!(
                "Items size in the incoming array: {actual} is not that of {name}"
            )));
        }
        let array = readable(array)?;
        let shape = array.shape().iter().copied().collect();
        Ok(OrtValue(Held::Host(HostTensor { dtype, shape, memory: HostMemory::of_array(&array) })))
    }

    /// Makes a tensor of zeros in host memory.
    #[staticmethod]
    #[pyo3(signature = (shape, element_type, device=None))]
    fn ortvalue_from_shape_and_type(
        shape: Vec<i64>,
        element_type: &Bound<'_, PyAny>,
        device: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<OrtValue> {
        let _call = enter(element_type.py());
        let py = element_type.py();
        require_host(device)?;
        let dtype = dtypes::named(py, element_type)?;
        if dtype == DType::String {
            return Err(PyRuntimeError::new_err(
                "Creation of OrtValues is currently only supported from non-string numpy arrays",
            ));
        }
        let sizes = sizes_of(&shape)?;
        let len = byte_count(dtype, &sizes).or_raise(py)?;
        Ok(OrtValue(Held::Host(HostTensor { dtype, shape: sizes, memory: HostMemory::new(len)? })))
    }

    /// Shares the memory of a DLPack capsule, or of an object that lends one.
    #[staticmethod]
    #[pyo3(signature = (source, is_bool=false))]
    fn from_dlpack(source: &Bound<'_, PyAny>, is_bool: bool) -> PyResult<OrtValue> {
        let _call = enter(source.py());
        let py = source.py();
        let borrowed = dlpack::borrow(source)?;
        let tensor = match is_bool && borrowed.tensor.dtype() == DType::U8 {
            true => {
                let bytes = borrowed.tensor.bytes().cloned().unwrap_or_default();
                Tensor::from_bytes(DType::Bool, borrowed.tensor.shape(), bytes).or_raise(py)?
            }
            false => borrowed.tensor,
        };
        match HostMemory::of_tensor(&tensor, !borrowed.is_read_only) {
            Some(memory) => {
                let shape = SmallVec::from_slice(tensor.shape());
                Ok(OrtValue(Held::Host(HostTensor { dtype: tensor.dtype(), shape, memory })))
            }
            None => Ok(OrtValue::of(Value::Tensor(tensor))),
        }
    }

    /// Lends the memory as a DLPack capsule.
    #[pyo3(signature = (*, stream=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // Work on the host is done when a run returns, so there is no stream to wait for.
        let _ = stream;
        self.to_dlpack(py)
    }

    /// Lends the memory as a DLPack capsule.
    pub(crate) fn to_dlpack<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let host = match &self.0 {
            Held::Host(host) => host.clone(),
            _ => {
                let tensor = self.tensor(py, "to_dlpack()")?;
                let memory = HostMemory::of_tensor(&tensor, true).ok_or_else(|| {
                    PyRuntimeError::new_err("only tensors in host memory are lent; take numpy() of the value")
                })?;
                let shape = SmallVec::from_slice(tensor.shape());
                HostTensor { dtype: tensor.dtype(), shape, memory }
            }
        };
        let buffer =
            TensorBuffer::from_buffer(host.dtype, &host.shape, host.memory.buffer()?).or_raise(py)?;
        dlpack::lend(py, buffer)
    }

    /// Returns DLPack's numbers of the device: its type and which one.
    fn __dlpack_device__(&self, py: Python<'_>) -> PyResult<(i32, i32)> {
        self.tensor(py, "__dlpack_device__()")?;
        Ok((ort_runtime::dlpack::CPU, 0))
    }

    /// Returns the value as a numpy array over the same memory, if it is in host memory.
    pub(crate) fn numpy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let _call = enter(py);
        match &self.0 {
            Held::Host(host) => {
                // Elements of fewer than 8 bits have a byte each in numpy.
                if host.dtype.bits().is_some_and(|bits| bits < 8) {
                    return array_of(py, &host.memory.tensor(py, host.dtype, &host.shape)?);
                }
                let (descr, memory) = (dtypes::descr_of(py, host.dtype)?, host.memory.clone());
                over(py, descr, &host.shape, memory.data(), memory.is_writable(), memory)
            }
            Held::Device(device) => {
                let value = device.value(py)?;
                let copy = detached(py, || device.session.to_host(&value)).or_raise(py)?;
                object_of(py, &copy)
            }
            Held::Value(Value::Tensor(tensor)) if is_on_host(tensor) => array_of(py, tensor),
            _ => self.tensor(py, "numpy()").and_then(|tensor| array_of(py, &tensor)),
        }
    }

    /// Returns the value as run results are: arrays, lists, dicts.
    fn to_object<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let _call = enter(py);
        match &self.0 {
            Held::Value(value) => object_of(py, value),
            _ => self.numpy(py),
        }
    }

    /// Whether the memory may be written from outside of runs.
    fn is_writable(&self) -> bool {
        self.host().is_some_and(|host| host.memory.is_writable())
    }

    /// Returns the address of the first element.
    fn data_ptr(&self, py: Python<'_>) -> PyResult<usize> {
        match &self.0 {
            Held::Host(host) => Ok(host.memory.data().addr()),
            _ => {
                let tensor = self.tensor(py, "data_ptr()")?;
                let bytes = tensor.bytes().map(|bytes| bytes.as_ptr().addr());
                bytes.ok_or_else(|| PyRuntimeError::new_err("the value has no address in host memory"))
            }
        }
    }

    /// Returns the sizes.
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        match &self.0 {
            Held::Host(host) => PyList::new(py, &host.shape),
            Held::Sparse(sparse) => PyList::new(py, sparse.inner().shape.iter()),
            Held::Value(Value::Sparse(sparse)) => PyList::new(py, sparse.shape.iter()),
            _ => PyList::new(py, self.tensor(py, "shape()")?.shape()),
        }
    }

    /// Returns the type as text, such as `tensor(float)`.
    fn data_type(&self, py: Python<'_>) -> PyResult<String> {
        Ok(type_text(&self.value(py)?.value_type()))
    }

    /// Returns ONNX's code of the element type.
    pub(crate) fn element_type(&self, py: Python<'_>) -> PyResult<i32> {
        let dtype = match self.value(py)? {
            Value::Tensor(tensor) => Some(tensor.dtype()),
            Value::Sequence(sequence) => sequence.element_type.dtype(),
            Value::Sparse(sparse) => Some(sparse.values.dtype()),
            other => other.value_type().dtype(),
        };
        dtype.map(DType::onnx_code).ok_or_else(|| PyRuntimeError::new_err("the value has no element type"))
    }

    /// Returns the name of the memory: `cpu`, or a device's.
    fn device_name(&self, py: Python<'_>) -> PyResult<String> {
        let memory = match self.value(py)? {
            Value::Sparse(_) => DeviceId::HOST,
            _ => self.tensor(py, "device_name()")?.memory(),
        };
        Ok(if memory == DeviceId::HOST { "cpu".to_owned() } else { memory.to_string().to_lowercase() })
    }

    /// Whether there is a value.
    fn has_value(&self) -> bool {
        match &self.0 {
            Held::Nothing => false,
            Held::Value(Value::Optional(optional)) => optional.element.is_some(),
            _ => true,
        }
    }

    /// Whether it is a tensor.
    fn is_tensor(&self) -> bool {
        matches!(&self.0, Held::Host(_) | Held::Device(_) | Held::Value(Value::Tensor(_)))
    }

    /// Whether it is a sparse tensor.
    fn is_sparse_tensor(&self) -> bool {
        matches!(&self.0, Held::Sparse(_) | Held::Value(Value::Sparse(_)))
    }

    /// Whether it is a sequence of tensors.
    fn is_tensor_sequence(&self) -> bool {
        matches!(&self.0, Held::Value(Value::Sequence(_)))
    }

    /// Returns the number of bytes.
    fn tensor_size_in_bytes(&self, py: Python<'_>) -> PyResult<usize> {
        match &self.0 {
            Held::Host(host) => Ok(host.memory.len()),
            _ => Ok(self.tensor(py, "tensor_size_in_bytes()")?.byte_count()),
        }
    }

    /// Copies an array's elements into the value's memory. Type and number of elements must agree.
    fn update_inplace(&self, array: &Bound<'_, PyAny>) -> PyResult<()> {
        let _call = enter(array.py());
        let py = array.py();
        let from = match OrtValue::inside(array)? {
            Some(value) => value.get().tensor(py, "update_inplace()")?,
            None => match array.cast::<PyUntypedArray>() {
                Ok(array) => tensor_of(array)?,
                Err(_) => {
                    return Err(PyTypeError::new_err("update_inplace() takes a numpy array or an OrtValue"));
                }
            },
        };
        let Some(host) = self.host() else {
            return Err(PyRuntimeError::new_err("the value is not in memory that can be written"));
        };
        if !host.memory.is_writable() {
            return Err(PyRuntimeError::new_err(READ_ONLY));
        }
        let is_alike = from.dtype() == host.dtype;
        if !is_alike || !from.bytes().is_some_and(|bytes| host.memory.fill(bytes)) {
            return Err(PyRuntimeError::new_err(format!(
                "The input size of numpy arrays does not match the size of the OrtValue: {} {:?}, \
                 expected {} {:?}",
                dtypes::type_name(from.dtype()),
                from.shape(),
                dtypes::type_name(host.dtype),
                host.shape
            )));
        }
        Ok(())
    }

    /// Wraps a sparse tensor.
    #[staticmethod]
    fn ort_value_from_sparse_tensor(sparse: &Bound<'_, SparseTensor>) -> OrtValue {
        OrtValue(Held::Sparse(Box::new(sparse.get().clone())))
    }

    /// Returns the sparse tensor.
    fn as_sparse_tensor(&self) -> PyResult<SparseTensor> {
        match &self.0 {
            Held::Sparse(sparse) => Ok((**sparse).clone()),
            Held::Value(Value::Sparse(sparse)) => Ok(SparseTensor::new((**sparse).clone())),
            _ => Err(PyRuntimeError::new_err(
                "This OrtValue does not contain SparseTensor. Check data_type() value.",
            )),
        }
    }
}

/// Reads sizes, none of which is negative.
pub(crate) fn sizes_of(shape: &[i64]) -> PyResult<SmallVec<[usize; 8]>> {
    let negative = || PyRuntimeError::new_err(format!("the shape {shape:?} has a negative size"));
    shape.iter().map(|size| usize::try_from(*size).map_err(|_| negative())).collect()
}
