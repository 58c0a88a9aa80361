//! Block quantization: checks of the lengths, then the loop of the layout.

use ort_core::{Error, ErrorKind, Result};

use crate::columns::{Changes, Matrix};
use crate::elements::Elements;
use crate::feedback::{Curvature, Feedback, GptqOptions};
use crate::grid::{BlockLayout, BlockMethod, BlockQuantizer, BlockSizes, QuantizedBlocks, Scheme};
use crate::hessian::Hessian;
use crate::noise::Noise;
use crate::weight::Weight;
use crate::{columns, rows};

impl BlockQuantizer {
    /// Quantizes a matrix in row-major order, on up to as many threads as the machine has cores.
    ///
    /// A block of zeros has scale 0. Infinities and NaN are not refused; what their blocks become
    /// is unspecified. Fails if a slice has another length than [`BlockQuantizer::sizes`] says.
    pub fn quantize<T: Weight>(&self, weights: &[T], out: QuantizedBlocks<'_, T>) -> Result<()> {
        check((self, self.sizes()?), weights.len(), &out)?;
        if !weights.is_empty() {
            match self.layout {
                BlockLayout::MatMulNBits => {
                    let scheme = Scheme { blocks: *self, method: BlockMethod::MinMax };
                    let weights = Matrix { elements: weights, is_transposed: false };
                    columns::quantize(&scheme, Curvature::default(), &weights, out);
                }
                BlockLayout::Qdq => rows::quantize(self, weights, out),
            }
        }
        Ok(())
    }

    /// The lengths of the results of [`Self::quantize_by`].
    ///
    /// # Errors
    ///
    /// As [`Self::sizes`], or the layout is another one than that of `MatMulNBits`.
    pub fn sizes_by<T: Weight>(&self, method: BlockMethod) -> Result<BlockSizes> {
        if self.layout != BlockLayout::MatMulNBits {
            let text = "the methods are for the layout of MatMulNBits";
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        Scheme { blocks: *self, method }.sizes(size_of::<T>())
    }

    /// Quantizes a matrix as [`Self::quantize`] does, with another choice of the blocks' ranges,
    /// and with GPTQ if there is the Hessian of what it is multiplied with.
    ///
    /// Zero points that are numbers are written as the bytes of the weight's type. Returns whether
    /// the Hessian could be factorized; without, the rows are rounded one by one.
    ///
    /// # Errors
    ///
    /// As [`Self::sizes_by`]. A slice has another length, or the Hessian another number of channels
    /// than the matrix has rows.
    pub fn quantize_by<T: Weight>(
        &self,
        method: BlockMethod,
        gptq: Option<(&Hessian, GptqOptions)>,
        weights: &[T],
        out: QuantizedBlocks<'_, T>,
    ) -> Result<bool> {
        self.sizes_by::<T>(method)?;
        if let Some((hessian, _)) = gptq {
            require_len("channels of the Hessian", hessian.channels(), self.k)?;
        }
        let feedback = gptq.and_then(|(hessian, options)| Feedback::of(hessian, options));
        let curvature = Curvature {
            importance: feedback.as_ref().map(Feedback::importance).unwrap_or_default(),
            feedback: feedback.as_ref(),
            ..Curvature::default()
        };
        let weights = Matrix { elements: weights, is_transposed: false };
        Scheme { blocks: *self, method }.quantize(curvature, &weights, out)?;
        Ok(feedback.is_some())
    }
}

impl Scheme {
    /// Quantizes a matrix, as [`BlockQuantizer::quantize`] does. Returns what changed.
    pub(crate) fn quantize<E: Elements + ?Sized>(
        &self,
        curvature: Curvature<'_>,
        weights: &Matrix<'_, E>,
        out: QuantizedBlocks<'_, E::Element>,
    ) -> Result<Changes> {
        let count = weights.elements.count();
        check((&self.blocks, self.sizes(size_of::<E::Element>())?), count, &out)?;
        if count == 0 {
            return Ok(Changes { noise: Noise::default(), bias: Vec::new(), energies: Vec::new() });
        }
        Ok(columns::quantize(self, curvature, weights, out))
    }
}

/// Refuses slices of other lengths. Zero points that are not written may have any.
fn check<T: Weight>(
    (blocks, sizes): (&BlockQuantizer, BlockSizes),
    weights: usize,
    out: &QuantizedBlocks<'_, T>,
) -> Result<()> {
    require_len("weights", weights, sizes.weights)?;
    require_len("codes", out.codes.len(), sizes.codes)?;
    require_len("scales", out.scales.len(), sizes.scales)?;
    if !blocks.is_symmetric {
        require_len("zero points", out.zero_points.len(), sizes.zero_points)?;
    }
    Ok(())
}

/// Fails if a slice has another length than expected.
fn require_len(name: &str, found: usize, expected: usize) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(Error::new(ErrorKind::InvalidArgument, format!("{name}: {found} elements, expected {expected}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoded::{bits_of, inputs, weights};

    fn quantizer(layout: BlockLayout) -> BlockQuantizer {
        BlockQuantizer { k: 64, n: 5, block_size: 32, bits: bits_of(4), is_symmetric: true, layout }
    }

    fn quantized(
        quantizer: &BlockQuantizer,
        method: BlockMethod,
        gptq: Option<(&Hessian, GptqOptions)>,
    ) -> Result<(Vec<u8>, Vec<f32>, bool)> {
        let sizes = quantizer.sizes()?;
        let (mut codes, mut scales) = (vec![0; sizes.codes], vec![0.0; sizes.scales]);
        let out = QuantizedBlocks { codes: &mut codes, scales: &mut scales, zero_points: &mut [] };
        let used = quantizer.quantize_by(method, gptq, &weights(64 * 5), out)?;
        Ok((codes, scales, used))
    }

    #[test]
    fn a_hessian_changes_codes_and_needs_the_channels_of_the_matrix() -> Result<()> {
        let quantizer = quantizer(BlockLayout::MatMulNBits);
        let mut hessian = Hessian::new(64);
        let options = GptqOptions::default();
        let (plain, _, used) = quantized(&quantizer, BlockMethod::MinMax, None)?;
        assert!(!used);
        // Nothing was observed, so that the rows are rounded one by one.
        let (same, _, used) = quantized(&quantizer, BlockMethod::MinMax, Some((&hessian, options)))?;
        assert_eq!((same, used), (plain.clone(), false));
        hessian.observe(&inputs(100, 64), 64);
        let (tuned, _, used) = quantized(&quantizer, BlockMethod::MinMax, Some((&hessian, options)))?;
        assert!(used && tuned != plain);
        let other = Hessian::new(63);
        assert!(quantized(&quantizer, BlockMethod::MinMax, Some((&other, options))).is_err());
        Ok(())
    }

    #[test]
    fn methods_are_for_one_layout() {
        let found = quantized(&quantizer(BlockLayout::Qdq), BlockMethod::SquaredError, None);
        assert!(found.is_err_and(|problem| problem.to_string().contains("MatMulNBits")));
    }

    #[test]
    fn zero_points_that_are_numbers_take_their_bytes() -> Result<()> {
        let asymmetric = BlockQuantizer { is_symmetric: false, ..quantizer(BlockLayout::MatMulNBits) };
        let bytes = |method| asymmetric.sizes_by::<f32>(method).map(|sizes| sizes.zero_points);
        assert_eq!((bytes(BlockMethod::MinMax)?, bytes(BlockMethod::HalfQuadratic)?), (5, 5 * 2 * 4));
        Ok(())
    }
}
