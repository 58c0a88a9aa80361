//! Operator records: one file per operator or closely related family.
//!
//! A record holds an operator's schema, shape inference, upgrades, decomposition and gradient. The
//! types that a record is made of are in [`crate::spec`]; kernels are in the providers.

mod axes;
mod batch;
mod control;
pub mod fused;
pub mod linalg;
mod math;
mod microsoft;
mod ml;
pub mod nn;
pub mod quant;
mod random;
pub mod reduce;
mod sequence;
mod signal;
pub mod tensor;
mod text;
pub mod training;
pub mod vision;

pub use reduce::{Equation, Label};
