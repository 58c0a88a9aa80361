//! `Softmax`, `LogSoftmax`, `Hardmax` and `LpNormalization`.

use ort_core::Result;
use ort_core::ep::KernelDef;

use super::rows::{ContiguousRows, SHORT_FLOATS, TeamRows, WARP, few_axes, suffix};
use super::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx, THREADS};

const fn softmax(op: &'static str) -> CudaKernel {
    // In place is safe: a thread writes only elements that it reads itself, after its team has read
    // the row.
    let def = KernelDef {
        op,
        types: &[("T", SHORT_FLOATS)],
        in_place: &[(0, 0)],
        when: few_axes,
        ..KernelDef::BASE
    };
    CudaKernel::new(def, launches)
}

cuda_kernels![softmax("Softmax"), softmax("LogSoftmax"), softmax("Hardmax"), softmax("LpNormalization")];

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let axis = cx.axis(cx.attrs.int("axis")?, x.rank())?;
    // The numbers of `cu/softmax.cuh`.
    let function = match cx.op {
        "Softmax" => 0,
        "LogSoftmax" => 1,
        "Hardmax" => 2,
        _ if cx.attrs.int("p")? == 1 => 3,
        _ => 4,
    };
    let suffix = suffix(x.dtype)?;
    let rows = TeamRows::along_axis(&x.shape, axis);
    if !rows.are_contiguous() {
        // Rows that are neither contiguous nor adjacent columns get a block each instead of a warp.
        let team = if rows.team() == WARP { THREADS as usize } else { rows.team() };
        let launch = rows.launch_by(team, "lines", &format!("lines_{suffix}"), 1)?;
        return Ok(vec![rows.param(launch.tensor(x).tensor(y))?.uint(function)?]);
    }
    let held = ContiguousRows::new(rows.count, rows.len, x.dtype, &[rows.len]);
    let many = held.are_many(cx.limits.processors) || held.are_long();
    let (name, vectors) = match cx.op {
        "Softmax" | "LogSoftmax" if many => ("softmax_4", 4),
        "Softmax" | "LogSoftmax" => ("softmax_1", 1),
        _ => ("rows", 1),
    };
    let launch = held.launch(Launch::new("rows", format!("{name}_{suffix}")), vectors)?.tensor(x).tensor(y);
    Ok(vec![launch.uint(rows.count)?.uint(rows.len)?.uint(function)?])
}
