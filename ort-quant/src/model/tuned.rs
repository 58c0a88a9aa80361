//! What samples say about weights in blocks.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::smoothed::Smoothing;
use super::weights::Done;

/// What [`Quantizer::gptq`](crate::Quantizer::gptq) and [`Quantizer::awq`](crate::Quantizer::awq)
/// found for the weights of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TunedWeights {
    /// The weights that GPTQ has quantized.
    pub(super) done: BTreeMap<TunedForm, Arc<Done>>,
    /// The values that AWQ divides.
    pub(super) smoothing: Smoothing,
    /// How much an error in each row of a weight counts, by the value that it is multiplied with.
    pub(super) importance: BTreeMap<String, Arc<[f32]>>,
}

/// A form of a weight: its name, whether it is transposed, and the bits.
pub(super) type TunedForm = (String, bool, usize);
