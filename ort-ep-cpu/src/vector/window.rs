//! The geometry of a window that slides over a plane.

/// The geometry of a convolution or pooling of one plane; each pair is height, width (in 1-D the height is 1).
///
/// Padding after the input is implied: places beyond the input count as padding as far as `output` reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// The size of the input plane.
    pub input: [usize; 2],
    /// The size of the output plane.
    pub output: [usize; 2],
    /// The size of the kernel.
    pub kernel: [usize; 2],
    /// The step from one output to the next, in input places; at least 1.
    pub strides: [usize; 2],
    /// The step from one tap of the kernel to the next, in input places; at least 1.
    pub dilations: [usize; 2],
    /// The padding above and on the left.
    pub pads: [usize; 2],
}

impl Window {
    /// How many places along an axis all windows reach over, with the padding.
    pub fn extent(&self, axis: usize) -> usize {
        let last = self.output[axis].saturating_sub(1) * self.strides[axis];
        last + self.kernel[axis].saturating_sub(1) * self.dilations[axis] + 1
    }
}
