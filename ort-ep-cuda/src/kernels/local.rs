//! `LRN` and `MeanVarianceNormalization` kernels.

use ort_core::ep::KernelDef;
use ort_core::{Result, error};

use super::lines::{Lines, SHORT_FLOATS, few_axes, suffix};
use super::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx};

const LRN: KernelDef = KernelDef { op: "LRN", types: &[("T", SHORT_FLOATS)], ..KernelDef::BASE };

cuda_kernels![
    CudaKernel::new(LRN, local_response),
    CudaKernel::new(
        KernelDef { op: "MeanVarianceNormalization", in_place: &[(0, 0)], when: few_axes, ..LRN },
        mean_variance
    ),
];

/// Added to the standard deviation.
const EPSILON: f32 = 1e-9;

fn local_response(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let size = usize::try_from(cx.attrs.int("size")?).ok().filter(|size| *size > 0);
    let size = size.ok_or_else(|| error!(InvalidGraph, "LRN over no channels"))?;
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let channels = y.size(1);
    let spatial = y.shape.iter().skip(2).copied().fold(1, usize::saturating_mul);
    let launch = Launch::new("local", format!("lrn_{}", suffix(x.dtype)?)).threads(y.count())?;
    let mut launch = launch.tensor(x).tensor(y);
    for number in [y.count(), channels, spatial, ((size - 1) / 2).min(channels), (size / 2).min(channels)] {
        launch = launch.uint(number)?;
    }
    let launch = launch.float(cx.attrs.float("alpha")? / size as f32);
    Ok(vec![launch.float(cx.attrs.float("beta")?).float(cx.attrs.float("bias")?)])
}

fn mean_variance(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let mut mask = vec![false; y.rank()];
    for axis in cx.attrs.ints("axes")? {
        let axis = cx.axis(*axis, y.rank())?;
        mask.get_mut(axis).into_iter().for_each(|along| *along = true);
    }
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let lines = Lines::new(&y.shape, &mask);
    let launch = lines.launch("local", &format!("mean_variance_{}", suffix(x.dtype)?), 1)?;
    Ok(vec![lines.param(launch.tensor(x).tensor(y))?.float(EPSILON)])
}
