//! `OrtSession`: a model built for runs, with its inputs and outputs as C asks for them.

use std::collections::{HashMap, HashSet};
use std::ffi::{c_char, c_void};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use ort_runtime::ep::CancelToken;
use ort_runtime::ir::ValueType;
use ort_runtime::onnx::{DeclaredShapes, FileAccess, Source, Weights};
use ort_runtime::onnxruntime::{load_failed, status_code, working_folder};
use ort_runtime::{
    CustomOperators, Error, ErrorKind, IdleMemory, LoadOptions, Model, Session as Engine, SessionBuilder,
    ValueSpec,
};

use crate::allocator::Allocator;
use crate::bindings::Bindings;
use crate::custom_domain;
use crate::custom_threads::ClientThreads;
use crate::entry::{Array, ArrayMut, In, Object, Out, PathText, Released, entries, kinds};
use crate::env::{Env, registered_arena};
use crate::log::{Scope, SessionLog};
use crate::memory_info::MemoryInfo;
use crate::profile::Profiling;
use crate::provider_library::Assignment;
use crate::session_edit::Unfinished;
use crate::session_options::SessionOptions;
use crate::status::{Failure, Outcome, code, fail, invalid};
use crate::type_info::{ShapeSource, TypeInfo};

/// A session of C.
pub(crate) struct Session {
    pub(crate) engine: Arc<Engine>,
    pub(crate) inputs: Ports,
    pub(crate) outputs: Ports,
    /// The places of inputs that a run needs, and of those that have a default.
    required: Vec<usize>,
    overridable: Vec<usize>,
    pub(crate) profiling: Option<Profiling>,
    /// The token of runs without options: a new one for each would be an allocation.
    pub(crate) idle_token: CancelToken,
    pub(crate) bindings: Bindings,
    /// What the model editor has not finished. The engine is empty then.
    pub(crate) unfinished: Option<Box<Unfinished>>,
    /// What the session logs with, if the options set anything.
    pub(crate) log: Option<Arc<SessionLog>>,
    /// What each provider runs, if the options ask for it.
    pub(crate) assignment: Option<Assignment>,
    /// Held until the engine is gone: fields are dropped in their order.
    #[allow(dead_code, reason = "it is held")]
    threads: Option<ClientThreads>,
}

kinds! {
    Session => "OrtSession", b"OrtSessn";
}

/// Inputs or outputs.
pub(crate) struct Ports {
    pub(crate) ports: Vec<Port>,
    /// Places by name, if they are many: few are searched one by one, which is faster than a hash.
    places: HashMap<String, usize>,
}

/// An input or output.
pub(crate) struct Port {
    pub(crate) spec: ValueSpec,
    info: TypeInfo,
}

/// The most ports that are searched one by one.
const FEW: usize = 8;

impl Ports {
    fn none() -> Ports {
        Ports { ports: Vec::new(), places: HashMap::new() }
    }

    fn of(specs: Vec<ValueSpec>, declared: &DeclaredShapes, invented: &HashSet<String>) -> Ports {
        let declared: HashMap<&str, _> =
            declared.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())).collect();
        let port = |spec: ValueSpec| {
            let declared = declared.get(spec.name.as_str()).copied();
            let info = TypeInfo::of(&spec.ty, &ShapeSource { declared, invented: Some(invented) });
            Port { spec, info }
        };
        let ports: Vec<Port> = specs.into_iter().map(port).collect();
        let named = ports.iter().enumerate().map(|(place, port)| (port.spec.name.clone(), place));
        let places = if ports.len() > FEW { named.collect() } else { HashMap::new() };
        Ports { ports, places }
    }

    /// The place of a name.
    pub(crate) fn find(&self, name: &[u8]) -> Option<usize> {
        match self.ports.len() > FEW {
            true => self.places.get(std::str::from_utf8(name).ok()?).copied(),
            false => self.ports.iter().position(|port| port.spec.name.as_bytes() == name),
        }
    }

    fn at(&self, place: Option<usize>) -> Outcome<&Port> {
        place
            .and_then(|place| self.ports.get(place))
            .ok_or_else(|| Failure::new(code::FAIL, "index out of range"))
    }
}

/// The inputs and outputs of a session.
pub(crate) struct SessionPorts {
    inputs: Ports,
    outputs: Ports,
}

impl SessionPorts {
    pub(crate) fn none() -> SessionPorts {
        SessionPorts { inputs: Ports::none(), outputs: Ports::none() }
    }

    pub(crate) fn of(model: &Model, outputs: Vec<ValueSpec>) -> SessionPorts {
        let invented = invented_names(model);
        SessionPorts {
            inputs: Ports::of(model.inputs(), &model.info().declared_inputs, &invented),
            outputs: Ports::of(outputs, &model.info().declared_outputs, &invented),
        }
    }
}

/// The names that the loader gives to sizes of inputs without one.
fn invented_names(model: &Model) -> HashSet<String> {
    let names = |spec: &ValueSpec| {
        let rank = spec.ty.shape().map_or(0, |shape| shape.len());
        (0..rank).map(|axis| format!("{}.{axis}", spec.name)).collect::<Vec<_>>()
    };
    model.inputs().iter().flat_map(names).collect()
}

impl Session {
    /// Loads and builds a session. Without options it has the defaults.
    pub(crate) fn create(options: Option<&SessionOptions>, source: Source) -> Outcome<Session> {
        let defaults = SessionOptions::default();
        let options = options.unwrap_or(&defaults);
        if options.is_cancelled {
            return Err(load_cancelled());
        }
        let log = session_log(options);
        let _scope = log.as_ref().map(|log| Scope::enter(log, None));
        let profiling = options.profile_prefix.as_deref().map(Profiling::start);
        let threads = match options.uses_global_threads {
            true => None,
            false => options.threads.start(options.pool_sizes())?,
        };
        let model = load_named(options, source)?;
        let engine = build(options, &model)?;
        if let Some(plan) = &options.own.plan {
            write_plan(&engine, plan)?;
        }
        let ports = SessionPorts::of(&model, engine.outputs());
        let is_recorded = options.entry("session.record_ep_graph_assignment_info") == Some("1");
        let assignment = is_recorded.then(|| Assignment::of(&engine));
        let mut session = Session::with(engine, ports, profiling);
        (session.assignment, session.log, session.threads) = (assignment, log, threads);
        Ok(session)
    }

    pub(crate) fn with(engine: Engine, ports: SessionPorts, profiling: Option<Profiling>) -> Session {
        let mut session = Session {
            engine: Arc::new(engine),
            inputs: Ports::none(),
            outputs: Ports::none(),
            required: Vec::new(),
            overridable: Vec::new(),
            profiling,
            idle_token: CancelToken::new(),
            bindings: Bindings::default(),
            unfinished: None,
            log: None,
            assignment: None,
            threads: None,
        };
        session.set_ports(ports);
        session
    }

    pub(crate) fn set_ports(&mut self, SessionPorts { inputs, outputs }: SessionPorts) {
        let places = |has_default: bool| {
            let chosen = inputs.ports.iter().enumerate();
            chosen.filter(|(_, port)| port.spec.has_default == has_default).map(|(place, _)| place).collect()
        };
        (self.required, self.overridable) = (places(false), places(true));
        (self.inputs, self.outputs) = (inputs, outputs);
    }

    /// The inputs that are no optionals and have no default.
    pub(crate) fn needed(&self) -> impl Iterator<Item = usize> {
        let is_needed = |place: &usize| {
            let port = self.inputs.ports.get(*place);
            port.is_some_and(|port| !matches!(port.spec.ty, ValueType::Optional(_)))
        };
        self.required.iter().copied().filter(is_needed)
    }

    /// The optional inputs that a run may leave out.
    pub(crate) fn optional(&self) -> impl Iterator<Item = (usize, &ValueSpec)> {
        let ports = self.required.iter().filter_map(|place| Some((*place, self.inputs.ports.get(*place)?)));
        ports
            .map(|(place, port)| (place, &port.spec))
            .filter(|(_, spec)| matches!(spec.ty, ValueType::Optional(_)))
    }
}

/// What the options say of the session's log; `None` if that is the environment's.
fn session_log(options: &SessionOptions) -> Option<Arc<SessionLog>> {
    let severity = options.log_severity.filter(|level| *level >= 0);
    let is_own = options.logger.is_some() || severity.is_some() || !options.log_id.is_empty();
    is_own.then(|| Arc::new(SessionLog { sink: options.logger, severity, id: options.log_id.clone() }))
}

fn load_cancelled() -> Failure {
    Failure::new(code::MODEL_LOAD_CANCELED, "The load was canceled by its session options.")
}

pub(crate) fn load_failure(path: Option<&Path>, error: &Error) -> Failure {
    match error.kind() {
        ErrorKind::Cancelled => load_cancelled(),
        kind => Failure::new(status_code(kind).code, load_failed(path, error)),
    }
}

/// Opens a model's file, which is mapped.
pub(crate) fn open(options: Option<&SessionOptions>, path: &Path) -> Outcome<Source> {
    if path.as_os_str().is_empty() {
        return invalid("the path of the model is empty");
    }
    if path.is_dir() {
        return invalid(format!(
            "The model path is a directory: {}; give the path of a file",
            path.display()
        ));
    }
    let source =
        Source::open(path, FileAccess::default()).map_err(|error| load_failure(Some(path), &error))?;
    with_format_and_folder(options, source)
}

/// Copies a model from memory: the caller frees it after the call.
pub(crate) fn copy(options: Option<&SessionOptions>, bytes: &[u8]) -> Outcome<Source> {
    if bytes.is_empty() {
        return invalid("No graph was found in the protobuf: the bytes of the model are empty");
    }
    with_format_and_folder(options, Source::from_bytes(Bytes::copy_from_slice(bytes)))
}

/// Checks the format that the options ask for, and sets the folder of external data. For a model in
/// memory the default is the working directory, as in ONNX Runtime.
pub(crate) fn with_format_and_folder(options: Option<&SessionOptions>, source: Source) -> Outcome<Source> {
    let entry = |key: &str| options.and_then(|options| options.entry(key)).unwrap_or_default();
    let expected = match entry("session.load_model_format") {
        "" if source.path().is_some_and(is_ort_file) => Some(true),
        "" => None,
        format => Some(format.eq_ignore_ascii_case("ORT")),
    };
    if let Some(expected) = expected {
        let path = source.path().map(Path::to_path_buf);
        source.expect_ort_format(expected).map_err(|error| load_failure(path.as_deref(), &error))?;
    }
    let folder = match entry("session.model_external_initializers_file_folder_path") {
        "" if source.path().is_none() => working_folder(),
        "" => None,
        folder => Some(PathBuf::from(folder)),
    };
    Ok(match folder {
        Some(folder) => source.in_folder(folder, FileAccess::default()),
        None => source,
    })
}

fn is_ort_file(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("ort"))
}

/// Loads a model, and says which one if that fails.
pub(crate) fn load_named(options: &SessionOptions, source: Source) -> Outcome<Model> {
    let path = source.path().map(Path::to_path_buf);
    let operators = custom_domain::operators(options)?;
    load(options, operators, source).map_err(|error| load_failure(path.as_deref(), &error))
}

fn load(options: &SessionOptions, operators: CustomOperators, source: Source) -> ort_runtime::Result<Model> {
    let files = options.external_files.iter().map(|file| (file.name.clone(), file.content()));
    let changes = LoadOptions {
        free_dimensions: options.free_dimensions.clone(),
        free_denotations: options.free_denotations.clone(),
        initializers: options.initializers.clone(),
        external_initializers: options.external_initializers.clone(),
        external_files: files.collect(),
        operators,
    };
    Model::from_source_with(source, &changes)
}

/// The settings of a session's engine.
pub(crate) fn builder(options: &SessionOptions, model: &Model) -> Outcome<SessionBuilder> {
    let mut settings = options.engine.clone();
    settings.memory_limit = options.own.memory_limit;
    if options.entry("session.use_env_allocators") == Some("1") {
        settings.arena = registered_arena().unwrap_or(settings.arena);
    }
    let mut builder = Engine::builder(model).options(&settings).cancel(options.cancel.clone());
    if options.own.holds_no_idle_memory {
        builder = builder.idle_memory(IdleMemory { most_bytes: 0, ..IdleMemory::default() });
    }
    if let Some(folder) = &options.own.cache_dir {
        builder = builder.cache_dir(folder);
    }
    if let Some(budget) = &options.own.budget {
        builder = builder.budget(budget);
    }
    if options.own.is_batch_whole {
        builder = builder.batch_split(false);
    }
    for request in options.providers.clone() {
        builder = builder.provider_request(request);
    }
    Ok(builder)
}

fn build(options: &SessionOptions, model: &Model) -> Outcome<Engine> {
    let builder = builder(options, model)?;
    let built = match optimized(options)? {
        Some((path, weights)) => builder.save_optimized(path, &weights).and_then(|_| builder.build()),
        None => builder.build(),
    };
    built.map_err(|error| match error.kind() {
        ErrorKind::Cancelled => load_cancelled(),
        _ => error.into(),
    })
}

/// Returns the file that the optimized model goes to, and where its weights go.
fn optimized(options: &SessionOptions) -> Outcome<Option<(PathBuf, Weights)>> {
    const EXTERNAL_FILE: &str = "session.optimized_model_external_initializers_file_name";
    const EXTERNAL_BYTES: &str = "session.optimized_model_external_initializers_min_size_in_bytes";
    let Some(path) = options.optimized_path.clone() else { return Ok(None) };
    let format = options.entry("session.save_model_format").unwrap_or_default();
    if format.eq_ignore_ascii_case("ORT") || (format.is_empty() && is_ort_file(&path)) {
        let text = "Models are not saved in ORT format; set session.save_model_format to ONNX, and a path that does \
                    not end in .ort";
        return fail(code::NOT_IMPLEMENTED, text.to_owned());
    }
    let Some(name) = options.entry(EXTERNAL_FILE).filter(|name| !name.is_empty()) else {
        return Ok(Some((path, Weights::Inside)));
    };
    // 1024 is ONNX Runtime's default.
    let least = options.entry(EXTERNAL_BYTES).map_or(Ok(1024), |text| text.trim().parse::<usize>());
    let least = least.map_err(|_| Failure::invalid(format!("{EXTERNAL_BYTES} takes a number of bytes")))?;
    Ok(Some((path, Weights::Named { name: name.to_owned(), least })))
}

fn write_plan(engine: &Engine, plan: &crate::own_keys::PlanFile) -> Outcome {
    let dims: Vec<(&str, i64)> = plan.dims.iter().map(|(name, size)| (name.as_str(), *size)).collect();
    let json = ort_report::plan_json(&engine.plan(&dims)?).to_string();
    std::fs::write(&plan.path, json).map_err(|problem| {
        Failure::new(
            code::FAIL,
            format!("cannot write the memory plan to {}: {problem}", plan.path.display()),
        )
    })
}

/// Gives C the name of a port.
fn put_name(port: &Port, allocator: Allocator, out: crate::entry::Place<'_, *mut c_char>) -> Outcome {
    out.put(allocator.text(port.spec.name.as_bytes())?);
    Ok(())
}

entries! {
    /// 7
    fn CreateSession(env: In<Env>, path: PathText, options: In<SessionOptions>, out: Out<*mut Object<Session>>) {
        out.place()?.put(std::ptr::null_mut());
        env.get()?;
        let options = options.optional()?;
        let source = open(options, &path.get("the path of the model")?)?;
        let session = Session::create(options, source)?;
        out.place()?.put(Object::give(session));
        Ok(())
    }

    /// 8
    fn CreateSessionFromArray(env: In<Env>, data: Array<u8>, len: usize, options: In<SessionOptions>, out: Out<*mut Object<Session>>) {
        out.place()?.put(std::ptr::null_mut());
        env.get()?;
        let options = options.optional()?;
        let source = copy(options, data.get(len, "the model")?)?;
        let session = Session::create(options, source)?;
        out.place()?.put(Object::give(session));
        Ok(())
    }

    /// 168. Packed weights are shared by all sessions anyway.
    fn CreateSessionWithPrepackedWeightsContainer(env: In<Env>, path: PathText, options: In<SessionOptions>, container: In<PrepackedWeights>, out: Out<*mut Object<Session>>) {
        container.get()?;
        out.place()?.put(std::ptr::null_mut());
        env.get()?;
        let options = options.optional()?;
        let session = Session::create(options, open(options, &path.get("the path of the model")?)?)?;
        out.place()?.put(Object::give(session));
        Ok(())
    }

    /// 169
    fn CreateSessionFromArrayWithPrepackedWeightsContainer(env: In<Env>, data: Array<u8>, len: usize, options: In<SessionOptions>, container: In<PrepackedWeights>, out: Out<*mut Object<Session>>) {
        container.get()?;
        out.place()?.put(std::ptr::null_mut());
        env.get()?;
        let options = options.optional()?;
        let session = Session::create(options, copy(options, data.get(len, "the model")?)?)?;
        out.place()?.put(Object::give(session));
        Ok(())
    }

    /// 166
    fn CreatePrepackedWeightsContainer(out: Out<*mut Object<PrepackedWeights>>) {
        out.place()?.put(Object::give(PrepackedWeights));
        Ok(())
    }

    /// 167
    fn ReleasePrepackedWeightsContainer(container: Released<PrepackedWeights>) -> (), else (), {
        container.release();
    }

    /// 95
    fn ReleaseSession(session: Released<Session>) -> (), else (), {
        session.release();
    }

    /// 30
    fn SessionGetInputCount(session: In<Session>, out: Out<usize>) {
        let out = out.place()?;
        out.put(session.get()?.required.len());
        Ok(())
    }

    /// 31
    fn SessionGetOutputCount(session: In<Session>, out: Out<usize>) {
        let out = out.place()?;
        out.put(session.get()?.outputs.ports.len());
        Ok(())
    }

    /// 32
    fn SessionGetOverridableInitializerCount(session: In<Session>, out: Out<usize>) {
        let out = out.place()?;
        out.put(session.get()?.overridable.len());
        Ok(())
    }

    /// 33
    fn SessionGetInputTypeInfo(session: In<Session>, index: usize, out: Out<*mut Object<TypeInfo>>) {
        let out = out.place()?;
        let session = session.get()?;
        out.put(Object::give(session.inputs.at(session.required.get(index).copied())?.info.clone()));
        Ok(())
    }

    /// 34
    fn SessionGetOutputTypeInfo(session: In<Session>, index: usize, out: Out<*mut Object<TypeInfo>>) {
        let out = out.place()?;
        out.put(Object::give(session.get()?.outputs.at(Some(index))?.info.clone()));
        Ok(())
    }

    /// 35
    fn SessionGetOverridableInitializerTypeInfo(session: In<Session>, index: usize, out: Out<*mut Object<TypeInfo>>) {
        let out = out.place()?;
        let session = session.get()?;
        out.put(Object::give(session.inputs.at(session.overridable.get(index).copied())?.info.clone()));
        Ok(())
    }

    /// 36
    fn SessionGetInputName(session: In<Session>, index: usize, allocator: Allocator, out: Out<*mut c_char>) {
        let out = out.place()?;
        let session = session.get()?;
        put_name(session.inputs.at(session.required.get(index).copied())?, allocator, out)
    }

    /// 37
    fn SessionGetOutputName(session: In<Session>, index: usize, allocator: Allocator, out: Out<*mut c_char>) {
        let out = out.place()?;
        put_name(session.get()?.outputs.at(Some(index))?, allocator, out)
    }

    /// 38
    fn SessionGetOverridableInitializerName(session: In<Session>, index: usize, allocator: Allocator, out: Out<*mut c_char>) {
        let out = out.place()?;
        let session = session.get()?;
        put_name(session.inputs.at(session.overridable.get(index).copied())?, allocator, out)
    }

    /// 110
    fn SessionEndProfiling(session: In<Session>, allocator: Allocator, out: Out<*mut c_char>) {
        let out = out.place()?;
        let path = match &session.get()?.profiling {
            Some(profiling) => profiling.finish()?,
            None => PathBuf::new(),
        };
        out.put(allocator.text(path.as_os_str().as_encoded_bytes())?);
        Ok(())
    }

    /// 146
    fn SessionGetProfilingStartTimeNs(session: In<Session>, out: Out<u64>) {
        let out = out.place()?;
        out.put(session.get()?.profiling.as_ref().map_or(0, Profiling::start_ns));
        Ok(())
    }

    /// 380
    fn SessionGetMemoryInfoForInputs(session: In<Session>, infos: ArrayMut<*const Object<MemoryInfo>>, count: usize) {
        put_infos(session.get()?.required.len(), infos.get(count, "the array of memory infos")?)
    }

    /// 381
    fn SessionGetMemoryInfoForOutputs(session: In<Session>, infos: ArrayMut<*const Object<MemoryInfo>>, count: usize) {
        put_infos(session.get()?.outputs.ports.len(), infos.get(count, "the array of memory infos")?)
    }

    /// 284
    fn SetEpDynamicOptions(session: In<Session>, _keys: *const c_void, _values: *const c_void, _count: usize) {
        session.get()?;
        invalid("the CPU provider has no options that change between runs")
    }
}

/// What ONNX Runtime keeps shared packed weights in.
pub(crate) struct PrepackedWeights;

kinds! {
    PrepackedWeights => "OrtPrepackedWeightsContainer", b"OrtPrepa";
}

/// Runs take values from the host's memory and give them there.
fn put_infos(count: usize, infos: &mut [*const Object<MemoryInfo>]) -> Outcome {
    if infos.len() != count {
        return invalid(format!("the array has {} places, expected {count}", infos.len()));
    }
    infos.fill(crate::allocator::host_info());
    Ok(())
}
