//! Operators that multiply matrices.

mod gemm;
mod matmul;
