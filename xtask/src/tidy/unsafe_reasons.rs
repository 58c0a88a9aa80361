//! The rule that each unsafe function states its contract in a `# Safety` section.
//!
//! A method of a trait implementation has the contract of its trait. The methods of a trait may
//! share the section of the trait.

use super::source::{Finding, Repository, SourceFile, report};

/// The starts of lines that may stand between a function and the end of its doc comment.
const ATTRIBUTES: [&str; 4] = ["#[", "$(#", ")]", "// "];

pub(super) fn applies(file: &SourceFile) -> bool {
    // The tests of the rules have samples of unsafe code in strings.
    file.has_extension("rs") && !file.path.starts_with("xtask/src/tidy/")
}

pub(super) fn check(file: &SourceFile, _: &Repository<'_>, findings: &mut Vec<Finding>) {
    let lines: Vec<&str> = file.text.lines().collect();
    for (index, line) in lines.iter().enumerate().filter(|(_, line)| is_unsafe_function(line)) {
        let around = enclosing(&lines, index);
        let is_of_trait = around.is_some_and(|item| {
            let line = lines[item].trim_start();
            line.starts_with("impl") && line.contains(" for ") || has_section(&lines, item)
        });
        if !is_of_trait && !has_section(&lines, index) {
            let name = line.split("fn ").nth(1).and_then(|rest| rest.split(['(', '<']).next());
            let name = name.unwrap_or_default();
            report(
                findings,
                file,
                index + 1,
                format!("'{name}' is unsafe; a `# Safety` section says when it may be called"),
            );
        }
    }
}

/// Whether a line begins an unsafe function with a name. The type of a function has none.
fn is_unsafe_function(line: &str) -> bool {
    let line = line.trim_start();
    let Some((before, rest)) = line.split_once("unsafe ") else { return false };
    let rest = rest.strip_prefix("extern \"C\" ").unwrap_or(rest);
    let is_item = before.is_empty() || before == "const " || before.starts_with("pub");
    is_item && rest.strip_prefix("fn ").is_some_and(|name| !name.starts_with('('))
}

/// Returns the line of the `impl` or `trait` around a line: the nearest one above with a smaller
/// indentation, as rustfmt lays it out.
fn enclosing(lines: &[&str], index: usize) -> Option<usize> {
    let indentation = |line: &str| line.len() - line.trim_start().len();
    let own = indentation(lines[index]);
    let is_around = |line: &str| {
        let item = line.trim_start().trim_start_matches("pub ").trim_start_matches("pub(crate) ");
        let item = item.trim_start_matches("pub(super) ").trim_start_matches("unsafe ");
        indentation(line) < own && (item.starts_with("impl") || item.starts_with("trait "))
    };
    (0..index).rev().find(|&at| is_around(lines[at]))
}

/// Whether the doc comment above a line has a section on safety.
fn has_section(lines: &[&str], index: usize) -> bool {
    let above = lines[..index].iter().rev().map(|line| line.trim_start());
    let mut above = above
        .take_while(|line| line.starts_with("///") || ATTRIBUTES.iter().any(|start| line.starts_with(start)));
    above.any(|line| line == "/// # Safety")
}
