//! Mixed precision: forward and backward passes partly in 16 bits, from parameters and states in
//! float32.
//!
//! The forward pass is edited before the loss is added ([`mod@autocast`]): products read casts of
//! the parameters, and what they make stays in 16 bits as long as operators allow. The backward
//! pass follows from that. Where the smallest gradients would be lost, the loss is multiplied by a
//! scale before it is differentiated, and gradients are divided by it in the update ([`scaler`]).

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

/// The type of 16 bits that products are computed in. Parameters, the optimizer's states and the
/// loss stay in float32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MixedPrecision {
    /// bfloat16: the range of float32 with 8 bits of precision. It needs no loss scale.
    Bf16,
    /// float16: 11 bits of precision, and numbers up to 65504 only, so that gradients need a loss
    /// scale.
    Fp16,
}

impl MixedPrecision {
    /// The element type.
    pub fn dtype(self) -> DType {
        match self {
            MixedPrecision::Bf16 => DType::BF16,
            MixedPrecision::Fp16 => DType::F16,
        }
    }
}

/// What the loss is multiplied by before it is differentiated. An update by gradients that are not
/// finite is left out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LossScale {
    /// The same throughout.
    Constant(f32),
    /// A scale that falls when gradients overflow and grows when they have not for a while, as
    /// PyTorch's `GradScaler` has it.
    Dynamic {
        /// The scale of the first step.
        initial: f32,
        /// What it is multiplied by after `growth_interval` updates in a row, above 1.
        growth_factor: f32,
        /// What it is multiplied by after an update that was left out, above 0 and below 1.
        backoff_factor: f32,
        /// How many updates in a row make it grow.
        growth_interval: u32,
    },
}

impl LossScale {
    /// The scale with the numbers that PyTorch's `GradScaler` has by default.
    pub fn dynamic() -> LossScale {
        LossScale::Dynamic {
            initial: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
        }
    }

    /// The scale of the first step.
    pub(crate) fn initial(self) -> f32 {
        match self {
            LossScale::Constant(scale) | LossScale::Dynamic { initial: scale, .. } => scale,
        }
    }

    pub(crate) fn check(self) -> Result<()> {
        let scale = self.initial();
        ensure!(
            scale.is_normal() && scale > 0.0 && (1.0 / scale).is_normal(),
            InvalidArgument,
            help = "65536 is usual",
            "a loss scale of {scale}, expected a number above 0 whose reciprocal is a number, too"
        );
        let LossScale::Dynamic { growth_factor, backoff_factor, growth_interval, .. } = self else {
            return Ok(());
        };
        ensure!(
            growth_factor.is_finite() && growth_factor > 1.0,
            InvalidArgument,
            "a loss scale grows by a factor of {growth_factor}, expected one above 1"
        );
        ensure!(
            backoff_factor > 0.0 && backoff_factor < 1.0,
            InvalidArgument,
            "a loss scale falls by a factor of {backoff_factor}, expected one between 0 and 1"
        );
        ensure!(
            growth_interval > 0,
            InvalidArgument,
            "a loss scale grows after 0 updates, expected 1 or more"
        );
        Ok(())
    }
}
