//! How long a run takes on the device.

use std::time::{Duration, Instant};

use ort_core::Result;
use ort_core::ep::Device;
use ort_core::session::{IoBinding, Model, RunOptions, Session};
use ort_core::tensor::Value;
use ort_ep_cuda::{CudaDevice, LibraryReport};

use ort_testkit::made_up::{Given, inputs};

use crate::Arguments;

/// Runs before anything is timed: the first ones compile, and capture graphs where these are asked
/// for.
const WARM_UP: usize = 5;
/// A sample is as many runs as take this long, so that waiting for the device is a small part of
/// it.
const SAMPLE: Duration = Duration::from_millis(10);

/// Prints the median of the samples, and what the host has of the model.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let model = Model::load(&arguments.model)?;
    let sizes: Given =
        arguments.sizes.iter().map(|(name, size)| (name.clone(), vec![size.clone()])).collect();
    let given = inputs(&model, &sizes, 0)?;
    let device = arguments.open()?;
    let start = Instant::now();
    let session = arguments.session(&model, &device)?;
    let built = start.elapsed();
    let mut binding = session.io_binding();
    for (name, value) in given {
        let tensor = session.upload(value.tensor()?, device.memory())?;
        binding.bind_input(&name, Value::Tensor(tensor))?;
    }
    for output in session.outputs() {
        binding.bind_output(&output.name, device.memory())?;
    }
    let first = time(&session, &device, &mut binding, 1)?;
    time(&session, &device, &mut binding, WARM_UP)?;
    let one = time(&session, &device, &mut binding, 1)?;
    let runs = (SAMPLE.as_secs_f64() / one.as_secs_f64().max(1e-6)).ceil().max(1.0) as usize;
    let (begin, mut samples) = (Instant::now(), Vec::new());
    while samples.is_empty() || begin.elapsed().as_secs_f64() < arguments.seconds {
        samples.push(time(&session, &device, &mut binding, runs)?.as_secs_f64() * 1e3 / runs as f64);
    }
    samples.sort_by(f64::total_cmp);
    let at = |index: usize| samples.get(index).copied().unwrap_or_default();
    let on_host = session.placement().iter().filter(|placed| placed.provider == "cpu").count();
    let libraries: Vec<String> =
        device.libraries().iter().map(|report| format!("{:?}: {:?}", report.name, found(report))).collect();
    println!(
        r#"{{"median_ms": {:.6}, "min_ms": {:.6}, "samples": {}, "runs": {runs}, "built_ms": {:.3}, "first_ms": {:.3}, "nodes_on_host": {on_host}, "device_bytes": {}, "libraries": {{{}}}}}"#,
        at(samples.len() / 2),
        at(0),
        samples.len(),
        built.as_secs_f64() * 1e3,
        first.as_secs_f64() * 1e3,
        device.stats().total_allocated,
        libraries.join(", "),
    );
    Ok(())
}

/// A library of NVIDIA's that is in use, or that there is none.
fn found(report: &LibraryReport) -> String {
    match &report.found {
        Ok(found) => format!("{} at {}", found.version, found.path.display()),
        Err(reason) => format!("none: {reason}"),
    }
}

/// The time of `runs` runs, until the device has finished the last.
fn time(session: &Session, device: &CudaDevice, binding: &mut IoBinding, runs: usize) -> Result<Duration> {
    let options = RunOptions::default();
    let start = Instant::now();
    for _ in 0..runs {
        session.run_with_binding(binding, &options)?;
    }
    device.synchronize()?;
    Ok(start.elapsed())
}
