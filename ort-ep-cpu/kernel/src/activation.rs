//! Activations as loops of the vector library.

use ort_core::Result;
use ort_core::ep::CompileCx;
use ort_core::error;
use ort_core::ops::fused::activation::Activation;

use crate::idioms::one_loop;
use ort_cpu_vector::elementwise::Unary;

/// Returns the loop of a fused operator's activation.
pub fn unary_of(activation: &Activation) -> Result<Unary> {
    let found = one_loop(&activation.formula()?);
    found.ok_or_else(|| error!(NotImplemented, "activation '{}' has no loop", activation.name))
}

/// Returns whether there is a loop for an activation.
pub fn has_loop(activation: &Activation) -> bool {
    unary_of(activation).is_ok()
}

/// Returns the activation that a node's `activation` and `activation_params` specify; none for
/// operators without them.
pub fn activation_of(cx: &CompileCx<'_>) -> Result<Option<Unary>> {
    Activation::of_attributes(cx.attrs())?.as_ref().map(unary_of).transpose()
}
