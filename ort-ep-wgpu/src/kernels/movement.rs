//! Data movement operators: transpose, slice, concatenate, split and the like, as strided copies.

use ort_core::Result;
use ort_core::dtype::TypeSet;
use ort_core::ep::KernelDef;
use ort_core::ops::tensor::geometry::Strided;
use ort_gpu::read;

use super::copy::{copy, gather};
use super::fill::few_axes;
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx};
use crate::shader::TYPES;

const T: &[(&str, TypeSet)] = &[("T", TYPES)];

const fn movement(
    op: &'static str,
    host_inputs: &'static [usize],
    dispatches: fn(&OpCx<'_>) -> Result<Vec<Dispatch>>,
) -> WgpuKernel {
    WgpuKernel::new(KernelDef { op, types: T, host_inputs, when: few_axes, ..KernelDef::BASE }, dispatches)
}

wgpu_kernels![
    movement("Transpose", &[], rearrange),
    movement("Expand", &[1], rearrange),
    movement("Slice", &[1, 2, 3, 4], rearrange),
    movement("Concat", &[], concat),
    movement("Split", &[1], split),
    movement("DepthToSpace", &[], rearrange),
    movement("SpaceToDepth", &[], rearrange),
];

fn rearrange(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    gather(cx, cx.input(0)?, &read::order(cx)?, cx.output(0)?)
}

fn concat(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (y, (inputs, parts)) = (cx.output(0)?, read::joined(cx)?);
    let mut dispatches = Vec::new();
    // One copy for each input, into its range of the output.
    for (x, order) in inputs.into_iter().zip(parts.orders()) {
        dispatches.extend(copy(cx, (x, &Strided::contiguous(&x.shape)), (y, &order))?);
    }
    Ok(dispatches)
}

fn split(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, parts) = (cx.input(0)?, read::split(cx)?);
    let mut dispatches = Vec::new();
    for (index, order) in parts.orders().enumerate() {
        if let Some(y) = cx.find_output(index) {
            dispatches.extend(gather(cx, x, &order, y)?);
        }
    }
    Ok(dispatches)
}
