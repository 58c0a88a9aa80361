//! `CounterDropout`: the same bits as on the CPU, because the random numbers depend only on seed,
//! step and element index.

use ort_core::Result;
use ort_core::ep::KernelDef;
use ort_core::spec::RUNTIME;

use super::step::{spread, suffix};
use crate::kernels::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx};

cuda_kernels![CudaKernel::new(
    KernelDef { domain: RUNTIME, op: "CounterDropout", in_place: &[(0, 0)], ..KernelDef::BASE },
    launches
)];

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let count = y.count();
    if count == 0 {
        return Ok(Vec::new());
    }
    let launch = Launch::new("dropout", format!("counter_dropout_{}", suffix(x.dtype)?)).tensor(x).tensor(y);
    let launch = launch.tensor(cx.input(1)?).tensor(cx.input(2)?).tensor(cx.input(3)?).uint(count)?;
    let launch = launch.bytes(&cx.attrs.int("stream")?.to_ne_bytes());
    Ok(vec![spread(cx, launch, count.div_ceil(4))?])
}
