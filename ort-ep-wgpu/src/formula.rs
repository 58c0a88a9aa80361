//! Scalar formulas rendered as WGSL expressions.

use ort_core::spec::{BinaryFn, ScalarExpr, UnaryFn};
use ort_core::{Result, error};

/// The number type that a formula computes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Number {
    /// `f32`.
    Float,
    /// `i32`.
    Signed,
    /// `u32`.
    Unsigned,
}

impl Number {
    /// Returns the number type of a WGSL type.
    pub(crate) fn of(value: &str) -> Number {
        match value {
            "f32" => Number::Float,
            "i32" => Number::Signed,
            _ => Number::Unsigned,
        }
    }

    /// Returns the WGSL type.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Number::Float => "f32",
            Number::Signed => "i32",
            Number::Unsigned => "u32",
        }
    }
}

/// Renders a formula as an expression. `input` returns the expression of an input's element.
pub(crate) fn render(
    formula: &ScalarExpr,
    number: Number,
    input: &dyn Fn(usize) -> String,
) -> Result<String> {
    let inner = |formula: &ScalarExpr| render(formula, number, input);
    Ok(match formula {
        ScalarExpr::Input(index) => input(*index),
        ScalarExpr::Constant(value) => constant(*value, number),
        ScalarExpr::Unary(function, x) => unary(*function, number, &inner(x)?)?,
        ScalarExpr::Binary(function, a, b) => binary(*function, number, &inner(a)?, &inner(b)?),
        ScalarExpr::Select(condition, then, otherwise) => {
            let (condition, then, otherwise) = (inner(condition)?, inner(then)?, inner(otherwise)?);
            // WGSL's `select` takes the value for false first.
            format!("select({otherwise}, {then}, {condition} != {}(0))", number.name())
        }
    })
}

/// Renders a constant.
fn constant(value: f64, number: Number) -> String {
    match number {
        Number::Float if value.is_nan() => "nan()".to_owned(),
        // Compared as `f32`: finite doubles may overflow it.
        Number::Float if (value as f32).is_infinite() => {
            if value > 0.0 {
                "infinity()".to_owned()
            } else {
                "(-infinity())".to_owned()
            }
        }
        Number::Float => format!("f32({:?})", value as f32),
        Number::Signed => format!("i32({})", value as i32),
        Number::Unsigned => format!("{}u", value as u32),
    }
}

fn unary(function: UnaryFn, number: Number, x: &str) -> Result<String> {
    let truth = |condition: String| format!("{0}({condition})", number.name());
    let called = |name: &str| Ok(format!("{name}({x})"));
    let float = number == Number::Float;
    match function {
        // WGSL has no negation of `u32`.
        UnaryFn::Neg if number == Number::Unsigned => Ok(format!("(0u - {x})")),
        UnaryFn::Neg => Ok(format!("(-({x}))")),
        UnaryFn::Abs => called("abs"),
        UnaryFn::Not => Ok(truth(format!("{x} == {}(0)", number.name()))),
        UnaryFn::Sign if number == Number::Unsigned => Ok(format!("min({x}, 1u)")),
        UnaryFn::Sign => called("sign"),
        // Integers are integral already.
        UnaryFn::Floor | UnaryFn::Ceil | UnaryFn::RoundHalfEven if !float => Ok(x.to_owned()),
        UnaryFn::IsNan | UnaryFn::IsInf if !float => Ok(truth("false".to_owned())),
        _ if !float => Err(error!(NotImplemented, "{function:?} of integers")),
        UnaryFn::Floor => called("floor"),
        UnaryFn::Ceil => called("ceil"),
        // WGSL's `round` takes ties to even.
        UnaryFn::RoundHalfEven => called("round"),
        UnaryFn::Reciprocal => Ok(format!("(1.0 / ({x}))")),
        UnaryFn::Sqrt => called("sqrt"),
        UnaryFn::Exp => called("exp_"),
        UnaryFn::Expm1 => called("expm1_"),
        UnaryFn::Log => called("log_"),
        UnaryFn::Log1p => called("log1p_"),
        UnaryFn::Sigmoid => called("sigmoid_"),
        UnaryFn::Erf => called("erf_"),
        UnaryFn::Sin => called("sin"),
        UnaryFn::Cos => called("cos"),
        UnaryFn::Tan => called("tan"),
        UnaryFn::Asin => called("asin_"),
        UnaryFn::Acos => called("acos_"),
        UnaryFn::Atan => called("atan"),
        UnaryFn::Sinh => called("sinh_"),
        UnaryFn::Cosh => called("cosh_"),
        UnaryFn::Tanh => called("tanh_"),
        UnaryFn::Asinh => called("asinh_"),
        UnaryFn::Acosh => called("acosh_"),
        UnaryFn::Atanh => called("atanh_"),
        UnaryFn::IsNan => Ok(truth(format!("is_nan({x})"))),
        UnaryFn::IsInf => Ok(truth(format!("is_inf({x})"))),
    }
}

fn binary(function: BinaryFn, number: Number, a: &str, b: &str) -> String {
    let ty = number.name();
    let operator = |sign: &str| format!("({a} {sign} {b})");
    let truth = |condition: String| format!("{ty}({condition})");
    let float = number == Number::Float;
    match function {
        BinaryFn::Add => operator("+"),
        BinaryFn::Sub => operator("-"),
        BinaryFn::Mul => operator("*"),
        BinaryFn::Div => operator("/"),
        // NaN propagates, which WGSL's own `min` and `max` do not guarantee.
        BinaryFn::Min if float => format!("min_({a}, {b})"),
        BinaryFn::Max if float => format!("max_({a}, {b})"),
        BinaryFn::Min => format!("min({a}, {b})"),
        BinaryFn::Max => format!("max({a}, {b})"),
        BinaryFn::Pow if float => format!("pow_({a}, {b})"),
        BinaryFn::Pow if number == Number::Signed => format!("powi({a}, {b})"),
        // A power from 2^31 on is not negative.
        BinaryFn::Pow => format!("powu({a}, {b})"),
        BinaryFn::Mod if float => format!("mod_({a}, {b})"),
        BinaryFn::Fmod if float => format!("fmod_({a}, {b})"),
        BinaryFn::Mod if number == Number::Signed => format!("mod_int({a}, {b})"),
        BinaryFn::Fmod if number == Number::Signed => format!("fmod_int({a}, {b})"),
        // Operands without a sign need no correction.
        BinaryFn::Mod | BinaryFn::Fmod => operator("%"),
        BinaryFn::Less => truth(format!("{a} < {b}")),
        BinaryFn::LessOrEqual => truth(format!("{a} <= {b}")),
        BinaryFn::Equal => truth(format!("{a} == {b}")),
        BinaryFn::And => truth(format!("{a} != {ty}(0) && {b} != {ty}(0)")),
        BinaryFn::Or => truth(format!("{a} != {ty}(0) || {b} != {ty}(0)")),
        BinaryFn::Xor => truth(format!("({a} != {ty}(0)) != ({b} != {ty}(0))")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formulas_read_as_written() {
        let silu: ScalarExpr = "mul(x0, sigmoid(x0))".parse().unwrap();
        let text = render(&silu, Number::Float, &|index| format!("v{index}")).unwrap();
        assert_eq!(text, "(v0 * sigmoid_(v0))");
        let clipped: ScalarExpr = "min(x0, inf)".parse().unwrap();
        let text = render(&clipped, Number::Float, &|index| format!("v{index}")).unwrap();
        assert_eq!(text, "min_(v0, infinity())");
        let sum: ScalarExpr = "select(less(x0, x1), 3, neg(x0))".parse().unwrap();
        let text = render(&sum, Number::Signed, &|index| format!("v{index}")).unwrap();
        assert_eq!(text, "select((-(v0)), i32(3), i32(v0 < v1) != i32(0))");
        assert!(render(&silu, Number::Signed, &|_| String::new()).is_err());
        let power: ScalarExpr = "pow(x0, x1)".parse().unwrap();
        for (number, expected) in [
            (Number::Float, "pow_(v0, v1)"),
            (Number::Signed, "powi(v0, v1)"),
            (Number::Unsigned, "powu(v0, v1)"),
        ] {
            assert_eq!(render(&power, number, &|index| format!("v{index}")).unwrap(), expected);
        }
    }
}
