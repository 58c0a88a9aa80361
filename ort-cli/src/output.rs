//! Output: text on standard output, and output files that are written atomically.
//!
//! Names come from untrusted model files, so all text passes through this module. [`print()`]
//! escapes terminal control characters; tables ([`ort_report::Table`]) also truncate their cells.
//! JSON gets JSON escapes instead.

use std::borrow::Cow;
use std::fmt::{self, Write as _};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use ort_runtime::files::NewFile;
use ort_runtime::steers;
use serde::Serialize;

/// The most bytes of a line on standard error.
pub(crate) const LINE_BYTES: usize = 4096;

/// The most names that one line lists.
const MOST_NAMED: usize = 6;

/// The reader of standard output has closed the pipe, as `head` does. The program then ends without
/// an error.
#[derive(Debug)]
pub(crate) struct ReaderLeft;

impl fmt::Display for ReaderLeft {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("no reader of standard output")
    }
}

impl std::error::Error for ReaderLeft {}

/// Writes to standard output. The macro `say!` adds the newline.
pub(crate) fn print(text: fmt::Arguments<'_>) -> Result<()> {
    send(&without_steering(&text.to_string(), |escaped, character| {
        // Writing to a String cannot fail.
        let _ = write!(escaped, "{}", character.escape_unicode());
    }))
}

/// Writes one JSON object on one line.
pub(crate) fn say_json(object: &impl Serialize) -> Result<()> {
    let mut text = json(object)?;
    text.push('\n');
    send(&text)
}

/// Writes a report as JSON to a file, if one is asked for, and to standard output as JSON or in
/// the way of `print`.
pub(crate) fn say_report<R: Serialize>(
    report: &R,
    file: Option<&Path>,
    as_json: bool,
    print: impl FnOnce(&R) -> Result<()>,
) -> Result<()> {
    if let Some(path) = file {
        write_file(path, |file| {
            serde_json::to_writer_pretty(&mut *file, report)?;
            Ok(writeln!(file)?)
        })?;
    }
    if as_json { say_json(report) } else { print(report) }
}

/// Returns an object as JSON in which no character acts on a terminal.
fn json(object: &impl Serialize) -> Result<String> {
    let text = serde_json::to_string(object)?;
    // serde_json escapes ASCII control characters only, but others also act on a terminal.
    let plain = without_steering(&text, |escaped, character| {
        // JSON escapes are UTF-16 code units, so a character beyond the BMP needs two.
        for unit in character.encode_utf16(&mut [0; 2]) {
            let _ = write!(escaped, "\\u{unit:04x}");
        }
    });
    Ok(plain.into_owned())
}

fn send(text: &str) -> Result<()> {
    let mut output = std::io::stdout().lock();
    // Without the flush, the error of a full disk would be lost when the process exits.
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        Ok(()) => Ok(()),
        Err(problem) if problem.kind() == std::io::ErrorKind::BrokenPipe => Err(ReaderLeft.into()),
        Err(problem) => Err(problem).context("writing to standard output"),
    }
}

/// Returns the text with terminal control characters escaped, except newlines.
fn without_steering(text: &str, escape: impl Fn(&mut String, char)) -> Cow<'_, str> {
    let is_steering = |character: char| character != '\n' && steers(character);
    // The common case needs no copy.
    if !text.chars().any(is_steering) {
        return text.into();
    }
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        if is_steering(character) {
            escape(&mut escaped, character);
        } else {
            escaped.push(character);
        }
    }
    escaped.into()
}

/// Returns the first names, and the number of the rest.
pub(crate) fn listed(names: &[String]) -> String {
    let shown = names.iter().take(MOST_NAMED).cloned().collect::<Vec<_>>().join(", ");
    match names.len().checked_sub(MOST_NAMED) {
        None | Some(0) => shown,
        Some(more) => format!("{shown} and {more} more"),
    }
}

/// Prints a line to standard output. Unlike `println!`, it returns an error if the write fails, and
/// does not panic.
macro_rules! say {
    () => {
        $crate::output::print(format_args!("\n"))
    };
    ($($text:tt)+) => {
        $crate::output::print(format_args!("{}\n", format_args!($($text)+)))
    };
}
pub(crate) use say;

/// Returns the path of the data file that belongs to a model file with weights outside.
pub(crate) fn data_path(model: &Path) -> PathBuf {
    let mut path = model.as_os_str().to_os_string();
    path.push(".data");
    path.into()
}

/// Writes a file atomically: see [`ort_runtime::files`].
pub(crate) fn write_file(path: &Path, fill: impl FnOnce(&mut NewFile) -> Result<()>) -> Result<()> {
    let mut file = NewFile::create(path).map_err(|problem| {
        let advice = match problem.kind() {
            ErrorKind::NotFound => "create its folder, or name another",
            ErrorKind::IsADirectory => "name a file in it",
            ErrorKind::PermissionDenied => "check the permissions of its folder",
            _ => "name another file",
        };
        anyhow!("cannot create {}: {problem}; {advice}", path.display())
    })?;
    // If `fill` fails, the unfinished file is dropped and the old one stays.
    let written = fill(&mut file).and_then(|()| Ok(file.complete()?.publish()?));
    written.with_context(|| format!("writing {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_stays_json() -> Result<()> {
        let object = serde_json::json!({ "name": "\u{202e}\u{7f}\u{e0041}é" });
        let text = json(&object)?;
        assert!(!text.chars().any(steers), "{text:?}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text)?, object);
        Ok(())
    }
}
