//! `SoftmaxCrossEntropyLoss` and `NegativeLogLikelihoodLoss`. A label out of range is an error on
//! the CPU; here it reads the nearest class.

use ort_core::dtype::DType;
use ort_core::ep::KernelDef;
use ort_core::{Result, ensure, unknown_name};

use crate::kernels::rows::{SHORT_FLOATS, suffix, team_of, teams};
use crate::kernels::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand};

const FAMILY: &str = "loss";
/// The most classes for which one thread handles a sample.
const SHORT: usize = 16;
/// The most classes for which a warp handles a sample.
const LONG: usize = 1024;
/// Threads of a warp.
const WARP: usize = 32;

const fn loss(op: &'static str) -> CudaKernel {
    let def = KernelDef { op, types: &[("T", SHORT_FLOATS)], left_out: &[1], ..KernelDef::BASE };
    CudaKernel { workspace: Some(workspace), ..CudaKernel::new(def, launches) }
}

cuda_kernels![loss("SoftmaxCrossEntropyLoss"), loss("NegativeLogLikelihoodLoss")];

/// Reserves each sample's loss and weight.
fn parts(cx: &OpCx<'_>, samples: usize, taken: &mut usize) -> [Operand; 2] {
    [(); 2].map(|()| cx.workspace(taken, DType::F32, &[samples]))
}

fn workspace(cx: &OpCx<'_>) -> Result<usize> {
    let mut taken = 0;
    parts(cx, cx.input(1)?.count(), &mut taken);
    Ok(taken)
}

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, labels, weights) = (cx.input(0)?, cx.input(1)?, cx.find_input(2));
    let (images, classes) = (x.size(0), x.size(1));
    let places = x.shape.iter().skip(2).product::<usize>();
    let samples = images.saturating_mul(places);
    ensure!(
        labels.count() == samples,
        InvalidArgument,
        "got {} labels, expected one for each of the {samples} samples",
        labels.count()
    );
    let weight_count = weights.map_or(classes, Operand::count);
    ensure!(
        weight_count == classes,
        InvalidArgument,
        "got {weight_count} weights, expected one for each of the {classes} classes"
    );
    ensure!(x.count() <= i32::MAX as usize, NotImplemented, "scores {:?} are beyond 31 bits", x.shape);
    ensure!(classes > 0 || samples == 0, InvalidArgument, "{samples} labels of no classes");
    let (mean, whole) = match cx.attrs.string("reduction")? {
        "none" => (false, false),
        "mean" => (true, true),
        "sum" => (false, true),
        other => return Err(unknown_name("reduction", other, &["none", "mean", "sum"])),
    };
    let [losses, shares] = parts(cx, samples, &mut 0);
    let kept = |parts| Some(parts).filter(|_| whole);
    let each = cx.find_output(0).filter(|_| !whole);
    let suffix = suffix(x.dtype)?;
    // More classes: eight threads if samples are adjacent in memory, otherwise a warp or a block.
    let team = match () {
        () if classes <= SHORT => 1,
        () if places >= WARP => 8,
        () => team_of(classes, LONG),
    };
    let mut launches = Vec::new();
    if samples > 0 {
        let launch = Launch::new(FAMILY, format!("loss_each_{suffix}_{team}")).tensor(x).tensor(labels);
        let launch = launch.find_tensor(weights).find_tensor(cx.find_output(1));
        let launch = launch.find_tensor(kept(&losses)).find_tensor(kept(&shares)).find_tensor(each);
        let ignored = cx.attrs.find_int("ignore_index");
        let flags = [labels.dtype == DType::I64, cx.op == "SoftmaxCrossEntropyLoss", ignored.is_some()];
        let mut words = Vec::with_capacity(8);
        let numbers = [samples, classes, places].map(|number| i64::try_from(number).unwrap_or(i64::MAX));
        words.extend(numbers.into_iter().chain(flags.map(i64::from)));
        let ignored = ignored.unwrap_or(0);
        words.extend([i64::from(ignored as i32), ignored >> 32]);
        launches.push(teams(launch.ints::<8>(&words)?, samples, team, 1)?);
    }
    if let Some(y) = cx.find_output(0).filter(|_| whole) {
        let launch = Launch::new(FAMILY, format!("loss_whole_{suffix}"));
        let launch = launch.tensor(&losses).tensor(&shares).tensor(y).uint(samples)?;
        launches.push(launch.uint(mean.into())?);
    }
    Ok(launches)
}
