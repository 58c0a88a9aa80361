//! `Squeeze` and `Unsqueeze`: drop and add dimensions of size 1.

use crate::dim::Dim;
use crate::dtype::TypeSet;
use crate::ops;
use crate::ops::axes;
use crate::ops::batch;
use crate::spec::{
    BatchRule, Cost, Draft, Grad, InferCx, OP, OpSpec, Traits, Upgrade, ViewOf, gradient, one, opt, var,
};
use crate::{Result, ensure};

use super::geometry::normalize_axes;
use super::set_reshaped;

static SQUEEZE: OpSpec = OpSpec {
    name: "Squeeze",
    since: 25,
    inputs: &[one("data", "T"), opt("axes", "tensor(int64)").host()],
    outputs: &[one("squeezed", "T")],
    types: &[var("T", TypeSet::ALL_TENSOR_IR13)],
    traits: Traits::MOVES_DATA,
    cost: Cost::Free,
    infer: infer_squeeze,
    view: Some(ViewOf::whole),
    grad: Grad::Rule(gradient::of_reshape),
    upgrades: &[Upgrade { before: 13, apply: axes_to_input }],
    batch: BatchRule::Rule(batch::reshaped),
    ..OP
};

static UNSQUEEZE: OpSpec = OpSpec {
    name: "Unsqueeze",
    since: 25,
    inputs: &[one("data", "T"), one("axes", "tensor(int64)").host()],
    outputs: &[one("expanded", "T")],
    types: &[var("T", TypeSet::ALL_TENSOR_IR13)],
    traits: Traits::MOVES_DATA,
    cost: Cost::Free,
    infer: infer_unsqueeze,
    view: Some(ViewOf::whole),
    grad: Grad::Rule(gradient::of_reshape),
    upgrades: &[Upgrade { before: 13, apply: axes_to_input }],
    batch: BatchRule::Rule(batch::reshaped),
    ..OP
};

ops![SQUEEZE, UNSQUEEZE];

fn axes_to_input(draft: &mut Draft<'_>) -> Result<()> {
    draft.attr_to_input("axes", 1)
}

fn infer_squeeze(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    let one = Dim::constant(1);
    let dropped: crate::tensor::Shape = if cx.has_input(1) {
        let Some(axes) = cx.ints(1) else { return Ok(()) };
        normalize_axes(&axes, shape.len())?
    } else {
        // The rank follows only if every size is known to be 1 or not.
        if shape.iter().any(|size| size.as_constant().is_none() && !is_above_one(size)) {
            return Ok(());
        }
        shape.iter().enumerate().filter(|(_, size)| **size == one).map(|(axis, _)| axis).collect()
    };
    for &axis in &dropped {
        let size = axes::size(shape, axis)?;
        let fits = size.as_constant().is_none_or(|size| size == 1);
        ensure!(
            fits,
            InvalidGraph,
            help = "only axes of size 1 can be removed; use Reshape to join axes",
            "axis {axis} of size {size} cannot be squeezed"
        );
    }
    let kept = shape.iter().enumerate().filter(|(axis, _)| !dropped.contains(axis));
    set_reshaped(cx, kept.map(|(_, size)| size.clone()).collect())
}

fn is_above_one(size: &Dim) -> bool {
    size.lower_bound().is_some_and(|low| low > 1)
}

fn infer_unsqueeze(cx: &mut InferCx<'_>) -> Result<()> {
    let (Some(shape), Some(axes)) = (cx.shape(0), cx.ints(1)) else { return Ok(()) };
    let rank = shape.len() + axes.len();
    // The axes count in the output.
    let added = normalize_axes(&axes, rank)?;
    let mut sizes = shape.iter().cloned();
    let size_at = |axis: usize| if added.contains(&axis) { Some(Dim::constant(1)) } else { sizes.next() };
    set_reshaped(cx, (0..rank).map_while(size_at).collect())
}
