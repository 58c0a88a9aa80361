//! The sizes of a convolution, from shapes and ONNX's attributes.

use ort_cpu_gemm::{GemmError, Window};

/// The attributes of ONNX's Conv and ConvTranspose, with automatic padding already resolved. An
/// empty list means the default: strides and dilations of 1, no padding.
#[derive(Clone, Copy, Debug, Default)]
pub struct ConvAttributes<'a> {
    /// The stride from one window to the next, per spatial axis.
    pub strides: &'a [usize],
    /// The dilation, per spatial axis.
    pub dilations: &'a [usize],
    /// Zeros before each spatial axis, then zeros after each.
    pub pads: &'a [usize],
    /// Elements added after each spatial axis of a transposed convolution's output.
    pub output_padding: &'a [usize],
    /// Groups of channels that are convolved separately; zero counts as one.
    pub groups: usize,
}

/// The sizes of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvGeometry {
    /// Images in the batch.
    pub batch: usize,
    /// Input channels, over all groups.
    pub channels: usize,
    /// Output channels, over all groups.
    pub filters: usize,
    /// Groups of channels.
    pub groups: usize,
    /// The geometry of the windows. In a transposed convolution, the windows are on the output.
    pub window: Window,
    pub(super) spatial: usize,
}

impl ConvGeometry {
    /// Returns the geometry of a convolution of `image` (N, C, D1, ...) with `weight` (M, C/group,
    /// k1, ...).
    ///
    /// # Errors
    ///
    /// If the shapes or attributes do not match, or there are more than three spatial axes.
    pub fn new(image: &[usize], weight: &[usize], attributes: &ConvAttributes) -> Result<Self, GemmError> {
        let (mut geometry, pads) = ConvGeometry::common(image, weight, attributes)?;
        if geometry.channels != weight[1] * geometry.groups {
            return Err(GemmError::Shape("a convolution's weight does not have the image's channels"));
        }
        geometry.filters = weight[0];
        if !geometry.filters.is_multiple_of(geometry.groups) {
            return Err(GemmError::Shape(
                "the number of filters of a convolution is not a multiple of its groups",
            ));
        }
        for axis in 0..3 {
            let window = &mut geometry.window;
            let reach = extent(window.kernel[axis], window.dilation[axis])?;
            let padded = window.input[axis] + window.pad[axis] + pads[axis];
            window.output[axis] = match padded >= reach {
                true => (padded - reach) / window.stride[axis] + 1,
                false => 0,
            };
        }
        geometry.checked()
    }

    /// Returns the geometry of a transposed convolution of `image` (N, C, D1, ...) with `weight`
    /// (C, M/group, k1, ...). The size of the output follows ONNX's ConvTranspose:
    /// `stride * (size - 1) + output_padding + (kernel - 1) * dilation + 1 - pads`.
    ///
    /// # Errors
    ///
    /// As [`ConvGeometry::new`].
    pub fn transposed(
        image: &[usize],
        weight: &[usize],
        attributes: &ConvAttributes,
    ) -> Result<Self, GemmError> {
        let (mut geometry, pads) = ConvGeometry::common(image, weight, attributes)?;
        if geometry.channels != weight[0] || !weight[0].is_multiple_of(geometry.groups) {
            return Err(GemmError::Shape("a convolution's weight does not have the image's channels"));
        }
        geometry.filters = weight[1] * geometry.groups;
        let extra = axes(attributes.output_padding, geometry.spatial, 0)?;
        let window = &mut geometry.window;
        window.output = window.input;
        for axis in 0..3 {
            let reach = extent(window.kernel[axis], window.dilation[axis])?;
            let whole = window.stride[axis] * window.output[axis].saturating_sub(1) + extra[axis] + reach;
            window.input[axis] = match window.output[axis] {
                0 => 0,
                _ => whole.saturating_sub(window.pad[axis] + pads[axis]),
            };
        }
        geometry.checked()
    }

    /// Returns the geometry if none of the arrays that it implies is too large to address.
    fn checked(self) -> Result<Self, GemmError> {
        let window = &self.window;
        let steps = [self.channels / self.groups, len_or_max(&window.kernel)];
        let output = len_or_max(&window.output);
        let sizes = [
            [self.batch, self.channels, len_or_max(&window.input)],
            [self.batch, self.filters, output],
            [self.filters, steps[0], steps[1]],
            [steps[0], steps[1], output],
            [self.filters, len_or_max(&window.kernel), output],
        ];
        match sizes.iter().all(|size| len_or_max(size) < LARGEST) {
            true => Ok(self),
            false => Err(GemmError::Shape("a convolution's arrays are too large to address")),
        }
    }

    /// Returns what both kinds of convolution share: everything but the filters and the size of the
    /// output. Also returns the padding after each axis.
    fn common(
        image: &[usize],
        weight: &[usize],
        attributes: &ConvAttributes,
    ) -> Result<(Self, [usize; 3]), GemmError> {
        let spatial = image.len().wrapping_sub(2);
        if !(1..=3).contains(&spatial) || weight.len() != image.len() {
            return Err(GemmError::Shape(
                "a convolution has one to three spatial axes, image and weight alike",
            ));
        }
        let attribute =
            [attributes.strides, attributes.dilations, attributes.pads, attributes.output_padding];
        let mut sizes = attribute.iter().copied().chain([image, weight]).flatten();
        if sizes.any(|size| *size >= LARGEST_AXIS) {
            return Err(GemmError::Shape("a convolution's size or attribute is too large"));
        }
        let (before, behind) = attributes.pads.split_at(attributes.pads.len() / 2);
        let window = Window {
            input: axes(&image[2..], spatial, 1)?,
            kernel: axes(&weight[2..], spatial, 1)?,
            stride: axes(attributes.strides, spatial, 1)?,
            dilation: axes(attributes.dilations, spatial, 1)?,
            pad: axes(before, spatial, 0)?,
            output: [1; 3],
        };
        if window.stride.contains(&0) || window.dilation.contains(&0) {
            return Err(GemmError::Shape("a convolution's stride or dilation is zero"));
        }
        let geometry = ConvGeometry {
            batch: image[0],
            channels: image[1],
            filters: 0,
            groups: attributes.groups.max(1),
            window,
            spatial,
        };
        Ok((geometry, axes(behind, spatial, 0)?))
    }

    /// Returns the input channels of a group.
    pub fn group_channels(&self) -> usize {
        self.channels / self.groups
    }

    /// Returns the output channels of a group.
    pub fn group_filters(&self) -> usize {
        self.filters / self.groups
    }

    /// Returns the spatial size of a convolution's output, without leading ones.
    pub fn output_size(&self) -> &[usize] {
        &self.window.output[3 - self.spatial..]
    }

    /// Returns the spatial size of a transposed convolution's output, without leading ones.
    pub fn transposed_output_size(&self) -> &[usize] {
        &self.window.input[3 - self.spatial..]
    }
}

/// A bound on single sizes and attributes, so that sums and products of two of them cannot
/// overflow.
const LARGEST_AXIS: usize = 1 << (usize::BITS / 2 - 2);

/// A bound on the elements of an array.
const LARGEST: usize = isize::MAX as usize / 16;

fn len_or_max(sizes: &[usize]) -> usize {
    if sizes.contains(&0) { 0 } else { sizes.iter().fold(1, |len: usize, size| len.saturating_mul(*size)) }
}

/// Returns `values` right-aligned in three axes, with `default` in front or if the list is empty.
fn axes(values: &[usize], spatial: usize, default: usize) -> Result<[usize; 3], GemmError> {
    let mut axes = [default; 3];
    if !values.is_empty() {
        if values.len() != spatial {
            return Err(GemmError::Shape("a convolution's attribute does not have a value for each axis"));
        }
        axes[3 - spatial..].copy_from_slice(values);
    }
    Ok(axes)
}

/// Returns the extent of a dilated kernel.
fn extent(kernel: usize, dilation: usize) -> Result<usize, GemmError> {
    match kernel {
        0 => Err(GemmError::Shape("a convolution's kernel is empty")),
        _ => Ok((kernel - 1).saturating_mul(dilation).saturating_add(1)),
    }
}
