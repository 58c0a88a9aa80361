//! The C ABI between this process and provider libraries.
//!
//! - `tables` defines the records and function tables; `ort_provider.h` is generated from it.
//! - `encode` converts a node to records, and `decode` reads it back inside the library.
//! - `export` is the library side for providers written in Rust: `export_provider!`. The host side
//!   is `ep::dylib`.

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

/// The error kinds that have a status code of their own; all others map to `ORT_PROVIDER_FAIL`.
const STATUS_CODES: [(ErrorKind, i32); 6] = [
    (ErrorKind::Fail, ORT_PROVIDER_FAIL),
    (ErrorKind::InvalidArgument, ORT_PROVIDER_INVALID_ARGUMENT),
    (ErrorKind::RuntimeException, ORT_PROVIDER_RUNTIME_EXCEPTION),
    (ErrorKind::NotImplemented, ORT_PROVIDER_NOT_IMPLEMENTED),
    (ErrorKind::EpFail, ORT_PROVIDER_EP_FAIL),
    (ErrorKind::OutOfMemory, ORT_PROVIDER_OUT_OF_MEMORY),
];

pub(super) fn code_of(kind: ErrorKind) -> i32 {
    STATUS_CODES.iter().find(|(own, _)| *own == kind).map_or(ORT_PROVIDER_FAIL, |(_, code)| *code)
}

/// Returns the error kind of a status code, or `None` for a code that the ABI does not define.
#[cfg(feature = "provider-libraries")]
pub(super) fn kind_of(code: i32) -> Option<ErrorKind> {
    STATUS_CODES.iter().find(|(_, own)| *own == code).map(|(kind, _)| *kind)
}
