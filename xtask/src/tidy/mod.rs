//! `cargo xtask tidy`: the style rules that no compiler checks, over every file that git tracks or
//! would track.

mod circles;
mod code;
mod documents;
mod layers;
mod modules;
mod operators;
mod parameters;
mod rules;
mod source;
mod type_names;
mod unsafe_reasons;
mod words;

use std::collections::HashSet;
use std::fs;
use std::process::Command;

use anyhow::{Result, bail};

use crate::workspace::{Workspace, capture};
use source::{Repository, SourceFile};

impl<'a> Repository<'a> {
    pub(super) fn of(files: &'a [SourceFile], paths: Vec<String>) -> Self {
        let (documents, sources): (Vec<_>, Vec<_>) = files.iter().partition(|file| documents::applies(file));
        let anchors = documents.into_iter().flat_map(documents::anchors).collect();
        let (mut words, mut elementwise) = (HashSet::new(), HashSet::new());
        for source in sources {
            documents::words_of(&source.text, &mut words);
            operators::names_of(source, &mut elementwise);
        }
        let words = words.into_iter().map(str::to_owned).collect();
        Repository { files, paths, anchors, words, elementwise }
    }
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
    // With `-z` git does not quote unusual names.
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
