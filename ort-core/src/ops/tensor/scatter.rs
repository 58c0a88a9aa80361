//! Scattering by index: `ScatterElements`, `ScatterND` and the deprecated `Scatter`.
//!
//! The output is a copy of the data with elements replaced or combined at the given indices.

use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::spec::{Draft, Grad, InferCx, OP, OpSpec, Traits, Upgrade, attr, one, var};
use crate::{ErrorKind, Result, ensure, one_of};

use super::geometry::normalize_axis;
use super::gradients;

const INDICES: TypeSet = TypeSet::of(&[DType::I32, DType::I64]);

static SCATTER: OpSpec = OpSpec {
    name: "Scatter",
    since: 9,
    first: 9,
    inputs: &[one("data", "T"), one("indices", "Tind"), one("updates", "T")],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::ALL_TENSOR.difference(TypeSet::of(&[DType::BF16]))), var("Tind", INDICES)],
    attrs: &[attr::int("axis", 0)],
    traits: Traits::MOVES_DATA,
    infer: infer_elements,
    upgrades: &[Upgrade { before: i64::MAX, apply: become_scatter_elements }],
    ..OP
};

static SCATTER_ELEMENTS: OpSpec = OpSpec {
    name: "ScatterElements",
    since: 18,
    first: 11,
    inputs: &[one("data", "T"), one("indices", "Tind"), one("updates", "T")],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::ALL_TENSOR), var("Tind", INDICES)],
    attrs: &[attr::string("reduction", "none"), attr::int("axis", 0)],
    infer: infer_elements,
    grad: Grad::Rule(gradients::of_scatter),
    ..OP
};

static SCATTER_ND: OpSpec = OpSpec {
    name: "ScatterND",
    since: 18,
    first: 11,
    inputs: &[one("data", "T"), one("indices", "tensor(int64)"), one("updates", "T")],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::ALL_TENSOR)],
    attrs: &[attr::string("reduction", "none")],
    infer: infer_nd,
    grad: Grad::Rule(gradients::of_scatter),
    ..OP
};

ops![SCATTER, SCATTER_ELEMENTS, SCATTER_ND];

fn become_scatter_elements(draft: &mut Draft<'_>) -> Result<()> {
    // Version 11 of the standard deprecates `Scatter` in favour of this name.
    draft.op = "ScatterElements".to_string();
    Ok(())
}

fn check_reduction(cx: &InferCx<'_>) -> Result<()> {
    let reduction = cx.attrs.find_string("reduction").unwrap_or("none");
    one_of("the reduction", reduction, &["none", "add", "mul", "min", "max"])?;
    let ordered = !cx.dtype(0).is_ok_and(DType::is_complex) || !["min", "max"].contains(&reduction);
    ensure!(
        ordered,
        InvalidGraph,
        "reduction '{reduction}' needs an order, which complex numbers do not have"
    );
    Ok(())
}

fn infer_elements(cx: &mut InferCx<'_>) -> Result<()> {
    check_reduction(cx)?;
    let Some(data) = cx.shape(0) else { return Ok(()) };
    normalize_axis(cx.attrs.int("axis")?, data.len())?;
    for index in [1, 2] {
        let same = cx.shape(index).is_none_or(|shape| shape.len() == data.len());
        ensure!(
            same,
            InvalidGraph,
            "the rank of input {index} differs from that of the data, whose shape is {data:?}"
        );
    }
    if let Some(indices) = cx.shape(1) {
        cx.require_shape(2, indices, ErrorKind::InvalidArgument)?;
    }
    cx.set_shape(0, data.to_vec())
}

fn infer_nd(cx: &mut InferCx<'_>) -> Result<()> {
    check_reduction(cx)?;
    let Some(data) = cx.shape(0) else { return Ok(()) };
    if let Some(depth) = cx.shape(1).and_then(<[_]>::last).and_then(|depth| depth.as_constant()) {
        // The standard: the last size of the indices is at most the rank of the data.
        let fits = (0..=data.len() as i64).contains(&depth);
        ensure!(fits, InvalidGraph, "index tuples have {depth} numbers, but the data has shape {data:?}");
        // One update for each tuple, of the sizes that the tuple leaves open.
        let tuples = cx.shape(1).and_then(<[_]>::split_last).map_or(&[][..], |(_, tuples)| tuples);
        let expected = [tuples, data.get(depth as usize..).unwrap_or(&[])].concat();
        cx.require_shape(2, &expected, ErrorKind::InvalidArgument)?;
    }
    cx.set_shape(0, data.to_vec())
}
