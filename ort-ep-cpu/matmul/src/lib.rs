//! Matrix multiplication as operator kernels use it: in `float` and `double`, with weights that are
//! packed when a session is created, and with 8-bit quantized weights.
//!
//! It is apart from `ort-cpu-kernel`, so that kernels without matrices do not depend on the GEMM.

// A panic in a test merely fails the test; a panic in this code would be a defect.
#![warn(
    clippy::exit,
    clippy::indexing_slicing,
    clippy::mem_forget,
    clippy::string_slice,
    clippy::unchecked_time_subtraction,
    clippy::unreachable
)]

pub mod matrix;
pub mod packed_weight;
pub mod quantized_gemm;
pub mod real;

use ort_core::{Error, error};

use ort_cpu_gemm::GemmError;

/// Converts an error of the GEMM library to one of the node.
pub fn refused(error: GemmError) -> Error {
    error!(InvalidArgument, "{error}")
}
