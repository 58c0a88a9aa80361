//! What a kernel answers with: dispatches.

use ort_core::ep::operand::{self, Arg};
use smallvec::SmallVec;

use crate::gpu::Limits;
use crate::pipelines::Program;

pub(crate) use ort_core::ep::operand::{Operand, Walk, strides};

/// A node with the shapes of a run. Kernels answer with dispatches, which are kept for runs of the
/// same shapes.
pub(crate) type OpCx<'a> = operand::OpCx<'a, Limits>;

/// A tensor of a dispatch, as it is bound.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorArg {
    pub(crate) arg: Arg,
    /// Bindings that it takes.
    pub(crate) windows: usize,
    /// Bits of an element.
    pub(crate) bits: u32,
    /// The place among the numbers where the element stands at which it begins in its first
    /// binding.
    pub(crate) base: usize,
}

/// One dispatch: the program, its tensors, numbers and workgroups.
#[derive(Clone, Debug)]
pub(crate) struct Dispatch {
    pub(crate) program: Program,
    pub(crate) tensors: SmallVec<[TensorArg; 8]>,
    pub(crate) numbers: Vec<u32>,
    pub(crate) workgroups: [u32; 3],
}
