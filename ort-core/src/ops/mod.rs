//! The operator records, one file per operator or tight family.

mod linalg;
mod math;
pub mod nn;
mod quant;
pub mod tensor;
