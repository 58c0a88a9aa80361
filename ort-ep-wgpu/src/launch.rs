//! Dispatch descriptors, which kernels compute from the shapes of a run.

use ort_gpu::Arg;
use smallvec::SmallVec;

use crate::gpu::Limits;
use crate::program::Program;

pub(crate) use ort_gpu::{Operand, Walk, strides};

/// A node with the shapes of a run. A kernel returns its dispatches, which are cached for runs of
/// the same shapes.
pub(crate) type OpCx<'a> = ort_gpu::OpCx<'a, Limits>;

/// A tensor of a dispatch and its bindings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorArg {
    pub(crate) arg: Arg,
    /// The number of bindings that it takes.
    pub(crate) windows: usize,
    /// The bits of an element.
    pub(crate) bits: u32,
    /// The uniform word that receives the index of its first element within its first binding.
    pub(crate) base: usize,
}

/// One dispatch: program, tensors, uniforms and workgroup counts.
#[derive(Clone, Debug)]
pub(crate) struct Dispatch {
    pub(crate) program: Program,
    pub(crate) tensors: SmallVec<[TensorArg; 8]>,
    pub(crate) numbers: Vec<u32>,
    pub(crate) workgroups: [u32; 3],
}
