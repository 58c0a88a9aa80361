//! Statuses: the result of nearly every function.

use std::ffi::c_char;

use ort_runtime::onnxruntime::{running_text, status_code};
use ort_runtime::{Error, ErrorKind};
use ort_sys::stub::Error as Status;
use ort_sys::{OrtErrorCode, OrtStatus, OrtStatusPtr};

use crate::entry::{Text, entries, guarded_value};

/// The numbers of `OrtErrorCode`.
pub(crate) mod code {
    pub(crate) const FAIL: i32 = 1;
    pub(crate) const INVALID_ARGUMENT: i32 = 2;
    pub(crate) const RUNTIME_EXCEPTION: i32 = 6;
    pub(crate) const MODEL_LOADED: i32 = 8;
    pub(crate) const NOT_IMPLEMENTED: i32 = 9;
    pub(crate) const INVALID_GRAPH: i32 = 10;
    pub(crate) const MODEL_LOAD_CANCELED: i32 = 12;
    pub(crate) const NOT_FOUND: i32 = 14;
}

/// The most bytes of a message that `CreateStatus` keeps, as in ONNX Runtime.
const MESSAGE_BYTES: usize = 4096;

/// Why a function failed.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: i32,
    pub(crate) message: String,
}

pub(crate) type Outcome<T = ()> = Result<T, Failure>;

/// Fails with a code and a message.
pub(crate) fn fail<T>(code: i32, message: String) -> Outcome<T> {
    Err(Failure { code, message })
}

/// Fails with `INVALID_ARGUMENT`.
pub(crate) fn invalid<T>(message: impl Into<String>) -> Outcome<T> {
    fail(code::INVALID_ARGUMENT, message.into())
}

impl Failure {
    pub(crate) fn new(code: i32, message: impl Into<String>) -> Failure {
        Failure { code, message: message.into() }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Failure {
        Failure::new(code::INVALID_ARGUMENT, message)
    }

    pub(crate) fn into_status(self) -> OrtStatusPtr {
        // A C text ends at its first zero.
        Status::new_sys(code_of(self.code), self.message.replace('\0', "\\0"))
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::new(status_code(error.kind()).code, running_text(&error))
    }
}

impl From<ErrorKind> for Failure {
    fn from(kind: ErrorKind) -> Failure {
        Failure::new(status_code(kind).code, kind.name())
    }
}

/// Returns the code of a number. A number that no code has counts as a failure.
fn code_of(number: i32) -> OrtErrorCode {
    match number {
        0 => OrtErrorCode::ORT_OK,
        2 => OrtErrorCode::ORT_INVALID_ARGUMENT,
        3 => OrtErrorCode::ORT_NO_SUCHFILE,
        4 => OrtErrorCode::ORT_NO_MODEL,
        5 => OrtErrorCode::ORT_ENGINE_ERROR,
        6 => OrtErrorCode::ORT_RUNTIME_EXCEPTION,
        7 => OrtErrorCode::ORT_INVALID_PROTOBUF,
        8 => OrtErrorCode::ORT_MODEL_LOADED,
        9 => OrtErrorCode::ORT_NOT_IMPLEMENTED,
        10 => OrtErrorCode::ORT_INVALID_GRAPH,
        11 => OrtErrorCode::ORT_EP_FAIL,
        12 => OrtErrorCode::ORT_MODEL_LOAD_CANCELED,
        13 => OrtErrorCode::ORT_MODEL_REQUIRES_COMPILATION,
        14 => OrtErrorCode::ORT_NOT_FOUND,
        _ => OrtErrorCode::ORT_FAIL,
    }
}

/// A status of C. Its memory is that of `ort_sys`, so that it has no tag.
fn status_of<'a>(status: *const OrtStatus) -> Option<&'a Status> {
    // SAFETY: the caller passes null or a status of this library that it did not release; all of
    // them are made by `into_status`.
    (!status.is_null()).then(|| unsafe { Status::cast_from_sys(status) })
}

/// Takes over a status that a client's function returned.
pub(crate) fn of_client(status: OrtStatusPtr) -> Outcome {
    if status.0.is_null() {
        return Ok(());
    }
    // SAFETY: clients make statuses by `CreateStatus` or get them from other functions of this
    // library, and hand them over by returning them.
    let status = unsafe { Status::consume_sys(status.0) };
    fail(status.code as i32, status.message().to_owned())
}

entries! {
    /// 0
    fn CreateStatus(number: i32, message: Text) -> OrtStatusPtr, else OrtStatusPtr::default(), {
        let text = message.bytes("the message").unwrap_or_default();
        let text = text.get(..MESSAGE_BYTES).unwrap_or(text);
        Failure::new(number, String::from_utf8_lossy(text)).into_status()
    }

    /// 1
    fn GetErrorCode(status: *const OrtStatus) -> i32, else code::FAIL, {
        status_of(status).map_or(0, |status| status.code as i32)
    }

    /// 2
    fn GetErrorMessage(status: *const OrtStatus) -> *const c_char, else c"".as_ptr(), {
        status_of(status).map_or(c"".as_ptr(), Status::message_ptr)
    }

    /// 93
    fn ReleaseStatus(status: *mut OrtStatus) -> (), else (), {
        if !status.is_null() {
            // SAFETY: as in `status_of`; the caller gives it back once.
            drop(unsafe { Status::consume_sys(status) });
        }
    }
}

/// A function of the table that is not there.
pub(crate) fn not_implemented(name: &str) -> OrtStatusPtr {
    guarded_value(
        || {
            let text = format!("{name} is not implemented in ort-runtime; docs/C_API.md lists what is");
            Failure::new(code::NOT_IMPLEMENTED, text).into_status()
        },
        OrtStatusPtr::default(),
    )
}
