//! `InferenceSession`: a model, loaded and built for its providers.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, OnceLock};

use ort_runtime::ep::CancelToken as Token;
use ort_runtime::ir::ValueType;
use ort_runtime::onnxruntime::{CPU, TERMINATED};
use ort_runtime::tensor::OptionalValue;
use ort_runtime::{DeviceId, ErrorKind, Model, Profile, RunOptions, Session, Value, ValueSpec};
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString};
use pyo3::{PyTraverseError, PyVisit};
use smallvec::SmallVec;

use crate::arrays::text_of_bytes;
use crate::binding::SessionIOBinding;
use crate::bound::{Feed, take_donated};
use crate::build::{self, Settings};
use crate::cancel::{CancelToken, detached, enter, interruptibly};
use crate::convert::{apart_from_inputs, object_of, value_of};
use crate::device::{describe, kind as device_kind, memory_of};
use crate::dtypes;
use crate::error::{OrRaise, exception, load_cancelled, raised};
use crate::metadata::{assigned_subgraphs, memory_infos, model_metadata, node_args};
use crate::ort_value::{OrtValue, sizes_of};
use crate::ort_value_vector::OrtValueVector;
use crate::plan::{Plan, sizes_by_name};
use crate::profile::Profiling;
use crate::providers;

/// A loaded model, and the session once it is built.
#[pyclass(frozen, weakref, module = "ort_runtime.capi.onnxruntime_pybind11_state")]
pub(crate) struct InferenceSession {
    model: Model,
    options: Py<PyAny>,
    built: OnceLock<Built>,
}

/// A built session and what each run asks of it.
pub(crate) struct Built {
    pub(crate) session: Arc<Session>,
    inputs: Vec<ValueSpec>,
    outputs: Vec<ValueSpec>,
    /// The inputs that may be absent.
    optional: Vec<String>,
    /// Places of inputs and outputs by name.
    places: [Places; 2],
    providers: Vec<(String, HashMap<String, String>)>,
    profiling: Option<Profiling>,
    /// The token of runs without options: a new one for each would be an allocation.
    idle_token: Token,
}

/// The values of a run by the names of inputs.
pub(crate) type Given<'a> = SmallVec<[(&'a str, Value); 4]>;

impl Built {
    /// The inputs.
    pub(crate) fn inputs(&self) -> &[ValueSpec] {
        &self.inputs
    }

    /// The outputs.
    pub(crate) fn outputs(&self) -> &[ValueSpec] {
        &self.outputs
    }

    /// What collects events, until the profile has ended.
    fn profile(&self) -> Option<&Profile> {
        self.profiling.as_ref().and_then(Profiling::profile)
    }

    /// The token of a caller's options, or one that no caller has.
    fn token(&self, options: Option<&Bound<'_, CancelToken>>) -> Token {
        options.map_or_else(|| self.idle_token.clone(), |token| token.get().token())
    }

    fn new(session: Session, providers: Vec<(String, HashMap<String, String>)>, profiles: bool) -> Built {
        let (inputs, outputs) = (session.inputs(), session.outputs());
        let places = [&inputs, &outputs].map(|specs| Places::of(specs));
        let may_be_absent =
            |spec: &&ValueSpec| matches!(spec.ty, ValueType::Optional(_)) && !spec.has_default;
        let optional = inputs.iter().filter(may_be_absent).map(|spec| spec.name.clone()).collect();
        let profiling = profiles.then(Profiling::start);
        let (session, idle_token) = (Arc::new(session), Token::default());
        Built { session, inputs, outputs, optional, places, providers, profiling, idle_token }
    }

    fn input(&self, py: Python<'_>, name: &str) -> PyResult<&ValueSpec> {
        let place = self.places[0].find(&self.inputs, name).and_then(|place| self.inputs.get(place));
        place.ok_or_else(|| exception(py, ErrorKind::InvalidArgument, &format!("Invalid input name: {name}")))
    }

    fn output(&self, py: Python<'_>, name: &str) -> PyResult<usize> {
        let place = self.places[1].find(&self.outputs, name);
        place.ok_or_else(|| exception(py, ErrorKind::InvalidArgument, &format!("Invalid output name:{name}")))
    }

    /// Reads a feed into an empty list, and adds the parameters of active adapters and the optional
    /// inputs that it leaves out. The list is not returned, because it is expensive to move.
    pub(crate) fn values<'a>(
        &'a self,
        feed: &Bound<'_, PyDict>,
        options: Option<&Bound<'_, PyAny>>,
        given: &mut Given<'a>,
    ) -> PyResult<()> {
        let adapters = active_adapters(options)?;
        // Taken out at once: reading a value may run code that changes the dict.
        let mut entries: SmallVec<[(Bound<'_, PyAny>, Bound<'_, PyAny>); 4]> = feed.iter().collect();
        let fed = entries.len();
        entries.extend(adapters.iter().flat_map(|adapters| adapters.iter()));
        for (place, (name, object)) in entries.iter().enumerate() {
            let spec = self.input(feed.py(), name_of(name)?)?;
            // A dict may have a name as text and as bytes, and an adapter may have a name of the
            // feed. The first one counts.
            let may_repeat = place >= fed || name.is_instance_of::<PyBytes>();
            if may_repeat && given.iter().any(|(known, _)| *known == spec.name) {
                continue;
            }
            // An input that may be left out may be `None`, too.
            if !(object.is_none() && spec.has_default) {
                given.push((&spec.name, value_of(&spec.name, &spec.ty, object)?));
            }
        }
        self.add_absent(given);
        Ok(())
    }

    /// Adds the optional inputs that a caller left out.
    fn add_absent<'a>(&'a self, given: &mut Given<'a>) {
        for name in &self.optional {
            let place = self.places[0].find(&self.inputs, name);
            let Some(spec) = place.and_then(|place| self.inputs.get(place)) else { continue };
            let ValueType::Optional(element) = &spec.ty else { continue };
            if !given.iter().any(|(other, _)| other == name) {
                let absent = OptionalValue { element_type: (**element).clone(), element: None };
                given.push((name, Value::Optional(absent)));
            }
        }
    }

    /// Runs with a feed, and returns the outputs at these places.
    fn run(
        &self,
        py: Python<'_>,
        Feed { given, donated }: Feed<'_>,
        wanted: &[usize],
        options: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<Value>> {
        let token = CancelToken::of_options(options)?;
        let cancel = self.token(token.as_ref());
        let profile = self.profile();
        let shrink_arenas = build::shrinkage(py, options)?;
        let done = interruptibly(py, cancel, |cancel| {
            let options = RunOptions { cancel, profile, shrink_arenas, ..RunOptions::default() };
            match donated.is_empty() {
                true => self.session.run_values(given, &options),
                false => self.session.run_donating(given, donated, &options),
            }
        })?;
        let outputs = done.map_err(|error| match error.kind() {
            ErrorKind::Cancelled if token.is_some_and(|token| token.get().is_set()) => {
                exception(py, ErrorKind::Fail, TERMINATED)
            }
            _ => raised(py, &error),
        })?;
        let apart = |value| apart_from_inputs(value, given).or_raise(py);
        // All of them, in the model's order, as most calls ask.
        if wanted.iter().copied().eq(0..outputs.len()) {
            return outputs.into_iter().map(apart).collect();
        }
        let missing = || PyRuntimeError::new_err("the run has fewer outputs than the model");
        wanted.iter().map(|place| apart(outputs.get(*place).cloned().ok_or_else(missing)?)).collect()
    }

    /// Returns the places of the outputs asked for.
    fn wanted(&self, names: &Bound<'_, PyAny>) -> PyResult<SmallVec<[usize; 4]>> {
        let py = names.py();
        let place = |name: Bound<'_, PyAny>| self.output(py, name_of(&name)?);
        let places: SmallVec<[usize; 4]> = match names.cast::<PyList>() {
            Ok(names) => names.iter().map(place).collect::<PyResult<_>>()?,
            // Any other sequence, but not a text, which is one of letters.
            Err(_) => {
                names.extract::<Vec<Bound<'_, PyAny>>>()?.into_iter().map(place).collect::<PyResult<_>>()?
            }
        };
        if places.is_empty() {
            let text = "At least one output should be requested.";
            return Err(exception(py, ErrorKind::InvalidArgument, text));
        }
        Ok(places)
    }
}

/// Checks run options, and returns the parameters of their active adapters by name.
fn active_adapters<'py>(options: Option<&Bound<'py, PyAny>>) -> PyResult<Option<Bound<'py, PyDict>>> {
    let Some(options) = options else { return Ok(None) };
    let module = options.py().import(intern!(options.py(), "ort_runtime.capi._run_options"))?;
    Ok(Some(module.call_method1(intern!(options.py(), "active_adapters"), (options,))?.cast_into()?))
}

/// Reads the name of an input or output, which may be bytes.
pub(crate) fn name_of<'a>(name: &'a Bound<'_, PyAny>) -> PyResult<&'a str> {
    match name.cast::<PyBytes>() {
        Ok(bytes) => text_of_bytes(bytes),
        Err(_) => name.cast::<PyString>()?.to_str(),
    }
}

/// Finds values by name. Few are searched one by one, which is faster than a hash.
struct Places(HashMap<String, usize>);

impl Places {
    /// The most values that are searched one by one.
    const FEW: usize = 8;

    fn of(specs: &[ValueSpec]) -> Places {
        let named = specs.iter().enumerate().map(|(place, spec)| (spec.name.clone(), place));
        Places(if specs.len() > Places::FEW { named.collect() } else { HashMap::new() })
    }

    /// The place of a name among the values that these are the places of.
    fn find(&self, specs: &[ValueSpec], name: &str) -> Option<usize> {
        match specs.len() > Places::FEW {
            true => self.0.get(name).copied(),
            false => specs.iter().position(|spec| spec.name == name),
        }
    }
}

impl InferenceSession {
    /// The built session.
    pub(crate) fn built(&self, py: Python<'_>) -> PyResult<&Built> {
        let text = "Session not initialized: call initialize_session() first";
        self.built.get().ok_or_else(|| exception(py, ErrorKind::Fail, text))
    }
}

#[pymethods]
impl InferenceSession {
    /// Loads a model from a path or from bytes.
    #[new]
    fn new(
        options: &Bound<'_, PyAny>,
        path_or_bytes: &Bound<'_, PyAny>,
        is_path: bool,
        read_config: bool,
    ) -> PyResult<InferenceSession> {
        let _call = enter(options.py());
        build::require_options(options)?;
        let source = match is_path {
            true => build::open(options, path_or_bytes.cast::<PyString>()?.to_str()?)?,
            false => build::wrap(options, path_or_bytes.cast::<PyBytes>()?)?,
        };
        let model = build::load(options, source)?;
        let options = build::copied(options, read_config.then(|| model.info()))?;
        Ok(InferenceSession { model, options: options.unbind(), built: OnceLock::new() })
    }

    /// Builds the session for these providers.
    fn initialize_session(
        &self,
        py: Python<'_>,
        providers: Vec<String>,
        provider_options: Vec<HashMap<String, String>>,
        disabled: HashSet<String>,
    ) -> PyResult<()> {
        let _call = enter(py);
        if provider_options.len() > providers.len() {
            return Err(PyValueError::new_err("there are more options of providers than providers"));
        }
        let options = provider_options.into_iter().chain(std::iter::repeat_with(HashMap::new));
        let providers: Vec<_> = providers.into_iter().zip(options).collect();
        let settings = Settings::of(self.options.bind(py), &providers, disabled.into_iter().collect())?;
        let profiles = settings.profiles;
        let requests = settings.requests();
        let cancel = settings.cancel.clone();
        let built = interruptibly(py, cancel, |cancel| settings.build(&self.model, cancel))?;
        let session = built.map_err(|error| {
            if error.kind() == ErrorKind::Cancelled {
                return load_cancelled(py);
            }
            // A provider that cannot be opened is what sessions fall back from.
            match detached(py, || providers::failing(&requests)) {
                Some(problem) => exception(py, ErrorKind::EpFail, &problem),
                None => raised(py, &error),
            }
        })?;
        let built = Built::new(session, providers, profiles);
        self.built.set(built).map_err(|_| PyRuntimeError::new_err("the session is initialized already"))
    }

    /// Runs the model. Returns the outputs named, or all.
    #[pyo3(signature = (output_names, input_feed, run_options=None))]
    fn run<'py>(
        &self,
        py: Python<'py>,
        output_names: &Bound<'py, PyAny>,
        input_feed: &Bound<'py, PyDict>,
        run_options: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyList>> {
        let _call = enter(py);
        let built = self.built(py)?;
        let mut given = Given::new();
        built.values(input_feed, run_options, &mut given)?;
        let wanted = built.wanted(output_names)?;
        let outputs = built.run(py, Feed::of(&given), &wanted, run_options)?;
        drop(given);
        let list = PyList::empty(py);
        for output in &outputs {
            list.append(object_of(py, output)?)?;
        }
        Ok(list)
    }

    /// Runs the model without options. Raises TypeError if the name of an input is no `str`.
    fn run_plain<'py>(
        &self,
        py: Python<'py>,
        output_names: &Bound<'py, PyAny>,
        input_feed: &Bound<'py, PyDict>,
    ) -> PyResult<Bound<'py, PyList>> {
        if input_feed.iter().any(|(name, _)| !name.is_instance_of::<PyString>()) {
            return Err(PyTypeError::new_err("the names of inputs are texts"));
        }
        self.run(py, output_names, input_feed, None)
    }

    /// Runs the model on native values, and returns native values.
    #[pyo3(signature = (input_feed, output_names, run_options=None))]
    fn run_with_ort_values(
        &self,
        py: Python<'_>,
        input_feed: &Bound<'_, PyDict>,
        output_names: &Bound<'_, PyAny>,
        run_options: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<OrtValueVector> {
        let _call = enter(py);
        let built = self.built(py)?;
        let mut given = Given::new();
        built.values(input_feed, run_options, &mut given)?;
        let wanted = built.wanted(output_names)?;
        let outputs = built.run(py, Feed::of(&given), &wanted, run_options)?;
        let wrapped = outputs.into_iter().map(|value| Py::new(py, OrtValue::of(value)));
        Ok(OrtValueVector(wrapped.collect::<PyResult<_>>()?))
    }

    /// Runs the model, takes over the memory of the values in `donated`, and returns native values.
    /// That memory may be overwritten, and each value is freed after its last use. Empties
    /// `donated`; the caller must hold no other reference to the values in it.
    fn run_donating(
        &self,
        py: Python<'_>,
        input_feed: &Bound<'_, PyDict>,
        donated: &Bound<'_, PyDict>,
        output_names: &Bound<'_, PyAny>,
    ) -> PyResult<OrtValueVector> {
        let _call = enter(py);
        let built = self.built(py)?;
        let mut given = Given::new();
        built.values(input_feed, None, &mut given)?;
        let buffers = take_donated(donated, |name| built.input(py, name), &mut given)?;
        let wanted = built.wanted(output_names)?;
        let outputs = built.run(py, Feed { given: &given, donated: buffers }, &wanted, None)?;
        let wrapped = outputs.into_iter().map(|value| Py::new(py, OrtValue::of(value)));
        Ok(OrtValueVector(wrapped.collect::<PyResult<_>>()?))
    }

    /// Runs the model on the memory of a binding.
    #[pyo3(signature = (binding, run_options=None))]
    fn run_with_iobinding(
        slf: &Bound<'_, Self>,
        binding: &Bound<'_, SessionIOBinding>,
        run_options: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let _call = enter(slf.py());
        let py = slf.py();
        let in_use = || PyRuntimeError::new_err("another call uses the binding; make one for each thread");
        let mut binding = binding.try_borrow_mut().map_err(|_| in_use())?;
        if !binding.is_of(slf) {
            return Err(PyValueError::new_err("IOBinding must be used with the session that created it."));
        }
        let built = slf.get().built(py)?;
        let adapters = active_adapters(run_options)?;
        let token = CancelToken::of_options(run_options)?;
        let cancel = built.token(token.as_ref());
        let profile = built.profile();
        let run = RunOptions {
            cancel,
            profile,
            shrink_arenas: build::shrinkage(py, run_options)?,
            ..RunOptions::default()
        };
        match adapters.filter(|adapters| !adapters.is_empty()) {
            Some(adapters) => binding.run_with_adapters(&adapters, &built.session, run),
            None => binding.run(py, &built.session, run),
        }
    }

    /// Makes a tensor in the memory of one of the session's devices. Raises RuntimeError if the
    /// session has no such device.
    fn create_ortvalue_from_shape_and_type(
        &self,
        py: Python<'_>,
        shape: Vec<i64>,
        element_type: &Bound<'_, PyAny>,
        device: &Bound<'_, PyAny>,
    ) -> PyResult<OrtValue> {
        let _call = enter(py);
        let session = &self.built(py)?.session;
        let (memory, dtype) = (memory_of(session, device)?, dtypes::named(py, element_type)?);
        if memory == DeviceId::HOST && device_kind(device)? != 0 {
            let text = format!("No session allocator found for {}", describe(device)?);
            return Err(PyRuntimeError::new_err(text));
        }
        OrtValue::in_memory(py, session, memory, dtype, &sizes_of(&shape)?)
    }

    /// Which provider runs which nodes, as a list of `OrtEpAssignedSubgraph`.
    fn get_provider_graph_assignment_info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let _call = enter(py);
        let settings = Settings::of(self.options.bind(py), &[], Vec::new())?;
        assigned_subgraphs(py, &self.model, &self.built(py)?.session, settings)
    }

    /// The inputs without a default, as `NodeArg`.
    #[getter]
    fn inputs_meta<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let _call = enter(py);
        let specs: Vec<_> = self.model.inputs().into_iter().filter(|spec| !spec.has_default).collect();
        node_args(py, &self.model, &specs, &self.model.info().declared_inputs)
    }

    /// The outputs, as `NodeArg`.
    #[getter]
    fn outputs_meta<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let _call = enter(py);
        node_args(py, &self.model, &self.built(py)?.outputs, &self.model.info().declared_outputs)
    }

    /// The inputs with a default, as `NodeArg`.
    #[getter]
    fn overridable_initializers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let _call = enter(py);
        let specs: Vec<_> = self.model.inputs().into_iter().filter(|spec| spec.has_default).collect();
        node_args(py, &self.model, &specs, &self.model.info().declared_inputs)
    }

    /// The model's metadata.
    #[getter]
    fn model_meta<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let _call = enter(py);
        model_metadata(py, &self.model)
    }

    /// A copy of the options of the session.
    #[getter]
    fn session_options<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let _call = enter(py);
        build::copied(self.options.bind(py), None)
    }

    /// When profiling began, in nanoseconds of a monotonic clock.
    #[getter(get_profiling_start_time_ns)]
    fn profiling_start_time_ns(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.built(py)?.profiling.as_ref().map_or(0, Profiling::start_ns))
    }

    /// The memory of each input, as `OrtMemoryInfo`.
    #[getter]
    fn input_meminfos<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let _call = enter(py);
        memory_infos(py, self.built(py)?.inputs.len())
    }

    /// The memory of each output, as `OrtMemoryInfo`.
    #[getter]
    fn output_meminfos<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let _call = enter(py);
        memory_infos(py, self.built(py)?.outputs.len())
    }

    /// Ends the profile, if the package's session does not write it, and returns the file's name.
    fn end_profiling(slf: &Bound<'_, Self>) -> PyResult<String> {
        let _call = enter(slf.py());
        let py = slf.py();
        if slf.get().built(py)?.profile().is_none() {
            return Ok(String::new());
        }
        let profile = py.import("ort_runtime.capi._profiling")?.getattr("of_native")?.call1((slf,))?;
        profile.call_method0("finish")?.extract()
    }

    /// The names of the providers in use, CPU last.
    fn get_providers(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let mut names: Vec<String> = self.built(py)?.providers.iter().map(|(name, _)| name.clone()).collect();
        if !names.iter().any(|name| name == CPU) {
            names.push(CPU.to_owned());
        }
        Ok(names)
    }

    /// The options of each provider.
    fn get_provider_options(&self, py: Python<'_>) -> PyResult<HashMap<String, HashMap<String, String>>> {
        let mut all: HashMap<_, _> = self.built(py)?.providers.iter().cloned().collect();
        all.entry(CPU.to_owned()).or_default();
        Ok(all)
    }

    /// The events of all runs so far, as dicts.
    fn profile_events<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let _call = enter(py);
        match &self.built(py)?.profiling {
            Some(profiling) => profiling.events(py),
            None => Ok(PyList::empty(py)),
        }
    }

    /// Drops the events, and collects no more.
    fn stop_profiling(&self, py: Python<'_>) -> PyResult<()> {
        if let Some(profiling) = &self.built(py)?.profiling {
            profiling.stop();
        }
        Ok(())
    }

    /// What a run with these sizes allocates that takes over the memory of the inputs `donated`.
    #[pyo3(signature = (dims, donated=Vec::new()))]
    fn plan(&self, py: Python<'_>, dims: &Bound<'_, PyDict>, donated: Vec<String>) -> PyResult<Plan> {
        let _call = enter(py);
        let built = self.built(py)?;
        let dims = sizes_by_name(dims)?;
        let dims: Vec<(&str, i64)> = dims.iter().map(|(name, size)| (name.as_str(), *size)).collect();
        let donated: Vec<&str> = donated.iter().map(String::as_str).collect();
        detached(py, || Plan::of(&built.session, &dims, &donated)).or_raise(py)
    }

    /// The bytes that the session holds, by purpose.
    fn memory_use<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let built = self.built(py)?;
        let memory = detached(py, || built.session.memory());
        let dict = PyDict::new(py);
        for (name, bytes) in [
            ("weights", memory.weights),
            ("weights_mapped", memory.weights_mapped),
            ("weights_copied", memory.weights_copied),
            ("packed", memory.packed),
            ("packed_shared", memory.packed_shared),
            ("device_constants", memory.device_constants),
            ("cached", memory.cached),
            ("slabs", memory.slabs),
            ("workspace", memory.workspace),
            ("outputs", memory.outputs),
            ("dynamic", memory.dynamic),
            ("arena", memory.arena),
            ("outputs_waiting", memory.outputs_waiting),
            ("idle", memory.idle),
            ("limit", memory.limit),
            ("activations", memory.activations),
            ("activations_peak", memory.activations_peak),
            ("total", memory.total()),
        ] {
            dict.set_item(name, bytes)?;
        }
        Ok(dict)
    }

    /// The largest size of a dimension with which a run stays within a budget in bytes.
    fn largest_batch(&self, py: Python<'_>, dim: &str, budget: usize) -> PyResult<Option<i64>> {
        let built = self.built(py)?;
        detached(py, || built.session.largest_batch(dim, budget)).or_raise(py)
    }

    /// Gives idle memory back to the system.
    fn trim(&self, py: Python<'_>) -> PyResult<()> {
        let built = self.built(py)?;
        detached(py, || built.session.trim());
        Ok(())
    }

    /// What in the model is off the standard and runs all the same.
    #[getter]
    fn warnings(&self) -> Vec<String> {
        self.model.warnings().iter().map(|warning| format!("{}: {}", warning.place, warning.text)).collect()
    }

    /// Shows the garbage collector what the session keeps alive, apart from weights that the model
    /// shares with Python. A native session does not change, so a cycle is broken elsewhere.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.options)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err("a native session cannot be pickled; pickle the InferenceSession around it"))
    }
}
