//! Counts of tests, and the line that closes a run.

use std::fmt;
use std::ops::AddAssign;

/// How many tests passed, failed and were skipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Summary {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    pub(crate) skipped: usize,
}

impl Summary {
    /// The counts in a closing line of cargo's test runner, such as
    /// `test result: ok. 3 passed; 0 failed; 1 ignored; ...`, if the line is one.
    pub(crate) fn from_cargo(line: &str) -> Option<Self> {
        let counts = line.strip_prefix("test result: ")?;
        let count_of = |what: &str| {
            let words: Vec<&str> = counts.split([' ', ';']).filter(|word| !word.is_empty()).collect();
            let at = words.iter().position(|word| *word == what)?;
            words.get(at.checked_sub(1)?)?.parse().ok()
        };
        Some(Self { passed: count_of("passed")?, failed: count_of("failed")?, skipped: count_of("ignored")? })
    }
}

impl AddAssign for Summary {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_cargo_lines() {
        let line = "test result: FAILED. 31 passed; 2 failed; 1 ignored; 0 measured; 4 filtered out; finished in 0.10s";
        assert_eq!(Summary::from_cargo(line), Some(Summary { passed: 31, failed: 2, skipped: 1 }));
        for other in ["test tests::passed ... ok", "running 3 tests", "test result: ok."] {
            assert_eq!(Summary::from_cargo(other), None, "{other}");
        }
    }
}
