//! ONNX Runtime's error codes, texts and provider names.
//!
//! The C library and the Python package stand in for ONNX Runtime, and programs match on these
//! words. Both take them from here.

mod errors;
mod folders;
pub mod log;
mod mismatch;
mod providers;

pub use errors::{StatusCode, TERMINATED, load_failed, running_text, status_code};
pub use folders::working_folder;
pub use mismatch::{fit, in_optional, of_tensor};
pub use providers::{CPU, KNOWN, OURS, name_of, working};

/// The version of ONNX Runtime whose interface the C library and the Python package have.
pub const INTERFACE_VERSION: &str = "1.31.1";
