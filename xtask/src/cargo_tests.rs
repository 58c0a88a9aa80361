//! Running `cargo test` and test programs, and counting their tests.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::summary::{SkippedTest, Summary};
use crate::workspace::describe;

/// Runs a test command, passing its output through and adding up its counts.
pub(crate) fn run_tests(command: &mut Command) -> Result<Summary> {
    eprintln!("$ {}", describe(command));
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", describe(command)))?;
    let (mut summary, mut skipped) = (Summary::default(), Vec::<SkippedTest>::new());
    // Read to the end before waiting, so that the child cannot block on a full pipe.
    if let Some(output) = child.stdout.take() {
        for line in BufReader::new(output).lines() {
            let line = line?;
            println!("{line}");
            if let Some(counts) = Summary::from_cargo(&line) {
                summary += counts;
            }
            if let Some(test) = SkippedTest::from_line(&line)
                && !skipped.iter().any(|known| known.is_of(&test))
            {
                skipped.push(test);
            }
        }
    }
    skipped.iter().for_each(|test| summary.leave_out(test));
    let status = child.wait()?;
    if !status.success() {
        bail!("{summary} ({status})");
    }
    Ok(summary)
}
