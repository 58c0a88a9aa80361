//! `ScatterElements`, `ScatterND` and `TensorScatter`. Updates with an index out of range are
//! dropped.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::KernelDef;
use ort_core::ops::tensor::problem::{Scatter, ScatterTargets, TensorScatter, combines};
use ort_core::{Result, error};

use super::indexing::{INDICES, copied, few_axes};
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Operand, Walk};
use crate::shader::{Access, Element, Shader, TYPES};

/// The types that reductions support: an element must fit the word of a compare-exchange.
const COMBINED: TypeSet = TYPES.difference(TypeSet::of(&[DType::I64, DType::U64]));

const fn replacing(op: &'static str) -> WgpuKernel {
    let def = KernelDef {
        op,
        types: &[("T", TYPES)],
        in_place: &[(0, 0)],
        when: |node| !combines(node.attrs()) && few_axes(node),
        ..KernelDef::BASE
    };
    WgpuKernel { workspace: Some(owners_bytes), ..WgpuKernel::new(def, replace) }
}

const fn reducing(op: &'static str) -> WgpuKernel {
    let def = KernelDef {
        op,
        types: &[("T", COMBINED)],
        in_place: &[(0, 0)],
        when: |node| combines(node.attrs()) && few_axes(node),
        ..KernelDef::BASE
    };
    WgpuKernel::new(def, reduce)
}

wgpu_kernels![
    replacing("ScatterElements"),
    replacing("ScatterND"),
    reducing("ScatterElements"),
    reducing("ScatterND"),
    WgpuKernel::new(
        KernelDef { op: "TensorScatter", types: &[("T", TYPES)], in_place: &[(0, 0)], ..KernelDef::BASE },
        tensor_scatter
    ),
];

fn read(cx: &OpCx<'_>) -> Result<Scatter> {
    Scatter::new(cx.op, cx.attrs, &cx.input(0)?.shape, &cx.input(1)?.shape)
}

/// Begins a shader whose `slot(t: u32) -> u32` is the target of an update, or `NONE` if its indices
/// are out of range.
fn targeting(cx: &OpCx<'_>, scatter: &Scatter) -> Result<Shader> {
    let shader = Shader::new(cx).read("indices", cx.input(1)?).constant("NONE", u32::MAX as usize);
    Ok(match &scatter.targets {
        ScatterTargets::Elements(targets) => {
            let walk = Walk::new(&targets.indices, std::slice::from_ref(&targets.steps));
            shader.walk(&walk, &["x"]).number("size", targets.size).number("step", targets.step)
        }
        ScatterTargets::Tuples(tuples) => shader
            .sizes("sizes", &tuples.sizes)
            .sizes("steps", &tuples.steps)
            .constant("DEPTH", tuples.sizes.len())
            .number("run", tuples.run),
    })
}

/// Generates `slot(t)`, `tuple_of(i)` and `element_of(slot, i)`.
fn code_of(scatter: &Scatter) -> &'static str {
    match &scatter.targets {
        ScatterTargets::Elements(_) => {
            "fn slot(t: u32) -> u32 {
                let index = counted(indices(t), p.size);
                if (index < 0 || index >= i32(p.size)) { return NONE; }
                return at_x(t) + u32(index) * p.step;
            }
            fn tuple_of(i: u32) -> u32 { return i; }
            fn element_of(slot: u32, i: u32) -> u32 { return slot; }\n"
        }
        ScatterTargets::Tuples(_) => {
            "fn slot(t: u32) -> u32 {
                var slot = 0u;
                for (var k = 0u; k < DEPTH; k++) {
                    let index = counted(indices(t * DEPTH + k), sizes(k));
                    if (index < 0 || index >= i32(sizes(k))) { return NONE; }
                    slot += u32(index) * steps(k);
                }
                return slot;
            }
            fn tuple_of(i: u32) -> u32 { return i / p.run; }
            fn element_of(slot: u32, i: u32) -> u32 { return slot * p.run + i % p.run; }\n"
        }
    }
}

/// Returns the size of the workspace, which holds the owner of each slot.
fn owners_bytes(cx: &OpCx<'_>) -> Result<usize> {
    let mut taken = 0;
    owners(cx, &read(cx)?, &mut taken);
    Ok(taken)
}

/// For each slot, the number of the last update that targets it, from 1 on. `None` if there is only
/// one update, which cannot conflict.
fn owners(cx: &OpCx<'_>, scatter: &Scatter, taken: &mut usize) -> Option<Operand> {
    (scatter.tuples > 1).then(|| cx.workspace(taken, DType::U32, &[scatter.slots]))
}

/// Replaces elements. If several updates target a slot, the last one wins, as in a sequential loop:
/// a first pass finds the last update of each slot, and only that one writes.
fn replace(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (updates, y) = (cx.input(2)?, cx.output(0)?);
    let scatter = read(cx)?;
    let count = scatter.check_updates(updates.count())?;
    let mut dispatches = copied(cx, cx.input(0)?, y)?;
    let slot = format!("{INDICES}{}", code_of(&scatter));
    let write = |shader: Shader, mine: &str| {
        let code = format!(
            "{slot}
            fn element(i: u32) {{
                let t = tuple_of(i);
                let at = slot(t);
                if (at != NONE && {mine}) {{ set_y(element_of(at, i), updates(i)); }}
            }}"
        );
        shader.read("updates", updates).write("y", y).each(count, &code)
    };
    let Some(owners) = owners(cx, &scatter, &mut 0) else {
        dispatches.push(write(targeting(cx, &scatter)?, "true")?);
        return Ok(dispatches);
    };
    // The workspace has arbitrary contents, and 0 is no update's number.
    let clear = "fn element(i: u32) { set_owners(i, 0u); }";
    dispatches.push(Shader::new(cx).write("owners", &owners).each(scatter.slots, clear)?);
    let mark = format!(
        "{slot}
        fn combine(a: u32, b: u32) -> u32 {{ return max(a, b); }}
        fn element(t: u32) {{
            let at = slot(t);
            if (at != NONE) {{ combine_owners(at, t + 1u); }}
        }}"
    );
    // Several updates may mark a slot at once, so the maximum is taken atomically.
    let shader = targeting(cx, &scatter)?.tensor("owners", &owners, Access::Combine);
    dispatches.push(shader.each(scatter.tuples, &mark)?);
    dispatches.push(write(targeting(cx, &scatter)?.read("owners", &owners), "owners(at) == t + 1u")?);
    Ok(dispatches)
}

fn reduce(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (updates, y) = (cx.input(2)?, cx.output(0)?);
    let scatter = read(cx)?;
    let count = scatter.check_updates(updates.count())?;
    let value = Element::of(y.dtype)?.value;
    // On booleans `add` is "or" and `mul` is "and". `min` and `max` of floats propagate NaN.
    let combined = match (cx.attrs.string("reduction")?, y.dtype, value) {
        ("add", DType::Bool, _) => "max(a, b)",
        ("mul", DType::Bool, _) => "min(a, b)",
        ("add", ..) => "a + b",
        ("mul", ..) => "a * b",
        ("min", _, "f32") => "min_(a, b)",
        ("max", _, "f32") => "max_(a, b)",
        ("min", ..) => "min(a, b)",
        ("max", ..) => "max(a, b)",
        (other, ..) => return Err(error!(InvalidGraph, "the reduction '{other}' is not known")),
    };
    let mut dispatches = copied(cx, cx.input(0)?, y)?;
    let code = format!(
        "{INDICES}{}
        fn combine(a: {value}, b: {value}) -> {value} {{ return {combined}; }}
        fn element(i: u32) {{
            let at = slot(tuple_of(i));
            if (at != NONE) {{ combine_y(element_of(at, i), updates(i)); }}
        }}",
        code_of(&scatter)
    );
    // Updates of one slot run at once, so each combines atomically.
    let shader = targeting(cx, &scatter)?.read("updates", updates).tensor("y", y, Access::Combine);
    dispatches.push(shader.each(count, &code)?);
    Ok(dispatches)
}

fn tensor_scatter(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (cache, update, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    let indices = cx.find_input(2);
    let scatter = TensorScatter::new(cx.attrs, &cache.shape, &update.shape, indices.map(Operand::count))?;
    let mut shader = Shader::new(cx).read("updates", update).write("y", y);
    let mut start = "0";
    if let Some(indices) = indices {
        shader = shader.read("indices", indices);
        start = "indices(prefix / p.per_batch)";
    }
    // A linear update that would leave the cache is dropped, as one with an index out of range is.
    let first = match scatter.circular {
        true => "let first = ((start % size) + size) % size;",
        false => "let first = start; if (first < 0 || first > size - i32(p.length)) { return; }",
    };
    let code = format!(
        "fn element(i: u32) {{
            let row = i / p.run;
            let prefix = row / p.length;
            let size = i32(p.size);
            let start = {start};
            {first}
            let place = (u32(first) + (row - prefix * p.length)) % p.size;
            set_y((prefix * p.size + place) * p.run + (i - row * p.run), updates(i));
        }}"
    );
    let shader = shader.number("run", scatter.run).number("length", scatter.length);
    let shader = shader.number("size", scatter.size).number("per_batch", scatter.per_batch);
    let mut dispatches = copied(cx, cache, y)?;
    dispatches.push(shader.each(update.count(), &code)?);
    Ok(dispatches)
}
