//! `ArgMax` and `ArgMin`.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{KernelDef, NodeView};
use ort_core::{Result, ensure};

use super::rows::TeamRows;
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Operand};
use crate::shader::{Element, MOST_AXES, Shader, TYPES};

const COMPARED: TypeSet = TYPES.difference(TypeSet::of(&[DType::Bool]));

const fn arg(op: &'static str) -> WgpuKernel {
    WgpuKernel::new(KernelDef { op, types: &[("T", COMPARED)], when, ..KernelDef::BASE }, dispatches)
}

wgpu_kernels![arg("ArgMax"), arg("ArgMin")];

fn when(node: &NodeView<'_>) -> bool {
    node.rank(0).is_some_and(|rank| rank <= MOST_AXES)
}

fn dispatches(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let axis = cx.axis(cx.attrs.int("axis")?, x.rank())?;
    let rows = TeamRows::along_axis(&x.shape, axis);
    ensure!(y.count() == 0 || rows.len > 0, InvalidArgument, "axis {axis} has no element to choose");
    rows.check_results(y.count())?;
    let last = cx.attrs.flag("select_last_index")?;
    let code = format!(
        "{search}
        fn group(index: u32, lane: u32) {{
            let row = row_of(index, lane);
            let best = searched(row, lane);
            if (row < p.rows && part_of(lane) == 0u) {{ set_y(row, i32(best)); }}
        }}",
        search = search(&rows, x, cx.op == "ArgMax", last)?,
    );
    Ok(vec![rows.dispatch(Shader::new(cx).read("x", x).write("y", y), 1, &code)?])
}

/// Generates a function `searched(row, lane)` that returns the index of the greatest or least
/// element of a row of `x`: the first one, or the last. NaN wins over any number, as in NumPy.
pub(super) fn search(rows: &TeamRows, x: &Operand, greatest: bool, last: bool) -> Result<String> {
    let better = if greatest { "b.value > a.value" } else { "b.value < a.value" };
    let later = if last { "b.place > a.place" } else { "b.place < a.place" };
    // Integers are never NaN.
    let of_nan = match Element::of(x.dtype)?.value {
        "f32" => "let a_nan = is_nan(a.value); let b_nan = is_nan(b.value);",
        _ => "let a_nan = false; let b_nan = false;",
    };
    Ok(format!(
        "const NOWHERE: u32 = 0xffffffffu;
        struct Best {{ value: x_t, place: u32 }}
        fn better(a: Best, b: Best) -> Best {{
            if (a.place == NOWHERE) {{ return b; }}
            if (b.place == NOWHERE) {{ return a; }}
            {of_nan}
            var take_b = {better};
            if (a_nan != b_nan) {{ take_b = b_nan; }}
            else if (a_nan || a.value == b.value) {{ take_b = {later}; }}
            if (take_b) {{ return b; }}
            return a;
        }}
        {tree}
        fn searched(row: u32, lane: u32) -> u32 {{
            let end = select(0u, p.length, row < p.rows);
            let begin = at_row(row);
            var best = Best(x_t(0), NOWHERE);
            for (var r = part_of(lane); r < end; r += PARTS) {{
                best = better(best, Best(x(begin + at_along(r)), r));
            }}
            return best_of(best, lane).place;
        }}",
        tree = rows.tree("best_of", "Best", "better(a, b)"),
    ))
}
