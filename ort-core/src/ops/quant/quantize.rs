//! Linear quantization: `QuantizeLinear` and `DequantizeLinear`.

use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::ops::batch;
use crate::ops::tensor::index_gradients;
use crate::spec::{BatchRule, Grad, InferCx, OP, OpSpec, attr, one, opt, var};
use crate::{Result, ensure, error};

const FLOATS: TypeSet = TypeSet::of(&[DType::F32, DType::F16, DType::BF16]);
const SCALES: TypeSet = FLOATS.union(TypeSet::of(&[DType::F8E8M0]));
const CODES: TypeSet = TypeSet::FLOAT8.union(TypeSet::SUB_BYTE_INTEGERS).union(TypeSet::of(&[
    DType::U8,
    DType::I8,
    DType::U16,
    DType::I16,
    DType::F4E2M1,
    DType::F6E2M3,
    DType::F6E3M2,
]));
const INT32: TypeSet = TypeSet::of(&[DType::I32]);

static QUANTIZE_LINEAR: OpSpec = OpSpec {
    name: "QuantizeLinear",
    since: 28,
    first: 10,
    inputs: &[one("x", "T1"), one("y_scale", "T2"), opt("y_zero_point", "T3")],
    outputs: &[one("y", "T3")],
    types: &[var("T1", FLOATS.union(INT32)), var("T2", SCALES.union(INT32)), var("T3", CODES)],
    attrs: &[
        attr::int("axis", 1),
        attr::int("block_size", 0),
        attr::int("output_dtype", 0),
        attr::int("precision", 0),
        attr::int("saturate", 1),
    ],
    infer: infer_quantize,
    batch: BatchRule::Rule(batch::quantized),
    ..OP
};

static DEQUANTIZE_LINEAR: OpSpec = OpSpec {
    name: "DequantizeLinear",
    grad: Grad::Rule(index_gradients::of_dequantize),
    since: 28,
    first: 10,
    inputs: &[one("x", "T1"), one("x_scale", "T2"), opt("x_zero_point", "T1")],
    outputs: &[one("y", "T3")],
    types: &[var("T1", CODES.union(INT32)), var("T2", SCALES), var("T3", FLOATS)],
    attrs: &[attr::int("axis", 1), attr::int("block_size", 0), attr::int("output_dtype", 0)],
    infer: infer_dequantize,
    batch: BatchRule::Rule(batch::quantized),
    ..OP
};

ops![QUANTIZE_LINEAR, DEQUANTIZE_LINEAR];

/// Returns the type of the attribute `output_dtype`, or `None` if it is unset.
fn output_dtype(cx: &InferCx<'_>, allowed: TypeSet) -> Result<Option<DType>> {
    let code = cx.attrs.int("output_dtype")?;
    if code == 0 {
        return Ok(None);
    }
    let dtype = i32::try_from(code).ok().and_then(DType::from_onnx).filter(|dtype| allowed.contains(*dtype));
    dtype.map(Some).ok_or_else(|| error!(InvalidGraph, "output_dtype is {code}, expected one of {allowed}"))
}

fn infer_quantize(cx: &mut InferCx<'_>) -> Result<()> {
    let wanted = output_dtype(cx, CODES)?;
    // The zero point determines the type, then `output_dtype`; the default is uint8.
    let dtype = match cx.has_input(2) {
        true => {
            // The standard demands that `output_dtype`, if set, is the zero point's type.
            let dtype = cx.dtype(2)?;
            ensure!(
                wanted.is_none_or(|wanted| wanted == dtype),
                InvalidGraph,
                "output_dtype is not the zero point's type {dtype}"
            );
            dtype
        }
        false => wanted.unwrap_or(DType::U8),
    };
    let shape = cx.shape(0).map(<[_]>::to_vec);
    cx.set(0, dtype, shape);
    Ok(())
}

fn infer_dequantize(cx: &mut InferCx<'_>) -> Result<()> {
    // A scale of float8e8m0 is no output type; such a node returns float by default.
    let scale = Some(cx.dtype(1)?).filter(|dtype| FLOATS.contains(*dtype));
    let dtype = output_dtype(cx, FLOATS)?.or(scale).unwrap_or(DType::F32);
    let shape = cx.shape(0).map(<[_]>::to_vec);
    cx.set(0, dtype, shape);
    Ok(())
}
