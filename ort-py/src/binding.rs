//! `SessionIOBinding`: inputs and outputs bound to memory once, for many runs.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use ort_runtime::ir::ValueType;
use ort_runtime::onnxruntime::{self, TERMINATED, running_text};
use ort_runtime::{
    DeviceId, ErrorKind, InputSource, IoBinding, OutputTarget, RunOptions, Session, Value, ValueSpec,
};
use pyo3::exceptions::{PyException, PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use pyo3::{PyTraverseError, PyVisit};

use crate::arrays::HostMemory;
use crate::bound::{at_pointer, buffer_of, lasting_value_of, value_and_memory};
use crate::cancel::{detached, enter, interruptibly};
use crate::convert::{any_value_of, object_of};
use crate::device::{memory_of, require_host};
use crate::error::{OrRaise, exception, raised};
use crate::ort_value::{HostTensor, NOT_COMPUTED, OrtValue};
use crate::ort_value_vector::OrtValueVector;
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
    /// Bound inputs by name.
    inputs: BTreeMap<String, Value>,
    /// The memory of bound inputs that Python objects keep alive, by name.
    lent: BTreeMap<String, HostMemory>,
    /// The callers' host memory of outputs, by name.
    targets: BTreeMap<String, HostTensor>,
    /// Outputs that are written to the memory of an input, with its name.
    in_place: BTreeMap<String, String>,
    /// Outputs that have the memory of an input which is read to the end: they are computed apart
    /// and copied there.
    copied: BTreeSet<String>,
    /// What is bound and does not fit, by name. The next run says so, as in onnxruntime.
    misfits: BTreeMap<String, String>,
    has_run: bool,
    /// Whether nothing was bound since the last check.
    is_ready: bool,
}

impl SessionIOBinding {
    /// Whether this session made it.
    pub(crate) fn is_of(&self, session: &Bound<'_, InferenceSession>) -> bool {
        self.owner.is(session)
    }

    /// Runs the session with initializers that adapters replace in this run alone. What is bound
    /// goes before.
    pub(crate) fn run_with_adapters(
        &mut self,
        adapters: &Bound<'_, PyDict>,
        session: &Session,
        options: RunOptions<'_>,
    ) -> PyResult<()> {
        let py = adapters.py();
        let mut replaced = Vec::new();
        let bound = self.bind_adapters(adapters, &mut replaced);
        let done = bound.and_then(|()| self.run(py, session, options));
        for name in replaced {
            self.inputs.remove(&name);
            self.lent.remove(&name);
            self.misfits.remove(&name);
            self.binding.unbind_input(&name).or_raise(py)?;
        }
        self.is_ready = false;
        done
    }

    fn bind_adapters(&mut self, adapters: &Bound<'_, PyDict>, replaced: &mut Vec<String>) -> PyResult<()> {
        let py = adapters.py();
        for (name, value) in adapters {
            let name: String = name.extract()?;
            if self.inputs.contains_key(&name) {
                continue;
            }
            let spec = self.owner.get().built(py)?.inputs().iter().find(|spec| spec.name == name).cloned();
            let spec = spec.ok_or_else(|| {
                exception(py, ErrorKind::InvalidArgument, &format!("Invalid input name: {name}"))
            })?;
            let value = any_value_of(&name, &spec.ty, &value)?;
            replaced.push(name);
            self.set_input(py, &spec, value, None)?;
        }
        Ok(())
    }

    /// Runs the session. Without a bound output it binds all to host memory first.
    pub(crate) fn run(&mut self, py: Python<'_>, session: &Session, options: RunOptions<'_>) -> PyResult<()> {
        if !self.is_ready {
            self.check(py)?;
            self.join_memory(py)?;
            self.is_ready = true;
        }
        if self.order.is_empty() {
            for spec in session.outputs() {
                self.binding.bind_output(&spec.name, DeviceId::HOST).or_raise(py)?;
                self.order.push((spec.name, None));
            }
            self.binds_all = true;
        }
        self.show_device_outputs(py, |_, _| Ok(None))?;
        let mut done = self.run_bound(py, session, &options)?;
        if done.as_ref().is_err_and(|error| error.kind() == ErrorKind::InvalidArgument)
            && !self.in_place.is_empty()
        {
            self.compute_apart(py)?;
            done = self.run_bound(py, session, &options)?;
        }
        self.has_run = done.is_ok();
        self.copy_to_targets(py)?;
        if self.has_run {
            self.show_device_outputs(py, |binding, name| {
                Ok(Some(binding.shared_output(name).or_raise(py)?))
            })?;
        }
        done.map_err(|error| {
            if error.kind() == ErrorKind::Cancelled {
                return exception(py, ErrorKind::Fail, &format!("Error in execution: {TERMINATED}"));
            }
            if error.shortage().is_some() {
                return raised(py, &error);
            }
            let text = match error.nodes().next() {
                Some(_) => running_text(&error),
                None => error.message().to_owned(),
            };
            exception(py, error.kind(), &format!("Error in execution: {text}"))
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

    /// Refuses to run with what does not fit, or without an input.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let is_missing = |spec: &&ValueSpec| {
            !spec.has_default
                && !matches!(spec.ty, ValueType::Optional(_))
                && !self.inputs.contains_key(&spec.name)
        };
        let built = self.owner.get().built(py)?;
        let problem = match (self.misfits.values().next(), built.inputs().iter().find(is_missing)) {
            (Some(problem), _) => problem.clone(),
            (None, Some(spec)) => format!("Missing Input: {}", spec.name),
            (None, None) => return Ok(()),
        };
        Err(exception(py, ErrorKind::InvalidArgument, &format!("Error in execution: {problem}")))
    }

    fn run_bound(
        &mut self,
        py: Python<'_>,
        session: &Session,
        options: &RunOptions<'_>,
    ) -> PyResult<ort_runtime::Result<()>> {
        let binding = &mut self.binding;
        interruptibly(py, options.cancel.clone(), |cancel| {
            session.run_with_binding(binding, &RunOptions { cancel, ..options.clone() })
        })
    }

    /// Gives the outputs that cannot be written in place of inputs memory of the session.
    fn compute_apart(&mut self, py: Python<'_>) -> PyResult<()> {
        for name in std::mem::take(&mut self.in_place).into_keys() {
            self.binding.unbind_output(&name).or_raise(py)?;
            self.binding.bind_output(&name, DeviceId::HOST).or_raise(py)?;
            self.copied.insert(name);
        }
        Ok(())
    }

    /// Copies the outputs that were computed apart to where the caller wants them.
    fn copy_to_targets(&self, py: Python<'_>) -> PyResult<()> {
        for name in self.copied.iter().filter(|_| self.has_run) {
            let value = self.binding.shared_output(name).or_raise(py)?;
            let bytes = value.tensor().or_raise(py)?.bytes().cloned().unwrap_or_default();
            if !self.targets.get(name).is_some_and(|host| host.memory.fill(&bytes)) {
                let text = format!("output '{name}' is not of the size of the memory that it is bound to");
                return Err(exception(py, ErrorKind::InvalidArgument, &text));
            }
        }
        Ok(())
    }

    /// Returns the names of bound tensors in host memory by address and bytes. Of several with the
    /// same memory it has the first.
    fn inputs_by_memory(&self) -> HashMap<(*const u8, usize), String> {
        let mut found = HashMap::new();
        for (name, value) in &self.inputs {
            let Value::Tensor(tensor) = value else { continue };
            let Some(bytes) = tensor.bytes().filter(|bytes| !bytes.is_empty()) else { continue };
            let memory = (bytes.as_ptr(), bytes.len());
            found.entry(memory).or_insert_with(|| name.clone());
        }
        found
    }

    /// Lets outputs be written in place of the inputs whose memory they have, as caches are. The
    /// plan then knows of it.
    fn join_memory(&mut self, py: Python<'_>) -> PyResult<()> {
        let inputs = self.inputs_by_memory();
        let targets = self.targets.clone().into_iter().filter(|(name, _)| !self.copied.contains(name));
        for (name, host) in targets.collect::<Vec<_>>() {
            let input = inputs.get(&(host.memory.data().cast_const(), host.memory.len()));
            if self.in_place.get(&name) == input {
                continue;
            }
            self.binding.unbind_output(&name).or_raise(py)?;
            let tensor = input.and_then(|input| self.inputs.get(input)?.tensor().ok());
            let target = match input.zip(tensor) {
                Some((input, tensor)) => {
                    let read = HostTensor { dtype: tensor.dtype(), shape: tensor.shape().into(), ..host };
                    let source = InputSource::Buffer(buffer_of(py, &read)?);
                    self.binding.bind_input(input, source).or_raise(py)?;
                    self.in_place.insert(name.clone(), input.clone());
                    OutputTarget::Input(input.clone())
                }
                None => {
                    self.in_place.remove(&name);
                    buffer_of(py, &host)?.into()
                }
            };
            self.binding.bind_output(&name, target).or_raise(py)?;
        }
        Ok(())
    }

    /// Gives outputs that are written in place of an input their own memory again.
    fn part_from(&mut self, py: Python<'_>, input: &str) -> PyResult<()> {
        let outputs: Vec<String> =
            self.in_place.iter().filter(|(_, of)| *of == input).map(|(name, _)| name.clone()).collect();
        for name in outputs {
            self.in_place.remove(&name);
            self.binding.unbind_output(&name).or_raise(py)?;
            if let Some(host) = self.targets.get(&name) {
                self.binding.bind_output(&name, buffer_of(py, host)?).or_raise(py)?;
            }
        }
        Ok(())
    }

    /// Binds an input to a value, unless it does not fit. `memory` is the value's, if a Python
    /// object keeps it alive.
    fn set_input(
        &mut self,
        py: Python<'_>,
        spec: &ValueSpec,
        value: Value,
        memory: Option<HostMemory>,
    ) -> PyResult<()> {
        self.is_ready = false;
        self.misfits.remove(&spec.name);
        self.part_from(py, &spec.name)?;
        self.inputs.insert(spec.name.clone(), value.clone());
        match memory {
            Some(memory) => self.lent.insert(spec.name.clone(), memory),
            None => self.lent.remove(&spec.name),
        };
        match onnxruntime::fit(&spec.name, &spec.ty, value) {
            Err(problem) => {
                self.misfits.insert(spec.name.clone(), problem);
                Ok(())
            }
            Ok(value) => self.binding.bind_input(&spec.name, InputSource::Value(value)).or_raise(py),
        }
    }

    /// Returns the input of a name.
    fn input(&self, py: Python<'_>, name: &str, missing: &str) -> PyResult<ValueSpec> {
        let spec = self.owner.get().built(py)?.inputs().iter().find(|spec| spec.name == name);
        spec.cloned().ok_or_else(|| PyRuntimeError::new_err(format!("{missing}: {name}")))
    }

    /// Returns memory for an output, unless it does not fit.
    fn target(&mut self, py: Python<'_>, name: &str, host: &HostTensor) -> PyResult<Option<OutputTarget>> {
        let built = self.owner.get().built(py)?;
        let spec = built.outputs().iter().find(|spec| spec.name == name);
        let problem =
            spec.and_then(|spec| onnxruntime::of_tensor("output", name, &spec.ty, host.dtype, &host.shape));
        if let Some(problem) = problem {
            self.misfits.insert(name.to_owned(), problem);
            // The memory that it was bound to before is no longer the binding's.
            self.targets.remove(name);
            return Ok(None);
        }
        self.targets.insert(name.to_owned(), host.clone());
        Ok(Some(buffer_of(py, host)?.into()))
    }

    fn outputs(&self, py: Python<'_>) -> PyResult<Vec<Value>> {
        if !self.has_run {
            return Err(PyRuntimeError::new_err(NOT_COMPUTED));
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

#[pymethods]
impl SessionIOBinding {
    #[new]
    fn new(session: &Bound<'_, InferenceSession>) -> PyResult<SessionIOBinding> {
        let engine = session.get().built(session.py())?.session.clone();
        let binding = engine.io_binding();
        let owner = session.clone().unbind();
        Ok(SessionIOBinding {
            owner,
            session: engine,
            binding,
            order: Vec::new(),
            binds_all: false,
            inputs: BTreeMap::new(),
            lent: BTreeMap::new(),
            targets: BTreeMap::new(),
            in_place: BTreeMap::new(),
            copied: BTreeSet::new(),
            misfits: BTreeMap::new(),
            has_run: false,
            is_ready: false,
        })
    }

    /// Shows the garbage collector what the binding keeps alive: each reference of its own once.
    ///
    /// The engine's tensors share the references to the owners of memory, and the engine gives none
    /// of these tensors away, except in sequences. Those keep the memory valid, whatever the
    /// collector does to its owner.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.owner)?;
        self.order.iter().try_for_each(|(_, given)| visit.call(given))?;
        let of_targets = self.targets.values().map(|target| &target.memory);
        self.lent.values().chain(of_targets).try_for_each(|memory| visit.call(memory.object()))
    }

    fn __clear__(&mut self) {
        self.clear_binding_inputs();
        self.clear_binding_outputs();
    }

    /// Binds an input to an array, or to memory at an address: (name, array), or (name, device,
    /// element type, shape, address).
    #[pyo3(signature = (name, source, element_type=None, shape=None, pointer=None))]
    fn bind_input(
        &mut self,
        name: &str,
        source: &Bound<'_, PyAny>,
        element_type: Option<&Bound<'_, PyAny>>,
        shape: Option<Vec<i64>>,
        pointer: Option<usize>,
    ) -> PyResult<()> {
        let _call = enter(source.py());
        let py = source.py();
        let (spec, value, memory) = match (element_type, shape, pointer) {
            (Some(element_type), Some(shape), Some(pointer)) => {
                require_host(Some(source))?;
                let spec = self.input(py, name, "Failed to find input name in the mapping")?;
                let host = at_pointer(py, element_type, &shape, pointer)?;
                (spec, Value::Tensor(host.memory.tensor(py, host.dtype, &host.shape)?), None)
            }
            (None, None, None) => {
                let spec = self.input(py, name, "Failed to find NodeArg with name")?;
                let (value, memory) = lasting_value_of(&spec, source).map_err(|problem| {
                    // Ctrl-C and the like are no fault of the object.
                    if !problem.is_instance_of::<PyException>(py) {
                        return problem;
                    }
                    let text = "Unable to create OrtValue from the given python object";
                    PyRuntimeError::new_err(format!("{text}: {}", problem.value(py)))
                })?;
                (spec, value, memory)
            }
            _ => return Err(PyTypeError::new_err("give element type, shape and address together")),
        };
        self.set_input(py, &spec, value, memory)
    }

    /// Binds an input to a value.
    fn bind_ortvalue_input(&mut self, name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let _call = enter(value.py());
        let py = value.py();
        let value = OrtValue::inside(value)?
            .ok_or_else(|| PyTypeError::new_err("bind_ortvalue_input() takes an OrtValue"))?;
        let spec = self.input(py, name, "Failed to find input name in the mapping")?;
        let (value, memory) = value_and_memory(&value)?;
        self.set_input(py, &spec, value, memory)
    }

    /// Binds an output to the memory of a device, or to memory at an address: (name, device), or
    /// (name, device, element type, shape, address).
    #[pyo3(signature = (name, device, element_type=None, shape=None, pointer=None))]
    fn bind_output(
        &mut self,
        name: &str,
        device: &Bound<'_, PyAny>,
        element_type: Option<&Bound<'_, PyAny>>,
        shape: Option<Vec<i64>>,
        pointer: Option<usize>,
    ) -> PyResult<()> {
        let _call = enter(device.py());
        let py = device.py();
        let target = match (element_type, shape, pointer.filter(|pointer| *pointer != 0)) {
            (Some(element_type), Some(shape), Some(pointer)) => {
                require_host(Some(device))?;
                let host = at_pointer(py, element_type, &shape, pointer)?;
                self.target(py, name, &host)?
            }
            // A shape without an address is a promise that the run keeps or breaks; the memory is
            // the session's.
            _ => {
                self.targets.remove(name);
                Some(memory_of(&self.session, device)?.into())
            }
        };
        self.rebind(py, name, target, None)
    }

    /// Binds an output to a value's memory.
    fn bind_ortvalue_output(&mut self, name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let _call = enter(value.py());
        let py = value.py();
        let value = OrtValue::inside(value)?
            .ok_or_else(|| PyTypeError::new_err("bind_ortvalue_output() takes an OrtValue"))?;
        let target = match value.get().host() {
            Some(host) => {
                let memory = host.memory.lent_by(value.clone().into_any().unbind());
                self.target(py, name, &HostTensor { memory, ..host.clone() })?
            }
            None => match value.get().device() {
                Some(device) => {
                    self.targets.remove(name);
                    Some(device.hand_over(py)?.into())
                }
                None => {
                    return Err(PyRuntimeError::new_err("the value is not in memory that a run can write"));
                }
            },
        };
        self.rebind(py, name, target, Some(value.unbind()))
    }

    /// Binds all inputs to what they are without a binding.
    fn clear_binding_inputs(&mut self) {
        self.binding.clear_binding_inputs();
        self.is_ready = false;
        for name in std::mem::take(&mut self.inputs).into_keys() {
            self.misfits.remove(&name);
        }
        self.lent.clear();
        self.in_place.clear();
    }

    /// Unbinds all outputs.
    fn clear_binding_outputs(&mut self) {
        self.binding.clear_binding_outputs();
        self.is_ready = false;
        for (name, _) in self.order.drain(..) {
            self.misfits.remove(&name);
        }
        self.targets.clear();
        self.in_place.clear();
        self.copied.clear();
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
        if !self.has_run {
            let each = self.order.iter().map(|(_, given)| match given {
                Some(given) => Ok(given.clone_ref(py)),
                None => Py::new(py, OrtValue::nothing()),
            });
            return Ok(OrtValueVector(each.collect::<PyResult<_>>()?));
        }
        for ((_, given), value) in self.order.iter().zip(self.outputs(py)?) {
            values.push(match given {
                Some(given) => given.clone_ref(py),
                None => Py::new(py, OrtValue::of(value))?,
            });
        }
        Ok(OrtValueVector(values))
    }

    /// Returns copies of the outputs of the last run, in the order of binding. Before a run, copies
    /// of what the outputs are bound to.
    fn copy_outputs_to_cpu<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let _call = enter(py);
        if !self.has_run {
            let each = self.order.iter().map(|(_, given)| match given {
                Some(given) => given.bind(py).get().numpy(py)?.call_method0("copy"),
                None => Err(PyRuntimeError::new_err(NOT_COMPUTED)),
            });
            return PyList::new(py, each.collect::<PyResult<Vec<_>>>()?);
        }
        let copies = detached(py, || self.binding.copy_outputs_to_cpu()).or_raise(py)?;
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
    /// Binds an output that may be bound already. One without a target does not fit.
    fn rebind(
        &mut self,
        py: Python<'_>,
        name: &str,
        target: Option<OutputTarget>,
        given: Option<Py<OrtValue>>,
    ) -> PyResult<()> {
        self.bind_all_anew();
        self.is_ready = false;
        self.in_place.remove(name);
        self.copied.remove(name);
        if self.owner.get().built(py)?.outputs().iter().any(|spec| spec.name == name) {
            self.binding.unbind_output(name).or_raise(py)?;
            if let Some(target) = target {
                self.misfits.remove(name);
                self.binding.bind_output(name, target).or_raise(py)?;
            }
        } else {
            self.misfits.insert(name.to_owned(), format!("Invalid output name: {name}"));
        }
        match self.order.iter_mut().find(|(other, _)| other == name) {
            Some((_, value)) => *value = given,
            None => self.order.push((name.to_owned(), given)),
        }
        self.has_run = false;
        Ok(())
    }
}
