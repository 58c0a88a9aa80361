//! The runtime's own fused operators, of the domain [`RUNTIME`]: what rewrites make of several of
//! the standard's operators so that a provider runs them in one pass. Each has a decomposition that
//! is exact.

pub mod activation;
mod elementwise;
mod matmul;
pub(super) mod nhwc;
mod pointwise_depthwise;

use crate::ir::Node;
use crate::spec::{MICROSOFT, RUNTIME};
use activation::Activation;

/// Whether ONNX Runtime has the operator of a node that a rewrite made: it has none of the
/// runtime's own, and does not end convolutions with all of the activations.
pub(crate) fn is_in_onnx_runtime(node: &Node) -> bool {
    match (node.spec.domain, node.spec.name) {
        (RUNTIME, _) => false,
        (MICROSOFT, "FusedConv") => Activation::of_attributes(&node.attrs)
            .is_ok_and(|activation| activation.is_none_or(|activation| activation.is_in_onnx_runtime())),
        _ => true,
    }
}
