//! Kernels of operators of the domain `com.microsoft` that beat their decompositions, or have none.

mod attend;
mod elementwise;
mod gather_blocks;
mod group_query;
mod inverse;
mod matmul_nbits;
mod mixture;
mod multi_head;
mod rotary;
