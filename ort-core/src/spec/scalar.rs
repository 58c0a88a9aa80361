//! Scalar formulas of elementwise operators: the one definition that every provider renders.

/// A function of one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "each is the function of that name in mathematics or in ONNX")]
pub enum UnaryFn {
    Neg,
    Abs,
    Sign,
    Floor,
    Ceil,
    RoundHalfEven,
    Reciprocal,
    Sqrt,
    Exp,
    Log,
    Erf,
    Sin,
    Cos,
    Tan,
    Asin,
    Acos,
    Atan,
    Sinh,
    Cosh,
    Tanh,
    Asinh,
    Acosh,
    Atanh,
    IsNan,
    IsInf,
    Not,
}

/// A function of two numbers. Comparisons give 1 for true and 0 for false.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "each is the operator of that name in ONNX")]
pub enum BinaryFn {
    Add,
    Sub,
    Mul,
    Div,
    Min,
    Max,
    Pow,
    Less,
    LessOrEqual,
    Equal,
    And,
    Or,
    Xor,
}

/// A formula over the elements of an operator's inputs at one place.
#[derive(Debug, Clone, PartialEq)]
pub enum ScalarExpr {
    /// The element of the input at this position.
    Input(usize),
    /// A number.
    Constant(f64),
    /// A function of one formula.
    Unary(UnaryFn, Box<ScalarExpr>),
    /// A function of two formulas.
    Binary(BinaryFn, Box<ScalarExpr>, Box<ScalarExpr>),
    /// The second formula where the first is not zero, else the third.
    Select(Box<ScalarExpr>, Box<ScalarExpr>, Box<ScalarExpr>),
}

impl ScalarExpr {
    /// A function of one formula.
    pub fn unary(function: UnaryFn, x: ScalarExpr) -> ScalarExpr {
        ScalarExpr::Unary(function, Box::new(x))
    }

    /// A function of two formulas.
    pub fn binary(function: BinaryFn, a: ScalarExpr, b: ScalarExpr) -> ScalarExpr {
        ScalarExpr::Binary(function, Box::new(a), Box::new(b))
    }

    /// `if condition { then } else { otherwise }`.
    pub fn select(condition: ScalarExpr, then: ScalarExpr, otherwise: ScalarExpr) -> ScalarExpr {
        ScalarExpr::Select(Box::new(condition), Box::new(then), Box::new(otherwise))
    }
}
