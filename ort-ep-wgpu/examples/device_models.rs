//! Holds models on a wgpu device, with the CPU for what it does not claim, against the CPU alone, and times both.
//!
//! Each run has other inputs, and the next of the sizes that are given: integers are below 100 (but 1 for masks, and
//! positions that count up), other inputs are from -1 to 1. A line for each model tells the largest difference as a part of the largest
//! value of its output, the nodes on the host, milliseconds of building the session, of the first run and the median of the others on the device and
//! on the CPU, the pipelines that were ready before the first run and those that it made, and what the last run made on the device.
//! `ORT_WGPU_LIMITS=minimum` as for the example `device_cases`; `ORT_WGPU_PIPELINE_CACHE` names a folder for pipelines of later processes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use clap::Parser;
use ort_core::dim::{Bindings, Symbol};
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{Device, ProviderOptions, Reason, provider};
use ort_core::session::{Model, Session, ValueSpec};
use ort_core::tensor::{Tensor, Value};
use ort_core::{Result, ensure, error};
use ort_ep_cpu as _;
use ort_ep_wgpu::WgpuDevice;

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
    /// Models, each followed by what is given for it: SYMBOL=SIZE,SIZE... for a size of its inputs, INPUT=3x16,4x16... for the shape of one, or
    /// INPUT=@VALUE for one that has this value.
    #[arg(required = true, value_name = "MODEL [NAME=...]...")]
    models: Vec<String>,
}

/// What runs take in turn, by the name of a symbol or an input.
type Given = Vec<(String, Vec<String>)>;

impl Options {
    /// Each model's file, with what follows it.
    fn models(&self) -> Result<Vec<(&str, Given)>> {
        let mut models = Vec::<(&str, Given)>::new();
        for word in &self.models {
            match (word.split_once('='), models.last_mut()) {
                (None, _) => models.push((word, Vec::new())),
                (Some((name, list)), Some(model)) => {
                    model.1.push((name.to_owned(), list.split(',').map(str::to_owned).collect()));
                }
                (Some(_), None) => return Err(error!(InvalidArgument, "'{word}' comes before any model")),
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
        let worst = check(path, &given, &device, &options)?;
        // Not `>`: a NaN must fail.
        if !matches!(worst, worst if worst <= options.tolerance) {
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

fn check(path: &str, given: &Given, device: &Arc<WgpuDevice>, options: &Options) -> Result<f64> {
    let model = Model::load(path)?;
    let cpu = provider("cpu")?.open(0, &ProviderOptions::new())?;
    let host = Session::builder(&model).threads(options.threads).device(cpu.clone()).build()?;
    let start = Instant::now();
    let session = Session::builder(&model)
        .threads(options.threads)
        .device(device.clone() as Arc<dyn Device>)
        .device(cpu)
        .build()?;
    let built = start.elapsed().as_secs_f64() * 1e3;
    let ready = device.counters();
    let on_host = OnHost::of(&session);
    ensure!(
        on_host.others.is_empty() || !options.only_shapes_on_host,
        Fail,
        "{path}: the host runs {}",
        on_host.others.join("; ")
    );
    let (mut worst, mut device_times, mut host_times) = (0.0f64, Vec::new(), Vec::new());
    let (mut before, mut first) = (ready, ready);
    for run in 0..options.runs {
        let inputs = inputs(&model, given, run)?;
        let inputs: Vec<(&str, Value)> =
            inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
        before = device.counters();
        let start = Instant::now();
        let actual = session.run(&inputs)?;
        device_times.push(start.elapsed().as_secs_f64() * 1e3);
        if run == 0 {
            first = device.counters();
        }
        let start = Instant::now();
        let expected = host.run(&inputs)?;
        host_times.push(start.elapsed().as_secs_f64() * 1e3);
        for ((_, actual), (_, expected)) in actual.iter().zip(&expected) {
            let difference = difference(actual, expected)?;
            worst = if worst >= difference { worst } else { difference };
        }
    }
    let after = device.counters();
    let median = |times: &[f64]| {
        let mut times = times.get(1..).unwrap_or(&[]).to_vec();
        times.sort_by(f64::total_cmp);
        times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
    };
    println!(
        "{path}: {worst:.1e} apart; on the host: {}; built in {built:.0} ms, first {:.0} ms, then {:.1} ms, the CPU {:.1} ms; {} pipelines before the first run, {} of them listed, {} more in it; the last run made {} buffers, {} pipelines, {} submissions, {} dispatches",
        on_host.text(),
        device_times.first().copied().unwrap_or(f64::NAN),
        median(&device_times),
        median(&host_times),
        ready.pipelines,
        ready.pipelines_listed,
        first.pipelines - ready.pipelines,
        after.buffers - before.buffers,
        after.pipelines - before.pipelines,
        after.submissions - before.submissions,
        after.dispatches - before.dispatches
    );
    Ok(worst)
}

/// What the host runs of a session.
struct OnHost {
    /// How many nodes compute shapes, or what follows from them.
    shapes: usize,
    /// The other nodes by operator and reason.
    others: Vec<String>,
}

impl OnHost {
    fn of(session: &Session) -> OnHost {
        let placement = session.placement();
        let placed: Vec<_> = placement.iter().filter(|placed| placed.provider != "wgpu").collect();
        let (shapes, others): (Vec<_>, Vec<_>) =
            placed.into_iter().partition(|placed| placed.of_shapes || placed.reason == Reason::Shapes);
        let mut counted = BTreeMap::<String, usize>::new();
        for placed in others {
            let why = placed.refusals.first().map_or("", |(_, why)| why.as_str());
            *counted.entry(format!("{} ({why})", placed.operator)).or_default() += 1;
        }
        let others = counted.into_iter().map(|(what, count)| format!("{count} {what}")).collect();
        OnHost { shapes: shapes.len(), others }
    }

    fn text(&self) -> String {
        let shapes = (self.shapes > 0).then(|| format!("{} for shapes", self.shapes));
        let all: Vec<String> = shapes.into_iter().chain(self.others.iter().cloned()).collect();
        if all.is_empty() { "nothing".to_owned() } else { all.join("; ") }
    }
}

fn difference(actual: &Value, expected: &Value) -> Result<f64> {
    let (actual, expected) = (actual.tensor()?, expected.tensor()?);
    ensure!(
        actual.shape() == expected.shape() && actual.dtype() == expected.dtype(),
        Fail,
        "outputs of another shape or type"
    );
    if expected.dtype() != DType::BF16 && !TypeSet::IEEE_FLOATS.contains(expected.dtype()) {
        return Ok(if actual.bytes() == expected.bytes() { 0.0 } else { f64::INFINITY });
    }
    let (actual, expected) = (actual.to_doubles()?, expected.to_doubles()?);
    let largest = expected.iter().fold(1e-30f64, |largest, value| largest.max(value.abs()));
    let apart = actual.iter().zip(&expected).map(|(actual, expected)| (actual - expected).abs() / largest);
    Ok(apart.fold(0.0, |most, one| if most >= one { most } else { one }))
}

fn inputs(model: &Model, given: &Given, run: usize) -> Result<Vec<(String, Value)>> {
    let turn = |list: &[String]| list.get(run % list.len().max(1)).cloned().unwrap_or_default();
    let given: Vec<(&str, String)> = given.iter().map(|(name, list)| (name.as_str(), turn(list))).collect();
    let mut bindings = Bindings::new();
    for (name, size) in &given {
        if let Ok(size) = size.parse() {
            bindings.insert(Symbol::named(*name), size);
        }
    }
    let specs = model.inputs().into_iter().enumerate();
    specs
        .map(|(index, spec)| {
            let own = given.iter().find(|(name, _)| *name == spec.name).map(|(_, own)| own.as_str());
            let value = made_up(&spec, own, &bindings, run * 31 + index)?;
            Ok((spec.name, value.into()))
        })
        .collect()
}

/// An input of the shape that is given for it or that follows from the symbols' sizes, which are 1 where nothing is known.
fn made_up(spec: &ValueSpec, own: Option<&str>, bindings: &Bindings, seed: usize) -> Result<Tensor> {
    let number = |text: &str| -> Result<usize> {
        text.parse().map_err(|_| error!(InvalidArgument, "'{}': '{text}' is no number", spec.name))
    };
    let value = own.and_then(|own| own.strip_prefix('@')).map(number).transpose()?;
    let sizes: Vec<usize> = match own.filter(|own| !own.starts_with('@')) {
        Some(shape) => shape.split('x').map(number).collect::<Result<_>>()?,
        None => {
            let shape =
                spec.ty.shape().ok_or_else(|| error!(InvalidArgument, "'{}' has no shape", spec.name))?;
            shape.iter().map(|dim| dim.evaluate(bindings).unwrap_or(1) as usize).collect()
        }
    };
    let count: usize = sizes.iter().product();
    let mix = |at: usize| ((at * 7919 + seed * 104_729 + 17) as u32).wrapping_mul(2_654_435_761) >> 8;
    let width = sizes.last().copied().unwrap_or(1).max(1);
    let integer = |at: usize| match value {
        Some(value) => value as i64,
        None if spec.name.contains("position") => (at % width) as i64,
        None if spec.name.contains("mask") => 1,
        None if spec.name.contains("type") => 0,
        None => i64::from(mix(at) % 100),
    };
    match spec.ty.dtype() {
        Some(DType::I64) => Tensor::from_slice(&sizes, &(0..count).map(integer).collect::<Vec<_>>()),
        _ => {
            let float = |at: usize| mix(at) as f32 / (1 << 23) as f32 - 1.0;
            Tensor::from_slice(&sizes, &(0..count).map(float).collect::<Vec<_>>())
        }
    }
}
