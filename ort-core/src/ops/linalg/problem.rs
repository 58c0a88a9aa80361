//! Problem descriptors of GEMMs: what a node computes, read once from its attributes and shapes.

use crate::ir::Attributes;
use crate::{Result, ensure, error};

/// `MatMulNBits` of `com.microsoft`: a GEMM with block-quantized weights, which are (columns,
/// blocks, bytes of a block).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NBitsMatMul {
    /// The attribute `K`: the columns of A.
    pub depth: usize,
    /// The attribute `N`: the columns of the result.
    pub columns: usize,
    /// The bits of a weight: 2, 4 or 8.
    pub bits: usize,
    /// The weights of a block, a power of two from 16 on.
    pub block: usize,
}

impl NBitsMatMul {
    /// Reads the attributes.
    ///
    /// # Errors
    ///
    /// A value is out of range.
    pub fn new(attrs: &Attributes) -> Result<NBitsMatMul> {
        let size = |name: &str| -> Result<usize> {
            let value = attrs.int(name)?;
            let size = usize::try_from(value).ok().filter(|size| *size > 0);
            size.ok_or_else(|| error!(InvalidGraph, "{name} is {value}, expected a size"))
        };
        let (depth, columns) = (size("K")?, size("N")?);
        let (bits, block) = (size("bits")?, size("block_size")?);
        let fits = matches!(bits, 2 | 4 | 8) && block >= 16 && block.is_power_of_two();
        ensure!(fits, InvalidGraph, "blocks of {block} quantized values of {bits} bits");
        Ok(NBitsMatMul { depth, columns, bits, block })
    }

    /// Returns the rows of A, given its shape.
    ///
    /// # Errors
    ///
    /// The last dimension is not `K`.
    pub fn rows(&self, a: &[usize]) -> Result<usize> {
        let Some((_, outer)) = a.split_last().filter(|(last, _)| **last == self.depth) else {
            let depth = self.depth;
            return Err(error!(
                InvalidArgument,
                "A has shape {a:?}, expected K = {depth} in its last dimension"
            ));
        };
        Ok(outer.iter().product())
    }

    /// The blocks of a column. The last one may be partly used.
    pub fn blocks(&self) -> usize {
        self.depth.div_ceil(self.block)
    }

    /// The bytes of a column's weights.
    pub fn column_bytes(&self) -> usize {
        // `K` and `N` are attributes of any size. A saturated product fits no input, so `check`
        // refuses it. A block of 16 or more weights of 2, 4 or 8 bits has a whole number of bytes.
        self.blocks().saturating_mul(self.block).saturating_mul(self.bits) / 8
    }

    /// The bytes of a column's zero points, if these are packed. Each column starts at a byte.
    pub fn zero_bytes(&self) -> usize {
        self.blocks().saturating_mul(self.bits).div_ceil(8)
    }

    /// Checks the element counts of the inputs by position. `packs_zeros` says whether zero points
    /// are packed like the weights, rather than floats.
    ///
    /// # Errors
    ///
    /// A count does not fit `N` and `K`.
    pub fn check(&self, count: impl Fn(usize) -> Option<usize>, packs_zeros: bool) -> Result<()> {
        let has = |index: usize, each: usize| {
            count(index).is_none_or(|count| count == self.columns.saturating_mul(each))
        };
        let fits = has(1, self.column_bytes()) && has(2, self.blocks());
        ensure!(fits, InvalidArgument, "the weights do not fit N and K");
        let zeros = if packs_zeros { self.zero_bytes() } else { self.blocks() };
        ensure!(has(3, zeros), InvalidArgument, "the zero points do not fit N and K");
        ensure!(has(5, 1), InvalidArgument, "the biases do not fit N");
        Ok(())
    }
}
