//! Operators that multiply matrices.

pub(super) mod gemm;
pub(super) mod matmul;
