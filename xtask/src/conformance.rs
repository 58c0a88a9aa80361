//! `cargo xtask conformance`: the onnx package's test cases, against a list of known failures.
//!
//! The list must match exactly: a case that fails and is not listed fails the run, and so does a
//! listed one that passes.

mod device;
mod options;
mod outcomes;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::python::Python;
use crate::summary::Summary;
use crate::table;
use crate::workspace::{Workspace, run as run_command};
pub(crate) use options::ConformanceOptions;
use options::{CASES, SUITES};
use outcomes::{Line, REASON_LENGTH, bless, check_list, parse_line, read_list};
pub(crate) use outcomes::{Outcome, Verdict, count};

/// A process that prints nothing for this long is taken to hang. The slowest case takes seconds.
const PATIENCE: Duration = Duration::from_secs(120);

/// Runs the suites; an error if the list of known failures does not match exactly.
pub(crate) fn run(workspace: &Workspace, options: &ConformanceOptions) -> Result<Summary> {
    if options.library && !options.wgpu && !options.cuda {
        bail!("--library is of --wgpu and --cuda: the CPU's provider is in every program");
    }
    let cases = dump(workspace)?;
    if options.wgpu {
        return device::run(workspace, &device::WGPU, &cases, options);
    }
    if options.cuda {
        return device::run(workspace, &device::CUDA, &cases, options);
    }
    let ort = workspace.build_ort()?;
    let chosen = |suite: &&str| options.suites.is_empty() || options.suites.iter().any(|name| name == suite);
    let suites: Vec<&str> = SUITES.into_iter().filter(chosen).collect();

    let mut outcomes = Vec::new();
    for suite in &suites {
        let of_suite = run_suite((&ort, options.poisoned), &cases, suite)?;
        println!("{suite}: {}", count(&of_suite));
        outcomes.extend(of_suite);
    }
    let summary = count(&outcomes);
    // A dump that lost cases would pass otherwise.
    if options.suites.is_empty() && outcomes.len() != CASES {
        bail!("{} cases ran instead of {CASES}", outcomes.len());
    }
    print_operators(&cases, &outcomes)?;
    println!("all suites: {summary}");

    let path = workspace.own("conformance.ignore");
    let listed = read_list(&path)?;
    if options.bless {
        return bless(&path, &listed, &outcomes, &suites).map(|()| summary);
    }
    check_list("conformance.ignore", &listed, &outcomes, &suites)?;
    if suites.contains(&"node") && !options.poisoned {
        check_decompositions(workspace, &[cases.join("node")])?;
    }
    // A green run reports known failures as skipped tests.
    let skipped = summary.failed + summary.skipped;
    let closing = Summary { passed: summary.passed, skipped, ..Summary::default() };
    println!("{} cases fail as conformance.ignore says they do\n{closing}", closing.skipped);
    Ok(closing)
}

/// Runs cases, as `suite/case`, with the binary of the dev profile; an error if one fails that is
/// not in the list of known failures.
pub(crate) fn run_chosen(workspace: &Workspace, cases: &Path, names: &[String]) -> Result<Summary> {
    let ort = workspace.build_dev_ort()?;
    let folders: Vec<PathBuf> = names.iter().map(|name| cases.join(name)).collect();
    let known = read_list(&workspace.own("conformance.ignore"))?;
    let mut summary = Summary::default();
    for (case, verdict, why) in run_cases((&ort, false), &folders)? {
        match verdict {
            Verdict::Pass => summary.passed += 1,
            _ if known.contains_key(&format!("node/{case}")) => summary.skipped += 1,
            _ => {
                println!("FAIL {case}: {why}");
                summary.failed += 1;
            }
        }
    }
    println!("{} cases: {summary}", names.len());
    // A process that died reports fewer cases than it was given.
    if summary.failed > 0 || summary.passed + summary.skipped < names.len() {
        bail!("node cases failed");
    }
    Ok(summary)
}

/// Writes the cases to target/conformance, unless the same script and packages wrote them before.
pub(crate) fn dump(workspace: &Workspace) -> Result<PathBuf> {
    let folder = workspace.target.join("conformance");
    let made_by = fs::read_to_string(workspace.own("python/dump_cases.py"))?
        + &fs::read_to_string(workspace.own("python/requirements.txt"))?;
    let stamp = folder.join("made_by");
    if fs::read_to_string(&stamp).ok().as_ref() != Some(&made_by) {
        if folder.exists() {
            fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
        }
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        run_command(Python::open(workspace)?.script("dump_cases.py").arg(&folder))?;
        // Written last, so that an interrupted dump starts over.
        fs::write(&stamp, made_by)?;
    }
    Ok(folder)
}

/// Reruns, decomposed, the cases in these folders whose operators have both a kernel and a
/// decomposition.
pub(crate) fn check_decompositions(workspace: &Workspace, folders: &[PathBuf]) -> Result<()> {
    run_command(Command::new(workspace.build_example("decomposed_cases")?).args(folders))
}

/// Runs a suite in one process, or in several if cases kill it. Each new process continues with the
/// cases that have no outcome yet. If a process dies before its first outcome, its first case is
/// the culprit. `ort` is the binary and whether memory is poisoned.
pub(crate) fn run_suite(ort: (&Path, bool), cases: &Path, suite: &str) -> Result<Vec<Outcome>> {
    let folder = cases.join(suite);
    let place = format!("{}/", cases.display());
    let mut left = BTreeSet::new();
    for entry in fs::read_dir(&folder)? {
        left.insert(entry?.file_name().to_string_lossy().into_owned());
    }
    let mut outcomes = Vec::new();
    while !left.is_empty() {
        let folders: Vec<PathBuf> = left.iter().map(|name| folder.join(name)).collect();
        let before = left.len();
        for (name, verdict, why) in run_cases(ort, &folders)? {
            // Ignore a line that names no case, and a second line about the same case.
            if left.remove(&name) {
                // Messages name the model's file; drop the machine-specific folder from them.
                let why = why.replace(&place, "");
                outcomes.push(Outcome { name: format!("{suite}/{name}"), verdict, why });
            }
        }
        if left.len() == before
            && let Some(name) = left.pop_first()
        {
            // No case made progress, so fail the first one; otherwise the loop would not end.
            let why = "the process died or hung".to_owned();
            outcomes.push(Outcome { name: format!("{suite}/{name}"), verdict: Verdict::Fail, why });
        }
    }
    Ok(outcomes)
}

/// Runs `ort test FOLDER...` and parses its lines. A process that prints nothing for [`PATIENCE`]
/// is killed.
fn run_cases((ort, poisoned): (&Path, bool), folders: &[PathBuf]) -> Result<Vec<Line>> {
    let mut command = Command::new(ort);
    command.arg("test").args(folders).stdout(Stdio::piped()).stderr(Stdio::null());
    command.env("ORT_POISON_MEMORY", if poisoned { "1" } else { "0" });
    let mut child = command.spawn().context("cannot run ort test")?;
    let Some(output) = child.stdout.take() else { bail!("ort test has no output") };
    // A thread reads the lines, because reading a pipe has no timeout of its own.
    let (sender, receiver) = mpsc::channel();
    let reader = thread::spawn(move || {
        let lines = BufReader::new(output).lines().map_while(Result::ok);
        lines.map(|line| sender.send(line)).all(|sent| sent.is_ok())
    });
    let mut outcomes = Vec::new();
    loop {
        match receiver.recv_timeout(PATIENCE) {
            Ok(line) => outcomes.extend(parse_line(&line)),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                child.kill().context("cannot end the test process")?;
                break;
            }
        }
    }
    let status = child.wait()?;
    drop(reader);
    // Exit code 2 is a usage error; every other status may be a crash of a case.
    if status.code() == Some(2) {
        bail!("ort test refuses its command line");
    }
    Ok(outcomes)
}

/// Prints the operators behind the failures. A case of several operators is attributed to those of
/// them that never pass.
fn print_operators(cases: &Path, outcomes: &[Outcome]) -> Result<()> {
    let path = cases.join("index.tsv");
    let index = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let operators: BTreeMap<&str, Vec<&str>> = index
        .lines()
        .filter_map(|line| line.split_once('\t'))
        .map(|(name, operators)| (name, operators.split(' ').collect()))
        .collect();
    let of = |outcome: &Outcome| operators.get(outcome.name.as_str()).cloned().unwrap_or_default();
    let passing: BTreeSet<&str> =
        outcomes.iter().filter(|outcome| outcome.verdict == Verdict::Pass).flat_map(of).collect();

    let mut failures: BTreeMap<&str, (usize, &Outcome)> = BTreeMap::new();
    for outcome in outcomes.iter().filter(|outcome| outcome.verdict != Verdict::Pass) {
        let mut suspects = of(outcome);
        if suspects.len() > 1 {
            suspects.retain(|operator| !passing.contains(operator));
        }
        if suspects.is_empty() {
            suspects.push("(several)");
        }
        for operator in suspects {
            failures.entry(operator).or_insert((0, outcome)).0 += 1;
        }
    }
    if failures.is_empty() {
        return Ok(());
    }
    let mut rows: Vec<_> = failures.into_iter().collect();
    rows.sort_by_key(|(operator, (failed, _))| (std::cmp::Reverse(*failed), *operator));
    let mut table = table::new(&["operator", "failing", "ever passes", "first case", "why"]);
    for (operator, (failed, first)) in rows {
        let ever = if passing.contains(operator) { "yes" } else { "no" };
        let why = first.why.chars().take(REASON_LENGTH).collect::<String>();
        table.add_row([operator, &failed.to_string(), ever, &first.name, &why]);
    }
    println!("{table}");
    Ok(())
}
