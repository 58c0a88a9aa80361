//! bf16 pairs: two consecutive k steps, rounded to bfloat16, in one 32-bit element.
//!
//! An odd number of k steps ends with a zero in both operands. Panels are packed as `f32` and
//! converted while they are in L1, so the packing code need not know about pairs. An image with
//! overlapping windows is converted to pairs of channels before im2col, so that each value is
//! converted only once.

use std::ops::Range;

use super::pack::{pack_lhs_panel, pack_rhs_panel};
use super::{CopyRows, Kernel};
use crate::operand::{Strided, Weight};

/// k steps staged in `f32` at a time: whole pairs, and whole blocks of quantized weights.
pub(super) const STAGED: usize = 128;

/// The widest panel.
const WIDEST: usize = 64;

/// The functions of an instruction set that make pairs.
#[derive(Debug)]
pub(super) struct MakePairs {
    /// Pairs row `2 * i` with row `2 * i + 1`. There are `count` rows of `len` values.
    pub(super) of_rows: unsafe fn(&CopyRows),
    /// Pairs neighbours within each row, which halves its length. There are `count` rows of `len`
    /// values.
    pub(super) of_neighbours: unsafe fn(&CopyRows),
}

impl Kernel {
    /// Returns the k steps per element of a panel.
    pub(crate) fn terms(&self) -> usize {
        if self.pairs.is_some() { 2 } else { 1 }
    }

    /// Returns the elements that hold `steps` k steps.
    pub(crate) fn elements(&self, steps: usize) -> usize {
        steps.div_ceil(self.terms())
    }

    /// Returns the length of the staging buffer, in `f32` elements.
    pub(crate) fn stage_len(&self) -> usize {
        if self.pairs.is_some() { STAGED * self.width() } else { 0 }
    }

    /// Packs the rows of A from `first` on into one panel. Rows beyond the matrix become zeros.
    pub(crate) fn pack_lhs_panel<T: Weight>(
        &self,
        values: &[T],
        [rows, k]: [usize; 2],
        [row_stride, step_stride]: [usize; 2],
        first: usize,
        to: &mut [f32],
    ) {
        if self.pairs.is_none() {
            return pack_lhs_panel(values, [rows, k], [row_stride, step_stride], first, to);
        }
        self.pack_staged(k, to, |steps, staged| {
            let values = &values[steps.start * step_stride..];
            pack_lhs_panel(values, [rows, steps.len()], [row_stride, step_stride], first, staged);
        });
    }

    /// [`Kernel::pack_lhs_panel`], with k step `step` of row `row` at
    /// `row * row_stride + place(step)`.
    pub(crate) fn pack_lhs_panel_by<T: Weight>(
        &self,
        values: &[T],
        [rows, k]: [usize; 2],
        (row_stride, place): (usize, impl Fn(usize) -> usize),
        first: usize,
        to: &mut [f32],
    ) {
        let pack = |steps: Range<usize>, to: &mut [f32]| {
            let height = to.len() / steps.len().max(1);
            for (step, to) in steps.zip(to.chunks_exact_mut(height.max(1))) {
                let from = place(step);
                for (row, to) in (first..).zip(to) {
                    *to = if row < rows { values[row * row_stride + from].widen() } else { 0.0 };
                }
            }
        };
        match self.pairs {
            Some(_) => self.pack_staged(k, to, pack),
            None => pack(0..k, to),
        }
    }

    /// Packs the columns of B from `first` on into one panel. Columns beyond the matrix become
    /// zeros.
    pub(crate) fn pack_rhs_panel<T: Weight>(
        &self,
        values: &[T],
        [k, columns]: [usize; 2],
        [row_stride, column_stride]: [usize; 2],
        first: usize,
        to: &mut [f32],
    ) {
        if self.pairs.is_none() {
            return pack_rhs_panel(values, [k, columns], [row_stride, column_stride], first, to);
        }
        self.pack_staged(k, to, |steps, staged| {
            let values = &values[steps.start * row_stride..];
            pack_rhs_panel(values, [steps.len(), columns], [row_stride, column_stride], first, staged);
        });
    }

    /// Packs a panel of weights in pairs. `pack` writes some k steps of it in `f32` to a buffer.
    fn pack_staged(&self, k: usize, to: &mut [f32], mut pack: impl FnMut(Range<usize>, &mut [f32])) {
        let mut stage = [0.0; STAGED * WIDEST];
        let lanes = to.len() / self.elements(k).max(1);
        // `STAGED` is even, so no pair straddles two stages.
        for start in (0..k).step_by(STAGED) {
            let steps = start..(start + STAGED).min(k);
            let staged = &mut stage[..steps.len() * lanes];
            pack(steps.clone(), staged);
            self.pair_rows((staged, lanes), [steps.len(), lanes], &mut to[start / 2 * lanes..]);
        }
    }

    /// Pairs the rows of a matrix of `[steps, lanes]`, whose rows start `from_step` apart. The rows
    /// of pairs are contiguous.
    ///
    /// Does nothing if elements are not pairs.
    pub(crate) fn pair_rows(
        &self,
        (from, from_step): (&[f32], usize),
        [steps, lanes]: [usize; 2],
        to: &mut [f32],
    ) {
        self.pair_rows_into((from, from_step), [steps, lanes], (to, lanes));
    }

    /// The same with a stride between the rows of pairs.
    pub(super) fn pair_rows_into(
        &self,
        (from, from_step): (&[f32], usize),
        [steps, lanes]: [usize; 2],
        (to, to_step): (&mut [f32], usize),
    ) {
        let Some(pairs) = &self.pairs else { return };
        if steps == 0 || lanes == 0 {
            return;
        }
        let last = steps.div_ceil(2) - 1;
        assert!(from.len() >= (steps - 1) * from_step + lanes && to.len() >= last * to_step + lanes);
        let (from, to) = (from.as_ptr(), to.as_mut_ptr());
        let call = CopyRows { from, from_stride: 1, from_step, to, to_step, count: steps, len: lanes };
        // SAFETY: the assertion above keeps all rows inside their slices, and `Kernel::of` chose
        // the kernel for this CPU.
        unsafe { (pairs.of_rows)(&call) }
    }

    /// Pairs neighbours in the rows of a matrix of `[rows, len]`, whose rows start `from_step`
    /// apart. The resulting rows have half the length and are contiguous.
    ///
    /// Does nothing if elements are not pairs.
    pub(crate) fn pair_neighbours(
        &self,
        (from, from_step): (&[f32], usize),
        [rows, len]: [usize; 2],
        to: &mut [f32],
    ) {
        let Some(pairs) = &self.pairs else { return };
        if rows == 0 || len == 0 {
            return;
        }
        let to_step = len.div_ceil(2);
        assert!(from.len() >= (rows - 1) * from_step + len && to.len() >= rows * to_step);
        let (from, to) = (from.as_ptr(), to.as_mut_ptr());
        let call = CopyRows { from, from_stride: 1, from_step, to, to_step, count: rows, len };
        // SAFETY: the assertion above keeps all rows inside their slices, and `Kernel::of` chose
        // the kernel for this CPU.
        unsafe { (pairs.of_neighbours)(&call) }
    }

    /// Writes a range of rows and k steps of A to `to` as pairs. Returns the strides from one row
    /// to the next and from one pair to the next.
    ///
    /// `to` must hold the rows times the pairs, `stage` must hold [`Kernel::stage_len`] values, and
    /// the matrix must contain the ranges.
    pub(super) fn pair_lhs(
        &self,
        a: &Strided,
        rows: Range<usize>,
        steps: Range<usize>,
        to: &mut [f32],
        stage: &mut [f32],
    ) -> [usize; 2] {
        let (count, pairs) = (rows.len(), self.elements(steps.len()));
        if self.pairs.is_none() || count == 0 || pairs == 0 {
            return [0, 0];
        }
        // Rows or columns that are contiguous are converted in place. Otherwise each row is
        // gathered into `stage` first.
        let first = rows.start * a.row_stride + steps.start * a.column_stride;
        if a.row_stride == 1 && a.column_stride != 1 {
            self.pair_rows((&a.values[first..], a.column_stride), [steps.len(), count], to);
            return [1, count];
        }
        if a.column_stride == 1 {
            self.pair_neighbours((&a.values[first..], a.row_stride), [count, steps.len()], to);
            return [pairs, 1];
        }
        assert!(rows.end <= a.rows && steps.end <= a.columns && to.len() >= count * pairs);
        let from = a.values.as_ptr().wrapping_add(first);
        assert!(stage.len() >= steps.len());
        for (row, to) in to.chunks_exact_mut(pairs).take(count).enumerate() {
            let staged = CopyRows {
                from: from.wrapping_add(row * a.row_stride),
                from_stride: a.column_stride,
                from_step: a.row_stride,
                to: stage.as_mut_ptr(),
                to_step: 0,
                count: 1,
                len: steps.len(),
            };
            // SAFETY: the assertions above checked that the matrix has this row and these k steps
            // and that the stage is long enough. `Kernel::of` chose the kernel for this CPU.
            unsafe { (self.copy_rows)(&staged) };
            self.pair_neighbours((stage, 0), [1, steps.len()], to);
        }
        [pairs, 1]
    }
}
