//! Operator kernels by family. A kernel maps the shapes of a run to the dispatches that compute its
//! outputs.

mod activation;
mod arg;
mod attend;
mod attention;
mod bias;
mod bits;
mod cast;
mod col2im;
mod conv;
mod conv_codes;
mod copy;
mod cumulative;
mod deform_conv;
mod dynamic_quantize;
mod einsum;
mod elementwise;
mod embed;
mod fill;
mod gather;
mod gather_blocks;
mod gemm;
mod generate;
mod grid_sample;
mod group_query;
mod heads;
mod indexing;
mod limit;
mod lines;
mod matmul;
mod matmul_dynamic;
mod matmul_integer;
mod matmul_nbits;
mod max_unpool;
mod movement;
mod multi_head;
mod norm;
mod norm_channels;
mod norm_rows;
mod pad;
mod pool;
mod qlinear;
mod quantize;
mod recurrent;
mod recurrent_cells;
mod reduce;
mod reshape;
mod resize;
mod roi;
mod rotary;
mod scatter;
mod softmax;
mod tiles;
mod top_k;
mod windows;

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

/// Returns all kernels of this build, those that follow from operator records last.
pub(crate) fn all() -> impl Iterator<Item = &'static WgpuKernel> {
    inventory::iter::<WgpuKernel>.into_iter().chain(elementwise::derived())
}

/// Registers [`WgpuKernel`]s with the provider.
macro_rules! wgpu_kernels {
    ($($kernel:expr),* $(,)?) => {
        $(inventory::submit! { $kernel })*
    };
}

use wgpu_kernels;
