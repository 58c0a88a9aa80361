//! `DequantizeMatMul`: a matmul of floats with a quantized matrix, with the epilogue of
//! `FusedMatMul`.

use super::activation::Activation;
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::Attribute;
use crate::ops;
use crate::ops::batch;
use crate::ops::linalg::matmul::product_shape;
use crate::ops::microsoft::{agree, check_per_column, check_rank, draft_attributes};
use crate::ops::quant::problem::Quantization;
use crate::spec::{AttrKind, BatchRule, Cost, Draft, InferCx, OP, OpSpec, RUNTIME, attr, one, opt, var};
use crate::{Result, error};

/// `Y = activation(alpha * A * DequantizeLinear(B, b_scale, b_zero_point) + bias + residual)`.
///
/// `axis` and `block_size` are those of `DequantizeLinear`. `transB` transposes the dequantized
/// matrix. A has rank 2 or more; the bias has one value for each column, the residual the shape of
/// the output.
static DEQUANTIZE_MATMUL: OpSpec = OpSpec {
    domain: RUNTIME,
    name: "DequantizeMatMul",
    inputs: &[
        one("A", "T"),
        one("B", "T1"),
        one("b_scale", "T"),
        opt("b_zero_point", "T1"),
        opt("bias", "T"),
        opt("residual", "T"),
    ],
    outputs: &[one("Y", "T")],
    types: &[
        var("T", TypeSet::of(&[DType::F32, DType::F16, DType::BF16])),
        var("T1", TypeSet::SUB_BYTE_INTEGERS.union(TypeSet::of(&[DType::I8, DType::U8]))),
    ],
    attrs: &[
        attr::float("alpha", 1.0),
        attr::int("axis", 1),
        attr::int("block_size", 0),
        attr::int("transB", 0),
        attr::string("activation", ""),
        attr::optional("activation_params", AttrKind::Floats),
    ],
    cost: Cost::Compute,
    infer,
    lower: Some(lower),
    batch: BatchRule::Rule(batch::quantized_matmul),
    ..OP
};

ops![DEQUANTIZE_MATMUL];

/// The places of the inputs after A.
const B: usize = 1;
const SCALE: usize = 2;
const ZERO: usize = 3;
const BIAS: usize = 4;
const RESIDUAL: usize = 5;

/// Returns a shape if all of its sizes are constants.
fn fixed(shape: &[Dim]) -> Option<Vec<usize>> {
    shape.iter().map(|size| usize::try_from(size.as_constant()?).ok()).collect()
}

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    Activation::of_attributes(cx.attrs)?;
    let Some(b) = cx.shape(B) else { return Ok(()) };
    let [rows, columns] = b else {
        return Err(error!(InvalidGraph, "B has rank {}, expected 2", b.len()));
    };
    let quantization = Quantization::new(cx.attrs)?;
    for index in [SCALE, ZERO] {
        if let (Some(b), Some(scales)) = (fixed(b), cx.shape(index).and_then(fixed)) {
            quantization.granularity(&b, &scales)?;
        }
    }
    let b = if cx.attrs.flag("transB")? {
        [columns.clone(), rows.clone()]
    } else {
        [rows.clone(), columns.clone()]
    };
    let Some(a) = cx.shape(0) else { return Ok(()) };
    if a.len() < 2 {
        return Err(error!(InvalidGraph, "A has rank {}, expected 2 or more", a.len()));
    }
    let shape = product_shape(a, &b)?;
    check_per_column(cx, BIAS, "the bias", &shape)?;
    check_rank(cx, RESIDUAL, "the residual", shape.len())?;
    let residual = cx.shape(RESIDUAL).unwrap_or(&shape);
    shape.iter().zip(residual).try_for_each(|(size, own)| agree("a size of the residual", size, own))?;
    cx.set_shape(0, shape)
}

/// `FusedMatMul` with the dequantized matrix.
fn lower(draft: &mut Draft<'_>) -> Result<()> {
    let attributes = draft_attributes(draft)?;
    let named = |names: &[&'static str]| -> Vec<(&'static str, Attribute)> {
        let find = |name: &&'static str| attributes.get(name).map(|value| (*name, value.clone()));
        names.iter().filter_map(find).collect()
    };
    let inputs = [draft.input(B), draft.input(SCALE), draft.input(ZERO)];
    let matrix = draft.emit_one("DequantizeLinear", &inputs, &named(&["axis", "block_size"]))?;
    let inputs = [draft.input(0), Some(matrix), draft.input(BIAS), draft.input(RESIDUAL)];
    let attrs = named(&["alpha", "transB", "activation", "activation_params"]);
    let result = draft.emit_in((RUNTIME, "FusedMatMul"), &inputs, &attrs, 1)?;
    draft.replace(&result)
}
