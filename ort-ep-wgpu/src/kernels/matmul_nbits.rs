//! `MatMulNBits`: GEMM with weights of 2, 4 or 8 bits, dequantized from their packed blocks on the
//! fly.

use std::fmt::Write as _;

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::KernelDef;
use ort_core::ops::linalg::problem::NBitsMatMul;
use ort_core::spec::MICROSOFT;
use ort_gpu::nbits;

use super::elementwise::FLOATS;
use super::{WgpuKernel, tiles, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Operand};
use crate::shader::Shader;

/// The most rows for the GEMV kernel.
const FEW_ROWS: usize = 4;
/// The invocations of a workgroup of the GEMV, which computes four columns.
const LANES: usize = 64;

wgpu_kernels![WgpuKernel::new(
    KernelDef {
        domain: MICROSOFT,
        op: "MatMulNBits",
        types: &[("T1", FLOATS)],
        when: nbits::is_covered,
        ..KernelDef::BASE
    },
    dispatches
)];

/// Dequantizes four weights of a word.
const WEIGHTS: &str = "
const CODE: vec4<u32> = vec4<u32>(0u, BITS, 2u * BITS, 3u * BITS);
const MASK: vec4<u32> = vec4<u32>((1u << BITS) - 1u);
fn weights(word: u32, shift: u32, zero: f32, scale: f32) -> vec4<f32> {
    return (vec4<f32>((vec4<u32>(word) >> (CODE + shift)) & MASK) - zero) * scale;
}
";

/// Loads four weights of a column from `k` on, for the tiled GEMM.
const RHS: &str = "
fn rhs(column: u32, k: u32) -> vec4<f32> {
    let bit = k * BITS;
    let block = k / BLOCK;
    let word = b(column * p.words + bit / 32u);
    return weights(word, bit % 32u, zero_point(column, block), scales(column * p.blocks + block));
}
";

/// Begins the shader with its inputs, and generates the functions that read them.
fn inputs(cx: &OpCx<'_>, node: &NBitsMatMul) -> Result<(Shader, String)> {
    let (quantized, scales, zeros) = (cx.input(1)?, cx.input(2)?, cx.find_input(3));
    let packs_zeros = zeros.is_some_and(|zeros| zeros.dtype == DType::U8);
    node.check(|index| cx.find_input(index).map(Operand::count), packs_zeros)?;
    let NBitsMatMul { columns, bits, block, .. } = *node;
    let (words, blocks) = (node.column_bytes() / 4, node.blocks());
    // Read as words: one load has 4 to 16 weights.
    let in_words =
        Operand { arg: quantized.arg, dtype: DType::U32, shape: [columns, words].as_slice().into() };
    let mut shader = Shader::new(cx).read("a", cx.input(0)?).read("b", &in_words).read("scales", scales);
    shader = shader.number("words", words).number("blocks", blocks);
    shader = shader.constant("BITS", bits).constant("BLOCK", block);
    let zero = match zeros {
        // Weights are unsigned, so the default zero point is the middle of their range.
        None => "return f32(1u << (BITS - 1u));",
        Some(zeros) if zeros.dtype == DType::U8 => {
            shader = shader.read("zeros", zeros).number("zero_row", node.zero_bytes());
            "let bit = block * BITS;
            return f32((zeros(column * p.zero_row + bit / 8u) >> (bit % 8u)) & ((1u << BITS) - 1u));"
        }
        Some(zeros) => {
            shader = shader.read("zeros", zeros);
            "return zeros(column * p.blocks + block);"
        }
    };
    let bias = match cx.find_input(5) {
        Some(bias) => {
            shader = shader.read("bias", bias);
            "value + bias(column)"
        }
        None => "value",
    };
    let code = format!(
        "{WEIGHTS}fn zero_point(column: u32, block: u32) -> f32 {{ {zero} }}\n\
         fn result(row: u32, column: u32, value: f32) {{ set_y(row * p.n + column, {bias}); }}\n"
    );
    Ok((shader.write("y", cx.output(0)?), code))
}

fn dispatches(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let node = NBitsMatMul::new(cx.attrs)?;
    let rows = node.rows(&cx.input(0)?.shape)?;
    if rows == 0 {
        return Ok(Vec::new());
    }
    let (shader, code) = inputs(cx, &node)?;
    // Few rows would leave most of a tile idle.
    if rows <= FEW_ROWS {
        return Ok(vec![vectors(shader, &node, rows, &code)?]);
    }
    let sizes = [rows, node.columns, node.depth];
    Ok(vec![tiles::product(shader, sizes, &format!("{code}{}{RHS}", tiles::row_of_four("lhs", "a")))?])
}

/// The GEMV: a workgroup computes four columns of all rows, and its invocations split the words.
fn vectors(shader: Shader, node: &NBitsMatMul, rows: usize, code: &str) -> Result<Dispatch> {
    let (mut start, mut steps, mut end) = (String::new(), String::new(), String::new());
    // Writing to a string does not fail.
    for row in 0..rows {
        let _ = writeln!(start, "var sums{row} = vec4<f32>(0.0, 0.0, 0.0, 0.0);");
        let _ = writeln!(end, "sums[lane * ROWS + {row}u] = sums{row};");
    }
    for column in 0..4 {
        let _ = writeln!(
            steps,
            "let own{column} = min(column + {column}u, p.n - 1u);\n\
             let word{column} = b(own{column} * p.words + w);\n\
             let scale{column} = scales(own{column} * p.blocks + block);\n\
             let zero{column} = zero_point(own{column}, block);"
        );
    }
    // Unrolled over the fours of weights in a word.
    for part in 0..8 / node.bits {
        let shift = part * 4 * node.bits;
        for column in 0..4 {
            let _ = writeln!(
                steps,
                "let rhs{part}{column} = weights(word{column}, {shift}u, zero{column}, scale{column});"
            );
        }
        for row in 0..rows {
            let dots: Vec<String> =
                (0..4).map(|column| format!("dot(lhs{part}{row}, rhs{part}{column})")).collect();
            let _ = writeln!(
                steps,
                "let lhs{part}{row} = lhs({row}u, k + {}u);\nsums{row} += vec4<f32>({});",
                4 * part,
                dots.join(", ")
            );
        }
    }
    let group = format!(
        "var<workgroup> sums: array<vec4<f32>, LANES * ROWS>;
        fn group(index: u32, lane: u32) {{
            let column = index * 4u;
            {start}
            for (var w = lane; w < p.words; w += LANES) {{
                let k = w * (32u / BITS);
                let block = k / BLOCK;
                {steps}
            }}
            {end}
            for (var step = LANES / 2u; step > 0u; step = step >> 1u) {{
                workgroupBarrier();
                if (lane < step) {{
                    for (var row = 0u; row < ROWS; row++) {{
                        sums[lane * ROWS + row] += sums[(lane + step) * ROWS + row];
                    }}
                }}
            }}
            workgroupBarrier();
            if (lane < 4u * ROWS && column + lane % 4u < p.n) {{
                result(lane / 4u, column + lane % 4u, sums[lane / 4u][lane % 4u]);
            }}
        }}\n"
    );
    let shader = shader.number("k", node.depth).number("n", node.columns).constant("ROWS", rows);
    shader.groups(
        // Four columns share each load of the left operand.
        node.columns.div_ceil(4),
        LANES,
        &format!("{code}{}{group}", tiles::row_of_four("lhs", "a")),
    )
}
