//! Linear algebra: `Gemm`, `MatMul` and their quantized forms.

pub(super) mod gemm;
pub(super) mod matmul;
pub mod problem;
