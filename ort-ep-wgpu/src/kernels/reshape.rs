//! Operators that keep every element in order: reshapes, `BitCast`, `Identity`, and `Dropout` in
//! inference.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::KernelDef;
use ort_core::ir::ValueType;
use ort_core::ops::tensor::geometry::Strided;
use ort_core::{Result, ensure};
use ort_gpu::read;

use super::copy::gather;
use super::elementwise::FLOATS;
use super::fill::fill;
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx};
use crate::shader::{Shader, TYPES};

/// Without 64-bit integers: reinterpreted bits may exceed the 32 bits of shaders.
const NARROW: TypeSet = TYPES.difference(TypeSet::of(&[DType::I64, DType::U64]));

const fn reshape(op: &'static str, types: &'static [(&'static str, TypeSet)]) -> WgpuKernel {
    let def = KernelDef { op, types, in_place: &[(0, 0)], host_inputs: &[1], ..KernelDef::BASE };
    WgpuKernel::new(def, same_elements)
}

wgpu_kernels![
    WgpuKernel::new(
        KernelDef {
            op: "Identity",
            types: &[("V", TYPES)],
            in_place: &[(0, 0)],
            when: |node| matches!(node.input_type(0), ValueType::Tensor(_)),
            ..KernelDef::BASE
        },
        same_elements,
    ),
    reshape("Reshape", &[("T", TYPES)]),
    reshape("Flatten", &[("T", TYPES)]),
    reshape("Squeeze", &[("T", TYPES)]),
    reshape("Unsqueeze", &[("T", TYPES)]),
    reshape("BitCast", &[("T1", NARROW), ("T2", NARROW)]),
    WgpuKernel::new(
        KernelDef {
            op: "Dropout",
            types: &[("T", FLOATS)],
            in_place: &[(0, 0)],
            host_inputs: &[1, 2],
            when: read::is_inference,
            ..KernelDef::BASE
        },
        dropout,
    ),
];

fn same_elements(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let (from, to) = (&x.shape, &y.shape);
    ensure!(
        x.count() == y.count(),
        InvalidArgument,
        "the input of shape {from:?} cannot be reshaped to {to:?}"
    );
    // Aliased input and output need no copy.
    if x.arg == y.arg { Ok(Vec::new()) } else { gather(cx, x, &Strided::contiguous(from), y) }
}

/// Copies the input; the mask, if it has a reader, is all true.
fn dropout(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let mut dispatches = match cx.find_output(0) {
        Some(_) => same_elements(cx)?,
        None => Vec::new(),
    };
    if let Some(mask) = cx.find_output(1) {
        let shader = Shader::new(cx).write("y", mask);
        dispatches.push(fill(shader, mask, "fn value(i: u32) -> y_t { return 1u; }")?);
    }
    Ok(dispatches)
}
