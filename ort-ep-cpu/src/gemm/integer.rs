//! Products of 8-bit integers with zero points, summed in 32 bits that wrap.

use super::generic::{View, Widen, multiply_by};
use super::{Cpu, GemmError};

/// What is taken from every value before it is multiplied: nothing, one number for the whole matrix,
/// or one for each row of A or column of B.
#[derive(Clone, Copy, Debug)]
pub struct ZeroPoints<'a>(&'a [i32]);

impl<'a> ZeroPoints<'a> {
    /// No zero point.
    pub const NONE: ZeroPoints<'static> = ZeroPoints(&[]);

    /// One number for all, or as many as there are rows of A or columns of B.
    pub fn new(values: &'a [i32]) -> Self {
        ZeroPoints(values)
    }

    fn check(&self, count: usize) -> Result<(), GemmError> {
        match self.0.len() {
            0 | 1 => Ok(()),
            len if len == count => Ok(()),
            _ => Err(GemmError::Shape("zero points are neither one nor one for each row or column")),
        }
    }

    fn at(&self, index: usize) -> i32 {
        match self.0 {
            [] => 0,
            [one] => *one,
            many => many[index],
        }
    }
}

/// `C[i][j] = sum over k of (A[i][k] - a_zero[i]) * (B[k][j] - b_zero[j])`, where C lies row by row
/// without gaps. The sum is taken modulo 2^32, so it is the same in any order.
///
/// # Errors
///
/// When shapes do not go together or `c` is too short.
pub fn multiply<A: Widen<i32>, B: Widen<i32>>(
    cpu: Cpu,
    (a, a_zero): (View<A>, ZeroPoints),
    (b, b_zero): (View<B>, ZeroPoints),
    c: &mut [i32],
) -> Result<(), GemmError> {
    let [rows, k] = a.shape();
    let columns = b.shape()[1];
    a_zero.check(rows)?;
    b_zero.check(columns)?;
    let left = |row: usize, step: usize| a.at(row, step).widen().wrapping_sub(a_zero.at(row));
    multiply_by(cpu, [rows, k], left, b, c)?;
    if b_zero.0.is_empty() || columns == 0 {
        return Ok(());
    }
    // The zero point of a column comes out of the sum: what is left to take away is it times the
    // sum of the row of A.
    for (row, sums) in c[..rows * columns].chunks_mut(columns).enumerate() {
        let total = (0..k).fold(0_i32, |total, step| total.wrapping_add(left(row, step)));
        for (column, sum) in sums.iter_mut().enumerate() {
            *sum = sum.wrapping_sub(total.wrapping_mul(b_zero.at(column)));
        }
    }
    Ok(())
}
