//! `Gather`, `GatherElements`, `GatherND` and `OneHot`. An index out of range reads the nearest
//! element.

use ort_core::dtype::TypeSet;
use ort_core::ep::KernelDef;
use ort_core::{Result, ensure, error};

use super::indexing::{INDICES, around, bits_of, check_source, few_axes, pick};
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Walk, strides};
use crate::shader::{Element, Shader, TYPES};

const ELEMENTS: &[(&str, TypeSet)] = &[("T", TYPES)];

wgpu_kernels![
    WgpuKernel::new(KernelDef { op: "Gather", types: ELEMENTS, ..KernelDef::BASE }, gather),
    WgpuKernel::new(
        KernelDef { op: "GatherElements", types: ELEMENTS, when: few_axes, ..KernelDef::BASE },
        gather_elements
    ),
    WgpuKernel::new(
        KernelDef { op: "GatherND", types: ELEMENTS, when: few_axes, ..KernelDef::BASE },
        gather_nd
    ),
    WgpuKernel::new(
        KernelDef {
            op: "OneHot",
            types: &[("T1", TYPES), ("T3", TYPES)],
            host_inputs: &[1],
            ..KernelDef::BASE
        },
        one_hot
    ),
];

fn gather(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (data, indices, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    check_source(data, y)?;
    let [_, size, run] = around(&data.shape, cx.axis(cx.attrs.int("axis")?, data.rank())?);
    let shader = Shader::new(cx)
        .read("x", &bits_of(data)?)
        .read("indices", indices)
        .number("size", size)
        .number("run", run)
        .number("picks", indices.count());
    let code = "fn picked(i: u32) -> x_t {
        let row = i / p.run;
        let outer = row / p.picks;
        let place = clamped(indices(row - outer * p.picks), p.size);
        return x((outer * p.size + place) * p.run + (i - row * p.run));
    }";
    Ok(vec![pick(shader, y, &format!("{INDICES}{code}"))?])
}

fn gather_elements(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (data, indices, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    check_source(data, y)?;
    let axis = cx.axis(cx.attrs.int("axis")?, data.rank())?;
    let shader = Shader::new(cx)
        .read("x", &bits_of(data)?)
        .read("indices", indices)
        .walk(&elements_walk(&data.shape, &indices.shape, axis)?, &["x"])
        .number("size", data.size(axis))
        .number("step", around(&data.shape, axis)[2]);
    let code = "fn picked(i: u32) -> x_t { return x(at_x(i) + clamped(indices(i), p.size) * p.step); }";
    Ok(vec![pick(shader, y, &format!("{INDICES}{code}"))?])
}

/// The loop nest over the indices of `GatherElements` and `ScatterElements`. It maps each index to
/// its place in the data, with 0 along the axis.
pub(super) fn elements_walk(data: &[usize], indices: &[usize], axis: usize) -> Result<Walk> {
    ensure!(
        data.len() == indices.len(),
        InvalidArgument,
        "data of shape {data:?} do not match indices of shape {indices:?}"
    );
    let mut sizes = data.iter().zip(indices).enumerate();
    let inside = sizes.all(|(other, (size, picked))| other == axis || picked <= size);
    let empty = indices.contains(&0);
    ensure!(
        inside || empty,
        InvalidArgument,
        "indices of shape {indices:?} are out of range for data of shape {data:?}"
    );
    let steps = strides(data).into_iter().enumerate();
    let steps = steps.map(|(other, step)| if other == axis { 0 } else { step as i64 }).collect();
    Ok(Walk::new(indices, &[steps]))
}

/// The geometry of index tuples: the sizes of the axes that a tuple indexes, the strides along them
/// in units of `run`, and `run`, the elements of one slice.
pub(super) struct Tuples {
    pub(super) sizes: Vec<usize>,
    pub(super) steps: Vec<usize>,
    pub(super) run: usize,
}

impl Tuples {
    pub(super) fn new(data: &[usize], indices: &[usize], batch: usize) -> Result<Tuples> {
        let invalid =
            || error!(InvalidArgument, "data of shape {data:?} do not match indices of shape {indices:?}");
        let (depth, outer) = indices.split_last().ok_or_else(invalid)?;
        ensure!(
            data.get(..batch) == outer.get(..batch),
            InvalidArgument,
            "data of shape {data:?} do not match indices of shape {indices:?}"
        );
        let rest = data.get(batch..).ok_or_else(invalid)?;
        let (sizes, inner) = rest.split_at_checked(*depth).ok_or_else(invalid)?;
        let run = inner.iter().fold(1usize, |run, size| run.saturating_mul(*size));
        Ok(Tuples { sizes: sizes.to_vec(), steps: strides(sizes), run })
    }
}

fn gather_nd(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (data, indices, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    check_source(data, y)?;
    let batch = usize::try_from(cx.attrs.int("batch_dims")?).unwrap_or(usize::MAX);
    let tuples = Tuples::new(&data.shape, &indices.shape, batch)?;
    let outer = indices.shape.len().saturating_sub(1);
    let per_batch = indices.shape.get(batch..outer).unwrap_or(&[]).iter().product();
    let slots: usize = tuples.sizes.iter().product();
    let shader = Shader::new(cx)
        .read("x", &bits_of(data)?)
        .read("indices", indices)
        .sizes("sizes", &tuples.sizes)
        .sizes("steps", &tuples.steps)
        .constant("DEPTH", tuples.sizes.len())
        .number("run", tuples.run)
        .number("per_batch", per_batch)
        .number("slots", slots);
    let code = "fn picked(i: u32) -> x_t {
        let tuple = i / p.run;
        var slot = tuple / p.per_batch * p.slots;
        for (var k = 0u; k < DEPTH; k++) {
            slot += clamped(indices(tuple * DEPTH + k), sizes(k)) * steps(k);
        }
        return x(slot * p.run + (i - tuple * p.run));
    }";
    Ok(vec![pick(shader, y, &format!("{INDICES}{code}"))?])
}

fn one_hot(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (indices, values, y) = (cx.input(0)?, cx.input(2)?, cx.output(0)?);
    ensure!(values.count() == 2, InvalidArgument, "OneHot needs two values, got {}", values.count());
    let [_, depth, inner] = around(&y.shape, cx.axis(cx.attrs.int("axis")?, y.rank())?);
    ensure!(y.count() == indices.count().saturating_mul(depth), Fail, "the output has shape {:?}", y.shape);
    // Float indices are truncated, and NaN is index 0.
    let index = match Element::of(indices.dtype)?.value {
        "f32" => "select(i32(clamp(index, -2.0e9, 2.0e9)), 0, is_nan(index))",
        "u32" => "i32(min(index, 0x7fffffffu))",
        _ => "index",
    };
    let shader = Shader::new(cx)
        .read("indices", indices)
        .read("values", &bits_of(values)?)
        .number("depth", depth)
        .number("inner", inner);
    let code = format!(
        "{INDICES}
        fn picked(i: u32) -> values_t {{
            let row = i / p.inner;
            let outer = row / p.depth;
            let index = indices(outer * p.inner + (i - row * p.inner));
            return values(select(0u, 1u, counted({index}, p.depth) == i32(row - outer * p.depth)));
        }}"
    );
    Ok(vec![pick(shader, y, &code)?])
}
