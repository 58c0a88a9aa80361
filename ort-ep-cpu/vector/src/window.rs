//! Geometry of a window that slides over a plane.

use std::ops::Range;

/// The geometry of a convolution or pooling of one plane. Each pair is height, width; in 1-D the
/// height is 1.
///
/// Padding after the input is implied: `output` may reach past the input, and positions there count
/// as padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// The size of the input plane.
    pub input: [usize; 2],
    /// The size of the output plane.
    pub output: [usize; 2],
    /// The size of the kernel.
    pub kernel: [usize; 2],
    /// The step from one output to the next, in input elements; at least 1.
    pub strides: [usize; 2],
    /// The step from one tap of the kernel to the next, in input elements; at least 1.
    pub dilations: [usize; 2],
    /// The padding above and on the left.
    pub pads: [usize; 2],
}

impl Window {
    /// Returns how many positions along an axis all windows cover, padding included.
    pub fn extent(&self, axis: usize) -> usize {
        let last = self.output[axis].saturating_sub(1) * self.strides[axis];
        last + self.kernel[axis].saturating_sub(1) * self.dilations[axis] + 1
    }

    /// Returns rows of the output as those of a plane of their own: the input rows that their
    /// windows cover, and the window over these.
    pub fn band(&self, rows: Range<usize>) -> (Range<usize>, Window) {
        let reach = self.kernel[0].saturating_sub(1) * self.dilations[0] + 1;
        let place = |padded: usize| padded.saturating_sub(self.pads[0]).min(self.input[0]);
        // Rows past the input are padding, which the window implies at its end.
        let end = if rows.is_empty() { 0 } else { place((rows.end - 1) * self.strides[0] + reach) };
        let start = place(rows.start * self.strides[0]).min(end);
        let window = Window {
            input: [end - start, self.input[1]],
            output: [rows.len(), self.output[1]],
            pads: [self.pads[0].saturating_sub(rows.start * self.strides[0]), self.pads[1]],
            ..*self
        };
        (start..end, window)
    }
}
