//! `cargo xtask tidy`: the style rules that no compiler checks, over every file that git tracks or
//! would track.

mod code;
mod documents;
mod layers;
mod operators;
mod rules;
mod words;

use std::collections::HashSet;
use std::fs;
use std::process::Command;

use anyhow::{Result, bail};

use crate::workspace::{Workspace, capture};

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
pub(super) struct Repository {
    /// The paths of all files.
    pub(super) paths: Vec<String>,
    /// The headings of documents, as `path#anchor`.
    pub(super) anchors: HashSet<String>,
    /// The words of all files that are not documents.
    pub(super) words: HashSet<String>,
    /// The names of elementwise operators.
    pub(super) elementwise: HashSet<String>,
}

impl Repository {
    pub(super) fn of(files: &[SourceFile], paths: Vec<String>) -> Repository {
        let (documents, sources): (Vec<_>, Vec<_>) = files.iter().partition(|file| documents::applies(file));
        let anchors = documents.into_iter().flat_map(documents::anchors).collect();
        let mut words = HashSet::new();
        sources.iter().for_each(|source| documents::words_of(&source.text, &mut words));
        let mut elementwise = HashSet::new();
        sources.iter().for_each(|source| operators::names_of(source, &mut elementwise));
        Repository { paths, anchors, words: words.into_iter().map(str::to_owned).collect(), elementwise }
    }
}

/// A violation and its place. Line 0 stands for the whole file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Finding {
    pub(super) path: String,
    pub(super) line: usize,
    pub(super) what: String,
}

/// Applies all rules; an error if one finds something.
pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let (files, paths) = read_files(workspace)?;
    let repository = Repository::of(&files, paths);
    let mut findings = Vec::new();
    for rule in rules::RULES {
        for file in files.iter().filter(|file| (rule.applies)(file)) {
            (rule.check)(file, &repository, &mut findings);
        }
    }
    for finding in &findings {
        println!("{}:{}: {}", finding.path, finding.line, finding.what);
    }
    if !findings.is_empty() {
        bail!("tidy found {} things in {} files", findings.len(), files.len());
    }
    println!("tidy: {} rules hold in {} files", rules::RULES.len(), files.len());
    Ok(())
}

/// Reads the text files, and lists the names of all files.
fn read_files(workspace: &Workspace) -> Result<(Vec<SourceFile>, Vec<String>)> {
    let mut command = Command::new("git");
    command.current_dir(&workspace.root).args([
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "-z",
    ]);
    let listing = capture(&mut command)?;
    let mut files = Vec::new();
    let mut names = Vec::new();
    for name in listing.split('\0').filter(|name| !name.is_empty()) {
        // A file that was removed but not yet committed is still listed.
        let Ok(bytes) = fs::read(workspace.root.join(name)) else { continue };
        names.push(name.to_owned());
        // Fuzz inputs, tensors and models are binary, even if some happen to be valid UTF-8.
        if name.starts_with("fuzz/corpus/") || name.ends_with(".pb") || name.ends_with(".onnx") {
            continue;
        }
        if let Ok(text) = String::from_utf8(bytes) {
            files.push(SourceFile { path: name.to_owned(), text });
        }
    }
    names.sort();
    names.dedup();
    // During a merge conflict git lists a file once per stage.
    files.sort_by(|a, b| a.path.cmp(&b.path));
    files.dedup_by(|a, b| a.path == b.path);
    Ok((files, names))
}
