//! Holds models on a wgpu device, with the CPU for what it does not claim, against the CPU alone,
//! and times both.
//!
//! Each run has other inputs, and the next of the sizes that are given: integers are below 100 (but
//! 1 for masks, and positions that count up), other inputs are from -1 to 1. A line for each model
//! tells the largest difference as a part of the largest value of its output, the nodes on the
//! host, milliseconds of building the session, of the first run and the median of the others on the
//! device and on the CPU, the pipelines that were ready before the first run and those that it
//! made, and what the last run made on the device. `ORT_WGPU_LIMITS=minimum` as for the example
//! `device_cases`; `ORT_WGPU_PIPELINE_CACHE` names a folder for pipelines of later processes.

use std::sync::Arc;

use clap::Parser;
use ort_core::ep::{Device, ProviderOptions};
use ort_core::{Result, ensure, error};
use ort_ep_cpu as _;
use ort_ep_wgpu::WgpuDevice;
use ort_testkit::device_models::{At, Found, Runs, run_on_device};
use ort_testkit::made_up::{Given, given};

/// Holds models on a wgpu device against the CPU, and times both.
#[derive(Parser)]
struct Options {
    /// Runs of each model, each with other inputs and the next sizes.
    #[arg(long, default_value_t = 10)]
    runs: usize,
    /// Threads of the host.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// How far apart the results may be, as a part of the largest value of an output.
    #[arg(long, default_value_t = 1e-3)]
    tolerance: f64,
    /// Whether the host may run shape arithmetic alone.
    #[arg(long)]
    only_shapes_on_host: bool,
    /// Models, each followed by what is given for it: SYMBOL=SIZE,SIZE... for a size of its inputs,
    /// INPUT=3x16,4x16... for the shape of one, or INPUT=@VALUE for one that has this value.
    #[arg(required = true, value_name = "MODEL [NAME=...]...")]
    models: Vec<String>,
}

impl Options {
    /// Each model's file, with what follows it.
    fn models(&self) -> Result<Vec<(&str, Given)>> {
        let mut models = Vec::<(&str, Given)>::new();
        for word in &self.models {
            match (word.contains('='), models.last_mut()) {
                (false, _) => models.push((word, Given::new())),
                (true, Some((_, all))) => all.extend(given([word.as_str()])?),
                (true, None) => return Err(error!(InvalidArgument, "'{word}' comes before any model")),
            }
        }
        Ok(models)
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    let limits = std::env::var("ORT_WGPU_LIMITS").unwrap_or_else(|_| "adapter".to_owned());
    let mut of_device = ProviderOptions::from([("limits".to_owned(), limits)]);
    if let Ok(folder) = std::env::var("ORT_WGPU_PIPELINE_CACHE") {
        of_device.insert("pipeline_cache".to_owned(), folder);
    }
    let device = WgpuDevice::open(0, &of_device)?;
    println!("on {}", device.adapter());
    let mut wrong = Vec::new();
    for (path, given) in options.models()? {
        if !check(path, &given, &device, &options)?.is_within(options.tolerance) {
            wrong.push(path);
        }
    }
    ensure!(
        wrong.is_empty(),
        Fail,
        "beyond {} of the largest value: {}",
        options.tolerance,
        wrong.join(", ")
    );
    Ok(())
}

fn check(path: &str, given: &Given, device: &Arc<WgpuDevice>, options: &Options) -> Result<Found> {
    let runs = Runs {
        count: options.runs,
        threads: options.threads,
        only_shapes_on_host: options.only_shapes_on_host,
    };
    let mut ready = device.counters();
    let (mut first, mut before) = (ready, ready);
    let on: Arc<dyn Device> = device.clone();
    let found = run_on_device(path, given, &on, runs, |at| match at {
        At::Built => ready = device.counters(),
        At::Before(_) => before = device.counters(),
        At::After(0) => first = device.counters(),
        At::After(_) => {}
    })?;
    let after = device.counters();
    println!(
        "{path}: {found}; {} pipelines before the first run, {} of them listed, {} more in it; the last run made {} buffers, {} pipelines, {} submissions, {} dispatches",
        ready.pipelines,
        ready.pipelines_listed,
        first.pipelines - ready.pipelines,
        after.buffers - before.buffers,
        after.pipelines - before.pipelines,
        after.submissions - before.submissions,
        after.dispatches - before.dispatches
    );
    Ok(found)
}
