//! The operands of a convolution, and the part of them that one group reads.

use super::ConvGeometry;
use ort_cpu_gemm::{GemmError, Origin, Step};
use ort_cpu_vector::winograd::Tile;

/// The role of the packed weights in the GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightSide {
    /// Filters are rows and pixels are columns: right for all but the smallest images.
    Lhs,
    /// Pixels are rows and filters are columns.
    Rhs,
    /// The B operand of the GEMMs between the Winograd transforms. Only for 3-by-3 kernels with
    /// strides of 1.
    Transformed(Tile),
}

/// The operands of a convolution.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// The images (N, C, D1, ...).
    pub image: &'a [f32],
    /// The packed weights, for the same `Cpu` and channels.
    pub weights: &'a [f32],
    /// The variant that the weights were packed for. A transposed convolution has only
    /// [`WeightSide::Lhs`].
    pub side: WeightSide,
    /// The epilogue. A row is a channel: [`Step::RowBias`] holds a value for each of M channels.
    /// [`Step::Residual`] holds an array of the size of the output, with a row stride of its
    /// spatial size. [`Step::Held`] requires [`WeightSide::Lhs`].
    pub epilogue: &'a [Step<'a>],
}

/// Returns the channels and the packed weights of one group of one image. A group has
/// `weights_len` packed weights.
pub(super) fn operands<'a>(
    geometry: &ConvGeometry,
    input: &Input<'a>,
    weights_len: usize,
    index: usize,
) -> Result<(&'a [f32], &'a [f32]), GemmError> {
    let image_len = geometry.group_channels() * geometry.window.input_len();
    let pixels = part("a convolution's image", input.image, index * image_len, image_len)?;
    let group = index % geometry.groups;
    Ok((pixels, part("packed weights", input.weights, group * weights_len, weights_len)?))
}

/// Returns where the rows of one group of one image are in the slices of the epilogue.
pub(super) fn origin(geometry: &ConvGeometry, index: usize) -> Origin {
    let (image, group) = (index / geometry.groups, index % geometry.groups);
    let bias_row = group * geometry.group_filters();
    Origin { bias_row, residual_row: image * geometry.filters + bias_row }
}

/// Returns `len` elements from `first` on, or an error that names the slice.
pub(super) fn part<'a>(
    what: &'static str,
    values: &'a [f32],
    first: usize,
    len: usize,
) -> Result<&'a [f32], GemmError> {
    let needed = first + len;
    values.get(first..needed).ok_or(GemmError::TooShort { what, needed, len: values.len() })
}
