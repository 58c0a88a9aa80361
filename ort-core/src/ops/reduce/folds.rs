//! Reductions along axes: the ten `Reduce` operators.

use super::gradients;
use crate::Result;
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::ops::axes;
use crate::ops::batch;
use crate::ops::math::legacy::integers_as_floats;
use crate::spec::{
    BatchRule, Draft, Grad, InferCx, OP, OpSpec, SymTensor, TypeVar, Upgrade, attr, one, opt, var,
};

const NUMBERS: &[TypeVar] = &[var("T", TypeSet::HIGH_PRECISION)];
const ORDERED: &[TypeVar] =
    &[var("T", TypeSet::HIGH_PRECISION.union(TypeSet::of(&[DType::U8, DType::I8, DType::Bool])))];
const FLOATS: &[TypeVar] = &[var("T", TypeSet::FLOATS)];

/// The base record of the family. The axes became an input in version 18, for `ReduceSum` in 13.
const REDUCTION: OpSpec = OpSpec {
    since: 18,
    inputs: &[one("data", "T"), opt("axes", "tensor(int64)").host()],
    outputs: &[one("reduced", "T")],
    types: NUMBERS,
    attrs: &[attr::int("keepdims", 1), attr::int("noop_with_empty_axes", 0)],
    infer,
    upgrades: &[Upgrade { before: 18, apply: axes_to_input }],
    batch: BatchRule::Rule(batch::reduction),
    ..OP
};

/// The logarithms accepted integers before version 28.
const OF_INTEGERS: &[Upgrade] =
    &[Upgrade { before: 18, apply: axes_to_input }, Upgrade { before: 28, apply: integers_as_floats }];

static REDUCE_SUM: OpSpec = OpSpec {
    name: "ReduceSum",
    since: 13,
    infer: infer_sum,
    grad: Grad::Rule(gradients::of_sum),
    upgrades: &[Upgrade { before: 13, apply: axes_to_input }],
    ..REDUCTION
};
static REDUCE_MEAN: OpSpec = OpSpec { name: "ReduceMean", grad: Grad::Rule(gradients::of_mean), ..REDUCTION };
static REDUCE_MAX: OpSpec = OpSpec {
    name: "ReduceMax",
    grad: Grad::Rule(gradients::of_extreme),
    since: 20,
    types: ORDERED,
    infer: infer_max,
    ..REDUCTION
};
static REDUCE_MIN: OpSpec = OpSpec {
    name: "ReduceMin",
    grad: Grad::Rule(gradients::of_extreme),
    since: 20,
    types: ORDERED,
    infer: infer_min,
    ..REDUCTION
};
static REDUCE_PROD: OpSpec =
    OpSpec { name: "ReduceProd", grad: Grad::Rule(gradients::of_product), infer: infer_prod, ..REDUCTION };
static REDUCE_L1: OpSpec = OpSpec { name: "ReduceL1", grad: Grad::Rule(gradients::of_l1), ..REDUCTION };
static REDUCE_L2: OpSpec = OpSpec { name: "ReduceL2", grad: Grad::Rule(gradients::of_l2), ..REDUCTION };
static REDUCE_LOG_SUM: OpSpec = OpSpec {
    name: "ReduceLogSum",
    grad: Grad::Rule(gradients::of_log_sum),
    since: 28,
    types: FLOATS,
    upgrades: OF_INTEGERS,
    ..REDUCTION
};
static REDUCE_LOG_SUM_EXP: OpSpec = OpSpec {
    name: "ReduceLogSumExp",
    grad: Grad::Rule(gradients::of_log_sum_exp),
    since: 28,
    types: FLOATS,
    upgrades: OF_INTEGERS,
    ..REDUCTION
};
static REDUCE_SUM_SQUARE: OpSpec =
    OpSpec { name: "ReduceSumSquare", grad: Grad::Rule(gradients::of_sum_square), ..REDUCTION };

ops![
    REDUCE_SUM,
    REDUCE_MEAN,
    REDUCE_MAX,
    REDUCE_MIN,
    REDUCE_PROD,
    REDUCE_L1,
    REDUCE_L2,
    REDUCE_LOG_SUM,
    REDUCE_LOG_SUM_EXP,
    REDUCE_SUM_SQUARE,
];

fn axes_to_input(draft: &mut Draft<'_>) -> Result<()> {
    draft.attr_to_input("axes", 1)
}

/// Returns a mask of the reduced dimensions, or `None` if the axes are not constant.
fn reduced(cx: &InferCx<'_>, rank: usize) -> Result<Option<Vec<bool>>> {
    // Omitted axes mean the same as an empty list.
    let axes = match (cx.has_input(1), cx.ints(1)) {
        (false, _) => Vec::new(),
        (true, Some(axes)) => axes,
        (true, None) => return Ok(None),
    };
    if axes.is_empty() {
        let all = !cx.attrs.flag("noop_with_empty_axes")?;
        return Ok(Some(vec![all; rank]));
    }
    axes::mask(&axes, rank).map(Some)
}

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    let keep = cx.attrs.flag("keepdims")?;
    match reduced(cx, shape.len())? {
        Some(mask) => cx.set_shape(0, axes::without(&shape.to_vec(), &mask, keep)),
        // Unknown axes with `keepdims` still fix the rank.
        None if keep => {
            let unknown = shape.iter().map(|_| cx.fresh()).collect();
            cx.set_shape(0, unknown)
        }
        None => Ok(()),
    }
}

fn infer_sum(cx: &mut InferCx<'_>) -> Result<()> {
    infer_elements(cx, 0, |a, b| a + b)
}

fn infer_prod(cx: &mut InferCx<'_>) -> Result<()> {
    infer_elements(cx, 1, |a, b| a * b)
}

fn infer_max(cx: &mut InferCx<'_>) -> Result<()> {
    infer_elements(cx, i64::MIN, |a, b| a.max(b))
}

fn infer_min(cx: &mut InferCx<'_>) -> Result<()> {
    infer_elements(cx, i64::MAX, |a, b| a.min(b))
}

/// Propagates the symbolic elements of an int64 vector through its reduction: models compute
/// element counts this way.
fn infer_elements(cx: &mut InferCx<'_>, identity: i64, combine: fn(&Dim, &Dim) -> Dim) -> Result<()> {
    infer(cx)?;
    let Some(symbolic) = cx.symbolic(0).filter(|symbolic| symbolic.shape.len() == 1) else { return Ok(()) };
    if reduced(cx, 1)? != Some(vec![true]) || cx.dtype(0)? != DType::I64 {
        return Ok(());
    }
    let mut elements = symbolic.elements.iter();
    // The standard reduces an empty set to the identity of the operation.
    let first = elements.next().cloned().unwrap_or(Dim::constant(identity));
    let total = elements.fold(first, |total, element| combine(&total, element));
    let result =
        if cx.attrs.flag("keepdims")? { SymTensor::vector(vec![total]) } else { SymTensor::scalar(total) };
    cx.set_symbolic(0, result);
    Ok(())
}
