//! Outcomes of cases, and the lists of known failures that they must match.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::summary::Summary;

/// Reasons in the list are cut to this many characters.
pub(super) const REASON_LENGTH: usize = 100;

/// The outcome of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Pass,
    Fail,
    Skip,
}

/// A case's name without its suite, its verdict, and the reason.
pub(super) type Line = (String, Verdict, String);

#[derive(Debug)]
pub(crate) struct Outcome {
    /// `suite/case`.
    pub(crate) name: String,
    /// The outcome.
    pub(crate) verdict: Verdict,
    /// Why it did not pass.
    pub(crate) why: String,
}

/// Parses `PASS name`, `FAIL name: why` or `SKIP name: why`; returns `None` for any other line.
pub(super) fn parse_line(line: &str) -> Option<Line> {
    let (word, rest) = line.split_once(' ')?;
    let verdict = match word {
        "PASS" => Verdict::Pass,
        "FAIL" => Verdict::Fail,
        "SKIP" => Verdict::Skip,
        _ => return None,
    };
    let (name, why) = rest.split_once(": ").unwrap_or((rest, ""));
    // The name may be a path, whose last component is the case.
    let name = name.trim().trim_end_matches('/').rsplit(['/', '\\']).next()?;
    Some((name.to_owned(), verdict, why.trim().to_owned()))
}

/// Counts how many passed, failed and were skipped.
pub(crate) fn count(outcomes: &[Outcome]) -> Summary {
    let of = |verdict| outcomes.iter().filter(|outcome| outcome.verdict == verdict).count();
    Summary {
        passed: of(Verdict::Pass),
        failed: of(Verdict::Fail),
        skipped: of(Verdict::Skip),
        ..Summary::default()
    }
}

/// Reads the list: `suite/case  # reason` a line. A reason that starts with `random:` allows the
/// case to pass, too. A missing file is an empty list.
pub(super) fn read_list(path: &Path) -> Result<BTreeMap<String, String>> {
    if !path.exists() {
        return Ok(BTreeMap::new());
    }
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut list = BTreeMap::new();
    for line in text.lines() {
        let (name, reason) = line.split_once('#').unwrap_or((line, ""));
        let (name, reason) = (name.trim(), reason.trim());
        if name.is_empty() {
            continue;
        }
        if reason.is_empty() {
            bail!("{}: `{name}` has no reason", path.display());
        }
        if list.insert(name.to_owned(), reason.to_owned()).is_some() {
            bail!("{}: `{name}` is listed twice", path.display());
        }
    }
    Ok(list)
}

fn in_suites(name: &str, suites: &[&str]) -> bool {
    name.split_once('/').is_some_and(|(suite, _)| suites.contains(&suite))
}

/// Fails unless the list names exactly the cases that did not pass.
pub(super) fn check_list(
    file: &str,
    listed: &BTreeMap<String, String>,
    outcomes: &[Outcome],
    suites: &[&str],
) -> Result<()> {
    let mut wrong = Vec::new();
    for outcome in outcomes {
        let reason = listed.get(&outcome.name);
        // The outcome of a random draw may match by chance.
        let by_chance = reason.is_some_and(|reason| reason.starts_with("random:"));
        match (outcome.verdict, reason.is_some()) {
            (Verdict::Pass, true) if by_chance => {}
            (Verdict::Pass, true) => wrong.push(format!("{} passes: take it off the list", outcome.name)),
            (Verdict::Fail | Verdict::Skip, false) => {
                wrong.push(format!("{}: {}", outcome.name, outcome.why))
            }
            _ => {}
        }
    }
    let names: BTreeSet<&str> = outcomes.iter().map(|outcome| outcome.name.as_str()).collect();
    // A case that was renamed or removed must leave the list.
    for name in listed.keys().filter(|name| in_suites(name, suites) && !names.contains(name.as_str())) {
        wrong.push(format!("{name}: there is no such case"));
    }
    if wrong.is_empty() {
        return Ok(());
    }
    for line in &wrong {
        println!("WRONG {line}");
    }
    bail!("{} cases are not as {file} says", wrong.len())
}

/// Rewrites the list for the suites that ran; cases that are already listed keep their reasons.
pub(super) fn bless(
    path: &Path,
    listed: &BTreeMap<String, String>,
    outcomes: &[Outcome],
    suites: &[&str],
) -> Result<()> {
    let mut list: BTreeMap<&str, String> = listed
        .iter()
        // Suites that did not run keep their entries.
        .filter(|(name, _)| !in_suites(name, suites))
        .map(|(name, reason)| (name.as_str(), reason.clone()))
        .collect();
    for outcome in outcomes.iter().filter(|outcome| outcome.verdict != Verdict::Pass) {
        // In the list, `#` separates a name from its reason.
        let found: String = outcome.why.replace('#', "").chars().take(REASON_LENGTH).collect();
        let found =
            if found.trim().is_empty() { "no reason given".to_owned() } else { found.trim().to_owned() };
        list.insert(&outcome.name, listed.get(&outcome.name).cloned().unwrap_or(found));
    }
    let lines: String = list.iter().map(|(name, reason)| format!("{name}  # {reason}\n")).collect();
    fs::write(path, lines).with_context(|| format!("cannot write {}", path.display()))?;
    println!("wrote {} known failures", list.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_lines_of_a_run() {
        let table = [
            ("PASS test_abs", Some(("test_abs", Verdict::Pass, ""))),
            ("PASS cases/node/test_abs", Some(("test_abs", Verdict::Pass, ""))),
            (
                "FAIL test_abs: output 0: 3 of 4 differ",
                Some(("test_abs", Verdict::Fail, "output 0: 3 of 4 differ")),
            ),
            ("SKIP test_abs: no data", Some(("test_abs", Verdict::Skip, "no data"))),
            ("3 passed, 1 failed, 0 skipped", None),
            ("", None),
        ];
        for (line, expected) in table {
            let found = parse_line(line);
            let found = found.as_ref().map(|(name, verdict, why)| (name.as_str(), *verdict, why.as_str()));
            assert_eq!(found, expected, "{line}");
        }
    }

    #[test]
    fn the_list_must_be_exactly_right() {
        let outcome = |name: &str, verdict| Outcome { name: name.to_owned(), verdict, why: String::new() };
        let outcomes = [
            outcome("node/a", Verdict::Pass),
            outcome("node/b", Verdict::Fail),
            outcome("node/c", Verdict::Skip),
        ];
        let table: [(&[&str], bool); 6] = [
            (&["node/b", "node/c"], true),
            (&["node/b", "node/c", "light/x"], true),
            (&["node/b"], false),
            (&["node/c"], false),
            (&["node/a", "node/b", "node/c"], false),
            (&["node/b", "node/c", "node/gone"], false),
        ];
        for (names, right) in table {
            let listed = names.iter().map(|name| ((*name).to_owned(), "why".to_owned())).collect();
            assert_eq!(check_list("list", &listed, &outcomes, &["node"]).is_ok(), right, "{names:?}");
        }
    }
}
