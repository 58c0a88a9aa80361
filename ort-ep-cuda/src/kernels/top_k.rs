//! `TopK` kernel.

use ort_core::Result;
use ort_core::dtype::TypeSet;
use ort_core::ep::KernelDef;
use ort_core::ops::reduce::problem::RankedRows;

use super::sort::{SortRows, SortTensors};
use super::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx};

cuda_kernels![CudaKernel {
    workspace: Some(workspace),
    ..CudaKernel::new(
        KernelDef { op: "TopK", types: &[("T", TypeSet::NUMERIC)], host_inputs: &[1], ..KernelDef::BASE },
        launches
    )
}];

fn rows_of(cx: &OpCx<'_>) -> Result<SortRows> {
    let x = cx.input(0)?;
    let y = cx.find_output(0).map_or_else(|| cx.output(1), Ok)?;
    SortRows::new(x, RankedRows::of_top_k(cx.attrs, &x.shape, &y.shape)?)
}

fn workspace(cx: &OpCx<'_>) -> Result<usize> {
    let mut taken = 0;
    rows_of(cx)?.buffers(cx, &mut taken);
    Ok(taken)
}

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let rows = rows_of(cx)?;
    rows.check_k(&cx.ints(1)?)?;
    let descending = cx.attrs.flag("largest")?;
    let (values, places) = (cx.find_output(0), cx.find_output(1));
    rows.sort(&SortTensors { x: cx.input(0)?, values, places, descending }, rows.buffers(cx, &mut 0))
}
