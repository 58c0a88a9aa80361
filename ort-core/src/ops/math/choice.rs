//! Selection and variadic operators: `Where`, `Clip`, `Min`, `Max`, `Sum` and `Mean`.

use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::{Attribute, ValueId};
use crate::ops;
use crate::spec::ScalarExpr::{self, Input};
use crate::spec::{
    BinaryFn, Draft, Grad, GradCx, InferCx, OP, OpSpec, Param, Traits, Upgrade, one, opt, var,
};
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
    scalar: Some(|_| Ok(ScalarExpr::select(Input(0), Input(1), Input(2)))),
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
    grad: Grad::Rule(gradient_of_clip),
    upgrades: &[DROP_HINT, Upgrade { before: 11, apply: bounds_to_inputs }],
    ..OP
};

static MIN: OpSpec = OpSpec {
    traits: SEMIRING,
    infer: |cx| extreme(cx, |a, b| Some(a.min(b))),
    fold: Some(|count| folded(BinaryFn::Min, count)),
    grad: Grad::Rule(gradient_of_extreme),
    ..variadic("Min", &[one("min", "T")])
};
static MAX: OpSpec = OpSpec {
    traits: SEMIRING,
    infer: |cx| extreme(cx, |a, b| Some(a.max(b))),
    fold: Some(|count| folded(BinaryFn::Max, count)),
    grad: Grad::Rule(gradient_of_extreme),
    ..variadic("Max", &[one("max", "T")])
};
static SUM: OpSpec = OpSpec {
    types: FLOATS,
    fold: Some(|count| folded(BinaryFn::Add, count)),
    grad: Grad::Rule(|cx| share(cx, false)),
    ..variadic("Sum", &[one("sum", "T")])
};
static MEAN: OpSpec = OpSpec {
    types: FLOATS,
    fold: Some(|count| Some(folded(BinaryFn::Add, count)? / count as f64)),
    grad: Grad::Rule(|cx| share(cx, true)),
    ..variadic("Mean", &[one("mean", "T")])
};

ops![WHERE, CLIP, MIN, MAX, SUM, MEAN];

/// The record of a variadic operator whose inputs broadcast.
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

/// Combines all inputs with one function; `None` for no inputs.
///
/// Code that walks a formula recurses once for each level. Many terms are therefore folded in
/// groups, and these again, so that the depth stays small however many inputs a node has.
fn folded(function: BinaryFn, count: usize) -> Option<ScalarExpr> {
    const GROUP: usize = 128;
    let chain = |left, right| ScalarExpr::binary(function, left, right);
    let mut terms: Vec<ScalarExpr> = (0..count).map(Input).collect();
    while terms.len() > GROUP {
        let mut rest = terms.into_iter();
        terms = std::iter::from_fn(|| rest.by_ref().take(GROUP).reduce(chain)).collect();
    }
    terms.into_iter().reduce(chain)
}

/// Infers the shape, and the elements as a fold of `function` over the inputs.
fn extreme(cx: &mut InferCx<'_>, function: fn(&Dim, &Dim) -> Option<Dim>) -> Result<()> {
    broadcast(cx)?;
    symbolic::fold(cx, function)
}

/// The gradient of `Sum` and `Mean`: each input gets the upstream gradient, divided by the number
/// of inputs for a mean.
fn share(cx: &mut GradCx<'_>, mean: bool) -> Result<()> {
    let mut gradient = cx.upstream()?;
    if mean {
        let count = cx.number(cx.input_count() as f64, cx.dtype(gradient)?)?;
        gradient = cx.emit("Div", &[gradient, count], &[])?;
    }
    cx.wanted().into_iter().try_for_each(|index| cx.set_broadcast(index, gradient))
}

/// The gradient of `Min` and `Max`: inputs that tie for the extreme share the upstream gradient
/// equally.
fn gradient_of_extreme(cx: &mut GradCx<'_>) -> Result<()> {
    let (output, upstream) = (cx.output(0)?, cx.upstream()?);
    let dtype = cx.dtype(output)?;
    let hits = (0..cx.input_count()).map(|index| {
        let input = cx.input(index)?;
        let hit = cx.emit("Equal", &[input, output], &[])?;
        cx.cast(hit, dtype)
    });
    let hits = hits.collect::<Result<Vec<ValueId>>>()?;
    // An output of NaN equals no input. The count is then 0, and the gradients are NaN as well.
    let count = cx.emit("Sum", &hits, &[])?;
    let share = cx.emit("Div", &[upstream, count], &[])?;
    for index in cx.wanted() {
        let Some(&hit) = hits.get(index) else { continue };
        let gradient = cx.emit("Mul", &[share, hit], &[])?;
        cx.set_broadcast(index, gradient)?;
    }
    Ok(())
}

/// The gradient of `Clip`: that of elements within the bounds goes to the input, that of the others
/// to the bound that they exceed.
fn gradient_of_clip(cx: &mut GradCx<'_>) -> Result<()> {
    let (input, upstream) = (cx.input(0)?, cx.upstream()?);
    let zero = cx.number(0.0, cx.dtype(input)?)?;
    let mut inside = upstream;
    // `Clip` is `min(max(x, low), high)`, so the upper bound applies to the raised input and wins
    // if the bounds are out of order.
    let raised = match cx.find_input(1) {
        Some(least) if cx.find_input(2).is_some() => cx.emit("Max", &[input, least], &[])?,
        _ => input,
    };
    for (index, value, beyond) in [(2, raised, "Greater"), (1, input, "Less")] {
        let Some(bound) = cx.find_input(index) else { continue };
        let outside = cx.emit(beyond, &[value, bound], &[])?;
        if cx.wants(index) {
            let gradient = cx.emit("Where", &[outside, inside, zero], &[])?;
            cx.set_broadcast(index, gradient)?;
        }
        inside = cx.emit("Where", &[outside, zero, inside], &[])?;
    }
    cx.set(0, inside);
    Ok(())
}

fn infer_where(cx: &mut InferCx<'_>) -> Result<()> {
    broadcast(cx)?;
    symbolic::select(cx)
}

fn infer_clip(cx: &mut InferCx<'_>) -> Result<()> {
    same_shape(cx)?;
    for (index, name) in [(1, "min"), (2, "max")] {
        let Some(shape) = cx.shape(index) else { continue };
        // The standard asks for scalars. Tensors of one element and any rank are taken too.
        let one = shape.iter().all(|size| size.as_constant().is_none_or(|size| size == 1));
        ensure!(one, InvalidGraph, "input '{name}' of Clip must be one element");
    }
    let Some(x) = cx.symbolic(0) else { return Ok(()) };
    let bound = |index: usize| cx.symbolic(index).and_then(|bound| bound.elements.first().cloned());
    let (low, high) = (bound(1), bound(2));
    // A bound that is given but not known leaves the elements unknown.
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

/// Before version 11 the bounds were float attributes.
fn bounds_to_inputs(draft: &mut Draft<'_>) -> Result<()> {
    for (index, name) in [(1, "min"), (2, "max")] {
        let bound = match draft.take_attr(name) {
            None => continue,
            Some(Attribute::Float(bound)) => bound,
            Some(_) => return Err(error!(InvalidGraph, "attribute '{name}' is not a float")),
        };
        // These were the defaults, which mean no bound.
        if (index == 1 && bound == f32::MIN) || (index == 2 && bound == f32::MAX) {
            continue;
        }
        // Until version 11 `Clip` had float16, float and double only.
        let tensor = match draft.dtype(0) {
            Ok(DType::F16) => Tensor::scalar(half::f16::from_f32(bound))?,
            Ok(DType::F64) => Tensor::scalar(f64::from(bound))?,
            _ => Tensor::scalar(bound)?,
        };
        let typed = draft.dtype(0).is_ok();
        let mut value = draft.constant(tensor);
        // The upgrade may run before the input's type is known.
        if !typed {
            let input = draft.required(0)?;
            value = draft.emit("CastLike", &[value, input], &[])?;
        }
        draft.set_input(index, value);
    }
    Ok(())
}
