//! Kernels of operators of the domain `com.microsoft` that beat their decompositions, or have none.

mod matmul_nbits;
