//! Errors: the engine's kinds as the exception classes that programs written for onnxruntime catch.
//!
//! The classes are Python's, in `ort_runtime/capi/_errors.py`: a class of several bases cannot be
//! made here.

use std::path::Path;

use ort_runtime::onnxruntime::{self, StatusCode, running_text, status_code};
use ort_runtime::{Error, ErrorKind};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// The exception class of a kind.
fn class_of(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Fail | ErrorKind::Cancelled => "Fail",
        ErrorKind::OutOfMemory => "OutOfMemory",
        ErrorKind::InvalidArgument => "InvalidArgument",
        ErrorKind::NoSuchFile => "NoSuchFile",
        ErrorKind::NoModel => "NoModel",
        ErrorKind::RuntimeException => "RuntimeException",
        ErrorKind::InvalidProtobuf => "InvalidProtobuf",
        ErrorKind::NotImplemented => "NotImplemented",
        ErrorKind::InvalidGraph => "InvalidGraph",
        ErrorKind::EpFail => "EPFail",
    }
}

/// Makes the exception of a kind with this message.
pub(crate) fn exception(py: Python<'_>, kind: ErrorKind, message: &str) -> PyErr {
    status(py, class_of(kind), status_code(kind), message)
}

/// The exception of a session whose making was cancelled.
pub(crate) fn load_cancelled(py: Python<'_>) -> PyErr {
    let code = StatusCode { code: 12, name: "MODEL_LOAD_CANCELED" };
    status(py, "ModelLoadCanceled", code, "The load was canceled by its session options.")
}

fn status(py: Python<'_>, class_name: &str, status: StatusCode, message: &str) -> PyErr {
    let StatusCode { code, name } = status;
    let text = format!("[ONNXRuntimeError] : {code} : {name} : {message}");
    match class(py, class_name) {
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
    exception(py, error.kind(), &running_text(error))
}

/// The exception of a model that does not load: `path` is that of its file.
pub(crate) fn load_failed(py: Python<'_>, path: Option<&Path>, error: &Error) -> PyErr {
    exception(py, error.kind(), &onnxruntime::load_failed(path, error))
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
