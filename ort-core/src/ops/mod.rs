//! The operator records, one file per operator or tight family.

mod math;
mod tensor;
