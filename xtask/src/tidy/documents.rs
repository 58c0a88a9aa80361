//! Rules of documents: links and file names lead somewhere, identifiers exist, the book has all
//! pages.

use std::collections::HashSet;

use super::source::{Finding, Repository, SourceFile, report};

/// Extensions by which a name in a document is recognised as a file of the repository.
const FILE_EXTENSIONS: &[&str] = &["rs", "py", "toml", "json", "onnx", "npz", "txt", "md", "ignore"];

/// The contents of the book.
const CONTENTS: &str = "docs/SUMMARY.md";

/// Documents with names that are not in the code: what changed, and words to avoid.
const OTHER_NAMES: &[&str] = &["CHANGELOG.md", "docs/style.md"];

/// Names of other programs.
const FOREIGN_NAMES: &[&str] = &[
    "CUDNN_FMA_MATH",
    "MESA_SHADER_CACHE_DIR",
    "ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT",
    "cudnnFindConvolutionForwardAlgorithmEx",
    "implicit_convolve_sgemm",
];

pub(super) fn applies(file: &SourceFile) -> bool {
    file.has_extension("md")
}

pub(super) fn is_contents(file: &SourceFile) -> bool {
    file.path == CONTENTS
}

/// Finds links and file names in backticks that lead nowhere. A link may name a heading.
pub(super) fn links_lead_somewhere(
    file: &SourceFile,
    repository: &Repository<'_>,
    findings: &mut Vec<Finding>,
) {
    let folder = file.path.rsplit_once('/').map_or("", |(folder, _)| folder);
    for (index, line) in file.text.lines().enumerate() {
        let quoted = quoted(line).filter(|text| looks_like_file(text));
        let linked = line.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
        // Rules need no network, so links to other sites are not followed.
        let linked = linked
            .map(|(target, _)| target)
            .filter(|target| !target.contains("://") && !target.starts_with("mailto:"));
        for target in quoted.chain(linked) {
            let (name, anchor) = target.split_once('#').unwrap_or((target, ""));
            let path = if name.is_empty() { file.path.clone() } else { resolve(folder, name) };
            let has_anchor = anchor.is_empty() || repository.anchors.contains(&format!("{path}#{anchor}"));
            if !name.is_empty() && !exists(name, folder, &repository.paths) {
                report(findings, file, index + 1, format!("`{name}` is not in the repository"));
            } else if !has_anchor {
                report(findings, file, index + 1, format!("`{path}` has no heading `#{anchor}`"));
            }
        }
    }
}

/// Finds identifiers in backticks that are in no source file, such as those of renamed items.
pub(super) fn identifiers_exist(file: &SourceFile, repository: &Repository<'_>, findings: &mut Vec<Finding>) {
    if OTHER_NAMES.contains(&file.path.as_str()) {
        return;
    }
    for (index, line) in file.text.lines().enumerate() {
        for text in quoted(line).filter(|text| looks_like_identifier(text)) {
            let mut parts = text.trim_end_matches("()").split("::");
            let is_known = |part: &str| repository.words.contains(part) || FOREIGN_NAMES.contains(&part);
            if let Some(part) = parts.find(|part| !is_known(part)) {
                report(findings, file, index + 1, format!("`{part}` is in no source file"));
            }
        }
    }
}

/// Finds pages that the book's contents do not list.
pub(super) fn all_pages_are_listed(
    file: &SourceFile,
    repository: &Repository<'_>,
    findings: &mut Vec<Finding>,
) {
    let pages = repository.paths.iter().filter_map(|path| path.strip_prefix("docs/"));
    for page in pages.filter(|page| page.ends_with(".md") && *page != "SUMMARY.md") {
        if !file.text.contains(&format!("]({page})")) {
            report(findings, file, 0, format!("`{page}` is not listed"));
        }
    }
}

/// The anchors of a document's headings, as `path#anchor`.
pub(super) fn anchors(file: &SourceFile) -> impl Iterator<Item = String> + '_ {
    // A shell comment in a code block counts as a heading, too. That only allows more anchors.
    let headings = file.text.lines().filter(|line| line.starts_with('#'));
    headings.map(|heading| {
        // GitHub's rule: no punctuation, lower case, and a dash for each space.
        let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
        let heading: String = heading.trim_start_matches('#').trim().chars().filter(kept).collect();
        format!("{}#{}", file.path, heading.to_lowercase().replace(' ', "-"))
    })
}

/// The words of a source file, of which identifiers are made.
pub(super) fn words_of<'a>(text: &'a str, words: &mut HashSet<&'a str>) {
    words.extend(text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty()));
}

/// The texts in backticks of a line.
fn quoted(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// Whether text in backticks is a Rust path, a function or a type: `a_b`, `f()`, `Type`, `A::b`.
fn looks_like_identifier(text: &str) -> bool {
    let name = text.trim_end_matches("()");
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let is_path = name
        .split("::")
        .all(|part| part.starts_with(|c: char| c.is_ascii_alphabetic()) && part.chars().all(is_word));
    // Prose, commands and acronyms have one case: `cargo`, `GEMM`.
    let is_camel =
        name.chars().any(|c| c.is_ascii_uppercase()) && name.chars().any(|c| c.is_ascii_lowercase());
    is_path && (name.contains("::") || name.contains('_') || is_camel || text.ends_with("()"))
}

/// Whether text in backticks names a file that should exist: it has a folder, a known extension and
/// no placeholder.
fn looks_like_file(text: &str) -> bool {
    let extension = text.rsplit_once('.').map_or("", |(_, extension)| extension);
    text.contains('/')
        && FILE_EXTENSIONS.contains(&extension)
        && !text.contains([' ', '*', '<', '{', '$', '~', ':'])
        && !text.starts_with(['/', '.'])
        && !text.starts_with("target/")
}

/// Whether a file or folder with this name exists: from the root, from the document's folder, or as
/// a path suffix.
fn exists(name: &str, folder: &str, paths: &[String]) -> bool {
    let from_root = resolve("", name);
    let beside = resolve(folder, name);
    let matches = |path: &str| {
        let is = |wanted: &str| {
            path == wanted || path.strip_prefix(wanted).is_some_and(|rest| rest.starts_with('/'))
        };
        is(&from_root) || is(&beside) || path.ends_with(&format!("/{from_root}"))
    };
    paths.iter().any(|path| matches(path))
}

/// Resolves `name` relative to `folder`, removing `.` and `..`.
fn resolve(folder: &str, name: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in folder.split('/').chain(name.split('/')) {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            _ => parts.push(part),
        }
    }
    parts.join("/")
}
