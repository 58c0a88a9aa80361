//! `TopK`: rank counting for short rows, a bitonic sort in workgroup memory for longer ones, and
//! merge passes beyond a block.

use std::ops::Deref;

use ort_core::Result;
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::KernelDef;
use ort_core::ops::reduce::problem::RankedRows;

use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Operand};
use crate::shader::{Element, Shader, TYPES};

/// The longest row whose ranks are counted by comparing all pairs.
const SHORT: usize = 64;
/// The elements that a workgroup sorts in its memory.
const BLOCK: usize = 2048;
/// The most invocations of a workgroup.
const LANES: usize = 256;

const NUMBERS: TypeSet = TYPES.difference(TypeSet::of(&[DType::Bool]));

wgpu_kernels![WgpuKernel {
    workspace: Some(workspace),
    ..WgpuKernel::new(
        KernelDef { op: "TopK", types: &[("T", NUMBERS)], host_inputs: &[1], ..KernelDef::BASE },
        dispatches
    )
}];

/// The rows of a tensor along an axis.
struct TopKRows(RankedRows);

impl Deref for TopKRows {
    type Target = RankedRows;

    fn deref(&self) -> &RankedRows {
        &self.0
    }
}

impl TopKRows {
    fn new(cx: &OpCx<'_>) -> Result<TopKRows> {
        // One of the outputs may have no reader.
        let y = cx.find_output(0).map_or_else(|| cx.output(1), Ok)?;
        RankedRows::of_top_k(cx.attrs, &cx.input(0)?.shape, &y.shape).map(TopKRows)
    }

    /// Returns the shape of the best elements of sorted parts: rows, parts, and elements kept of
    /// each part of `size` elements.
    fn parts(&self, size: usize) -> [usize; 3] {
        // No part keeps more than the k best, because no more of them can be among the k best of
        // all.
        [self.count, self.len.div_ceil(size), self.kept.min(size)]
    }

    fn shader(&self, cx: &OpCx<'_>) -> Result<Shader> {
        let shader = Shader::new(cx).read("x", cx.input(0)?);
        let shader = shader.number("len", self.len).number("inner", self.inner);
        Ok(shader.number("kept", self.kept))
    }
}

/// Allocates the keys and indices between passes, double-buffered.
fn buffers(cx: &OpCx<'_>, rows: &TopKRows, taken: &mut usize) -> [[Operand; 2]; 2] {
    let sizes =
        // The sizes of the parts before each merge.
        std::iter::successors(Some(BLOCK), |size| size.checked_mul(2)).take_while(|size| *size < rows.len);
    let row = sizes.map(|size| rows.parts(size)).map(|[_, parts, kept]| parts.saturating_mul(kept)).max();
    let shape = [rows.count, row.unwrap_or(0)];
    [(); 2].map(|()| [(); 2].map(|()| cx.workspace(taken, DType::U32, &shape)))
}

fn workspace(cx: &OpCx<'_>) -> Result<usize> {
    let rows = TopKRows::new(cx)?;
    let mut taken = 0;
    if rows.len > BLOCK {
        buffers(cx, &rows, &mut taken);
    }
    Ok(taken)
}

/// WGSL functions: `row_at(row, place)` is the index of an element, and `before(..)` tells
/// whether a key and place sort before others.
const ORDER: &str = "
fn row_at(row: u32, place: u32) -> u32 {
    return (row / p.inner * p.len + place) * p.inner + row % p.inner;
}
fn before(own: u32, place: u32, other: u32, other_place: u32) -> bool {
    return own < other || (own == other && place < other_place);
}
";

/// Generates `key(i)`: ascending keys are in output order. NaN is above every number.
fn key(cx: &OpCx<'_>) -> Result<String> {
    let ascending = match Element::of(cx.input(0)?.dtype)?.value {
        "f32" => {
            "if (is_nan(value)) { bits = 0xffffffffu; }
            else if (value == 0.0) { bits = 0x80000000u; }
            else { bits ^= select(0x80000000u, 0xffffffffu, (bits >> 31u) == 1u); }"
        }
        // Flipping the sign bit makes signed numbers compare as unsigned.
        "i32" => "bits ^= 0x80000000u;",
        _ => "",
    };
    let result = if cx.attrs.flag("largest")? { "~bits" } else { "bits" };
    Ok(format!(
        "fn key(i: u32) -> u32 {{
            let value = x(i);
            var bits = bitcast<u32>(value);
            {ascending}
            return {result};
        }}\n"
    ))
}

/// Generates `keep(row, part, rank, own, place)`, which stores an element of key `own` at its
/// rank: to the results, or to the elements kept of a part.
fn keeping(cx: &OpCx<'_>, mut shader: Shader, to: Option<&[Operand; 2]>) -> (Shader, String) {
    let mut sets = String::new();
    if let Some([keys, places]) = to {
        shader = shader.write("kept_keys", keys).write("kept_places", places);
        sets.push_str(
            "let at = part * p.merged_capacity + rank;
            set_kept_keys(at, own);
            set_kept_places(at, place);",
        );
    } else {
        sets.push_str("let at = (row / p.inner * p.kept + rank) * p.inner + row % p.inner;\n");
        if let Some(values) = cx.find_output(0) {
            shader = shader.write("values", values);
            sets.push_str("set_values(at, x(row_at(row, place)));\n");
        }
        if let Some(indices) = cx.find_output(1) {
            shader = shader.write("indices", indices);
            sets.push_str("set_indices(at, i32(place));\n");
        }
    }
    let code = format!("fn keep(row: u32, part: u32, rank: u32, own: u32, place: u32) {{\n{sets}\n}}\n");
    (shader, code)
}

fn dispatches(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let rows = TopKRows::new(cx)?;
    rows.check_k(&cx.ints(1)?)?;
    if rows.len <= SHORT {
        return Ok(vec![counted(cx, &rows)?]);
    }
    if rows.len <= BLOCK {
        return Ok(vec![sorted(cx, &rows, None)?]);
    }
    let [mut from, mut to] = buffers(cx, &rows, &mut 0);
    let mut dispatches = vec![sorted(cx, &rows, Some(&from))?];
    let mut size = BLOCK;
    while size < rows.len {
        let is_last = size.saturating_mul(2) >= rows.len;
        dispatches.push(merged(cx, &rows, size, (&from, (!is_last).then_some(&to)))?);
        // The output of this pass is the input of the next.
        std::mem::swap(&mut from, &mut to);
        size = size.saturating_mul(2);
    }
    Ok(dispatches)
}

/// Counts the rank of each element, one invocation per element.
fn counted(cx: &OpCx<'_>, rows: &TopKRows) -> Result<Dispatch> {
    let (shader, keep) = keeping(cx, rows.shader(cx)?, None);
    let code = format!(
        "{ORDER}{}{keep}
        fn element(i: u32) {{
            let step = i / p.inner;
            let outer = step / p.len;
            let row = outer * p.inner + (i - step * p.inner);
            let place = step - outer * p.len;
            let own = key(i);
            var rank = 0u;
            for (var other = 0u; other < p.len; other++) {{
                rank += select(0u, 1u, before(key(row_at(row, other)), other, own, place));
            }}
            if (rank < p.kept) {{ keep(row, 0u, rank, own, place); }}
        }}",
        key(cx)?
    );
    shader.each(rows.count.saturating_mul(rows.len), &code)
}

/// Sorts parts of rows, one per workgroup, after K. E. Batcher, "Sorting networks and their
/// applications" (1968). Stores the results, or the best keys and indices of each part.
fn sorted(cx: &OpCx<'_>, rows: &TopKRows, to: Option<&[Operand; 2]>) -> Result<Dispatch> {
    let size = rows.len.min(BLOCK).next_power_of_two();
    let [_, parts, capacity] = rows.parts(BLOCK);
    let shader = rows.shader(cx)?.constant("SIZE", size).number("parts", parts);
    let shader = shader.number("capacity", capacity).number("merged_capacity", capacity);
    let (shader, keep) = keeping(cx, shader, to);
    let code = format!("{ORDER}{}{keep}{}", key(cx)?, include_str!("top_k_sort.wgsl"));
    shader.groups(rows.count.saturating_mul(parts), (size / 2).min(LANES), &code)
}

/// Merges pairs of sorted parts of `size` elements: each element goes to its rank in both.
fn merged(
    cx: &OpCx<'_>,
    rows: &TopKRows,
    size: usize,
    (from, to): (&[Operand; 2], Option<&[Operand; 2]>),
) -> Result<Dispatch> {
    let [count, parts, capacity] = rows.parts(size);
    let [_, merged_parts, merged_capacity] = rows.parts(size.saturating_mul(2));
    let [keys, places] = from;
    let shader = rows.shader(cx)?.read("keys", keys).read("places", places);
    let shader = shader.number("parts", parts).number("capacity", capacity).number("size", size);
    let shader = shader.number("merged_parts", merged_parts).number("merged_capacity", merged_capacity);
    let (shader, keep) = keeping(cx, shader, to);
    let code = format!("{ORDER}{keep}{}", include_str!("top_k_merge.wgsl"));
    shader.each(count.saturating_mul(parts).saturating_mul(capacity), &code)
}
