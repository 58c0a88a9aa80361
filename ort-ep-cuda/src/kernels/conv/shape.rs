//! Convolutions by their sizes, and the parameters that kernels take of them.

use std::ops::Deref;

use ort_core::dtype::DType;
use ort_core::ops::fused::activation::Activation;
use ort_core::ops::nn::geometry::WindowAxis;
use ort_core::ops::nn::problem::{ConvShape, PixelLayout, WindowAxes, volume};
use ort_core::{Result, error};
use ort_gpu::read;

use super::super::gemm::finish;
use crate::launch::{Launch, OpCx};

/// The most filters of a group for which each result gets a thread: a tile would be almost empty.
pub(super) const FEW_FILTERS: usize = 2;

/// The most taps, summed over the axes, that the tensor core kernels have mask bits for.
const MOST_TAPS: usize = 31;

/// Returns the window sizes in the order of the kernels' structures: image, result, kernel,
/// strides, dilations, leading padding.
pub(in crate::kernels) fn window_sizes(axes: &WindowAxes) -> Vec<usize> {
    let of: [fn(&WindowAxis) -> usize; 6] = [
        |axis| axis.input,
        |axis| axis.output,
        |axis| axis.kernel,
        |axis| axis.stride,
        |axis| axis.dilation,
        |axis| axis.pads[0],
    ];
    of.iter().flat_map(|of| axes.iter().map(of)).collect()
}

/// Returns the suffix of a float type in entry names.
pub(in crate::kernels) fn suffix_of(dtype: DType) -> Result<&'static str> {
    match dtype {
        DType::F32 => Ok("f32"),
        DType::F16 => Ok("f16"),
        DType::BF16 => Ok("bf16"),
        other => Err(error!(NotImplemented, "windows over an image of {other} are not supported")),
    }
}

/// Whether the tensor core kernels have mask bits for all taps.
pub(in crate::kernels) fn taps_fit(axes: &WindowAxes) -> bool {
    axes.iter().map(|axis| axis.kernel).fold(0, usize::saturating_add) <= MOST_TAPS
}

/// A convolution, by its sizes.
pub(in crate::kernels) struct Conv(pub(in crate::kernels) ConvShape);

impl Deref for Conv {
    type Target = ConvShape;

    fn deref(&self) -> &ConvShape {
        &self.0
    }
}

impl Conv {
    /// The sizes of `Conv` and `FusedConv`, which are NCHW.
    pub(super) fn second(cx: &OpCx<'_>) -> Result<Conv> {
        read::conv(cx, PixelLayout::ChannelsFirst).map(Conv)
    }

    /// The sizes of `NhwcConv`.
    pub(super) fn last(cx: &OpCx<'_>) -> Result<Conv> {
        read::conv(cx, PixelLayout::ChannelsLast).map(Conv)
    }

    /// The sizes of `ConvTranspose`.
    pub(super) fn transposed(cx: &OpCx<'_>) -> Result<Conv> {
        read::conv_transpose(cx).map(Conv)
    }

    /// Returns the kernel family, which is also the prefix of its entries.
    pub(super) fn family(&self) -> &'static str {
        match self.layout {
            PixelLayout::ChannelsFirst => "conv",
            PixelLayout::ChannelsLast => "conv_pixels",
        }
    }

    /// Appends the kernels' structures `Convolution` and `Finish` to a launch.
    pub(super) fn with_epilogue(&self, launch: Launch, cx: &OpCx<'_>, cut: [usize; 3]) -> Result<Launch> {
        let mut sizes = vec![self.batch, self.groups, self.channels, self.filters];
        sizes.extend(window_sizes(&self.axes));
        sizes.extend(cut);
        let finish = finish(Activation::of_attributes(cx.attrs)?.as_ref(), 1.0, 1.0)?;
        Ok(launch.uints::<25>(&sizes)?.bytes(&finish))
    }

    /// Returns the number of window positions in all images.
    pub(super) fn positions(&self) -> usize {
        self.batch.saturating_mul(volume(&self.axes, |axis| axis.output))
    }
}
