//! GEMV: matmuls with a single row or column, which are bound by reading the matrix.
//!
//! They take no packing and no tiles. A row times a matrix with contiguous rows adds up weighted
//! rows (AXPY); otherwise each element is a dot product. Which of them runs depends on the shape
//! and the strides only, so that the split over threads never changes a bit.

use std::ops::Range;

use super::execute::Block;
use super::tile::AddRows;
use crate::Gemm;
use crate::epilogue::apply;
use crate::operand::{LhsOperand, RhsOperand, Strided};
use ort_cpu_threads::interrupt::spend;

/// Multiply-adds for a unit of [`spend`]: a quarter of a tile's, because GEMV waits for memory.
const UNIT_TERMS_OF_ONE_ROW: usize = 4;

/// Multiply-adds of a dot product between two deadline checks.
const DOT_TERMS: usize = 1 << 22;

impl Block<'_> {
    /// Computes these tiles and panels if the matmul is a GEMV; returns whether it was one.
    ///
    /// # Safety
    ///
    /// As [`Block::run`].
    pub(super) unsafe fn run_vector(&self, tiles: &Range<usize>, panels: &Range<usize>) -> bool {
        let (LhsOperand::Plain(a), RhsOperand::Plain(b)) = (&self.gemm.lhs, &self.gemm.rhs) else {
            return false;
        };
        if a.terms > 1 {
            return false;
        }
        let [rows, columns, _] = self.grid.shape;
        // SAFETY: as required of the caller; the branches check the strides that each needs.
        unsafe {
            // AXPY reads such a B front to back, while dot products would stride through it.
            if rows == 1 && b.column_stride == 1 {
                self.add_weighted_rows(a, b, self.columns(panels));
            } else if rows == 1 && b.row_stride == 1 && a.column_stride == 1 {
                self.dot_all(0..1, self.columns(panels), a, b);
            } else if columns == 1 && b.row_stride == 1 && a.column_stride == 1 {
                let rows = tiles.start * self.height..(tiles.end * self.height).min(rows);
                self.dot_all(rows, 0..1, a, b);
            } else {
                return false;
            }
        }
        true
    }

    /// One row of C as the sum of the rows of B, weighted with the elements of A.
    ///
    /// # Safety
    ///
    /// As [`Block::run`], and A must have one row, B contiguous rows.
    unsafe fn add_weighted_rows(&self, a: &Strided, b: &Strided, columns: Range<usize>) {
        /// Columns summed at a time: 4 KiB of accumulators stay in L1.
        const AT_ONCE: usize = 1024;
        /// Rows between two deadline checks, a multiple of the four that `add_rows` adds together.
        const ROWS: usize = 4096;
        let mut sums = [0.0_f32; AT_ONCE];
        for first in columns.clone().step_by(AT_ONCE) {
            let count = (columns.end - first).min(AT_ONCE);
            sums[..count].fill(0.0);
            let k = self.grid.shape[2];
            for row in (0..k).step_by(ROWS) {
                let rows = (k - row).min(ROWS);
                spend(count * rows / UNIT_TERMS_OF_ONE_ROW);
                let call = AddRows {
                    factors: a.values.as_ptr().wrapping_add(row * a.column_stride),
                    factor_step: a.column_stride,
                    rows: b.values.as_ptr().wrapping_add(row * b.row_stride + first),
                    stride: b.row_stride,
                    count: rows,
                    sums: sums.as_mut_ptr(),
                    columns: count,
                };
                // SAFETY: `Strided::new` checked the operands against their slices, and
                // `Kernel::of` chose the kernel for this CPU.
                unsafe { (self.kernel.add_rows)(&call) };
            }
            // SAFETY: `run` requires these columns of C to be this thread's.
            unsafe { self.put(0, first, &sums[..count]) };
        }
    }

    /// Each element of C as a dot product.
    ///
    /// # Safety
    ///
    /// As [`Block::run`], and rows of A and columns of B must be contiguous.
    unsafe fn dot_all(&self, rows: Range<usize>, columns: Range<usize>, a: &Strided, b: &Strided) {
        /// Columns finished at a time.
        const AT_ONCE: usize = 64;
        let k = self.grid.shape[2];
        let at_once = (DOT_TERMS / k.max(1)).clamp(1, AT_ONCE);
        let mut sums = [0.0_f32; AT_ONCE];
        for row in rows {
            let left = a.values.as_ptr().wrapping_add(row * a.row_stride);
            for first in columns.clone().step_by(at_once) {
                let count = (columns.end - first).min(at_once);
                spend(count * k.min(DOT_TERMS) / UNIT_TERMS_OF_ONE_ROW);
                for (column, sum) in sums[..count].iter_mut().enumerate() {
                    let right = b.values.as_ptr().wrapping_add((first + column) * b.column_stride);
                    // SAFETY: `Strided::new` checked that both operands hold `k` steps.
                    *sum = unsafe { self.dot(left, right, k) };
                }
                // SAFETY: `run` requires these rows and columns of C to be this thread's.
                unsafe { self.put(row, first, &sums[..count]) };
            }
        }
    }

    /// A dot product, in parts with deadline checks in between if it is long.
    ///
    /// # Safety
    ///
    /// Both runs must hold `k` values.
    unsafe fn dot(&self, left: *const f32, right: *const f32, k: usize) -> f32 {
        // SAFETY: the caller guarantees `k` values on both sides; `step + count` is at most `k`.
        let part = |step: usize, count: usize| unsafe {
            (self.kernel.dot)(left.wrapping_add(step), right.wrapping_add(step), count)
        };
        let mut sum = part(0, k.min(DOT_TERMS));
        for step in (DOT_TERMS..k).step_by(DOT_TERMS) {
            spend(DOT_TERMS / UNIT_TERMS_OF_ONE_ROW);
            sum += part(step, (k - step).min(DOT_TERMS));
        }
        sum
    }

    /// Applies alpha, beta and the epilogue to the elements of a row from `column` on.
    ///
    /// # Safety
    ///
    /// As [`Block::run`].
    unsafe fn put(&self, row: usize, column: usize, sums: &[f32]) {
        let Gemm { alpha, beta, .. } = *self.gemm;
        let start = self.c.wrapping_add(row * self.c_row + column);
        // SAFETY: `run` requires these elements of C to be this thread's.
        let elements = unsafe { std::slice::from_raw_parts_mut(start, sums.len()) };
        for (element, sum) in elements.iter_mut().zip(sums) {
            let scaled = alpha * sum;
            *element = if beta == 0.0 { scaled } else { beta * *element + scaled };
        }
        apply(self.gemm.epilogue, self.gemm.origin, [row, column], elements);
    }
}
