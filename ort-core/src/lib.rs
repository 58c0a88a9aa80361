//! Tensors, graph IR, operator records, provider contract, plan and session of ort-runtime.
//!
//! The way through, in folder order: [`onnx`] loads a model into the canonical graph of [`ir`],
//! whose operators are the records of [`spec`] (written in [`mod@ops`]); shapes are inferred on
//! symbolic dimensions ([`dim`]); [`pass`] and [`rewrite`] change it; [`placement`] chooses a
//! device of [`ep`] for each node; [`plan`] places every byte; [`session`] runs.

// In tests such a panic is a failure like any other; here it would be a defect.
#![warn(
    clippy::exit,
    clippy::indexing_slicing,
    clippy::mem_forget,
    clippy::string_slice,
    clippy::unchecked_time_subtraction,
    clippy::unreachable
)]
#![deny(unsafe_code)]

mod cache;
pub mod dim;
pub mod dtype;
pub mod ep;
mod error;
pub mod files;
pub mod interrupt;
pub mod ir;
mod limits;
pub mod onnx;
pub mod ops;
pub mod pass;
pub mod placement;
pub mod plan;
mod program;
pub mod rewrite;
pub mod rules;
mod run;
pub mod seeded;
pub mod session;
pub mod spec;
mod suggest;
pub mod tensor;
mod text;

#[doc(hidden)]
pub use inventory;

pub use error::{Error, ErrorKind, MemoryShortage, Result, Within};
pub use limits::Limits;
pub use suggest::{advise, nearest, one_of, unknown_name};
pub use text::{NAME_BYTES, shown, steers};
