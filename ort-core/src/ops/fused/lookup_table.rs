//! `LookupTable`: any function of 8-bit values, as the table of its 256 results.

use crate::Result;
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::Attribute;
use crate::ops;
use crate::ops::batch;
use crate::ops::microsoft::check_rank;
use crate::spec::{BatchRule, Cost, Draft, InferCx, OP, OpSpec, RUNTIME, Requirement, one, var};

/// `y[i] = table[bits of x[i]]`, where the bits count as an unsigned number.
static LOOKUP_TABLE: OpSpec = OpSpec {
    domain: RUNTIME,
    name: "LookupTable",
    inputs: &[one("x", "T"), one("table", "T")],
    outputs: &[one("y", "T")],
    types: &[var("T", TypeSet::of(&[DType::I8, DType::U8]))],
    cost: Cost::Memory,
    infer,
    lower: Some(lower),
    batch: BatchRule::Rule(batch::each_element),
    ..OP
};

ops![LOOKUP_TABLE];

/// The entries of a table: one for each value of a byte.
pub(crate) const ENTRIES: usize = 256;

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    check_rank(cx, 1, "the table", 1)?;
    if let Some([size]) = cx.shape(1) {
        let entries = Dim::constant(ENTRIES as i64);
        cx.require(Requirement::equal("the size of the table", size, &entries).or_fail())?;
    }
    match cx.shape(0) {
        Some(shape) => cx.set_shape(0, shape.to_vec()),
        None => Ok(()),
    }
}

/// `Gather`, whose negative indices count from the end, as the bits of negative values do.
fn lower(draft: &mut Draft<'_>) -> Result<()> {
    let (x, table) = (draft.required(0)?, draft.required(1)?);
    let index = draft.emit("Cast", &[x], &[("to", Attribute::Int(i64::from(DType::I32.onnx_code())))])?;
    let y = draft.emit("Gather", &[table, index], &[])?;
    draft.replace(&[y])
}
