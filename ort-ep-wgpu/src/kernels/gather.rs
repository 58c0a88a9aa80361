//! `Gather`, `GatherElements`, `GatherND` and `OneHot`. An index out of range reads the nearest
//! element.

use ort_core::Result;
use ort_core::dtype::TypeSet;
use ort_core::ep::KernelDef;
use ort_core::ops::tensor::problem::{ElementTargets, IndexTuples, OneHot, axis_extents};

use super::indexing::{INDICES, bits_of, check_source, few_axes, pick};
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Walk};
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
    let [_, size, run] = axis_extents(cx.attrs, &data.shape)?;
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
    let targets = ElementTargets::new(cx.attrs, &data.shape, &indices.shape)?;
    let shader = Shader::new(cx)
        .read("x", &bits_of(data)?)
        .read("indices", indices)
        .walk(&Walk::new(&targets.indices, &[targets.steps]), &["x"])
        .number("size", targets.size)
        .number("step", targets.step);
    let code = "fn picked(i: u32) -> x_t { return x(at_x(i) + clamped(indices(i), p.size) * p.step); }";
    Ok(vec![pick(shader, y, &format!("{INDICES}{code}"))?])
}

fn gather_nd(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (data, indices, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    check_source(data, y)?;
    let tuples = IndexTuples::of_gather(cx.attrs, &data.shape, &indices.shape)?;
    let shader = Shader::new(cx)
        .read("x", &bits_of(data)?)
        .read("indices", indices)
        .sizes("sizes", &tuples.sizes)
        .sizes("steps", &tuples.steps)
        .constant("DEPTH", tuples.sizes.len())
        .number("run", tuples.run)
        .number("per_batch", tuples.per_batch)
        .number("slots", tuples.slots());
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
    let OneHot { depth, inner } = OneHot::new(cx.attrs, indices.count(), values.count(), &y.shape)?;
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
