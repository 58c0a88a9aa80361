//! Strided matrices, and the types that weights are stored in.

use super::GemmError;

/// A strided matrix view. Transposing it swaps the two strides.
#[derive(Clone, Copy, Debug)]
pub struct Strided<'a> {
    /// The slice that holds all elements.
    pub values: &'a [f32],
    /// The number of rows.
    pub rows: usize,
    /// The number of columns.
    pub columns: usize,
    /// Elements from one row to the next.
    pub row_stride: usize,
    /// Elements from one column to the next.
    pub column_stride: usize,
    /// Columns per element: 2 for bf16 pairs.
    pub terms: usize,
}

impl<'a> Strided<'a> {
    /// Creates a matrix of `[rows, columns]` whose element (i, j) is
    /// `values[i * strides[0] + j * strides[1]]`.
    ///
    /// # Errors
    ///
    /// If the last element is outside `values`.
    pub fn new(values: &'a [f32], shape: [usize; 2], strides: [usize; 2]) -> Result<Self, GemmError> {
        let [rows, columns] = shape;
        let [row_stride, column_stride] = strides;
        check_extent("a matrix", values.len(), shape, strides)?;
        Ok(Strided { values, rows, columns, row_stride, column_stride, terms: 1 })
    }

    /// Creates an A of `[rows, columns]` whose elements are bf16 pairs of neighbours, as
    /// [`super::Pairing`] makes them. The pairs of a row are contiguous, and rows start
    /// `row_stride` apart.
    ///
    /// # Errors
    ///
    /// If the last pair is outside `values`, or the number of columns is odd.
    pub fn of_pairs(
        values: &'a [f32],
        [rows, columns]: [usize; 2],
        row_stride: usize,
    ) -> Result<Self, GemmError> {
        if !columns.is_multiple_of(2) {
            return Err(GemmError::Shape("a column has no other to pair with"));
        }
        let pairs = Strided::new(values, [rows, columns / 2], [row_stride, 1])?;
        Ok(Strided { columns, terms: 2, ..pairs })
    }

    /// Creates a contiguous row-major matrix.
    ///
    /// # Errors
    ///
    /// If `values` is shorter than `rows * columns`.
    pub fn row_major(values: &'a [f32], rows: usize, columns: usize) -> Result<Self, GemmError> {
        Strided::new(values, [rows, columns], [columns, 1])
    }

    /// Returns the transpose, without copying.
    #[must_use]
    pub fn transposed(self) -> Self {
        Strided {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }
}

/// Checks that a strided matrix is inside a slice of `len` elements.
pub(super) fn check_extent(
    what: &'static str,
    len: usize,
    shape: [usize; 2],
    strides: [usize; 2],
) -> Result<(), GemmError> {
    // An empty matrix needs no elements, whatever its strides.
    if shape.contains(&0) {
        return Ok(());
    }
    // The last element decides. Sizes come from a model, so the arithmetic must not wrap.
    let along = |axis: usize| (shape[axis] - 1).checked_mul(strides[axis]);
    let needed = along(0).zip(along(1)).and_then(|(x, y)| x.checked_add(y)?.checked_add(1));
    match needed {
        Some(needed) if needed <= len => Ok(()),
        _ => Err(GemmError::TooShort { what, needed: needed.unwrap_or(usize::MAX), len }),
    }
}

/// A storage type of weights, widened to `f32` during packing.
pub trait Weight: Copy + Send + Sync {
    /// Returns the value as `f32`, exactly.
    fn widen(self) -> f32;
}

impl Weight for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

/// A float as little-endian bytes, as ONNX stores it: weights in a mapped file may be unaligned.
impl Weight for [u8; 4] {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_le_bytes(self)
    }
}

impl Weight for half::f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

impl Weight for half::bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
}
