//! `cargo xtask conformance --wgpu` and `--cuda`: the node suite on a GPU, against a list of the
//! failures known on that device.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::options::{ConformanceOptions, NODE_CASES};
use super::outcomes::{Outcome, Verdict, bless, check_list, count, parse_line, read_list};
use crate::cuda_driver::cuda_driver;
use crate::summary::Summary;
use crate::workspace::{Workspace, describe};

const SUITE: &str = "node";

/// A provider whose device runs the suite.
pub(super) struct OnDevice {
    name: &'static str,
    /// The example that runs the cases.
    example: &'static str,
    list: &'static str,
    /// How many cases the device must claim whole, as a minimum: otherwise a kernel that no longer
    /// claims anything would go unnoticed. Cases that placement moves to the host in part, because
    /// that is cheaper, count too.
    claimed: usize,
    /// The same bound for the provider as a library. Its kernels cannot pass values to the plan, so
    /// nodes whose sizes only the run determines stay on the CPU.
    claimed_as_library: usize,
}

pub(super) const WGPU: OnDevice = OnDevice {
    name: "wgpu",
    example: "device_cases",
    list: "conformance_wgpu.ignore",
    claimed: 1397,
    claimed_as_library: 1397,
};

pub(super) const CUDA: OnDevice = OnDevice {
    name: "cuda",
    example: "cuda_cases",
    list: "conformance_cuda.ignore",
    claimed: 1672,
    claimed_as_library: 1659,
};

/// Runs the suite, or skips it if wgpu finds no device.
pub(super) fn run(
    workspace: &Workspace,
    device: &OnDevice,
    cases: &Path,
    options: &ConformanceOptions,
) -> Result<Summary> {
    let OnDevice { name, list, .. } = device;
    let lines = lines(workspace, device, &cases.join(SUITE), options)?;
    if let Some(why) = lines.lines().find_map(|line| line.strip_prefix("NONE ")) {
        if device.name == CUDA.name {
            bail!("the emulator of the driver, which was built, shows no device: {why}");
        }
        let skipped = Summary::without(&options.suite(), NODE_CASES, why);
        println!("{skipped}");
        return Ok(skipped);
    }
    let place = format!("{}/", cases.display());
    let found = lines.lines().filter_map(parse_line).map(|(name, verdict, why)| {
        // The list of known failures must not depend on the folder of one machine.
        let why = why.replace(&place, "");
        Outcome { name: format!("{SUITE}/{name}"), verdict, why }
    });
    let outcomes: Vec<Outcome> = found.collect();
    // A case without a line would go unnoticed otherwise.
    if outcomes.len() != NODE_CASES {
        bail!("{} cases ran instead of {NODE_CASES}", outcomes.len());
    }
    let passed = outcomes.iter().filter(|outcome| outcome.verdict == Verdict::Pass);
    let (mut alone, mut moved) = (0, 0);
    for outcome in passed {
        alone += usize::from(outcome.why == "device");
        moved += usize::from(outcome.why.starts_with("moved "));
    }
    let summary = count(&outcomes);
    println!(
        "{SUITE} on {name}: {summary}, {alone} on the device alone, {moved} claimed whole and cheaper in part on the host"
    );
    let told = ["operators on the host", "library "];
    for line in lines.lines().filter(|line| told.iter().any(|start| line.starts_with(start))) {
        println!("{line}");
    }
    let path = workspace.own(list);
    let listed = read_list(&path)?;
    if options.bless {
        return bless(&path, &listed, &outcomes, &[SUITE]).map(|()| summary);
    }
    check_list(list, &listed, &outcomes, &[SUITE])?;
    let least = if options.library { device.claimed_as_library } else { device.claimed };
    if alone + moved < least {
        bail!("the device claims {} cases whole, expected {least} at least", alone + moved);
    }
    // Failures are those that the list has, so a green run reports them as skipped.
    Ok(Summary { passed: summary.passed, skipped: summary.failed, ..Summary::default() })
}

/// Runs the example and returns its output.
fn lines(
    workspace: &Workspace,
    device: &OnDevice,
    folder: &Path,
    options: &ConformanceOptions,
) -> Result<String> {
    let mut command = Command::new(workspace.build_example(device.example)?);
    if device.name == CUDA.name {
        command.envs(cuda_driver(workspace)?);
    }
    command.env("ORT_WGPU_LIMITS", if options.minimum_limits { "minimum" } else { "adapter" });
    if options.library {
        command.arg("--library");
        // One of CUDA's suites shows kernels that rely on the threads of a warp running together.
        command.env("ORT_CUDA_EMULATOR_APART", "1");
    }
    command.arg(folder).stderr(Stdio::inherit());
    eprintln!("$ {}", describe(&command));
    let output = command.output().with_context(|| format!("cannot run the example {}", device.example))?;
    if !output.status.success() {
        bail!("{} ended with {}", device.example, output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
