//! Simple blocked GEMM for `f64` and integers.
//!
//! There is no packing and no register tile.

use super::kernels::add_four_rows;
pub use super::kernels::{Number, Widen};
use super::matrix::check_extent;
use super::{Cpu, GemmError};
use ort_cpu_threads::interrupt::spend;
use ort_cpu_threads::parallel::for_each_row_chunk_mut;

/// Columns accumulated at a time, so that the accumulators stay in L1.
const COLUMNS: usize = 512;

/// Multiply-adds that are worth a task of their own.
const WORTH_A_TASK: usize = 1 << 15;

/// A strided matrix of any number type inside a slice.
#[derive(Clone, Copy, Debug)]
pub struct View<'a, T> {
    values: &'a [T],
    shape: [usize; 2],
    strides: [usize; 2],
}

impl<'a, T: Copy> View<'a, T> {
    /// Creates a matrix of `[rows, columns]` whose element (i, j) is
    /// `values[i * strides[0] + j * strides[1]]`.
    ///
    /// # Errors
    ///
    /// If the last element is outside `values`.
    pub fn new(values: &'a [T], shape: [usize; 2], strides: [usize; 2]) -> Result<Self, GemmError> {
        check_extent("a matrix", values.len(), shape, strides)?;
        Ok(View { values, shape, strides })
    }

    /// Returns rows and columns.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    pub(super) fn at(&self, row: usize, column: usize) -> T {
        self.values[row * self.strides[0] + column * self.strides[1]]
    }
}

/// Computes `C = A * B` into a contiguous row-major C. Integers wrap.
///
/// # Errors
///
/// If shapes do not match or `c` is too short.
pub fn multiply<T: Number>(cpu: Cpu, a: View<T>, b: View<T>, c: &mut [T]) -> Result<(), GemmError> {
    multiply_by(cpu, [a.shape[0], a.shape[1]], |row, step| a.at(row, step), b, c)
}

/// Like [`multiply`], with A as a function of row and k step, and a B that is widened.
pub(super) fn multiply_by<T: Number, S: Widen<T>>(
    cpu: Cpu,
    [rows, k]: [usize; 2],
    lhs: impl Fn(usize, usize) -> T + Sync,
    b: View<S>,
    c: &mut [T],
) -> Result<(), GemmError> {
    let columns = b.shape[1];
    if b.shape[0] != k {
        return Err(GemmError::Shape("A has a different number of columns than B has rows"));
    }
    let needed = rows * columns;
    let len = c.len();
    let c = c.get_mut(..needed).ok_or(GemmError::TooShort { what: "a result", needed, len })?;
    // Rows are independent, and each has a fixed order of additions, so the split changes no bits.
    let min_rows = (WORTH_A_TASK / (columns * k).max(1)).max(1);
    for_each_row_chunk_mut(cpu.threads, c, columns, min_rows, |first, chunk| {
        for (at, accumulators) in chunk.chunks_mut(columns).enumerate() {
            multiply_row(cpu, |step| lhs(first + at, step), &b, accumulators);
        }
    });
    Ok(())
}

/// Computes one row of the result.
fn multiply_row<T: Number, S: Widen<T>>(
    cpu: Cpu,
    lhs: impl Fn(usize) -> T,
    b: &View<S>,
    accumulators: &mut [T],
) {
    let k = b.shape[0];
    accumulators.fill(T::ZERO);
    // Strided columns do not vectorise, so each element is its own dot product.
    if b.strides[1] != 1 && accumulators.len() > 1 {
        for (column, sum) in accumulators.iter_mut().enumerate() {
            spend(k);
            *sum = (0..k).fold(T::ZERO, |sum, step| sum.add_product(lhs(step), b.at(step, column).widen()));
        }
        return;
    }
    for (block, accumulators) in accumulators.chunks_mut(COLUMNS).enumerate() {
        let len = accumulators.len();
        // A unit of work is about four of these vectorised multiply-adds.
        spend(k * len / 4);
        let row = |step: usize| &b.values[step * b.strides[0] + block * COLUMNS..][..len];
        // Four rows of B per pass load and store each accumulator once for four multiply-adds.
        let whole = k - k % 4;
        for step in (0..whole).step_by(4) {
            let factors = [lhs(step), lhs(step + 1), lhs(step + 2), lhs(step + 3)];
            let rows = [row(step), row(step + 1), row(step + 2), row(step + 3)];
            add_four_rows(cpu.isa, accumulators, factors, rows);
        }
        for step in whole..k {
            let (factor, row) = (lhs(step), &b.values[step * b.strides[0] + block * COLUMNS..]);
            for (sum, value) in accumulators.iter_mut().zip(row) {
                *sum = sum.add_product(factor, value.widen());
            }
        }
    }
}
