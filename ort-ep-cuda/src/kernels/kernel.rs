//! Kernel definitions: what the session sees of a kernel, and its launches.

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::{KernelDef, OutputsFrom};
use ort_core::tensor::Shape;

use crate::launch::{Launch, OpCx, Operand};

/// The highest rank that kernels support.
pub(crate) const MOST_AXES: usize = 8;

/// A device kernel: its declaration for the session, and its launches.
pub struct CudaKernel {
    pub(crate) def: KernelDef,
    /// Returns the launches for some shapes, in execution order.
    pub(crate) launches: fn(&OpCx<'_>) -> Result<Vec<Launch>>,
    /// Returns the bytes of workspace, from types, shapes and attributes only; `None` if the kernel
    /// uses none.
    pub(crate) workspace: Option<fn(&OpCx<'_>) -> Result<usize>>,
    /// The second phase, if the launches only count; `None` if they compute the outputs.
    pub(crate) counted: Option<Counted>,
}

/// The second phase of a kernel with data-dependent output sizes, after the host has read the
/// [`count`].
pub(crate) struct Counted {
    /// Returns the shapes of all outputs, unused ones included, for a count; 0 if there were no
    /// launches.
    pub(crate) shapes: fn(&OpCx<'_>, usize) -> Result<Vec<Shape>>,
    /// Returns the launches that write outputs of these shapes. The workspace is as the first
    /// launches left it.
    pub(crate) write: fn(&OpCx<'_>, usize) -> Result<Vec<Launch>>,
}

/// The location where the launches of a [`Counted`] kernel store the count: a 64-bit number at the
/// start of the workspace.
pub(crate) fn count(cx: &OpCx<'_>, taken: &mut usize) -> Operand {
    cx.workspace(taken, DType::I64, &[1])
}

impl CudaKernel {
    /// Creates a kernel without a workspace.
    pub(crate) const fn new(def: KernelDef, launches: fn(&OpCx<'_>) -> Result<Vec<Launch>>) -> CudaKernel {
        CudaKernel { def, launches, workspace: None, counted: None }
    }

    /// Creates a kernel that allocates its outputs: its `launches` count, in a workspace that
    /// starts with the [`count`].
    pub(crate) const fn counting(
        def: KernelDef,
        launches: fn(&OpCx<'_>) -> Result<Vec<Launch>>,
        workspace: fn(&OpCx<'_>) -> Result<usize>,
        counted: Counted,
    ) -> CudaKernel {
        let def = KernelDef { outputs: OutputsFrom::Kernel, ..def };
        CudaKernel { def, launches, workspace: Some(workspace), counted: Some(counted) }
    }

    /// Adds a workspace, for the libraries or for our own kernels.
    pub(crate) const fn with_workspace(self, workspace: fn(&OpCx<'_>) -> Result<usize>) -> CudaKernel {
        CudaKernel { workspace: Some(workspace), ..self }
    }
}

inventory::collect!(CudaKernel);

/// Registers [`CudaKernel`]s with the provider.
macro_rules! cuda_kernels {
    ($($kernel:expr),* $(,)?) => {
        $(inventory::submit! { $kernel })*
    };
}

pub(crate) use cuda_kernels;
