//! Lowering of scalar formulas to nodes of standard operators.

use super::{BinaryFn, Draft, ScalarExpr, UnaryFn};
use crate::Result;
use crate::dtype::DType;
use crate::ir::{Attribute, ValueId};
use crate::tensor::Tensor;

/// Emits a formula over the inputs of a draft, which have this float type, and returns its value. A
/// formula that is just an input returns the input.
pub(crate) fn render(draft: &mut Draft<'_>, dtype: DType, formula: &ScalarExpr) -> Result<ValueId> {
    Render { draft, dtype, known: Vec::new() }.number(formula)
}

/// Emits formulas as nodes, with common-subexpression elimination.
struct Render<'d, 'g> {
    draft: &'d mut Draft<'g>,
    /// The float type in which the formula is computed.
    dtype: DType,
    /// Formulas that are already emitted, with their values.
    known: Vec<(ScalarExpr, ValueId)>,
}

impl Render<'_, '_> {
    /// Returns an input of the formula, cast to an element type.
    fn operand(&mut self, index: usize, dtype: DType) -> Result<ValueId> {
        let input = self.draft.required(index)?;
        match self.draft.value_type(input).dtype() == Some(dtype) {
            true => Ok(input),
            false => self.cast(input, dtype),
        }
    }

    /// Adds a scalar constant of the formula's type.
    fn scalar(&mut self, value: f64) -> Result<ValueId> {
        let tensor = match self.dtype {
            DType::F64 => Tensor::scalar(value)?,
            DType::F16 => Tensor::scalar(half::f16::from_f64(value))?,
            DType::BF16 => Tensor::scalar(half::bf16::from_f64(value))?,
            _ => Tensor::scalar(value as f32)?,
        };
        Ok(self.draft.constant(tensor))
    }

    fn cast(&mut self, value: ValueId, dtype: DType) -> Result<ValueId> {
        self.draft.emit("Cast", &[value], &[("to", Attribute::Int(i64::from(dtype.onnx_code())))])
    }

    /// Emits the formula as a float tensor.
    fn number(&mut self, x: &ScalarExpr) -> Result<ValueId> {
        // A linear search: formulas are short, and floats have no hash.
        if let Some((_, known)) = self.known.iter().find(|(formula, _)| formula == x) {
            return Ok(*known);
        }
        let value = match x {
            ScalarExpr::Input(index) => self.operand(*index, self.dtype)?,
            ScalarExpr::Constant(value) => self.scalar(*value)?,
            ScalarExpr::Unary(function, inner) => match unary_op(*function) {
                Some(op) => {
                    let inner = self.number(inner)?;
                    self.draft.emit(op, &[inner], &[])?
                }
                None => self.shifted(*function, inner, x)?,
            },
            ScalarExpr::Binary(BinaryFn::Mod, a, b) => {
                // ONNX `Mod` takes floats only with `fmod`, which has the sign of the dividend.
                // This remainder has the sign of the divisor: a - floor(a / b) * b.
                let (a, b) = ((**a).clone(), (**b).clone());
                let whole = (a.clone() / b.clone()).apply(UnaryFn::Floor);
                self.number(&(a - whole * b))?
            }
            ScalarExpr::Binary(function, a, b) if !is_boolean(*function) => {
                let inputs = [self.number(a)?, self.number(b)?];
                let fmod = [("fmod", Attribute::Int(1))];
                let attrs = if *function == BinaryFn::Fmod { &fmod[..] } else { &[] };
                self.draft.emit(binary_op(*function), &inputs, attrs)?
            }
            ScalarExpr::Select(condition, then, otherwise) => {
                let inputs = [self.truth(condition)?, self.number(then)?, self.number(otherwise)?];
                self.draft.emit("Where", &inputs, &[])?
            }
            ScalarExpr::Binary(..) => self.boolean_as_float(x)?,
        };
        self.known.push((x.clone(), value));
        Ok(value)
    }

    /// Emits a function of one operand that has no operator of its own: one shifted by 1, or one
    /// with a boolean result.
    fn shifted(&mut self, function: UnaryFn, inner: &ScalarExpr, x: &ScalarExpr) -> Result<ValueId> {
        match function {
            // ONNX has no `Expm1` and no `Log1p`. These forms lose digits near 0.
            UnaryFn::Expm1 => {
                let (power, one) = (self.number(&inner.clone().apply(UnaryFn::Exp))?, self.one()?);
                self.draft.emit("Sub", &[power, one], &[])
            }
            UnaryFn::Log1p => {
                let (inner, one) = (self.number(inner)?, self.one()?);
                let sum = self.draft.emit("Add", &[inner, one], &[])?;
                self.draft.emit("Log", &[sum], &[])
            }
            _ => self.boolean_as_float(x),
        }
    }

    fn one(&mut self) -> Result<ValueId> {
        self.number(&ScalarExpr::Constant(1.0))
    }

    fn boolean_as_float(&mut self, x: &ScalarExpr) -> Result<ValueId> {
        let truth = self.truth(x)?;
        self.cast(truth, self.dtype)
    }

    /// Emits the formula as a boolean tensor.
    fn truth(&mut self, x: &ScalarExpr) -> Result<ValueId> {
        match x {
            ScalarExpr::Binary(function @ (BinaryFn::And | BinaryFn::Or | BinaryFn::Xor), a, b) => {
                let inputs = [self.truth(a)?, self.truth(b)?];
                self.draft.emit(binary_op(*function), &inputs, &[])
            }
            ScalarExpr::Binary(function, a, b) if is_boolean(*function) => {
                let inputs = [self.number(a)?, self.number(b)?];
                self.draft.emit(binary_op(*function), &inputs, &[])
            }
            ScalarExpr::Unary(UnaryFn::Not, x) => {
                let x = self.truth(x)?;
                self.draft.emit("Not", &[x], &[])
            }
            ScalarExpr::Unary(function @ (UnaryFn::IsNan | UnaryFn::IsInf), x) => {
                let x = self.number(x)?;
                self.draft.emit(if *function == UnaryFn::IsNan { "IsNaN" } else { "IsInf" }, &[x], &[])
            }
            ScalarExpr::Input(index) => self.operand(*index, DType::Bool),
            // Any number but 0 is true, as in `Select`.
            number => {
                let number = self.number(number)?;
                self.cast(number, DType::Bool)
            }
        }
    }
}

/// Returns the operator of a function. `None` if it takes two operators or its result is boolean.
fn unary_op(function: UnaryFn) -> Option<&'static str> {
    Some(match function {
        UnaryFn::Neg => "Neg",
        UnaryFn::Abs => "Abs",
        UnaryFn::Sign => "Sign",
        UnaryFn::Floor => "Floor",
        UnaryFn::Ceil => "Ceil",
        UnaryFn::RoundHalfEven => "Round",
        UnaryFn::Reciprocal => "Reciprocal",
        UnaryFn::Sqrt => "Sqrt",
        UnaryFn::Exp => "Exp",
        UnaryFn::Log => "Log",
        UnaryFn::Sigmoid => "Sigmoid",
        UnaryFn::Erf => "Erf",
        UnaryFn::Sin => "Sin",
        UnaryFn::Cos => "Cos",
        UnaryFn::Tan => "Tan",
        UnaryFn::Asin => "Asin",
        UnaryFn::Acos => "Acos",
        UnaryFn::Atan => "Atan",
        UnaryFn::Sinh => "Sinh",
        UnaryFn::Cosh => "Cosh",
        UnaryFn::Tanh => "Tanh",
        UnaryFn::Asinh => "Asinh",
        UnaryFn::Acosh => "Acosh",
        UnaryFn::Atanh => "Atanh",
        UnaryFn::Expm1 | UnaryFn::Log1p | UnaryFn::IsNan | UnaryFn::IsInf | UnaryFn::Not => return None,
    })
}

/// Returns the operator of a function.
fn binary_op(function: BinaryFn) -> &'static str {
    match function {
        BinaryFn::Add => "Add",
        BinaryFn::Sub => "Sub",
        BinaryFn::Mul => "Mul",
        BinaryFn::Div => "Div",
        BinaryFn::Min => "Min",
        BinaryFn::Max => "Max",
        BinaryFn::Pow => "Pow",
        BinaryFn::Mod | BinaryFn::Fmod => "Mod",
        BinaryFn::Less => "Less",
        BinaryFn::LessOrEqual => "LessOrEqual",
        BinaryFn::Equal => "Equal",
        BinaryFn::And => "And",
        BinaryFn::Or => "Or",
        BinaryFn::Xor => "Xor",
    }
}

fn is_boolean(function: BinaryFn) -> bool {
    use BinaryFn::{And, Equal, Less, LessOrEqual, Or, Xor};
    matches!(function, Less | LessOrEqual | Equal | And | Or | Xor)
}
