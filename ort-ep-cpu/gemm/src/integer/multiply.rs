//! Quantized matmul of two matrices with zero points.

use super::{ByteRows, Cpu, GemmError, IntegerGemm, PackedBytes, Target, Terms};
use ort_cpu_threads::interrupt::spending;
use ort_cpu_vector::simd::{Simd, SimdOp, dispatch};

/// The left operand: row-major quantized values and their zero points, one for all rows or one per
/// row.
#[derive(Clone, Copy, Debug)]
pub struct QuantizedLhs<'a> {
    /// The quantized values.
    pub values: &'a [u8],
    /// Whether they are signed.
    pub signed: bool,
    /// The number of rows.
    pub rows: usize,
    /// The zero points, one or one per row.
    pub zeros: &'a [i32],
}

/// A quantized matmul: `sum over k of (A[i][k] - a_zero[i]) * (B[k][j] - b_zero[j])`.
#[derive(Clone, Copy, Debug)]
pub struct QuantizedMatmul<'a> {
    /// The left operand.
    pub lhs: QuantizedLhs<'a>,
    /// The packed right operand.
    pub rhs: PackedBytes<'a>,
    /// One zero point for all columns, or one per column.
    pub rhs_zeros: &'a [i32],
    /// Added to the accumulators of each column, or empty.
    pub bias: &'a [i32],
}

/// Returns the `i32` elements of workspace that [`multiply`] needs for a shape (rows, columns, k).
pub fn multiply_workspace_len([rows, columns, k]: [usize; 3], signed: bool) -> usize {
    let copy = if is_direct(k, signed) { 0 } else { rows.saturating_mul(k.div_ceil(4)) };
    rows.saturating_mul(3).saturating_add(columns.saturating_mul(2)).saturating_add(copy)
}

/// Whether the left operand is read in place.
fn is_direct(k: usize, signed: bool) -> bool {
    !signed && k.is_multiple_of(4)
}

/// Returns the common value of a list if all its values are equal. An empty list counts as 0.
fn uniform(values: &[i32]) -> Option<i32> {
    match values {
        [] => Some(0),
        [first, rest @ ..] => rest.iter().all(|value| value == first).then_some(*first),
    }
}

/// Computes a quantized matmul. The rows of the target are `row_stride` apart.
///
/// # Errors
///
/// If shapes do not match or a slice is too short.
pub fn multiply(
    cpu: Cpu,
    matmul: &QuantizedMatmul<'_>,
    target: Target<'_>,
    row_stride: usize,
    workspace: &mut [i32],
) -> Result<(), GemmError> {
    let (lhs, rhs) = (&matmul.lhs, &matmul.rhs);
    let (rows, k, columns) = (lhs.rows, rhs.k, rhs.columns);
    let (needed, len) = (rows.saturating_mul(k), lhs.values.len());
    if len < needed {
        return Err(GemmError::TooShort { what: "a matrix of quantized values", needed, len });
    }
    let fits = |zeros: &[i32], count: usize| matches!(zeros.len(), 0 | 1) || zeros.len() == count;
    let has_bias = matmul.bias.is_empty() || matmul.bias.len() >= columns;
    if !fits(lhs.zeros, rows) || !fits(matmul.rhs_zeros, columns) || !has_bias {
        return Err(GemmError::Shape("zero points are neither one nor one for each row or column"));
    }
    // The terms of no rows would be missing below.
    if rows == 0 || columns == 0 {
        return Ok(());
    }
    let needed = multiply_workspace_len([rows, columns, k], lhs.signed);
    let len = workspace.len();
    let workspace = workspace.get_mut(..needed).ok_or(GemmError::TooShort {
        what: "the workspace of a GEMM",
        needed,
        len,
    })?;
    let (row_terms, rest) = workspace.split_at_mut(rows);
    let (of_rows, rest) = rest.split_at_mut(rows);
    let (minus_zeros, rest) = rest.split_at_mut(rows);
    let (column_terms, rest) = rest.split_at_mut(columns);
    let (rhs_zeros, copy) = rest.split_at_mut(columns);
    let copy: &mut [u8] = bytemuck::cast_slice_mut(copy);
    let bytes = rows_of(lhs, k, copy);
    let operand = ByteRows::new(bytes, [rows, k.div_ceil(4)], 4 * k.div_ceil(4))?;

    let shift = if lhs.signed { 128 } else { 0 };
    let lhs_zero = |row: usize| lhs.zeros.get(row).or(lhs.zeros.first()).copied().unwrap_or(0) + shift;
    let shift = if rhs.unsigned { -128 } else { 0 };
    let rhs_zero = |column: usize| {
        let zeros = matmul.rhs_zeros;
        zeros.get(column).or(zeros.first()).copied().unwrap_or(0) + shift
    };
    let mut terms = Terms::default();
    // The zero points of rows multiply the sums of columns.
    let sums = &rhs.sums[..columns];
    match uniform(lhs.zeros) {
        // A zero point of 0 adds nothing.
        Some(_) if lhs_zero(0) == 0 => terms.columns = matmul.bias,
        Some(_) => {
            for (column, (term, sum)) in column_terms.iter_mut().zip(sums).enumerate() {
                let bias = matmul.bias.get(column).copied().unwrap_or(0);
                *term = bias.wrapping_sub(lhs_zero(0).wrapping_mul(*sum));
            }
            terms.columns = column_terms;
        }
        None => {
            // Zero points per row need an outer product with the column sums.
            minus_zeros.iter_mut().enumerate().for_each(|(row, zero)| *zero = -lhs_zero(row));
            terms.outer[0] = (minus_zeros, sums);
            terms.columns = matmul.bias;
        }
    }
    // The zero points of columns multiply the sums of rows.
    let zero = uniform(matmul.rhs_zeros).map(|_| rhs_zero(0));
    if zero != Some(0) {
        for (row, to) in spending(4 + k / 4, of_rows.iter_mut()).enumerate() {
            let bytes = &bytes[row * operand.stride..][..operand.stride];
            let sum = dispatch(cpu.isa, Sum(bytes));
            *to = (k as i32).wrapping_mul(lhs_zero(row)).wrapping_sub(sum);
        }
        match zero {
            Some(zero) => {
                row_terms.iter_mut().zip(&*of_rows).for_each(|(to, of_row)| *to = zero.wrapping_mul(*of_row));
                terms.rows = row_terms;
            }
            None => {
                rhs_zeros.iter_mut().enumerate().for_each(|(column, zero)| *zero = rhs_zero(column));
                terms.outer[1] = (of_rows, rhs_zeros);
            }
        }
    }
    let strip = [columns.max(1); 2];
    let gemm = IntegerGemm { lhs: operand, rhs: rhs.operand(), signed_lhs: false, terms, strip, row_stride };
    gemm.run(cpu, target)
}

/// Returns the left operand as unsigned bytes in whole groups of four: in place, or copied.
fn rows_of<'a>(lhs: &QuantizedLhs<'a>, k: usize, copy: &'a mut [u8]) -> &'a [u8] {
    if is_direct(k, lhs.signed) {
        return lhs.values;
    }
    let flip = if lhs.signed { 0x80 } else { 0 };
    let stride = 4 * k.div_ceil(4);
    if stride > 0 {
        for (from, to) in spending(4 + k / 4, lhs.values.chunks_exact(k).zip(copy.chunks_exact_mut(stride))) {
            let (to, rest) = to.split_at_mut(k);
            to.iter_mut().zip(from).for_each(|(to, from)| *to = from ^ flip);
            // The padding must not count in the sum of the row.
            rest.fill(0);
        }
    }
    copy
}

/// The sum of a row's bytes.
struct Sum<'a>(&'a [u8]);

impl SimdOp for Sum<'_> {
    type Output = i32;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> i32 {
        self.0.iter().fold(0_i32, |sum, byte| sum.wrapping_add(i32::from(*byte)))
    }
}
