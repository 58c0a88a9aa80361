//! `Cast` and `CastLike` between the types of shaders.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{KernelDef, NodeView};
use ort_core::ops::tensor::geometry::Strided;
use ort_core::{Result, ensure};

use super::copy::gather;
use super::elementwise::FLOATS;
use super::fill::fill;
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx};
use crate::shader::{Element, Shader, TYPES};

/// The types that can be converted.
const CASTABLE: TypeSet = TYPES.union(TypeSet::of(&[DType::I4, DType::U4, DType::I2, DType::U2]));

const fn cast(op: &'static str) -> WgpuKernel {
    let def = KernelDef { op, types: &[("T1", CASTABLE), ("T2", CASTABLE)], when: fits, ..KernelDef::BASE };
    WgpuKernel::new(def, dispatches)
}

wgpu_kernels![cast("Cast"), cast("CastLike")];

/// Returns whether every 64-bit result is the extension of its lower word, which is all that
/// shaders compute.
fn fits(node: &NodeView<'_>) -> bool {
    let (Some(from), Some(to)) = (node.dtype(0), node.output_dtype(0)) else { return false };
    match to {
        _ if from == to => TYPES.contains(to),
        DType::I64 => from.is_integer() && !matches!(from, DType::U32 | DType::U64) || from == DType::Bool,
        DType::U64 => from.is_integer() && !from.is_signed() || from == DType::Bool,
        _ => true,
    }
}

fn dispatches(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    ensure!(x.count() == y.count(), Fail, "{} elements converted to {}", x.count(), y.count());
    if x.dtype == y.dtype {
        return gather(cx, x, &Strided::contiguous(&x.shape), y);
    }
    let code =
        format!("fn value(i: u32) -> y_t {{ let v = x(i); return {}; }}", converted(x.dtype, y.dtype)?);
    let shader = Shader::new(cx).read("x", x).write("y", y);
    Ok(vec![fill(shader, y, &format!("{}{code}", include_str!("cast.wgsl")))?])
}

/// The expression of `v` in another type. The store truncates integers to their low bits, and
/// rounds floats.
fn converted(from: DType, to: DType) -> Result<&'static str> {
    let wide = Element::of(from)?.bits >= 32;
    Ok(match (FLOATS.contains(from), to) {
        // By bits, because WGSL does not guarantee float comparisons of NaN and subnormals.
        (true, DType::Bool) => "select(0u, 1u, (bitcast<u32>(v) & 0x7fffffffu) != 0u)",
        (false, DType::Bool) => "select(0u, 1u, v != x_t(0))",
        (true, DType::U32) => "truncated_wide(v)",
        (true, to) if !FLOATS.contains(to) => "y_t(truncated(v))",
        // Via `f32` the value would be rounded twice.
        (false, DType::BF16) if wide => "rounded_to_odd(u32(abs(v)), v < x_t(0))",
        _ => "y_t(v)",
    })
}
