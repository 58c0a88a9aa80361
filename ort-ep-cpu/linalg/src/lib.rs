//! CPU kernels on GEMM alone: `MatMul`, `Gemm`, their integer and fused variants, and `Einsum`.
//!
//! Each file registers its own kernels with `cpu_kernels!`.

// A panic in a test merely fails the test; a panic in this code would be a defect.
#![warn(
    clippy::exit,
    clippy::indexing_slicing,
    clippy::mem_forget,
    clippy::string_slice,
    clippy::unchecked_time_subtraction,
    clippy::unreachable
)]

mod contraction;
mod einsum;
mod gemm;
mod integer;
mod integer_scaled;
mod matmul;
mod matmul_batch;
mod quantized;
mod subscripts;
mod transposed;
