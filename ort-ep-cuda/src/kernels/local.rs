//! `LRN` and `MeanVarianceNormalization` kernels.

use ort_core::Result;
use ort_core::ep::KernelDef;
use ort_core::ops::nn::problem::{LocalResponse, MVN_EPSILON};
use ort_core::ops::reduce::problem::axes_mask;

use super::rows::{SHORT_FLOATS, TeamRows, few_axes, suffix};
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

fn local_response(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let local = LocalResponse::new(cx.attrs, &y.shape)?;
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let launch = Launch::new("local", format!("lrn_{}", suffix(x.dtype)?)).threads(y.count())?;
    let mut launch = launch.tensor(x).tensor(y);
    for number in [y.count(), local.channels, local.spatial, local.before, local.after] {
        launch = launch.uint(number)?;
    }
    Ok(vec![launch.float(local.alpha).float(local.beta).float(local.bias)])
}

fn mean_variance(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let mask = axes_mask(cx.attrs.ints("axes")?, y.rank())?;
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let rows = TeamRows::new(&y.shape, &mask);
    let launch = rows.launch("local", &format!("mean_variance_{}", suffix(x.dtype)?), 1)?;
    Ok(vec![rows.param(launch.tensor(x).tensor(y))?.float(MVN_EPSILON)])
}
