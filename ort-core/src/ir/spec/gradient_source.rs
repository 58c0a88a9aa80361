//! Gradient source of an operator, as documentation and error messages name it.

use std::fmt;

use super::{Grad, OpSpec, Param, Types};
use crate::dtype::TypeSet;

/// The reason for operators whose record does not mention a gradient.
const NO_RULE: &str = "it has no rule for its gradient";

/// Where an operator's gradient comes from, or why it has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradSource {
    /// The derivative of the scalar formula.
    Formula,
    /// A gradient rule.
    Rule,
    /// The gradients of other operators that compute the same.
    Parts,
    /// Zero, with the reason.
    Zero(&'static str),
    /// No gradient, with the reason.
    None(&'static str),
}

impl fmt::Display for GradSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GradSource::Formula => f.write_str("formula"),
            GradSource::Rule => f.write_str("rule"),
            GradSource::Parts => f.write_str("parts"),
            GradSource::Zero(why) => write!(f, "zero: {why}"),
            GradSource::None(why) => write!(f, "none: {why}"),
        }
    }
}

impl OpSpec {
    /// Returns where the gradient comes from, or why there is none.
    ///
    /// ```no_run
    /// use ort_core::spec::{GradSource, Registry};
    /// let records = Registry::global()?;
    /// assert_eq!(records.find("", "Tanh").map(|tanh| tanh.gradient()), Some(GradSource::Formula));
    /// # Ok::<(), ort_core::Error>(())
    /// ```
    pub fn gradient(&self) -> GradSource {
        match self.grad {
            Grad::Rule(_) => GradSource::Rule,
            Grad::Parts(_) => GradSource::Parts,
            Grad::Zero(why) => GradSource::Zero(why),
            Grad::None(why) => GradSource::None(why),
            Grad::Derived => match self.carries_floats() {
                Err(why) => GradSource::None(why),
                Ok(()) if self.scalar.is_some() => GradSource::Formula,
                Ok(()) if self.lower.is_some() => GradSource::Parts,
                Ok(()) => GradSource::None(NO_RULE),
            },
        }
    }

    /// Returns the reason why there is no gradient.
    pub(super) fn without_gradient(&self) -> &'static str {
        match self.gradient() {
            GradSource::None(why) => why,
            _ => NO_RULE,
        }
    }

    /// Checks that some input and some output may hold floats, because gradients flow between
    /// these.
    fn carries_floats(&self) -> Result<(), &'static str> {
        let floats = |params: &[Param]| params.iter().any(|param| self.may_hold_floats(param));
        match (floats(self.inputs), floats(self.outputs)) {
            (false, _) => Err("no input is of floats"),
            (true, false) => Err("no output is of floats"),
            (true, true) => Ok(()),
        }
    }

    fn may_hold_floats(&self, param: &Param) -> bool {
        let is_float = |types: &Types| {
            // Gradients are tensors, or sequences and optionals of them; maps and sparse tensors
            // have none.
            let sets = [types.tensor, types.sequence, types.optional, types.optional_sequence];
            sets.iter().any(|set| !set.intersection(TypeSet::FLOATS).is_empty())
        };
        match self.type_var(param.ty) {
            Some(var) => is_float(&var.types),
            None => {
                ["(float)", "(double)", "(float16)", "(bfloat16)"].iter().any(|name| param.ty.contains(name))
            }
        }
    }
}
