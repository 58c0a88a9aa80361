//! Counts of tests, and the lines that close a run.

use std::fmt;
use std::ops::AddAssign;

/// How many tests passed, failed and were skipped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Summary {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    pub(crate) skipped: usize,
    /// The skipped tests that this machine lacks a requirement for.
    pub(crate) left_out: Vec<LeftOut>,
}

/// Tests that this machine lacks a requirement for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LeftOut {
    /// The suite, or the test binaries.
    pub(crate) suite: String,
    pub(crate) tests: usize,
    /// The reason, and what to install.
    pub(crate) why: String,
}

impl fmt::Display for LeftOut {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "skipped {}, {} tests: {}", self.suite, self.tests, self.why)
    }
}

impl LeftOut {
    /// Parses a line of pytest, such as `SKIPPED [2] tests/test_a.py:7: needs torch`; returns
    /// `None` for any other line.
    pub(crate) fn from_pytest(suite: &str, line: &str) -> Option<Self> {
        let (tests, place_and_why) = line.strip_prefix("SKIPPED [")?.split_once("] ")?;
        let (_, why) = place_and_why.split_once(": ")?;
        Some(Self { suite: suite.to_owned(), tests: tests.parse().ok()?, why: why.to_owned() })
    }
}

impl Summary {
    /// A suite that cannot run here.
    pub(crate) fn without(suite: &str, tests: usize, why: &str) -> Summary {
        let left_out = LeftOut { suite: suite.to_owned(), tests, why: why.to_owned() };
        Summary { skipped: tests, left_out: vec![left_out], ..Summary::default() }
    }

    /// Parses a closing line of cargo's test runner, such as `test result: ok. 3 passed; 0 failed;
    /// 1 ignored; ...`; returns `None` for any other line.
    pub(crate) fn from_cargo(line: &str) -> Option<Self> {
        let counts = line.strip_prefix("test result: ")?;
        let count_of = |what: &str| {
            let words: Vec<&str> = counts.split([' ', ';']).filter(|word| !word.is_empty()).collect();
            // Each count stands before its word, as in `3 passed`.
            let at = words.iter().position(|word| *word == what)?;
            words.get(at.checked_sub(1)?)?.parse().ok()
        };
        Some(Self {
            passed: count_of("passed")?,
            failed: count_of("failed")?,
            skipped: count_of("ignored")?,
            ..Self::default()
        })
    }

    /// Parses the closing line of pytest, such as `2 failed, 31 passed, 1 skipped in 4.10s`;
    /// returns `None` for any other line.
    pub(crate) fn from_pytest(line: &str) -> Option<Self> {
        // Without `-q` the line is centered between equals signs.
        let (counts, time) = line.trim_matches(['=', ' ']).rsplit_once(" in ")?;
        time.strip_suffix('s').or(time.strip_suffix(')'))?;
        let mut summary = Self::default();
        for count in counts.split(", ") {
            let (number, what) = count.split_once(' ')?;
            let number: usize = number.parse().ok()?;
            match what {
                "passed" => summary.passed += number,
                // An error is a test whose fixture failed.
                "failed" | "error" | "errors" => summary.failed += number,
                "skipped" => summary.skipped += number,
                // Warnings, and tests that the arguments deselect.
                _ => {}
            }
        }
        Some(summary)
    }

    /// Lists skipped tests, those of one suite and reason together. They are counted already.
    pub(crate) fn list(&mut self, left_out: LeftOut) {
        let is_alike = |found: &&mut LeftOut| found.suite == left_out.suite && found.why == left_out.why;
        match self.left_out.iter_mut().find(is_alike) {
            Some(found) => found.tests += left_out.tests,
            None => self.left_out.push(left_out),
        }
    }

    /// Moves a test from passed to skipped. It returned success, but printed that it did not run.
    /// Binaries that lack the same requirement are listed together.
    pub(crate) fn leave_out(&mut self, skipped: &SkippedTest) {
        // Cargo counted it as passed, because it returned success.
        self.passed = self.passed.saturating_sub(1);
        self.skipped += 1;
        let SkippedTest { program, why, .. } = skipped;
        match self.left_out.iter_mut().find(|found| found.why == *why) {
            Some(found) => {
                found.tests += 1;
                // One binary may have several such tests.
                if !found.suite.split(", ").any(|name| name == program) {
                    found.suite += &format!(", {program}");
                }
            }
            None => self.left_out.push(LeftOut { suite: program.clone(), tests: 1, why: why.clone() }),
        }
    }
}

/// A test that reports that it does not run, on a line `SKIPPED PROGRAM::TEST: WHY`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SkippedTest {
    program: String,
    test: String,
    why: String,
}

impl SkippedTest {
    pub(crate) fn from_line(line: &str) -> Option<Self> {
        let (name, why) = line.strip_prefix("SKIPPED ")?.split_once(": ")?;
        let (program, test) = name.split_once("::")?;
        Some(Self { program: program.to_owned(), test: test.to_owned(), why: why.to_owned() })
    }

    /// Whether both are the same test, because a test may print the line several times.
    pub(crate) fn is_of(&self, other: &Self) -> bool {
        (&self.program, &self.test) == (&other.program, &other.test)
    }
}

impl AddAssign for Summary {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.left_out.extend(other.left_out);
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for left_out in &self.left_out {
            writeln!(formatter, "{left_out}")?;
        }
        write!(formatter, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_cargo_lines() {
        let line = "test result: FAILED. 31 passed; 2 failed; 1 ignored; 0 measured; 4 filtered out; finished in 0.10s";
        let counts = Summary { passed: 31, failed: 2, skipped: 1, ..Summary::default() };
        assert_eq!(Summary::from_cargo(line), Some(counts));
        for other in ["test tests::passed ... ok", "running 3 tests", "test result: ok."] {
            assert_eq!(Summary::from_cargo(other), None, "{other}");
        }
    }

    #[test]
    fn reads_the_lines_of_pytest() {
        let counts = Summary { passed: 31, failed: 3, skipped: 4, ..Summary::default() };
        let lines = [
            "2 failed, 31 passed, 4 skipped, 5 deselected, 7 warnings, 1 error in 4.10s",
            "==== 3 failed, 31 passed, 4 skipped in 94.10s (0:01:34) ====",
        ];
        for line in lines {
            assert_eq!(Summary::from_pytest(line), Some(counts.clone()), "{line}");
        }
        for other in ["no tests ran in 0.01s", "7 passed", "SKIPPED [1] a.py:3: in 4s", "......... [ 12%]"] {
            assert_eq!(Summary::from_pytest(other), None, "{other}");
        }
        let mut summary = counts;
        for line in ["SKIPPED [3] a/test_b.py:7: needs torch", "SKIPPED [1] a/test_c.py: needs torch"] {
            summary.list(LeftOut::from_pytest("Python", line).unwrap());
        }
        assert_eq!(
            summary.to_string(),
            "skipped Python, 4 tests: needs torch\n31 passed, 3 failed, 4 skipped"
        );
        assert_eq!(LeftOut::from_pytest("Python", "FAILED a/test_b.py::test: wrong"), None);
    }

    #[test]
    fn tests_that_did_not_run_have_not_passed() {
        let lines = [
            "SKIPPED device::runs: no adapter; install a driver",
            "SKIPPED conv::pools::small: no adapter; install a driver",
            "SKIPPED device::options: no adapter; install a driver",
            "SKIPPED cases::all: no Python",
        ];
        let mut summary = Summary { passed: 9, ..Summary::default() };
        let found: Vec<SkippedTest> = lines.into_iter().filter_map(SkippedTest::from_line).collect();
        assert!(found.len() == 4 && found[0].is_of(&found[0].clone()) && !found[0].is_of(&found[2]));
        found.iter().for_each(|skipped| summary.leave_out(skipped));
        summary += Summary::without("conformance", 7, "no Python either");
        let closing = "skipped device, conv, 3 tests: no adapter; install a driver\n\
            skipped cases, 1 tests: no Python\n\
            skipped conformance, 7 tests: no Python either\n\
            5 passed, 0 failed, 11 skipped";
        assert_eq!(summary.to_string(), closing);
        for other in ["test a ... ok", "SKIPPED a: b", "SKIPPED a::b", ""] {
            assert_eq!(SkippedTest::from_line(other), None, "{other}");
        }
    }
}
