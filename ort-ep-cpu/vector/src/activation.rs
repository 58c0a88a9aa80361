//! Activations in the epilogue of a kernel, while its result is in registers or in the cache.

use super::elementwise::{Unary, unary_in_place};
use crate::simd::slices::UnaryOp;
use crate::simd::{Isa, Simd};

/// The activation of a kernel's result.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Activation {
    /// No activation.
    #[default]
    None,
    /// The greater of 0 and the value.
    Relu,
    /// The nearest value in a range.
    Clip {
        /// The least result.
        min: f32,
        /// The greatest result.
        max: f32,
    },
    /// Any other function of one value.
    Unary(Unary),
}

impl Activation {
    /// Splits the activation into bounds that a kernel applies in registers, and a function to
    /// apply afterwards.
    pub fn split(self) -> (Clamp, Option<Unary>) {
        match self {
            Activation::None => (Clamp::NONE, None),
            // Both spellings, because callers translate the operator's name or a formula.
            Activation::Relu | Activation::Unary(Unary::Relu) => (Clamp { min: 0.0, ..Clamp::NONE }, None),
            Activation::Clip { min, max } | Activation::Unary(Unary::Clip { min, max }) => {
                (Clamp { min, max }, None)
            }
            Activation::Unary(function) => (Clamp::NONE, Some(function)),
        }
    }

    /// Applies the activation to a slice.
    pub fn apply_in_place(self, isa: Isa, data: &mut [f32]) {
        match self {
            Activation::None => {}
            Activation::Relu => unary_in_place(isa, Unary::Relu, data),
            Activation::Clip { min, max } => unary_in_place(isa, Unary::Clip { min, max }, data),
            Activation::Unary(function) => unary_in_place(isa, function, data),
        }
    }
}

/// Bounds of a result; NaN stays NaN.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Clamp {
    /// The least result.
    pub min: f32,
    /// The greatest result.
    pub max: f32,
}

impl Clamp {
    /// No bounds.
    pub const NONE: Clamp = Clamp { min: f32::NEG_INFINITY, max: f32::INFINITY };
}

impl UnaryOp for Clamp {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::F32) -> S::F32 {
        // The second operand is the result if one is NaN, so `x` comes second.
        s.min_or_second(s.splat(self.max), s.max_or_second(s.splat(self.min), x))
    }
}
