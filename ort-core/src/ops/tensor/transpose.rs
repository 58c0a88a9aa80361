//! `Transpose`: permutes the dimensions.

use crate::Result;
use crate::dtype::TypeSet;
use crate::ir::Attribute;
use crate::ops;
use crate::ops::batch;
use crate::spec::{
    AttrKind, BatchRule, Grad, GradCx, InferCx, OP, OpSpec, Traits, ViewCx, ViewOf, attr, one, var,
};

use super::geometry::{Strided, permutation};
use super::{constant_sizes, set_elements};

static TRANSPOSE: OpSpec = OpSpec {
    name: "Transpose",
    since: 25,
    inputs: &[one("data", "T")],
    outputs: &[one("transposed", "T")],
    types: &[var("T", TypeSet::ALL_TENSOR_IR13)],
    attrs: &[attr::optional("perm", AttrKind::Ints)],
    traits: Traits::MOVES_DATA,
    infer,
    view: Some(view),
    grad: Grad::Rule(gradient),
    batch: BatchRule::Rule(batch::transposed),
    ..OP
};

ops![TRANSPOSE];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    let order = permutation(cx.attrs, shape.len())?;
    let result: Vec<_> = order.iter().filter_map(|&axis| shape.get(axis).cloned()).collect();
    if let (Some(symbolic), Some(sizes)) = (cx.symbolic(0), constant_sizes(shape)) {
        let moved = Strided::transpose(&sizes, &order).collect(&symbolic.elements)?;
        set_elements(cx, cx.dtype(0)?, &result, moved)?;
    }
    cx.set_shape(0, result)
}

/// A view if the dimensions larger than 1 keep their order.
fn view(cx: &ViewCx<'_>) -> Option<ViewOf> {
    let shape = cx.inputs.first()?.as_ref()?;
    let order = permutation(cx.attrs, shape.len()).ok()?;
    // An axis of size 1 may go anywhere: no element moves.
    let moving: Vec<usize> = order.into_iter().filter(|&axis| shape.get(axis) != Some(&1)).collect();
    if moving.is_sorted() { ViewOf::whole(cx) } else { None }
}

/// Transposes the gradient by the inverse permutation.
fn gradient(cx: &mut GradCx<'_>) -> Result<()> {
    let upstream = cx.upstream()?;
    let order = permutation(cx.attrs(), cx.rank(upstream)?)?;
    let mut inverse = vec![0; order.len()];
    for (to, &from) in order.iter().enumerate() {
        inverse.get_mut(from).into_iter().for_each(|inverse| *inverse = to as i64);
    }
    let gradient = cx.emit("Transpose", &[upstream], &[("perm", Attribute::Ints(inverse))])?;
    cx.set(0, gradient);
    Ok(())
}
