//! Left sides in column-major order, packed in the workspace.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as"
)]

use std::ops::Range;

use ort_core::Result;

use ort_cpu_gemm::{Cpu, GemmError, LhsOperand, PackedLhs, STEPS};
use ort_cpu_matmul::refused;

/// Column-major left sides, packed in the workspace. Consecutive steps along k are too far apart to
/// be read in place.
#[derive(Clone, Copy)]
pub(crate) struct TransposedLhs<'a> {
    values: &'a [f32],
    rows: usize,
    k: usize,
}

impl<'a> TransposedLhs<'a> {
    /// Values that are packed at once, unless a block of `STEPS` has more. They stay in the L2
    /// cache.
    const AT_ONCE: usize = 1 << 18;

    /// Returns whether packing pays for matmuls of `[rows, columns, k]`: each value must be used
    /// often enough.
    pub(crate) fn pays([rows, columns, _]: [usize; 3]) -> bool {
        rows > 1 && columns >= 32
    }

    /// Returns the ranges of k that are packed at once for `count` matmuls, of nearly equal size.
    /// The accumulators carry over from range to range.
    pub(crate) fn parts(
        count: usize,
        [rows, _, k]: [usize; 3],
    ) -> impl Iterator<Item = Range<usize>> + Clone {
        let most = (TransposedLhs::AT_ONCE / count.saturating_mul(rows).max(1)).max(STEPS);
        // Nearly equal ranges, because a short last one would cost a whole pass over the result.
        let part = k.div_ceil(k.div_ceil(most).max(1)).max(1);
        (0..k.max(1)).step_by(part).map(move |start| start..(start + part).min(k))
    }

    /// Returns the workspace in values for `count` matrices, in whole cache lines.
    pub(crate) fn len(cpu: Cpu, count: usize, [rows, _, k]: [usize; 3]) -> usize {
        count.saturating_mul(PackedLhs::len(cpu, rows, k).next_multiple_of(16))
    }

    /// Packs a range of k of the matrices `[k, rows]` in `from`.
    pub(crate) fn new(
        cpu: Cpu,
        from: &[f32],
        [rows, columns, k]: [usize; 3],
        steps: Range<usize>,
        to: &'a mut [f32],
    ) -> Result<TransposedLhs<'a>> {
        let shape = [rows, columns, steps.len()];
        let len = TransposedLhs::len(cpu, 1, shape).max(1);
        for (from, to) in from.chunks_exact((rows * k).max(1)).zip(to.chunks_exact_mut(len)) {
            let from = from.get(steps.start * rows..).unwrap_or(&[]);
            ort_cpu_gemm::pack_lhs(cpu, from, [rows, steps.len()], [1, rows], to).map_err(refused)?;
        }
        Ok(TransposedLhs { values: to, rows, k: steps.len() })
    }

    /// Returns the matrix at `index` as a left operand.
    pub(crate) fn operand(&self, cpu: Cpu, index: usize) -> Result<LhsOperand<'a>, GemmError> {
        let len = PackedLhs::len(cpu, self.rows, self.k).next_multiple_of(16);
        let values = self.values.get(index * len..).unwrap_or(&[]);
        Ok(LhsOperand::Packed(PackedLhs::new(cpu, values, self.rows, self.k)?))
    }
}
