//! The runtime's own fused operators, of the domain [`RUNTIME`](crate::spec::RUNTIME): what rewrites make of several of the
//! standard's operators so that a provider runs them in one pass. Each has a decomposition that is exact.

pub mod activation;
mod elementwise;
mod matmul;
