//! `MatMulNBits` of `com.microsoft`.

use ort_core::ep::NodeView;

/// Whether the GPU providers cover a node: no group indices, and no weights prepacked for another
/// device.
pub fn is_covered(node: &NodeView<'_>) -> bool {
    // Input 4 holds the group indices (`g_idx`).
    node.input(4).is_none() && node.attrs().find_int("weight_prepacked").unwrap_or(0) == 0
}
