//! Sizes of batched matmuls, with NumPy's broadcasting.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as"
)]

use ort_core::tensor::Shape;
use ort_core::{Result, ensure, error};

use ort_cpu_kernel::broadcast::{Block, Broadcast};
use ort_cpu_threads::interrupt::spend;

/// The sizes of a batch of matmuls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MatmulBatch {
    /// The number of matmuls.
    pub(crate) count: usize,
    /// Rows, columns, and k (the reduction axis).
    pub(crate) shape: [usize; 3],
    batch: Shape,
    /// For each side, the stride between matrices along each dimension of the batch; 0 if the side
    /// is broadcast.
    strides: [Shape; 2],
}

impl MatmulBatch {
    /// Returns the matmuls of `a` and `b`, as in `numpy.matmul`. If the right side is a single
    /// matrix, all rows on the left form one matmul.
    pub(crate) fn new(a: &[usize], b: &[usize]) -> Result<MatmulBatch> {
        MatmulBatch::of(a, b, true)
    }

    /// Like [`new`](Self::new). Unless `by_rows`, matrices on the left are not row-major, so each
    /// needs a matmul of its own.
    pub(crate) fn of(a: &[usize], b: &[usize], by_rows: bool) -> Result<MatmulBatch> {
        let (lhs, rhs) = (matrix(a, true)?, matrix(b, false)?);
        let ([rows, k], [steps, columns]) = (lhs.1, rhs.1);
        ensure!(
            k == steps,
            Fail,
            "the inner dimensions of the matrix multiplication differ: {a:?} and {b:?}"
        );
        // All batch dimensions on the right are 1, so the rows on the left can be flattened.
        if by_rows && rhs.0.iter().all(|size| *size == 1) && lhs.0.len() >= rhs.0.len() {
            let rows = lhs.0.iter().product::<usize>() * rows;
            return Ok(MatmulBatch {
                count: 1,
                shape: [rows, columns, k],
                batch: Shape::new(),
                strides: [Shape::new(), Shape::new()],
            });
        }
        // ONNX Runtime's error is a `Fail` here, unlike that of other broadcasts.
        let batch = ort_core::spec::broadcast::shapes(&[lhs.0, rhs.0]).map_err(|_| {
            error!(Fail, "the batches of the matrix product do not broadcast: {a:?} and {b:?}")
        })?;
        let strides = [(lhs.0, rows * k), (rhs.0, k * columns)].map(|(sizes, matrix)| {
            // A stride of 0 repeats a matrix along a broadcast dimension, so nothing is copied.
            let mut strides: Shape = std::iter::repeat_n(0, batch.len()).collect();
            // Row-major over the batch dimensions; a matrix is the unit.
            let mut step = matrix;
            for (size, stride) in sizes.iter().rev().zip(strides.iter_mut().rev()) {
                if *size != 1 {
                    *stride = step;
                }
                step *= size;
            }
            strides
        });
        Ok(MatmulBatch { count: batch.iter().product(), shape: [rows, columns, k], batch, strides })
    }

    /// Returns which matrix of each side the matmul at `index` reads.
    pub(crate) fn matrices(&self, index: usize) -> [usize; 2] {
        let [rows, columns, k] = self.shape;
        let [lhs, rhs] = self.offsets(index);
        [lhs / (rows * k).max(1), rhs / (k * columns).max(1)]
    }

    /// Returns the offsets of both sides of the matmul at `index`.
    pub(crate) fn offsets(&self, index: usize) -> [usize; 2] {
        let (mut rest, mut offsets) = (index, [0, 0]);
        // Innermost first. No size is 0 here, because `index` is below their product.
        for (axis, size) in self.batch.iter().enumerate().rev() {
            let at = rest % size;
            rest /= size;
            offsets[0] += at * self.strides[0][axis];
            offsets[1] += at * self.strides[1][axis];
        }
        offsets
    }
}

/// Splits the shape of a side into batch and matrix. A vector is a row on the left, a column on the
/// right.
fn matrix(shape: &[usize], is_lhs: bool) -> Result<(&[usize], [usize; 2])> {
    match shape {
        [batch @ .., rows, columns] => Ok((batch, [*rows, *columns])),
        [len] if is_lhs => Ok((&[], [1, *len])),
        [len] => Ok((&[], [*len, 1])),
        [] => Err(error!(InvalidArgument, "a matrix product needs operands of rank 1 or more")),
    }
}

/// Broadcasts `from` of shape `shape` to all of `to`.
pub(crate) fn spread<T: Copy>(from: &[T], shape: &[usize], to: &mut [T], to_shape: &[usize]) -> Result<()> {
    let walk = Broadcast::new(to_shape, &[shape])?;
    let (mut buffer, mut at) = (Vec::new(), 0);
    while at < to.len() {
        let len = walk.block_len(at, 4096).max(1).min(to.len() - at);
        spend(len);
        let block = walk.block(0, from, at, len, &mut buffer);
        match block {
            Block::Slice(values) => to[at..at + len].copy_from_slice(values),
            Block::Scalar(value) => to[at..at + len].fill(value),
        }
        at += len;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_broadcast() -> Result<()> {
        // shapes, count, shape, offsets of the last product
        let cases: [(&[usize], &[usize], usize, [usize; 3], [usize; 2]); 6] = [
            (&[2, 3], &[3, 4], 1, [2, 4, 3], [0, 0]),
            (&[5, 2, 3], &[3, 4], 1, [10, 4, 3], [0, 0]),
            (&[5, 2, 3], &[5, 3, 4], 5, [2, 4, 3], [24, 48]),
            (&[2, 1, 2, 3], &[7, 3, 4], 14, [2, 4, 3], [6, 72]),
            (&[3], &[5, 3, 4], 5, [1, 4, 3], [0, 48]),
            (&[5, 2, 3], &[3], 1, [10, 1, 3], [0, 0]),
        ];
        for (a, b, count, shape, last) in cases {
            let matmuls = MatmulBatch::new(a, b)?;
            assert_eq!((matmuls.count, matmuls.shape), (count, shape), "{a:?} {b:?}");
            assert_eq!(matmuls.offsets(count - 1), last, "{a:?} {b:?}");
        }
        assert!(MatmulBatch::new(&[2, 3], &[4, 5]).is_err());
        assert!(MatmulBatch::new(&[], &[4, 5]).is_err());
        Ok(())
    }
}
