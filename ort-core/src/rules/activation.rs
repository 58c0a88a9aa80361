//! Activation fusion: activations that exporters write as formulas become one operator.
//!
//! Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv 1606.08415, for Gelu, its
//! approximation by tanh and `x * sigmoid(1.702 x)`; Howard et al., "Searching for MobileNetV3",
//! arXiv 1905.02244, for HardSwish.

use crate::dtype::DType;
use crate::ir::{Attribute, ValueId};
use crate::rewrite::Then::{Build, Template};
use crate::rewrite::{Found, Patch};
use crate::{Result, rules};

rules! { "activation", Extended;
    /// `x * sigmoid(x)` (SiLU) becomes Swish: one pass instead of two.
    silu: "Mul(x, Sigmoid(x))" => Template("Swish(x)"), ["x=f32[3,40]"], known Types;
    /// `x * sigmoid(alpha * x)` becomes Swish, if a float attribute holds alpha exactly.
    swish: "Mul(x, Sigmoid(Mul(x, #alpha)))" if alpha_is_attribute => Build(swish),
        ["x=f32[3,40] alpha=f32:1.702", "x=f64[3,40] alpha=f64:1.75"], known Types;
    /// `x * (erf(x / sqrt(2)) + 1) * 0.5` becomes Gelu: one pass instead of five.
    gelu: "Mul(Mul(x, Add(Erf(Div(x, ~1.4142135623730951)), 1)), 0.5)" => Template("Gelu(x)"), ["x=f32[3,40]"], known Types;
    /// Gelu, written with `x * 0.5` first.
    gelu_half_first: "Mul(Mul(x, 0.5), Add(Erf(Div(x, ~1.4142135623730951)), 1))" => Template("Gelu(x)"), ["x=f32[3,40]"], known Types;
    /// Gelu, written with `0.5 * (erf + 1)` inside.
    gelu_half_inside: "Mul(x, Mul(0.5, Add(Erf(Div(x, ~1.4142135623730951)), 1)))" => Template("Gelu(x)"), ["x=f32[3,40]"], known Types;
    /// Gelu, written with `x * (1 / sqrt(2))` instead of the division.
    gelu_product: "Mul(Mul(x, Add(Erf(Mul(x, ~0.7071067811865476)), 1)), 0.5)" => Template("Gelu(x)"), ["x=f32[3,40]"], known Types;
    /// Gelu, written with `x * (1 / sqrt(2))` and with `x * 0.5` first.
    gelu_product_half_first: "Mul(Mul(x, 0.5), Add(Erf(Mul(x, ~0.7071067811865476)), 1))" => Template("Gelu(x)"),
        ["x=f32[3,40]"], known Types;
    /// Gelu, written with `x * (1 / sqrt(2))` and with `0.5 * (erf + 1)` inside.
    gelu_product_half_inside: "Mul(x, Mul(0.5, Add(Erf(Mul(x, ~0.7071067811865476)), 1)))" => Template("Gelu(x)"),
        ["x=f32[3,40]"], known Types;
    /// `0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))` becomes Gelu with
    /// `approximate='tanh'`.
    gelu_tanh: "Mul(Mul(x, 0.5), Add(Tanh(Mul(Add(x, Mul(Pow(x, 3), ~0.044715)), ~0.7978845608028654)), 1))"
        => Template("Gelu(x; approximate='tanh')"), ["x=f32[3,40]"], known Types;
    /// Gelu by tanh, written with `0.5 * (tanh + 1)` inside.
    gelu_tanh_half_inside: "Mul(x, Mul(0.5, Add(Tanh(Mul(Add(x, Mul(Pow(x, 3), ~0.044715)), ~0.7978845608028654)), 1)))"
        => Template("Gelu(x; approximate='tanh')"), ["x=f32[3,40]"], known Types;
    /// Gelu by tanh, written with `x * x * x` instead of Pow.
    gelu_tanh_cube: "Mul(Mul(x, 0.5), Add(Tanh(Mul(Add(x, Mul(Mul(Mul(x, x), x), ~0.044715)), ~0.7978845608028654)), 1))"
        => Template("Gelu(x; approximate='tanh')"), ["x=f32[3,40]"], known Types;
    /// Gelu by tanh, written with the factor 0.5 last.
    gelu_tanh_half_last: "Mul(Mul(x, Add(Tanh(Mul(Add(x, Mul(Pow(x, 3), ~0.044715)), ~0.7978845608028654)), 1)), 0.5)"
        => Template("Gelu(x; approximate='tanh')"), ["x=f32[3,40]"], known Types;
    /// Gelu by tanh, written with `x * x * x` and with the factor 0.5 last.
    gelu_tanh_cube_half_last:
        "Mul(Mul(x, Add(Tanh(Mul(Add(x, Mul(Mul(Mul(x, x), x), ~0.044715)), ~0.7978845608028654)), 1)), 0.5)"
        => Template("Gelu(x; approximate='tanh')"), ["x=f32[3,40]"], known Types;
    /// `clip(x + 3, 0, 6) / 6` becomes HardSigmoid with alpha 1/6, except for double, whose 1/6 no
    /// float attribute holds.
    hard_sigmoid: "Div(Clip(Add(x, 3), 0, 6), 6)" if is_not_double => Template("HardSigmoid(x; alpha=0.16666667; beta=0.5)"),
        ["x=f32[3,40]"], known Types;
    /// HardSigmoid, written with `* (1 / 6)` instead of the division.
    hard_sigmoid_product: "Mul(Clip(Add(x, 3), 0, 6), ~0.16666666666666666)" if is_not_double
        => Template("HardSigmoid(x; alpha=0.16666667; beta=0.5)"), ["x=f32[3,40]"], known Types;
    /// `x * hard_sigmoid(x)` becomes HardSwish, except for double.
    hard_swish: "Mul(x, HardSigmoid(x; alpha=0.16666667; beta=0.5))" if is_not_double => Template("HardSwish(x)"), ["x=f32[3,40]"], known Types;
    /// `x * clip(x + 3, 0, 6) / 6` becomes HardSwish.
    hard_swish_quotient: "Div(Mul(x, Clip(Add(x, 3), 0, 6)), 6)" => Template("HardSwish(x)"), ["x=f32[3,40]"], known Types;
    /// `x * clip(x + 3, 0, 6) * (1 / 6)` becomes HardSwish.
    hard_swish_product: "Mul(Mul(x, Clip(Add(x, 3), 0, 6)), ~0.16666666666666666)" => Template("HardSwish(x)"),
        ["x=f32[3,40]"], known Types;
    /// `x * tanh(softplus(x))` becomes Mish.
    mish: "Mul(x, Tanh(Softplus(x)))" => Template("Mish(x)"), ["x=f32[3,40]"], known Types;
    /// Mish, with softplus written as `log(exp(x) + 1)`. If exp overflows, tanh of infinity is
    /// still 1.
    mish_formula: "Mul(x, Tanh(Log(Add(Exp(x), 1))))" => Template("Mish(x)"), ["x=f32[3,40]"], known Types;
    /// `max(x, 0)` becomes Relu.
    relu_max: "Max(x, 0)" => Template("Relu(x)"), ["x=f32[3,40]"], known Types;
}

/// Returns the factor of a Swish, if a float attribute can hold it.
fn alpha(found: &Found<'_>) -> Option<f32> {
    // `attribute` refuses a double that a float attribute would round.
    found.attribute("x", found.scalar("alpha")?)
}

fn alpha_is_attribute(found: &Found<'_>) -> bool {
    alpha(found).is_some()
}

/// Whether 1/6 may be rounded to a single-precision attribute.
fn is_not_double(found: &Found<'_>) -> bool {
    found.dtype("x") != Some(DType::F64)
}

fn swish(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let Some(alpha) = alpha(&patch.found()) else { return Ok(None) };
    let x = patch.value("x")?;
    Ok(Some(vec![patch.node("Swish", &[x], &[("alpha", Attribute::Float(alpha))])?]))
}
