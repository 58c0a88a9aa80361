//! Skipping a test that cannot run on this machine. The test runner prints "ok" for it, so the test
//! itself reports that it did not run.

use std::io::Write;

/// Reports that the calling test does not run, why, and what to install. The line, `SKIPPED
/// PROGRAM::TEST: WHY`, bypasses the capture of the test runner. `cargo xtask test` counts these
/// lines and lists them at its end.
pub fn skip_test(why: &str) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    let program = std::env::current_exe().unwrap_or_default();
    let program = program.file_stem().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    // Cargo appends a hash to the names of test binaries.
    let program = program.rsplit_once('-').map_or(program.as_str(), |(name, _)| name);
    let why = why.split_whitespace().collect::<Vec<_>>().join(" ");
    // Starts with a newline, because the runner may be in the middle of a line. A failed write is
    // ignored: then no one reads the output.
    let _ = std::io::stdout().lock().write_all(format!("\nSKIPPED {program}::{test}: {why}\n").as_bytes());
}
