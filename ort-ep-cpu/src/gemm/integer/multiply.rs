//! A product of two matrices of codes with zero points.

use super::{ByteRows, Cpu, GemmError, IntegerGemm, PackedBytes, Target, Terms};
use crate::interrupt::spending;
use crate::simd::{Simd, SimdOp, dispatch};

/// A left side: codes that lie row by row, and its zero points, one for all or one for each row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Left<'a> {
    pub(crate) codes: &'a [u8],
    pub(crate) signed: bool,
    pub(crate) rows: usize,
    pub(crate) zeros: &'a [i32],
}

/// A product of codes less their zero points: `sum over k of (A[i][k] - a_zero[i]) * (B[k][j] -
/// b_zero[j])`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CodeProduct<'a> {
    pub(crate) left: Left<'a>,
    pub(crate) right: PackedBytes<'a>,
    /// One for all columns, or one for each.
    pub(crate) right_zeros: &'a [i32],
    /// What is added to the sums of each column, or nothing.
    pub(crate) bias: &'a [i32],
}

/// Numbers of workspace that [`multiply`] needs for a shape (rows, columns, length of the sums).
pub(crate) fn multiply_workspace_len([rows, columns, k]: [usize; 3], signed: bool) -> usize {
    let copy = if is_direct(k, signed) { 0 } else { rows.saturating_mul(k.div_ceil(4)) };
    rows.saturating_mul(3).saturating_add(columns.saturating_mul(2)).saturating_add(copy)
}

/// Whether a left side is read where it lies.
fn is_direct(k: usize, signed: bool) -> bool {
    !signed && k.is_multiple_of(4)
}

/// The only value of a list whose values are equal; none has 0.
fn uniform(values: &[i32]) -> Option<i32> {
    match values {
        [] => Some(0),
        [first, rest @ ..] => rest.iter().all(|value| value == first).then_some(*first),
    }
}

/// Computes a product. The rows of the target lie `row_stride` apart.
///
/// # Errors
///
/// When shapes do not go together or a slice is too short.
pub(crate) fn multiply(
    cpu: Cpu,
    product: &CodeProduct<'_>,
    target: Target<'_>,
    row_stride: usize,
    workspace: &mut [i32],
) -> Result<(), GemmError> {
    let (left, right) = (&product.left, &product.right);
    let (rows, k, columns) = (left.rows, right.k, right.columns);
    let (needed, len) = (rows.saturating_mul(k), left.codes.len());
    if len < needed {
        return Err(GemmError::TooShort { what: "a matrix of codes", needed, len });
    }
    let fits = |zeros: &[i32], count: usize| matches!(zeros.len(), 0 | 1) || zeros.len() == count;
    let has_bias = product.bias.is_empty() || product.bias.len() >= columns;
    if !fits(left.zeros, rows) || !fits(product.right_zeros, columns) || !has_bias {
        return Err(GemmError::Shape("zero points are neither one nor one for each row or column"));
    }
    let needed = multiply_workspace_len([rows, columns, k], left.signed);
    let len = workspace.len();
    let workspace = workspace.get_mut(..needed).ok_or(GemmError::TooShort {
        what: "the workspace of a product",
        needed,
        len,
    })?;
    let (row_terms, rest) = workspace.split_at_mut(rows);
    let (of_rows, rest) = rest.split_at_mut(rows);
    let (minus_zeros, rest) = rest.split_at_mut(rows);
    let (column_terms, rest) = rest.split_at_mut(columns);
    let (right_zeros, copy) = rest.split_at_mut(columns);
    let copy: &mut [u8] = bytemuck::cast_slice_mut(copy);
    let bytes = rows_of(left, k, copy);
    let operand = ByteRows::new(bytes, [rows, k.div_ceil(4)], 4 * k.div_ceil(4))?;

    let shift = if left.signed { 128 } else { 0 };
    let left_zero = |row: usize| left.zeros.get(row).or(left.zeros.first()).copied().unwrap_or(0) + shift;
    let shift = if right.unsigned { -128 } else { 0 };
    let right_zero = |column: usize| {
        let zeros = product.right_zeros;
        zeros.get(column).or(zeros.first()).copied().unwrap_or(0) + shift
    };
    let mut terms = Terms::default();
    // The zero points of rows take the sums of columns.
    let sums = &right.sums[..columns];
    match uniform(left.zeros) {
        Some(_) if left_zero(0) == 0 => terms.columns = product.bias,
        Some(_) => {
            for (column, (term, sum)) in column_terms.iter_mut().zip(sums).enumerate() {
                let bias = product.bias.get(column).copied().unwrap_or(0);
                *term = bias.wrapping_sub(left_zero(0).wrapping_mul(*sum));
            }
            terms.columns = column_terms;
        }
        None => {
            minus_zeros.iter_mut().enumerate().for_each(|(row, zero)| *zero = -left_zero(row));
            terms.outer[0] = (minus_zeros, sums);
            terms.columns = product.bias;
        }
    }
    // Those of columns take the sums of rows.
    let zero = uniform(product.right_zeros).map(|_| right_zero(0));
    if zero != Some(0) {
        for (row, to) in spending(4 + k / 4, of_rows.iter_mut()).enumerate() {
            let bytes = &bytes[row * operand.stride..][..operand.stride];
            let sum = dispatch(cpu.isa, Sum(bytes));
            *to = (k as i32).wrapping_mul(left_zero(row)).wrapping_sub(sum);
        }
        match zero {
            Some(zero) => {
                row_terms.iter_mut().zip(&*of_rows).for_each(|(to, of_row)| *to = zero.wrapping_mul(*of_row));
                terms.rows = row_terms;
            }
            None => {
                right_zeros.iter_mut().enumerate().for_each(|(column, zero)| *zero = right_zero(column));
                terms.outer[1] = (of_rows, right_zeros);
            }
        }
    }
    let line = [columns.max(1); 2];
    let gemm =
        IntegerGemm { left: operand, right: right.operand(), signed_left: false, terms, line, row_stride };
    gemm.run(cpu, target)
}

/// The bytes of a left side as unsigned ones in whole groups of four: where they lie, or copied.
fn rows_of<'a>(left: &Left<'a>, k: usize, copy: &'a mut [u8]) -> &'a [u8] {
    if is_direct(k, left.signed) {
        return left.codes;
    }
    let flip = if left.signed { 0x80 } else { 0 };
    let stride = 4 * k.div_ceil(4);
    if stride > 0 {
        for (from, to) in spending(4 + k / 4, left.codes.chunks_exact(k).zip(copy.chunks_exact_mut(stride))) {
            let (to, rest) = to.split_at_mut(k);
            to.iter_mut().zip(from).for_each(|(to, from)| *to = from ^ flip);
            // What the right side multiplies with zeros must not count in the sum of the row.
            rest.fill(0);
        }
    }
    copy
}

/// The sum of bytes.
struct Sum<'a>(&'a [u8]);

impl SimdOp for Sum<'_> {
    type Output = i32;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> i32 {
        self.0.iter().fold(0_i32, |sum, byte| sum.wrapping_add(i32::from(*byte)))
    }
}
