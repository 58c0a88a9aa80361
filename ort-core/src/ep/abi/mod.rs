//! The interface between this process and provider libraries, in terms of C alone.
//!
//! - `tables` has the records and the tables of functions: `ort_provider.h` in other words.
//! - `encode` writes a node as records, and `decode` reads it back on the library's side.
//! - `export` is the library's side for providers written in Rust: `export_provider!`. The host's
//!   side is in `ep::dylib`.

mod decode;
#[cfg(feature = "provider-libraries")]
pub(super) mod encode;
pub mod export;
pub mod tables;

use tables::{
    ORT_PROVIDER_EP_FAIL, ORT_PROVIDER_FAIL, ORT_PROVIDER_INVALID_ARGUMENT, ORT_PROVIDER_NOT_IMPLEMENTED,
    ORT_PROVIDER_OUT_OF_MEMORY, ORT_PROVIDER_RUNTIME_EXCEPTION,
};

use crate::ErrorKind;

/// The kinds of errors that have a code of their own.
const CODES: [(ErrorKind, i32); 6] = [
    (ErrorKind::Fail, ORT_PROVIDER_FAIL),
    (ErrorKind::InvalidArgument, ORT_PROVIDER_INVALID_ARGUMENT),
    (ErrorKind::RuntimeException, ORT_PROVIDER_RUNTIME_EXCEPTION),
    (ErrorKind::NotImplemented, ORT_PROVIDER_NOT_IMPLEMENTED),
    (ErrorKind::EpFail, ORT_PROVIDER_EP_FAIL),
    (ErrorKind::OutOfMemory, ORT_PROVIDER_OUT_OF_MEMORY),
];

pub(super) fn code_of(kind: ErrorKind) -> i32 {
    CODES.iter().find(|(own, _)| *own == kind).map_or(ORT_PROVIDER_FAIL, |(_, code)| *code)
}

/// The kind of error that a code says; none for a code that is not one of this interface.
#[cfg(feature = "provider-libraries")]
pub(super) fn kind_of(code: i32) -> Option<ErrorKind> {
    CODES.iter().find(|(_, own)| *own == code).map(|(kind, _)| *kind)
}
