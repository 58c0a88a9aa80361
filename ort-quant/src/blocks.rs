//! Block quantization: checks of the lengths, then the loop of the layout.

use ort_core::{Error, ErrorKind, Result};

use crate::elements::Elements;
use crate::grid::{BlockLayout, BlockMethod, BlockQuantizer, QuantizedBlocks};
use crate::weight::Weight;
use crate::{columns, rows};

impl BlockQuantizer {
    /// Quantizes a matrix in row-major order, on up to as many threads as the machine has cores.
    ///
    /// A block of zeros has scale 0. Infinities and NaN are not refused; what their blocks become
    /// is unspecified. Fails if a slice has another length than [`BlockQuantizer::sizes`] says.
    pub fn quantize<T: Weight>(&self, weights: &[T], out: QuantizedBlocks<'_, T>) -> Result<()> {
        self.check(weights.len(), &out)?;
        if !weights.is_empty() {
            match self.layout {
                BlockLayout::MatMulNBits => columns::quantize(self, BlockMethod::MinMax, weights, out),
                BlockLayout::Qdq => rows::quantize(self, weights, out),
            }
        }
        Ok(())
    }

    /// [`Self::quantize`] in the layout of `MatMulNBits`, with ranges by another method.
    pub(crate) fn quantize_by<E: Elements + ?Sized>(
        &self,
        method: BlockMethod,
        weights: &E,
        out: QuantizedBlocks<'_, E::Element>,
    ) -> Result<()> {
        self.check(weights.count(), &out)?;
        if weights.count() > 0 {
            columns::quantize(self, method, weights, out);
        }
        Ok(())
    }

    fn check<T: Weight>(&self, weights: usize, out: &QuantizedBlocks<'_, T>) -> Result<()> {
        let sizes = self.sizes()?;
        require_len("weights", weights, sizes.weights)?;
        require_len("codes", out.codes.len(), sizes.codes)?;
        require_len("scales", out.scales.len(), sizes.scales)?;
        if !self.is_symmetric {
            require_len("zero points", out.zero_points.len(), sizes.zero_points)?;
        }
        Ok(())
    }
}

/// Fails if a slice has another length than expected.
fn require_len(name: &str, found: usize, expected: usize) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(Error::new(ErrorKind::InvalidArgument, format!("{name}: {found} elements, expected {expected}")))
}
