//! Holds models on a wgpu device, with the CPU for what it does not claim, against the CPU alone, and times both.
//!
//!     device_models [--runs N] [--threads N] MODEL [NAME=SIZE,SIZE...]... [MODEL [NAME=SIZE,...]...]...
//!
//! Each run has other inputs, and the next of the sizes of each symbolic dimension: integers are below 100 (but 1 for masks, and
//! positions that count up), other inputs are from -1 to 1. A line for each model tells the largest difference as a part of the largest
//! value of its output, the operators on the host, milliseconds of the first run and the median of the others on the device and on the CPU,
//! and what the last run made on the device. `ORT_WGPU_LIMITS=minimum` as for the example `device_cases`.

use std::sync::Arc;
use std::time::Instant;

use ort_core::dim::{Bindings, Symbol};
use ort_core::dtype::DType;
use ort_core::ep::{Device, ProviderOptions, provider};
use ort_core::session::{Model, Session};
use ort_core::tensor::{Tensor, Value};
use ort_core::{Result, ensure, error};
use ort_ep_cpu as _;
use ort_ep_wgpu::WgpuDevice;

fn main() -> Result<()> {
    let (mut runs, mut threads, mut models) = (10, 2, Vec::<(String, Vec<(String, Vec<i64>)>)>::new());
    let mut arguments = std::env::args().skip(1);
    let number = |text: Option<String>| {
        text.and_then(|text| text.parse().ok()).ok_or_else(|| error!(InvalidArgument, "a number is missing"))
    };
    while let Some(argument) = arguments.next() {
        match (argument.as_str(), argument.split_once('=')) {
            ("--runs", _) => runs = number(arguments.next())?,
            ("--threads", _) => threads = number(arguments.next())?,
            (_, Some((name, sizes))) => {
                let sizes = sizes.split(',').filter_map(|size| size.parse().ok()).collect();
                models
                    .last_mut()
                    .into_iter()
                    .for_each(|model| model.1.push((name.to_owned(), Vec::clone(&sizes))));
            }
            _ => models.push((argument, Vec::new())),
        }
    }
    let limits = std::env::var("ORT_WGPU_LIMITS").unwrap_or_else(|_| "adapter".to_owned());
    let device = WgpuDevice::open(0, &ProviderOptions::from([("limits".to_owned(), limits)]))?;
    println!("on {}", device.adapter());
    let mut wrong = Vec::new();
    for (path, dims) in models {
        let worst = check(&path, &dims, &device, runs, threads)?;
        // Not `>`: a NaN must fail.
        if !matches!(worst, worst if worst <= 1e-3) {
            wrong.push(path);
        }
    }
    ensure!(wrong.is_empty(), Fail, "beyond 1e-3 of the largest value: {}", wrong.join(", "));
    Ok(())
}

fn check(
    path: &str,
    dims: &[(String, Vec<i64>)],
    device: &Arc<WgpuDevice>,
    runs: usize,
    threads: usize,
) -> Result<f64> {
    let model = Model::load(path)?;
    let cpu = provider("cpu")?.open(0, &ProviderOptions::new())?;
    let host = Session::builder(&model).threads(threads).device(cpu.clone()).build()?;
    let session = Session::builder(&model)
        .threads(threads)
        .device(device.clone() as Arc<dyn Device>)
        .device(cpu)
        .build()?;
    let mut operators: Vec<String> =
        session.placement().into_iter().filter(|step| step.2 != "wgpu").map(|step| step.1).collect();
    operators.sort();
    operators.dedup();
    let (mut worst, mut on_device, mut on_host) = (0.0f64, Vec::new(), Vec::new());
    let mut before = device.counters();
    for run in 0..runs {
        let inputs = inputs(&model, dims, run)?;
        let inputs: Vec<(&str, Value)> =
            inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
        before = device.counters();
        let start = Instant::now();
        let actual = session.run(&inputs)?;
        on_device.push(start.elapsed().as_secs_f64() * 1e3);
        let start = Instant::now();
        let expected = host.run(&inputs)?;
        on_host.push(start.elapsed().as_secs_f64() * 1e3);
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
        "{path}: {worst:.1e} apart; on the host: {}; first {:.0} ms, then {:.1} ms, the CPU {:.1} ms; the last run made {} buffers, {} pipelines, {} submissions, {} dispatches",
        if operators.is_empty() { "nothing".to_owned() } else { operators.join(" ") },
        on_device.first().copied().unwrap_or(f64::NAN),
        median(&on_device),
        median(&on_host),
        after.buffers - before.buffers,
        after.pipelines - before.pipelines,
        after.submissions - before.submissions,
        after.dispatches - before.dispatches
    );
    Ok(worst)
}

fn difference(actual: &Value, expected: &Value) -> Result<f64> {
    let (actual, expected) = (actual.tensor()?, expected.tensor()?);
    ensure!(
        actual.shape() == expected.shape() && actual.dtype() == expected.dtype(),
        Fail,
        "outputs of another shape or type"
    );
    if expected.dtype() != DType::F32 {
        return Ok(if actual.bytes() == expected.bytes() { 0.0 } else { f64::INFINITY });
    }
    let (actual, expected) = (actual.to_vec::<f32>()?, expected.to_vec::<f32>()?);
    let largest = expected.iter().fold(1e-30f64, |largest, value| largest.max(f64::from(value.abs())));
    let apart =
        actual.iter().zip(&expected).map(|(actual, expected)| f64::from((actual - expected).abs()) / largest);
    Ok(apart.fold(0.0, |most, one| if most >= one { most } else { one }))
}

fn inputs(model: &Model, dims: &[(String, Vec<i64>)], run: usize) -> Result<Vec<(String, Value)>> {
    let mut bindings = Bindings::new();
    for (name, sizes) in dims {
        let size = sizes.get(run % sizes.len().max(1)).copied().unwrap_or(1);
        bindings.insert(Symbol::named(name.as_str()), size);
    }
    let mut all = Vec::new();
    for (index, spec) in model.inputs().into_iter().enumerate() {
        let shape = spec.ty.shape().ok_or_else(|| error!(InvalidArgument, "'{}' has no shape", spec.name))?;
        let sizes: Result<Vec<usize>> =
            shape.iter().map(|dim| Ok(dim.evaluate(&bindings).unwrap_or(1) as usize)).collect();
        let sizes = sizes?;
        let count = sizes.iter().product();
        let mix = |at: usize| {
            ((at * 7919 + (run * 31 + index) * 104_729 + 17) as u32).wrapping_mul(2_654_435_761) >> 8
        };
        let tensor = match spec.ty.dtype() {
            Some(DType::I64) if spec.name.contains("position") => {
                let width = sizes.last().copied().unwrap_or(1).max(1);
                Tensor::from_slice(&sizes, &(0..count).map(|at| (at % width) as i64).collect::<Vec<_>>())?
            }
            Some(DType::I64) => {
                let one = |at| {
                    if spec.name.contains("mask") {
                        1
                    } else if spec.name.contains("type") {
                        0
                    } else {
                        i64::from(mix(at) % 100)
                    }
                };
                Tensor::from_slice(&sizes, &(0..count).map(one).collect::<Vec<_>>())?
            }
            _ => Tensor::from_slice(
                &sizes,
                &(0..count).map(|at| mix(at) as f32 / (1 << 23) as f32 - 1.0).collect::<Vec<_>>(),
            )?,
        };
        all.push((spec.name.clone(), tensor.into()));
    }
    Ok(all)
}
