//! Batches of matrix products with numpy's broadcasting.

use ort_core::tensor::Shape;
use ort_core::{Result, ensure, error};

use crate::interrupt::spend;
use crate::kernels::broadcast::{Block, Broadcast};

/// The sizes of a batch of products.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Product {
    /// How many products there are.
    pub(crate) count: usize,
    /// Rows, columns, length of the sums.
    pub(crate) shape: [usize; 3],
    batch: Shape,
    /// For each side, the distance between products along each dimension of the batch; 0 where it
    /// is repeated.
    strides: [Shape; 2],
}

impl Product {
    /// The products of `a` and `b`, as `numpy.matmul` has them. Where the right side is a single
    /// matrix, all rows on the left make one product.
    pub(crate) fn new(a: &[usize], b: &[usize]) -> Result<Product> {
        Product::of(a, b, true)
    }

    /// The same for a left side whose matrices do not lie row by row unless `by_rows`: each makes a
    /// product of its own.
    pub(crate) fn of(a: &[usize], b: &[usize], by_rows: bool) -> Result<Product> {
        let (left, right) = (matrix(a, true)?, matrix(b, false)?);
        let ([rows, k], [steps, columns]) = (left.1, right.1);
        ensure!(k == steps, InvalidArgument, "the sums of the product differ: {a:?} and {b:?}");
        if by_rows && right.0.iter().all(|size| *size == 1) && left.0.len() >= right.0.len() {
            let rows = left.0.iter().product::<usize>() * rows;
            return Ok(Product {
                count: 1,
                shape: [rows, columns, k],
                batch: Shape::new(),
                strides: [Shape::new(), Shape::new()],
            });
        }
        let batch = ort_core::spec::broadcast::shapes(&[left.0, right.0])?;
        let strides = [(left.0, rows * k), (right.0, k * columns)].map(|(sizes, matrix)| {
            let mut strides: Shape = std::iter::repeat_n(0, batch.len()).collect();
            let mut step = matrix;
            for (size, stride) in sizes.iter().rev().zip(strides.iter_mut().rev()) {
                if *size != 1 {
                    *stride = step;
                }
                step *= size;
            }
            strides
        });
        Ok(Product { count: batch.iter().product(), shape: [rows, columns, k], batch, strides })
    }

    /// Which matrix of each side the product at `index` multiplies.
    pub(crate) fn matrices(&self, index: usize) -> [usize; 2] {
        let [rows, columns, k] = self.shape;
        let [left, right] = self.offsets(index);
        [left / (rows * k).max(1), right / (k * columns).max(1)]
    }

    /// The first elements of both sides of the product at `index`.
    pub(crate) fn offsets(&self, index: usize) -> [usize; 2] {
        let (mut rest, mut offsets) = (index, [0, 0]);
        for (axis, size) in self.batch.iter().enumerate().rev() {
            let at = rest % size;
            rest /= size;
            offsets[0] += at * self.strides[0][axis];
            offsets[1] += at * self.strides[1][axis];
        }
        offsets
    }
}

/// The batch and the matrix of one side.
fn matrix(shape: &[usize], is_left: bool) -> Result<(&[usize], [usize; 2])> {
    match shape {
        [batch @ .., rows, columns] => Ok((batch, [*rows, *columns])),
        [len] if is_left => Ok((&[], [1, *len])),
        [len] => Ok((&[], [*len, 1])),
        [] => Err(error!(InvalidArgument, "a matrix product needs operands of rank 1 or more")),
    }
}

/// Writes `from` of shape `shape` into all of `to`, whose shape it broadcasts to.
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
            let product = Product::new(a, b)?;
            assert_eq!((product.count, product.shape), (count, shape), "{a:?} {b:?}");
            assert_eq!(product.offsets(count - 1), last, "{a:?} {b:?}");
        }
        assert!(Product::new(&[2, 3], &[4, 5]).is_err());
        assert!(Product::new(&[], &[4, 5]).is_err());
        Ok(())
    }
}
