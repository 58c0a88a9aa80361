//! Operators that choose among or combine several tensors: `Where`, `Clip`, `Min`, `Max`, `Sum`, `Mean`.

use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::Attribute;
use crate::ops;
use crate::spec::{Draft, Grad, GradCx, InferCx, OP, OpSpec, Param, Traits, Upgrade, one, opt, var};
use crate::tensor::Tensor;
use crate::{Result, ensure, error};

use super::shared::{
    COMMUTATIVE, DATA_0, DROP_HINT, FLOATS, NUMERIC, OUTPUT, SEMIRING, UNARY_UPGRADES, broadcast, same_shape,
};
use super::symbolic;

static WHERE: OpSpec = OpSpec {
    name: "Where",
    since: 16,
    first: 9,
    inputs: &[one("condition", "B"), one("X", "T"), one("Y", "T")],
    outputs: OUTPUT,
    types: &[var("B", TypeSet::of(&[DType::Bool])), var("T", TypeSet::ALL_TENSOR)],
    traits: Traits::ELEMENTWISE,
    infer: infer_where,
    scalar: Some(|_| {
        use crate::spec::ScalarExpr::{self, Input};
        Ok(ScalarExpr::select(Input(0), Input(1), Input(2)))
    }),
    ..OP
};

static CLIP: OpSpec = OpSpec {
    name: "Clip",
    since: 13,
    inputs: &[one("input", "T"), opt("min", "T"), opt("max", "T")],
    outputs: OUTPUT,
    types: NUMERIC,
    traits: Traits::ELEMENTWISE,
    infer: infer_clip,
    upgrades: &[DROP_HINT, Upgrade { before: 11, apply: bounds_to_inputs }],
    ..OP
};

static MIN: OpSpec = OpSpec {
    traits: SEMIRING,
    infer: |cx| extreme(cx, |a, b| Some(a.min(b))),
    ..variadic("Min", &[one("min", "T")])
};
static MAX: OpSpec = OpSpec {
    traits: SEMIRING,
    infer: |cx| extreme(cx, |a, b| Some(a.max(b))),
    ..variadic("Max", &[one("max", "T")])
};
static SUM: OpSpec =
    OpSpec { types: FLOATS, grad: Grad::Rule(|cx| share(cx, false)), ..variadic("Sum", &[one("sum", "T")]) };
static MEAN: OpSpec =
    OpSpec { types: FLOATS, grad: Grad::Rule(|cx| share(cx, true)), ..variadic("Mean", &[one("mean", "T")]) };

ops![WHERE, CLIP, MIN, MAX, SUM, MEAN];

const fn variadic(name: &'static str, outputs: &'static [Param]) -> OpSpec {
    OpSpec {
        name,
        since: 13,
        inputs: DATA_0,
        outputs,
        types: NUMERIC,
        traits: COMMUTATIVE,
        infer: broadcast,
        upgrades: UNARY_UPGRADES,
        ..OP
    }
}

fn extreme(cx: &mut InferCx<'_>, function: fn(&Dim, &Dim) -> Option<Dim>) -> Result<()> {
    broadcast(cx)?;
    symbolic::fold(cx, function)
}

/// Each input of a sum has the gradient of the output; of a mean, its part of it.
fn share(cx: &mut GradCx<'_>, mean: bool) -> Result<()> {
    let mut gradient = cx.upstream()?;
    if mean {
        let count = cx.number(cx.input_count() as f64, cx.dtype(gradient)?)?;
        gradient = cx.emit("Div", &[gradient, count], &[])?;
    }
    cx.wanted().into_iter().try_for_each(|index| cx.set_broadcast(index, gradient))
}

fn infer_where(cx: &mut InferCx<'_>) -> Result<()> {
    broadcast(cx)?;
    symbolic::select(cx)
}

fn infer_clip(cx: &mut InferCx<'_>) -> Result<()> {
    same_shape(cx)?;
    for (index, name) in [(1, "min"), (2, "max")] {
        let Some(shape) = cx.shape(index) else { continue };
        let one = shape.iter().all(|size| size.as_constant().is_none_or(|size| size == 1));
        ensure!(one, InvalidGraph, "input '{name}' of Clip must be one element");
    }
    let Some(x) = cx.symbolic(0) else { return Ok(()) };
    let bound = |index: usize| cx.symbolic(index).and_then(|bound| bound.elements.first().cloned());
    let (low, high) = (bound(1), bound(2));
    if cx.has_input(1) != low.is_some() || cx.has_input(2) != high.is_some() {
        return Ok(());
    }
    let clip = |x: &Dim| {
        let x = low.as_ref().map_or_else(|| x.clone(), |low| x.max(low));
        high.as_ref().map_or_else(|| x.clone(), |high| Dim::min(&x, high))
    };
    let elements = x.elements.iter().map(clip).collect();
    let clipped = crate::spec::SymTensor::new(&x.shape, elements)?;
    cx.set_symbolic(0, clipped);
    Ok(())
}

/// Before version 11 the bounds were attributes, of floats only.
fn bounds_to_inputs(draft: &mut Draft<'_>) -> Result<()> {
    for (index, name) in [(1, "min"), (2, "max")] {
        let bound = match draft.take_attr(name) {
            None => continue,
            Some(Attribute::Float(bound)) => bound,
            Some(_) => return Err(error!(InvalidGraph, "attribute '{name}' is no float")),
        };
        // The widest float stands for no bound.
        if (index == 1 && bound == f32::MIN) || (index == 2 && bound == f32::MAX) {
            continue;
        }
        let tensor = match draft.dtype(0) {
            Ok(DType::F16) => Tensor::scalar(half::f16::from_f32(bound))?,
            Ok(DType::F64) => Tensor::scalar(f64::from(bound))?,
            _ => Tensor::scalar(bound)?,
        };
        let typed = draft.dtype(0).is_ok();
        let mut value = draft.constant(tensor);
        if !typed {
            let input = draft.required(0)?;
            value = draft.emit("CastLike", &[value, input], &[])?;
        }
        draft.set_input(index, value);
    }
    Ok(())
}
