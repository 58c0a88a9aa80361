//! Geometry of the windows of a convolution over three axes.

/// The geometry of a convolution's windows over three spatial axes (depth, height, width). Images
/// of fewer axes set the leading ones to 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// The size of the image.
    pub input: [usize; 3],
    /// The size of the kernel.
    pub kernel: [usize; 3],
    /// The stride from one window to the next.
    pub stride: [usize; 3],
    /// The dilation: the distance from one kernel position to the next.
    pub dilation: [usize; 3],
    /// Zeros before the image. The padding after it follows from the size of the output.
    pub pad: [usize; 3],
    /// The number of windows.
    pub output: [usize; 3],
}

impl Window {
    /// Returns the elements of one channel of the image.
    #[inline]
    pub fn input_len(&self) -> usize {
        self.input.iter().product()
    }

    /// Returns the positions of the kernel.
    #[inline]
    pub fn kernel_len(&self) -> usize {
        self.kernel.iter().product()
    }

    /// Returns the elements of one channel of the output.
    #[inline]
    pub fn output_len(&self) -> usize {
        self.output.iter().product()
    }

    /// Whether the convolution is pointwise: a single kernel position that visits each image value
    /// once, in order.
    #[inline]
    pub fn is_pointwise(&self) -> bool {
        self.kernel == [1; 3] && self.stride == [1; 3] && self.pad == [0; 3] && self.input == self.output
    }

    /// Returns the range of outputs along `axis` for which kernel position `at` is inside the
    /// image.
    #[inline]
    pub fn inside(&self, axis: usize, at: usize) -> (usize, usize) {
        let shift = at * self.dilation[axis];
        let (pad, stride, input) = (self.pad[axis], self.stride[axis], self.input[axis]);
        // Division is slow, and most strides are 1.
        let windows = |len: usize| if stride == 1 { len } else { len.div_ceil(stride) };
        let first = windows(pad.saturating_sub(shift));
        let end = windows((input + pad).saturating_sub(shift)).min(self.output[axis]);
        (first.min(end), end)
    }

    /// Returns the image index that output `index` reads at kernel position `at`. Valid only for
    /// outputs in the range of [`Window::inside`].
    #[inline]
    pub fn source(&self, axis: usize, index: usize, at: usize) -> usize {
        (index * self.stride[axis] + at * self.dilation[axis]).saturating_sub(self.pad[axis])
    }
}
