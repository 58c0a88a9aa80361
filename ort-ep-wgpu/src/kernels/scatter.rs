//! `ScatterElements`, `ScatterND` and `TensorScatter`. Updates with an index out of range are
//! dropped.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{KernelDef, NodeView};
use ort_core::{Result, ensure, error};

use super::gather::{Tuples, elements_walk};
use super::indexing::{INDICES, around, copied, few_axes};
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Operand};
use crate::shader::{Access, Element, Shader, TYPES};

/// The types that reductions support: an element must fit the word of a compare-exchange.
const COMBINED: TypeSet = TYPES.difference(TypeSet::of(&[DType::I64, DType::U64]));

const fn replacing(op: &'static str) -> WgpuKernel {
    let def = KernelDef {
        op,
        types: &[("T", TYPES)],
        in_place: &[(0, 0)],
        when: |node| !reduces(node) && few_axes(node),
        ..KernelDef::BASE
    };
    WgpuKernel { workspace: Some(owners_bytes), ..WgpuKernel::new(def, replace) }
}

const fn reducing(op: &'static str) -> WgpuKernel {
    let def = KernelDef {
        op,
        types: &[("T", COMBINED)],
        in_place: &[(0, 0)],
        when: |node| reduces(node) && few_axes(node),
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

fn reduces(node: &NodeView<'_>) -> bool {
    node.attrs().find_string("reduction").unwrap_or("none") != "none"
}

/// The targets of updates: `tuples` updates of `run` elements, each to one of `slots` slots of the
/// data.
struct Places {
    tuples: usize,
    run: usize,
    slots: usize,
}

impl Places {
    fn new(cx: &OpCx<'_>) -> Result<Places> {
        let (data, indices) = (cx.input(0)?, cx.input(1)?);
        if cx.op == "ScatterElements" {
            return Ok(Places { tuples: indices.count(), run: 1, slots: data.count() });
        }
        let tuples = Tuples::new(&data.shape, &indices.shape, 0)?;
        let outer = indices.shape.split_last().map_or(0, |(_, outer)| outer.iter().product());
        Ok(Places { tuples: outer, run: tuples.run, slots: tuples.sizes.iter().product() })
    }

    /// Begins a shader whose `slot(t: u32) -> u32` is the target of an update, or `NONE` if its
    /// indices are out of range.
    fn shader(&self, cx: &OpCx<'_>) -> Result<Shader> {
        let (data, indices) = (cx.input(0)?, cx.input(1)?);
        let count = data.count();
        ensure!(count <= i32::MAX as usize, NotImplemented, "data {:?} are beyond 31 bits", data.shape);
        let shader = Shader::new(cx).read("indices", indices).constant("NONE", u32::MAX as usize);
        if cx.op == "ScatterElements" {
            let axis = cx.axis(cx.attrs.int("axis")?, data.rank())?;
            let walk = elements_walk(&data.shape, &indices.shape, axis)?;
            let shader = shader.walk(&walk, &["x"]).number("size", data.size(axis));
            return Ok(shader.number("step", around(&data.shape, axis)[2]));
        }
        let tuples = Tuples::new(&data.shape, &indices.shape, 0)?;
        let shader = shader.sizes("sizes", &tuples.sizes).sizes("steps", &tuples.steps);
        Ok(shader.constant("DEPTH", tuples.sizes.len()).number("run", self.run))
    }

    /// Generates `slot(t)`, `tuple_of(i)` and `element_of(slot, i)`.
    fn code(cx: &OpCx<'_>) -> &'static str {
        if cx.op == "ScatterElements" {
            return "fn slot(t: u32) -> u32 {
                let index = counted(indices(t), p.size);
                if (index < 0 || index >= i32(p.size)) { return NONE; }
                return at_x(t) + u32(index) * p.step;
            }
            fn tuple_of(i: u32) -> u32 { return i; }
            fn element_of(slot: u32, i: u32) -> u32 { return slot; }\n";
        }
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

/// Returns the size of the workspace, which holds the owner of each slot.
fn owners_bytes(cx: &OpCx<'_>) -> Result<usize> {
    let mut taken = 0;
    owners(cx, &Places::new(cx)?, &mut taken);
    Ok(taken)
}

/// For each slot, the number of the last update that targets it, from 1 on. `None` if there is only
/// one update, which cannot conflict.
fn owners(cx: &OpCx<'_>, places: &Places, taken: &mut usize) -> Option<Operand> {
    (places.tuples > 1).then(|| cx.workspace(taken, DType::U32, &[places.slots]))
}

fn check_updates(places: &Places, updates: &Operand) -> Result<usize> {
    let count = places.tuples.saturating_mul(places.run);
    ensure!(updates.count() == count, InvalidArgument, "{} updates, expected {count}", updates.count());
    Ok(count)
}

/// Replaces elements. If several updates target a slot, the last one wins, as in a sequential loop:
/// a first pass finds the last update of each slot, and only that one writes.
fn replace(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (updates, y) = (cx.input(2)?, cx.output(0)?);
    let places = Places::new(cx)?;
    let count = check_updates(&places, updates)?;
    let mut dispatches = copied(cx, cx.input(0)?, y)?;
    let slot = format!("{INDICES}{}", Places::code(cx));
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
    let Some(owners) = owners(cx, &places, &mut 0) else {
        dispatches.push(write(places.shader(cx)?, "true")?);
        return Ok(dispatches);
    };
    let clear = "fn element(i: u32) { set_owners(i, 0u); }";
    dispatches.push(Shader::new(cx).write("owners", &owners).each(places.slots, clear)?);
    let mark = format!(
        "{slot}
        fn combine(a: u32, b: u32) -> u32 {{ return max(a, b); }}
        fn element(t: u32) {{
            let at = slot(t);
            if (at != NONE) {{ combine_owners(at, t + 1u); }}
        }}"
    );
    let shader = places.shader(cx)?.tensor("owners", &owners, Access::Combine);
    dispatches.push(shader.each(places.tuples, &mark)?);
    dispatches.push(write(places.shader(cx)?.read("owners", &owners), "owners(at) == t + 1u")?);
    Ok(dispatches)
}

fn reduce(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (updates, y) = (cx.input(2)?, cx.output(0)?);
    let places = Places::new(cx)?;
    let count = check_updates(&places, updates)?;
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
        Places::code(cx)
    );
    let shader = places.shader(cx)?.read("updates", updates).tensor("y", y, Access::Combine);
    dispatches.push(shader.each(count, &code)?);
    Ok(dispatches)
}

fn tensor_scatter(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (cache, update, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    let axis = cx.axis(cx.attrs.int("axis")?, cache.rank())?;
    let [prefixes, size, run] = around(&cache.shape, axis);
    let (length, batch) = (update.size(axis), cache.size(0));
    let mut sizes = cache.shape.iter().zip(&update.shape).enumerate();
    let same = cache.rank() == update.rank() && sizes.all(|(other, (a, b))| other == axis || a == b);
    ensure!(
        axis > 0 && same && length <= size,
        InvalidArgument,
        "an update of shape {:?} for a cache of shape {:?}",
        update.shape,
        cache.shape
    );
    let mut shader = Shader::new(cx).read("updates", update).write("y", y);
    let mut start = "0";
    if let Some(indices) = cx.find_input(2) {
        ensure!(
            indices.count() == batch,
            InvalidArgument,
            "got {} write indices, expected {batch}",
            indices.count()
        );
        shader = shader.read("indices", indices);
        start = "indices(prefix / p.per_batch)";
    }
    // A linear update that would leave the cache is dropped, as one with an index out of range is.
    let circular = cx.attrs.string("mode")? == "circular";
    let first = match circular {
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
    let shader = shader.number("run", run).number("length", length).number("size", size);
    let shader = shader.number("per_batch", prefixes.checked_div(batch).unwrap_or(0));
    let mut dispatches = copied(cx, cache, y)?;
    dispatches.push(shader.each(update.count(), &code)?);
    Ok(dispatches)
}
