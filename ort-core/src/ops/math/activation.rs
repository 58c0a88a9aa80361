//! Activation functions, as scalar formulas.

use crate::Result;
use crate::dtype::TypeSet;
use crate::ir::{Attribute, Attributes};
use crate::ops;
use crate::spec::{Draft, Grad, GradCx, InferCx, OpSpec, ScalarExpr, UnaryFn, Upgrade, attr, one, var};
use crate::{ensure, error};

use super::shared::{
    A_B, DROP_HINT, INPUT, OUTPUT, SIGNED, Y, activation, broadcast_to_first, number, same_shape, unary, x, y,
};
use super::{legacy, symbolic};

static RELU: OpSpec = OpSpec {
    types: SIGNED,
    infer: infer_relu,
    grad: Grad::Rule(gradient_of_relu),
    ..activation("Relu", 14, |_| Ok(x().max(0.0)))
};

static LEAKY_RELU: OpSpec = OpSpec {
    attrs: &[attr::float("alpha", 0.01)],
    ..activation("LeakyRelu", 16, |attrs| Ok(below_zero(x() * attrs.float("alpha")?)))
};

static ELU: OpSpec = OpSpec {
    attrs: &[attr::float("alpha", 1.0)],
    // Near 0, `expm1` keeps the digits that `exp(x) - 1` loses to cancellation.
    ..activation("Elu", 22, |attrs| Ok(below_zero(x().apply(UnaryFn::Expm1) * attrs.float("alpha")?)))
};

static SELU: OpSpec = OpSpec {
    // The standard lists 1.67326319217681884765625 and 1.05070102214813232421875, which are these
    // floats.
    attrs: &[attr::float("alpha", 1.673_263_2), attr::float("gamma", 1.050_701)],
    upgrades: &[DROP_HINT, Upgrade { before: 6, apply: first_constants_of_selu }],
    ..activation("Selu", 22, |attrs| {
        let negative = x().apply(UnaryFn::Expm1) * attrs.float("alpha")?;
        Ok(below_zero(negative) * attrs.float("gamma")?)
    })
};

static CELU: OpSpec = OpSpec {
    attrs: &[attr::float("alpha", 1.0)],
    upgrades: &[],
    first: 12,
    ..activation("Celu", 28, |attrs| {
        // The standard adds `max(0, x)` and `min(0, alpha * (exp(x / alpha) - 1))`. One of the two
        // terms is always 0.
        let alpha = attrs.float("alpha")?;
        Ok(below_zero((x() / alpha).apply(UnaryFn::Expm1) * alpha))
    })
};

static THRESHOLDED_RELU: OpSpec = OpSpec {
    attrs: &[attr::float("alpha", 1.0)],
    upgrades: &[],
    first: 10,
    ..activation("ThresholdedRelu", 22, |attrs| {
        let above = number(f64::from(attrs.float("alpha")?)).less(x());
        Ok(ScalarExpr::select(above, x(), number(0.0)))
    })
};

static HARD_SIGMOID: OpSpec = OpSpec {
    attrs: &[attr::float("alpha", 0.2), attr::float("beta", 0.5)],
    ..activation("HardSigmoid", 22, |attrs| {
        Ok((x() * attrs.float("alpha")? + attrs.float("beta")?).max(0.0).min(1.0))
    })
};

static HARD_SWISH: OpSpec = OpSpec {
    upgrades: &[],
    first: 14,
    // `x * HardSigmoid(x)` with `alpha = 1 / 6` and `beta = 0.5`.
    ..activation("HardSwish", 22, |_| Ok(x() * (x() * (1.0 / 6.0) + 0.5).max(0.0).min(1.0)))
};

static SIGMOID: OpSpec = activation("Sigmoid", 13, |_| Ok(x().apply(UnaryFn::Sigmoid)));

static SOFTPLUS: OpSpec = OpSpec { upgrades: &[], ..activation("Softplus", 22, |_| Ok(softplus())) };

static SOFTSIGN: OpSpec = OpSpec {
    inputs: INPUT,
    outputs: OUTPUT,
    upgrades: &[],
    ..activation("Softsign", 22, |_| Ok(x() / (number(1.0) + x().apply(UnaryFn::Abs))))
};

static MISH: OpSpec = OpSpec {
    upgrades: &[],
    first: 18,
    ..activation("Mish", 22, |_| Ok(x() * softplus().apply(UnaryFn::Tanh)))
};

static GELU: OpSpec = OpSpec {
    attrs: &[attr::string("approximate", "none")],
    infer: infer_gelu,
    upgrades: &[],
    first: 20,
    ..activation("Gelu", 20, gelu)
};

static SWISH: OpSpec = OpSpec {
    attrs: &[attr::float("alpha", 1.0)],
    upgrades: &[],
    first: 24,
    ..activation("Swish", 24, |attrs| Ok(swish(attrs.float("alpha")?)))
};

static SWIGLU: OpSpec = OpSpec {
    inputs: A_B,
    outputs: Y,
    attrs: &[attr::float("alpha", 1.0)],
    infer: infer_swiglu,
    upgrades: &[],
    first: 28,
    ..unary("SwiGLU", 28, |attrs| Ok(swish(attrs.float("alpha")?) * y()))
};

static PRELU: OpSpec = OpSpec {
    inputs: &[one("X", "T"), one("slope", "T")],
    types: &[var("T", TypeSet::HIGH_PRECISION)],
    infer: broadcast_to_first,
    upgrades: &[DROP_HINT, Upgrade { before: 7, apply: legacy::slope_by_channel }],
    ..unary("PRelu", 16, |_| Ok(below_zero(x() * y())))
};

static SHRINK: OpSpec = OpSpec {
    inputs: INPUT,
    outputs: OUTPUT,
    types: &[var("T", TypeSet::INTEGERS.union(TypeSet::IEEE_FLOATS))],
    attrs: &[attr::float("bias", 0.0), attr::float("lambd", 0.5)],
    upgrades: &[],
    first: 9,
    ..unary("Shrink", 9, |attrs| {
        let (bias, lambda) = (attrs.float("bias")?, attrs.float("lambd")?);
        // Outside `[-lambd, lambd]` the input moves towards 0 by `bias`; inside, the output is 0.
        let high = ScalarExpr::select(number(f64::from(lambda)).less(x()), x() - bias, number(0.0));
        Ok(ScalarExpr::select(x().less(-lambda), x() + bias, high))
    })
};

ops![
    RELU,
    LEAKY_RELU,
    ELU,
    SELU,
    CELU,
    THRESHOLDED_RELU,
    HARD_SIGMOID,
    HARD_SWISH,
    SIGMOID,
    SOFTPLUS,
    SOFTSIGN,
    MISH,
    GELU,
    SWISH,
    SWIGLU,
    PRELU,
    SHRINK,
];

/// Returns `negative` if the input is below 0, else the input.
fn below_zero(negative: ScalarExpr) -> ScalarExpr {
    ScalarExpr::select(x().less(0.0), negative, x())
}

/// Before version 6 the defaults of `Selu` had fewer digits.
fn first_constants_of_selu(draft: &mut Draft<'_>) -> Result<()> {
    for (name, value) in [("alpha", 1.6732), ("gamma", 1.0507)] {
        if draft.attr(name).is_none() {
            draft.set_attr(name, Attribute::Float(value));
        }
    }
    Ok(())
}

/// `log(1 + e^x)`, as `max(x, 0) + log1p(e^-|x|)` so that the exponential never overflows.
fn softplus() -> ScalarExpr {
    x().max(0.0) + (-x().apply(UnaryFn::Abs)).apply(UnaryFn::Exp).apply(UnaryFn::Log1p)
}

/// `x * sigmoid(alpha * x)`.
fn swish(alpha: f32) -> ScalarExpr {
    x() * (x() * alpha).apply(UnaryFn::Sigmoid)
}

/// The gradient of `Relu`, from its output rather than its input: the next convolution or matmul
/// keeps the output for its own gradient anyway.
fn gradient_of_relu(cx: &mut GradCx<'_>) -> Result<()> {
    let (upstream, output) = (ScalarExpr::Input(0), ScalarExpr::Input(1));
    // The subgradient at 0 is 0.
    let formula = ScalarExpr::select(number(0.0).less(output), upstream, number(0.0));
    let operands = [cx.upstream()?, cx.output(0)?];
    let gradient = cx.formula(&formula, &operands)?;
    cx.set(0, gradient);
    Ok(())
}

fn gelu(attrs: &Attributes) -> Result<ScalarExpr> {
    match attrs.string("approximate")? {
        "none" => Ok(x().gelu()),
        "tanh" => Ok(x().gelu_tanh()),
        other => Err(error!(InvalidGraph, "Gelu has no approximation '{other}', expected 'none' or 'tanh'")),
    }
}

fn infer_gelu(cx: &mut InferCx<'_>) -> Result<()> {
    // Refuses an unknown `approximate` when the model is loaded.
    gelu(cx.attrs)?;
    same_shape(cx)
}

fn infer_relu(cx: &mut InferCx<'_>) -> Result<()> {
    same_shape(cx)?;
    symbolic::unary(cx, |x| Some(x.max(&0.into())))
}

fn infer_swiglu(cx: &mut InferCx<'_>) -> Result<()> {
    if let (Some(a), Some(b)) = (cx.shape(0), cx.shape(1)) {
        // `SwiGLU` does not broadcast.
        let (rank, other) = (a.len(), b.len());
        ensure!(rank == other, InvalidGraph, "B has rank {other}, A has rank {rank}");
        let mut sizes = a.iter().zip(b);
        sizes.try_for_each(|(a, b)| cx.require_equal("a size of B", b, a))?;
    }
    same_shape(cx)
}
