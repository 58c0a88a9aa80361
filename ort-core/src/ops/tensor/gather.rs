//! Gathering by index: `Gather`, `GatherElements` and `GatherND`.

use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::ops::axes;
use crate::ops::batch;
use crate::spec::{
    BatchRule, Grad, InferCx, OP, OpSpec, SymTensor, Traits, TypeVar, ViewCx, ViewOf, attr, one, var,
};
use crate::tensor::saturating_product;
use crate::{Result, ensure, error};

use super::geometry::normalize_axis;
use super::gradients;
use super::{constant_sizes, set_elements};

const TYPES: &[TypeVar] =
    &[var("T", TypeSet::ALL_TENSOR), var("Tind", TypeSet::of(&[DType::I32, DType::I64]))];

static GATHER: OpSpec = OpSpec {
    name: "Gather",
    since: 13,
    inputs: &[one("data", "T"), one("indices", "Tind")],
    outputs: &[one("output", "T")],
    types: TYPES,
    attrs: &[attr::int("axis", 0)],
    traits: Traits::MOVES_DATA,
    infer: infer_gather,
    view: Some(view_gather),
    grad: Grad::Rule(gradients::of_gather),
    batch: BatchRule::Rule(batch::gather),
    ..OP
};

static GATHER_ELEMENTS: OpSpec = OpSpec {
    name: "GatherElements",
    since: 13,
    first: 11,
    inputs: &[one("data", "T"), one("indices", "Tind")],
    outputs: &[one("output", "T")],
    types: TYPES,
    attrs: &[attr::int("axis", 0)],
    traits: Traits::MOVES_DATA,
    infer: infer_gather_elements,
    grad: Grad::Rule(gradients::of_gather_elements),
    batch: BatchRule::Rule(batch::gather_elements),
    ..OP
};

static GATHER_ND: OpSpec = OpSpec {
    name: "GatherND",
    since: 13,
    first: 11,
    inputs: &[one("data", "T"), one("indices", "tensor(int64)")],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::ALL_TENSOR)],
    attrs: &[attr::int("batch_dims", 0)],
    traits: Traits::MOVES_DATA,
    infer: infer_gather_nd,
    grad: Grad::Rule(gradients::of_gather_nd),
    ..OP
};

ops![GATHER, GATHER_ELEMENTS, GATHER_ND];

fn infer_gather(cx: &mut InferCx<'_>) -> Result<()> {
    let (Some(data), Some(indices)) = (cx.shape(0), cx.shape(1)) else { return Ok(()) };
    let axis = normalize_axis(cx.attrs.int("axis")?, data.len())?;
    // The indices' axes take the place of the gathered one.
    let (front, back) = axes::around(data, axis);
    let shape = [front, indices, back].concat();
    gather_symbolic(cx, axis, &shape)?;
    cx.set_shape(0, shape)
}

fn gather_symbolic(cx: &mut InferCx<'_>, axis: usize, shape: &[Dim]) -> Result<()> {
    let (Some(data), Some(indices)) = (cx.symbolic(0), cx.ints(1)) else { return Ok(()) };
    let Some(sizes) = constant_sizes(shape) else { return Ok(()) };
    if !SymTensor::follows(cx.dtype(0)?, SymTensor::extent(&sizes)) {
        return Ok(());
    }
    let Some(&size) = data.shape.get(axis) else { return Ok(()) };
    let indices: Vec<usize> =
        indices.iter().map(|&index| normalize_axis(index, size)).collect::<Result<_>>()?;
    // Each outer block holds `size` runs; an index picks one of them.
    let run = saturating_product(axes::around(&data.shape, axis).1).max(1);
    let mut elements = Vec::new();
    for outer in data.elements.chunks(run.saturating_mul(size).max(1)) {
        for index in &indices {
            elements.extend(outer.iter().skip(index.saturating_mul(run)).take(run).cloned());
        }
    }
    set_elements(cx, cx.dtype(0)?, shape, elements)
}

/// A view if a single index selects a contiguous part: along the outermost dimension larger than 1.
fn view_gather(cx: &ViewCx<'_>) -> Option<ViewOf> {
    let data = cx.inputs.first()?.as_ref()?;
    let &[index] = cx.ints.get(1)?.as_deref()? else { return None };
    let axis = normalize_axis(cx.attrs.int("axis").ok()?, data.len()).ok()?;
    let (front, back) = axes::around(data, axis);
    if front.iter().any(|&size| size != 1) {
        return None;
    }
    let index = normalize_axis(index, *data.get(axis)?).ok()?;
    Some(ViewOf { input: 0, offsets: vec![index.checked_mul(saturating_product(back))?] })
}

fn infer_gather_elements(cx: &mut InferCx<'_>) -> Result<()> {
    // The output has the shape of the indices, even for data of unknown rank.
    let Some(indices) = cx.shape(1) else { return Ok(()) };
    normalize_axis(cx.attrs.int("axis")?, indices.len())?;
    if let Some(data) = cx.shape(0) {
        ensure!(
            data.len() == indices.len(),
            InvalidGraph,
            help = "both need the same rank; Gather and GatherND take indices of another rank",
            "data of shape {data:?} do not match indices of shape {indices:?}"
        );
    }
    cx.set_shape(0, indices.to_vec())
}

fn infer_gather_nd(cx: &mut InferCx<'_>) -> Result<()> {
    let (Some(data), Some(indices)) = (cx.shape(0), cx.shape(1)) else { return Ok(()) };
    let invalid = || {
        error!(InvalidGraph, "data of shape {data:?} do not match indices of shape {indices:?}").help(
            "the last size of the indices is the number of data axes that an index names: 1 up to the rank of the data",
        )
    };
    let batch = usize::try_from(cx.attrs.int("batch_dims")?).map_err(|_| invalid())?;
    let (last, outer) = indices.split_last().ok_or_else(invalid)?;
    ensure!(
        // The standard: batch_dims is below the ranks of data and of indices.
        batch <= outer.len() && batch < data.len(),
        InvalidGraph,
        "batch_dims is {batch}, out of range for indices of shape {indices:?}"
    );
    // The depth is how many axes an index tuple covers; without it the output's rank is unknown.
    let Some(depth) = last.as_constant() else { return Ok(()) };
    let depth = usize::try_from(depth).map_err(|_| invalid())?;
    let inner = data.get(batch + depth..).filter(|_| depth > 0).ok_or_else(invalid)?;
    cx.set_shape(0, [outer, inner].concat())
}
