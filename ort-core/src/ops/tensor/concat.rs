//! Concatenation along an axis: `Concat`.

use crate::dim::Dim;
use crate::dtype::TypeSet;
use crate::ir::Attribute;
use crate::ops;
use crate::ops::axes;
use crate::ops::batch;
use crate::spec::{
    AttrKind, BatchRule, Draft, Grad, InferCx, OP, OpSpec, Requirement, SymTensor, Traits, Upgrade, ViewCx,
    ViewOf, attr, many, one, var,
};
use crate::tensor::saturating_product;
use crate::{Result, ensure};

use super::geometry::normalize_axis;
use super::gradients;
use super::{constant_sizes, set_elements};

static CONCAT: OpSpec = OpSpec {
    name: "Concat",
    since: 13,
    inputs: &[many("inputs", "T", 1)],
    outputs: &[one("concat_result", "T")],
    types: &[var("T", TypeSet::ALL_TENSOR)],
    attrs: &[attr::required("axis", AttrKind::Int)],
    traits: Traits::MOVES_DATA,
    infer,
    view: Some(view),
    join: Some(join),
    upgrades: &[Upgrade { before: 4, apply: default_axis }],
    grad: Grad::Rule(gradients::of_concat),
    batch: BatchRule::Rule(batch::concat),
    ..OP
};

ops![CONCAT];

/// Before version 4 the axis was 1 by default.
fn default_axis(draft: &mut Draft<'_>) -> Result<()> {
    if draft.attr("axis").is_none() {
        draft.set_attr("axis", Attribute::Int(1));
    }
    Ok(())
}

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let known: Vec<&[Dim]> = (0..cx.input_count()).filter_map(|index| cx.shape(index)).collect();
    let Some((mut result, axis)) = joined(cx, &known)? else { return Ok(()) };
    // An input without a shape leaves the total along the axis unknown.
    if known.len() < cx.input_count() {
        result = axes::with_size(&result, axis, cx.fresh());
    }
    set_symbolic(cx, &result, axis)?;
    cx.set_shape(0, result)
}

/// Returns the shape of the concatenated tensors and the attribute `axis` counted from the front,
/// or `None` without any shape.
pub(in crate::ops) fn joined(cx: &InferCx<'_>, shapes: &[&[Dim]]) -> Result<Option<(Vec<Dim>, usize)>> {
    let Some(first) = shapes.first() else { return Ok(None) };
    let axis = normalize_axis(cx.attrs.int("axis")?, first.len())?;
    let mut result = first.to_vec();
    for shape in shapes.iter().skip(1) {
        ensure!(
            shape.len() == result.len(),
            InvalidGraph,
            "the inputs have ranks {} and {}, expected equal ranks",
            first.len(),
            shape.len()
        );
        for (index, (size, other)) in result.iter_mut().zip(*shape).enumerate() {
            if index == axis {
                *size = &*size + other;
            } else {
                let differ = size.as_constant().zip(other.as_constant()).is_some_and(|(a, b)| a != b);
                ensure!(
                    !differ,
                    InvalidGraph,
                    "input shapes {first:?} and {shape:?} must match except on the concat axis {axis}"
                );
                if differ_symbolically(size, other) {
                    cx.require(equal_unless_empty([size, other], [first, shape]))?;
                }
                // A constant is more precise than a symbolic dimension.
                if size.as_constant().is_none() && other.as_constant().is_some() {
                    *size = other.clone();
                }
            }
        }
    }
    Ok(Some((result, axis)))
}

fn differ_symbolically(a: &Dim, b: &Dim) -> bool {
    a != b && (a.as_constant().is_none() || b.as_constant().is_none())
}

/// Requires two sizes of inputs to be equal, unless one of the inputs has no elements. Exporters
/// concatenate caches that are empty at first, and ONNX Runtime skips those.
fn equal_unless_empty([expected, actual]: [&Dim; 2], shapes: [&[Dim]; 2]) -> Requirement {
    let one = Dim::constant(1);
    // 0 for an input without elements, else 1.
    let [first, second] = shapes.map(|shape| shape.iter().product::<Dim>().min(&one));
    let counts = first * second;
    let what = "a size of an input, on another axis than the concat axis,";
    Requirement::equal(what, &(actual * &counts), &(expected * &counts)).or_fail()
}

/// Concatenates symbolic elements if every input has them.
fn set_symbolic(cx: &mut InferCx<'_>, shape: &[Dim], axis: usize) -> Result<()> {
    let Some(sizes) = constant_sizes(shape) else { return Ok(()) };
    let mut parts = Vec::with_capacity(cx.input_count());
    for index in 0..cx.input_count() {
        // One input without symbolic elements leaves all of the result unknown.
        let symbolic = cx.symbolic(index).filter(|part| part.shape.len() == shape.len());
        let Some(symbolic) = symbolic else { return Ok(()) };
        parts.push(symbolic);
    }
    let run = |part: &SymTensor| saturating_product(part.shape.get(axis..).unwrap_or(&[]));
    let mut elements = Vec::new();
    if !SymTensor::follows(cx.dtype(0)?, SymTensor::extent(&sizes)) {
        return Ok(());
    }
    let mut parts: Vec<_> = parts.iter().map(|part| part.elements.chunks(run(part).max(1))).collect();
    // Each index of the outer dimensions takes one run of every input. An empty result takes none.
    for _ in 0..saturating_product(sizes.get(..axis).unwrap_or(&[])).min(sizes.iter().product()) {
        for part in &mut parts {
            elements.extend_from_slice(part.next().unwrap_or(&[]));
        }
    }
    set_elements(cx, cx.dtype(0)?, shape, elements)
}

/// A view if one input has all the elements, because the others are empty.
fn view(cx: &ViewCx<'_>) -> Option<ViewOf> {
    let count = |shape: &Option<crate::tensor::Shape>| shape.as_ref().map(|shape| shape.iter().product());
    let total: usize = count(cx.outputs.first()?)?;
    let input = cx.inputs.iter().position(|shape| count(shape) == Some(total))?;
    (total > 0).then(|| ViewOf { input, offsets: vec![0] })
}

/// Returns the offset of each input in the output, or `None` if the inputs are not contiguous
/// there: the axis must be the outermost dimension larger than 1.
fn join(cx: &ViewCx<'_>) -> Option<Vec<usize>> {
    let output = cx.outputs.first()?.as_ref()?;
    let axis = normalize_axis(cx.attrs.int("axis").ok()?, output.len()).ok()?;
    if output.iter().take(axis).any(|&size| size != 1) {
        return None;
    }
    let mut next = 0usize;
    let mut begin = |shape: &Option<crate::tensor::Shape>| {
        let start = next;
        next = next.checked_add(saturating_product(shape.as_ref()?))?;
        Some(start)
    };
    let offsets: Option<Vec<usize>> = cx.inputs.iter().map(&mut begin).collect();
    offsets.filter(|_| next == saturating_product(output))
}
