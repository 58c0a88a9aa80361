//! `Split`: parts of a tensor along an axis.

use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::Attribute;
use crate::ops;
use crate::ops::axes;
use crate::ops::batch;
use crate::spec::{
    AttrKind, BatchRule, Draft, Grad, InferCx, OP, OpSpec, Requirement, Traits, Upgrade, ViewCx, ViewOf,
    attr, many, one, opt, var,
};
use crate::tensor::saturating_product;
use crate::{Result, ensure};

use super::geometry::normalize_axis;
use super::gradients;

static SPLIT: OpSpec = OpSpec {
    name: "Split",
    since: 18,
    inputs: &[one("input", "T"), opt("split", "tensor(int64)").host()],
    outputs: &[many("outputs", "T", 1)],
    types: &[var("T", TypeSet::ALL_TENSOR)],
    attrs: &[attr::optional("num_outputs", AttrKind::Int), attr::int("axis", 0)],
    internal_attrs: &[attr::int(EVEN, 0)],
    traits: Traits::MOVES_DATA,
    infer,
    view: Some(view),
    upgrades: &[
        Upgrade { before: 2, apply: whole_parts },
        Upgrade { before: 13, apply: split_to_input },
        Upgrade { before: 18, apply: equal_parts },
    ],
    grad: Grad::Rule(gradients::of_split),
    batch: BatchRule::Rule(batch::along_axis),
    ..OP
};

ops![SPLIT];

/// Whether parts without given sizes must be equal.
const EVEN: &str = "even";

/// In version 1 the part sizes could also be an input, of the data's type.
fn whole_parts(draft: &mut Draft<'_>) -> Result<()> {
    let Some(parts) = draft.input(1) else { return Ok(()) };
    let to = Attribute::Int(i64::from(DType::I64.onnx_code()));
    let parts = draft.emit("Cast", &[parts], &[("to", to)])?;
    draft.set_input(1, parts);
    Ok(())
}

fn split_to_input(draft: &mut Draft<'_>) -> Result<()> {
    draft.attr_to_input("split", 1)
}

/// Before version 18 the parts were equal, unless their sizes were given.
fn equal_parts(draft: &mut Draft<'_>) -> Result<()> {
    if draft.input(1).is_none() {
        draft.set_attr("num_outputs", Attribute::Int(draft.outputs.len() as i64));
        draft.set_attr(EVEN, Attribute::Int(1));
    }
    Ok(())
}

/// Returns the size of each part of a dimension that is split into `count` parts.
fn parts_of(cx: &InferCx<'_>, size: &Dim, count: usize) -> Result<Vec<Dim>> {
    if cx.has_input(1) {
        let Some(parts) = cx.dims(1) else { return Ok((0..count).map(|_| cx.fresh()).collect()) };
        ensure!(
            parts.len() == count,
            InvalidGraph,
            "split has {} sizes, but there are {count} outputs",
            parts.len()
        );
        let negative = parts.iter().any(|part| part.as_constant().is_some_and(|part| part < 0));
        let sum: Dim = parts.iter().sum();
        let differ = sum.as_constant().zip(size.as_constant()).is_some_and(|(sum, size)| sum != size);
        ensure!(
            !negative && !differ,
            InvalidArgument,
            help = "the parts must be 0 or more and add up to the size",
            "split {parts:?} does not add up to size {size}"
        );
        // No kernel checks parts that are views of the input.
        cx.require(Requirement::equal(format!("the sum of split {parts:?}"), &sum, size).or_fail())?;
        return Ok(parts);
    }
    if let Some(given) = cx.attrs.find_int("num_outputs") {
        ensure!(given == count as i64, InvalidGraph, "num_outputs is {given}, but there are {count} outputs");
    }
    if cx.attrs.find_int(EVEN) == Some(1) {
        let whole = Requirement::multiple("the size of the split axis", size, count as i64).or_fail();
        cx.require(whole.help("give the sizes of the parts"))?;
        return Ok(vec![size.floor_div(&Dim::constant(count as i64)); count]);
    }
    // The standard: equal parts, with a smaller last one if the size does not divide.
    let part = size.ceil_div(&Dim::constant(count as i64));
    let last = size - &part * (count as i64 - 1);
    let negative = last.as_constant().is_some_and(|last| last < 0);
    ensure!(
        !negative,
        InvalidGraph,
        help = "ask for fewer parts, or give their sizes",
        "size {size} cannot be split into {count} parts"
    );
    let mut parts = vec![part; count];
    if let Some(slot) = parts.last_mut() {
        *slot = last;
    }
    Ok(parts)
}

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    let axis = normalize_axis(cx.attrs.int("axis")?, shape.len())?;
    let parts = parts_of(cx, axes::size(shape, axis)?, cx.output_count())?;
    // Inference tracks the elements of vectors only, whose parts are contiguous.
    let symbolic = cx.symbolic(0).filter(|_| shape.len() == 1);
    let mut start = 0usize;
    for (index, part) in parts.into_iter().enumerate() {
        let size = part.as_constant().and_then(|size| usize::try_from(size).ok());
        if let (Some(symbolic), Some(size)) = (&symbolic, size) {
            let end = start.saturating_add(size);
            let elements = symbolic.elements.get(start..end).unwrap_or(&[]).to_vec();
            cx.set_symbolic(index, crate::spec::SymTensor::vector(elements));
            start = end;
        }
        cx.set_shape(index, axes::with_size(shape, axis, part))?;
    }
    Ok(())
}

/// A view if the parts are contiguous: along the outermost dimension larger than 1.
fn view(cx: &ViewCx<'_>) -> Option<ViewOf> {
    let shape = cx.inputs.first()?.as_ref()?;
    let axis = normalize_axis(cx.attrs.int("axis").ok()?, shape.len()).ok()?;
    if shape.iter().take(axis).any(|&size| size != 1) {
        return None;
    }
    let mut offsets = Vec::with_capacity(cx.outputs.len());
    let mut next = 0usize;
    for output in cx.outputs {
        offsets.push(next);
        // An omitted output has no shape here, so the offsets after it are unknown.
        match output {
            Some(output) => next = next.checked_add(saturating_product(output))?,
            None => return None,
        }
    }
    Some(ViewOf { input: 0, offsets })
}
