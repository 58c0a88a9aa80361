//! The kernels by family. A kernel answers for the shapes of a run with the launches that compute
//! its outputs.

mod arg;
mod attend;
mod attention;
mod bits;
mod codes;
mod col2im;
mod conv;
mod conv_integer;
mod cumulative;
mod deform_conv;
mod einsum;
mod elementwise;
mod embed;
mod finish;
mod gather;
mod gather_blocks;
mod gemm;
mod grid_sample;
mod group_query;
mod heads;
mod integer;
mod linear_attention;
mod lines;
mod local;
mod matmul;
mod matmul_integer;
mod matmul_nbits;
mod max_unpool;
mod movement;
mod multi_head;
mod narrow;
mod norm;
mod pad;
mod pool;
mod qlinear;
mod quantize;
mod recurrent;
mod reduce;
mod resize;
mod roi;
mod rotary;
mod select;
mod sort;
mod top_k;
mod training;
mod unique;
mod warpgroups;

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::{KernelDef, OutputsFrom};
use ort_core::tensor::Shape;

use crate::launch::{Launch, OpCx, Operand};

/// The most axes of a tensor that kernels walk.
pub(crate) const MOST_AXES: usize = 8;

/// A kernel of the device: what the session knows of it, and what it launches.
pub struct CudaKernel {
    pub(crate) def: KernelDef,
    /// The launches for some shapes, in the order in which they run.
    pub(crate) launches: fn(&OpCx<'_>) -> Result<Vec<Launch>>,
    /// The bytes of its workspace, which may only follow from types, shapes and attributes; none
    /// where it takes none.
    pub(crate) workspace: Option<fn(&OpCx<'_>) -> Result<usize>>,
    /// What comes behind the launches where they only count; none where they compute the outputs.
    pub(crate) counted: Option<Counted>,
}

/// How outputs are made whose sizes only the run tells, once the host has read the [`count`].
pub(crate) struct Counted {
    /// The shapes of all outputs, those that nobody reads included, for a count: 0 where there were
    /// no launches.
    pub(crate) shapes: fn(&OpCx<'_>, usize) -> Result<Vec<Shape>>,
    /// The launches that write the outputs, which have these shapes. They find the workspace as the
    /// first launches left it.
    pub(crate) write: fn(&OpCx<'_>, usize) -> Result<Vec<Launch>>,
}

/// Where the launches of a kernel whose outputs are [`Counted`] leave the count: a number of 64
/// bits at the beginning of the workspace.
pub(crate) fn count(cx: &OpCx<'_>, taken: &mut usize) -> Operand {
    cx.workspace(taken, DType::I64, &[1])
}

impl CudaKernel {
    /// A kernel without workspace.
    pub(crate) const fn new(def: KernelDef, launches: fn(&OpCx<'_>) -> Result<Vec<Launch>>) -> CudaKernel {
        CudaKernel { def, launches, workspace: None, counted: None }
    }

    /// A kernel that allocates its outputs: its `launches` count, in a workspace that begins with
    /// the [`count`].
    pub(crate) const fn counting(
        def: KernelDef,
        launches: fn(&OpCx<'_>) -> Result<Vec<Launch>>,
        workspace: fn(&OpCx<'_>) -> Result<usize>,
        counted: Counted,
    ) -> CudaKernel {
        let def = KernelDef { outputs: OutputsFrom::Kernel, ..def };
        CudaKernel { def, launches, workspace: Some(workspace), counted: Some(counted) }
    }

    /// The same with a workspace, which is that of the libraries that compute it.
    pub(crate) const fn with_workspace(self, workspace: fn(&OpCx<'_>) -> Result<usize>) -> CudaKernel {
        CudaKernel { workspace: Some(workspace), ..self }
    }
}

inventory::collect!(CudaKernel);

/// Every kernel of this build.
pub(crate) fn all() -> impl Iterator<Item = &'static CudaKernel> {
    inventory::iter::<CudaKernel>.into_iter()
}

/// Registers kernels with the provider: each is a [`CudaKernel`].
macro_rules! cuda_kernels {
    ($($kernel:expr),* $(,)?) => {
        $(inventory::submit! { $kernel })*
    };
}

use cuda_kernels;
