//! Building: what the options of a session say, for the engine.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use numpy::PyUntypedArray;
use ort_runtime::ep::{CancelToken as Token, Precision};
use ort_runtime::ir::Graph;
use ort_runtime::onnx::{FileAccess, ModelInfo, Source, Weights};
use ort_runtime::onnxruntime::working_folder;
use ort_runtime::rewrite::{self, Level};
use ort_runtime::train::api::ModuleOptions;
use ort_runtime::{
    ArenaDevice, Budget, ErrorKind, LoadOptions, Model, ProviderRequest, RunOptions, Session, SessionBuilder,
    SessionOptions, Tensor, Value,
};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::arrays::{self, tensor_of};
use crate::cancel::{CancelToken, detached};
use crate::error::{OrRaise, exception, load_failed};
use crate::ort_value::OrtValue;
use crate::providers::request;

/// Refuses what are no session options.
pub(crate) fn require_options(given: &Bound<'_, PyAny>) -> PyResult<()> {
    let class = given.py().import("ort_runtime.capi._options")?.getattr("SessionOptions")?;
    match given.is_instance(&class)? {
        true => Ok(()),
        false => Err(PyTypeError::new_err(format!("expected SessionOptions, not {}", given.get_type()))),
    }
}

/// Opens a model's file, which is mapped.
pub(crate) fn open(options: &Bound<'_, PyAny>, path: &str) -> PyResult<Source> {
    let py = options.py();
    if path.is_empty() {
        return Err(exception(py, ErrorKind::InvalidArgument, "the path of the model is empty"));
    }
    let path = path.to_owned();
    let source = detached(py, || Source::open(&path, FileAccess::default()))
        .map_err(|error| load_failed(py, Some(Path::new(&path)), &error))?;
    check_format(options, &source)?;
    in_folder(options, source)
}

/// Refuses a model of another format than the options ask for. Without an option, the name of a
/// file may end in `.ort`, and any other file or bytes may be of either format.
fn check_format(options: &Bound<'_, PyAny>, source: &Source) -> PyResult<()> {
    let format = entries(options)?.remove("session.load_model_format").unwrap_or_default();
    let expected = match format.as_str() {
        "" if source.path().is_some_and(is_ort_file) => true,
        "" => return Ok(()),
        format => format == "ORT",
    };
    source.expect_ort_format(expected).map_err(|error| load_failed(options.py(), source.path(), &error))
}

/// Returns whether a file name is one of ORT format.
fn is_ort_file(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("ort"))
}

/// Reads a model from bytes, which are borrowed.
pub(crate) fn wrap(options: &Bound<'_, PyAny>, bytes: &Bound<'_, PyBytes>) -> PyResult<Source> {
    if bytes.as_bytes().is_empty() {
        return Err(exception(
            options.py(),
            ErrorKind::InvalidArgument,
            "No graph was found in the protobuf: the bytes of the model are empty",
        ));
    }
    let source = Source::from_bytes(Bytes::from_owner(Borrowed::of(bytes)));
    check_format(options, &source)?;
    in_folder(options, source)
}

/// Bytes of Python's, kept alive.
struct Borrowed {
    data: *const u8,
    len: usize,
    _owner: Py<PyBytes>,
}

// SAFETY: bytes objects do not change, and `_owner` keeps them alive from any thread.
unsafe impl Send for Borrowed {}

impl Borrowed {
    fn of(bytes: &Bound<'_, PyBytes>) -> Borrowed {
        let slice = bytes.as_bytes();
        Borrowed { data: slice.as_ptr(), len: slice.len(), _owner: bytes.clone().unbind() }
    }
}

impl AsRef<[u8]> for Borrowed {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the object behind `_owner` has `len` bytes there, which never change or move.
        unsafe { std::slice::from_raw_parts(self.data, self.len) }
    }
}

/// Sets where the external data of a model lies. For a model in memory the default is the working
/// directory, as in onnxruntime.
fn in_folder(options: &Bound<'_, PyAny>, source: Source) -> PyResult<Source> {
    let folder = match entries(options)?.remove("session.model_external_initializers_file_folder_path") {
        Some(folder) => Some(PathBuf::from(folder)),
        None if source.path().is_none() => working_folder(),
        None => None,
    };
    Ok(match folder {
        Some(folder) => source.in_folder(folder, FileAccess::default()),
        None => source,
    })
}

/// Loads a model with the changes that options ask for: fixed dimensions, and weights and data
/// files from memory, which the model shares and keeps alive.
pub(crate) fn load(options: &Bound<'_, PyAny>, source: Source) -> PyResult<Model> {
    let py = options.py();
    let changes = LoadOptions {
        free_dimensions: items(options, "_free_dimensions", |size| size.extract())?,
        free_denotations: items(options, "_free_denotations", |size| size.extract())?,
        initializers: items(options, "_initializers", weight)?,
        external_initializers: items(options, "_external_initializers", weight)?,
        external_files: items(options, "_external_files", file)?,
        ..LoadOptions::default()
    };
    let path = source.path().map(Path::to_path_buf);
    detached(py, || Model::from_source_with(source, &changes))
        .map_err(|error| load_failed(py, path.as_deref(), &error))
}

/// Reads a dict of the options, in its order.
fn items<T>(
    options: &Bound<'_, PyAny>,
    name: &str,
    read: impl Fn(&Bound<'_, PyAny>) -> PyResult<T>,
) -> PyResult<Vec<(String, T)>> {
    let dict = options.getattr(name)?.cast_into::<PyDict>()?;
    let mut items = Vec::with_capacity(dict.len());
    for (key, value) in dict.iter() {
        items.push((key.extract::<String>()?, read(&value)?));
    }
    Ok(items)
}

/// Returns the tensor in an `OrtValue`, which shares its memory.
fn weight(value: &Bound<'_, PyAny>) -> PyResult<Tensor> {
    let py = value.py();
    let native = OrtValue::inside(value)?
        .ok_or_else(|| PyTypeError::new_err("the value of an initializer must be an OrtValue"))?;
    match native.get().value(py)? {
        Value::Tensor(tensor) => Ok(tensor),
        other => {
            let text = format!("the value of an initializer is {}, expected a tensor", other.kind_name());
            Err(exception(py, ErrorKind::InvalidArgument, &text))
        }
    }
}

/// Returns the bytes behind a `memoryview` of bytes, which keep the view alive.
fn file(view: &Bound<'_, PyAny>) -> PyResult<Bytes> {
    // An empty view has no address that an array could be made over.
    if view.len()? == 0 {
        return Ok(Bytes::new());
    }
    let py = view.py();
    let array = arrays::numpy(py)?.call_method1(intern!(py, "frombuffer"), (view, "uint8"))?;
    let tensor = tensor_of(&array.cast_into::<PyUntypedArray>()?)?;
    Ok(tensor.bytes().cloned().unwrap_or_default())
}

/// Returns a copy of options, with those that the model's metadata holds if they are to be read.
pub(crate) fn copied<'py>(
    options: &Bound<'py, PyAny>,
    info: Option<&ModelInfo>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = options.py();
    let copy = options.call_method0(intern!(py, "__copy__"))?;
    let config = info.and_then(|info| info.metadata.iter().find(|(key, _)| key == "ort_config"));
    if let Some((_, config)) = config {
        copy.call_method1(intern!(py, "_apply_config"), (config,))?;
    }
    Ok(copy)
}

/// Returns the configuration entries of options.
fn entries(options: &Bound<'_, PyAny>) -> PyResult<HashMap<String, String>> {
    options.getattr(intern!(options.py(), "_entries"))?.extract()
}

/// Returns the arenas that a run is to shrink.
pub(crate) fn shrinkage(py: Python<'_>, options: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<ArenaDevice>> {
    let Some(options) = options else { return Ok(Vec::new()) };
    let entries = options.getattr(intern!(py, "_entries"))?.cast_into::<PyDict>()?;
    let list: String = match entries.get_item(SHRINKAGE)? {
        Some(list) => list.extract()?,
        None => return Ok(Vec::new()),
    };
    if list.is_empty() {
        return Ok(Vec::new());
    }
    let mut run = RunOptions::default();
    run.add_run_config_entry(SHRINKAGE, &list).or_raise(py)?;
    Ok(run.shrink_arenas)
}

const SHRINKAGE: &str = "memory.enable_memory_arena_shrinkage";

/// What a session is built with.
pub(crate) struct Settings {
    options: SessionOptions,
    providers: Vec<ProviderRequest>,
    precision: Precision,
    cache_dir: Option<PathBuf>,
    budget: Option<Arc<Budget>>,
    /// Ends the making of the session.
    pub(crate) cancel: Token,
    /// The file to write the optimized model to, and where its weights go.
    optimized: Option<(PathBuf, Weights)>,
    /// Whether runs are profiled.
    pub(crate) profiles: bool,
}

impl Settings {
    /// Reads the package's `SessionOptions`.
    pub(crate) fn of(
        given: &Bound<'_, PyAny>,
        providers: &[(String, HashMap<String, String>)],
        disabled: Vec<String>,
    ) -> PyResult<Settings> {
        let py = given.py();
        let number = |name: &str| given.getattr(name)?.extract::<usize>();
        // Programs write -1 for the default, as onnxruntime takes it.
        let threads = |name: &str| {
            let count = given.getattr(name)?.extract::<i64>()?;
            PyResult::Ok(usize::try_from(count).unwrap_or(0))
        };
        let flag = |name: &str| given.getattr(name)?.extract::<bool>();
        let mut options = SessionOptions {
            intra_op_num_threads: threads("intra_op_num_threads")?,
            inter_op_num_threads: threads("inter_op_num_threads")?,
            enable_cpu_mem_arena: flag("enable_cpu_mem_arena")?,
            enable_mem_pattern: flag("enable_mem_pattern")?,
            enable_mem_reuse: flag("enable_mem_reuse")?,
            graph_optimization_level: level(number("graph_optimization_level")?),
            memory_limit: given.getattr("memory_limit")?.extract()?,
            disabled_rules: disabled.into_iter().filter(|name| is_rule(name)).collect(),
            ..SessionOptions::default()
        };
        // Entries that only other providers or builds read have no effect here.
        let entries = entries(given)?;
        // The session's properties have names of their own.
        for key in SessionOptions::config_keys().filter(|key| !key.contains('.')) {
            if let Some(value) = entries.get(key) {
                options.add_session_config_entry(key, value).or_raise(py)?;
            }
        }
        let precision: Option<String> = given.getattr("precision")?.extract()?;
        let precision = match precision.as_deref() {
            None | Some("fp32") => Precision::Fp32,
            Some("bf16") => Precision::Bf16,
            Some(other) => {
                let text = format!("there is no precision '{other}'; it is fp32 or bf16");
                return Err(exception(py, ErrorKind::InvalidArgument, &text));
            }
        };
        let cache_dir: Option<PathBuf> = given.getattr("cache_dir")?.extract()?;
        let providers = providers.iter().map(|(name, options)| request(name, options));
        let providers = providers.collect::<PyResult<_>>()?;
        let budget = shared_budget(&given.getattr("budget")?)?;
        let cancel = given.getattr("_load_cancel")?.cast::<CancelToken>()?.get().token();
        let (optimized, profiles) = (optimized(given, &entries)?, flag("enable_profiling")?);
        Ok(Settings { options, providers, precision, cache_dir, budget, cancel, optimized, profiles })
    }

    /// The providers asked for.
    pub(crate) fn requests(&self) -> Vec<ProviderRequest> {
        self.providers.clone()
    }

    /// The part that a training run takes.
    pub(crate) fn module_options(self) -> ModuleOptions {
        let threads = self.options.intra_op_num_threads;
        ModuleOptions {
            memory_limit: self.options.memory_limit,
            providers: self.providers,
            threads: (threads > 0).then_some(threads),
            precision: self.precision,
            ..ModuleOptions::default()
        }
    }

    /// Builds the session. Writes the optimized model first, if that is asked for.
    pub(crate) fn build(mut self, model: &Model, cancel: Token) -> ort_runtime::Result<Session> {
        let optimized = self.optimized.take();
        let builder = self.builder(model).cancel(cancel);
        if let Some((path, weights)) = optimized {
            builder.save_optimized(path, &weights)?;
        }
        builder.build()
    }

    /// Returns the model's graph after the rewrites that onnxruntime makes before it assigns nodes
    /// to providers: those of level basic at most.
    pub(crate) fn basic_graph(mut self, model: &Model) -> ort_runtime::Result<Graph> {
        let level = &mut self.options.graph_optimization_level;
        if *level == Level::Disabled {
            return Ok(model.graph().clone());
        }
        *level = Level::Basic;
        // The session is built, so its constants fit; these are a copy for a moment.
        (self.options.memory_limit, self.budget) = (None, None);
        Ok(self.builder(model).optimized()?.0)
    }

    /// Returns a builder of the session.
    pub(crate) fn builder(self, model: &Model) -> SessionBuilder {
        let mut builder = Session::builder(model).options(&self.options).precision(self.precision);
        if let Some(folder) = self.cache_dir {
            builder = builder.cache_dir(folder);
        }
        if let Some(budget) = &self.budget {
            builder = builder.budget(budget);
        }
        for request in self.providers {
            builder = builder.provider_request(request);
        }
        builder
    }
}

/// Whether a name is that of a rewrite rule. Programs switch off optimizers of onnxruntime that are
/// none here, which only a log line tells.
fn is_rule(name: &str) -> bool {
    let is_known = rewrite::rule_names().any(|known| known == name);
    if !is_known {
        tracing::info!("there is no rewrite rule '{name}' to disable");
    }
    is_known
}

/// Returns what the sessions of a Python `Budget` share. The first one makes it.
fn shared_budget(given: &Bound<'_, PyAny>) -> PyResult<Option<Arc<Budget>>> {
    if given.is_none() {
        return Ok(None);
    }
    let py = given.py();
    let known = given.getattr(intern!(py, "_shared"))?;
    if let Ok(known) = known.cast::<SharedBudget>() {
        return Ok(Some(known.get().0.clone()));
    }
    let budget = Budget::new(Some(given.getattr("limit")?.extract()?));
    given.setattr(intern!(py, "_shared"), SharedBudget(budget.clone()))?;
    Ok(Some(budget))
}

/// The engine's part of a Python `Budget`.
#[pyclass(frozen, module = "ort_runtime.capi.onnxruntime_pybind11_state")]
struct SharedBudget(Arc<Budget>);

const EXTERNAL_FILE: &str = "session.optimized_model_external_initializers_file_name";
const EXTERNAL_BYTES: &str = "session.optimized_model_external_initializers_min_size_in_bytes";

/// Returns the file that the optimized model goes to, and where its weights go.
fn optimized(
    given: &Bound<'_, PyAny>,
    entries: &HashMap<String, String>,
) -> PyResult<Option<(PathBuf, Weights)>> {
    let path: PathBuf = given.getattr("optimized_model_filepath")?.extract()?;
    if path.as_os_str().is_empty() {
        return Ok(None);
    }
    let format = entries.get("session.save_model_format").map_or("", String::as_str);
    if format == "ORT" || (format.is_empty() && is_ort_file(&path)) {
        let text = "Models are not saved in ORT format; set session.save_model_format to ONNX, and a path that does \
                    not end in .ort";
        return Err(exception(given.py(), ErrorKind::NotImplemented, text));
    }
    let Some(name) = entries.get(EXTERNAL_FILE).filter(|name| !name.is_empty()) else {
        return Ok(Some((path, Weights::Inside)));
    };
    // 1024 is onnxruntime's default.
    let least = entries.get(EXTERNAL_BYTES).map_or(Ok(1024), |text| text.trim().parse::<usize>());
    let least = least.map_err(|_| {
        let text = format!("{EXTERNAL_BYTES} takes a number of bytes");
        exception(given.py(), ErrorKind::InvalidArgument, &text)
    })?;
    Ok(Some((path, Weights::Named { name: name.clone(), least })))
}

fn level(number: usize) -> Level {
    match number {
        0 => Level::Disabled,
        1 => Level::Basic,
        2 => Level::Extended,
        _ => Level::All,
    }
}
