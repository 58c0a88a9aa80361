//! `cargo xtask python`: builds the wheel of the Python package, installs it, checks its types and
//! runs its tests.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context, Result, bail};

use crate::dist;
use crate::python::Python;
use crate::summary::{LeftOut, Summary};
use crate::workspace::{Workspace, describe, run as run_command};

/// The name of the stage in the summary.
const SUITE: &str = "Python package";

/// The package, its sources, its tests and its settings, from the repository's root.
const PACKAGE: &str = "ort_runtime";
const SOURCES: &str = "ort-py/python/ort_runtime";
const TESTS: &str = "ort-py/tests";
const SETTINGS: &str = "ort-py/pyproject.toml";

/// The native module, and what its stub may leave out.
const NATIVE: &str = "ort_runtime.capi.onnxruntime_pybind11_state";
const STUB_EXCEPTIONS: &str = "ort-py/stub_exceptions.txt";

/// What to test.
#[derive(clap::Args, Default)]
pub(crate) struct PythonOptions {
    /// Run the tests against this package instead, which shows where the two differ.
    #[arg(long, value_name = "PACKAGE", value_parser = ["onnxruntime"])]
    against: Option<String>,
    /// Arguments of pytest, with paths from the root. With any, types are not checked.
    #[arg(last = true, value_name = "ARGUMENTS")]
    pytest: Vec<String>,
}

impl PythonOptions {
    /// Tests our own package with these arguments.
    pub(crate) fn of_pytest(pytest: Vec<String>) -> PythonOptions {
        PythonOptions { against: None, pytest }
    }
}

/// Builds, installs, checks and tests the package; an error if a test fails.
pub(crate) fn run(workspace: &Workspace, options: &PythonOptions) -> Result<Summary> {
    run_in(workspace, options, &Python::open_for_package(workspace)?)
}

/// The stage of `cargo xtask test`, which is skipped if its tools cannot be installed.
pub(crate) fn stage(workspace: &Workspace) -> Result<Summary> {
    match Python::open_for_package(workspace) {
        Ok(python) => run_in(workspace, &PythonOptions::default(), &python),
        Err(why) => {
            let why = format!("maturin, mypy and pytest could not be installed: {why:#}");
            Ok(Summary::without(SUITE, count(workspace)?, &why))
        }
    }
}

/// Returns how many test functions there are. Most have a table of cases, which pytest counts each.
pub(crate) fn count(workspace: &Workspace) -> Result<usize> {
    count_in(&workspace.root.join(TESTS))
}

fn count_in(folder: &Path) -> Result<usize> {
    let mut count = 0;
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            count += count_in(&path)?;
        } else if path.extension().is_some_and(|extension| extension == "py") {
            let text =
                fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            count += text.lines().filter(|line| line.starts_with("def test_")).count();
        }
    }
    Ok(count)
}

/// Does the same in an environment.
pub(crate) fn run_in(workspace: &Workspace, options: &PythonOptions, python: &Python) -> Result<Summary> {
    if options.against.is_none() {
        let wheel = dist::build_wheel(workspace, python, &workspace.target.join("python_wheel"))?;
        python.install_wheels(&[wheel], None)?;
        if options.pytest.is_empty() {
            check_types(workspace, python)?;
        }
    }
    let summary = run_pytest(&mut pytest(workspace, options, python))?;
    println!("{summary}");
    Ok(summary)
}

/// Checks the types of the package's code, and its stub against the native module.
fn check_types(workspace: &Workspace, python: &Python) -> Result<()> {
    let mut mypy = python.module("mypy");
    mypy.current_dir(&workspace.root).args(["--config-file", SETTINGS, "--cache-dir"]);
    run_command(mypy.arg(workspace.target.join("mypy")).arg(SOURCES))?;
    let mut stubtest = python.module("mypy.stubtest");
    stubtest.current_dir(&workspace.root).args([NATIVE, "--concise", "--mypy-config-file", SETTINGS]);
    run_command(stubtest.args(["--allowlist", STUB_EXCEPTIONS, "--ignore-unused-allowlist"]))
}

/// Returns the command that runs the tests.
fn pytest(workspace: &Workspace, options: &PythonOptions, python: &Python) -> Command {
    let mut command = python.module("pytest");
    // `-r` lists what failed, and why tests are skipped. A cache of pytest's would be in the
    // working tree.
    command.current_dir(&workspace.root).args(["-q", "-rfEs", "-p", "no:cacheprovider"]);
    command.env("ORT_PACKAGE", options.against.as_deref().unwrap_or(PACKAGE));
    if !options.pytest.iter().any(|argument| is_path(&workspace.root, argument)) {
        command.arg(TESTS);
    }
    if options.pytest.is_empty() {
        // A process for each core, which takes tests from the others when it has none left.
        let cores = thread::available_parallelism().map_or(1, usize::from);
        command.args(["-n", &cores.to_string(), "--dist", "worksteal"]);
    }
    command.args(&options.pytest);
    command
}

/// Whether an argument of pytest is a path, with or without a test: `a/test_b.py::test_c`.
fn is_path(root: &Path, argument: &str) -> bool {
    let path = argument.split_once("::").map_or(argument, |(path, _)| path);
    // A word without a slash may be a value, such as that of `-k`.
    path.contains('/') && root.join(path).exists()
}

/// Runs pytest, passing its output through and reading its counts.
pub(crate) fn run_pytest(command: &mut Command) -> Result<Summary> {
    eprintln!("$ {}", describe(command));
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", describe(command)))?;
    let (mut counts, mut left_out) = (None, Vec::new());
    // Read to the end before waiting, so that the child cannot block on a full pipe.
    if let Some(output) = child.stdout.take() {
        for line in BufReader::new(output).lines() {
            let line = line?;
            println!("{line}");
            left_out.extend(LeftOut::from_pytest(SUITE, &line));
            counts = Summary::from_pytest(&line).or(counts);
        }
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("pytest failed ({status})");
    }
    let mut summary = counts.context("pytest printed no counts")?;
    left_out.into_iter().for_each(|tests| summary.list(tests));
    Ok(summary)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_with_an_existing_path_choose_the_tests() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("tests")).unwrap();
        fs::write(root.path().join("tests/test_a.py"), "def test_b(): ...\n\ndef test_c(): ...\n").unwrap();
        let cases = [
            ("tests/test_a.py", true),
            ("tests/test_a.py::test_b[1/2]", true),
            ("tests/", true),
            ("tests", false),
            ("tests/test_gone.py", false),
            ("-k", false),
            ("--durations=10", false),
        ];
        for (argument, expected) in cases {
            assert_eq!(is_path(root.path(), argument), expected, "{argument}");
        }
        assert_eq!(count_in(root.path()).unwrap(), 2);
    }
}
