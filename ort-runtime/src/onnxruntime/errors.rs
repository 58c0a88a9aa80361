//! Status codes, and the texts of failed loads and runs.

use std::borrow::Cow;
use std::path::Path;

use ort_core::{Error, ErrorKind};

/// What ends a run whose terminate flag was set.
pub const TERMINATED: &str = "Exiting due to terminate flag being set to true.";

/// A status code of ONNX Runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusCode {
    /// The number of `OrtErrorCode`.
    pub code: i32,
    /// The name in messages, such as `INVALID_ARGUMENT`.
    pub name: &'static str,
}

/// Returns the status code of a kind of error.
pub fn status_code(kind: ErrorKind) -> StatusCode {
    let (code, name) = match kind {
        ErrorKind::Fail | ErrorKind::Cancelled | ErrorKind::OutOfMemory => (1, "FAIL"),
        ErrorKind::InvalidArgument => (2, "INVALID_ARGUMENT"),
        ErrorKind::NoSuchFile => (3, "NO_SUCHFILE"),
        ErrorKind::NoModel => (4, "NO_MODEL"),
        ErrorKind::RuntimeException => (6, "RUNTIME_EXCEPTION"),
        ErrorKind::InvalidProtobuf => (7, "INVALID_PROTOBUF"),
        ErrorKind::NotImplemented => (9, "NOT_IMPLEMENTED"),
        ErrorKind::InvalidGraph => (10, "INVALID_GRAPH"),
        ErrorKind::EpFail => (11, "EP_FAIL"),
    };
    StatusCode { code, name }
}

/// Returns the text of an error without its kind, which the status code states. The nodes that were
/// running come first.
pub fn running_text(error: &Error) -> String {
    let running = |(name, op): (&str, &str)| {
        format!("Non-zero status code returned while running {op} node. Name:'{name}' Status Message: ")
    };
    error.nodes().map(running).chain([error.without_nodes()]).collect()
}

/// Returns the text for a model that does not load: our text behind ONNX Runtime's words. `path` is
/// that of its file.
pub fn load_failed(path: Option<&Path>, error: &Error) -> String {
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
    match (&path, error.kind()) {
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
    }
}
