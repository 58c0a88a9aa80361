//! `QAttention`: `Attention` with 8-bit quantized input and weights.

use super::agree;
use super::attention_projected::{OptionalInputs, attend_projected, infer_projected};
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::{Attribute, ValueId};
use crate::ops;
use crate::spec::{AttrKind, Cost, Draft, InferCx, MICROSOFT, OP, OpSpec, Requirement, attr, one, opt, var};
use crate::{Result, ensure};

const BYTES: TypeSet = TypeSet::of(&[DType::I8, DType::U8]);

static Q_ATTENTION: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "QAttention",
    since: 1,
    inputs: &[
        one("input", "T1"),
        one("weight", "T2"),
        one("bias", "T3"),
        one("input_scale", "T3"),
        one("weight_scale", "T3"),
        opt("mask_index", "T4"),
        opt("input_zero_point", "T1"),
        opt("weight_zero_point", "T2"),
        opt("past", "T3"),
    ],
    outputs: &[one("output", "T3"), opt("present", "T3")],
    types: &[
        var("T1", BYTES),
        var("T2", BYTES),
        var("T3", TypeSet::of(&[DType::F32, DType::F16])),
        var("T4", TypeSet::of(&[DType::I32])),
    ],
    attrs: &[
        attr::optional("do_rotary", AttrKind::Int),
        attr::optional("mask_filter_value", AttrKind::Float),
        attr::required("num_heads", AttrKind::Int),
        attr::optional("past_present_share_buffer", AttrKind::Int),
        attr::optional("scale", AttrKind::Float),
        attr::int("unidirectional", 0),
    ],
    cost: Cost::Compute,
    infer,
    lower: Some(lower),
    ..OP
};

ops![Q_ATTENTION];

const PLACES: OptionalInputs =
    OptionalInputs { bias: 2, mask: 5, past: 8, attention_bias: None, length: None };

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let width = cx.shape(1).and_then(|shape| shape.get(1));
    // The input is quantized per tensor; the weights per tensor or per column.
    for (index, what, by_column) in [
        (3, "input_scale", false),
        (4, "weight_scale", true),
        (6, "input_zero_point", false),
        (7, "weight_zero_point", true),
    ] {
        // A single value of rank 0 or 1 serves all columns.
        let Some(shape) = cx.shape(index) else { continue };
        let [len] = shape else {
            ensure!(shape.is_empty(), InvalidGraph, "{what} has rank {}, expected 0 or 1", shape.len());
            continue;
        };
        let named = format!("the length of {what}");
        match width {
            Some(width) if by_column => cx.require(Requirement::broadcast(named, len, width))?,
            _ if by_column => {}
            _ => agree(&named, &Dim::constant(1), len)?,
        }
    }
    infer_projected(cx, &PLACES)
}

fn lower(draft: &mut Draft<'_>) -> Result<()> {
    let inputs = [draft.input(0), draft.input(1), draft.input(6), draft.input(7)];
    // The bias stays out of the product: it is a float, which `MultiHeadAttention` adds.
    let product = draft.emit_one("MatMulInteger", &inputs, &[])?;
    let dtype = draft.dtype(3)?;
    // The int32 accumulators and the products of scales exceed float16's range, so only the final
    // result is rounded to it.
    let product = cast(draft, product, DType::F32)?;
    let mut scales = [draft.required(3)?, draft.required(4)?];
    if dtype != DType::F32 {
        for scale in &mut scales {
            *scale = cast(draft, *scale, DType::F32)?;
        }
    }
    let scale = draft.emit("Mul", &scales, &[])?;
    let mut projected = draft.emit("Mul", &[product, scale], &[])?;
    if dtype != DType::F32 {
        projected = cast(draft, projected, dtype)?;
    }
    attend_projected(draft, projected, &PLACES)
}

fn cast(draft: &mut Draft<'_>, value: ValueId, to: DType) -> Result<ValueId> {
    draft.emit("Cast", &[value], &[("to", Attribute::Int(i64::from(to.onnx_code())))])
}
