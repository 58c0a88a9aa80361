//! `cargo xtask fuzz`: runs the targets in `fuzz/`, each for a while, from a seed corpus.
//!
//! Sanitizers need a nightly compiler and cargo-fuzz. Without them the same generators run on the
//! stable compiler, without coverage guidance: `HOSTILE_ROUNDS=1000 cargo test -p ort-runtime
//! --test hostile_operators` and `PROPTEST_CASES=100000 cargo test -p ort-runtime --test
//! integration random_graphs`.

use anyhow::{Result, bail};

use crate::workspace::{Workspace, run as run_command};

/// The targets, as `fuzz/Cargo.toml` names them.
const TARGETS: [&str; 10] = [
    "decode",
    "infer",
    "graphs",
    "kernels",
    "compiled",
    "arrays",
    "images",
    "checkpoints",
    "libraries",
    "adapters",
];
/// A case that takes more time or memory than this is a finding.
const CASE_SECONDS: u32 = 10;
const CASE_MEGABYTES: u32 = 2048;
const ALTERNATIVE: &str =
    "without them, run `HOSTILE_ROUNDS=1000 cargo test -p ort-runtime --test hostile_operators`";

/// What to run.
#[derive(clap::Args)]
pub(crate) struct FuzzOptions {
    /// Run only these targets.
    #[arg(long = "target", value_name = "NAME", value_parser = TARGETS)]
    targets: Vec<String>,
    /// Run each target for this many seconds.
    #[arg(long, value_name = "S", default_value_t = 1200)]
    seconds: u32,
}

/// Runs the targets one after the other. The first finding ends the run, and its input is in
/// `fuzz/artifacts`.
pub(crate) fn run(workspace: &Workspace, options: &FuzzOptions) -> Result<()> {
    let version = std::process::Command::new("cargo").args(["+nightly", "fuzz", "--version"]).output();
    if !version.is_ok_and(|output| output.status.success()) {
        bail!("`cargo +nightly fuzz` is missing: install a nightly toolchain and cargo-fuzz; {ALTERNATIVE}");
    }
    let chosen =
        |target: &&str| options.targets.is_empty() || options.targets.iter().any(|name| name == target);
    for target in TARGETS.into_iter().filter(chosen) {
        let mut command = std::process::Command::new("cargo");
        command.current_dir(&workspace.root).args(["+nightly", "fuzz", "run", "-O", target]);
        // libFuzzer writes new inputs to the first folder and only reads the second, so the
        // committed seed corpus stays unchanged.
        let found = workspace.target.join("fuzz").join(target);
        std::fs::create_dir_all(&found)?;
        command.arg(found).arg(workspace.root.join("fuzz/corpus").join(target)).arg("--");
        command.args([
            format!("-max_total_time={}", options.seconds),
            format!("-timeout={CASE_SECONDS}"),
            format!("-rss_limit_mb={CASE_MEGABYTES}"),
        ]);
        run_command(&mut command)?;
    }
    Ok(())
}
