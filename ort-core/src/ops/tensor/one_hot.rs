//! `OneHot`: for each index, a row that is "on" at the index and "off" elsewhere.

use super::index_gradients;
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::spec::{Grad, InferCx, OP, OpSpec, attr, one, var};
use crate::tensor::TensorView;
use crate::{Result, ensure, error};

use super::geometry::normalize_axis;

const NUMBERS: TypeSet = TypeSet::NUMERIC.difference(TypeSet::of(&[DType::BF16]));

static ONE_HOT: OpSpec = OpSpec {
    name: "OneHot",
    grad: Grad::Rule(index_gradients::of_one_hot),
    since: 28,
    first: 9,
    inputs: &[one("indices", "T1"), one("depth", "T2").host(), one("values", "T3")],
    outputs: &[one("output", "T3")],
    types: &[var("T1", NUMBERS), var("T2", NUMBERS), var("T3", TypeSet::ALL_TENSOR)],
    attrs: &[attr::int("axis", -1)],
    infer,
    ..OP
};

ops![ONE_HOT];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(indices) = cx.shape(0) else { return Ok(()) };
    // The axis counts in the output, which has one more than the indices.
    let axis = normalize_axis(cx.attrs.int("axis")?, indices.len() + 1)?;
    let depth = match (cx.dims(1), cx.known(1)) {
        (Some(dims), _) => dims.first().cloned(),
        (None, Some(view)) => Some(Dim::constant(whole_number(&view)?)),
        _ => None,
    };
    let depth = depth.unwrap_or_else(|| cx.fresh());
    ensure!(
        depth.as_constant().is_none_or(|depth| depth >= 0),
        InvalidArgument,
        "depth is {depth}, expected 0 or more"
    );
    let mut shape = indices.to_vec();
    shape.insert(axis, depth);
    cx.set_shape(0, shape)
}

/// The first element as an integer; floats are truncated.
fn whole_number(view: &TensorView<'_>) -> Result<i64> {
    let dtype = view.dtype();
    // Exporters pass the depth as a float, too. A cast saturates, and NaN becomes 0.
    let first = crate::for_each_type!(dtype in [F32, F64, F16], T => {
        let first = view.to_vec::<T>()?.first().copied();
        first.map(|value| num_traits::AsPrimitive::<f64>::as_(value) as i64)
    }, else => view.to_ints()?.first().copied());
    first.ok_or_else(|| error!(InvalidGraph, "the depth is empty"))
}
