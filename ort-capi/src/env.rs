//! `OrtEnv`: the one environment of the process.

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

use ort_runtime::ArenaConfig;
use ort_runtime::fork::Mutex;
use ort_sys::{ORT_API_VERSION, OrtAllocator, OrtEnvCreationOptions, OrtLoggingFunction};

use crate::allocator::Allocator;
use crate::arena::{Arena, ThreadingOptions};
use crate::custom_threads::ClientThreads;
use crate::entry::{Array, In, Object, Out, Text, entries, kinds};
use crate::key_values::KeyValues;
use crate::log::{self, Sink};
use crate::memory_info::MemoryInfo;
use crate::status::{Outcome, invalid};

/// The environment. Sessions keep alive what they need, and so outlive it.
pub(crate) struct Env {
    references: AtomicUsize,
    /// The memory of registered allocators, and their arenas.
    allocators: Mutex<Vec<Registered>>,
    /// The threads that the functions of a client made.
    threads: Mutex<Option<ClientThreads>>,
}

struct Registered {
    info: MemoryInfo,
    arena: Option<ArenaConfig>,
}

kinds! {
    Env => "OrtEnv", b"OrtEnv\0\0";
}

static ENV: Object<Env> = Object::new(Env {
    references: AtomicUsize::new(0),
    allocators: Mutex::new(Vec::new()),
    threads: Mutex::new(None),
});

/// The arena of a registered allocator, for sessions that ask for it.
pub(crate) fn registered_arena() -> Option<ArenaConfig> {
    ENV.inner.allocators.lock().iter().find_map(|registered| registered.arena.clone())
}

/// Makes the environment as [`create`] does, with threads of the client if it is the first one.
fn create_with_threads(
    level: i32,
    sink: Option<Sink>,
    options: &ThreadingOptions,
) -> Outcome<*mut Object<Env>> {
    let is_first = ENV.inner.references.load(Ordering::Acquire) == 0;
    if is_first && let Some(threads) = options.functions.start(options.sizes)? {
        *ENV.inner.threads.lock() = Some(threads);
    }
    Ok(create(level, sink))
}

/// Makes the environment, or shares the one that there is. It takes any level: a client of ours
/// ends its process if this fails.
fn create(level: i32, sink: Option<Sink>) -> *mut Object<Env> {
    if ENV.inner.references.fetch_add(1, Ordering::AcqRel) == 0 {
        log::set_severity(level);
        log::set_sink(sink);
        log::install();
    }
    (&raw const ENV).cast_mut()
}

/// Registers memory of the CPU; again replaces.
fn register(env: &Env, info: &MemoryInfo, arena: Option<ArenaConfig>) -> Outcome {
    if !info.is_host() {
        return invalid("only allocators of the CPU can be registered");
    }
    let mut allocators = env.allocators.lock();
    allocators.retain(|known| !known.info.is_same_memory(info));
    allocators.push(Registered { info: info.clone(), arena });
    Ok(())
}

/// What the library is. Clients look for ONNX Runtime's first words.
const BUILD_INFO: &CStr = match CStr::from_bytes_with_nul(
    concat!(
        "ORT Build Info: ort-runtime ",
        env!("CARGO_PKG_VERSION"),
        ", with the C API of ONNX Runtime 1.31.1\0"
    )
    .as_bytes(),
) {
    Ok(text) => text,
    Err(_) => c"ORT Build Info: ort-runtime",
};

entries! {
    /// 3
    fn CreateEnv(level: i32, id: Text, out: Out<*mut Object<Env>>) {
        let out = out.place()?;
        id.or_empty("the log id")?;
        out.put(create(level, None));
        Ok(())
    }

    /// 4
    fn CreateEnvWithCustomLogger(function: Option<OrtLoggingFunction>, parameter: *mut c_void, level: i32, id: Text, out: Out<*mut Object<Env>>) {
        let out = out.place()?;
        id.or_empty("the log id")?;
        let Some(function) = function else { return invalid("the logging function is null") };
        out.put(create(level, Some(Sink::new(function, parameter))));
        Ok(())
    }

    /// 119
    fn CreateEnvWithGlobalThreadPools(level: i32, id: Text, options: In<ThreadingOptions>, out: Out<*mut Object<Env>>) {
        let out = out.place()?;
        id.or_empty("the log id")?;
        out.put(create_with_threads(level, None, options.get()?)?);
        Ok(())
    }

    /// 151
    fn CreateEnvWithCustomLoggerAndGlobalThreadPools(function: Option<OrtLoggingFunction>, parameter: *mut c_void, level: i32, id: Text, options: In<ThreadingOptions>, out: Out<*mut Object<Env>>) {
        let out = out.place()?;
        id.or_empty("the log id")?;
        let options = options.get()?;
        let Some(function) = function else { return invalid("the logging function is null") };
        out.put(create_with_threads(level, Some(Sink::new(function, parameter)), options)?);
        Ok(())
    }

    /// 406
    fn CreateEnvWithOptions(options: *const OrtEnvCreationOptions, out: Out<*mut Object<Env>>) {
        let out = out.place()?;
        let options = Array::of(options);
        let Ok([options]) = options.get(1, "the options") else {
            return invalid("CreateEnvWithOptions requires a valid (non-null) OrtEnvCreationOptions argument");
        };
        // It was added in version 24.
        if !(24..=ORT_API_VERSION).contains(&options.version) {
            return invalid(format!("OrtEnvCreationOptions has version {}, expected 24 to {ORT_API_VERSION}", options.version));
        }
        if !(0..=4).contains(&options.logging_severity_level) {
            return invalid(format!("the log level is {}, expected 0 to 4", options.logging_severity_level));
        }
        Text::of(options.log_id).get("the log id")?;
        let threading = In::<ThreadingOptions>::of(options.threading_options.cast());
        let threading = threading.optional()?;
        In::<KeyValues>::of(options.config_entries.cast()).optional()?;
        let sink = options.custom_logging_function.map(|function| Sink::new(function, options.custom_logging_param));
        out.put(match threading {
            Some(threading) => create_with_threads(options.logging_severity_level, sink, threading)?,
            None => create(options.logging_severity_level, sink),
        });
        Ok(())
    }

    /// 418. The pool of the process has no callbacks.
    fn SetPerSessionThreadPoolCallbacks(env: In<Env>, config: *const c_void) {
        env.get()?;
        if config.is_null() {
            return invalid("config must not be null");
        }
        Ok(())
    }

    /// 92
    fn ReleaseEnv(env: In<Env>) -> (), else (), {
        let Ok(env) = env.get() else { return };
        let before = env.references.fetch_update(Ordering::AcqRel, Ordering::Acquire, |count| count.checked_sub(1));
        if before == Ok(1) {
            env.allocators.lock().clear();
            // Taken out of the lock first: the client's function may call back into the library.
            let threads = env.threads.lock().take();
            drop(threads);
            log::set_sink(None);
            ort_runtime::release_idle_memory();
        }
    }

    /// 5. There is no telemetry.
    fn EnableTelemetryEvents(env: In<Env>) {
        env.get().map(drop)
    }

    /// 6
    fn DisableTelemetryEvents(env: In<Env>) {
        env.get().map(drop)
    }

    /// 145
    fn SetLanguageProjection(env: In<Env>, _projection: i32) {
        env.get().map(drop)
    }

    /// 226
    fn UpdateEnvWithCustomLogLevel(env: In<Env>, level: i32) {
        env.get()?;
        log::set_severity(level);
        Ok(())
    }

    /// 144
    fn CreateAndRegisterAllocator(env: In<Env>, info: In<MemoryInfo>, arena: In<Arena>) {
        let arena = arena.optional()?.map(|arena| arena.0.clone());
        register(env.get()?, info.get()?, arena)
    }

    /// 259
    fn CreateAndRegisterAllocatorV2(env: In<Env>, provider: Text, info: In<MemoryInfo>, arena: In<Arena>, keys: Array<Text>, values: Array<Text>, count: usize) {
        let provider = provider.get("the provider")?;
        keys.get(count, "the array of keys")?;
        values.get(count, "the array of values")?;
        if provider != ort_runtime::onnxruntime::CPU {
            return invalid(format!("{provider} is not implemented in CreateAndRegisterAllocatorV2()"));
        }
        let arena = arena.optional()?.map(|arena| arena.0.clone());
        register(env.get()?, info.get()?, arena)
    }

    /// 176
    fn RegisterAllocator(env: In<Env>, allocator: Allocator) {
        let info = allocator.info()?;
        register(env.get()?, info.get()?, None)
    }

    /// 177
    fn UnregisterAllocator(env: In<Env>, info: In<MemoryInfo>) {
        let (env, info) = (env.get()?, info.get()?);
        let mut allocators = env.allocators.lock();
        let before = allocators.len();
        allocators.retain(|known| !known.info.is_same_memory(info));
        match allocators.len() < before {
            true => Ok(()),
            false => invalid("No allocator for this device has been registered for sharing."),
        }
    }

    /// 376
    fn GetSharedAllocator(env: In<Env>, info: In<MemoryInfo>, out: Out<*mut OrtAllocator>) {
        let out = out.place()?;
        env.get()?;
        let host = info.get()?.is_host();
        out.put(if host { crate::allocator::default_allocator() } else { std::ptr::null_mut() });
        Ok(())
    }

    /// 254
    fn GetBuildInfoString() -> *const c_char, else BUILD_INFO.as_ptr(), {
        BUILD_INFO.as_ptr()
    }
}
