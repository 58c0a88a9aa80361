//! The windows of a convolution as a matrix that is never written out as a whole.
//!
//! Row `(channel, kernel position)` and column `(output position)` hold the image value that the
//! kernel position meets there, or zero in the padding. The product packs it panel by panel.

use super::GemmError;

/// Where the windows of a convolution lie, over three spatial axes (depth, height, width). Images
/// of fewer axes set the leading ones to 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// The size of the image.
    pub input: [usize; 3],
    /// The size of the kernel.
    pub kernel: [usize; 3],
    /// From one window to the next.
    pub stride: [usize; 3],
    /// From one kernel position to the next.
    pub dilation: [usize; 3],
    /// Zeros before the image. What is needed behind it follows from the size of the output.
    pub pad: [usize; 3],
    /// The number of windows.
    pub output: [usize; 3],
}

impl Window {
    /// Values in one channel of the image.
    pub fn input_len(&self) -> usize {
        self.input.iter().product()
    }

    /// Positions in the kernel.
    pub fn kernel_len(&self) -> usize {
        self.kernel.iter().product()
    }

    /// Values in one channel of the output.
    pub fn output_len(&self) -> usize {
        self.output.iter().product()
    }

    /// Whether the window is a single point that visits each image value once, in order.
    pub fn is_pointwise(&self) -> bool {
        self.kernel == [1; 3] && self.stride == [1; 3] && self.pad == [0; 3] && self.input == self.output
    }

    /// The range of outputs along `axis` for which kernel position `at` meets the image.
    pub(crate) fn inside(&self, axis: usize, at: usize) -> (usize, usize) {
        let shift = at * self.dilation[axis];
        let (pad, stride, input) = (self.pad[axis], self.stride[axis], self.input[axis]);
        // Divisions are slow, and most strides are 1.
        let windows = |len: usize| if stride == 1 { len } else { len.div_ceil(stride) };
        let first = windows(pad.saturating_sub(shift));
        let end = windows((input + pad).saturating_sub(shift)).min(self.output[axis]);
        (first.min(end), end)
    }

    /// The image index that output `index` meets at kernel position `at`; only for an output that
    /// [`Window::inside`] has.
    pub(crate) fn source(&self, axis: usize, index: usize, at: usize) -> usize {
        (index * self.stride[axis] + at * self.dilation[axis]).saturating_sub(self.pad[axis])
    }
}

/// The matrix of windows over the `channels` of one image.
#[derive(Clone, Copy, Debug)]
pub struct Im2col<'a> {
    pub(super) image: &'a [f32],
    pub(super) channels: usize,
    pub(super) window: Window,
    /// Channels in an element of the image.
    pub(super) terms: usize,
}

impl<'a> Im2col<'a> {
    /// The windows over `image`, which holds `channels` of the window's input size.
    ///
    /// # Errors
    ///
    /// When `image` is too short or a stride is zero.
    pub fn new(image: &'a [f32], channels: usize, window: Window) -> Result<Self, GemmError> {
        let needed = channels.saturating_mul(window.input_len());
        if image.len() < needed {
            return Err(GemmError::TooShort { what: "an image", needed, len: image.len() });
        }
        if window.stride.contains(&0) {
            return Err(GemmError::Shape("a convolution's stride is zero"));
        }
        Ok(Im2col { image, channels, window, terms: 1 })
    }

    /// The windows over an image whose elements are pairs of `channels`, as [`super::pair_rows`]
    /// writes them: their rows are ordered by pair, kernel position and channel of the pair.
    ///
    /// # Errors
    ///
    /// When `image` is too short, there are not as many channels as two to a pair, or a stride is
    /// zero.
    pub(crate) fn of_pairs(image: &'a [f32], channels: usize, window: Window) -> Result<Self, GemmError> {
        if !channels.is_multiple_of(2) {
            return Err(GemmError::Shape("a channel has no other to pair with"));
        }
        let windows = Im2col::new(image, channels / 2, window)?;
        Ok(Im2col { channels, terms: 2, ..windows })
    }

    /// Rows of the matrix: channels times kernel positions.
    pub fn rows(&self) -> usize {
        self.channels * self.window.kernel_len()
    }

    /// Columns of the matrix: output positions.
    pub fn columns(&self) -> usize {
        self.window.output_len()
    }
}
