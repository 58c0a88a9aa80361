//! Idiom recognition: subformulas that one vector loop computes.
//!
//! For example, `x * sigmoid(x)` is `Silu`.

use std::sync::OnceLock;

use ort_alloc::fork::get_or_init;
use ort_core::spec::ScalarExpr::{self, Input};
use ort_core::spec::{BinaryFn, UnaryFn};

use ort_cpu_vector::elementwise::Unary;

/// A pattern over one value, `Input(0)`, and constants, the inputs after it; and the loop for these
/// constants.
type Idiom = (ScalarExpr, fn([f32; 2]) -> Unary);

/// `negative` if the value is below 0, else the value.
fn below_zero(negative: ScalarExpr) -> ScalarExpr {
    ScalarExpr::select(Input(0).less(0.0), negative, Input(0))
}

/// The loops of whole formulas only. As parts of other formulas, these are computed step by step:
/// some steps have loops of their own, and others are shared by several parts.
fn whole_formulas() -> &'static [Idiom] {
    static WHOLE: OnceLock<Vec<Idiom>> = OnceLock::new();
    get_or_init(&WHOLE, || {
        let (x, a, b) = (|| Input(0), || Input(1), || Input(2));
        let elu = |x: ScalarExpr| x.apply(UnaryFn::Expm1) * a();
        vec![
            (x().apply(UnaryFn::Sigmoid), |_| Unary::Sigmoid),
            (x().apply(UnaryFn::Tanh), |_| Unary::Tanh),
            (x() * (x() * a()).apply(UnaryFn::Sigmoid), |[alpha, _]| match alpha {
                1.0 => Unary::Silu,
                _ => Unary::Swish { alpha },
            }),
            (below_zero(elu(x())) * b(), |[alpha, gamma]| Unary::Selu { alpha, gamma }),
            (below_zero(elu(x() / a())), |[alpha, _]| Unary::Celu { alpha }),
            (ScalarExpr::select(a().less(x()), x(), 0.0.into()), |[alpha, _]| Unary::ThresholdedRelu {
                alpha,
            }),
        ]
    })
    .as_slice()
}

/// Longer patterns come first, because they may contain shorter ones. They are written like the
/// formulas in the operators' records.
fn idioms() -> &'static [Idiom] {
    static IDIOMS: OnceLock<Vec<Idiom>> = OnceLock::new();
    get_or_init(&IDIOMS, || {
        let (x, a, b) = (|| Input(0), || Input(1), || Input(2));
        let one = || ScalarExpr::Constant(1.0);
        let unit = |x: ScalarExpr| x.max(0.0).min(1.0);
        let softplus = || x().max(0.0) + (-x().apply(UnaryFn::Abs)).apply(UnaryFn::Exp).apply(UnaryFn::Log1p);
        vec![
            (x().gelu_tanh(), |_| Unary::GeluTanh),
            (x().gelu(), |_| Unary::Gelu),
            (x() * softplus().apply(UnaryFn::Tanh), |_| Unary::Mish),
            (softplus(), |_| Unary::Softplus),
            (x() * unit(x() * (1.0 / 6.0) + 0.5), |_| Unary::HardSwish),
            (unit(x() * a() + b()), |[alpha, beta]| Unary::HardSigmoid { alpha, beta }),
            (x() * x().apply(UnaryFn::Sigmoid), |_| Unary::Silu),
            (x() * (x() * a()).apply(UnaryFn::Sigmoid), |[alpha, _]| Unary::Swish { alpha }),
            (below_zero(x().apply(UnaryFn::Expm1) * a()), |[alpha, _]| Unary::Elu { alpha }),
            (below_zero(x() * a()), |[alpha, _]| Unary::LeakyRelu { alpha }),
            (x() / (one() + x().apply(UnaryFn::Abs)), |_| Unary::Softsign),
            (x().max(a()).min(b()), |[min, max]| Unary::Clip { min, max }),
            (x().max(0.0), |_| Unary::Relu),
            (x() * a() + b(), |[scale, shift]| Unary::Affine { scale, shift }),
        ]
    })
    .as_slice()
}

/// Returns the loop that computes a whole formula of the first input, if there is one.
pub fn one_loop(formula: &ScalarExpr) -> Option<Unary> {
    let (function, argument) = find(whole_formulas(), formula).or_else(|| idiom(formula))?;
    (*argument == Input(0)).then_some(function)
}

/// Returns the loop that a formula matches, and the subformula of its argument.
pub fn idiom(formula: &ScalarExpr) -> Option<(Unary, &ScalarExpr)> {
    find(idioms(), formula)
}

fn find<'f>(idioms: &[Idiom], formula: &'f ScalarExpr) -> Option<(Unary, &'f ScalarExpr)> {
    idioms.iter().find_map(|(pattern, function)| {
        let mut bound = [None; 3];
        if !matches(pattern, formula, &mut bound) {
            return None;
        }
        let constant = |found: Option<&ScalarExpr>| match found {
            Some(ScalarExpr::Constant(value)) => *value as f32,
            _ => 0.0,
        };
        let [value, first, second] = bound;
        Some((function([constant(first), constant(second)]), value?))
    })
}

/// Returns whether a formula matches a pattern. `bound` holds what the pattern's inputs stand for.
fn matches<'f>(
    pattern: &ScalarExpr,
    formula: &'f ScalarExpr,
    bound: &mut [Option<&'f ScalarExpr>; 3],
) -> bool {
    use ScalarExpr::{Binary, Constant, Select, Unary};
    match (pattern, formula) {
        (Input(index), _) => {
            let Some(place) = bound.get_mut(*index) else { return false };
            let fits = *index == 0 || matches!(formula, Constant(_));
            let known = *place.get_or_insert(formula);
            fits && (std::ptr::eq(known, formula) || is_same(known, formula))
        }
        // The sign of a zero may be that of a result.
        (Constant(a), Constant(b)) if *a == 0.0 => a.to_bits() == b.to_bits(),
        // Models round their constants to single precision.
        (Constant(a), Constant(b)) => (a - b).abs() <= 1e-6 * a.abs(),
        (Unary(f, x), Unary(g, y)) => f == g && matches(x, y, bound),
        (Binary(f, a, b), Binary(g, c, d)) if f == g => {
            // Commutative functions match in either order. A failed try must not leave bindings.
            let before = *bound;
            if matches(a, c, bound) && matches(b, d, bound) {
                return true;
            }
            *bound = before;
            commutes(*f) && matches(a, d, bound) && matches(b, c, bound)
        }
        (Select(a, b, c), Select(d, e, f)) => {
            matches(a, d, bound) && matches(b, e, bound) && matches(c, f, bound)
        }
        _ => false,
    }
}

/// Whether two formulas compute the same bits: the constants 0.0 and -0.0 differ.
fn is_same(one: &ScalarExpr, other: &ScalarExpr) -> bool {
    use ScalarExpr::{Binary, Constant, Select, Unary};
    match (one, other) {
        (Constant(a), Constant(b)) => a.to_bits() == b.to_bits(),
        (Unary(f, x), Unary(g, y)) => f == g && is_same(x, y),
        (Binary(f, a, b), Binary(g, c, d)) => f == g && is_same(a, c) && is_same(b, d),
        (Select(a, b, c), Select(d, e, f)) => is_same(a, d) && is_same(b, e) && is_same(c, f),
        // Inputs, or formulas of two kinds.
        _ => one == other,
    }
}

fn commutes(function: BinaryFn) -> bool {
    matches!(function, BinaryFn::Add | BinaryFn::Mul | BinaryFn::Min | BinaryFn::Max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ort_core::Result;
    use ort_core::ops::fused::activation::Activation;

    /// The activations of fused operators have loops, and keep their parameters.
    #[test]
    fn activations_are_one_loop() -> Result<()> {
        let (alpha, beta, gamma) = (0.3, 0.7, 1.7);
        let cases: [(&str, &[f32], Unary); 19] = [
            ("Celu", &[alpha], Unary::Celu { alpha }),
            ("Celu", &[1.0], Unary::Celu { alpha: 1.0 }),
            ("Clip", &[0.0, 1.0], Unary::Clip { min: 0.0, max: 1.0 }),
            ("Elu", &[alpha], Unary::Elu { alpha }),
            ("FastGelu", &[], Unary::GeluTanh),
            ("Gelu", &[], Unary::Gelu),
            ("HardSigmoid", &[alpha, beta], Unary::HardSigmoid { alpha, beta }),
            ("HardSwish", &[], Unary::HardSwish),
            ("LeakyRelu", &[alpha], Unary::LeakyRelu { alpha }),
            ("Mish", &[], Unary::Mish),
            ("Relu", &[], Unary::Relu),
            ("Selu", &[alpha, gamma], Unary::Selu { alpha, gamma }),
            ("Sigmoid", &[], Unary::Sigmoid),
            ("Softplus", &[], Unary::Softplus),
            ("Softsign", &[], Unary::Softsign),
            ("Swish", &[alpha], Unary::Swish { alpha }),
            ("Swish", &[1.0], Unary::Silu),
            ("Tanh", &[], Unary::Tanh),
            ("ThresholdedRelu", &[alpha], Unary::ThresholdedRelu { alpha }),
        ];
        for (name, parameters, expected) in cases {
            let formula = Activation::new(name, parameters)?.formula()?;
            assert_eq!(one_loop(&formula), Some(expected), "{name}");
        }
        Ok(())
    }

    #[test]
    fn forms_of_one_loop() -> Result<()> {
        let cases = [
            ("mul(x0, sigmoid(x0))", Some((Unary::Silu, "x0"))),
            ("mul(sigmoid(add(x0, x1)), add(x0, x1))", Some((Unary::Silu, "add(x0, x1)"))),
            ("mul(sigmoid(x0), x1)", None),
            ("mul(add(x0, 0.0), sigmoid(add(x0, -0.0)))", None),
            ("mul(x0, sigmoid(mul(x0, 1.5)))", Some((Unary::Swish { alpha: 1.5 }, "x0"))),
            ("min(6.0, max(exp(x1), 0.0))", Some((Unary::Clip { min: 0.0, max: 6.0 }, "exp(x1)"))),
            ("mul(mul(x0, 0.5), add(erf(mul(x0, 0.7071067690849304)), 1.0))", Some((Unary::Gelu, "x0"))),
            ("mul(mul(x0, 0.5), add(erf(mul(x0, 0.7)), 1.0))", None),
            ("add(mul(x0, 2.0), 3.0)", Some((Unary::Affine { scale: 2.0, shift: 3.0 }, "x0"))),
            ("add(mul(x0, x1), 3.0)", None),
            ("max(x0, -0.0)", None),
            ("select(less(x2, 0.0), mul(0.1, x2), x2)", Some((Unary::LeakyRelu { alpha: 0.1 }, "x2"))),
        ];
        for (text, expected) in cases {
            let formula: ScalarExpr = text.parse()?;
            let found = idiom(&formula).map(|(function, inner)| (function, inner.to_string()));
            assert_eq!(found, expected.map(|(function, inner)| (function, inner.to_string())), "{text}");
        }
        Ok(())
    }
}
