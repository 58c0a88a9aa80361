//! Providers: onnxruntime's names of ours, and which of them work on this machine.

use std::collections::HashMap;
use std::path::Path;

use ort_runtime::ep::{load_provider, provider};
use ort_runtime::fork::Mutex;
use ort_runtime::onnxruntime::{KNOWN, OURS, name_of, working};
use ort_runtime::{ErrorKind, ProviderRequest};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::error::exception;

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
    let registered = LIBRARIES.lock().iter().map(|library| library.name.clone()).collect::<Vec<_>>();
    registered.into_iter().chain(working().iter().map(|name| (*name).to_owned())).collect()
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
