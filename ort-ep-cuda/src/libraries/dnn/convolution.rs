//! Convolutions as cuDNN computes them: passes, shapes, epilogues and the choice of an algorithm.

use std::ffi::{c_int, c_void};

/// A handle or descriptor of the library.
pub(super) type Handle = *mut c_void;

/// Which of image, filters and result is computed from the other two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Pass {
    /// The result.
    Forward,
    /// The image: the data gradient, which is also a transposed convolution.
    Data,
    /// The filter gradient.
    Filter,
}

/// How to choose the algorithm of a convolution, in ONNX Runtime's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Search {
    /// Time all of them.
    Exhaustive,
    /// Trust the library's heuristic.
    Heuristic,
    /// Take `IMPLICIT_PRECOMP_GEMM`, or `ALGO_1` for gradients.
    Default,
}

/// The options for convolutions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ConvOptions {
    pub(crate) search: Search,
    /// Whether a workspace may use all free memory.
    pub(crate) max_workspace: bool,
    /// Whether a 1-D convolution runs as NC1D rather than NCD1.
    pub(crate) pads_to_nc1d: bool,
}

impl Default for ConvOptions {
    fn default() -> ConvOptions {
        ConvOptions { search: Search::Exhaustive, max_workspace: true, pads_to_nc1d: false }
    }
}

/// The type of all tensors of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum DnnElement {
    F32,
    F16,
    Bf16,
}

/// A convolution over at least two axes with symmetric padding, as types and shapes determine it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Convolution {
    pub(crate) pass: Pass,
    pub(crate) element: DnnElement,
    /// Whether float32 may be rounded to TF32.
    pub(crate) tf32: bool,
    /// Whether image and filters are NHWC. Shapes list the channels second either way.
    pub(crate) channels_last: bool,
    pub(crate) groups: usize,
    pub(crate) x: Vec<usize>,
    pub(crate) w: Vec<usize>,
    pub(crate) y: Vec<usize>,
    pub(crate) pads: Vec<usize>,
    pub(crate) strides: Vec<usize>,
    pub(crate) dilations: Vec<usize>,
}

/// The epilogue of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// None: write the result.
    Plain,
    /// Accumulate onto the result's memory.
    Onto,
    /// Add a bias and an optional addend, then apply ReLU.
    Relu,
}

/// An algorithm and the bytes of its workspace.
pub(super) type Algorithm = (c_int, usize);
