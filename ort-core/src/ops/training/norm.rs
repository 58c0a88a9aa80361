//! Reductions over all gradients: `GlobalNorm` and `AllFinite`.
//!
//! The norm is for clipping, the check for skipping an update.

use super::step::StepPen;
use crate::dtype::{DType, TypeSet};
use crate::ir::ValueId;
use crate::ops;
use crate::spec::{Draft, InferCx, OP, OpSpec, RUNTIME, many_mixed, one, var};
use crate::{Result, error};

const OF_ALL: OpSpec = OpSpec {
    domain: RUNTIME,
    inputs: &[many_mixed("gradients", "G", 1)],
    types: &[var("G", TypeSet::FLOATS)],
    ..OP
};

/// The L2 norm of all gradients together.
static GLOBAL_NORM: OpSpec = OpSpec {
    name: "GlobalNorm",
    outputs: &[one("norm", "tensor(float)")],
    infer: |cx| infer(cx, DType::F32),
    lower: Some(lower_norm),
    ..OF_ALL
};

/// Whether every element is finite: neither infinite nor NaN.
static ALL_FINITE: OpSpec = OpSpec {
    name: "AllFinite",
    outputs: &[one("finite", "tensor(bool)")],
    infer: |cx| infer(cx, DType::Bool),
    lower: Some(lower_finite),
    ..OF_ALL
};

ops![GLOBAL_NORM, ALL_FINITE];

fn infer(cx: &mut InferCx<'_>, dtype: DType) -> Result<()> {
    cx.set(0, dtype, Some(Vec::new()));
    Ok(())
}

/// Sums a scalar over all inputs. `sum` computes it from each input in doubles.
fn total(
    pen: &mut StepPen<'_, '_>,
    sum: impl Fn(&mut StepPen<'_, '_>, ValueId) -> Result<ValueId>,
) -> Result<ValueId> {
    let inputs: Vec<ValueId> = pen.draft.inputs.iter().flatten().copied().collect();
    let mut total = None;
    for input in inputs {
        // Squares of float32 numbers do not overflow a double.
        let wide = pen.cast(input, DType::F64)?;
        let sum = sum(pen, wide)?;
        total = Some(match total {
            Some(total) => pen.op("Add", &[total, sum])?,
            None => sum,
        });
    }
    total.ok_or_else(|| error!(InvalidGraph, "there is no gradient"))
}

fn lower_norm(draft: &mut Draft<'_>) -> Result<()> {
    let mut pen = StepPen::new(draft)?;
    let squares = total(&mut pen, |pen, wide| pen.sum_of_squares(wide))?;
    let norm = pen.op("Sqrt", &[squares])?;
    let norm = pen.cast(norm, DType::F32)?;
    pen.draft.replace(&[norm])
}

/// Zero times a finite number is 0; any infinity or NaN makes the sum NaN.
fn lower_finite(draft: &mut Draft<'_>) -> Result<()> {
    let mut pen = StepPen::new(draft)?;
    let zero = pen.number_of(0.0, DType::F64)?;
    let sum = total(&mut pen, |pen, wide| {
        let zeros = pen.op("Mul", &[wide, zero])?;
        pen.sum(zeros)
    })?;
    let finite = pen.op("Equal", &[sum, zero])?;
    pen.draft.replace(&[finite])
}
