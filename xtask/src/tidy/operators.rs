//! The rule that providers find elementwise operators by the formulas of their records. A name of
//! one may stand only where a kernel is defined: elsewhere, it would be a list to extend for each
//! new operator.

use std::collections::HashSet;

use super::code::{lines_without_tests, string_literals, without_comments_and_literals};
use super::source::{Finding, Repository, SourceFile, report};

/// Files in which such a name is not that of a node's operator, and what it names there.
const OTHER_MEANINGS: &[(&str, &str)] = &[
    ("ort-ep-cpu/nn/src/nn/gru.rs", "a default of the attribute `activations`"),
    ("ort-ep-cpu/nn/src/nn/lstm.rs", "a default of the attribute `activations`"),
    ("ort-ep-cpu/nn/src/nn/rnn.rs", "a default of the attribute `activations`"),
    ("ort-ep-cuda/src/kernels/conv/dnn.rs", "the activation that cuDNN fuses"),
    ("ort-ep-cuda/src/kernels/gemm/lt.rs", "an activation that cuBLASLt fuses"),
    ("ort-ep-wgpu/src/kernels/recurrent_cells.rs", "a default of the attribute `activations`"),
];

pub(super) fn applies(file: &SourceFile) -> bool {
    let is_provider = file.path.starts_with("ort-ep-") && file.path.contains("/src/");
    let is_tests = file.path.ends_with("tests.rs") || file.path.contains("/tests/");
    let has_other_meaning = OTHER_MEANINGS.iter().any(|(path, _)| *path == file.path);
    is_provider && file.has_extension("rs") && !is_tests && !has_other_meaning
}

pub(super) fn check(file: &SourceFile, repository: &Repository, findings: &mut Vec<Finding>) {
    let code: Vec<char> = without_comments_and_literals(&file.text).chars().collect();
    let last = lines_without_tests(&file.text);
    for (start, name) in string_literals(&file.text) {
        // `start` counts characters, and so does `code`.
        let line = 1 + code[..start].iter().filter(|c| **c == '\n').count();
        // Unit tests name operators to build graphs of them.
        if line <= last
            && repository.elementwise.contains(&name)
            && !before(&code, start).ends_with("op:")
            && !is_registered(&code, start)
        {
            let what = format!("`{name}` outside of a `KernelDef`: use the formula of the record instead");
            report(findings, file, line, what);
        }
    }
}

/// Adds the names of the operators whose records a file has, if some of them have formulas.
pub(super) fn names_of(file: &SourceFile, names: &mut HashSet<String>) {
    let has_formulas =
        ["scalar: Some(", "..unary(", "fold: Some("].iter().any(|text| file.text.contains(text));
    if !file.path.starts_with("ort-core/src/ops/") || !has_formulas {
        return;
    }
    let code: Vec<char> = without_comments_and_literals(&file.text).chars().collect();
    for (start, name) in string_literals(&file.text) {
        let before = before(&code, start);
        // A record has its name as a field, or passes it to the function that makes the record.
        let call = before.strip_suffix('(').map(|call| call.trim_end_matches(is_part_of_word).trim_end());
        let is_record = before.ends_with("name:")
            || call.is_some_and(|before| before.ends_with("..") || before.ends_with('='));
        if is_record && name.starts_with(|c: char| c.is_ascii_uppercase()) {
            names.insert(name);
        }
    }
}

fn is_part_of_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Returns some of the code before a position, without the space at its end.
fn before(code: &[char], at: usize) -> String {
    // The callers look at the last words before a literal, so 100 characters suffice.
    let text: String = code[at.saturating_sub(100)..at].iter().collect();
    text.trim_end().to_owned()
}

/// Whether a position is within a macro that registers kernels, such as `cpu_kernels![...]`.
fn is_registered(code: &[char], at: usize) -> bool {
    let opening: Vec<char> = "_kernels![".chars().collect();
    let mut starts = (0..at).filter(|start| code[*start..].starts_with(&opening));
    starts.next_back().is_some_and(|start| {
        let mut depth = 0i32;
        // The first bracket opens the macro; its end is where the depth returns to 0.
        code[start + opening.len() - 1..at].iter().all(|c| {
            match c {
                '[' | '(' | '{' => depth += 1,
                ']' | ')' | '}' => depth -= 1,
                _ => {}
            }
            depth > 0
        })
    })
}
