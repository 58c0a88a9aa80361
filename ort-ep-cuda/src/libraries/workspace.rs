//! Aligned workspaces for library calls.

/// The alignment of a workspace (cuBLAS, "cublasLtMatmul").
const WORKSPACE_ALIGNMENT: u64 = 256;

/// Returns the bytes to reserve so that an aligned workspace fits at any address.
pub(super) fn with_alignment(workspace: usize) -> usize {
    if workspace == 0 { 0 } else { workspace + WORKSPACE_ALIGNMENT as usize }
}

/// Returns the aligned address and remaining bytes of a workspace that begins anywhere.
pub(super) fn workspace_of((address, bytes): (u64, u64)) -> (u64, usize) {
    let start = address.next_multiple_of(WORKSPACE_ALIGNMENT);
    (start, bytes.saturating_sub(start - address) as usize)
}
