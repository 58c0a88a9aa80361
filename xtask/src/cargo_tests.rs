//! Running `cargo test` and test programs, and counting their tests.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::summary::{SkippedTest, Summary};
use crate::workspace::describe;

/// How many test programs run at once. Many have one long test that leaves cores idle.
const AT_ONCE: usize = 2;

/// A test program.
pub(crate) struct TestProgram {
    /// The name of its target.
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    /// The folder of its package. Cargo runs a test there, and relative paths in tests rely on it.
    pub(crate) folder: PathBuf,
}

/// Runs a test command, passing its output through and adding up its counts.
pub(crate) fn run_tests(command: &mut Command) -> Result<Summary> {
    eprintln!("$ {}", describe(command));
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", describe(command)))?;
    let mut counter = Counter::default();
    // Read to the end before waiting, so that the child cannot block on a full pipe.
    if let Some(output) = child.stdout.take() {
        for line in BufReader::new(output).lines() {
            let line = line?;
            println!("{line}");
            counter.read(&line);
        }
    }
    let summary = counter.summary();
    let status = child.wait()?;
    if !status.success() {
        bail!("{summary} ({status})");
    }
    Ok(summary)
}

/// Runs test programs with environment variables, [`AT_ONCE`] at a time, and adds up their counts.
/// The test threads of a program are its share of the cores, unless the caller chose their number.
/// What a program prints follows when it has ended.
pub(crate) fn run_programs(programs: &[TestProgram], variables: &[(&str, &str)]) -> Result<Summary> {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let threads = std::env::var("RUST_TEST_THREADS").unwrap_or_else(|_| cores.div_ceil(AT_ONCE).to_string());
    let (next, total) = (AtomicUsize::new(0), Mutex::new((Summary::default(), Vec::new())));
    let work = || {
        while let Some(program) = programs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let start = Instant::now();
            let mut command = Command::new(&program.path);
            command.current_dir(&program.folder).envs(variables.iter().copied());
            let ended = command.env("RUST_TEST_THREADS", &threads).output();
            let (summary, failed) = &mut *total.lock().unwrap_or_else(PoisonError::into_inner);
            println!("== {} of {}", program.name, program.folder.display());
            match ended {
                Ok(output) => {
                    *summary += print_and_count(&output);
                    if !output.status.success() {
                        failed.push(format!(
                            "{} of {} ({})",
                            program.name,
                            program.folder.display(),
                            output.status
                        ));
                    }
                }
                Err(problem) => failed.push(format!("{}: {problem}", describe(&command))),
            }
            println!("== {}: {:.1} s", program.name, start.elapsed().as_secs_f64());
        }
    };
    thread::scope(|scope| {
        (0..AT_ONCE).for_each(|_| {
            scope.spawn(work);
        });
    });
    let (summary, failed) = total.into_inner().unwrap_or_else(PoisonError::into_inner);
    if !failed.is_empty() {
        bail!("{summary}\nfailed: {}", failed.join(", "));
    }
    Ok(summary)
}

/// Prints the output of a test program; returns the counts in it.
fn print_and_count(output: &Output) -> Summary {
    let mut counter = Counter::default();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        println!("{line}");
        counter.read(line);
    }
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    counter.summary()
}

/// Counts the tests in the output of a test command.
#[derive(Default)]
struct Counter {
    summary: Summary,
    skipped: Vec<SkippedTest>,
}

impl Counter {
    fn read(&mut self, line: &str) {
        if let Some(counts) = Summary::from_cargo(line) {
            self.summary += counts;
        }
        if let Some(test) = SkippedTest::from_line(line)
            && !self.skipped.iter().any(|known| known.is_of(&test))
        {
            self.skipped.push(test);
        }
    }

    fn summary(mut self) -> Summary {
        self.skipped.iter().for_each(|test| self.summary.leave_out(test));
        self.summary
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn programs_that_fail_are_named_after_all_have_run() {
        let program = |name: &str| TestProgram {
            name: name.to_owned(),
            path: PathBuf::from("/bin/sh"),
            folder: PathBuf::from("/"),
        };
        let fine = run_programs(&[program("one"), program("two"), program("three")], &[("LANG", "C")]);
        assert_eq!(fine.unwrap(), Summary::default());
        let missing = TestProgram { path: PathBuf::from("/bin/none such"), ..program("four") };
        let problem = run_programs(&[missing, program("five")], &[]).unwrap_err().to_string();
        assert!(problem.contains("0 passed") && problem.contains("none such"), "{problem}");
    }

    #[test]
    fn a_test_that_prints_that_it_is_skipped_twice_counts_once() {
        let mut counter = Counter::default();
        let lines = [
            "SKIPPED device::runs: no adapter",
            "SKIPPED device::runs: no adapter",
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out",
        ];
        lines.iter().for_each(|line| counter.read(line));
        let Summary { passed, failed, skipped, .. } = counter.summary();
        assert_eq!((passed, failed, skipped), (2, 0, 2));
    }
}
