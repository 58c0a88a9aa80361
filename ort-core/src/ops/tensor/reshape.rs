//! `Reshape` and `Flatten`: the same elements under another shape.

use crate::dim::Dim;
use crate::dtype::TypeSet;
use crate::ops;
use crate::ops::axes;
use crate::ops::batch;
use crate::spec::{
    BatchRule, Cost, Draft, Grad, InferCx, OP, OpSpec, Traits, Upgrade, ViewOf, attr, gradient, one, var,
};
use crate::{Result, ensure};

use super::constant::fresh_dims;
use super::set_reshaped;

static RESHAPE: OpSpec = OpSpec {
    name: "Reshape",
    since: 25,
    inputs: &[one("data", "T"), one("shape", "tensor(int64)").host()],
    outputs: &[one("reshaped", "T")],
    types: &[var("T", TypeSet::ALL_TENSOR_IR13)],
    attrs: &[attr::int("allowzero", 0)],
    traits: Traits::MOVES_DATA,
    cost: Cost::Free,
    infer: infer_reshape,
    view: Some(ViewOf::whole),
    grad: Grad::Rule(gradient::of_reshape),
    upgrades: &[Upgrade { before: 5, apply: shape_to_input }],
    batch: BatchRule::Rule(batch::reshaped),
    ..OP
};

static FLATTEN: OpSpec = OpSpec {
    name: "Flatten",
    since: 25,
    inputs: &[one("input", "T")],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::ALL_TENSOR_IR13)],
    attrs: &[attr::int("axis", 1)],
    traits: Traits::MOVES_DATA,
    cost: Cost::Free,
    infer: infer_flatten,
    view: Some(ViewOf::whole),
    grad: Grad::Rule(gradient::of_reshape),
    batch: BatchRule::Rule(batch::reshaped),
    ..OP
};

ops![RESHAPE, FLATTEN];

fn shape_to_input(draft: &mut Draft<'_>) -> Result<()> {
    draft.take_attr("consumed_inputs");
    draft.attr_to_input("shape", 1)
}

fn infer_reshape(cx: &mut InferCx<'_>) -> Result<()> {
    // By default a 0 copies the size of the input's axis at the same position.
    let copy_zero = !cx.attrs.flag("allowzero")?;
    let Some(target) = cx.dims(1) else {
        // An unknown target still has a known rank if its length is a constant.
        let Some([length]) = cx.shape(1) else { return Ok(()) };
        return match fresh_dims(cx, length) {
            Some(shape) => cx.set_shape(0, shape),
            None => Ok(()),
        };
    };
    let input = cx.shape(0);
    let mut shape = Vec::with_capacity(target.len());
    let mut open = None;
    for (index, size) in target.iter().enumerate() {
        shape.push(match size.as_constant() {
            Some(0) if copy_zero => match input {
                Some(input) => {
                    let copied = input.get(index);
                    ensure!(
                        copied.is_some(),
                        InvalidGraph,
                        "axis {index} of the requested shape {target:?} is 0, which copies this axis of the input, but \
                         the input has rank {}",
                        input.len()
                    );
                    copied.cloned().unwrap_or(Dim::constant(0))
                }
                None => cx.fresh(),
            },
            Some(-1) => {
                ensure!(
                    open.is_none(),
                    InvalidGraph,
                    help = "only one size may be -1",
                    "shape {target:?} has two sizes of -1"
                );
                open = Some(index);
                // A placeholder that is neutral in the product until `close` fills it.
                Dim::constant(1)
            }
            Some(size) => {
                ensure!(
                    size >= 0,
                    InvalidGraph,
                    help = "the only negative size is -1, which stands for the size that is left",
                    "shape {target:?} has a negative size"
                );
                Dim::constant(size)
            }
            // A symbolic element that may be negative may turn out to be -1, which infers the size.
            None if !size.is_known_nonneg() && size.has_unknown() => cx.fresh(),
            None => size.clone(),
        });
    }
    match input {
        Some(input) => close(&mut shape, open, input, &target)?,
        None => {
            if let Some(index) = open {
                shape = axes::with_size(&shape, index, cx.fresh());
            }
        }
    }
    set_reshaped(cx, shape)
}

/// Infers the size that -1 stands for, and compares the element counts if both are constants.
fn close(shape: &mut [Dim], open: Option<usize>, input: &[Dim], target: &[Dim]) -> Result<()> {
    let total: Dim = input.iter().product();
    let rest: Dim = shape.iter().product();
    // A rest of 0 leaves -1 undefined: `checked_rem` is `None`, and ONNX Runtime refuses it as
    // well.
    let fits = match (total.as_constant(), rest.as_constant()) {
        (Some(total), Some(rest)) if open.is_some() => total.checked_rem(rest) == Some(0),
        (Some(total), Some(rest)) => total == rest,
        _ => true,
    };
    ensure!(
        fits,
        InvalidGraph,
        help = match open.is_some() && rest.as_constant() == Some(0) {
            true =>
                "-1 cannot be inferred, because another size is 0: give the size in place of -1".to_string(),
            false => format!("the sizes must multiply to {total}; -1 stands for what is left"),
        },
        "the input of shape {input:?} cannot be reshaped to {target:?}"
    );
    if let Some(index) = open {
        shape.get_mut(index).into_iter().for_each(|size| *size = total.floor_div(&rest));
    }
    Ok(())
}

fn infer_flatten(cx: &mut InferCx<'_>) -> Result<()> {
    let axis = cx.attrs.int("axis")?;
    let Some(shape) = cx.shape(0) else {
        // The output is a matrix, whatever the input.
        let sizes = vec![cx.fresh(), cx.fresh()];
        return cx.set_shape(0, sizes);
    };
    let rank = shape.len() as i64;
    let split = if axis < 0 { axis.saturating_add(rank) } else { axis };
    ensure!(
        (0..=rank).contains(&split),
        InvalidGraph,
        help = format!("set the node's `axis` to {} to {rank}", -rank),
        "axis {axis} is out of range for rank {rank}"
    );
    let (outer, inner) = shape.split_at(split as usize);
    set_reshaped(cx, vec![outer.iter().product(), inner.iter().product()])
}
