//! Normalizations along one axis: `Softmax`, `LogSoftmax`, `Hardmax` and `LpNormalization`.

use ort_core::Result;
use ort_core::ep::{KernelDef, NodeView};

use super::arg::search;
use super::elementwise::FLOATS;
use super::rows::TeamRows;
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Operand};
use crate::shader::{MOST_AXES, Shader};

const fn along_axis(op: &'static str) -> WgpuKernel {
    // Aliasing is safe: a lane reads only elements that it writes, and writes each after its last
    // read.
    let def = KernelDef { op, types: &[("T", FLOATS)], in_place: &[(0, 0)], when, ..KernelDef::BASE };
    WgpuKernel::new(def, dispatches)
}

wgpu_kernels![
    along_axis("Softmax"),
    along_axis("LogSoftmax"),
    along_axis("Hardmax"),
    along_axis("LpNormalization")
];

fn when(node: &NodeView<'_>) -> bool {
    node.rank(0).is_some_and(|rank| rank <= MOST_AXES)
}

fn dispatches(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let axis = cx.axis(cx.attrs.int("axis")?, x.rank())?;
    let rows = TeamRows::along_axis(&x.shape, axis);
    // Results by the running maximum `state.x` and sum `state.y`.
    let code = match cx.op {
        "Softmax" => softmax(&rows, "exp_(v - state.x) * scale"),
        "LogSoftmax" => softmax(&rows, "v - state.x - scale"),
        "Hardmax" => {
            let pass = pass("let best = searched(row, lane);", "select(0.0, 1.0, r == best)");
            search(&rows, x, true, false)? + &pass
        }
        _ => lp(&rows, cx.attrs.int("p")?),
    };
    Ok(vec![rows.dispatch(Shader::new(cx).read("x", x).write("y", y), 1, &code)?])
}

/// Returns an in-place softmax of each row of scores. A row without a score becomes zeros.
pub(super) fn weights(cx: &OpCx<'_>, scores: &Operand) -> Result<Dispatch> {
    let len = scores.shape.last().copied().unwrap_or(0);
    let rows = TeamRows::rows(scores.count().checked_div(len).unwrap_or(0), len);
    let code = softmax(&rows, "select(exp_(v - state.x) * scale, 0.0, state.y == 0.0)");
    // In place: the scores are both input and output.
    rows.dispatch(Shader::new(cx).write("x", scores), 1, &code.replace("set_y(", "set_x("))
}

/// Generates a pass that computes a statistic of a row with `find`, then writes `result` of each
/// element `v` at `r`.
fn pass(find: &str, result: &str) -> String {
    format!(
        "fn group(index: u32, lane: u32) {{
            let row = row_of(index, lane);
            let end = select(0u, p.length, row < p.rows);
            let begin = at_row(row);
            {find}
            for (var r = part_of(lane); r < end; r += PARTS) {{
                let place = begin + at_along(r);
                let v = x(place);
                set_y(place, {result});
            }}
        }}"
    )
}

/// Online softmax: one sweep finds the maximum and the sum of exponentials, rescaling the sum if
/// the maximum grows (Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv
/// 1805.02867).
fn softmax(rows: &TeamRows, result: &str) -> String {
    let tree = rows.tree("joined", "vec2<f32>", "join(a, b)");
    // The softmax multiplies by the inverse of the sum, its logarithm subtracts.
    let scale = if result.contains("exp_") { "1.0 / state.y" } else { "log_(state.y)" };
    let find = format!(
        "var state = vec2<f32>(-infinity(), 0.0);
        for (var r = part_of(lane); r < end; r += PARTS) {{
            let v = x(begin + at_along(r));
            if (!(v < -3.4028235e38)) {{
                let power = exp_(-abs(v - state.x));
                if (v > state.x) {{ state = vec2<f32>(v, state.y * power + 1.0); }}
                else {{ state.y += power; }}
            }}
        }}
        state = joined(state, lane);
        var scale = {scale};
        if (state.y == 0.0 || is_inf(state.x)) {{ scale = nan(); }}"
    );
    let join = "fn join(a: vec2<f32>, b: vec2<f32>) -> vec2<f32> {
            if (b.y == 0.0) { return a; }
            if (a.y == 0.0) { return b; }
            let top = max(a.x, b.x);
            return vec2<f32>(top, a.y * exp_(a.x - top) + b.y * exp_(b.x - top));
        }\n";
    format!("{join}{tree}{}", pass(&find, result))
}

fn lp(rows: &TeamRows, p: i64) -> String {
    // ONNX has `p` 1 and 2 only.
    let (map, norm) = if p == 1 { ("abs(v)", "all") } else { ("v * v", "sqrt(all)") };
    let find = format!(
        "var all = 0.0;
        for (var r = part_of(lane); r < end; r += PARTS) {{
            let v = x(begin + at_along(r));
            all += {map};
        }}
        all = total(all, lane);
        let norm = {norm};
        // A row without length stays zero.
        let divisor = select(norm, 1.0, norm == 0.0);"
    );
    rows.tree("total", "f32", "a + b") + &pass(&find, "v / divisor")
}
