//! The integration tests of this crate in one program, because each test program links the whole
//! crate.
#![allow(clippy::too_many_lines, reason = "tables of cases")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod command_line;
mod compile;
mod damaged_models;
mod generate;
mod hostile_inputs;
mod memory_report;
mod optimize;
mod output_files;
mod plan;
mod provider_libraries;
mod prune;
mod quantize;
mod quantize_bounds;
mod quantize_moved;
mod quantize_tuned;
mod run_and_measure;
mod support;
mod test_cases;
mod train;
