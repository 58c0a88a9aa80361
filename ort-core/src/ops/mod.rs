//! The operator records, one file per operator or tight family.

mod axes;
mod control;
mod linalg;
mod math;
pub mod nn;
mod quant;
mod random;
mod reduce;
mod sequence;
mod signal;
pub mod tensor;
mod vision;

pub use reduce::{Equation, Label};
