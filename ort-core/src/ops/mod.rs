//! The operator records, one file per operator or tight family.

pub mod tensor;
