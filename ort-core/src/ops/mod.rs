//! The operator records, one file per operator or tight family.

mod axes;
mod nn;
mod random;
mod reduce;
mod signal;
mod tensor;
mod vision;

pub use reduce::{Equation, Label};
