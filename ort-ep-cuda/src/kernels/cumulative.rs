//! `CumSum` and `CumProd` kernels.

use ort_core::Result;
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::KernelDef;
use ort_core::ops::reduce::problem::scanned_axis;

use super::rows::{SHORT_FLOATS, TeamRows, few_axes, suffix};
use super::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx};

const NUMBERS: TypeSet = SHORT_FLOATS.union(TypeSet::of(&[DType::I32, DType::I64]));

const fn cumulative(op: &'static str) -> CudaKernel {
    // In place is safe: a thread writes only elements that it has read itself before.
    let def = KernelDef {
        op,
        types: &[("T", NUMBERS)],
        host_inputs: &[1],
        in_place: &[(0, 0)],
        when: few_axes,
        ..KernelDef::BASE
    };
    CudaKernel::new(def, launches)
}

cuda_kernels![cumulative("CumSum"), cumulative("CumProd")];

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let axis = scanned_axis(&cx.ints(1)?, x.rank())?;
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let rows = TeamRows::along_axis(&x.shape, axis);
    let launch = rows.launch_in_order("lines", &format!("scan_{}", suffix(x.dtype)?))?;
    let launch = rows.param(launch.tensor(x).tensor(y))?.uint(usize::from(cx.op == "CumProd"))?;
    let launch = launch.uint(usize::from(cx.attrs.flag("exclusive")?))?;
    Ok(vec![launch.uint(usize::from(cx.attrs.flag("reverse")?))?])
}
