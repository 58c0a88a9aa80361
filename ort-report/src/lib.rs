//! Memory plans, and the findings about a model, as text, JSON and SVG.
//!
//! The command line and the Python package show the same reports, so both take them from here. This
//! crate prints nothing and reads no arguments: the caller decides where a report goes.
//!
//! Names come from untrusted model files. Text, tables and drawings escape the characters that act
//! on a terminal. JSON values hold the names as they are.

// Tests may panic: there a panic is an ordinary failure. In library code it would be a bug.
#![warn(
    clippy::exit,
    clippy::indexing_slicing,
    clippy::mem_forget,
    clippy::string_slice,
    clippy::unchecked_time_subtraction,
    clippy::unreachable
)]
#![forbid(unsafe_code)]

mod chart;
mod check;
pub mod drawing;
mod plan;
mod sweep;
mod table;
mod text;

#[cfg(test)]
mod tests;

pub use chart::plan_svg;
pub use check::{CheckReport, Finding, check};
pub use plan::plan_json;
pub use sweep::{MOST_PLANS, Sweep, combinations};
pub use table::{Table, in_line};
pub use text::{largest_values, plan_text, sizes_text, split_in_words};
