//! The operator records, one file per operator or tight family.

mod axes;
mod batch;
mod control;
pub mod fused;
mod linalg;
mod math;
mod microsoft;
mod ml;
pub mod nn;
mod quant;
mod random;
mod reduce;
mod sequence;
mod signal;
pub mod tensor;
mod text;
pub mod training;
mod vision;

pub use reduce::{Equation, Label};
