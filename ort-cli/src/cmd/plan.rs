//! `ort plan`: the memory plan of a run, without running it.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use ort_report::{MOST_PLANS, Sweep, combinations, plan_json, plan_svg, plan_text};

use crate::args::ModelArgs;
use crate::output::{say, say_json, write_file};
use crate::usage::wrong_usage;

/// Shows the memory plan of a run without running it.
#[derive(Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Draw the bytes over the schedule as SVG.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

pub(crate) fn run(args: &PlanArgs) -> Result<ExitCode> {
    let sweeps = args.model.dims.iter().any(|(_, sizes)| sizes.len() > 1);
    if sweeps && args.svg.is_some() {
        wrong_usage!("--svg draws one plan; give each --dim one size");
    }
    let model = args.model.load_for_output(args.svg.as_deref())?;
    let session = args.model.session(&model)?;
    let no_inputs =
        args.model.shapes.is_empty() && args.model.input.is_empty() && args.model.inputs.is_none();
    if sweeps {
        if !no_inputs {
            wrong_usage!(
                "several sizes of --dim cannot be combined with --input, --inputs or --shape; leave those out"
            );
        }
        let Some(combinations) = combinations(&args.model.dims) else {
            wrong_usage!("--dim asks for more than {MOST_PLANS} plans; give fewer sizes");
        };
        let sweep = Sweep::new(&session, combinations)?;
        if args.json {
            say_json(&sweep.to_json())?;
        } else {
            say!("{}", sweep.to_text(args.model.memory_limit))?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let dims = args.model.single_dims()?;
    let report = if no_inputs {
        let dims: Vec<(&str, i64)> = dims.iter().map(|(name, size)| (name.as_str(), *size)).collect();
        session.plan(&dims)?
    } else {
        // Bind the dimensions to the inputs and shapes given, as a run does.
        let inputs = crate::inputs::gather(&args.model, &model)?;
        let given: Vec<_> = inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
        session.plan_for_inputs(&given)?
    };
    if let Some(path) = &args.svg {
        let drawing = plan_svg(&args.model.name(), &report);
        write_file(path, |file| Ok(writeln!(file, "{drawing}")?))?;
    }
    if args.json {
        say_json(&plan_json(&report))?;
    } else {
        say!("{}", plan_text(&report, args.model.memory_limit))?;
    }
    Ok(ExitCode::SUCCESS)
}
