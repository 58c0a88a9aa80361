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
mod conv_quantized;
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
mod kernel;
mod limit;
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
mod rows;
mod scatter;
mod softmax;
mod tiles;
mod top_k;
mod windows;

pub use kernel::WgpuKernel;
pub(crate) use kernel::wgpu_kernels;

/// Returns all kernels of this build, those that follow from operator records last.
pub(crate) fn all() -> impl Iterator<Item = &'static WgpuKernel> {
    inventory::iter::<WgpuKernel>.into_iter().chain(reduce::derived()).chain(elementwise::derived())
}
