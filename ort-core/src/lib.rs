//! Core of ort-runtime: tensors, graph IR, operator records, passes, memory planner, sessions.
//!
//! The pipeline, in module order: [`onnx`] loads a model into the canonical graph of [`ir`]. Its
//! operators are the records of [`spec`], defined in [`mod@ops`]. Shape inference works on the
//! symbolic dimensions of [`dim`]. [`pass`] and [`rewrite`] optimize the graph, [`placement`]
//! assigns each node to a device of [`ep`], [`plan`] plans the memory, and [`session`] runs the
//! result.

// Tests may panic: there a panic is an ordinary failure. In library code it would be a bug.
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
pub mod custom;
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
pub mod random;
pub mod rewrite;
pub mod rules;
mod run;
pub mod seeded;
pub mod session;
mod suggest;
pub mod tensor;
mod text;

#[doc(hidden)]
pub use inventory;

pub use error::{Error, ErrorKind, MemoryShortage, Result, Within};
pub use ir::spec;
pub use limits::Limits;
pub use suggest::{advise, advise_listed, nearest, one_of, unknown_name};
pub use text::{NAME_BYTES, shown, steers};
