//! Type names: a name stands for at most two things in a crate.

use std::collections::BTreeMap;

use super::code::without_comments_and_literals;
use super::source::{Finding, Repository, SourceFile};

/// The sources of the crates that the rule holds for.
const SOURCES: &[&str] = &[
    "ort-alloc/src/",
    "ort-build/src/",
    "ort-cli/src/",
    "ort-core/src/",
    "ort-ep-cpu/attention/src/",
    "ort-ep-cpu/contrib/src/",
    "ort-ep-cpu/conv/src/",
    "ort-ep-cpu/depthwise/src/",
    "ort-ep-cpu/elementwise/src/",
    "ort-ep-cpu/gemm/src/",
    "ort-ep-cpu/kernel/src/",
    "ort-ep-cpu/linalg/src/",
    "ort-ep-cpu/matmul/src/",
    "ort-ep-cpu/media/src/",
    "ort-ep-cpu/nn/src/",
    "ort-ep-cpu/reduce/src/",
    "ort-ep-cpu/src/",
    "ort-ep-cpu/threads/src/",
    "ort-ep-cpu/vector/src/",
    "ort-ep-cuda/src/",
    "ort-ep-wgpu/src/",
    "ort-generate/src/",
    "ort-gpu/src/",
    "ort-numpy/src/",
    "ort-quant/src/",
    "ort-report/src/",
    "ort-runtime/src/",
    "ort-testkit/src/",
    "ort-text/src/",
    "ort-train/src/",
    "xtask/src/",
];

const MOST: usize = 2;

pub(super) fn applies(file: &SourceFile) -> bool {
    // Once for each crate: at its root.
    SOURCES.iter().any(|source| matches!(file.path.strip_prefix(source), Some("lib.rs" | "main.rs")))
}

/// Finds the types of the crate with this root whose names are defined too often.
pub(super) fn check(root: &SourceFile, repository: &Repository<'_>, findings: &mut Vec<Finding>) {
    let (source, _) = root.path.rsplit_once('/').unwrap_or_default();
    let in_crate = |file: &&SourceFile| {
        file.has_extension("rs") && file.path.strip_prefix(source).is_some_and(|rest| rest.starts_with('/'))
    };
    let mut places = BTreeMap::<String, Vec<(&str, usize)>>::new();
    for file in repository.files.iter().filter(in_crate) {
        // An example in a comment defines no type.
        let code = without_comments_and_literals(&file.text);
        for (index, line) in code.lines().enumerate() {
            if let Some(name) = defined_type(line) {
                places.entry(name.to_owned()).or_default().push((&file.path, index + 1));
            }
        }
    }
    for (name, places) in places.iter().filter(|(_, places)| places.len() > MOST) {
        let what = format!("`{name}` is the name of {} types; the most is {MOST}", places.len());
        let finding = |(path, line): &(&str, usize)| Finding {
            path: (*path).to_owned(),
            line: *line,
            what: what.clone(),
        };
        findings.extend(places.iter().map(finding));
    }
}

/// The type that a line defines at the top level of its file.
fn defined_type(line: &str) -> Option<&str> {
    let item = match line.strip_prefix("pub") {
        // `pub(crate)` and the like.
        Some(rest) if rest.starts_with('(') => rest.split_once(") ")?.1,
        Some(rest) => rest.strip_prefix(' ')?,
        None => line,
    };
    let item = item.strip_prefix("unsafe ").unwrap_or(item);
    let name =
        ["struct ", "enum ", "trait ", "type ", "union "].iter().find_map(|kind| item.strip_prefix(kind))?;
    let end = name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len());
    name.get(..end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definitions_are_read_from_top_level_items() {
        let table = [
            ("struct Plan;", Some("Plan")),
            ("pub(in crate::a) enum Plan<T> {", Some("Plan")),
            ("pub unsafe trait Plan: Send {", Some("Plan")),
            ("pub type Plan = u8;", Some("Plan")),
            ("    type Output = u8;", None),
            ("fn plan() -> Plan {", None),
        ];
        for (line, name) in table {
            assert_eq!(defined_type(line), name, "{line}");
        }
    }

    #[test]
    fn a_third_definition_is_found() {
        let file =
            |path: &str| SourceFile { path: path.to_owned(), text: "//! A.\nstruct Plan;\n".to_owned() };
        let count = |files: &[SourceFile]| {
            let mut findings = Vec::new();
            let repository = Repository { files, ..Repository::default() };
            check(&files[0], &repository, &mut findings);
            findings.len()
        };
        let two = ["ort-train/src/lib.rs", "ort-train/src/a.rs", "ort-core/src/b.rs"].map(file);
        assert_eq!(count(&two), 0);
        let three = ["ort-train/src/lib.rs", "ort-train/src/a.rs", "ort-train/src/b/c.rs"].map(file);
        assert_eq!(count(&three), 3);
    }
}
