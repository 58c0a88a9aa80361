//! Log lines of the engine, in the form of those that the package writes.

use ort_runtime::onnxruntime::log::{self, Line};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

pub(crate) use log::set_severity;

/// The package itself logs the warnings about a model, with the severity that the session's options
/// ask for.
const WITHOUT: &[&str] = &["ort_core::onnx::warnings"];

/// Lets the engine's lines go to standard error, unless the process has a logger already.
pub(crate) fn install() {
    log::install(write, WITHOUT);
}

fn write(line: &Line) {
    let (letter, place, message) = (line.letter(), &line.place, &line.message);
    log::write_to_stderr(&format!("{} [{letter}:onnxruntime:, {place}] {message}\n", now()));
}

/// The time in UTC, as in `2026-11-28 03:11:19.123456`.
fn now() -> String {
    let mut text = String::new();
    let _ = SystemTime.format_time(&mut Writer::new(&mut text));
    text.replace('T', " ").trim_end_matches('Z').to_owned()
}
