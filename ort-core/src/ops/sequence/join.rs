//! Splitting tensors into sequences and concatenating sequences into tensors.

use super::{CONTAINED, POSITION, S, element_type, sequence_of};
use crate::Result;
use crate::dim::Dim;
use crate::dtype::TypeSet;
use crate::ir::ValueType;
use crate::ops;
use crate::ops::axes;
use crate::ops::control::merge::outside;
use crate::spec::{AttrKind, Grad, InferCx, OP, OpSpec, TypeVar, Types, attr, one, opt, var};

static SPLIT_TO_SEQUENCE: OpSpec = OpSpec {
    name: "SplitToSequence",
    grad: Grad::None("it takes apart or makes a sequence that only the run knows"),
    since: 24,
    first: 11,
    inputs: &[one("input", "T"), opt("split", "I")],
    outputs: &[one("output_sequence", "S")],
    types: &[
        var("T", TypeSet::ALL_TENSOR),
        var("I", POSITION),
        TypeVar { name: "S", types: Types::sequences(TypeSet::ALL_TENSOR) },
    ],
    attrs: &[attr::int("axis", 0), attr::int("keepdims", 1)],
    infer: split,
    ..OP
};

static CONCAT_FROM_SEQUENCE: OpSpec = OpSpec {
    name: "ConcatFromSequence",
    grad: Grad::None("it takes apart or makes a sequence that only the run knows"),
    since: 11,
    first: 11,
    inputs: &[one("input_sequence", "S")],
    outputs: &[one("concat_result", "T")],
    types: &[S, var("T", CONTAINED)],
    attrs: &[attr::required("axis", AttrKind::Int), attr::int("new_axis", 0)],
    infer: concat,
    ..OP
};

ops![SPLIT_TO_SEQUENCE, CONCAT_FROM_SEQUENCE];

fn split(cx: &mut InferCx<'_>) -> Result<()> {
    let dtype = cx.dtype(0)?;
    let shape = match cx.shape(0) {
        None => None,
        Some(shape) => {
            let axis = axes::normalize(cx.attrs.int("axis")?, shape.len())?;
            // Without `split`, parts have size 1, and lose the axis if `keepdims` is 0.
            let part = match cx.has_input(1) {
                true => axes::with_size(shape, axis, equal_parts(cx, axes::size(shape, axis)?)),
                false if cx.attrs.flag("keepdims")? => axes::with_size(shape, axis, Dim::constant(1)),
                false => {
                    let (front, back) = axes::around(shape, axis);
                    [front, back].concat()
                }
            };
            Some(part)
        }
    };
    cx.set_type(0, sequence_of(ValueType::tensor(dtype, shape)));
    Ok(())
}

/// The size of all parts, or an unknown dimension if they may differ.
///
/// A list gives each part's size. A scalar is the size of every part but a smaller last one.
fn equal_parts(cx: &InferCx<'_>, size: &Dim) -> Dim {
    let lengths = cx.ints(1).unwrap_or_default();
    let Some(&first) = lengths.first() else { return Dim::unknown() };
    let listed = cx.shape(1).is_some_and(|shape| shape.len() == 1);
    let even = match (listed, size.as_constant()) {
        (true, _) => lengths.iter().all(|&length| length == first),
        (false, Some(size)) => first > 0 && size % first == 0,
        (false, None) => false,
    };
    if even { Dim::constant(first) } else { Dim::unknown() }
}

fn concat(cx: &mut InferCx<'_>) -> Result<()> {
    let element = outside(&element_type(cx, 0));
    let Some(dtype) = element.dtype() else { return Ok(()) };
    let axis = cx.attrs.int("axis")?;
    // The sequence's length is known to the run alone, so the size along the axis is unknown.
    let shape = match element.shape() {
        None => None,
        Some(shape) => {
            let mut shape = shape.to_vec();
            if cx.attrs.flag("new_axis")? {
                shape.insert(axes::normalize(axis, shape.len() + 1)?, Dim::unknown());
                Some(shape)
            } else {
                let axis = axes::normalize(axis, shape.len())?;
                Some(axes::with_size(&shape, axis, Dim::unknown()))
            }
        }
    };
    cx.set(0, dtype, shape);
    Ok(())
}
