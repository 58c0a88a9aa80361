//! Matrices in slices, as operands and results of GEMMs of any type.

/// A strided matrix: its values, its shape (rows, columns), and its strides.
#[derive(Clone, Copy)]
pub struct Matrix<'a, T> {
    /// The elements.
    pub values: &'a [T],
    /// Rows and columns.
    pub shape: [usize; 2],
    /// Elements from one row to the next, and from one column to the next.
    pub strides: [usize; 2],
}

impl<'a, T> Matrix<'a, T> {
    /// Creates a row-major matrix.
    pub fn rows(values: &'a [T], rows: usize, columns: usize) -> Matrix<'a, T> {
        Matrix { values, shape: [rows, columns], strides: [columns, 1] }
    }

    /// Creates the transpose of a row-major matrix of shape `[columns, rows]`.
    pub fn transposed(values: &'a [T], rows: usize, columns: usize) -> Matrix<'a, T> {
        Matrix { values, shape: [rows, columns], strides: [1, rows] }
    }
}

/// The result of a GEMM.
pub struct GemmTarget<'a, T> {
    /// Holds the result.
    pub values: &'a mut [T],
    /// Stride from one row to the next.
    pub row_stride: usize,
    /// Whether the old values are added.
    pub add: bool,
}

impl<'a, T> GemmTarget<'a, T> {
    /// Overwrites the result.
    pub fn write(values: &'a mut [T], row_stride: usize) -> GemmTarget<'a, T> {
        GemmTarget { values, row_stride, add: false }
    }

    /// Adds to the result.
    pub fn accumulate(values: &'a mut [T], row_stride: usize) -> GemmTarget<'a, T> {
        GemmTarget { values, row_stride, add: true }
    }
}
