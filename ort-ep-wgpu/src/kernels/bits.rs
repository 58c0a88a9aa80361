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

const fn of_bits(op: &'static str, types: &'static [(&'static str, TypeSet)]) -> WgpuKernel {
    let def = KernelDef { op, types, in_place: &[(0, 0), (1, 0)], when: few_axes, ..KernelDef::BASE };
    WgpuKernel::new(def, dispatches)
}

wgpu_kernels![
    of_bits("BitwiseAnd", &[("T", INTEGERS)]),
    of_bits("BitwiseOr", &[("T", INTEGERS)]),
    of_bits("BitwiseXor", &[("T", INTEGERS)]),
    WgpuKernel::new(
        KernelDef { op: "BitwiseNot", types: &[("T", INVERTIBLE)], in_place: &[(0, 0)], ..KernelDef::BASE },
        dispatches,
    ),
    WgpuKernel::new(
        KernelDef {
            op: "BitShift",
            types: &[("T", INTEGERS)],
            in_place: &[(0, 0), (1, 0)],
            when: shifts_within_32_bits,
            ..KernelDef::BASE
        },
        dispatches,
    ),
];

/// Returns whether results fit the 32 bits of shaders: 64-bit integers only shift right.
fn shifts_within_32_bits(node: &NodeView<'_>) -> bool {
    let wide = matches!(node.dtype(0), Some(DType::I64 | DType::U64));
    few_axes(node) && (!wide || node.attrs().string("direction").is_ok_and(|direction| direction == "RIGHT"))
}

/// The WGSL expression of the operator, on `a` and `b`.
fn formula(cx: &OpCx<'_>) -> Result<&'static str> {
    Ok(match cx.op {
        "BitwiseAnd" => "a & b",
        "BitwiseOr" => "a | b",
        "BitwiseXor" => "a ^ b",
        "BitwiseNot" => "~a",
        // WGSL shifts by the count modulo 32. A count beyond the width gives zeros to the left, and
        // copies of the sign to the right.
        _ if cx.attrs.string("direction")? == "LEFT" => "select(a << (u32(b) & 31u), y_t(0), u32(b) > 31u)",
        _ => "select(a >> (u32(b) & 31u), select(y_t(0), ~y_t(0), a < y_t(0)), u32(b) > 31u)",
    })
}

fn dispatches(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
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
    let code = format!("fn value(i: u32) -> y_t {{\n{values}return {};\n}}", formula(cx)?);
    Ok(vec![fill(shader, y, &code)?])
}
