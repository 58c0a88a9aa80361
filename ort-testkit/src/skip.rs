//! Tests that cannot run on this machine: their runner prints "ok" for them, so they say on their
//! own that they did not run.

use std::io::Write;

/// Says that the calling test does not run, why, and what to install. The line, `SKIPPED
/// PROGRAM::TEST: WHY`, goes where no test runner captures it; `cargo xtask test` counts these
/// lines, and closes with them.
pub fn skip_test(why: &str) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    let program = std::env::current_exe().unwrap_or_default();
    let program = program.file_stem().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    // Cargo's names end with a hash.
    let program = program.rsplit_once('-').map_or(program.as_str(), |(name, _)| name);
    let why = why.split_whitespace().collect::<Vec<_>>().join(" ");
    // The runner may be in the middle of a line. What cannot be written has no reader.
    let _ = std::io::stdout().lock().write_all(format!("\nSKIPPED {program}::{test}: {why}\n").as_bytes());
}
