//! Scalar formulas: the single definition of an elementwise operator, which every provider renders.

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
    Expm1,
    Log,
    Log1p,
    Sigmoid,
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

/// A function of two numbers. Comparisons return 1 for true and 0 for false.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "each is the operator of that name in ONNX; Fmod is Mod with that attribute")]
pub enum BinaryFn {
    Add,
    Sub,
    Mul,
    Div,
    Min,
    Max,
    Pow,
    Mod,
    Fmod,
    Less,
    LessOrEqual,
    Equal,
    And,
    Or,
    Xor,
}

/// A formula over the elements of an operator's inputs at one position.
#[derive(Debug, Clone, PartialEq)]
pub enum ScalarExpr {
    /// The element of the input at this index.
    Input(usize),
    /// A constant.
    Constant(f64),
    /// A function applied to one formula.
    Unary(UnaryFn, Box<ScalarExpr>),
    /// A function applied to two formulas.
    Binary(BinaryFn, Box<ScalarExpr>, Box<ScalarExpr>),
    /// The second formula if the first is not zero, otherwise the third.
    Select(Box<ScalarExpr>, Box<ScalarExpr>, Box<ScalarExpr>),
}

impl ScalarExpr {
    /// Applies a function to one formula.
    pub fn unary(function: UnaryFn, x: ScalarExpr) -> ScalarExpr {
        ScalarExpr::Unary(function, Box::new(x))
    }

    /// Applies a function to two formulas.
    pub fn binary(function: BinaryFn, a: ScalarExpr, b: ScalarExpr) -> ScalarExpr {
        ScalarExpr::Binary(function, Box::new(a), Box::new(b))
    }

    /// Returns `if condition { then } else { otherwise }`.
    pub fn select(condition: ScalarExpr, then: ScalarExpr, otherwise: ScalarExpr) -> ScalarExpr {
        ScalarExpr::Select(Box::new(condition), Box::new(then), Box::new(otherwise))
    }

    /// Returns the number of inputs that the formula needs: one more than the highest index in it.
    pub fn input_count(&self) -> usize {
        let mut count = 0;
        self.visit_inputs(&mut |index| count = count.max(index.saturating_add(1)));
        count
    }

    /// Calls `visit` with the index of each input, once per occurrence.
    pub fn visit_inputs(&self, visit: &mut dyn FnMut(usize)) {
        match self {
            ScalarExpr::Input(index) => visit(*index),
            ScalarExpr::Constant(_) => {}
            ScalarExpr::Unary(_, x) => x.visit_inputs(visit),
            ScalarExpr::Binary(_, a, b) => [a, b].into_iter().for_each(|x| x.visit_inputs(visit)),
            ScalarExpr::Select(a, b, c) => [a, b, c].into_iter().for_each(|x| x.visit_inputs(visit)),
        }
    }

    /// Returns `min(self, other)`.
    pub fn min(self, other: impl Into<ScalarExpr>) -> ScalarExpr {
        ScalarExpr::binary(BinaryFn::Min, self, other.into())
    }

    /// Returns `max(self, other)`.
    pub fn max(self, other: impl Into<ScalarExpr>) -> ScalarExpr {
        ScalarExpr::binary(BinaryFn::Max, self, other.into())
    }

    /// Returns a formula that is 1 if `self < other`, otherwise 0.
    pub fn less(self, other: impl Into<ScalarExpr>) -> ScalarExpr {
        ScalarExpr::binary(BinaryFn::Less, self, other.into())
    }

    /// Returns `x / 2 * (1 + erf(x / sqrt(2)))` of this formula.
    pub fn gelu(self) -> ScalarExpr {
        let error = (self.clone() * std::f64::consts::FRAC_1_SQRT_2).apply(UnaryFn::Erf);
        self * 0.5 * (error + 1.0)
    }

    /// Returns the approximation of [`Self::gelu`] by `tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))`.
    pub fn gelu_tanh(self) -> ScalarExpr {
        let x = || self.clone();
        let cubic = x() + x() * x() * x() * 0.044_715;
        let inner = (cubic * (2.0 * std::f64::consts::FRAC_1_PI).sqrt()).apply(UnaryFn::Tanh);
        self * 0.5 * (inner + 1.0)
    }

    /// Applies a function to this formula.
    pub fn apply(self, function: UnaryFn) -> ScalarExpr {
        ScalarExpr::unary(function, self)
    }
}

impl From<f64> for ScalarExpr {
    fn from(value: f64) -> ScalarExpr {
        ScalarExpr::Constant(value)
    }
}

impl From<f32> for ScalarExpr {
    fn from(value: f32) -> ScalarExpr {
        ScalarExpr::Constant(f64::from(value))
    }
}

macro_rules! operators {
    ($($operator:ident $method:ident),*) => {$(
        impl<R: Into<ScalarExpr>> std::ops::$operator<R> for ScalarExpr {
            type Output = ScalarExpr;

            fn $method(self, other: R) -> ScalarExpr {
                ScalarExpr::binary(BinaryFn::$operator, self, other.into())
            }
        }
    )*};
}

operators! { Add add, Sub sub, Mul mul, Div div }

impl std::ops::Neg for ScalarExpr {
    type Output = ScalarExpr;

    fn neg(self) -> ScalarExpr {
        ScalarExpr::unary(UnaryFn::Neg, self)
    }
}
