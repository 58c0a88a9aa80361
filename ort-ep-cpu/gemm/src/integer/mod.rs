//! 8-bit GEMM with zero points. Accumulators are 32 bits wide and wrap.
//!
//! The kernels multiply unsigned bytes with signed bytes, four k steps at a time, because CPUs have
//! an instruction for that (VNNI). Other types are shifted by 128, which also shifts the zero
//! point: with `a' = a + 128` and `z' = z + 128`, `a - z` stays the same. Zero points are
//! subtracted from the sums at the end:
//!
//! ```text
//! sum (a - z)(b - y) = sum a b - z * sum b - y * sum a + k z y
//! ```
//!
//! Then the sums are stored as `i32`, as `f32`, or requantized to another scale and zero point.

mod image;
mod multiply;
mod nhwc;
mod pack;
mod run;
#[cfg(test)]
mod tests;

pub use image::ByteWindows;
pub use multiply::{QuantizedLhs, QuantizedMatmul, multiply, multiply_workspace_len};
pub use nhwc::NhwcWindows;
pub use pack::{PackedBytes, pack_filters_last, pack_rhs, packed_rhs_len};

use super::{Activation, Cpu, GemmError};

/// Rows of bytes, each a whole number of groups of four. Rows are at equal strides, or in strips
/// that are. A strip holds the windows of one image row.
#[derive(Clone, Copy, Debug)]
pub struct ByteRows<'a> {
    pub(super) bytes: &'a [u8],
    /// Stride from one row to the next.
    pub(super) stride: usize,
    /// Rows in a strip, and the stride from one strip to the next.
    strip: [usize; 2],
    pub(super) rows: usize,
    /// Groups of four bytes in a row.
    pub(super) groups: usize,
}

impl<'a> ByteRows<'a> {
    /// Creates `rows` of `groups` times four bytes, `stride` apart.
    ///
    /// # Errors
    ///
    /// If `bytes` is too short.
    pub fn new(
        bytes: &'a [u8],
        [rows, groups]: [usize; 2],
        stride: usize,
    ) -> Result<ByteRows<'a>, GemmError> {
        let all = ByteRows { bytes, stride, strip: [rows.max(1), 0], rows, groups };
        all.check(groups.saturating_mul(4))?;
        Ok(all)
    }

    /// Creates `strips` of `rows` rows each. Their runs of k steps start where the columns of the
    /// other operand say. Strides are from row to row and from strip to strip.
    pub(super) fn in_strips(
        bytes: &'a [u8],
        [strips, rows, groups]: [usize; 3],
        [stride, strip]: [usize; 2],
    ) -> ByteRows<'a> {
        let count = strips.saturating_mul(rows);
        // Strips that follow one another are one.
        let strip = if strip == rows.saturating_mul(stride) { [count, 0] } else { [rows, strip] };
        ByteRows { bytes, stride, strip: [strip[0].max(1), strip[1]], rows: count, groups }
    }

    /// Checks that all rows are inside the slice, if the last k step of a row ends `reach` bytes
    /// after its start.
    fn check(&self, reach: usize) -> Result<(), GemmError> {
        let [in_strip, distance] = self.strip;
        let needed = match self.rows {
            0 => 0,
            rows => {
                let last = (rows - 1) / in_strip;
                let along = rows.min(in_strip) - 1;
                let along = along.saturating_mul(self.stride);
                last.saturating_mul(distance).saturating_add(along).saturating_add(reach)
            }
        };
        match self.bytes.len() < needed {
            true => Err(GemmError::TooShort { what: "rows of bytes", needed, len: self.bytes.len() }),
            false => Ok(()),
        }
    }

    /// Whether all rows are at equal strides.
    pub(crate) fn is_one_strip(&self) -> bool {
        self.strip[0] >= self.rows
    }

    /// Returns the start offsets of the rows from `row` on.
    pub(crate) fn starts(self, row: usize) -> impl Iterator<Item = usize> {
        let (stride, [in_strip, distance]) = (self.stride, self.strip);
        // Most images are one strip, which saves two divisions for each tile.
        let (mut at, mut strip) =
            if row < in_strip { (row, 0) } else { (row % in_strip, row / in_strip * distance) };
        std::iter::from_fn(move || {
            let start = strip + at * stride;
            at += 1;
            if at == in_strip {
                (at, strip) = (0, strip.wrapping_add(distance));
            }
            Some(start)
        })
    }
}

/// Columns of bytes in panels. The four bytes of a group are contiguous in each column.
#[derive(Clone, Copy, Debug)]
pub struct ByteColumns<'a> {
    /// The panels.
    pub bytes: &'a [u8],
    /// Where each run of groups starts in the rows of the other operand, and here.
    pub starts: &'a [[usize; 2]],
    /// Groups of four k steps in a run.
    pub groups: usize,
    /// Bytes from one group to the next.
    pub step: usize,
    /// Bytes from one panel to the next.
    pub panel: usize,
    /// Columns in a panel, a whole number of vectors.
    pub width: usize,
    /// Columns in all panels.
    pub columns: usize,
}

impl ByteColumns<'_> {
    /// Checks that all columns are inside the slice. The last panel counts with whole vectors,
    /// because kernels read those.
    fn check(self) -> Result<Self, GemmError> {
        // A matrix without rows has nothing to read.
        let Some(first) = self.starts.iter().map(|[_, start]| *start).max() else { return Ok(self) };
        let last = [(self.groups, self.step), (self.columns.div_ceil(self.width), self.panel)]
            .into_iter()
            .map(|(count, distance)| count.saturating_sub(1).saturating_mul(distance))
            .fold(first, usize::saturating_add);
        let (needed, len) = (last.saturating_add(4 * self.width), self.bytes.len());
        match len < needed {
            true => Err(GemmError::TooShort { what: "columns of bytes", needed, len }),
            false => Ok(self),
        }
    }
}

/// The scale of the accumulators.
#[derive(Clone, Copy, Debug)]
pub enum Factors<'a> {
    /// One for all.
    One(f32),
    /// One per row.
    Rows(&'a [f32]),
    /// One per column.
    Columns(&'a [f32]),
}

/// What becomes of the accumulators.
#[derive(Debug)]
pub enum Target<'a> {
    /// They are stored as they are.
    Accumulators(&'a mut [i32]),
    /// They become floats.
    Numbers {
        /// The result.
        values: &'a mut [f32],
        /// How accumulators become floats.
        scaling: Scaling<'a>,
    },
    /// Requantized: `sum * factor` rounded half to even, plus `zero`, saturated to the range of
    /// bytes.
    Quantized {
        /// The quantized result.
        values: &'a mut [u8],
        /// The factors of the accumulators.
        factors: Factors<'a>,
        /// The zero point of the result.
        zero: i32,
        /// Whether the result is signed.
        signed: bool,
    },
}

/// How accumulators become floats: `activation(sum * factor + bias + addend)`.
#[derive(Clone, Copy, Debug)]
pub struct Scaling<'a> {
    /// The factors of the accumulators.
    pub factors: Factors<'a>,
    /// One per row, or none.
    pub row_bias: &'a [f32],
    /// One per column, or none.
    pub column_bias: &'a [f32],
    /// What is added to each element.
    pub addend: Addend<'a>,
    /// The function at the end.
    pub activation: Option<Activation>,
}

impl<'a> Scaling<'a> {
    /// `sum * factor`.
    pub fn new(factors: Factors<'a>) -> Scaling<'a> {
        Scaling { factors, row_bias: &[], column_bias: &[], addend: Addend::None, activation: None }
    }
}

/// An addend of each element of a float result.
#[derive(Clone, Copy, Debug)]
pub enum Addend<'a> {
    /// There is none.
    None,
    /// The old value of the element.
    Old,
    /// A matrix with the row stride of the result.
    Matrix(&'a [f32]),
}

/// Whether all factors are less than 1, so that `sum * factor` always fits in 32 bits.
pub fn are_small(factors: &[f32]) -> bool {
    factors.iter().fold(true, |small, factor| small & (factor.abs() < 1.0))
}

/// Terms added to the accumulators. An empty slice adds nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Terms<'a> {
    /// One per row.
    pub rows: &'a [i32],
    /// One per column.
    pub columns: &'a [i32],
    /// Outer products: one factor per row times one per column.
    pub outer: [(&'a [i32], &'a [i32]); 2],
    /// One factor per row, times the column's sum over the k steps for which the row of ones is
    /// set. Replaces the first outer product.
    pub window_sums: Option<(&'a [i32], ByteRows<'a>)>,
}

/// One 8-bit GEMM.
#[derive(Clone, Copy, Debug)]
pub struct IntegerGemm<'a> {
    /// The left operand.
    pub lhs: ByteRows<'a>,
    /// The right operand.
    pub rhs: ByteColumns<'a>,
    /// Whether rows are signed and columns unsigned, or the other way round.
    pub signed_lhs: bool,
    /// What is added to the accumulators.
    pub terms: Terms<'a>,
    /// Of each strip of `strip[0]` columns, the first `strip[1]` are stored.
    pub strip: [usize; 2],
    /// Stride from one row of the result to the next.
    pub row_stride: usize,
}
