//! Gradient accumulation: `Accumulate`.
//!
//! Adds the gradient of a batch to a running sum, or starts the sum over.

use crate::dtype::{DType, TypeSet};
use crate::ir::Attribute;
use crate::ops;
use crate::spec::{Draft, InferCx, OP, OpSpec, RUNTIME, one, var};
use crate::{Result, ensure};

static ACCUMULATE: OpSpec = OpSpec {
    domain: RUNTIME,
    name: "Accumulate",
    inputs: &[one("sum", "T"), one("value", "G"), one("overwrite", "tensor(bool)")],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::of(&[DType::F32, DType::F64])), var("G", TypeSet::FLOATS)],
    infer,
    lower: Some(lower),
    ..OP
};

ops![ACCUMULATE];

/// The output has the type and shape of the sum, and the value must have its shape.
fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    if let (Some(sum), Some(value)) = (cx.shape(0), cx.shape(1)) {
        let differ = |(one, other): (&crate::dim::Dim, &crate::dim::Dim)| matches!((one.as_constant(), other.as_constant()), (Some(one), Some(other)) if one != other);
        ensure!(
            sum.len() == value.len() && !sum.iter().zip(value).any(differ),
            InvalidGraph,
            "a value of shape {value:?} is added to a sum of shape {sum:?}"
        );
    }
    if let Some(ty) = cx.input_type(0).cloned() {
        cx.set_type(0, ty);
    }
    Ok(())
}

/// Decomposes into an add and a select.
///
/// With `overwrite` the old sum is ignored, including infinities, which a multiplication by 0 would
/// turn into NaN.
fn lower(draft: &mut Draft<'_>) -> Result<()> {
    let (sum, value, overwrite) = (draft.required(0)?, draft.required(1)?, draft.required(2)?);
    let value = draft.emit("CastLike", &[value, sum], &[("saturate", Attribute::Int(1))])?;
    let added = draft.emit("Add", &[sum, value], &[])?;
    let output = draft.emit("Where", &[overwrite, value, added], &[])?;
    draft.replace(&[output])
}
