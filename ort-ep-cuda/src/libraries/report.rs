//! Reports of the search for NVIDIA's libraries.

use std::path::PathBuf;

/// The outcome of the search for one of NVIDIA's libraries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibraryReport {
    /// The library's name: `cuBLASLt`.
    pub name: &'static str,
    /// The library in use, or why none is and our own kernels run instead.
    pub found: std::result::Result<FoundLibrary, String>,
}

/// A library in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundLibrary {
    /// The version it reports.
    pub version: String,
    /// Its path.
    pub path: PathBuf,
}

impl LibraryReport {
    /// Renders the outcome as text.
    pub(crate) fn to_text(&self) -> String {
        match &self.found {
            Ok(found) => format!("{} at {}", found.version, found.path.display()),
            Err(reason) => format!("none, own kernels: {reason}"),
        }
    }
}
