//! The words that the style guide replaces, in comments and documents.

use super::code::without_comments_and_literals;
use super::source::{Finding, Repository, SourceFile};

/// The guide. Its second table has the words and what to write instead.
const GUIDE: &str = include_str!("../../../docs/style.md");

/// Where the rule does not hold: the guide itself has the table, and the changelog is history.
const EXEMPT: &[&str] = &["docs/style.md", "CHANGELOG.md"];

pub(super) fn applies(file: &SourceFile) -> bool {
    (file.has_extension("rs") || file.has_extension("md")) && !EXEMPT.contains(&file.path.as_str())
}

/// Finds words that the guide replaces. A phrase may break over two lines.
pub(super) fn check(file: &SourceFile, _: &Repository<'_>, findings: &mut Vec<Finding>) {
    let prose: Vec<String> = match file.has_extension("rs") {
        true => comments(&file.text),
        false => file.text.lines().map(words).collect(),
    };
    for (index, line) in prose.iter().enumerate() {
        let next = prose.get(index + 1).map_or("", String::as_str);
        // With a space on each side, a phrase matches whole words only.
        let both = format!(" {line} {next} ");
        for (bad, good) in replaced() {
            // What begins on the next line is found there.
            let is_found = both.find(&format!(" {bad} ")).is_some_and(|at| at <= line.len());
            if is_found && !line.is_empty() {
                let (path, line) = (file.path.clone(), index + 1);
                findings.push(Finding { path, line, what: format!("\"{bad}\": write {good}") });
            }
        }
    }
}

/// The rows of the guide's table of words.
fn replaced() -> impl Iterator<Item = (&'static str, &'static str)> {
    // The header and the row of dashes come before the words.
    let table = GUIDE.lines().skip_while(|line| !line.starts_with("| instead of |")).skip(2);
    table.filter_map(|row| row.trim_matches('|').split_once('|')).map(|(bad, good)| (bad.trim(), good.trim()))
}

/// By line, the words of its comment; empty for code.
fn comments(text: &str) -> Vec<String> {
    let code = without_comments_and_literals(text);
    let lines = text.lines().zip(code.lines());
    let comment = |(line, code): (&str, &str)| {
        let kept = code.trim_end();
        // A comment is blanked whole, a literal leaves code on both sides.
        line.get(kept.len()..)
            .and_then(|rest| rest.trim_start().strip_prefix("//"))
            .map_or_else(String::new, words)
    };
    lines.map(comment).collect()
}

/// The words of a text in lower case, one space between them, without punctuation.
fn words(text: &str) -> String {
    let is_part = |c: char| c.is_alphanumeric() || c == '-' || c == '\'';
    let parts = text.split(|c: char| !is_part(c)).filter(|part| !part.is_empty());
    parts.map(str::to_lowercase).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guide_has_its_table() {
        assert!(replaced().count() >= 10);
        assert!(replaced().all(|(bad, good)| !bad.is_empty() && !good.is_empty()));
    }

    #[test]
    fn words_are_found_in_comments_alone_and_over_line_ends() {
        let text = "//! Fine.\n\n/// None\n/// where it is.\nfn nobody() {}\n// Read by Nobody.\nlet x = \"nobody\";\n";
        let file = SourceFile { path: "ort-core/src/a.rs".to_owned(), text: text.to_owned() };
        let mut findings = Vec::new();
        check(&file, &Repository::default(), &mut findings);
        assert_eq!(findings.iter().map(|finding| finding.line).collect::<Vec<_>>(), [3, 6]);
    }
}
