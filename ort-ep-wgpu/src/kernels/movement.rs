//! Data movement operators: transpose, slice, concatenate, split and the like, as strided copies.

use ort_core::dtype::TypeSet;
use ort_core::ep::KernelDef;
use ort_core::ops::tensor::geometry::{SliceArguments, SliceAxis, Strided, normalize_axis, permutation};
use ort_core::{Result, ensure, error};

use super::copy::{copy, gather, in_order};
use super::fill::few_axes;
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Operand};
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
    movement("Transpose", &[], transpose),
    movement("Expand", &[1], expand),
    movement("Slice", &[1, 2, 3, 4], slice),
    movement("Concat", &[], concat),
    movement("Split", &[1], split),
    movement("DepthToSpace", &[], depth_to_space),
    movement("SpaceToDepth", &[], space_to_depth),
];

fn transpose(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let x = cx.input(0)?;
    let order = permutation(cx.attrs, x.rank())?;
    gather(cx, x, &Strided::transpose(&x.shape, &order), cx.output(0)?)
}

fn expand(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    gather(cx, x, &Strided::expand(&x.shape, &y.shape)?, y)
}

fn slice(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let x = cx.input(0)?;
    let (starts, ends) = (cx.ints(1)?, cx.ints(2)?);
    let (axes, steps) = (cx.find_ints(3)?, cx.find_ints(4)?);
    let arguments =
        SliceArguments { starts: &starts, ends: &ends, axes: axes.as_deref(), steps: steps.as_deref() };
    gather(cx, x, &Strided::slice(&x.shape, &arguments.resolve(&x.shape)?), cx.output(0)?)
}

fn concat(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let y = cx.output(0)?;
    let axis = normalize_axis(cx.attrs.int("axis")?, y.rank())?;
    let whole = in_order(&y.shape);
    let stride = whole.strides.get(axis).copied().unwrap_or(1).unsigned_abs();
    let (mut dispatches, mut start) = (Vec::new(), 0usize);
    // One copy for each input, into its range of the output.
    for index in 0..cx.inputs.len() {
        let x = cx.input(index)?;
        let fits = x.rank() == y.rank() && (0..y.rank()).all(|at| at == axis || x.size(at) == y.size(at));
        ensure!(fits, InvalidArgument, "input {index} of shape {:?} joined to {:?}", x.shape, y.shape);
        let offset = start.saturating_mul(stride);
        let part = Strided { sizes: x.shape.iter().copied().collect(), offset, ..whole.clone() };
        dispatches.extend(copy(cx, (x, &in_order(&x.shape)), (y, &part))?);
        start = start.saturating_add(x.size(axis));
    }
    ensure!(start == y.size(axis), InvalidArgument, "{start} elements joined to shape {:?}", y.shape);
    Ok(dispatches)
}

fn split(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let x = cx.input(0)?;
    let axis = normalize_axis(cx.attrs.int("axis")?, x.rank())?;
    let size = x.size(axis);
    let (mut dispatches, mut start) = (Vec::new(), 0usize);
    for (index, count) in parts(cx, size)?.into_iter().enumerate() {
        ensure!(count <= size.saturating_sub(start), InvalidArgument, "the parts exceed {:?}", x.shape);
        if let Some(y) = cx.find_output(index) {
            let mut slices: Vec<SliceAxis> = x.shape.iter().map(|size| SliceAxis::all(*size)).collect();
            slices.get_mut(axis).into_iter().for_each(|slice| *slice = SliceAxis { start, step: 1, count });
            dispatches.extend(gather(cx, x, &Strided::slice(&x.shape, &slices), y)?);
        }
        start += count;
    }
    Ok(dispatches)
}

/// Returns the sizes of the parts of `Split`: the given ones, or equal ones.
fn parts(cx: &OpCx<'_>, size: usize) -> Result<Vec<usize>> {
    let count = cx.outputs.len();
    let Some(given) = cx.find_ints(1)? else {
        // The last part is shorter if the size does not divide.
        let part = size.div_ceil(count.max(1));
        let part_at = |index: usize| part.min(size.saturating_sub(index.saturating_mul(part)));
        return Ok((0..count).map(part_at).collect());
    };
    ensure!(
        given.len() == count,
        InvalidArgument,
        "split has {} sizes, but there are {count} outputs",
        given.len()
    );
    let invalid = || error!(InvalidArgument, "split {given:?} does not add up to size {size}");
    given.iter().map(|part| usize::try_from(*part).map_err(|_| invalid())).collect()
}

fn depth_to_space(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, [batch, channels, height, width], block) = blocks(cx)?;
    let left = channels / block.saturating_mul(block).max(1);
    let order = match cx.attrs.string("mode")? {
        "CRD" => Strided::transpose(&[batch, left, block, block, height, width], &[0, 1, 4, 2, 5, 3]),
        _ => Strided::transpose(&[batch, block, block, left, height, width], &[0, 3, 4, 1, 5, 2]),
    };
    gather(cx, x, &order, cx.output(0)?)
}

fn space_to_depth(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, [batch, channels, height, width], block) = blocks(cx)?;
    let parts = [batch, channels, height / block, block, width / block, block];
    let order = match cx.attrs.string("mode")? {
        "CRD" => [0, 1, 3, 5, 2, 4],
        _ => [0, 3, 5, 1, 2, 4],
    };
    gather(cx, x, &Strided::transpose(&parts, &order), cx.output(0)?)
}

/// Returns the image, its four sizes, and the block size.
fn blocks<'a>(cx: &'a OpCx<'_>) -> Result<(&'a Operand, [usize; 4], usize)> {
    let x = cx.input(0)?;
    let sizes = <[usize; 4]>::try_from(&*x.shape);
    let sizes =
        sizes.map_err(|_| error!(InvalidArgument, "the input has shape {:?}, expected rank 4", x.shape))?;
    let block = usize::try_from(cx.attrs.int("blocksize")?).ok().filter(|block| *block > 0);
    Ok((x, sizes, block.ok_or_else(|| error!(InvalidGraph, "the block size is not positive"))?))
}
