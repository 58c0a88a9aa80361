//! `Accumulate`: in-place gradient accumulation over batches.

use ort_core::Result;
use ort_core::ensure;
use ort_core::ep::KernelDef;
use ort_core::spec::RUNTIME;

use super::step::{spread, suffix};
use crate::kernels::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx};

cuda_kernels![CudaKernel::new(
    KernelDef { domain: RUNTIME, op: "Accumulate", in_place: &[(0, 0)], ..KernelDef::BASE },
    launches
)];

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (sum, value, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    let count = y.count();
    let same = sum.count() == count && value.count() == count;
    ensure!(same, InvalidArgument, "{:?} is added to a sum of {:?}", value.shape, sum.shape);
    if count == 0 {
        return Ok(Vec::new());
    }
    let (own, other) = (suffix(sum.dtype)?, suffix(value.dtype)?);
    let launch = Launch::of_type("accumulate", own, format!("accumulate_{own}_{other}"))?;
    let launch = launch.tensor(sum).tensor(y).tensor(value).tensor(cx.input(2)?);
    Ok(vec![spread(cx, launch, count.div_ceil(4))?.uints::<4>(&[0, count, 0, count])?])
}
