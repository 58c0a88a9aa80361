//! What the GPU providers share, and what needs no driver.
//!
//! A GPU kernel turns the shapes of a run into launches, which its node caches by shape. This crate
//! has both sides of that up to the launch: the operands and the operator context that a kernel
//! sees ([`OpCx`]), the tensors that a run binds ([`BoundTensors`]), and the node's types and
//! launch cache ([`NodeInfo`], [`LaunchCache`]). [`attention`] has what all attention operators
//! have in common, [`gemm`] what all matrix products have, and [`read`] the problem descriptors of
//! other operators. A provider renders and launches.

#![forbid(unsafe_code)]
// Lints against panics. In tests a panic is an ordinary failure; in a provider it would be a bug.
#![warn(
    clippy::exit,
    clippy::indexing_slicing,
    clippy::mem_forget,
    clippy::string_slice,
    clippy::unchecked_time_subtraction,
    clippy::unreachable
)]

pub mod attention;
mod bound;
pub mod formula;
pub mod gemm;
mod launch_cache;
pub mod memory;
pub mod nbits;
mod node;
mod operand;
pub mod quantize;
pub mod read;
pub mod reduce;
mod rows;
mod walk;

pub use bound::{BoundTensors, Key};
pub use launch_cache::LaunchCache;
pub use node::{NodeInfo, find_kernel};
pub use operand::{Arg, OpCx, Operand};
pub use rows::StridedRows;
pub use walk::{Walk, strides};
