//! Activations that exporters write as formulas.
//!
//! Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv 1606.08415, for Gelu, its approximation by tanh and
//! `x * sigmoid(1.702 x)`; Howard et al., "Searching for MobileNetV3", arXiv 1905.02244, for HardSwish.

use crate::ir::{Attribute, ValueId};
use crate::rewrite::Then::{Build, Template};
use crate::rewrite::{Found, Patch};
use crate::{Result, rules};

rules! { "activation", Extended;
    /// `x * sigmoid(x)` is SiLU.
    silu: "Mul(x, Sigmoid(x))" => Template("Swish(x)"), ["x=f32[3,40]"];
    /// `x * sigmoid(alpha * x)` is Swish.
    swish: "Mul(x, Sigmoid(Mul(x, #alpha)))" if alpha_is_scalar => Build(swish), ["x=f32[3,40] alpha=f32:1.702"];
    /// `(x / sqrt(2)).erf() + 1`, times `x`, times one half.
    gelu: "Mul(Mul(x, Add(Erf(Div(x, ~1.41421356)), 1)), 0.5)" => Template("Gelu(x)"), ["x=f32[3,40]"];
    /// The same with one half first.
    gelu_half_first: "Mul(Mul(x, 0.5), Add(Erf(Div(x, ~1.41421356)), 1))" => Template("Gelu(x)"), ["x=f32[3,40]"];
    /// The same with one half inside.
    gelu_half_inside: "Mul(x, Mul(0.5, Add(Erf(Div(x, ~1.41421356)), 1)))" => Template("Gelu(x)"), ["x=f32[3,40]"];
    /// The same with a product instead of the quotient.
    gelu_product: "Mul(Mul(x, Add(Erf(Mul(x, ~0.70710678)), 1)), 0.5)" => Template("Gelu(x)"), ["x=f32[3,40]"];
    /// The same with a product, one half first.
    gelu_product_half_first: "Mul(Mul(x, 0.5), Add(Erf(Mul(x, ~0.70710678)), 1))" => Template("Gelu(x)"),
        ["x=f32[3,40]"];
    /// The same with a product, one half inside.
    gelu_product_half_inside: "Mul(x, Mul(0.5, Add(Erf(Mul(x, ~0.70710678)), 1)))" => Template("Gelu(x)"),
        ["x=f32[3,40]"];
    /// The approximation `0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`.
    gelu_tanh: "Mul(Mul(x, 0.5), Add(Tanh(Mul(Add(x, Mul(Pow(x, 3), ~0.044715)), ~0.79788456)), 1))"
        => Template("Gelu(x; approximate='tanh')"), ["x=f32[3,40]"];
    /// The same with one half inside.
    gelu_tanh_half_inside: "Mul(x, Mul(0.5, Add(Tanh(Mul(Add(x, Mul(Pow(x, 3), ~0.044715)), ~0.79788456)), 1)))"
        => Template("Gelu(x; approximate='tanh')"), ["x=f32[3,40]"];
    /// The same with the cube as products.
    gelu_tanh_cube: "Mul(Mul(x, 0.5), Add(Tanh(Mul(Add(x, Mul(Mul(Mul(x, x), x), ~0.044715)), ~0.79788456)), 1))"
        => Template("Gelu(x; approximate='tanh')"), ["x=f32[3,40]"];
    /// The same with the half last.
    gelu_tanh_half_last: "Mul(Mul(x, Add(Tanh(Mul(Add(x, Mul(Pow(x, 3), ~0.044715)), ~0.79788456)), 1)), 0.5)"
        => Template("Gelu(x; approximate='tanh')"), ["x=f32[3,40]"];
    /// The same with the cube as products and the half last.
    gelu_tanh_cube_half_last:
        "Mul(Mul(x, Add(Tanh(Mul(Add(x, Mul(Mul(Mul(x, x), x), ~0.044715)), ~0.79788456)), 1)), 0.5)"
        => Template("Gelu(x; approximate='tanh')"), ["x=f32[3,40]"];
    /// `clip(x + 3, 0, 6) / 6` is HardSigmoid with a slope of one sixth.
    hard_sigmoid: "Div(Clip(Add(x, ~3), 0, ~6), ~6)" => Template("HardSigmoid(x; alpha=0.16666667; beta=0.5)"),
        ["x=f32[3,40]"];
    /// The same with a product instead of the quotient.
    hard_sigmoid_product: "Mul(Clip(Add(x, ~3), 0, ~6), ~0.16666667)"
        => Template("HardSigmoid(x; alpha=0.16666667; beta=0.5)"), ["x=f32[3,40]"];
    /// `x * hard_sigmoid(x)` is HardSwish.
    hard_swish: "Mul(x, HardSigmoid(x; alpha=0.16666667; beta=0.5))" => Template("HardSwish(x)"), ["x=f32[3,40]"];
    /// `x * clip(x + 3, 0, 6) / 6`.
    hard_swish_quotient: "Div(Mul(x, Clip(Add(x, ~3), 0, ~6)), ~6)" => Template("HardSwish(x)"), ["x=f32[3,40]"];
    /// `x * clip(x + 3, 0, 6) * (1 / 6)`.
    hard_swish_product: "Mul(Mul(x, Clip(Add(x, ~3), 0, ~6)), ~0.16666667)" => Template("HardSwish(x)"),
        ["x=f32[3,40]"];
    /// `log(exp(x) + 1)`, which Softplus computes without overflow.
    softplus: "Log(Add(Exp(x), 1))" => Template("Softplus(x)"), ["x=f32[3,40]"];
    /// `x * tanh(softplus(x))` is Mish.
    mish: "Mul(x, Tanh(Softplus(x)))" => Template("Mish(x)"), ["x=f32[3,40]"];
    /// `max(x, 0)` is Relu.
    relu_max: "Max(x, 0)" => Template("Relu(x)"), ["x=f32[3,40]"];
}

fn alpha_is_scalar(found: &Found<'_>) -> bool {
    found.scalar("alpha").is_some()
}

fn swish(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let Some(alpha) = patch.found().scalar("alpha") else { return Ok(None) };
    let x = patch.value("x")?;
    Ok(Some(vec![patch.node("Swish", &[x], &[("alpha", Attribute::Float(alpha as f32))])?]))
}
