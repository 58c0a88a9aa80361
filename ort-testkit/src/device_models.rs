//! Models on a device with the CPU as fallback, compared with the CPU alone over many runs with
//! varying inputs and shapes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{Device, ProviderOptions, provider};
use ort_core::placement::Reason;
use ort_core::session::{Model, Session};
use ort_core::tensor::Value;
use ort_core::{Result, ensure};

use crate::made_up::{Given, inputs};

/// How models are run.
#[derive(Clone, Copy, Debug)]
pub struct Runs {
    /// Runs of each model.
    pub count: usize,
    /// Threads of the host.
    pub threads: usize,
    /// Whether the host may run only shape arithmetic.
    pub only_shapes_on_host: bool,
}

/// The measurements of a model.
#[derive(Clone, Debug)]
pub struct Found {
    /// The maximum difference, relative to the maximum value of its output.
    pub worst: f64,
    /// A description of the nodes on the host.
    pub on_host: String,
    /// Milliseconds to build the session.
    pub built: f64,
    /// Milliseconds of each run on the device.
    pub device_times: Vec<f64>,
    /// Milliseconds of each run on the CPU.
    pub host_times: Vec<f64>,
}

impl Found {
    /// Whether the maximum difference is within `tolerance`; a NaN is not.
    pub fn is_within(&self, tolerance: f64) -> bool {
        self.worst <= tolerance
    }
}

/// The progress of a model, for callers that count what the device does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// The session is built.
    Built,
    /// A run on the device is about to begin.
    Before(usize),
    /// The run has ended.
    After(usize),
}

impl std::fmt::Display for Found {
    /// The start of a line; each kind of device adds its own counters.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Found { worst, on_host, built, device_times, host_times } = self;
        let first = device_times.first().copied().unwrap_or(f64::NAN);
        let (device, host) = (median(device_times), median(host_times));
        write!(
            f,
            "{worst:.1e} apart; on the host: {on_host}; built in {built:.0} ms, first {first:.0} ms, then {device:.1} ms, the CPU {host:.1} ms"
        )
    }
}

/// The median of all times except the first.
fn median(times: &[f64]) -> f64 {
    // The first run makes the plan and fills the caches.
    let mut times = times.get(1..).unwrap_or(&[]).to_vec();
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Runs a model on a device and on the CPU.
pub fn run_on_device(
    path: &str,
    given: &Given,
    device: &Arc<dyn Device>,
    runs: Runs,
    mut at: impl FnMut(At),
) -> Result<Found> {
    let model = Model::load(path)?;
    let cpu = provider("cpu")?.open(0, &ProviderOptions::new())?;
    let builder = || Session::builder(&model).threads(runs.threads);
    let host = builder().device(cpu.clone()).build()?;
    let start = Instant::now();
    let session = builder().device(device.clone()).device(cpu).build()?;
    let built = milliseconds(start);
    at(At::Built);
    let on_host = OnHost::of(&session, device.info().provider);
    ensure!(
        on_host.others.is_empty() || !runs.only_shapes_on_host,
        Fail,
        "{path}: the host runs {}",
        on_host.others.join("; ")
    );
    let (device_times, host_times) = (Vec::new(), Vec::new());
    let mut found = Found { worst: 0.0, on_host: on_host.text(), built, device_times, host_times };
    for run in 0..runs.count {
        let inputs = inputs(&model, given, run)?;
        let inputs: Vec<(&str, Value)> =
            inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
        // `at` runs outside of the measured time.
        at(At::Before(run));
        let start = Instant::now();
        let actual = session.run(&inputs)?;
        found.device_times.push(milliseconds(start));
        at(At::After(run));
        let start = Instant::now();
        let expected = host.run(&inputs)?;
        found.host_times.push(milliseconds(start));
        for ((_, actual), (_, expected)) in actual.iter().zip(&expected) {
            found.worst = worse(found.worst, difference(actual, expected)?);
        }
    }
    Ok(found)
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// What the host runs of a session.
struct OnHost {
    /// The number of nodes that compute shapes, or depend on shapes only.
    shapes: usize,
    /// The other nodes by operator and reason.
    others: Vec<String>,
}

impl OnHost {
    fn of(session: &Session, provider: &str) -> OnHost {
        let placement = session.placement();
        let placed: Vec<_> = placement.iter().filter(|placed| placed.provider != provider).collect();
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
    // Integers and booleans must be equal, not close.
    if expected.dtype() != DType::BF16 && !TypeSet::IEEE_FLOATS.contains(expected.dtype()) {
        return Ok(if actual.bytes() == expected.bytes() { 0.0 } else { f64::INFINITY });
    }
    let (actual, expected) = (actual.to_doubles()?, expected.to_doubles()?);
    // Not 0, because the division by it would make NaN of an output of zeros.
    let largest = expected.iter().fold(1e-30f64, |largest, value| largest.max(value.abs()));
    let apart = actual.iter().zip(&expected).map(|(actual, expected)| (actual - expected).abs() / largest);
    Ok(apart.fold(0.0, worse))
}

/// The greater of two differences. A NaN is greater than any number, and `f64::max` would drop it.
fn worse(one: f64, other: f64) -> f64 {
    if other > one || other.is_nan() { other } else { one }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ort_core::tensor::Tensor;

    #[test]
    fn a_nan_before_or_after_a_number_is_the_worst_difference() -> Result<()> {
        let of = |elements: [f32; 3]| Tensor::from_slice(&[3], &elements).map(Value::from);
        let expected = of([1.0, 2.0, 4.0])?;
        assert_eq!(difference(&of([1.0, 3.0, 4.0])?, &expected)?, 0.25);
        for actual in [[f32::NAN, 3.0, 4.0], [1.0, f32::NAN, 4.0], [1.0, 3.0, f32::NAN]] {
            assert!(difference(&of(actual)?, &expected)?.is_nan(), "{actual:?}");
        }
        assert!(worse(f64::NAN, 1.0).is_nan() && worse(1.0, f64::NAN).is_nan());
        Ok(())
    }
}
