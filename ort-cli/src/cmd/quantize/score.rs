//! `--score`: what a command of the caller says of a model, and the layers that it costs.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use ort_runtime::{Error, ErrorKind};

/// The score that a command prints for a model.
pub(super) fn score(command: &str, model: &Path) -> Result<f64> {
    let mut process = shell(command, model);
    let output = process.stderr(Stdio::inherit()).output();
    let output = output.with_context(|| format!("running --score `{command}`"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        bail!("--score `{command}` failed for {} ({})", model.display(), output.status);
    }
    let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default().trim();
    let number = last.parse().ok().filter(|score: &f64| score.is_finite());
    number.ok_or_else(|| {
        let text = format!("the last line of --score `{command}` is no number: '{last}'");
        Error::new(ErrorKind::InvalidArgument, text)
            .help("print the score as the last line of standard output")
            .into()
    })
}

/// The command with the path as its last argument.
#[cfg(unix)]
fn shell(command: &str, model: &Path) -> Command {
    let mut process = Command::new("sh");
    process.arg("-c").arg(format!("{command} \"$1\"")).arg("sh").arg(model);
    process
}

/// The command with the path as its last argument.
#[cfg(not(unix))]
fn shell(command: &str, model: &Path) -> Command {
    let mut words = command.split_whitespace();
    let mut process = Command::new(words.next().unwrap_or_default());
    process.args(words).arg(model);
    process
}
