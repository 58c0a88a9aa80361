//! Parameters: no function takes a seventh value, and a tuple hides none.
//!
//! Clippy's lint counts a tuple as one parameter, whatever it packs, and `self` as another, so its
//! limit is 7. A struct names its fields.

use super::code::without_comments_and_literals;
use super::source::{Finding, Repository, SourceFile, report};

/// The crates that the rule holds for.
const CRATES: &[&str] = &[
    "ort-alloc/",
    "ort-build/",
    "ort-capi/",
    "ort-cli/",
    "ort-core/",
    "ort-ep-cpu/",
    "ort-ep-cuda/",
    "ort-ep-wgpu/",
    "ort-generate/",
    "ort-gpu/",
    "ort-numpy/",
    "ort-quant/",
    "ort-report/",
    "ort-runtime/",
    "ort-testkit/",
    "ort-text/",
    "ort-train/",
    "xtask/",
];

const MOST: usize = 6;

pub(super) fn applies(file: &SourceFile) -> bool {
    file.has_extension("rs") && CRATES.iter().any(|name| file.path.starts_with(name))
}

/// Finds functions that take more values than [`MOST`], `self` apart.
pub(super) fn check(file: &SourceFile, _: &Repository<'_>, findings: &mut Vec<Finding>) {
    let code = without_comments_and_literals(&file.text);
    for (start, _) in code.match_indices("fn ") {
        // These letters may be the end of a longer name.
        if code[..start].ends_with(|c: char| c.is_alphanumeric() || c == '_') {
            continue;
        }
        let function = &code[start..];
        // A function of a C library takes what the library declares. Its name is in camel case, or
        // a parameter of a macro.
        let name = function.split(['(', '<']).next().unwrap_or(function);
        if name.contains(|c: char| c.is_ascii_uppercase() || c == '$') {
            continue;
        }
        let Some(parameters) = parameters(function) else { continue };
        let count: usize = parameters.iter().map(|parameter| values_of(parameter)).sum();
        if count > MOST {
            let line = code[..start].matches('\n').count() + 1;
            report(
                findings,
                file,
                line,
                format!("{count} parameters, tuples counted by value; the most is {MOST}, or a struct"),
            );
        }
    }
}

/// The parameters of the function at the start of `code`, without `self`.
fn parameters(code: &str) -> Option<Vec<&str>> {
    let name_end = code.find(['(', '<'])?;
    // Bounds of generics may have parentheses, as `F: Fn(u32)` has.
    let generics = match code[name_end..].starts_with('<') {
        true => name_end + enclosed(&code[name_end..])?.len() + 2,
        false => name_end,
    };
    let list = code.get(generics..)?.strip_prefix('(').and_then(|_| enclosed(&code[generics..]))?;
    let is_self = |parameter: &str| parameter.split([':', ' ', '&']).any(|word| word == "self");
    Some(split(list).filter(|parameter| !is_self(parameter)).collect())
}

/// The number of values in a parameter: more than 1 if its pattern or its type is a tuple.
fn values_of(parameter: &str) -> usize {
    let tuple = |text: &str| {
        let text = text.trim_start_matches(['&', ' ']);
        let text = text.strip_prefix("mut ").unwrap_or(text);
        // The unit type counts as one value.
        text.starts_with('(').then(|| enclosed(text).map_or(1, |list| split(list).count().max(1)))
    };
    let ty = parameter.split_once(": ").map_or("", |(_, ty)| ty);
    tuple(parameter).or_else(|| tuple(ty)).unwrap_or(1)
}

/// The text between the bracket that `code` starts with and its counterpart.
fn enclosed(code: &str) -> Option<&str> {
    let mut depth = 0usize;
    let mut before = ' ';
    for (at, character) in code.char_indices() {
        match character {
            '(' | '[' | '{' | '<' => depth += 1,
            // The arrow of a function type closes nothing.
            '>' if before == '-' || before == '=' => {}
            ')' | ']' | '}' | '>' => depth = depth.checked_sub(1)?,
            _ => {}
        }
        if depth == 0 {
            return code.get(1..at);
        }
        before = character;
    }
    None
}

/// Splits a list at its commas, except those inside brackets.
fn split(list: &str) -> impl Iterator<Item = &str> {
    let mut rest = list;
    let items = std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let (mut depth, mut before) = (0usize, ' ');
        let end = rest.find(|character: char| {
            let is_arrow = character == '>' && (before == '-' || before == '=');
            match character {
                '(' | '[' | '{' | '<' => depth += 1,
                ')' | ']' | '}' | '>' if !is_arrow => depth = depth.saturating_sub(1),
                _ => {}
            }
            before = character;
            character == ',' && depth == 0
        });
        let (item, others) = rest.split_at(end.unwrap_or(rest.len()));
        rest = others.get(1..).unwrap_or("");
        Some(item.trim())
    });
    items.filter(|item| !item.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_in_tuples_are_counted() {
        let table = [
            ("fn f(a: u8, b: u8) {}", 2),
            ("fn f(&self, (a, b): (u8, u8), c: Vec<(u8, u8)>) {}", 3),
            ("fn f<T: Fn(u8) -> u8, const N: usize>(a: [T; N], pair: &(u8, u8, u8),) {}", 4),
            ("fn f(run: impl FnOnce(u8, u8) -> u8, (): (), _: fn(u8) -> (u8, u8)) {}", 3),
            ("fn f((a, [b, c]): (u8, [u8; 2])) {}", 2),
        ];
        for (code, count) in table {
            let found = parameters(code).map(|list| list.into_iter().map(values_of).sum::<usize>());
            assert_eq!(found, Some(count), "{code}");
        }
    }

    #[test]
    fn seven_values_are_too_many() {
        let table = [
            ("fn f(a: u8, b: u8, c: u8, d: u8, e: u8, (f, g): (u8, u8)) {}\n", vec![1]),
            ("fn f(a: u8, b: u8, c: u8, d: u8, (f, g): (u8, u8)) {}\n", vec![]),
            ("fn f(a: u8, b: u8, c: u8, d: u8, e: u8, f: u8, g: u8) {}\n", vec![1]),
            ("fn f(&self, a: u8, b: u8, c: u8, d: u8, e: u8, f: u8) {}\n", vec![]),
            ("fn cuF(a: u8, b: u8, c: u8, d: u8, e: u8, f: u8, g: u8);\n", vec![]),
        ];
        for (text, lines) in table {
            let file = SourceFile { path: "ort-core/src/a.rs".to_owned(), text: text.to_owned() };
            let mut findings = Vec::new();
            check(&file, &Repository::default(), &mut findings);
            assert_eq!(findings.iter().map(|finding| finding.line).collect::<Vec<_>>(), lines, "{text}");
        }
    }
}
