//! `cargo xtask test`: every check, the quick ones first.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::artifacts::{Artifact, artifacts};
use crate::cargo_tests::{TestProgram, run_programs, run_tests};
use crate::python::Python;
use crate::summary::Summary;
use crate::workspace::{Package, Workspace, capture, run as run_command};
use crate::{
    arm, chart, compare, conformance, cuda_kernels, fuzz_models, header, memory, models, ops, package,
    python_package, quick, reference, soak, table, tidy, vector_loops,
};

/// The folders of the crates whose tests depend on the CPU kernels. Crates in these folders count.
const ON_CPU_KERNELS: [&str; 6] =
    ["ort-core", "ort-ep-cpu", "ort-runtime", "ort-train", "ort-testkit", "ort-cli"];

/// Test programs that measure time or memory. They run with the widest vectors only: results do not
/// differ there, and they take minutes.
const MEASURING: [&str; 6] =
    ["deadlines", "give_back", "hostile_operators", "load_time", "plan_time", "resident_growth"];

/// Test programs that compare times by the clock, which other programs would disturb. `deadlines`
/// measures the processor time of its threads.
const BY_THE_CLOCK: [&str; 3] = ["hostile_operators", "load_time", "plan_time"];

/// The test programs that take longest. They run first, so that none of them ends alone.
const LONGEST: [&str; 5] = ["deadlines", "operators", "integration", "libraries", "resident_growth"];

/// Turns a missing adapter into a failure of the tests of ort-ep-wgpu, which would skip otherwise.
const NEEDS_ADAPTER: (&str, &str) = ("ORT_TEST_NEEDS_ADAPTER", "1");

/// What to run.
#[derive(clap::Args)]
pub(crate) struct TestOptions {
    /// Run only the suites of the provider wgpu, and fail if one cannot run.
    #[arg(long)]
    wgpu: bool,
    /// Check only what changed: format, tidy, clippy, the tests of changed crates, and the node
    /// cases of operators that changed files name.
    #[arg(long, conflicts_with = "wgpu")]
    quick: bool,
    /// What `--quick` compares with.
    #[arg(long, value_name = "REVISION", default_value = "HEAD", requires = "quick")]
    since: String,
}

/// Runs all suites; the first that fails ends the run. Suites that this machine lacks a requirement
/// for are skipped, and listed in the last lines.
pub(crate) fn run(workspace: &Workspace, options: &TestOptions) -> Result<()> {
    let mut stages = Stages::default();
    let summary = match options {
        TestOptions { wgpu: true, .. } => wgpu_suites(workspace, &mut stages),
        TestOptions { quick: true, since, .. } => changed(workspace, since, &mut stages),
        _ => all(workspace, &mut stages),
    }?;
    println!("{stages}\n{summary}");
    Ok(())
}

fn all(workspace: &Workspace, stages: &mut Stages) -> Result<Summary> {
    let mut summary = Summary::default();
    lints(workspace, stages)?;
    stages.run("packages", || package::run(workspace))?;
    stages.run("documentation", || {
        let mut command = workspace.cargo();
        run_command(
            command.args(["doc", "--quiet", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "-Dwarnings"),
        )
    })?;
    // The checks of generated, committed files come before the tests: they take seconds, and a
    // stale file would fail what follows.
    stages.run("operators", || ops::run(workspace, &ops::OpsOptions { check: true }))?;
    stages.run("header", || header::run(workspace, &header::HeaderOptions { check: true }))?;
    stages.run("chart", || chart::run(workspace, &chart::ChartOptions { check: true }))?;
    stages.run("CUDA kernels", || {
        cuda_kernels::run(
            workspace,
            &cuda_kernels::CudaKernelsOptions { check: true, ..cuda_kernels::CudaKernelsOptions::default() },
        )
    })?;
    summary += stages.run("book", || book(workspace))?;
    summary += stages.run("unit tests", || unit_tests(workspace))?;
    for isa in narrower_isas() {
        // Every test must also pass with narrower vectors, which other machines have.
        summary += stages
            .run(&format!("unit tests, {isa}"), || tests_of(workspace, &ON_CPU_KERNELS, ("ORT_ISA", isa)))?;
    }
    summary += stages.run("unit tests, AArch64", || arm::stage(workspace))?;
    stages.run("build", || workspace.build_ort())?;
    stages.run("vector loops", || vector_loops::run(workspace))?;
    match Python::open(workspace) {
        Ok(_) => {
            stages.run("models", || models::run(workspace, &models::ModelsOptions::default()))?;
            for options in conformance_suites() {
                summary += stages.run(&options.suite(), || conformance::run(workspace, &options))?;
            }
            summary += stages
                .run("reference", || reference::run(workspace, &reference::ReferenceOptions::default()))?;
            for options in compare_suites() {
                summary += stages.run(&options.suite(), || compare::run(workspace, &options))?;
            }
            summary += stages.run("Python package", || python_package::stage(workspace))?;
            summary += stages.run("memory", || memory::run(workspace, &memory::MemoryOptions::default()))?;
            summary += stages.run("soak", || soak::run(workspace, &soak::SoakOptions::short()))?;
            summary += stages.run("random models", || {
                fuzz_models::run(workspace, &fuzz_models::FuzzModelsOptions::short())
            })?;
        }
        Err(why) => summary += skip_python_suites(workspace, &why)?,
    }
    Ok(summary)
}

/// The checks of the whole workspace that take little time.
fn lints(workspace: &Workspace, stages: &mut Stages) -> Result<()> {
    stages.run("format", || run_command(workspace.cargo().args(["fmt", "--all", "--check"])))?;
    stages.run("tidy", || tidy::run(workspace))?;
    stages.run("clippy", || {
        let mut command = workspace.cargo();
        command.args(["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"]);
        run_command(&mut command)
    })
}

/// The lints, and the tests and node cases of what differs from a revision.
fn changed(workspace: &Workspace, since: &str, stages: &mut Stages) -> Result<Summary> {
    lints(workspace, stages)?;
    let files = quick::changed_files(workspace, since)?;
    let crates = quick::changed_crates(workspace, &files);
    if crates.is_empty() {
        println!("no crate differs from {since}");
        return Ok(Summary::default());
    }
    let mut summary = stages.run("unit tests", || tests_of_changed(workspace, &crates))?;
    summary += stages.run("node cases", || quick::node_cases(workspace, &files))?;
    Ok(summary)
}

/// Runs the unit and integration tests of some crates, without the programs that measure time or
/// memory, which take minutes.
fn tests_of_changed(workspace: &Workspace, crates: &BTreeSet<&str>) -> Result<Summary> {
    // With this package cargo unifies features as for the whole workspace, and builds no crate
    // twice.
    let packages = crates.iter().copied().chain(["ort-cli"]);
    let programs = test_programs(workspace, packages.flat_map(|name| ["--package", name]))?;
    let folders: Vec<&Path> = workspace
        .packages
        .iter()
        .filter(|package| crates.contains(package.name.as_str()))
        .map(Package::folder)
        .collect();
    let (left_out, programs): (Vec<_>, Vec<_>) = programs
        .into_iter()
        .filter(|program| folders.contains(&program.folder.as_path()))
        .partition(|program| MEASURING.contains(&program.name.as_str()));
    for program in left_out {
        println!("not run: {}, which measures time or memory", program.name);
    }
    run_programs(&programs, &[])
}

/// The suites of the provider wgpu and the tests of its crate. An error if one cannot run.
fn wgpu_suites(workspace: &Workspace, stages: &mut Stages) -> Result<Summary> {
    let mut summary = stages.run("unit tests", || tests_of(workspace, &["ort-ep-wgpu"], NEEDS_ADAPTER))?;
    for options in conformance_suites().iter().filter(|options| options.wgpu) {
        summary += stages.run(&options.suite(), || conformance::run(workspace, options))?;
    }
    let on_wgpu = compare::CompareOptions::on_wgpu();
    summary += stages.run(&on_wgpu.suite(), || compare::run(workspace, &on_wgpu))?;
    // The caller asked for these suites, so one that cannot run is a failure.
    if let Some(left_out) = summary.left_out.first() {
        bail!("{left_out}");
    }
    Ok(summary)
}

fn conformance_suites() -> [conformance::ConformanceOptions; 7] {
    let plain = conformance::ConformanceOptions::default();
    let wgpu = conformance::ConformanceOptions { wgpu: true, ..plain.clone() };
    let cuda = conformance::ConformanceOptions { cuda: true, ..plain.clone() };
    [
        plain.clone(),
        conformance::ConformanceOptions { poisoned: true, ..plain },
        wgpu.clone(),
        conformance::ConformanceOptions { library: true, ..wgpu.clone() },
        conformance::ConformanceOptions { minimum_limits: true, ..wgpu },
        cuda.clone(),
        conformance::ConformanceOptions { library: true, ..cuda },
    ]
}

fn compare_suites() -> [compare::CompareOptions; 4] {
    [
        compare::CompareOptions::default(),
        compare::CompareOptions::on_wgpu(),
        compare::CompareOptions::on_cuda(),
        compare::CompareOptions::on_cuda_with_channels_last(),
    ]
}

/// The stages of a run, with the seconds that each took.
#[derive(Default)]
struct Stages(Vec<(String, f64)>);

impl Stages {
    /// Runs a stage and announces it.
    fn run<T>(&mut self, name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        eprintln!("== {name}");
        let start = Instant::now();
        let result = work().with_context(|| name.to_owned())?;
        let seconds = start.elapsed().as_secs_f64();
        eprintln!("== {name}: fine, {seconds:.0} s");
        self.0.push((name.to_owned(), seconds));
        Ok(result)
    }
}

impl fmt::Display for Stages {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = table::new(&["stage", "s"]);
        for (name, seconds) in &self.0 {
            table.add_row([name.clone(), format!("{seconds:.0}")]);
        }
        let total: f64 = self.0.iter().map(|(_, seconds)| seconds).sum();
        table.add_row(["all".to_owned(), format!("{total:.0}")]);
        write!(formatter, "{table}")
    }
}

/// Builds the book of docs/ to `target/book`.
fn book(workspace: &Workspace) -> Result<Summary> {
    let mut command = Command::new("mdbook");
    if command.arg("--version").stdout(Stdio::null()).status().is_err() {
        return Ok(Summary::without("book", 1, "mdbook is not installed: cargo install mdbook"));
    }
    run_command(Command::new("mdbook").arg("build").current_dir(&workspace.root))?;
    Ok(Summary { passed: 1, ..Summary::default() })
}

/// Counts the suites that need Python as skipped.
fn skip_python_suites(workspace: &Workspace, why: &anyhow::Error) -> Result<Summary> {
    let mut suites: Vec<(String, usize)> =
        conformance_suites().iter().map(|options| (options.suite(), options.cases())).collect();
    suites.push(("reference".to_owned(), reference::count(workspace)?));
    for options in compare_suites() {
        suites.push((options.suite(), compare::cases_of(workspace, &options)?.len()));
    }
    suites.push((
        "memory".to_owned(),
        compare::cases_of(workspace, &compare::CompareOptions::default())?.len(),
    ));
    suites.push(("Python package".to_owned(), python_package::count(workspace)?));
    suites.push(("soak".to_owned(), soak::SCENARIOS));
    suites.push(("random models".to_owned(), fuzz_models::SHORT));
    let why = format!("there is no Python environment: {why:#}");
    let mut summary = Summary::default();
    suites.iter().for_each(|(suite, tests)| summary += Summary::without(suite, *tests, &why));
    Ok(summary)
}

/// Returns the instruction sets with kernels of their own that are narrower than the one of the
/// unit tests.
fn narrower_isas() -> Vec<&'static str> {
    // The caller chose one, and the unit tests already ran with it.
    if std::env::var_os("ORT_ISA").is_some_and(|isa| !isa.is_empty()) {
        return Vec::new();
    }
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("avx512f") {
        return vec!["avx2"];
    }
    Vec::new()
}

/// Runs all unit and integration tests, and the doc tests.
fn unit_tests(workspace: &Workspace) -> Result<Summary> {
    let all = test_programs(workspace, ["--workspace"])?;
    let (by_the_clock, mut programs): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|program| BY_THE_CLOCK.contains(&program.name.as_str()));
    programs.sort_by_key(|program| !LONGEST.contains(&program.name.as_str()));
    let mut summary = run_programs(&programs, &[])?;
    for program in by_the_clock {
        summary += run_programs(&[program], &[])?;
    }
    // Alone, `--doc` would build all crates again: cargo passes them other flags for link-time
    // optimization if no program is built. The names of doc tests, and of no others, have a line.
    let mut doc_tests = workspace.cargo();
    summary +=
        run_tests(doc_tests.args(["test", "--quiet", "--workspace", "--no-fail-fast", "--", "(line "]))?;
    Ok(summary)
}

/// Builds the test programs of packages, as arguments of cargo choose them.
fn test_programs<'a>(
    workspace: &Workspace,
    packages: impl IntoIterator<Item = &'a str>,
) -> Result<Vec<TestProgram>> {
    let mut build = workspace.cargo();
    build.args(["test", "--quiet", "--no-run", "--message-format=json"]).args(packages);
    let found = artifacts(&capture(&mut build)?)?.into_iter().filter(|artifact| artifact.is_test);
    let programs: Vec<TestProgram> = found
        .filter_map(|artifact| {
            let Artifact { name, package: folder, executable, .. } = artifact;
            Some(TestProgram { name, path: executable?, folder })
        })
        .collect();
    // A command that found no tests would pass otherwise.
    if programs.is_empty() {
        bail!("cargo built no tests");
    }
    Ok(programs)
}

/// Runs the tests of the crates in these folders with an environment variable. We reuse the
/// programs of the whole workspace, because cargo unifies features differently for a subset and
/// would rebuild.
fn tests_of(workspace: &Workspace, folders: &[&str], variable: (&str, &str)) -> Result<Summary> {
    let mut programs = test_programs(workspace, ["--workspace"])?;
    programs.retain(|program| {
        let is_of = |name: &str| program.folder.starts_with(workspace.root.join(name));
        folders.iter().any(|name| is_of(name)) && !MEASURING.contains(&program.name.as_str())
    });
    let summary = run_programs(&programs, &[variable])?;
    if summary.passed == 0 {
        bail!("no test ran");
    }
    Ok(summary)
}
