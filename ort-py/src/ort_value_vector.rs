//! `OrtValueVector`: a list of native values.

use ort_runtime::{DType, ErrorKind, Value, tensor::byte_count};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyList;
use pyo3::{PyTraverseError, PyVisit};

use crate::arrays::HostMemory;
use crate::cancel::enter;
use crate::device::require_host;
use crate::dtypes;
use crate::error::{OrRaise, exception};
use crate::ort_value::{HostTensor, OrtValue, sizes_of};

/// A list of native values.
#[pyclass(module = "ort_runtime.capi.onnxruntime_pybind11_state")]
#[derive(Default)]
pub(crate) struct OrtValueVector(pub(crate) Vec<Py<OrtValue>>);

#[pymethods]
impl OrtValueVector {
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.0.iter().try_for_each(|value| visit.call(value))
    }

    fn __clear__(&mut self) {
        self.0.clear();
    }

    #[new]
    fn new() -> OrtValueVector {
        OrtValueVector::default()
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __getitem__(&self, py: Python<'_>, index: isize) -> PyResult<Py<OrtValue>> {
        let place = if index < 0 { index + self.0.len() as isize } else { index };
        let value = usize::try_from(place).ok().and_then(|place| self.0.get(place));
        value
            .map(|value| value.clone_ref(py))
            .ok_or_else(|| pyo3::exceptions::PyIndexError::new_err("index out of range"))
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let list = PyList::new(py, self.0.iter().map(|value| value.clone_ref(py)))?;
        list.call_method0(intern!(py, "__iter__"))
    }

    /// Appends a value.
    fn push_back(&mut self, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let _call = enter(value.py());
        let value =
            OrtValue::inside(value)?.ok_or_else(|| PyTypeError::new_err("push_back() takes an OrtValue"))?;
        self.0.push(value.unbind());
        Ok(())
    }

    /// Appends values over the memory of torch tensors at these addresses.
    fn push_back_batch(
        &mut self,
        py: Python<'_>,
        tensors: Vec<Py<PyAny>>,
        pointers: Vec<usize>,
        element_types: Vec<Bound<'_, PyAny>>,
        shapes: Vec<Vec<i64>>,
        devices: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let _call = enter(py);
        let counts = [pointers.len(), element_types.len(), shapes.len(), devices.len()];
        if counts.iter().any(|count| *count != tensors.len()) {
            return Err(PyValueError::new_err("the lists of push_back_batch() have different lengths"));
        }
        let rows = pointers.into_iter().zip(element_types).zip(shapes).zip(devices);
        for (owner, (((pointer, element_type), shape), device)) in tensors.into_iter().zip(rows) {
            require_host(Some(&device))?;
            let dtype = dtypes::named(py, &element_type)?;
            let shape = sizes_of(&shape)?;
            let len = byte_count(dtype, &shape).or_raise(py)?;
            if pointer == 0 && len > 0 {
                return Err(exception(py, ErrorKind::InvalidArgument, "the address of a tensor is 0"));
            }
            let memory = HostMemory::owned_at(pointer, len, owner);
            self.0.push(Py::new(py, OrtValue::in_host(HostTensor { dtype, shape, memory }))?);
        }
        Ok(())
    }

    /// Lends a value as a DLPack capsule.
    fn dlpack_at<'py>(&self, py: Python<'py>, index: isize) -> PyResult<Bound<'py, PyAny>> {
        self.__getitem__(py, index)?.get().to_dlpack(py)
    }

    /// Lends all values, each through a function of a capsule, and returns what it returns.
    #[pyo3(signature = (converter=None))]
    fn to_dlpacks<'py>(
        &self,
        py: Python<'py>,
        converter: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyList>> {
        let _call = enter(py);
        let list = PyList::empty(py);
        for value in &self.0 {
            let capsule = value.get().to_dlpack(py)?;
            list.append(match converter.filter(|converter| !converter.is_none()) {
                Some(converter) => converter.call1((capsule,))?,
                None => capsule,
            })?;
        }
        Ok(list)
    }

    /// Makes room for more values.
    fn reserve(&mut self, count: usize) {
        self.0.reserve(count.min(1 << 20));
    }

    /// Gives unused room back.
    fn shrink_to_fit(&mut self) {
        self.0.shrink_to_fit();
    }

    /// Returns the places of the values that are tensors of bool.
    fn bool_tensor_indices(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        let mut places = Vec::new();
        for (place, value) in self.0.iter().enumerate() {
            if matches!(value.get().value(py)?, Value::Tensor(tensor) if tensor.dtype() == DType::Bool) {
                places.push(place);
            }
        }
        Ok(places)
    }

    /// Returns ONNX's code of a value's element type.
    fn element_type_at(&self, py: Python<'_>, index: isize) -> PyResult<i32> {
        self.__getitem__(py, index)?.get().element_type(py)
    }
}
