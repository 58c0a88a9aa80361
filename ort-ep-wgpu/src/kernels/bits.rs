//! Bitwise operators and `BitShift`, with broadcast inputs.

use ort_core::Result;
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{KernelDef, NodeView};

use super::fill::{few_axes, fill};
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Walk};
use crate::shader::{Shader, TYPES};

const INTEGERS: TypeSet = TypeSet::INTEGERS.intersection(TYPES);
/// Without `U64`: the complement of such an integer needs all 64 bits.
const INVERTIBLE: TypeSet = INTEGERS.difference(TypeSet::of(&[DType::U64]));

const fn of_bits(op: &'static str, dispatches: fn(&OpCx<'_>) -> Result<Vec<Dispatch>>) -> WgpuKernel {
    let (types, in_place) = (&[("T", INTEGERS)], &[(0, 0), (1, 0)]);
    WgpuKernel::new(KernelDef { op, types, in_place, when: few_axes, ..KernelDef::BASE }, dispatches)
}

wgpu_kernels![
    of_bits("BitwiseAnd", |cx| dispatches(cx, "a & b")),
    of_bits("BitwiseOr", |cx| dispatches(cx, "a | b")),
    of_bits("BitwiseXor", |cx| dispatches(cx, "a ^ b")),
    WgpuKernel::new(
        KernelDef { op: "BitwiseNot", types: &[("T", INVERTIBLE)], in_place: &[(0, 0)], ..KernelDef::BASE },
        |cx| dispatches(cx, "~a"),
    ),
    WgpuKernel::new(
        KernelDef {
            op: "BitShift",
            types: &[("T", INTEGERS)],
            in_place: &[(0, 0), (1, 0)],
            when: shifts_within_32_bits,
            ..KernelDef::BASE
        },
        |cx| dispatches(cx, shift(cx)?),
    ),
];

/// Returns whether results fit the 32 bits of shaders: 64-bit integers only shift right.
fn shifts_within_32_bits(node: &NodeView<'_>) -> bool {
    let wide = matches!(node.dtype(0), Some(DType::I64 | DType::U64));
    few_axes(node) && (!wide || node.attrs().string("direction").is_ok_and(|direction| direction == "RIGHT"))
}

/// The WGSL expression of a shift. WGSL shifts by the count modulo 32. A count beyond the width
/// gives zeros to the left, and copies of the sign to the right.
fn shift(cx: &OpCx<'_>) -> Result<&'static str> {
    Ok(match cx.attrs.string("direction")? {
        "LEFT" => "select(a << (u32(b) & 31u), y_t(0), u32(b) > 31u)",
        _ => "select(a >> (u32(b) & 31u), select(y_t(0), ~y_t(0), a < y_t(0)), u32(b) > 31u)",
    })
}

/// `result` is a WGSL expression of `a` and `b`.
fn dispatches(cx: &OpCx<'_>, result: &str) -> Result<Vec<Dispatch>> {
    let y = cx.output(0)?;
    let mut shader = Shader::new(cx).write("y", y);
    let (mut shapes, mut values) = (Vec::new(), String::new());
    for (index, (name, value)) in (0..cx.inputs.len()).zip([("x0", "a"), ("x1", "b")]) {
        let tensor = cx.input(index)?;
        shader = shader.read(name, tensor);
        shapes.push(&*tensor.shape);
        values += &format!("let {value} = {name}(at_{name}(i));\n");
    }
    let shader = shader.walk(&Walk::broadcast(&y.shape, &shapes)?, &["x0", "x1"]);
    let code = format!("fn value(i: u32) -> y_t {{\n{values}return {result};\n}}");
    Ok(vec![fill(shader, y, &code)?])
}
