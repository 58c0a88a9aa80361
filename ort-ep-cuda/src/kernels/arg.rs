//! `ArgMax` and `ArgMin` kernels.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::KernelDef;
use ort_core::{Result, ensure};

use super::rows::{SHORT_FLOATS, TeamRows, few_axes, suffix};
use super::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx};

const COMPARED: TypeSet = SHORT_FLOATS.union(TypeSet::of(&[DType::I32, DType::I64]));

const fn arg(op: &'static str) -> CudaKernel {
    CudaKernel::new(KernelDef { op, types: &[("T", COMPARED)], when: few_axes, ..KernelDef::BASE }, launches)
}

cuda_kernels![arg("ArgMax"), arg("ArgMin")];

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let axis = cx.axis(cx.attrs.int("axis")?, x.rank())?;
    let rows = TeamRows::along_axis(&x.shape, axis);
    ensure!(rows.len > 0, InvalidArgument, "axis {axis} has no element to choose");
    rows.check_results(y.count())?;
    let launch = rows.launch("reduce", &format!("arg_{}", suffix(x.dtype)?), 1)?;
    let launch = rows.param(launch.tensor(x).tensor(y))?.uint(usize::from(cx.op == "ArgMax"))?;
    Ok(vec![launch.uint(usize::from(cx.attrs.flag("select_last_index")?))?])
}
