//! `Range`: numbers from a start in equal steps.

use super::index_gradients;
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::spec::{Grad, InferCx, OP, OpSpec, SymTensor, attr, one, var};
use crate::tensor::TensorView;
use crate::{Result, ensure, error};

static RANGE: OpSpec = OpSpec {
    name: "Range",
    grad: Grad::Rule(index_gradients::of_range),
    since: 27,
    first: 11,
    inputs: &[one("start", "T").host(), one("limit", "T").host(), one("delta", "T").host()],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::FLOATS.union(TypeSet::of(&[DType::I16, DType::I32, DType::I64])))],
    attrs: &[attr::int("stash_type", 1)],
    infer,
    ..OP
};

ops![RANGE];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    for index in 0..3 {
        // The standard asks for scalars. One element of any rank is taken too.
        let single = cx
            .shape(index)
            .is_none_or(|shape| shape.iter().all(|size| size.as_constant().is_none_or(|size| size == 1)));
        ensure!(single, InvalidGraph, "input {index} of Range must be one number");
    }
    let scalar = |index: usize| cx.dims(index).and_then(|dims| dims.first().cloned());
    let size = match (scalar(0), scalar(1), scalar(2)) {
        (Some(start), Some(limit), Some(delta)) => {
            let size = integer_size(&start, &limit, &delta)?;
            set_elements(cx, &size, &start, &delta)?;
            size
        }
        _ => known_size(cx)?.map(Dim::constant),
    };
    let size = size.unwrap_or_else(|| cx.fresh());
    cx.set_shape(0, vec![size])
}

/// The help for a range with step 0.
const STEP: &str = "the input 'delta' must not be 0";

/// `max(ceil((limit - start) / delta), 0)`, or `None` if the sign of the step is unknown.
fn integer_size(start: &Dim, limit: &Dim, delta: &Dim) -> Result<Option<Dim>> {
    ensure!(delta.as_constant() != Some(0), InvalidArgument, help = STEP, "delta of Range is 0");
    let (distance, step) = if delta.is_known_positive() {
        (limit - start, delta.clone())
    } else if delta.upper_bound().is_some_and(|high| high < 0) {
        (start - limit, -delta)
    } else {
        return Ok(None);
    };
    Ok(Some(Dim::max(&distance.ceil_div(&step), &Dim::constant(0))))
}

fn set_elements(cx: &mut InferCx<'_>, size: &Option<Dim>, start: &Dim, delta: &Dim) -> Result<()> {
    let Some(count) = size.as_ref().and_then(Dim::as_constant).and_then(|size| usize::try_from(size).ok())
    else {
        return Ok(());
    };
    if SymTensor::follows(cx.dtype(0)?, count) {
        let elements = (0..count as i64).map(|index| start + delta * index).collect();
        cx.set_symbolic(0, SymTensor::vector(elements));
    }
    Ok(())
}

/// The size if all three numbers are constants that inference does not track as integers.
fn known_size(cx: &InferCx<'_>) -> Result<Option<i64>> {
    let (Some(start), Some(limit), Some(delta)) = (cx.known(0), cx.known(1), cx.known(2)) else {
        return Ok(None);
    };
    let (start, limit, delta) = (number(&start)?, number(&limit)?, number(&delta)?);
    ensure!(delta != 0.0, InvalidArgument, help = STEP, "delta of Range is 0");
    // Of the integers only int16 comes here, which a double holds exactly.
    let size = ((limit - start) / delta).ceil();
    // Also fails for NaN and infinity.
    let ends = size < 1e15;
    ensure!(ends, InvalidGraph, "a Range from {start} to {limit} by {delta} has no end");
    Ok(Some(size.max(0.0) as i64))
}

fn number(view: &TensorView<'_>) -> Result<f64> {
    let dtype = view.dtype();
    let empty = || error!(InvalidGraph, "an input of Range is empty");
    crate::for_each_type!(dtype in [F32, F64, F16, BF16], T => {
        let first = view.to_vec::<T>()?.first().copied();
        first.map(num_traits::AsPrimitive::<f64>::as_).ok_or_else(empty)
    }, else => view.to_ints()?.first().map(|&value| value as f64).ok_or_else(empty))
}
