//! Quantized matmuls: `DynamicQuantizeMatMul`, `MatMulIntegerToFloat` and `QGemm`.
//!
//! All three multiply 8-bit quantized values less their zero points, exactly in int32 accumulators,
//! and then apply a scale per column.

use super::{agree, check_rank, float, int, number};
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::{Attribute, ValueId};
use crate::ops;
use crate::ops::linalg::matmul::product_shape;
use crate::spec::{Cost, Draft, InferCx, MICROSOFT, OP, OpSpec, Requirement, attr, one, opt, var};
use crate::{Result, ensure, error};

const BYTES: TypeSet = TypeSet::of(&[DType::I8, DType::U8]);
const SINGLE: TypeSet = TypeSet::of(&[DType::F32]);

const PRODUCT: OpSpec = OpSpec { domain: MICROSOFT, cost: Cost::Compute, ..OP };

static DYNAMIC_QUANTIZE_MATMUL: OpSpec = OpSpec {
    name: "DynamicQuantizeMatMul",
    inputs: &[
        one("A", "T1"),
        one("B", "T2"),
        one("b_scale", "T1"),
        opt("b_zero_point", "T2"),
        opt("bias", "T1"),
    ],
    outputs: &[one("Y", "T1")],
    types: &[var("T1", SINGLE), var("T2", BYTES)],
    infer: |cx| infer(cx, &[], 4),
    lower: Some(lower_dynamic),
    ..PRODUCT
};

static MATMUL_INTEGER_TO_FLOAT: OpSpec = OpSpec {
    name: "MatMulIntegerToFloat",
    inputs: &[
        one("A", "T1"),
        one("B", "T2"),
        one("a_scale", "T3"),
        one("b_scale", "T3"),
        opt("a_zero_point", "T1"),
        opt("b_zero_point", "T2"),
        opt("bias", "T3"),
    ],
    outputs: &[one("Y", "T3")],
    types: &[var("T1", BYTES), var("T2", BYTES), var("T3", TypeSet::of(&[DType::F32, DType::F16]))],
    infer: |cx| infer(cx, &[2, 4], 6),
    lower: Some(lower_to_float),
    ..PRODUCT
};

static QGEMM: OpSpec = OpSpec {
    name: "QGemm",
    inputs: &[
        one("A", "TA"),
        one("a_scale", "T"),
        one("a_zero_point", "TA"),
        one("B", "TB"),
        one("b_scale", "T"),
        one("b_zero_point", "TB"),
        opt("C", "TC"),
        opt("y_scale", "T"),
        opt("y_zero_point", "TYZ"),
    ],
    outputs: &[one("Y", "TY")],
    types: &[
        var("T", SINGLE),
        var("TA", BYTES),
        var("TB", BYTES),
        var("TC", TypeSet::of(&[DType::I32])),
        var("TYZ", BYTES),
        var("TY", BYTES.union(SINGLE)),
    ],
    attrs: &[attr::float("alpha", 1.0), attr::int("transA", 0), attr::int("transB", 0)],
    infer: infer_gemm,
    lower: Some(lower_gemm),
    ..PRODUCT
};

ops![DYNAMIC_QUANTIZE_MATMUL, MATMUL_INTEGER_TO_FLOAT, QGEMM];

/// Refuses an input with other than one element.
fn check_single(cx: &InferCx<'_>, index: usize) -> Result<()> {
    for size in cx.shape(index).unwrap_or(&[]) {
        agree(&format!("the number of elements of input {index}"), &Dim::constant(1), size)?;
    }
    Ok(())
}

/// Infers the shape of a matmul. The inputs in `single` have one element, and the one at `bias` one
/// per column.
fn infer(cx: &mut InferCx<'_>, single: &[usize], bias: usize) -> Result<()> {
    for index in single {
        check_single(cx, *index)?;
    }
    let (Some(a), Some(b)) = (cx.shape(0), cx.shape(1)) else { return Ok(()) };
    let shape = product_shape(a, b)?;
    // A vector B has a single column, which its shape does not show.
    if b.len() > 1 {
        check_rank(cx, bias, "bias", 1)?;
        if let (Some([length]), Some(columns)) = (cx.shape(bias), b.last()) {
            cx.require(Requirement::equal("the length of bias", length, columns).or_fail())?;
        }
    }
    cx.set_shape(0, shape)
}

fn infer_gemm(cx: &mut InferCx<'_>) -> Result<()> {
    for index in [1, 2, 7, 8] {
        check_single(cx, index)?;
    }
    for (index, what) in [(0, "A"), (3, "B")] {
        check_rank(cx, index, what, 2)?;
    }
    // The output is quantized only if it has a zero point.
    let dtype = if cx.has_input(8) { cx.dtype(8)? } else { DType::F32 };
    let (mut a, mut b) = (cx.shape(0).map(<[_]>::to_vec), cx.shape(3).map(<[_]>::to_vec));
    for (side, name) in [(&mut a, "transA"), (&mut b, "transB")] {
        if let (Some(side), true) = (side, cx.attrs.flag(name)?) {
            side.reverse();
        }
    }
    let shape = match (a, b) {
        (Some(a), Some(b)) => Some(product_shape(&a, &b)?),
        _ => None,
    };
    if let (Some(shape), Some(c)) = (&shape, cx.shape(6)) {
        ensure!(c.len() <= 2, InvalidGraph, "C has rank {}, expected 2 at most", c.len());
        // `C` broadcasts to the product from the last dimension on.
        for (size, own) in shape.iter().rev().zip(c.iter().rev()) {
            cx.require(Requirement::broadcast("a dimension of C", own, size))?;
        }
    }
    cx.set(0, dtype, shape);
    Ok(())
}

/// Casts a value, unless it already has the type.
fn cast(draft: &mut Draft<'_>, value: ValueId, to: DType) -> Result<ValueId> {
    if draft.value_type(value).dtype() == Some(to) {
        return Ok(value);
    }
    draft.emit("Cast", &[value], &[("to", Attribute::Int(i64::from(to.onnx_code())))])
}

/// Reshapes a tensor of one element to a scalar. The reshape fails at run time for a tensor of
/// more.
fn scalar(draft: &mut Draft<'_>, value: ValueId) -> Result<ValueId> {
    if draft.value_type(value).shape().is_some_and(<[Dim]>::is_empty) {
        return Ok(value);
    }
    let shape = draft.constant_ints(&[])?;
    draft.emit("Reshape", &[value, shape], &[])
}

/// Emits `sums * factor + bias` in float32.
fn scaled(
    draft: &mut Draft<'_>,
    sums: ValueId,
    mut factor: ValueId,
    bias: Option<ValueId>,
) -> Result<ValueId> {
    let mut bias = bias;
    // A product of two vectors is a scalar, to which scale and bias of one element must not add a
    // dimension.
    if let [Some(1), Some(1)] = [0, 1].map(|index| draft.shape(index).map(|shape| shape.len())) {
        factor = scalar(draft, factor)?;
        bias = bias.map(|bias| scalar(draft, bias)).transpose()?;
    }
    let sums = cast(draft, sums, DType::F32)?;
    let result = draft.emit("Mul", &[sums, factor], &[])?;
    match bias {
        Some(bias) => {
            let bias = cast(draft, bias, DType::F32)?;
            draft.emit("Add", &[result, bias], &[])
        }
        None => Ok(result),
    }
}

/// Quantizes `A` with a scale from its own range, and multiplies.
fn lower_dynamic(draft: &mut Draft<'_>) -> Result<()> {
    let (a, b, b_scale) = (draft.required(0)?, draft.required(1)?, draft.required(2)?);
    let quantized = draft.emit_many("DynamicQuantizeLinear", &[Some(a)], &[], 3)?;
    let &[codes, scale, zero] = &quantized[..] else {
        return Err(error!(Fail, "a quantization has three outputs"));
    };
    let inputs = [Some(codes), Some(b), Some(zero), draft.input(3)];
    let sums = draft.emit_one("MatMulInteger", &inputs, &[])?;
    let factor = draft.emit("Mul", &[scale, b_scale], &[])?;
    let bias = draft.input(4);
    let result = scaled(draft, sums, factor, bias)?;
    draft.replace(&[result])
}

/// As [`lower_dynamic`], with operands that are already quantized. The result is rounded to float16
/// only once, at the end.
fn lower_to_float(draft: &mut Draft<'_>) -> Result<()> {
    let dtype = draft.dtype(2)?;
    let (a_scale, b_scale) = (draft.required(2)?, draft.required(3)?);
    let a_zero = draft.input(4).map(|zero| scalar(draft, zero)).transpose()?;
    let inputs = [draft.input(0), draft.input(1), a_zero, draft.input(5)];
    let sums = draft.emit_one("MatMulInteger", &inputs, &[])?;
    let a_scale = scalar(draft, a_scale)?;
    // A product of two float16 scales may underflow.
    let (a_scale, b_scale) = (cast(draft, a_scale, DType::F32)?, cast(draft, b_scale, DType::F32)?);
    let factor = draft.emit("Mul", &[a_scale, b_scale], &[])?;
    let bias = draft.input(6);
    let result = scaled(draft, sums, factor, bias)?;
    let result = cast(draft, result, dtype)?;
    draft.replace(&[result])
}

/// Emits an operand of `QGemm`, transposed if the flag is set.
fn side(draft: &mut Draft<'_>, index: usize, transposed: &str) -> Result<ValueId> {
    let side = draft.required(index)?;
    if int(draft, transposed)? == 0 {
        return Ok(side);
    }
    draft.emit("Transpose", &[side], &[("perm", Attribute::Ints(vec![1, 0]))])
}

/// `(A * B + C) * (alpha * a_scale * b_scale / y_scale)`, quantized if there is an output zero
/// point.
fn lower_gemm(draft: &mut Draft<'_>) -> Result<()> {
    let (a, b) = (side(draft, 0, "transA")?, side(draft, 3, "transB")?);
    let (a_scale, a_zero, b_scale) = (draft.required(1)?, draft.required(2)?, draft.required(4)?);
    let a_zero = scalar(draft, a_zero)?;
    let inputs = [Some(a), Some(b), Some(a_zero), draft.input(5)];
    let mut sums = draft.emit_one("MatMulInteger", &inputs, &[])?;
    if let Some(c) = draft.input(6) {
        // `C` is int32 with the scale of the product, so it joins the accumulators.
        sums = draft.emit("Add", &[sums, c], &[])?;
    }
    let alpha = float(draft, "alpha")?;
    let alpha = number(draft, alpha, DType::F32)?;
    let a_scale = scalar(draft, a_scale)?;
    let factor = draft.emit("Mul", &[alpha, a_scale], &[])?;
    let mut factor = draft.emit("Mul", &[factor, b_scale], &[])?;
    if let Some(y_scale) = draft.input(7) {
        let y_scale = scalar(draft, y_scale)?;
        factor = draft.emit("Div", &[factor, y_scale], &[])?;
    }
    let result = scaled(draft, sums, factor, None)?;
    let Some(zero) = draft.input(8) else { return draft.replace(&[result]) };
    // The factor already contains `1 / y_scale`, so the quantization has a scale of 1.
    let (one, zero) = (number(draft, 1.0, DType::F32)?, scalar(draft, zero)?);
    let result = draft.emit("QuantizeLinear", &[result, one, zero], &[])?;
    draft.replace(&[result])
}
