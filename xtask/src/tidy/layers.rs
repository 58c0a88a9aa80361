//! The layering of `ort-core`: a folder may import from its own layer and from those below.

use super::code::without_comments_and_literals;
use super::source::{Finding, Repository, SourceFile};

const ROOT: &str = "ort-core/src/";

/// Folders and files of `ort-core/src`, the lowest layer first. Two in one layer may import each
/// other: a node refers to its operator's record, and the rewrite engine to the table of rules.
const LAYERS: &[&[&str]] = &[
    &["dim", "dtype", "files", "random", "seeded", "text"],
    &["error"],
    &["limits", "suggest"],
    &["interrupt"],
    &["tensor"],
    &["ir", "spec"],
    &["cache", "ops"],
    &["pass"],
    &["custom", "ep", "onnx"],
    &["rewrite", "rules"],
    &["program"],
    &["placement", "plan"],
    &["run"],
    &["session"],
];

pub(super) fn applies(file: &SourceFile) -> bool {
    file.has_extension("rs") && file.path.starts_with(ROOT) && file.path != "ort-core/src/lib.rs"
}

/// Finds imports from a higher layer, and folders that are in no layer.
pub(super) fn check(file: &SourceFile, _: &Repository<'_>, findings: &mut Vec<Finding>) {
    let inside = file.path.trim_start_matches(ROOT);
    // The layer of `run/frame.rs` is that of `run`, the layer of `files.rs` that of `files`.
    let own = inside.split(['/', '.']).next().unwrap_or(inside);
    let mut report = |line, what| findings.push(Finding { path: file.path.clone(), line, what });
    let Some(layer) = layer_of(own) else {
        return report(0, format!("`{own}` is in no layer: add it to xtask/src/tidy/layers.rs"));
    };
    // A module's unit tests may use any layer.
    let code = without_comments_and_literals(&file.text);
    let code = code.split("#[cfg(test)]\nmod tests").next().unwrap_or(&code);
    for (index, line) in code.lines().enumerate() {
        for name in imported(line) {
            if layer_of(name).is_some_and(|other| other > layer) {
                report(index + 1, format!("`{own}` imports from `{name}`, which is in a layer above it"));
            }
        }
    }
}

fn layer_of(name: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&name))
}

/// Returns the modules that a line names as `crate::name`.
fn imported(line: &str) -> impl Iterator<Item = &str> {
    let rest = line.split("crate::").skip(1);
    rest.map(|rest| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or(rest))
}
