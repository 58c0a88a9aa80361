//! `Slice`: a strided range of indices along some dimensions.

use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::ops::axes;
use crate::ops::batch;
use crate::spec::{
    BatchRule, Draft, Grad, InferCx, OP, OpSpec, Traits, Upgrade, ViewCx, ViewOf, one, opt, var,
};
use crate::tensor::Shape;
use crate::{Result, ensure};

use super::geometry::{SliceArguments, SliceAxis, Strided, contiguous_strides, slice_axes_and_steps};
use super::gradients;
use super::{constant_sizes, set_elements};

static SLICE: OpSpec = OpSpec {
    name: "Slice",
    since: 13,
    inputs: &[
        one("data", "T"),
        one("starts", "Tind").host(),
        one("ends", "Tind").host(),
        opt("axes", "Tind").host(),
        opt("steps", "Tind").host(),
    ],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::ALL_TENSOR), var("Tind", TypeSet::of(&[DType::I32, DType::I64]))],
    traits: Traits::MOVES_DATA,
    infer,
    view: Some(view),
    upgrades: &[Upgrade { before: 10, apply: attributes_to_inputs }],
    grad: Grad::Rule(gradients::of_slice),
    batch: BatchRule::Rule(batch::slice),
    ..OP
};

ops![SLICE];

fn attributes_to_inputs(draft: &mut Draft<'_>) -> Result<()> {
    draft.attr_to_input("starts", 1)?;
    draft.attr_to_input("ends", 2)?;
    draft.attr_to_input("axes", 3)
}

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    // Omitted axes are the leading ones, omitted steps are 1.
    let (axes, steps) = (cx.ints(3), cx.ints(4));
    let axes_known = axes.is_some() || !cx.has_input(3);
    let steps_known = steps.is_some() || !cx.has_input(4);
    let (starts, ends) = (cx.dims(1), cx.dims(2));
    let count = starts.as_ref().or(ends.as_ref()).map(Vec::len).or_else(|| {
        let [length] = cx.shape(1)? else { return None };
        length.as_constant().and_then(|length| usize::try_from(length).ok())
    });
    // Without axes or their count, any dimension may be sliced: only the rank is known.
    let Some(count) = count.filter(|_| axes_known) else {
        let sizes = shape.iter().map(|_| cx.fresh()).collect();
        return cx.set_shape(0, sizes);
    };
    let given_steps = steps.as_deref().filter(|_| steps_known);
    let mut result = shape.to_vec();
    for (entry, (axis, step)) in
        slice_axes_and_steps(count, axes.as_deref(), given_steps, shape.len())?.into_iter().enumerate()
    {
        let bound = |list: &Option<Vec<Dim>>| list.as_ref().and_then(|list| list.get(entry).cloned());
        let size = match (bound(&starts), bound(&ends)) {
            (Some(start), Some(end)) if steps_known => sliced(axes::size(shape, axis)?, &start, &end, step)?,
            (None, None) => None,
            (start, end) => {
                let missing = (starts.is_some() && start.is_none()) || (ends.is_some() && end.is_none());
                ensure!(!missing, InvalidGraph, "starts and ends have different lengths");
                None
            }
        };
        result = axes::with_size(&result, axis, size.unwrap_or_else(|| cx.fresh()));
    }
    set_symbolic(cx, shape, &result)?;
    cx.set_shape(0, result)
}

/// Returns the size of a slice of a dimension, or `None` if a bound may be on either side of 0.
fn sliced(size: &Dim, start: &Dim, end: &Dim, step: i64) -> Result<Option<Dim>> {
    let numbers = (size.as_constant(), start.as_constant(), end.as_constant());
    if let (Some(size), Some(start), Some(end)) = numbers {
        let size = usize::try_from(size).unwrap_or(0);
        return Ok(Some(Dim::constant(SliceAxis::new(size, start, end, step)?.count as i64)));
    }
    let zero = Dim::constant(0);
    // `i64::MIN` has no absolute value. No dimension is longer than the saturated one.
    let stride = Dim::constant(step.saturating_abs());
    // The last elements, or all of them if the dimension is shorter.
    if step > 0 && is_negative(start) && is_endless(end) {
        return Ok(Some(Dim::min(&-start, size).ceil_div(&stride)));
    }
    let distance = if step > 0 {
        // An end beyond the size is clamped. A start beyond it makes the distance negative, which
        // the final maximum turns into 0.
        let (Some(first), Some(last)) = (from_front(start, size), from_front(end, size)) else {
            return Ok(None);
        };
        let first = if is_negative(start) { Dim::max(&first, &zero) } else { first };
        let last = if is_endless(end) { size.clone() } else { Dim::min(&last, size) };
        last - first
    } else {
        let (Some(first), Some(last)) = (from_front(start, size), from_front(end, size)) else {
            return Ok(None);
        };
        let last_index = size - 1;
        let first = if is_endless(start) || start.as_constant() == Some(-1) {
            last_index
        } else {
            Dim::min(&Dim::max(&first, &zero), &last_index)
        };
        // The usual "to the front" is a large negative constant, which maps to the index before 0.
        let last = if end.as_constant().is_some_and(|end| end <= -i64::from(i32::MAX)) {
            Dim::constant(-1)
        } else {
            Dim::max(&last, &Dim::constant(-1))
        };
        first - last
    };
    Ok(Some(Dim::max(&distance, &zero).ceil_div(&stride)))
}

fn is_negative(index: &Dim) -> bool {
    index.upper_bound().is_some_and(|high| high < 0)
}

/// Whether an index is the usual "to the end": `i32::MAX` or more, beyond any symbolic dimension.
fn is_endless(index: &Dim) -> bool {
    index.as_constant().is_some_and(|index| index >= i64::from(i32::MAX))
}

/// Returns an index counted from the front, or `None` if its sign is unknown.
fn from_front(index: &Dim, size: &Dim) -> Option<Dim> {
    if index.is_known_nonneg() {
        return Some(index.clone());
    }
    is_negative(index).then(|| size + index)
}

fn set_symbolic(cx: &mut InferCx<'_>, shape: &[Dim], result: &[Dim]) -> Result<()> {
    let (Some(symbolic), Some(sizes)) = (cx.symbolic(0), constant_sizes(shape)) else { return Ok(()) };
    let (Some(starts), Some(ends)) = (cx.ints(1), cx.ints(2)) else { return Ok(()) };
    if cx.has_input(4) && cx.ints(4).is_none() {
        return Ok(());
    }
    let (axes, steps) = (cx.ints(3), cx.ints(4));
    let arguments =
        SliceArguments { starts: &starts, ends: &ends, axes: axes.as_deref(), steps: steps.as_deref() };
    let elements = Strided::slice(&sizes, &arguments.resolve(&sizes)?).collect(&symbolic.elements)?;
    set_elements(cx, cx.dtype(0)?, result, elements)
}

/// A view if the slice is contiguous: every dimension outside the innermost shortened one takes a
/// single index.
fn view(cx: &ViewCx<'_>) -> Option<ViewOf> {
    let shape: &Shape = cx.inputs.first()?.as_ref()?;
    let list = |index: usize| cx.ints.get(index).and_then(Option::as_deref);
    let given = |index: usize| matches!(cx.inputs.get(index), Some(Some(_)));
    if (given(3) && list(3).is_none()) || (given(4) && list(4).is_none()) {
        return None;
    }
    let arguments = SliceArguments { starts: list(1)?, ends: list(2)?, axes: list(3), steps: list(4) };
    let parts = arguments.resolve(shape).ok()?;
    let whole = |(part, size): &(&SliceAxis, &usize)| part.count == **size && (part.step == 1 || **size < 2);
    let mut shortened = parts.iter().zip(shape).rev().skip_while(whole).map(|(part, _)| part);
    if let Some(innermost) = shortened.next() {
        let single = innermost.step == 1 || innermost.count < 2;
        if !single || shortened.any(|part| part.count != 1) {
            return None;
        }
    }
    // An empty slice may start past the last element, so its view starts at 0.
    if parts.iter().any(|part| part.count == 0) {
        return Some(ViewOf { input: 0, offsets: vec![0] });
    }
    let strides = contiguous_strides(shape);
    let offset = parts.iter().zip(&strides).map(|(part, &stride)| part.start * stride as usize).sum();
    Some(ViewOf { input: 0, offsets: vec![offset] })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbolic_sizes() -> Result<()> {
        let length = Dim::named("length");
        let cases = [
            (0, i64::MAX, 1, "length"),
            (0, -1, 1, "max(0, length - 1)"),
            (1, i64::from(i32::MAX), 1, "max(0, length - 1)"),
            (-1, i64::MIN, -1, "length"),
            (-1, i64::MAX, 1, "min(1, length)"),
            (-3, i64::MIN, -1, "max(0, 1 + min(max(0, length - 3), length - 1))"),
            (2, i64::MIN, -1, "max(0, 1 + min(2, length - 1))"),
            (0, i64::MAX, 2, "ceil_div(length, 2)"),
            (0, 8, 1, "min(8, length)"),
        ];
        for (start, end, step, expected) in cases {
            let size = sliced(&length, &Dim::constant(start), &Dim::constant(end), step)?;
            let size = size.ok_or_else(|| crate::error!(Fail, "no size"))?;
            for value in 0..12 {
                let bindings = [(crate::dim::Symbol::named("length"), value)].into_iter().collect();
                let exact = SliceAxis::new(value as usize, start, end, step)?.count as i64;
                assert_eq!(size.evaluate(&bindings), Ok(exact), "{start}..{end} by {step} of {value}");
            }
            assert_eq!(size, Dim::parse(expected), "{start}..{end} by {step}");
        }
        Ok(())
    }
}
