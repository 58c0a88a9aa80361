//! The built library, loaded and driven through its table as clients do.
//!
//! What ONNX Runtime says and computes is in `tests/data`, recorded by `record.py`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests may panic")]
#![allow(clippy::too_many_lines, reason = "tables of cases")]

mod compile;
mod custom;
mod editor;
mod errors;
mod layout;
mod library;
mod lora;
mod nulls;
mod options;
mod others;
mod runs;
mod sparse;
mod values;
