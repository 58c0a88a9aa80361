//! `OrtSessionOptions`.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_void};
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use ort_runtime::ep::CancelToken;
use ort_runtime::rewrite::Level;
use ort_runtime::{ExecutionMode, ProviderRequest, SessionOptions as EngineOptions, Tensor};
use ort_sys::OrtLoggingFunction;

use crate::config_keys;
use crate::custom_domain::Domain;
use crate::custom_library::Library;
use crate::custom_threads::{CreateFn, JoinFn, PoolSizes, ThreadFunctions};
use crate::entry::{Array, In, InMut, Object, Out, PathText, Released, Text, entries, kinds};
use crate::key_values::KeyValues;
use crate::log::Sink;
use crate::own_keys::OwnKeys;
use crate::status::{Failure, Outcome, invalid};
use crate::value::Value;

/// Limits of configuration entries, as in ONNX Runtime.
const KEY_BYTES: usize = 1024;
const VALUE_BYTES: usize = 8192;

/// What sessions are created with.
#[derive(Clone, Default)]
pub(crate) struct SessionOptions {
    pub(crate) engine: EngineOptions,
    pub(crate) own: OwnKeys,
    pub(crate) entries: BTreeMap<String, String>,
    pub(crate) log_id: String,
    pub(crate) log_severity: Option<i32>,
    pub(crate) log_verbosity: i32,
    pub(crate) logger: Option<Sink>,
    pub(crate) free_dimensions: Vec<(String, i64)>,
    pub(crate) free_denotations: Vec<(String, i64)>,
    pub(crate) initializers: Vec<(String, Tensor)>,
    pub(crate) external_initializers: Vec<(String, Tensor)>,
    pub(crate) external_files: Vec<ExternalFile>,
    pub(crate) optimized_path: Option<PathBuf>,
    pub(crate) profile_prefix: Option<PathBuf>,
    pub(crate) providers: Vec<ProviderRequest>,
    pub(crate) cancel: CancelToken,
    pub(crate) is_cancelled: bool,
    /// Custom operators, and the libraries that they lie in.
    pub(crate) domains: Vec<Domain>,
    pub(crate) libraries: Vec<Arc<Library>>,
    pub(crate) threads: ThreadFunctions,
    /// Whether the session shares the threads of the environment, and makes none.
    pub(crate) uses_global_threads: bool,
}

kinds! {
    SessionOptions => "OrtSessionOptions", b"OrtSsnOp";
}

/// A file of external data in memory of the caller, who keeps it until sessions are made.
#[derive(Clone)]
pub(crate) struct ExternalFile {
    pub(crate) name: String,
    data: *const u8,
    len: usize,
}

// SAFETY: the caller keeps the bytes valid and unchanged until the sessions are made.
unsafe impl Send for ExternalFile {}
// SAFETY: as above.
unsafe impl Sync for ExternalFile {}

impl ExternalFile {
    /// A copy of the content: the session outlives the caller's memory.
    pub(crate) fn content(&self) -> Bytes {
        if self.len == 0 {
            return Bytes::new();
        }
        // SAFETY: `AddExternalInitializersFromFilesInMemory` checked the pointer, and the caller
        // keeps the bytes until the session is made.
        Bytes::copy_from_slice(unsafe { std::slice::from_raw_parts(self.data, self.len) })
    }
}

impl SessionOptions {
    /// How many threads the functions of the client make for a session.
    pub(crate) fn pool_sizes(&self) -> PoolSizes {
        // A session that runs nothing side by side has no threads for that.
        let inter = match self.engine.execution_mode {
            ExecutionMode::Parallel => self.engine.inter_op_num_threads,
            ExecutionMode::Sequential => 1,
        };
        PoolSizes { intra: self.engine.intra_op_num_threads, inter }
    }

    /// Returns a configuration entry.
    pub(crate) fn entry(&self, key: &str) -> Option<&str> {
        self.entries.get(key).map(String::as_str)
    }

    /// Sets a configuration entry. Unknown keys are kept: other providers read them.
    pub(crate) fn set_entry(&mut self, key: &str, value: &str) -> Outcome {
        check_entry(key, value)?;
        config_keys::apply(self, key, value)?;
        self.entries.insert(key.to_owned(), value.to_owned());
        Ok(())
    }
}

/// Refuses keys and values that ONNX Runtime refuses.
pub(crate) fn check_entry(key: &str, value: &str) -> Outcome {
    if key.is_empty() || key.len() > KEY_BYTES {
        return invalid(format!(
            "Config key is empty or longer than maximum length {KEY_BYTES}: it has {} bytes",
            key.len()
        ));
    }
    if value.len() > VALUE_BYTES {
        return invalid(format!(
            "Config value is longer than maximum length: {VALUE_BYTES}: that of '{key}' has {} bytes",
            value.len()
        ));
    }
    Ok(())
}

/// Sets the level of rewrites by its number.
pub(crate) fn set_level(options: &mut SessionOptions, number: i32) -> Outcome {
    options.engine.graph_optimization_level = match number {
        0 => Level::Disabled,
        1 => Level::Basic,
        2 => Level::Extended,
        3 | 99 => Level::All,
        _ => return invalid(format!("graph_optimization_level is not valid: {number}; it is 0 to 3, or 99")),
    };
    Ok(())
}

/// Sets the execution mode by its number.
pub(crate) fn set_mode(options: &mut SessionOptions, number: i32) -> Outcome {
    options.engine.execution_mode = match number {
        0 => ExecutionMode::Sequential,
        1 => ExecutionMode::Parallel,
        _ => return invalid(format!("execution_mode is not valid: {number}; it is 0 or 1")),
    };
    Ok(())
}

/// Negative numbers of threads stand for the default.
pub(crate) fn threads(number: i32) -> usize {
    usize::try_from(number).unwrap_or(0)
}

entries! {
    /// 10
    fn CreateSessionOptions(out: Out<*mut Object<SessionOptions>>) {
        out.place()?.put(Object::give(SessionOptions::default()));
        Ok(())
    }

    /// 12
    fn CloneSessionOptions(options: In<SessionOptions>, out: Out<*mut Object<SessionOptions>>) {
        let out = out.place()?;
        out.put(Object::give(options.get()?.clone()));
        Ok(())
    }

    /// 100
    fn ReleaseSessionOptions(options: Released<SessionOptions>) -> (), else (), {
        options.release();
    }

    /// 11
    fn SetOptimizedModelFilePath(options: InMut<SessionOptions>, path: PathText) {
        let options = options.get()?;
        let path = path.get("the path of the optimized model")?;
        options.optimized_path = Some(path).filter(|path| !path.as_os_str().is_empty());
        Ok(())
    }

    /// 13
    fn SetSessionExecutionMode(options: InMut<SessionOptions>, mode: i32) {
        set_mode(options.get()?, mode)
    }

    /// 14
    fn EnableProfiling(options: InMut<SessionOptions>, prefix: PathText) {
        let options = options.get()?;
        options.profile_prefix = Some(prefix.get("the prefix of the profile")?);
        Ok(())
    }

    /// 15
    fn DisableProfiling(options: InMut<SessionOptions>) {
        options.get()?.profile_prefix = None;
        Ok(())
    }

    /// 16
    fn EnableMemPattern(options: InMut<SessionOptions>) {
        options.get()?.engine.enable_mem_pattern = true;
        Ok(())
    }

    /// 17. Plans stay: they bound the memory of a run. Nothing is held between runs afterwards.
    fn DisableMemPattern(options: InMut<SessionOptions>) {
        options.get()?.own.holds_no_idle_memory = true;
        Ok(())
    }

    /// 18
    fn EnableCpuMemArena(options: InMut<SessionOptions>) {
        options.get()?.engine.enable_cpu_mem_arena = true;
        Ok(())
    }

    /// 19
    fn DisableCpuMemArena(options: InMut<SessionOptions>) {
        let options = options.get()?;
        options.engine.enable_cpu_mem_arena = false;
        options.own.holds_no_idle_memory = true;
        Ok(())
    }

    /// 20
    fn SetSessionLogId(options: InMut<SessionOptions>, id: Text) {
        let options = options.get()?;
        options.log_id = id.or_empty("the log id")?.to_owned();
        Ok(())
    }

    /// 21
    fn SetSessionLogVerbosityLevel(options: InMut<SessionOptions>, level: i32) {
        options.get()?.log_verbosity = level;
        Ok(())
    }

    /// 22
    fn SetSessionLogSeverityLevel(options: InMut<SessionOptions>, level: i32) {
        options.get()?.log_severity = Some(level);
        Ok(())
    }

    /// 23
    fn SetSessionGraphOptimizationLevel(options: InMut<SessionOptions>, level: i32) {
        set_level(options.get()?, level)
    }

    /// 24
    fn SetIntraOpNumThreads(options: InMut<SessionOptions>, number: i32) {
        options.get()?.engine.intra_op_num_threads = threads(number);
        Ok(())
    }

    /// 25
    fn SetInterOpNumThreads(options: InMut<SessionOptions>, number: i32) {
        options.get()?.engine.inter_op_num_threads = threads(number);
        Ok(())
    }

    /// 79
    fn AddFreeDimensionOverride(options: InMut<SessionOptions>, denotation: Text, size: i64) {
        let options = options.get()?;
        options.free_denotations.push((denotation.get("the denotation")?.to_owned(), size));
        Ok(())
    }

    /// 124
    fn AddFreeDimensionOverrideByName(options: InMut<SessionOptions>, name: Text, size: i64) {
        let options = options.get()?;
        options.free_dimensions.push((name.get("the name of the dimension")?.to_owned(), size));
        Ok(())
    }

    /// 120. All sessions share one pool of threads.
    fn DisablePerSessionThreads(options: InMut<SessionOptions>) {
        options.get()?.uses_global_threads = true;
        Ok(())
    }

    /// 130
    fn AddSessionConfigEntry(options: InMut<SessionOptions>, key: Text, value: Text) {
        let options = options.get()?;
        options.set_entry(key.get("the key")?, value.get("the value")?)
    }

    /// 237
    fn HasSessionConfigEntry(options: In<SessionOptions>, key: Text, out: Out<i32>) {
        let out = out.place()?;
        out.put(i32::from(options.get()?.entry(key.get("the key")?).is_some()));
        Ok(())
    }

    /// 238
    fn GetSessionConfigEntry(options: In<SessionOptions>, key: Text, buffer: crate::entry::ArrayMut<c_char>, size: Out<usize>) {
        let size = size.place()?;
        let key = key.get("the key")?;
        let Some(value) = options.get()?.entry(key) else {
            return invalid(format!("Session config entry '{key}' was not found."));
        };
        let needed = value.len() + 1;
        if buffer.is_null() {
            size.put(needed);
            return Ok(());
        }
        let given = size.read();
        size.put(needed);
        if given < needed {
            let text = "Output buffer is not large enough for session config entry";
            return invalid(format!("{text} '{key}': {given} bytes, expected {needed}"));
        }
        let buffer = buffer.get(needed, "the buffer")?;
        let text = value.bytes().chain([0]);
        buffer.iter_mut().zip(text).for_each(|(to, byte)| *to = byte as c_char);
        Ok(())
    }

    /// 379
    fn GetSessionOptionsConfigEntries(options: In<SessionOptions>, out: Out<*mut Object<KeyValues>>) {
        let out = out.place()?;
        let mut pairs = KeyValues::default();
        options.get()?.entries.iter().for_each(|(key, value)| pairs.set(key.as_bytes(), value.as_bytes()));
        out.put(Object::give(pairs));
        Ok(())
    }

    /// 150
    fn AddInitializer(options: InMut<SessionOptions>, name: Text, value: In<Value>) {
        let options = options.get()?;
        let name = name.get("the name of the initializer")?;
        if options.initializers.iter().any(|(known, _)| known == name) {
            return invalid(format!("An OrtValue for this name has already been added: {name}"));
        }
        options.initializers.push((name.to_owned(), tensor_of(&value)?));
        Ok(())
    }

    /// 210
    fn AddExternalInitializers(options: InMut<SessionOptions>, names: Array<Text>, values: Array<In<Value>>, count: usize) {
        let options = options.get()?;
        let names = names.get(count, "the array of names")?;
        let values = values.get(count, "the array of values")?;
        let mut added = Vec::with_capacity(count);
        for (name, value) in names.iter().zip(values) {
            added.push((name.get("the name of an initializer")?.to_owned(), tensor_of(value)?));
        }
        options.external_initializers.append(&mut added);
        Ok(())
    }

    /// 279
    fn AddExternalInitializersFromMemory(options: InMut<SessionOptions>, names: Array<PathText>, buffers: Array<*const u8>, lengths: Array<usize>, count: usize) {
        let options = options.get()?;
        let names = names.get(count, "the array of file names")?;
        let buffers = buffers.get(count, "the array of buffers")?;
        let lengths = lengths.get(count, "the array of lengths")?;
        let mut added = Vec::with_capacity(count);
        for ((name, data), len) in names.iter().zip(buffers).zip(lengths) {
            let name = name.get("the name of a file")?.to_string_lossy().into_owned();
            if data.is_null() && *len > 0 {
                return invalid(format!("the buffer of file '{name}' is null"));
            }
            added.push(ExternalFile { name, data: *data, len: *len });
        }
        options.external_files.append(&mut added);
        Ok(())
    }

    /// 266
    fn SetUserLoggingFunction(options: InMut<SessionOptions>, function: Option<OrtLoggingFunction>, parameter: *mut c_void) {
        let options = options.get()?;
        let Some(function) = function else { return invalid("the logging function is null") };
        options.logger = Some(Sink::new(function, parameter));
        Ok(())
    }

    /// 273. Our results do not depend on the run or on the number of threads.
    fn SetDeterministicCompute(options: InMut<SessionOptions>, _value: bool) {
        options.get()?;
        Ok(())
    }

    /// 196
    fn SessionOptionsSetCustomCreateThreadFn(options: InMut<SessionOptions>, create: Option<CreateFn>) {
        options.get()?.threads.create = create;
        Ok(())
    }

    /// 197
    fn SessionOptionsSetCustomThreadCreationOptions(options: InMut<SessionOptions>, settings: *mut c_void) {
        options.get()?.threads.settings = settings;
        Ok(())
    }

    /// 198
    fn SessionOptionsSetCustomJoinThreadFn(options: InMut<SessionOptions>, join: Option<JoinFn>) {
        options.get()?.threads.join = join;
        Ok(())
    }

    /// 424. Models of this library keep their weights.
    fn SessionOptionsSetWeightlessSourceModelBuffer(options: InMut<SessionOptions>, data: *const c_void, len: usize) {
        options.get()?;
        if data.is_null() {
            return invalid("Invalid source model: data pointer is null");
        }
        if len == 0 {
            return invalid("Invalid source model: data size is 0");
        }
        Ok(())
    }

    /// 426. No provider of this library reads data of its own.
    fn SessionOptionsSetEpContextDataReadFunc(options: InMut<SessionOptions>, _read: *const c_void, _state: *mut c_void) {
        options.get().map(drop)
    }

    /// 293
    fn SessionOptionsSetLoadCancellationFlag(options: InMut<SessionOptions>, cancel: bool) {
        let options = options.get()?;
        match cancel {
            true => options.cancel.cancel(),
            // A token cannot be taken back, so later sessions have a new one.
            false if options.is_cancelled => options.cancel = CancelToken::new(),
            false => {}
        }
        options.is_cancelled = cancel;
        Ok(())
    }

    /// 419
    fn GetMemPatternEnabled(options: In<SessionOptions>, out: Out<i32>) {
        let out = out.place()?;
        let options = options.get()?;
        out.put(i32::from(options.engine.enable_mem_pattern && !options.own.holds_no_idle_memory));
        Ok(())
    }

    /// 420
    fn GetSessionExecutionMode(options: In<SessionOptions>, out: Out<i32>) {
        let out = out.place()?;
        out.put(i32::from(options.get()?.engine.execution_mode == ExecutionMode::Parallel));
        Ok(())
    }
}

fn tensor_of(value: &In<Value>) -> Outcome<Tensor> {
    match value.get()?.engine()? {
        ort_runtime::Value::Tensor(tensor) => Ok(tensor),
        other => Err(Failure::invalid(format!(
            "Received OrtValue is not a tensor. Only tensors are supported. It is {}",
            other.kind_name()
        ))),
    }
}
