//! im2col: the windows of a convolution as a virtual matrix.
//!
//! Row `(channel, kernel position)` and column `(output position)` hold the image value that the
//! kernel position reads there, or zero in the padding. GEMM packs the matrix panel by panel, so it
//! never exists as a whole.

use super::GemmError;

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
    pub fn input_len(&self) -> usize {
        self.input.iter().product()
    }

    /// Returns the positions of the kernel.
    pub fn kernel_len(&self) -> usize {
        self.kernel.iter().product()
    }

    /// Returns the elements of one channel of the output.
    pub fn output_len(&self) -> usize {
        self.output.iter().product()
    }

    /// Whether the convolution is pointwise: a single kernel position that visits each image value
    /// once, in order.
    pub fn is_pointwise(&self) -> bool {
        self.kernel == [1; 3] && self.stride == [1; 3] && self.pad == [0; 3] && self.input == self.output
    }

    /// Returns the range of outputs along `axis` for which kernel position `at` is inside the
    /// image.
    pub(crate) fn inside(&self, axis: usize, at: usize) -> (usize, usize) {
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
    pub(crate) fn source(&self, axis: usize, index: usize, at: usize) -> usize {
        (index * self.stride[axis] + at * self.dilation[axis]).saturating_sub(self.pad[axis])
    }
}

/// The im2col matrix of the `channels` of one image.
#[derive(Clone, Copy, Debug)]
pub struct Im2col<'a> {
    pub(super) image: &'a [f32],
    pub(super) channels: usize,
    pub(super) window: Window,
    /// Channels per element of the image: 2 for bf16 pairs.
    pub(super) terms: usize,
}

impl<'a> Im2col<'a> {
    /// Creates the matrix over `image`, which holds `channels` planes of the window's input size.
    ///
    /// # Errors
    ///
    /// If `image` is too short or a stride is zero.
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

    /// Creates the matrix over an image whose elements are bf16 pairs of channels, as
    /// [`super::pair_rows`] writes them. Its rows are ordered by pair, kernel position and channel
    /// within the pair.
    ///
    /// # Errors
    ///
    /// If `image` is too short, the number of channels is odd, or a stride is zero.
    pub(crate) fn of_pairs(image: &'a [f32], channels: usize, window: Window) -> Result<Self, GemmError> {
        if !channels.is_multiple_of(2) {
            return Err(GemmError::Shape("a channel has no other to pair with"));
        }
        let windows = Im2col::new(image, channels / 2, window)?;
        Ok(Im2col { channels, terms: 2, ..windows })
    }

    /// Returns the rows of the matrix: channels times kernel positions.
    pub fn rows(&self) -> usize {
        self.channels * self.window.kernel_len()
    }

    /// Returns the columns of the matrix: output positions.
    pub fn columns(&self) -> usize {
        self.window.output_len()
    }
}
