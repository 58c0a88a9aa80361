//! Neural-network kernels: convolution, pooling, recurrent layers, attention.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as; indices, lengths and positions that come as tensors are checked before their first use"
)]

mod attention;
mod attention_cache;
mod attention_mask;
mod attention_reach;
mod causal_conv;
mod conv;
mod conv_depthwise;
mod conv_gradients;
mod conv_half;
mod conv_integer;
mod conv_integer_to_float;
mod conv_nhwc;
mod conv_reference;
mod conv_separable;
mod conv_transpose;
mod deform_conv;
mod flex_attention;
mod gates;
mod grid_attention;
mod gru;
mod linear_attention;
mod lstm;
mod max_unpool;
mod pool;
mod pool_global;
mod pool_nhwc;
mod pool_quantized;
mod pool_reference;
mod pool_windows;
mod recurrent;
mod recurrent_layer;
mod recurrent_step;
mod rnn;
mod rotary;

use ort_core::dim::Dim;
use ort_core::ep::CompileCx;
use ort_core::ops::nn::geometry::{WindowAxis, Windows};
use ort_core::{Result, ensure, error};

use ort_cpu_gemm::Window;

/// Returns the windows of a convolution whose weight has this shape.
fn windows_of(cx: &CompileCx<'_>, weight: &[usize]) -> Result<Windows> {
    ensure!(weight.len() >= 3, InvalidGraph, "a weight of rank {}", weight.len());
    let kernel: Vec<Dim> = weight[2..].iter().map(|&size| Dim::constant(size as i64)).collect();
    Windows::new(cx.attrs(), &kernel)
}

/// Converts axes to the three-axis window of the GEMM library. Missing leading axes get size 1.
fn window_of(axes: &[WindowAxis]) -> Result<Window> {
    let mut window = Window {
        input: [1; 3],
        kernel: [1; 3],
        stride: [1; 3],
        dilation: [1; 3],
        pad: [0; 3],
        output: [1; 3],
    };
    let first = 3_usize.checked_sub(axes.len());
    let first = first.ok_or_else(|| error!(InvalidArgument, "windows over {} axes", axes.len()))?;
    for (at, axis) in axes.iter().enumerate() {
        let at = first + at;
        window.input[at] = axis.input;
        window.kernel[at] = axis.kernel;
        window.stride[at] = axis.stride;
        window.dilation[at] = axis.dilation;
        window.pad[at] = axis.pads[0];
        window.output[at] = axis.output;
    }
    Ok(window)
}
