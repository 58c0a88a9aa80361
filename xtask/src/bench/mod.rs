//! `cargo xtask bench`: timings of ours, ONNX Runtime and OpenVINO.
//!
//! The runtimes run in turn within one invocation, each in its own process, so that a noisy machine
//! disturbs all of them alike.

mod callers;
mod isa;
mod kernels;
mod limits;
mod options;
mod runtime;
mod tables;
mod train;

use anyhow::{Result, bail};

use crate::compare::{Cases, chosen_cases, make_inputs, prepare};
use crate::models;
use crate::python::Python;
use crate::workspace::Workspace;

pub(crate) use isa::Isa;
pub(crate) use options::BenchOptions;
pub(crate) use runtime::{Report, Runtime, Side, Timing, Tools, check, parse};
pub(crate) use tables::{decimals, mebibytes, milliseconds};

use limits::Limits;
use tables::Row;

/// Times what the options select and prints it.
pub(crate) fn run(workspace: &Workspace, options: &BenchOptions) -> Result<()> {
    check(options.rounds, options.seconds)?;
    if options.threads.contains(&0) {
        bail!("--threads must be over zero");
    }
    if options.train {
        return train::run(workspace, options);
    }
    // OpenVINO, and the tools that quantize models, are in the bench requirements only.
    let python = if options.skip_openvino && !options.quantized {
        Python::open(workspace)?
    } else {
        Python::open_for_bench(workspace)?
    };
    if options.callers {
        return callers::run(workspace, options, python);
    }
    if options.kernels {
        return kernels::run(workspace, options, python);
    }
    let cases = if options.quantized { quantized_cases(workspace) } else { Cases::standard(workspace) };
    let mut chosen = chosen_cases(&cases, &options.only)?;
    // A case that is named is timed even if the table does not choose it.
    if options.only.is_empty() {
        chosen.retain(|case| case.bench);
    }
    if options.quantized {
        let wanted = |name: &str| chosen.iter().any(|case| case.model == name);
        models::convert(workspace, &python, &cases.table, &cases.models, wanted)?;
        make_inputs(&python, &cases, &chosen)?;
    } else {
        prepare(workspace, &python, &cases, &chosen)?;
    }
    let tools = options.tools(workspace, python)?;
    let settings = options.settings();
    let limits = Limits::measure(&tools.ort, &settings)?;
    limits.iter().for_each(|limits| eprintln!("{}", limits.describe()));

    let random = models::random(workspace)?;
    let mut rows: Vec<Row> = Vec::new();
    for case in &chosen {
        for &(isa, threads) in &settings {
            let timing = Timing {
                model: cases.model(case),
                inputs: cases.folder.join(&case.name).join("inputs.npz"),
                isa,
                threads,
                seconds: options.seconds,
                rows: None,
                loads: 2,
            };
            let outcome = timing.in_turn(&tools, options.runtimes(), options.rounds);
            let (sides, problem) = match outcome {
                Ok(sides) => (sides, None),
                Err(error) => (Vec::new(), Some(format!("{error:#}"))),
            };
            let limits = limits::at(&limits, (isa, threads))?;
            let row = Row {
                name: case.name.clone(),
                isa: limits.isa(),
                threads,
                is_random: random.contains(&case.model),
                file_bytes: timing.model.metadata().map_or(0, |file| file.len()),
                flops: limits.flops,
                sides,
                problem,
            };
            eprintln!("{}", row.describe());
            rows.push(row);
        }
    }
    tables::print(&rows, &limits, options.style())
}

/// The cases whose models are quantized.
fn quantized_cases(workspace: &Workspace) -> Cases {
    Cases {
        table: workspace.own("data/quantized.json"),
        models: models::folder(workspace).join("quantized"),
        folder: workspace.target.join("compare"),
    }
}
