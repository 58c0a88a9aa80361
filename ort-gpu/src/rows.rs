//! Rows of a reduction, a scan or a normalization: the slices of a tensor along some of its axes.
//!
//! A row may be strided, unlike a row of a matrix.

use ort_core::ops::tensor::geometry::product;
use ort_core::{Result, ensure};

use crate::walk::{Walk, strides};

/// The rows of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StridedRows {
    /// The first element of each row.
    pub begins: Walk,
    /// The elements of a row, relative to its first.
    pub along: Walk,
    /// The number of rows.
    pub count: usize,
    /// The elements of a row.
    pub len: usize,
}

impl StridedRows {
    /// Splits a tensor of this shape into rows along the axes of the mask.
    pub fn new(shape: &[usize], mask: &[bool]) -> StridedRows {
        let strides = strides(shape);
        let part = |wanted: bool| -> (Vec<usize>, Vec<i64>) {
            let axes = shape.iter().zip(&strides).zip(mask).filter(|(_, along)| **along == wanted);
            // Only an empty tensor has strides beyond `i64`, and no element of it is read.
            axes.map(|((size, stride), _)| (*size, i64::try_from(*stride).unwrap_or(i64::MAX))).unzip()
        };
        let ((kept, kept_steps), (along, along_steps)) = (part(false), part(true));
        StridedRows {
            count: product(&kept),
            len: product(&along),
            begins: Walk::new(&kept, &[kept_steps]),
            along: Walk::new(&along, &[along_steps]),
        }
    }

    /// Splits a tensor of this shape into rows along one axis.
    pub fn along_axis(shape: &[usize], axis: usize) -> StridedRows {
        let mask: Vec<bool> = (0..shape.len()).map(|other| other == axis).collect();
        StridedRows::new(shape, &mask)
    }

    /// Returns `count` contiguous rows of `len` elements.
    pub fn rows(count: usize, len: usize) -> StridedRows {
        StridedRows::new(&[count, len], &[false, true])
    }

    /// Refuses a number of results other than one for each row.
    pub fn check_results(&self, results: usize) -> Result<()> {
        ensure!(results == self.count, Fail, "{results} outputs for {} rows", self.count);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_axes_merge() {
        let rows = StridedRows::new(&[2, 3, 4, 5], &[false, true, true, false]);
        assert_eq!((rows.count, rows.len), (10, 12));
        assert_eq!(rows.along.steps, [[5]]);
    }
}
