//! Kernels by operator family. Given the shapes of a run, a kernel returns the launches that
//! compute its outputs.

mod arg;
mod attend;
mod attention;
mod bits;
mod col2im;
mod conv;
mod conv_integer;
mod cumulative;
mod deform_conv;
mod einsum;
mod elements;
mod elementwise;
mod embed;
mod finish;
mod fp8_fp4;
mod gather;
mod gather_blocks;
mod gemm;
mod grid_sample;
mod group_query;
mod heads;
mod integer;
mod kernel;
mod linear_attention;
mod local;
mod matmul;
mod matmul_integer;
mod matmul_nbits;
mod max_unpool;
mod movement;
mod multi_head;
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
mod rows;
mod select;
mod softmax;
mod sort;
mod top_k;
mod training;
mod type_tags;
mod unique;
mod warpgroups;

pub(crate) use gemm::has_activation;
pub use kernel::CudaKernel;
pub(crate) use kernel::{Counted, MOST_AXES, count, cuda_kernels};

/// Returns all kernels of this build, those that follow from operator records last.
pub(crate) fn all() -> impl Iterator<Item = &'static CudaKernel> {
    inventory::iter::<CudaKernel>.into_iter().chain(reduce::derived()).chain(elementwise::derived())
}
