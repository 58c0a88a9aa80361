//! Errors: the engine's kinds as the exception classes that programs written for onnxruntime catch.
//!
//! The classes are Python's, in `ort_runtime/capi/_errors.py`: a class of several bases cannot be
//! made here.

use std::borrow::Cow;
use std::path::Path;

use ort_runtime::{Error, ErrorKind};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// The class, the code and the name of a kind, as onnxruntime writes them.
fn class_of(kind: ErrorKind) -> (&'static str, u32, &'static str) {
    match kind {
        ErrorKind::Fail | ErrorKind::Cancelled => ("Fail", 1, "FAIL"),
        ErrorKind::OutOfMemory => ("OutOfMemory", 1, "FAIL"),
        ErrorKind::InvalidArgument => ("InvalidArgument", 2, "INVALID_ARGUMENT"),
        ErrorKind::NoSuchFile => ("NoSuchFile", 3, "NO_SUCHFILE"),
        ErrorKind::NoModel => ("NoModel", 4, "NO_MODEL"),
        ErrorKind::RuntimeException => ("RuntimeException", 6, "RUNTIME_EXCEPTION"),
        ErrorKind::InvalidProtobuf => ("InvalidProtobuf", 7, "INVALID_PROTOBUF"),
        ErrorKind::NotImplemented => ("NotImplemented", 9, "NOT_IMPLEMENTED"),
        ErrorKind::InvalidGraph => ("InvalidGraph", 10, "INVALID_GRAPH"),
        ErrorKind::EpFail => ("EPFail", 11, "EP_FAIL"),
    }
}

/// Makes the exception of a kind with this message.
pub(crate) fn exception(py: Python<'_>, kind: ErrorKind, message: &str) -> PyErr {
    status(py, class_of(kind), message)
}

/// The exception of a session whose making was cancelled.
pub(crate) fn load_cancelled(py: Python<'_>) -> PyErr {
    let class = ("ModelLoadCanceled", 12, "MODEL_LOAD_CANCELED");
    status(py, class, "The load was canceled by its session options.")
}

fn status(py: Python<'_>, (name, code, shown): (&str, u32, &str), message: &str) -> PyErr {
    let text = format!("[ONNXRuntimeError] : {code} : {shown} : {message}");
    match class(py, name) {
        Ok(class) => PyErr::from_type(class, text),
        // The package is not whole; the message still counts.
        Err(_) => PyRuntimeError::new_err(text),
    }
}

fn class<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyType>> {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module =
        MODULE.get_or_try_init(py, || Ok::<_, PyErr>(py.import("ort_runtime.capi._errors")?.unbind()))?;
    Ok(module.bind(py).getattr(name)?.cast_into()?)
}

/// Turns a failure of the engine into an exception.
pub(crate) fn raised(py: Python<'_>, error: &Error) -> PyErr {
    exception(py, error.kind(), &text_of(error))
}

/// Returns the text of an error without its kind, which the class and the code say already. The
/// nodes that were running come first, in onnxruntime's words.
pub(crate) fn text_of(error: &Error) -> String {
    let running = |(name, op): (&str, &str)| {
        format!("Non-zero status code returned while running {op} node. Name:'{name}' Status Message: ")
    };
    error.nodes().map(running).chain([error.without_nodes()]).collect()
}

/// The exception of a model that does not load: the engine's text behind onnxruntime's words, which
/// programs look for. `path` is that of its file.
pub(crate) fn load_failed(py: Python<'_>, path: Option<&Path>, error: &Error) -> PyErr {
    let path = path.map(|path| path.display().to_string());
    let text = error.without_nodes();
    // The path stands in front.
    let place = format!("model '{}'", path.as_deref().unwrap_or("(memory)"));
    let rest = text.strip_prefix(&place);
    let rest = rest.and_then(|rest| rest.strip_prefix(": ").or_else(|| rest.strip_prefix(" > ")));
    let rest = rest.unwrap_or(&text);
    let rest = match error.kind() {
        ErrorKind::InvalidGraph => Cow::Owned(format!("This is an invalid model. {rest}")),
        _ => Cow::Borrowed(rest),
    };
    let text = match (&path, error.kind()) {
        (Some(path), ErrorKind::NoSuchFile) => {
            format!("Load model from {path} failed:Load model {path} failed. File doesn't exist")
        }
        (Some(path), ErrorKind::InvalidProtobuf) => {
            format!("Load model from {path} failed:Protobuf parsing failed. {rest}")
        }
        (Some(path), _) => format!("Load model from {path} failed:{rest}"),
        (None, ErrorKind::InvalidProtobuf) => {
            format!("Failed to load model because protobuf parsing failed. {rest}")
        }
        (None, _) => rest.into_owned(),
    };
    exception(py, error.kind(), &text)
}

/// [`raised`] for results.
pub(crate) trait OrRaise<T> {
    /// Turns the error into an exception.
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for ort_runtime::Result<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| raised(py, &error))
    }
}
