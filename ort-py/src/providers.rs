//! Providers: onnxruntime's names of ours, and which of them work on this machine.

use std::collections::HashMap;
use std::path::Path;
use std::sync::OnceLock;

use ort_runtime::ep::{DeviceInfo, ExecutionProvider, load_provider, provider, providers};
use ort_runtime::fork::{Mutex, get_or_init};
use ort_runtime::{ErrorKind, ProviderRequest};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::error::exception;

/// The provider that every session has.
pub(crate) const CPU: &str = "CPUExecutionProvider";

/// onnxruntime's names of our providers, in the order of preference.
const OURS: [(&str, &str); 3] =
    [("CUDAExecutionProvider", "cuda"), ("WebGpuExecutionProvider", "wgpu"), (CPU, "cpu")];

/// The providers that some build of onnxruntime has, in its order.
const KNOWN: [&str; 21] = [
    "NvTensorRTRTXExecutionProvider",
    "TensorrtExecutionProvider",
    "CUDAExecutionProvider",
    "MIGraphXExecutionProvider",
    "OpenVINOExecutionProvider",
    "DnnlExecutionProvider",
    "VitisAIExecutionProvider",
    "QNNExecutionProvider",
    "NnapiExecutionProvider",
    "VSINPUExecutionProvider",
    "JsExecutionProvider",
    "CoreMLExecutionProvider",
    "ACLExecutionProvider",
    "DmlExecutionProvider",
    "RknpuExecutionProvider",
    "WebNNExecutionProvider",
    "WebGpuExecutionProvider",
    "XnnpackExecutionProvider",
    "CANNExecutionProvider",
    "AzureExecutionProvider",
    CPU,
];

/// A provider library that the program registered: under which name, and its path.
struct Library {
    name: String,
    path: String,
}

static LIBRARIES: Mutex<Vec<Library>> = Mutex::new(Vec::new());

/// Returns the names of all providers that any build has, CPU last.
pub(crate) fn all() -> Vec<String> {
    let registered = LIBRARIES.lock().iter().map(|library| library.name.clone()).collect::<Vec<_>>();
    registered.into_iter().chain(KNOWN.into_iter().map(str::to_owned)).collect()
}

/// Returns the names of the providers that have a device here, CPU last. The first call looks for
/// GPUs.
pub(crate) fn available() -> Vec<String> {
    static WORKING: OnceLock<Vec<&str>> = OnceLock::new();
    let working = get_or_init(&WORKING, || {
        let linked = providers();
        let works = |own: &str| linked.iter().any(|provider| provider.name() == own && has_device(*provider));
        OURS.into_iter().filter(|(_, own)| works(own)).map(|(theirs, _)| theirs).collect()
    });
    let registered = LIBRARIES.lock().iter().map(|library| library.name.clone()).collect::<Vec<_>>();
    registered.into_iter().chain(working.iter().map(|name| (*name).to_owned())).collect()
}

/// Where Linux shows GPUs: the direct rendering manager, NVIDIA's driver, Windows' subsystem, and
/// the GPUs of Qualcomm and Arm.
const GPU_NODES: [&str; 5] = ["/dev/dri", "/dev/nvidiactl", "/dev/dxg", "/dev/kgsl-3d0", "/dev/mali0"];

/// Whether the machine may have a GPU. Without one no driver is loaded, which takes time, and some
/// print what they miss.
fn may_have_gpu() -> bool {
    !cfg!(target_os = "linux") || GPU_NODES.iter().any(|node| Path::new(node).exists())
}

/// Whether a provider has a device that is worth its use: drivers that compute on the CPU are not.
fn has_device(provider: &dyn ExecutionProvider) -> bool {
    if provider.name() != "cpu" && !may_have_gpu() {
        return false;
    }
    let is_software = |device: &DeviceInfo| {
        provider.name() != "cpu" && device.facts.iter().any(|(name, kind)| name == "kind" && kind == "Cpu")
    };
    provider.devices().is_ok_and(|devices| devices.iter().any(|device| !is_software(device)))
}

/// Returns what the machine computes on: `GPU` or `CPU`.
pub(crate) fn device() -> &'static str {
    if available().iter().any(|name| name == "CUDAExecutionProvider") { "GPU" } else { "CPU" }
}

/// Asks for a provider by onnxruntime's name of it, by ours, or by that of a registered library.
pub(crate) fn request(name: &str, options: &HashMap<String, String>) -> PyResult<ProviderRequest> {
    let own = OURS.iter().find(|(theirs, own)| *theirs == name || *own == name);
    let own = own.map(|(_, own)| (*own).to_owned()).or_else(|| {
        let libraries = LIBRARIES.lock();
        libraries.iter().find(|library| library.name == name).map(|library| library.path.clone())
    });
    let Some(own) = own else {
        return Err(PyRuntimeError::new_err(format!("Unknown Provider Type: {name}")));
    };
    Ok(options.iter().fold(ProviderRequest::new(&own), |request, (key, value)| request.option(key, value)))
}

/// Returns onnxruntime's name of a provider of ours.
pub(crate) fn name_of(own: &str) -> &str {
    OURS.iter().find(|(_, known)| *known == own).map_or(own, |(theirs, _)| *theirs)
}

/// Returns why one of the requested providers cannot be opened, if that is so.
pub(crate) fn failing(requests: &[ProviderRequest]) -> Option<String> {
    let others = requests.iter().filter(|request| request.name != "cpu");
    others.into_iter().find_map(|request| {
        let opened = provider(&request.name).and_then(|provider| provider.open(0, &request.options));
        opened.err().map(|problem| format!("provider {}: {problem}", name_of(&request.name)))
    })
}

/// Loads a library that has a provider.
pub(crate) fn register(py: Python<'_>, name: &str, path: &str) -> PyResult<()> {
    let mut libraries = LIBRARIES.lock();
    if libraries.iter().any(|library| library.name == name) {
        let text = format!("an execution provider library is registered as '{name}' already");
        return Err(exception(py, ErrorKind::Fail, &text));
    }
    load_provider(Path::new(path)).map_err(|problem| {
        exception(py, ErrorKind::Fail, &format!("Failed to load library {path} with error: {problem}"))
    })?;
    libraries.push(Library { name: name.to_owned(), path: path.to_owned() });
    Ok(())
}

/// Forgets a library. Sessions that use it go on.
pub(crate) fn unregister(py: Python<'_>, name: &str) -> PyResult<()> {
    let mut libraries = LIBRARIES.lock();
    let place = libraries.iter().position(|library| library.name == name);
    let Some(place) = place else {
        let text = format!("Execution provider library: {name} was not registered.");
        return Err(exception(py, ErrorKind::Fail, &text));
    };
    libraries.remove(place);
    Ok(())
}
