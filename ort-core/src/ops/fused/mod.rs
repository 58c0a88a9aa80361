//! The runtime's own fused operators, in the domain [`RUNTIME`].
//!
//! Rewrites fuse several standard operators into one of these so that a provider runs them in one
//! pass. Each has an exact decomposition, for providers without a kernel.

pub mod activation;
mod elementwise;
mod grid_attention;
mod integer_conv;
pub(crate) mod lookup_table;
mod matmul;
pub(super) mod nhwc;
mod pointwise_depthwise;
mod quantized_matmul;

use crate::ir::Node;
use crate::spec::{MICROSOFT, RUNTIME};
use activation::Activation;

/// Returns whether ONNX Runtime has the operator of a node that a rewrite made. It has none of the
/// runtime's own operators, and its `FusedConv` lacks some of the activations.
pub(crate) fn is_in_onnx_runtime(node: &Node) -> bool {
    match (node.spec.domain, node.spec.name) {
        (RUNTIME, _) => false,
        (MICROSOFT, "FusedConv") => Activation::of_attributes(&node.attrs)
            .is_ok_and(|activation| activation.is_none_or(|activation| activation.is_in_onnx_runtime())),
        _ => true,
    }
}
