//! What samples say about weights in blocks.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::precision::Blocks;
use super::smoothed::Smoothing;
use super::weights::Done;

/// What [`Quantizer::gptq`](crate::Quantizer::gptq), [`Quantizer::awq`](crate::Quantizer::awq) and
/// [`Quantizer::correct_bias`](crate::Quantizer::correct_bias) found for the weights of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TunedWeights {
    /// The weights that are quantized already.
    pub(super) done: BTreeMap<TunedForm, TunedWeight>,
    /// The values that AWQ divides.
    pub(super) smoothing: Smoothing,
    /// How much an error in each row of a weight counts, by the value that it is multiplied with.
    pub(super) importance: BTreeMap<String, Arc<[f32]>>,
    /// The blocks of weights that have a precision of their own; `None` for one that stays.
    pub(super) precisions: BTreeMap<String, Option<Blocks>>,
}

/// A weight that is quantized.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TunedWeight {
    pub(super) done: Arc<Done>,
    /// What the report says of it.
    pub(super) label: &'static str,
    /// Whether the last result is a bias.
    pub(super) is_corrected: bool,
}

/// A form of a weight: its name, whether it is transposed, and the bits.
pub(super) type TunedForm = (String, bool, usize);
