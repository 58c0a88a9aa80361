//! `SessionIOBinding`: inputs and outputs bound to memory once, for many runs.

use std::sync::Arc;

use ort_runtime::{
    DeviceId, ErrorKind, InputSource, IoBinding, OutputTarget, RunOptions, Session, TensorBuffer, Value,
    tensor,
};
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyList;
use smallvec::SmallVec;

use crate::arrays::HostMemory;
use crate::cancel::interruptibly;
use crate::convert::{object_of, value_of};
use crate::device::{memory_of, require_host};
use crate::dtypes;
use crate::error::{OrRaise, exception, raised};
use crate::ort_value::{HostTensor, OrtValue, OrtValueVector};
use crate::session::InferenceSession;

/// The memory that the runs of one session read and write.
#[pyclass(module = "ort_runtime.capi.onnxruntime_pybind11_state")]
pub(crate) struct SessionIOBinding {
    owner: Py<InferenceSession>,
    session: Arc<Session>,
    binding: IoBinding,
    /// Bound outputs in the order of binding, with the value that the caller gave.
    order: Vec<(String, Option<Py<OrtValue>>)>,
    /// Whether no output was bound, so that all are.
    binds_all: bool,
    has_run: bool,
}

impl SessionIOBinding {
    /// Whether this session made it.
    pub(crate) fn is_of(&self, session: &Bound<'_, InferenceSession>) -> bool {
        self.owner.is(session)
    }

    /// Runs the session. Without a bound output it binds all to host memory first.
    pub(crate) fn run(
        &mut self,
        py: Python<'_>,
        session: &Session,
        options: RunOptions<'_>,
    ) -> PyResult<()> {
        if self.order.is_empty() {
            for spec in session.outputs() {
                self.binding.bind_output(&spec.name, DeviceId::HOST).or_raise(py)?;
                self.order.push((spec.name, None));
            }
            self.binds_all = true;
        }
        self.show_device_outputs(py, |_, _| Ok(None))?;
        let binding = &mut self.binding;
        let done = interruptibly(py, options.cancel.clone(), |cancel| {
            session.run_with_binding(binding, &RunOptions { cancel, ..options })
        })?;
        self.has_run = done.is_ok();
        if self.has_run {
            self.show_device_outputs(py, |binding, name| Ok(Some(binding.shared_output(name).or_raise(py)?)))?;
        }
        done.map_err(|error| {
            let text = format!("Error in execution: {}", error.message());
            match error.shortage() {
                Some(_) => raised(py, &error),
                None => exception(py, error.kind(), &text),
            }
        })
    }

    /// Tells the callers' values in device memory what they hold.
    fn show_device_outputs(
        &self,
        py: Python<'_>,
        value: impl Fn(&IoBinding, &str) -> PyResult<Option<Value>>,
    ) -> PyResult<()> {
        for (name, given) in &self.order {
            if let Some(device) = given.as_ref().and_then(|given| given.bind(py).get().device()) {
                device.show(value(&self.binding, name)?);
            }
        }
        Ok(())
    }

    fn outputs(&self, py: Python<'_>) -> PyResult<Vec<Value>> {
        if !self.has_run {
            return Err(PyRuntimeError::new_err("the outputs are not computed: run the binding first"));
        }
        let value =
            |(name, _): &(String, Option<Py<OrtValue>>)| self.binding.shared_output(name).or_raise(py);
        self.order.iter().map(value).collect()
    }

    fn bind_all_anew(&mut self) {
        if self.binds_all {
            self.binding.clear_binding_outputs();
            self.order.clear();
            self.binds_all = false;
        }
    }
}

/// Reads element type and sizes that a caller gives with a pointer.
fn at_pointer(
    py: Python<'_>,
    element_type: &Bound<'_, PyAny>,
    shape: &[usize],
    pointer: usize,
) -> PyResult<HostTensor> {
    let dtype = dtypes::named(py, element_type)?;
    let len = tensor::byte_count(dtype, shape).or_raise(py)?;
    if pointer == 0 && len > 0 {
        return Err(exception(py, ErrorKind::InvalidArgument, "the address of the memory is 0"));
    }
    let memory = HostMemory::at(pointer, len);
    Ok(HostTensor { dtype, shape: SmallVec::from_slice(shape), memory })
}

#[pymethods]
impl SessionIOBinding {
    #[new]
    fn new(session: &Bound<'_, InferenceSession>) -> PyResult<SessionIOBinding> {
        let engine = session.get().built()?.session.clone();
        let binding = engine.io_binding();
        let owner = session.clone().unbind();
        Ok(SessionIOBinding {
            owner,
            session: engine,
            binding,
            order: Vec::new(),
            binds_all: false,
            has_run: false,
        })
    }

    /// Binds an input to an array, or to memory at an address: (name, array), or (name, device,
    /// element type, shape, address).
    #[pyo3(signature = (name, source, element_type=None, shape=None, pointer=None))]
    fn bind_input(
        &mut self,
        name: &str,
        source: &Bound<'_, PyAny>,
        element_type: Option<&Bound<'_, PyAny>>,
        shape: Option<Vec<usize>>,
        pointer: Option<usize>,
    ) -> PyResult<()> {
        let py = source.py();
        let value = match (element_type, shape, pointer) {
            (Some(element_type), Some(shape), Some(pointer)) => {
                require_host(Some(source))?;
                let host = at_pointer(py, element_type, &shape, pointer)?;
                Value::Tensor(host.memory.tensor(py, host.dtype, &host.shape)?)
            }
            (None, None, None) => {
                let spec = self.session.inputs().into_iter().find(|spec| spec.name == name);
                let spec = spec.ok_or_else(|| {
                    exception(py, ErrorKind::InvalidArgument, &format!("Invalid input name: {name}"))
                })?;
                value_of(name, &spec.ty, source)?
            }
            _ => return Err(PyTypeError::new_err("give element type, shape and address together")),
        };
        self.binding.bind_input(name, InputSource::Value(value)).or_raise(py)
    }

    /// Binds an input to a value.
    fn bind_ortvalue_input(&mut self, name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = value.py();
        let value = OrtValue::inside(value)?
            .ok_or_else(|| PyTypeError::new_err("bind_ortvalue_input() takes an OrtValue"))?;
        let value = value.get().value(py)?;
        self.binding.bind_input(name, InputSource::Value(value)).or_raise(py)
    }

    /// Binds an output to the memory of a device, or to memory at an address: (name, device), or
    /// (name, device, element type, shape, address).
    #[pyo3(signature = (name, device, element_type=None, shape=None, pointer=None))]
    fn bind_output(
        &mut self,
        name: &str,
        device: &Bound<'_, PyAny>,
        element_type: Option<&Bound<'_, PyAny>>,
        shape: Option<Vec<usize>>,
        pointer: Option<usize>,
    ) -> PyResult<()> {
        let py = device.py();
        let target: OutputTarget = match (element_type, shape, pointer.filter(|pointer| *pointer != 0)) {
            (Some(element_type), Some(shape), Some(pointer)) => {
                require_host(Some(device))?;
                let host = at_pointer(py, element_type, &shape, pointer)?;
                let buffer = TensorBuffer::from_buffer(host.dtype, &host.shape, host.memory.buffer()?);
                buffer.or_raise(py)?.into()
            }
            // A shape without an address is a promise that the run keeps or breaks; the memory is
            // the session's.
            _ => memory_of(&self.session, device)?.into(),
        };
        self.rebind(py, name, target, None)
    }

    /// Binds an output to a value's memory.
    fn bind_ortvalue_output(&mut self, name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = value.py();
        let value = OrtValue::inside(value)?
            .ok_or_else(|| PyTypeError::new_err("bind_ortvalue_output() takes an OrtValue"))?;
        let target: OutputTarget = match value.get().host() {
            Some(host) => {
                let buffer = TensorBuffer::from_buffer(host.dtype, &host.shape, host.memory.buffer()?);
                buffer.or_raise(py)?.into()
            }
            None => match value.get().device() {
                Some(device) => device.hand_over(py)?.into(),
                None => return Err(PyRuntimeError::new_err("the value is not in memory that a run can write")),
            },
        };
        self.rebind(py, name, target, Some(value.unbind()))
    }

    /// Binds all inputs to what they are without a binding.
    fn clear_binding_inputs(&mut self) {
        self.binding.clear_binding_inputs();
    }

    /// Unbinds all outputs.
    fn clear_binding_outputs(&mut self) {
        self.binding.clear_binding_outputs();
        self.order.clear();
        self.binds_all = false;
        self.has_run = false;
    }

    /// Waits until bound inputs are where the devices read them.
    fn synchronize_inputs(&self, py: Python<'_>) -> PyResult<()> {
        self.binding.synchronize_inputs().or_raise(py)
    }

    /// Waits until the devices have written the outputs.
    fn synchronize_outputs(&self, py: Python<'_>) -> PyResult<()> {
        self.binding.synchronize_outputs().or_raise(py)
    }

    /// Returns the outputs of the last run, in the order of binding.
    fn get_outputs(&self, py: Python<'_>) -> PyResult<OrtValueVector> {
        let mut values = Vec::new();
        for ((_, given), value) in self.order.iter().zip(self.outputs(py)?) {
            values.push(match given {
                Some(given) => given.clone_ref(py),
                None => Py::new(py, OrtValue::of(value))?,
            });
        }
        Ok(OrtValueVector(values))
    }

    /// Returns copies of the outputs of the last run, in the order of binding.
    fn copy_outputs_to_cpu<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        if !self.has_run {
            return Err(PyRuntimeError::new_err("the outputs are not computed: run the binding first"));
        }
        let copies = py.detach(|| self.binding.copy_outputs_to_cpu()).or_raise(py)?;
        let list = PyList::empty(py);
        for (name, _) in &self.order {
            if let Some((_, value)) = copies.iter().find(|(other, _)| other == name) {
                list.append(object_of(py, value)?)?;
            }
        }
        Ok(list)
    }
}

impl SessionIOBinding {
    /// Binds an output that may be bound already.
    fn rebind(
        &mut self,
        py: Python<'_>,
        name: &str,
        target: OutputTarget,
        given: Option<Py<OrtValue>>,
    ) -> PyResult<()> {
        self.bind_all_anew();
        self.binding.unbind_output(name).or_raise(py)?;
        self.binding.bind_output(name, target).or_raise(py)?;
        match self.order.iter_mut().find(|(other, _)| other == name) {
            Some((_, value)) => *value = given,
            None => self.order.push((name.to_owned(), given)),
        }
        self.has_run = false;
        Ok(())
    }
}
