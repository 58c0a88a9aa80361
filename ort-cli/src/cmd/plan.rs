//! `ort plan`: the memory plan of a run, without running it.

use std::io::Write;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use ort_report::{MOST_PLANS, Sweep, combinations, plan_json, plan_svg, plan_text};
use ort_runtime::generate::{DecoderOptions, ModelFolder};

use crate::args::ModelArgs;
use crate::cmd::generate::{PlanRequest, Requests, plan_folder};
use crate::numbers::positive;
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
    /// For a folder of `ort generate`: tokens of prompt and answer [default: the model's longest].
    #[arg(long, value_name = "N", value_parser = positive::<NonZeroUsize>)]
    context: Option<NonZeroUsize>,
    /// For a folder of `ort generate`: requests at once [default: 1].
    #[arg(long, value_name = "N", value_parser = positive::<NonZeroUsize>)]
    requests: Option<NonZeroUsize>,
    /// Draw the bytes over the schedule as SVG.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

pub(crate) fn run(args: &PlanArgs) -> Result<ExitCode> {
    if args.model.model.is_dir() {
        return run_on_folder(args);
    }
    if args.context.is_some() || args.requests.is_some() {
        wrong_usage!(
            "--context and --requests are for a folder of `ort generate`; give --dim for a model file"
        );
    }
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

/// Plans the contexts of a folder's decoder.
fn run_on_folder(args: &PlanArgs) -> Result<ExitCode> {
    if args.svg.is_some() || !args.model.dims.is_empty() || !args.model.shapes.is_empty() {
        wrong_usage!(
            "--svg, --dim and --shape are for a model file; a folder takes --context and --requests"
        );
    }
    let folder = ModelFolder::open(&args.model.model, None)?;
    let options = DecoderOptions {
        memory_limit: args.model.memory_limit,
        threads: args.model.threads,
        prefill_chunk: None,
        cache: args.model.cache.clone(),
    };
    let request = PlanRequest {
        context: args.context.map(NonZeroUsize::get),
        requests: Requests::Exactly(args.requests.map_or(1, NonZeroUsize::get)),
        json: args.json,
    };
    plan_folder(&folder, &options, &request)
}
