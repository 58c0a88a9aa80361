//! im2col: the windows of a convolution as a virtual matrix.
//!
//! Row `(channel, kernel position)` and column `(output position)` hold the image value that the
//! kernel position reads there, or zero in the padding. GEMM packs the matrix panel by panel, so it
//! never exists as a whole.

use super::GemmError;

pub use ort_cpu_vector::conv_window::Window;

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
        // Packing divides by the stride.
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
    pub fn of_pairs(image: &'a [f32], channels: usize, window: Window) -> Result<Self, GemmError> {
        if !channels.is_multiple_of(2) {
            return Err(GemmError::Shape("a channel has no other to pair with"));
        }
        // A pair is one element, so for addresses the image has half as many channels.
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
