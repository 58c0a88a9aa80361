//! Kernel definitions: what the session sees of a kernel, and its dispatches.

use ort_core::Result;
use ort_core::ep::KernelDef;

use crate::launch::{Dispatch, OpCx};

/// A kernel: its definition for the session, and its dispatches.
pub struct WgpuKernel {
    pub(crate) def: KernelDef,
    /// Returns the dispatches for some shapes, in execution order.
    pub(crate) dispatches: fn(&OpCx<'_>) -> Result<Vec<Dispatch>>,
    /// Returns the size of its workspace in bytes, which may only depend on types, shapes and
    /// attributes. `None` if it needs no workspace.
    pub(crate) workspace: Option<fn(&OpCx<'_>) -> Result<usize>>,
}

impl WgpuKernel {
    /// Creates a kernel without a workspace.
    pub(crate) const fn new(
        def: KernelDef,
        dispatches: fn(&OpCx<'_>) -> Result<Vec<Dispatch>>,
    ) -> WgpuKernel {
        WgpuKernel { def, dispatches, workspace: None }
    }
}

inventory::collect!(WgpuKernel);

/// Registers [`WgpuKernel`]s with the provider.
macro_rules! wgpu_kernels {
    ($($kernel:expr),* $(,)?) => {
        $(inventory::submit! { $kernel })*
    };
}

pub(crate) use wgpu_kernels;
