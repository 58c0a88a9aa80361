//! `Unique`: each distinct element, or distinct slice along an axis, once.

use super::index_gradients;
use crate::dtype::TypeSet;
use crate::ops;
use crate::ops::axes;
use crate::spec::{AttrKind, Grad, InferCx, OP, OpSpec, attr, one, opt, var};
use crate::{Result, ensure};

use super::geometry::normalize_axis;

static UNIQUE: OpSpec = OpSpec {
    name: "Unique",
    grad: Grad::Rule(index_gradients::of_unique),
    since: 28,
    first: 11,
    inputs: &[one("X", "T")],
    outputs: &[
        one("Y", "T"),
        opt("indices", "tensor(int64)"),
        opt("inverse_indices", "tensor(int64)"),
        opt("counts", "tensor(int64)"),
    ],
    types: &[var("T", TypeSet::ALL_TENSOR)],
    attrs: &[attr::optional("axis", AttrKind::Int), attr::int("sorted", 1)],
    infer,
    ..OP
};

ops![UNIQUE];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let count = cx.fresh();
    cx.set_shape(1, vec![count.clone()])?;
    cx.set_shape(3, vec![count.clone()])?;
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    match cx.attrs.find_int("axis") {
        None => {
            cx.set_shape(0, vec![count])?;
            // Without `axis` the input is flattened, and each element has an inverse index.
            cx.set_shape(2, vec![shape.iter().product()])
        }
        Some(axis) => {
            ensure!(!shape.is_empty(), InvalidGraph, "a scalar has no axis");
            let axis = normalize_axis(axis, shape.len())?;
            cx.set_shape(2, vec![axes::size(shape, axis)?.clone()])?;
            cx.set_shape(0, axes::with_size(shape, axis, count))
        }
    }
}
