//! What rules read, and what they find.

use std::collections::HashSet;

/// A text file of the repository.
pub(super) struct SourceFile {
    /// Its path from the root, with `/` as the separator.
    pub(super) path: String,
    /// Its contents.
    pub(super) text: String,
}

impl SourceFile {
    /// Whether the extension of its name is `extension`.
    pub(super) fn has_extension(&self, extension: &str) -> bool {
        self.path.rsplit_once('.').is_some_and(|(_, found)| found == extension)
    }
}

/// What rules look names up in.
#[derive(Default)]
pub(super) struct Repository<'a> {
    /// The text files.
    pub(super) files: &'a [SourceFile],
    /// The paths of all files.
    pub(super) paths: Vec<String>,
    /// The headings of documents, as `path#anchor`.
    pub(super) anchors: HashSet<String>,
    /// The words of all files that are not documents.
    pub(super) words: HashSet<String>,
    /// The names of elementwise operators.
    pub(super) elementwise: HashSet<String>,
}

/// A violation and its place. Line 0 stands for the whole file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Finding {
    pub(super) path: String,
    pub(super) line: usize,
    pub(super) what: String,
}

pub(super) fn report(findings: &mut Vec<Finding>, file: &SourceFile, line: usize, what: String) {
    findings.push(Finding { path: file.path.clone(), line, what });
}
