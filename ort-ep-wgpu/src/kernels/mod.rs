//! The kernels by family. A kernel answers for the shapes of a run with the dispatches that compute its outputs.

mod elementwise;

use ort_core::Result;
use ort_core::ep::KernelDef;

use crate::launch::{Dispatch, OpCx};

/// A kernel of the device: what the session knows of it, and what it dispatches.
pub struct WgpuKernel {
    pub(crate) def: KernelDef,
    /// The dispatches for some shapes, in the order in which they run.
    pub(crate) dispatches: fn(&OpCx<'_>) -> Result<Vec<Dispatch>>,
    /// The bytes of its workspace, which may only follow from types, shapes and attributes; none where it takes none.
    pub(crate) workspace: Option<fn(&OpCx<'_>) -> Result<usize>>,
}

impl WgpuKernel {
    /// A kernel without workspace.
    pub(crate) const fn new(
        def: KernelDef,
        dispatches: fn(&OpCx<'_>) -> Result<Vec<Dispatch>>,
    ) -> WgpuKernel {
        WgpuKernel { def, dispatches, workspace: None }
    }
}

inventory::collect!(WgpuKernel);

/// Every kernel of this build.
pub(crate) fn all() -> impl Iterator<Item = &'static WgpuKernel> {
    inventory::iter::<WgpuKernel>.into_iter()
}

/// Registers kernels with the provider: each is a [`WgpuKernel`].
macro_rules! wgpu_kernels {
    ($($kernel:expr),* $(,)?) => {
        $(inventory::submit! { $kernel })*
    };
}

use wgpu_kernels;
