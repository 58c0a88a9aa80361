//! The operator records, one file per operator or tight family.

mod math;
pub mod tensor;
