//! `cargo xtask test`: everything that must hold, what fails early first.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::artifacts::artifacts;
use crate::python::Python;
use crate::summary::Summary;
use crate::workspace::{Workspace, capture, describe, run as run_command};
use crate::{
    compare, conformance, cuda_kernels, fuzz_models, header, memory, models, ops, reference, soak, tidy,
};

/// The folders of the crates whose tests see results of the CPU's kernels.
const ON_CPU_KERNELS: [&str; 6] =
    ["ort-core", "ort-ep-cpu", "ort-runtime", "ort-train", "ort-testkit", "ort-cli"];

/// A suite that needs Python, and how many tests it has.
struct PythonSuite {
    name: &'static str,
    tests: usize,
}

/// Runs all of it; the first suite that fails ends the run.
pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let mut summary = Summary::default();
    stage("format", || run_command(workspace.cargo().args(["fmt", "--all", "--check"])))?;
    stage("tidy", || tidy::run(workspace))?;
    stage("clippy", || {
        run_command(workspace.cargo().args([
            "clippy",
            "--quiet",
            "--workspace",
            "--all-targets",
            "--",
            "-D",
            "warnings",
        ]))
    })?;
    stage("documentation", || {
        let mut command = workspace.cargo();
        run_command(
            command.args(["doc", "--quiet", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "-Dwarnings"),
        )
    })?;
    summary += stage("unit tests", || unit_tests(workspace))?;
    if has_avx512() {
        // What holds for the widest vectors alone would fail where others have narrower ones.
        summary += stage("unit tests, AVX2", || unit_tests_on_avx2(workspace))?;
    }
    stage("operators", || ops::run(workspace, &ops::Options { check: true }))?;
    stage("header", || header::run(workspace, &header::Options { check: true }))?;
    stage("CUDA kernels", || {
        cuda_kernels::run(
            workspace,
            &cuda_kernels::Options { check: true, ..cuda_kernels::Options::default() },
        )
    })?;
    stage("build", || workspace.build_ort())?;
    match Python::open(workspace) {
        Ok(_) => {
            stage("models", || models::run(workspace, &models::Options::default()))?;
            summary +=
                stage("conformance", || conformance::run(workspace, &conformance::Options::default()))?;
            let poisoned = conformance::Options { poisoned: true, ..conformance::Options::default() };
            summary += stage("conformance, poisoned", || conformance::run(workspace, &poisoned))?;
            let on_wgpu = conformance::Options { wgpu: true, ..conformance::Options::default() };
            summary += stage("conformance, wgpu", || conformance::run(workspace, &on_wgpu))?;
            let as_library =
                conformance::Options { wgpu: true, library: true, ..conformance::Options::default() };
            summary += stage("conformance, wgpu as a library", || conformance::run(workspace, &as_library))?;
            let minimum = conformance::Options { minimum_limits: true, ..on_wgpu };
            summary += stage("conformance, wgpu, minimum limits", || conformance::run(workspace, &minimum))?;
            let on_cuda = conformance::Options { cuda: true, ..conformance::Options::default() };
            summary += stage("conformance, cuda", || conformance::run(workspace, &on_cuda))?;
            let as_library = conformance::Options { library: true, ..on_cuda };
            summary += stage("conformance, cuda as a library", || conformance::run(workspace, &as_library))?;
            summary += stage("reference", || reference::run(workspace, &reference::Options::default()))?;
            summary += stage("compare", || compare::run(workspace, &compare::Options::default()))?;
            summary += stage("compare, wgpu", || compare::run(workspace, &compare::Options::on_wgpu()))?;
            summary += stage("compare, cuda", || compare::run(workspace, &compare::Options::on_cuda()))?;
            summary += stage("compare, cuda, channels last", || {
                compare::run(workspace, &compare::Options::on_cuda_with_channels_last())
            })?;
            summary += stage("memory", || memory::run(workspace, &memory::Options::default()))?;
            summary += stage("soak", || soak::run(workspace, &soak::Options::short()))?;
            summary +=
                stage("random models", || fuzz_models::run(workspace, &fuzz_models::Options::short()))?;
        }
        Err(why) => summary += skip_python_suites(workspace, &why)?,
    }
    println!("{summary}");
    Ok(())
}

fn stage<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    eprintln!("== {name}");
    let start = Instant::now();
    let result = work().with_context(|| name.to_owned())?;
    eprintln!("== {name}: fine, {:.0} s", start.elapsed().as_secs_f64());
    Ok(result)
}

/// Says which suites do not run. In CI that is a failure: there the whole must run.
fn skip_python_suites(workspace: &Workspace, why: &anyhow::Error) -> Result<Summary> {
    let cases = compare::chosen_cases(&compare::Cases::standard(workspace), &[])?.len();
    let on_wgpu = compare::cases_of(workspace, &compare::Options::on_wgpu())?.len();
    let on_cuda = compare::cases_of(workspace, &compare::Options::on_cuda())?.len();
    let channels_last = compare::Options::on_cuda_with_channels_last();
    let with_channels_last = compare::cases_of(workspace, &channels_last)?.len();
    let suites = [
        PythonSuite { name: "conformance", tests: conformance::CASES },
        PythonSuite { name: "conformance, poisoned", tests: conformance::CASES },
        PythonSuite { name: "conformance, wgpu", tests: conformance::NODE_CASES },
        PythonSuite { name: "conformance, wgpu as a library", tests: conformance::NODE_CASES },
        PythonSuite { name: "conformance, wgpu, minimum limits", tests: conformance::NODE_CASES },
        PythonSuite { name: "conformance, cuda", tests: conformance::NODE_CASES },
        PythonSuite { name: "conformance, cuda as a library", tests: conformance::NODE_CASES },
        PythonSuite { name: "reference", tests: reference::count(workspace)? },
        PythonSuite { name: "compare", tests: cases },
        PythonSuite { name: "compare, wgpu", tests: on_wgpu },
        PythonSuite { name: "compare, cuda", tests: on_cuda },
        PythonSuite { name: "compare, cuda, channels last", tests: with_channels_last },
        PythonSuite { name: "memory", tests: cases },
        PythonSuite { name: "soak", tests: soak::SCENARIOS },
        PythonSuite { name: "random models", tests: fuzz_models::SHORT },
    ];
    for suite in &suites {
        println!("skipped {}: {} tests", suite.name, suite.tests);
    }
    println!("because there is no Python environment: {why:#}");
    if std::env::var("CI").is_ok_and(|value| value == "true") {
        bail!("the suites that need Python must run in CI");
    }
    Ok(Summary { skipped: suites.iter().map(|suite| suite.tests).sum(), ..Summary::default() })
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    std::is_x86_feature_detected!("avx512f")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx512() -> bool {
    false
}

/// Runs cargo's tests, the examples in documentation among them.
fn unit_tests(workspace: &Workspace) -> Result<Summary> {
    let mut command = workspace.cargo();
    let summary = run_tests(command.args(["test", "--workspace", "--no-fail-fast"]))?;
    if summary.passed == 0 {
        bail!("no test ran");
    }
    Ok(summary)
}

/// Runs the tests of the crates whose results come from the CPU's kernels, with vectors of AVX2. The programs are those of all tests: cargo would
/// build others for some of the crates alone.
fn unit_tests_on_avx2(workspace: &Workspace) -> Result<Summary> {
    let mut build = workspace.cargo();
    build.args(["test", "--quiet", "--workspace", "--no-run", "--message-format=json"]);
    let mut summary = Summary::default();
    for artifact in artifacts(&capture(&mut build)?)? {
        let is_chosen = ON_CPU_KERNELS.iter().any(|name| artifact.package == workspace.root.join(name));
        let Some(program) = artifact.executable.filter(|_| artifact.is_test && is_chosen) else { continue };
        let counts = run_tests(Command::new(program).current_dir(&artifact.package).env("ORT_ISA", "avx2"))
            .with_context(|| format!("{} of {}", artifact.name, artifact.package.display()))?;
        summary += counts;
    }
    if summary.passed == 0 {
        bail!("no test ran");
    }
    Ok(summary)
}

/// Runs a command that runs tests, passing on its output and adding up the counts in it.
fn run_tests(command: &mut Command) -> Result<Summary> {
    eprintln!("$ {}", describe(command));
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", describe(command)))?;
    let mut summary = Summary::default();
    if let Some(output) = child.stdout.take() {
        for line in BufReader::new(output).lines() {
            let line = line?;
            println!("{line}");
            if let Some(counts) = Summary::from_cargo(&line) {
                summary += counts;
            }
        }
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("{summary} ({status})");
    }
    Ok(summary)
}
