//! Symbolic differentiation of scalar formulas.

use super::{BinaryFn, ScalarExpr, UnaryFn};

/// `2 / sqrt(pi)`, the slope of the error function at 0.
const ERF_SLOPE: f64 = std::f64::consts::FRAC_2_SQRT_PI;

impl ScalarExpr {
    /// Returns the partial derivative with respect to the input at `index`.
    ///
    /// Piecewise constant functions have derivative 0. At a kink the derivative is that of one
    /// side: for `max(x, 0)` it is 0 at 0. The rules are those of Abramowitz & Stegun, Handbook of
    /// Mathematical Functions, 3.3, 4 and 7.1.
    ///
    /// ```
    /// use ort_core::spec::ScalarExpr;
    /// let x = || ScalarExpr::Input(0);
    /// assert_eq!((x() * 3.0 + 1.0).derivative(0), ScalarExpr::Constant(3.0));
    /// assert_eq!((x() * 3.0 + 1.0).derivative(1), ScalarExpr::Constant(0.0));
    /// ```
    pub fn derivative(&self, index: usize) -> ScalarExpr {
        match self {
            ScalarExpr::Input(input) => constant(if *input == index { 1.0 } else { 0.0 }),
            ScalarExpr::Constant(_) => constant(0.0),
            ScalarExpr::Unary(function, x) => {
                let inner = x.derivative(index);
                if inner == constant(0.0) { inner } else { product(unary(*function, x), inner) }
            }
            ScalarExpr::Binary(function, a, b) => {
                let inner = (a.derivative(index), b.derivative(index));
                if inner == (constant(0.0), constant(0.0)) {
                    inner.0
                } else {
                    binary(*function, (a, b), inner)
                }
            }
            ScalarExpr::Select(condition, then, otherwise) => {
                // The condition is piecewise constant, so only the branches have derivatives.
                choice((**condition).clone(), then.derivative(index), otherwise.derivative(index))
            }
        }
    }
}

fn constant(value: f64) -> ScalarExpr {
    ScalarExpr::Constant(value)
}

fn is(x: &ScalarExpr, value: f64) -> bool {
    *x == constant(value)
}

// Constructors that fold constants and drop neutral elements, so that derivatives stay small.

fn sum(a: ScalarExpr, b: ScalarExpr) -> ScalarExpr {
    match (&a, &b) {
        (ScalarExpr::Constant(a), ScalarExpr::Constant(b)) => constant(a + b),
        _ if is(&a, 0.0) => b,
        _ if is(&b, 0.0) => a,
        _ => a + b,
    }
}

fn difference(a: ScalarExpr, b: ScalarExpr) -> ScalarExpr {
    match (&a, &b) {
        (ScalarExpr::Constant(a), ScalarExpr::Constant(b)) => constant(a - b),
        _ if is(&a, 0.0) => negative(b),
        _ if is(&b, 0.0) => a,
        _ => a - b,
    }
}

fn negative(x: ScalarExpr) -> ScalarExpr {
    match x {
        ScalarExpr::Constant(value) => constant(-value),
        ScalarExpr::Unary(UnaryFn::Neg, x) => *x,
        x => -x,
    }
}

fn product(a: ScalarExpr, b: ScalarExpr) -> ScalarExpr {
    match (&a, &b) {
        (ScalarExpr::Constant(a), ScalarExpr::Constant(b)) => constant(a * b),
        // Exact: the derivative of a constant is 0 even if the other factor is infinite.
        _ if is(&a, 0.0) || is(&b, 0.0) => constant(0.0),
        _ if is(&a, 1.0) => b,
        _ if is(&b, 1.0) => a,
        _ if is(&a, -1.0) => negative(b),
        _ if is(&b, -1.0) => negative(a),
        _ => a * b,
    }
}

fn quotient(a: ScalarExpr, b: ScalarExpr) -> ScalarExpr {
    if is(&a, 0.0) || is(&b, 1.0) { a } else { a / b }
}

fn choice(condition: ScalarExpr, then: ScalarExpr, otherwise: ScalarExpr) -> ScalarExpr {
    if then == otherwise { then } else { ScalarExpr::select(condition, then, otherwise) }
}

/// Returns the derivative of a function at `x`.
fn unary(function: UnaryFn, x: &ScalarExpr) -> ScalarExpr {
    let of = |function| x.clone().apply(function);
    let square = || x.clone() * x.clone();
    // Rules use the function itself where they can: `bind_operands` then reads the node's output.
    match function {
        UnaryFn::Neg => constant(-1.0),
        // 0 at 0, which is a subgradient.
        UnaryFn::Abs => of(UnaryFn::Sign),
        UnaryFn::Reciprocal => -(of(UnaryFn::Reciprocal) * of(UnaryFn::Reciprocal)),
        UnaryFn::Sqrt => constant(0.5) / of(UnaryFn::Sqrt),
        UnaryFn::Exp | UnaryFn::Expm1 => of(UnaryFn::Exp),
        UnaryFn::Log => of(UnaryFn::Reciprocal),
        UnaryFn::Log1p => (x.clone() + 1.0).apply(UnaryFn::Reciprocal),
        UnaryFn::Sigmoid => of(UnaryFn::Sigmoid) * (constant(1.0) - of(UnaryFn::Sigmoid)),
        UnaryFn::Erf => (-square()).apply(UnaryFn::Exp) * ERF_SLOPE,
        UnaryFn::Sin => of(UnaryFn::Cos),
        UnaryFn::Cos => -of(UnaryFn::Sin),
        UnaryFn::Tan => of(UnaryFn::Tan) * of(UnaryFn::Tan) + 1.0,
        UnaryFn::Asin => (constant(1.0) - square()).apply(UnaryFn::Sqrt).apply(UnaryFn::Reciprocal),
        UnaryFn::Acos => -(constant(1.0) - square()).apply(UnaryFn::Sqrt).apply(UnaryFn::Reciprocal),
        UnaryFn::Atan => (square() + 1.0).apply(UnaryFn::Reciprocal),
        UnaryFn::Sinh => of(UnaryFn::Cosh),
        UnaryFn::Cosh => of(UnaryFn::Sinh),
        UnaryFn::Tanh => constant(1.0) - of(UnaryFn::Tanh) * of(UnaryFn::Tanh),
        UnaryFn::Asinh => (square() + 1.0).apply(UnaryFn::Sqrt).apply(UnaryFn::Reciprocal),
        UnaryFn::Acosh => (square() - 1.0).apply(UnaryFn::Sqrt).apply(UnaryFn::Reciprocal),
        UnaryFn::Atanh => (constant(1.0) - square()).apply(UnaryFn::Reciprocal),
        UnaryFn::Sign
        | UnaryFn::Floor
        | UnaryFn::Ceil
        | UnaryFn::RoundHalfEven
        | UnaryFn::IsNan
        | UnaryFn::IsInf
        | UnaryFn::Not => constant(0.0),
    }
}

/// Returns the derivative of a function of `a` and `b`, whose own derivatives are `da` and `db`.
fn binary(
    function: BinaryFn,
    (a, b): (&ScalarExpr, &ScalarExpr),
    (da, db): (ScalarExpr, ScalarExpr),
) -> ScalarExpr {
    let (a, b) = (a.clone(), b.clone());
    match function {
        BinaryFn::Add => sum(da, db),
        BinaryFn::Sub => difference(da, db),
        BinaryFn::Mul => sum(product(da, b), product(a, db)),
        BinaryFn::Div => {
            // (a / b) / b, because a / b is the node's output and b * b may overflow.
            let by_b = if is(&db, 0.0) { db } else { product(quotient(a / b.clone(), b.clone()), db) };
            difference(quotient(da, b), by_b)
        }
        // At a tie `b` gets the whole gradient, so that `max(x, 0)` has derivative 0 at 0.
        BinaryFn::Min => choice(a.less(b), da, db),
        BinaryFn::Max => choice(b.less(a), da, db),
        BinaryFn::Pow => power((a, b), (da, db)),
        // The floored quotient `n` is piecewise constant, so `a - n*b` has derivative `da - n*db`.
        BinaryFn::Mod => difference(da, product((a / b).apply(UnaryFn::Floor), db)),
        BinaryFn::Fmod => {
            // The same with a quotient that is truncated towards 0.
            let ratio = a / b;
            let (up, down) = (ratio.clone().apply(UnaryFn::Ceil), ratio.clone().apply(UnaryFn::Floor));
            difference(da, product(choice(ratio.less(0.0), up, down), db))
        }
        BinaryFn::Less
        | BinaryFn::LessOrEqual
        | BinaryFn::Equal
        | BinaryFn::And
        | BinaryFn::Or
        | BinaryFn::Xor => constant(0.0),
    }
}

/// Returns the derivative of `a^b`. It is 0 with respect to `a` if `b` is 0, and with respect to
/// `b` if `a` is 0, as a limit. Both cases are explicit, because the formulas would multiply 0 by
/// infinity.
fn power((a, b): (ScalarExpr, ScalarExpr), (da, db): (ScalarExpr, ScalarExpr)) -> ScalarExpr {
    let zero = |x: &ScalarExpr| ScalarExpr::binary(BinaryFn::Equal, x.clone(), constant(0.0));
    let raise = |b| ScalarExpr::binary(BinaryFn::Pow, a.clone(), b);
    let by_a = if is(&da, 0.0) {
        da
    } else {
        let slope = choice(zero(&b), constant(0.0), b.clone() * raise(b.clone() - 1.0));
        product(slope, da)
    };
    let by_b = if is(&db, 0.0) {
        db
    } else {
        let slope = raise(b.clone()) * a.clone().apply(UnaryFn::Log);
        product(choice(zero(&a), constant(0.0), slope), db)
    };
    sum(by_a, by_b)
}
