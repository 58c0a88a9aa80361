//! Plans of model folders: the bytes of a context, and the longest one that fits.

use std::process::ExitCode;

use anyhow::{Result, bail};
use ort_runtime::generate::{ContextPlan, Decoder, DecoderOptions, ModelFolder};
use serde::Serialize;

use crate::args::{human_bytes, table};
use crate::output::{say, say_json};

/// The context that is planned for.
pub(crate) struct PlanRequest {
    /// Tokens of each request; the model's longest if `None`.
    pub(crate) context: Option<usize>,
    pub(crate) requests: Requests,
    pub(crate) json: bool,
}

/// How many requests are planned for.
#[derive(Clone, Copy)]
pub(crate) enum Requests {
    Exactly(usize),
    /// As many of N as run at once.
    UpTo(usize),
}

/// What `ort plan FOLDER --json` prints.
#[derive(Serialize)]
struct PlanJson {
    context: usize,
    requests: usize,
    prefill_chunk: usize,
    cache_bytes: usize,
    run_bytes: usize,
    input_bytes: usize,
    sampler_bytes: usize,
    total_bytes: usize,
    is_exact: bool,
    room_bytes: usize,
    memory_limit: Option<usize>,
    fits: bool,
    largest_context: Option<usize>,
    weights_mapped: usize,
    weights_in_memory: usize,
}

impl From<&ContextPlan> for PlanJson {
    fn from(plan: &ContextPlan) -> PlanJson {
        let memory = plan.memory;
        PlanJson {
            context: memory.context,
            requests: memory.requests,
            prefill_chunk: memory.chunk,
            cache_bytes: memory.caches,
            run_bytes: memory.run,
            input_bytes: memory.inputs,
            sampler_bytes: memory.sampler,
            total_bytes: memory.total(),
            is_exact: memory.is_exact,
            room_bytes: plan.room,
            memory_limit: plan.limit,
            fits: plan.fits(),
            largest_context: plan.largest,
            weights_mapped: plan.weights_mapped,
            weights_in_memory: plan.weights_in_memory,
        }
    }
}

/// Prints the plan of a folder's decoder. Exit code 1 if the context does not fit.
pub(crate) fn plan_folder(
    folder: &ModelFolder,
    options: &DecoderOptions,
    request: &PlanRequest,
) -> Result<ExitCode> {
    let decoder = Decoder::open(folder, options)?;
    let Some(context) = request.context.or(decoder.longest_context()) else {
        bail!("'{}': the configuration has no context length; give --context N", folder.folder.display());
    };
    let requests = match request.requests {
        Requests::Exactly(requests) => requests,
        // The plan of one that does not fit is the refusal.
        Requests::UpTo(most) => decoder.most_requests(context, most)?.max(1),
    };
    let plan = decoder.plan(context, requests)?;
    if request.json {
        say_json(&PlanJson::from(&plan))?;
    } else {
        print_plan(&plan)?;
    }
    Ok(if plan.fits() { ExitCode::SUCCESS } else { refuse(&plan)? })
}

fn print_plan(plan: &ContextPlan) -> Result<()> {
    let memory = plan.memory;
    let mut rows = table(&["memory", "bytes", ""]);
    let mut row = |name: String, bytes: usize| {
        rows.add_row([name, bytes.to_string(), human_bytes(bytes)]);
    };
    row(format!("KV caches, {} x {} tokens", memory.requests, memory.context), memory.caches);
    row(format!("a run, at most {} tokens of a prompt", memory.chunk), memory.run);
    row("tokens, masks and positions".to_owned(), memory.inputs);
    row("sampler".to_owned(), memory.sampler);
    row("together".to_owned(), memory.total());
    row("room beside the weights".to_owned(), plan.room);
    row("weights in memory".to_owned(), plan.weights_in_memory);
    row("weights in the mapped file, in no limit".to_owned(), plan.weights_mapped);
    say!("{rows}")?;
    if !memory.is_exact {
        say!("the sizes of some values are known only at run time, and are not in these numbers")?;
    }
    let within = match plan.limit {
        Some(limit) => format!("within {}", human_bytes(limit)),
        None => "in this machine's memory".to_owned(),
    };
    match (plan.largest, memory.requests) {
        (None, _) => say!("no context fits {within}"),
        (Some(largest), 1) => say!("the longest context that fits {within}: {largest} tokens"),
        (Some(largest), requests) => {
            say!("the longest context of {requests} requests that fits {within}: {largest} tokens each")
        }
    }
}

/// The refusal, as the last line of standard error.
fn refuse(plan: &ContextPlan) -> Result<ExitCode> {
    Err(plan.refusal().into())
}
