//! Standard output, whose reader may leave early, and files that are whole or not there.

use std::fmt;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};

/// The reader of standard output has gone, as `head` does when it has seen enough: nothing is wrong.
#[derive(Debug)]
pub(crate) struct ReaderLeft;

impl fmt::Display for ReaderLeft {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("nobody reads standard output")
    }
}

impl std::error::Error for ReaderLeft {}

/// Writes to standard output; the macro `say!` adds the end of the line.
pub(crate) fn print(text: fmt::Arguments<'_>) -> Result<()> {
    let mut output = std::io::stdout().lock();
    match output.write_fmt(text).and_then(|()| output.flush()) {
        Ok(()) => Ok(()),
        Err(problem) if problem.kind() == std::io::ErrorKind::BrokenPipe => Err(ReaderLeft.into()),
        Err(problem) => Err(problem).context("writing to standard output"),
    }
}

/// A line of results on standard output. Unlike `println!` it is an error, not a panic, when nobody reads.
macro_rules! say {
    () => {
        $crate::output::print(format_args!("\n"))
    };
    ($($text:tt)+) => {
        $crate::output::print(format_args!("{}\n", format_args!($($text)+)))
    };
}
pub(crate) use say;

/// Writes a file whole or not at all: into a temporary file beside it that then takes its name.
pub(crate) fn write_file(path: &Path, fill: impl FnOnce(&mut std::fs::File) -> Result<()>) -> Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file =
        tempfile::Builder::new().permissions_like_others().tempfile_in(folder).with_context(|| {
            format!("creating {}: does its folder exist, and may you write there?", path.display())
        })?;
    fill(file.as_file_mut()).with_context(|| format!("writing {}", path.display()))?;
    file.persist(path).with_context(|| format!("writing {}", path.display()))?;
    Ok(())
}

/// Files like those that other programs write, not private ones as temporary files are.
trait PermissionsLikeOthers {
    fn permissions_like_others(&mut self) -> &mut Self;
}

impl PermissionsLikeOthers for tempfile::Builder<'_, '_> {
    #[cfg(unix)]
    fn permissions_like_others(&mut self) -> &mut Self {
        use std::os::unix::fs::PermissionsExt;
        // What the process's mask leaves of it.
        self.permissions(std::fs::Permissions::from_mode(0o666))
    }

    #[cfg(not(unix))]
    fn permissions_like_others(&mut self) -> &mut Self {
        self
    }
}
