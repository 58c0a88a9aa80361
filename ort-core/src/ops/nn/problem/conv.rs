//! Convolutions: `Conv` and its fused and quantized forms, `ConvTranspose`, and `DeformConv`.

use crate::dim::Dim;
use crate::ir::Attributes;
use crate::ops::nn::geometry::{WindowAxis, Windows};
use crate::{Result, ensure, error};

/// Windows over three axes. Leading axes that an image lacks have size 1.
pub type WindowAxes = [WindowAxis; 3];

/// The windows along an axis that an image lacks.
pub const NO_AXIS: WindowAxis =
    WindowAxis { input: 1, output: 1, kernel: 1, stride: 1, dilation: 1, pads: [0; 2] };

/// Extends windows to three axes.
///
/// # Errors
///
/// If there are more, or their coordinates do not fit 32 bits.
pub fn three_axes(axes: &[WindowAxis]) -> Result<WindowAxes> {
    for axis in axes {
        // Kernels compute coordinates in 32 bits, from the begin padding to the end of the last
        // window.
        let last = axis.output.saturating_mul(axis.stride).saturating_add(axis.input);
        let extent = axis.kernel.saturating_mul(axis.dilation).saturating_add(axis.pads.iter().sum());
        let fits = last.saturating_add(extent) < 1 << 31;
        ensure!(fits, NotImplemented, "windows as large as {axis:?} are beyond 32 bits");
    }
    match axes {
        [x] => Ok([NO_AXIS, NO_AXIS, *x]),
        [y, x] => Ok([NO_AXIS, *y, *x]),
        [z, y, x] => Ok([*z, *y, *x]),
        _ => Err(error!(NotImplemented, "windows over {} axes", axes.len())),
    }
}

/// The product of one number of all axes; `usize::MAX` on overflow.
pub fn volume(axes: &[WindowAxis], of: fn(&WindowAxis) -> usize) -> usize {
    axes.iter().map(of).fold(1, usize::saturating_mul)
}

/// The memory layout of images and filters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PixelLayout {
    /// NCHW.
    ChannelsFirst,
    /// NHWC: the channels of a pixel, or of a tap, are contiguous.
    ChannelsLast,
}

/// The sizes of images, or of filters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageShape {
    /// The number of images.
    pub batch: usize,
    /// The channels of an image.
    pub channels: usize,
    /// The spatial sizes.
    pub places: Vec<usize>,
}

impl ImageShape {
    /// Reads a shape.
    ///
    /// # Errors
    ///
    /// If it has fewer than two axes.
    pub fn new(shape: &[usize], layout: PixelLayout) -> Result<ImageShape> {
        let (batch, channels, places) = match (layout, shape) {
            (PixelLayout::ChannelsFirst, [batch, channels, places @ ..])
            | (PixelLayout::ChannelsLast, [batch, places @ .., channels]) => (batch, channels, places),
            _ => return Err(error!(InvalidArgument, "an image or filters of shape {shape:?}")),
        };
        Ok(ImageShape { batch: *batch, channels: *channels, places: places.to_vec() })
    }
}

/// The sizes of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvShape {
    /// Whether it is transposed: its windows slide over the result. `input` of an axis is the size
    /// of the image all the same.
    pub transposed: bool,
    /// The layout of image, filters and result.
    pub layout: PixelLayout,
    /// The windows.
    pub axes: WindowAxes,
    /// The number of images.
    pub batch: usize,
    /// The number of groups.
    pub groups: usize,
    /// The channels of a group.
    pub channels: usize,
    /// The filters of a group.
    pub filters: usize,
}

impl ConvShape {
    /// Reads a convolution of an image and filters of these shapes.
    ///
    /// # Errors
    ///
    /// If an attribute is out of range, or the shapes do not fit each other.
    pub fn new(
        attrs: &Attributes,
        image: &[usize],
        weight: &[usize],
        layout: PixelLayout,
    ) -> Result<ConvShape> {
        let (image, kernel, conv) = ConvShape::without_windows(attrs, [image, weight], layout, false)?;
        let windows = windows_of_sizes(attrs, &kernel.places)?;
        Ok(ConvShape { axes: three_axes(&windows.on(&image.places)?)?, ..conv })
    }

    /// Reads a convolution of NCHW images with filters of one tap, without the windows of the
    /// attributes.
    ///
    /// # Errors
    ///
    /// As [`ConvShape::new`].
    pub fn pointwise(attrs: &Attributes, image: &[usize], weight: &[usize]) -> Result<ConvShape> {
        let shapes = [image, weight];
        let (image, kernel, conv) =
            ConvShape::without_windows(attrs, shapes, PixelLayout::ChannelsFirst, false)?;
        let windows = windows_of_sizes(&Attributes::default(), &kernel.places)?;
        Ok(ConvShape { axes: three_axes(&windows.on(&image.places)?)?, ..conv })
    }

    /// Reads a transposed convolution of NCHW images.
    ///
    /// # Errors
    ///
    /// As [`ConvShape::new`].
    pub fn transposed(attrs: &Attributes, image: &[usize], weight: &[usize]) -> Result<ConvShape> {
        let shapes = [image, weight];
        let (image, kernel, conv) =
            ConvShape::without_windows(attrs, shapes, PixelLayout::ChannelsFirst, true)?;
        let windows = windows_of_sizes(attrs, &kernel.places)?;
        let mut axes = three_axes(&windows.transposed_on(attrs, &image.places)?)?;
        // The windows go from the result to the image. From here on, `input` is the image again.
        axes.iter_mut().for_each(|axis| std::mem::swap(&mut axis.input, &mut axis.output));
        Ok(ConvShape { axes, ..conv })
    }

    fn without_windows(
        attrs: &Attributes,
        [image, weight]: [&[usize]; 2],
        layout: PixelLayout,
        transposed: bool,
    ) -> Result<(ImageShape, ImageShape, ConvShape)> {
        let (images, kernel) = (ImageShape::new(image, layout)?, ImageShape::new(weight, layout)?);
        let groups = usize::try_from(attrs.int("group")?).ok().filter(|groups| *groups > 0);
        let groups = groups.ok_or_else(|| error!(InvalidGraph, "a convolution's group is not positive"))?;
        let channels = images.channels;
        let fits = match transposed {
            false => {
                kernel.channels.checked_mul(groups) == Some(channels) && kernel.batch.is_multiple_of(groups)
            }
            true => channels == kernel.batch && channels.is_multiple_of(groups),
        };
        ensure!(fits, InvalidArgument, "shapes {image:?} and {weight:?} do not match {groups} groups");
        // The weights of a transposed convolution are [channels, filters of a group, kernel...].
        let filters = if transposed { kernel.channels } else { kernel.batch / groups };
        let (axes, batch, channels) = ([NO_AXIS; 3], images.batch, channels / groups);
        let conv = ConvShape { transposed, layout, axes, batch, groups, channels, filters };
        Ok((images, kernel, conv))
    }

    /// The taps of a filter.
    pub fn taps(&self) -> usize {
        volume(&self.axes, |axis| axis.kernel)
    }

    /// The elements of the image that a result combines.
    pub fn depth(&self) -> usize {
        self.channels.saturating_mul(self.taps())
    }
}

/// The windows of a convolution whose kernel has these spatial sizes.
fn windows_of_sizes(attrs: &Attributes, kernel: &[usize]) -> Result<Windows> {
    let kernel: Vec<Dim> = kernel.iter().map(|size| Dim::constant(*size as i64)).collect();
    Windows::new(attrs, &kernel)
}

/// The sizes of a deformable convolution, as im2col and a GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeformConv {
    /// The windows.
    pub axes: WindowAxes,
    /// The number of images.
    pub batch: usize,
    /// The channels of all groups.
    pub channels: usize,
    /// The spatial axes of the image.
    pub rank: usize,
    /// The groups of channels that share their offsets.
    pub offset_groups: usize,
}

impl DeformConv {
    /// Reads a node on an image and filters of these shapes.
    ///
    /// # Errors
    ///
    /// If an attribute is out of range, or the shapes do not fit each other.
    pub fn new(attrs: &Attributes, image: &[usize], weight: &[usize]) -> Result<DeformConv> {
        let ([batch, channels, sizes @ ..], [_, _, kernel @ ..]) = (image, weight) else {
            return Err(error!(InvalidArgument, "a convolution of shapes {image:?} and {weight:?}"));
        };
        let axes = three_axes(&windows_of_sizes(attrs, kernel)?.on(sizes)?)?;
        let groups = usize::try_from(attrs.int("offset_group")?).ok();
        // A group of offsets serves the same number of channels each.
        let groups = groups.filter(|groups| *groups > 0 && channels.is_multiple_of(*groups));
        let missing = || error!(InvalidGraph, "offset_group does not divide the channels");
        let offset_groups = groups.ok_or_else(missing)?;
        Ok(DeformConv { axes, batch: *batch, channels: *channels, rank: sizes.len(), offset_groups })
    }

    /// The taps of a filter.
    pub fn taps(&self) -> usize {
        volume(&self.axes, |axis| axis.kernel)
    }

    /// The shape of the sampled columns: for each image, channel and tap, the samples at all
    /// positions.
    pub fn columns(&self) -> [usize; 3] {
        let pixels = volume(&self.axes, |axis| axis.output);
        [self.batch, self.channels.saturating_mul(self.taps()), pixels]
    }

    /// Refuses offsets and a mask of other sizes than the windows need.
    pub fn check_offsets(&self, offsets: usize, mask: Option<usize>) -> Result<()> {
        let pixels = volume(&self.axes, |axis| axis.output);
        let moved = [self.batch, self.offset_groups, self.taps(), pixels];
        let moved = moved.into_iter().fold(1, usize::saturating_mul);
        // Offsets have one number for each spatial axis. A saturated count fits no tensor.
        let fits = offsets == moved.saturating_mul(self.rank) && mask.is_none_or(|mask| mask == moved);
        ensure!(fits, InvalidArgument, "the shapes of image, weight, offset and mask do not match");
        Ok(())
    }
}
