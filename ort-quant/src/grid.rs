//! Affine quantization by blocks: the grid of a block, its rounding, and the sizes of the results.
//!
//! A grid stands for the values `(code - zero_point) * scale`. The order of the operations decides
//! about the last bit, so it is that of ONNX Runtime: the zero point comes from the scale in
//! float32, the codes from the reciprocal of the scale as it is stored.

use ort_core::{Error, ErrorKind, Result};

use crate::weight::Weight;

/// The bits of a quantized value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bits {
    /// 2 bits, four values in a byte.
    Two,
    /// 3 bits, two values in a byte: each in the place of 4 bits, because kernels have no others.
    /// For `MatMulNBits` with zero points.
    Three,
    /// 4 bits, two values in a byte.
    Four,
    /// 8 bits.
    Eight,
}

impl Bits {
    /// Returns the number of bits.
    pub fn count(self) -> usize {
        match self {
            Bits::Two => 2,
            Bits::Three => 3,
            Bits::Four => 4,
            Bits::Eight => 8,
        }
    }

    /// The bits that a value takes.
    pub fn stored(self) -> usize {
        self.count().next_power_of_two()
    }

    /// The number of values in a byte.
    pub(crate) fn per_byte(self) -> usize {
        8 / self.stored()
    }

    /// The zero point of symmetric blocks.
    pub(crate) fn middle(self) -> u8 {
        1 << (self.count() - 1)
    }

    /// The largest value.
    pub(crate) fn largest(self) -> u8 {
        u8::MAX >> (8 - self.count())
    }

    /// A byte of values that are all [`Bits::middle`].
    pub(crate) fn middle_byte(self) -> u8 {
        match self {
            Bits::Two => 0xaa,
            // As of 4 bits.
            Bits::Three | Bits::Four => 0x88,
            Bits::Eight => 0x80,
        }
    }
}

/// Where the values of a quantized matrix are. The first value of a byte is in its lowest bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockLayout {
    /// The inputs of `MatMulNBits`, column by column: values `[n, blocks, block_size]`, scales
    /// `[n, blocks]`, zero points `[n, blocks]` with each row padded to a byte. Values are
    /// unsigned. Blocks have 16, 32, 64, 128 or 256 rows.
    MatMulNBits,
    /// The inputs of `DequantizeLinear` in row-major order: values `[k, n]`, scales and zero points
    /// `[blocks, n]`. Symmetric values are signed, with zero point 0. Blocks have any size.
    Qdq,
}

/// Quantizes a matrix of `k` rows and `n` columns by blocks of each column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockQuantizer {
    /// The rows: the inner dimension of the matmul.
    pub k: usize,
    /// The columns.
    pub n: usize,
    /// The rows of a block. The last block of a column may have fewer.
    pub block_size: usize,
    /// The bits of a value.
    pub bits: Bits,
    /// Whether blocks have no zero point of their own: zero is in the middle of the range.
    pub is_symmetric: bool,
    /// Where the results go.
    pub layout: BlockLayout,
}

/// How the range of a block is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BlockMethod {
    /// All values of the block are in it, as in ONNX Runtime.
    #[default]
    MinMax,
    /// It is up to a tenth larger or up to two fifths smaller if that lowers the squared error.
    SquaredError,
    /// Scale and zero point fit the values best by weighted least squares, as in llama.cpp's
    /// k-quants. Large values weigh more.
    KQuant,
    /// The zero point minimizes a norm of the errors that hardly counts outliers: half-quadratic
    /// quantization (HQQ). It is a number of the weight's type. Symmetric blocks have none, and get
    /// [`Self::SquaredError`].
    HalfQuadratic,
}

/// How a matrix is quantized in the layout of `MatMulNBits`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scheme {
    pub(crate) blocks: BlockQuantizer,
    pub(crate) method: BlockMethod,
}

impl Scheme {
    /// Whether zero points are numbers of the weight's type, not integers.
    pub(crate) fn has_float_points(&self) -> bool {
        self.method == BlockMethod::HalfQuadratic && !self.blocks.is_symmetric
    }

    /// The lengths of the results. `element` is the size of a scale in bytes.
    pub(crate) fn sizes(&self, element: usize) -> Result<BlockSizes> {
        let sizes = self.blocks.sizes()?;
        let zero_points = match self.has_float_points() {
            true => sizes.scales.saturating_mul(element),
            false => sizes.zero_points,
        };
        Ok(BlockSizes { zero_points, ..sizes })
    }
}

/// The lengths of the slices that [`BlockQuantizer::quantize`] takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    /// The elements of the matrix.
    pub weights: usize,
    /// The bytes of the quantized values.
    pub codes: usize,
    /// The number of scales.
    pub scales: usize,
    /// The bytes of the zero points, 0 if the blocks are symmetric.
    pub zero_points: usize,
}

/// Where [`BlockQuantizer::quantize`] writes. [`BlockSizes`] has the lengths.
#[derive(Debug)]
pub struct QuantizedBlocks<'a, T> {
    /// The quantized values. Bits that hold no value become 0.
    pub codes: &'a mut [u8],
    /// The scales.
    pub scales: &'a mut [T],
    /// The zero points. They are not touched if the blocks are symmetric.
    pub zero_points: &'a mut [u8],
}

/// The grid of a block.
pub(crate) struct BlockGrid<T> {
    pub(crate) scale: T,
    /// The reciprocal of `scale`, 0 if that is 0.
    pub(crate) inverse: f32,
    pub(crate) zero_point: u8,
}

impl BlockQuantizer {
    /// Returns the lengths of weights and results. Fails if the block size does not fit the layout,
    /// or if the matrix is larger than the address space.
    pub fn sizes(&self) -> Result<BlockSizes> {
        let BlockQuantizer { k, n, block_size, bits, is_symmetric, layout } = *self;
        let invalid = |message: String| Error::new(ErrorKind::InvalidArgument, message);
        let fits = match layout {
            BlockLayout::MatMulNBits => block_size.is_power_of_two() && (16..=256).contains(&block_size),
            BlockLayout::Qdq => block_size > 0,
        };
        if !fits {
            let expected = match layout {
                BlockLayout::MatMulNBits => "16, 32, 64, 128 or 256",
                BlockLayout::Qdq => "at least 1",
            };
            return Err(invalid(format!("block size {block_size}, expected {expected}")));
        }
        if bits == Bits::Three && (is_symmetric || layout != BlockLayout::MatMulNBits) {
            let text = "blocks of 3 bits have zero points, in the layout of MatMulNBits";
            return Err(invalid(text.into()).help("give the blocks zero points, or take 2 or 4 bits"));
        }
        let product = |a: usize, b: usize| {
            a.checked_mul(b).ok_or_else(|| invalid(format!("a matrix of {k} x {n} is too large")))
        };
        let blocks = k.div_ceil(block_size);
        let (weights, scales) = (product(k, n)?, product(blocks, n)?);
        let (codes, zero_points) = match layout {
            BlockLayout::MatMulNBits => {
                let codes = product(blocks, block_size * bits.stored() / 8)?;
                let zero_points = blocks.div_ceil(bits.per_byte());
                (product(codes, n)?, product(zero_points, n)?)
            }
            BlockLayout::Qdq => (weights.div_ceil(bits.per_byte()), scales.div_ceil(bits.per_byte())),
        };
        let zero_points = if is_symmetric { 0 } else { zero_points };
        Ok(BlockSizes { weights, codes, scales, zero_points })
    }

    /// The rows of a block.
    pub(crate) fn rows<'a, T>(&self, weights: &'a [T], block: usize) -> impl Iterator<Item = &'a [T]> {
        weights.chunks(self.n).skip(block.saturating_mul(self.block_size)).take(self.block_size)
    }

    /// The grid of a block whose values are in this range.
    pub(crate) fn grid<T: Weight>(&self, low: f32, high: f32) -> BlockGrid<T> {
        let bits = self.bits;
        let (exact, zero_point) = if self.is_symmetric {
            // The range has one value more below zero, so the extreme goes there: the scale has the
            // opposite sign.
            let extreme = if high.abs() > low.abs() { high } else { low };
            (extreme / -f32::from(bits.middle()), bits.middle())
        } else {
            let low = if low < 0.0 { low } else { 0.0 };
            let high = if high > 0.0 { high } else { 0.0 };
            let largest = f32::from(bits.largest());
            let exact = (high - low) / largest;
            let zero_point = if exact == 0.0 { 0.0 } else { -low / exact };
            (exact, round_half_away(limit(zero_point, 0.0, largest)) as u8)
        };
        let scale = T::narrow(exact);
        let stored = scale.wide();
        let inverse = if stored == 0.0 { 0.0 } else { 1.0 / stored };
        BlockGrid { scale, inverse, zero_point }
    }
}

/// Extends ranges by one value each. NaN is left out.
#[inline]
pub(crate) fn extend_ranges(values: &[f32], low: &mut [f32], high: &mut [f32]) {
    // Selects, unlike `f32::min`, are single vector instructions, and keep the sign of the first of
    // several zeros. The sign of the scale depends on it.
    for ((value, low), high) in values.iter().zip(low).zip(high) {
        *low = if *value < *low { *value } else { *low };
        *high = if *value > *high { *value } else { *high };
    }
}

/// Limits a value to a range. NaN becomes `low`.
#[inline]
pub(crate) fn limit(value: f32, low: f32, high: f32) -> f32 {
    let value = if value > low { value } else { low };
    if value < high { value } else { high }
}

/// The sum of this and a number from 0 to 255 has no bits below 1, so that the addition rounds to
/// the nearest integer, half to even.
const ROUNDING: f32 = 12_582_912.0;

/// Rounds a number from 0 to 255 to the nearest integer, ties away from zero: without a conversion
/// to an integer, which takes longer than all of this.
#[inline]
pub(crate) fn round_code(value: f32) -> f32 {
    let even = (value + ROUNDING) - ROUNDING;
    // A tie that went down to an even number.
    even + if value - even == 0.5 { 1.0 } else { 0.0 }
}

/// Rounds to the nearest integer, ties away from zero. `value` is small enough for its fraction to
/// be exact: [`limit`] goes before.
#[inline]
pub(crate) fn round_half_away(value: f32) -> i32 {
    // Not by adding 0.5 and truncating: the sum of 0.49999997 and 0.5 is 1.
    let whole = value as i32;
    let fraction = value - whole as f32;
    whole + i32::from(fraction >= 0.5) - i32::from(fraction <= -0.5)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_rounded_as_integers_are() {
        let near = |value: f32| [value.next_down(), value, value.next_up()];
        for value in (0..=1020_u16).flat_map(|quarter| near(f32::from(quarter) * 0.25)) {
            let value = limit(value, 0.0, 255.0);
            assert_eq!(round_code(value), round_half_away(value) as f32, "{value}");
        }
    }
}
