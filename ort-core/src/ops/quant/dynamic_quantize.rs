//! Dynamic quantization: `DynamicQuantizeLinear` quantizes to 8 bits with a scale from the data.

use crate::Result;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::spec::{Grad, InferCx, OP, OpSpec, one, var};

static DYNAMIC_QUANTIZE_LINEAR: OpSpec = OpSpec {
    name: "DynamicQuantizeLinear",
    grad: Grad::None("its outputs are quantized values and their parameters"),
    since: 11,
    first: 11,
    inputs: &[one("x", "T1")],
    outputs: &[one("y", "T2"), one("y_scale", "tensor(float)"), one("y_zero_point", "T2")],
    types: &[var("T1", TypeSet::of(&[DType::F32])), var("T2", TypeSet::of(&[DType::U8]))],
    infer,
    ..OP
};

ops![DYNAMIC_QUANTIZE_LINEAR];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let shape = cx.shape(0).map(<[_]>::to_vec);
    cx.set(0, DType::U8, shape);
    // Scale and zero point are scalars: the whole tensor shares them.
    cx.set(1, DType::F32, Some(Vec::new()));
    cx.set(2, DType::U8, Some(Vec::new()));
    Ok(())
}
