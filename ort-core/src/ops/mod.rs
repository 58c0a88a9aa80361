//! The operator records, one file per operator or tight family.

mod linalg;
pub mod nn;
mod quant;
mod tensor;
