//! `cargo xtask test --quick`: the checks of what changed, for the time between two edits.
//!
//! Format, tidy and clippy look at the whole workspace. Unit and integration tests run for the
//! crates that have changed files, node cases for the operators that those files name.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::conformance;
use crate::python::Python;
use crate::summary::Summary;
use crate::workspace::{Workspace, capture};

/// Returns the files that differ from a revision, from the root: committed since, uncommitted, and
/// untracked.
pub(crate) fn changed_files(workspace: &Workspace, since: &str) -> Result<Vec<PathBuf>> {
    let git = |arguments: &[&str]| {
        let mut command = Command::new("git");
        capture(command.current_dir(&workspace.root).args(arguments)).context("git lists the changed files")
    };
    // Without renames, git lists both names of a file that was renamed. A revision that starts
    // with a dash is not taken for an option.
    let differing = git(&["diff", "--name-only", "--no-renames", "--end-of-options", since])?;
    let untracked = git(&["ls-files", "--others", "--exclude-standard"])?;
    Ok(differing.lines().chain(untracked.lines()).map(PathBuf::from).collect())
}

/// Returns the names of the crates that the files belong to. A crate in another one's folder is not
/// part of that.
pub(crate) fn changed_crates<'a>(workspace: &'a Workspace, files: &[PathBuf]) -> BTreeSet<&'a str> {
    let of = |file: &PathBuf| {
        let path = workspace.root.join(file);
        let above = workspace.packages.iter().filter(|package| path.starts_with(package.folder()));
        above.max_by_key(|package| package.folder().as_os_str().len()).map(|package| package.name.as_str())
    };
    files.iter().filter_map(of).collect()
}

/// Returns the words in double quotes of a text of Rust.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.lines().flat_map(|line| line.split('"').skip(1).step_by(2))
}

/// Returns the folders of the node cases that contain an operator whose name is a string in one of
/// the files. `index` has lines of a case, a tab, and its operators.
fn cases_of(index: &str, texts: &[String]) -> Vec<String> {
    let words: BTreeSet<&str> = texts.iter().flat_map(|text| quoted(text)).collect();
    let lines = index.lines().filter_map(|line| line.split_once('\t'));
    lines
        .filter(|(name, _)| name.starts_with("node/"))
        .filter(|(_, operators)| operators.split(' ').any(|operator| words.contains(operator)))
        .map(|(name, _)| name.to_owned())
        .collect()
}

/// Runs the node cases of the operators that the files name, on the CPU. Nothing runs without
/// Python, or if no file names an operator.
pub(crate) fn node_cases(workspace: &Workspace, files: &[PathBuf]) -> Result<Summary> {
    let is_rust = |file: &&PathBuf| file.extension().is_some_and(|extension| extension == "rs");
    // A removed file is among the changes, but cannot be read.
    let read = |file: &PathBuf| fs::read_to_string(workspace.root.join(file)).ok();
    let texts: Vec<String> = files.iter().filter(is_rust).filter_map(read).collect();
    if texts.is_empty() {
        return Ok(Summary::default());
    }
    if let Err(why) = Python::open(workspace) {
        println!("no node cases: {why:#}");
        return Ok(Summary::default());
    }
    let folder = conformance::dump(workspace)?;
    let index = folder.join("index.tsv");
    let index = fs::read_to_string(&index).with_context(|| format!("cannot read {}", index.display()))?;
    let cases = cases_of(&index, &texts);
    if cases.is_empty() {
        return Ok(Summary::default());
    }
    conformance::run_chosen(workspace, &folder, &cases)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::workspace::Package;

    #[test]
    fn a_file_belongs_to_the_innermost_crate() {
        let package = |name: &str, folder: &str| Package {
            name: name.to_owned(),
            manifest_path: Path::new("/root").join(folder).join("Cargo.toml"),
            ..Package::default()
        };
        let workspace = Workspace {
            root: PathBuf::from("/root"),
            target: PathBuf::new(),
            packages: vec![package("outer", "outer"), package("inner", "outer/inner")],
            ort: None,
        };
        let files = ["outer/src/lib.rs", "outer/inner/src/lib.rs", "README.md"].map(PathBuf::from);
        let cases: [(&[PathBuf], &[&str]); 4] = [
            (&files[..1], &["outer"]),
            (&files[1..2], &["inner"]),
            (&files[2..], &[]),
            (&files, &["inner", "outer"]),
        ];
        for (files, expected) in cases {
            let found: Vec<&str> = changed_crates(&workspace, files).into_iter().collect();
            assert_eq!(found, expected, "{files:?}");
        }
    }

    #[test]
    fn cases_are_those_of_quoted_operators() {
        let index = "node/test_relu\tRelu\nnode/test_two\tAdd Relu\nlight/big\tRelu\nnode/test_add\tAdd\n";
        let texts = ["..unary(\"Relu\", 14, |_| Ok(x()))\n// Add\n".to_owned()];
        assert_eq!(cases_of(index, &texts), ["node/test_relu", "node/test_two"]);
        assert!(cases_of(index, &[]).is_empty());
    }
}
