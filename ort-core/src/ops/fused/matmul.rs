//! `FusedMatMul`: a matmul with an epilogue of scale, bias, residual and activation.

use super::activation::{Activation, end_with};
use crate::dim::Dim;
use crate::dtype::TypeSet;
use crate::ir::Attribute;
use crate::ops;
use crate::ops::batch;
use crate::ops::linalg::matmul::product_shape;
use crate::ops::microsoft::{agree, check_per_column, check_rank, draft_attributes, float, int};
use crate::spec::{
    AttrKind, BatchRule, Cost, Draft, InferCx, MICROSOFT, OP, OpSpec, RUNTIME, attr, one, opt, var,
};
use crate::{Result, error};

/// `Y = activation(alpha * A * B + bias + residual)`, where `transA` and `transB` transpose the
/// last two axes of an operand. Operands have rank 2 or more; the bias has one value for each
/// column, the residual the shape of the output.
static FUSED_MATMUL: OpSpec = OpSpec {
    domain: RUNTIME,
    name: "FusedMatMul",
    inputs: &[one("A", "T"), one("B", "T"), opt("bias", "T"), opt("residual", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", TypeSet::FLOATS)],
    attrs: &[
        attr::float("alpha", 1.0),
        attr::int("transA", 0),
        attr::int("transB", 0),
        attr::string("activation", ""),
        attr::optional("activation_params", AttrKind::Floats),
    ],
    cost: Cost::Compute,
    infer,
    lower: Some(lower),
    batch: BatchRule::Rule(batch::matmul_with_addends),
    ..OP
};

ops![FUSED_MATMUL];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    Activation::of_attributes(cx.attrs)?;
    let side = |index: usize, flag: &str| -> Result<Option<Vec<Dim>>> {
        let exchanged = cx.attrs.flag(flag)?;
        match cx.shape(index) {
            None => Ok(None),
            Some([batch @ .., rows, columns]) => {
                let last = if exchanged { [columns, rows] } else { [rows, columns] };
                Ok(Some(batch.iter().chain(last).cloned().collect()))
            }
            Some(shape) => {
                Err(error!(InvalidGraph, "side {index} has rank {}, expected 2 or more", shape.len()))
            }
        }
    };
    let (Some(left), Some(right)) = (side(0, "transA")?, side(1, "transB")?) else { return Ok(()) };
    let shape = product_shape(&left, &right)?;
    check_per_column(cx, 2, "the bias", &shape)?;
    check_rank(cx, 3, "the residual", shape.len())?;
    let residual = cx.shape(3).unwrap_or(&shape);
    shape.iter().zip(residual).try_for_each(|(size, own)| agree("a size of the residual", size, own))?;
    cx.set_shape(0, shape)
}

fn lower(draft: &mut Draft<'_>) -> Result<()> {
    let activation = Activation::of_attributes(&draft_attributes(draft)?)?;
    let sides = [Some(draft.required(0)?), Some(draft.required(1)?)];
    let (alpha, trans_a, trans_b) = (float(draft, "alpha")?, int(draft, "transA")?, int(draft, "transB")?);
    // Without a scale or a transposition the product is the standard's `MatMul`.
    let mut result = if alpha == 1.0 && trans_a == 0 && trans_b == 0 {
        draft.emit_one("MatMul", &sides, &[])?
    } else {
        let attrs = [
            ("alpha", Attribute::Float(alpha)),
            ("transA", Attribute::Int(trans_a)),
            ("transB", Attribute::Int(trans_b)),
        ];
        let product = draft.emit_in((MICROSOFT, "FusedMatMul"), &sides, &attrs, 1)?;
        product.first().copied().ok_or_else(|| error!(Fail, "the product has no output"))?
    };
    for addend in [2, 3] {
        if let Some(addend) = draft.input(addend) {
            result = draft.emit("Add", &[result, addend], &[])?;
        }
    }
    end_with(draft, result, activation.as_ref())
}
