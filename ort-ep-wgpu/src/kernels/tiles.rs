//! Tiled GEMM in workgroup memory, with operands that the kernel loads by its own functions.

use std::fmt::Write as _;

use ort_core::Result;

use crate::launch::Dispatch;
use crate::shader::Shader;

/// The columns of a tile.
const COLUMNS: usize = 64;
/// The invocations of a workgroup.
const LANES: usize = 256;

/// Finishes a dispatch of a GEMM of `m` rows, `n` columns and depth `k`. The code declares
/// `lhs(row, k)` and `rhs(column, k)`, which return a `vec4<f32>` of four consecutive `k`,
/// starting at a multiple of 4. Past the end, the lhs must be zero and the rhs finite. It also
/// declares `result(row, column, value)`.
pub(super) fn product(shader: Shader, [m, n, k]: [usize; 3], code: &str) -> Result<Dispatch> {
    // Each invocation accumulates `own` rows of four columns. Few rows do not fill the larger tile.
    let own = if m <= 16 { 1 } else { 4 };
    let rows = own * 16;
    let (mut start, mut step, mut end) = (String::new(), String::new(), String::new());
    for i in 0..own {
        // Writing to a string does not fail.
        let _ = writeln!(start, "var sums{i} = vec4<f32>(0.0, 0.0, 0.0, 0.0);");
        let _ = writeln!(
            step,
            "let lhs{i} = lhs_tile[(ty + {}u) * LINE + quad];\n\
             sums{i} += vec4<f32>(dot(lhs{i}, a), dot(lhs{i}, b), dot(lhs{i}, c), dot(lhs{i}, d));",
            16 * i
        );
        let _ = writeln!(end, "store(row + ty + {}u, column + tx, sums{i});", 16 * i);
    }
    let group = format!(
        "fn group(index: u32, lane: u32) {{
            let row_tiles = (p.m + ROWS - 1u) / ROWS;
            let row = index % row_tiles * ROWS;
            let column = index / row_tiles * COLUMNS;
            let tx = lane % 16u;
            let ty = lane / 16u;
            {start}
            for (var depth = 0u; depth < p.k; depth += 4u * QUADS) {{
                load_tiles(row, column, depth, lane);
                workgroupBarrier();
                for (var quad = 0u; quad < QUADS; quad++) {{
                    let at = tx * LINE + quad;
                    let a = rhs_tile[at];
                    let b = rhs_tile[at + 16u * LINE];
                    let c = rhs_tile[at + 32u * LINE];
                    let d = rhs_tile[at + 48u * LINE];
                    {step}
                }}
                workgroupBarrier();
            }}
            {end}
        }}\n"
    );
    let shader = shader.number("m", m).number("n", n).number("k", k).constant("ROWS", rows);
    let groups = m.div_ceil(rows).saturating_mul(n.div_ceil(COLUMNS));
    shader.groups(groups, LANES, &format!("{}{code}\n{group}", include_str!("tiles.wgsl")))
}

/// Generates `fn NAME(row: u32, k: u32) -> vec4<f32>`: four consecutive elements of a tensor's row
/// of `p.k` elements, padded with zeros.
pub(super) fn row_of_four(name: &str, tensor: &str) -> String {
    format!(
        "fn {name}(row: u32, k: u32) -> vec4<f32> {{
            let at = row * p.k + k;
            if (k + 4u <= p.k) {{
                return vec4<f32>({tensor}(at), {tensor}(at + 1u), {tensor}(at + 2u), {tensor}(at + 3u));
            }}
            var four = vec4<f32>(0.0, 0.0, 0.0, 0.0);
            if (k < p.k) {{ four.x = {tensor}(at); }}
            if (k + 1u < p.k) {{ four.y = {tensor}(at + 1u); }}
            if (k + 2u < p.k) {{ four.z = {tensor}(at + 2u); }}
            return four;
        }}\n"
    )
}
