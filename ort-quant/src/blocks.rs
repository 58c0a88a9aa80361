//! Block quantization: checks of the lengths, then the loop of the layout.

use ort_core::{Error, ErrorKind, Result};

use crate::elements::Elements;
use crate::feedback::Curvature;
use crate::grid::{BlockLayout, BlockMethod, BlockQuantizer, BlockSizes, QuantizedBlocks, Scheme};
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
                    columns::quantize(&scheme, Curvature::default(), weights, out);
                }
                BlockLayout::Qdq => rows::quantize(self, weights, out),
            }
        }
        Ok(())
    }
}

impl Scheme {
    /// Quantizes a matrix in row-major order, as [`BlockQuantizer::quantize`] does.
    pub(crate) fn quantize<E: Elements + ?Sized>(
        &self,
        curvature: Curvature<'_>,
        weights: &E,
        out: QuantizedBlocks<'_, E::Element>,
    ) -> Result<()> {
        check((&self.blocks, self.sizes(size_of::<E::Element>())?), weights.count(), &out)?;
        if weights.count() > 0 {
            columns::quantize(self, curvature, weights, out);
        }
        Ok(())
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
