//! Mixed precision training: 16-bit compute with float32 parameters and optimizer state.
//!
//! The forward pass is edited before the loss is added ([`mod@autocast`]): matmuls read 16-bit
//! casts of the parameters, and their results stay in 16 bits for as long as the operators allow.
//! Differentiation then derives a backward pass in the same types. Small gradients would underflow
//! in float16. So the loss is multiplied by a scale before it is differentiated, and the update
//! divides the gradients by it ([`scaler`]).

mod autocast;
mod recast;
mod scaler;

pub use autocast::OperatorPrecision;
pub(crate) use autocast::autocast;
use ort_core::dtype::DType;
use ort_core::{Result, ensure};
pub(crate) use recast::recast;
pub(crate) use scaler::LossScaler;
use serde::{Deserialize, Serialize};

/// The 16-bit type of matmuls. Parameters, optimizer state and the loss stay in float32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MixedPrecision {
    /// bfloat16: the exponent range of float32 with 8 bits of precision. It needs no loss scaling.
    Bf16,
    /// float16: 11 bits of precision, but no numbers above 65504, so gradients need loss scaling.
    Fp16,
}

impl MixedPrecision {
    /// Returns the element type.
    pub fn dtype(self) -> DType {
        match self {
            MixedPrecision::Bf16 => DType::BF16,
            MixedPrecision::Fp16 => DType::F16,
        }
    }
}

/// Loss scaling: the loss is multiplied by a scale before it is differentiated. An update whose
/// gradients are not finite is skipped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LossScale {
    /// A constant scale.
    Constant(f32),
    /// Dynamic loss scaling as in PyTorch's `GradScaler`: the scale falls when gradients overflow,
    /// and grows after a while without overflow.
    Dynamic {
        /// The scale of the first step.
        initial: f32,
        /// The factor after `growth_interval` updates in a row, above 1.
        growth_factor: f32,
        /// The factor after a skipped update, above 0 and below 1.
        backoff_factor: f32,
        /// The number of updates in a row after which the scale grows.
        growth_interval: u32,
    },
}

impl LossScale {
    /// Returns dynamic loss scaling with the defaults of PyTorch's `GradScaler`.
    pub fn dynamic() -> LossScale {
        LossScale::Dynamic {
            initial: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
        }
    }

    /// Returns the scale of the first step.
    pub(crate) fn initial(self) -> f32 {
        match self {
            LossScale::Constant(scale) | LossScale::Dynamic { initial: scale, .. } => scale,
        }
    }

    /// Checks that the scale and its reciprocal are normal numbers and that the factors have the
    /// right direction.
    pub(crate) fn check(self) -> Result<()> {
        let scale = self.initial();
        ensure!(
            // Gradients are multiplied by the reciprocal, which must not flush to 0.
            scale.is_normal() && scale > 0.0 && (1.0 / scale).is_normal(),
            InvalidArgument,
            help = "65536 is usual",
            "the loss scale is {scale}, expected a number above 0 with a finite reciprocal"
        );
        let LossScale::Dynamic { growth_factor, backoff_factor, growth_interval, .. } = self else {
            return Ok(());
        };
        ensure!(
            growth_factor.is_finite() && growth_factor > 1.0,
            InvalidArgument,
            "the growth factor of the loss scale is {growth_factor}, expected a number above 1"
        );
        ensure!(
            backoff_factor > 0.0 && backoff_factor < 1.0,
            InvalidArgument,
            "the backoff factor of the loss scale is {backoff_factor}, expected a number between 0 and 1"
        );
        ensure!(
            growth_interval > 0,
            InvalidArgument,
            "the growth interval of the loss scale is 0 updates, expected 1 or more"
        );
        Ok(())
    }
}
