//! The lines of a tensor: its slices along some of its axes, for reductions, scans and norms.

use ort_core::ops::tensor::geometry::product;
use ort_core::{Result, ensure};

use crate::walk::{Walk, strides};

/// The lines of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lines {
    /// The first element of each line.
    pub begins: Walk,
    /// The elements of a line, relative to its first.
    pub along: Walk,
    /// The number of lines.
    pub count: usize,
    /// The elements of a line.
    pub len: usize,
}

impl Lines {
    /// Splits a tensor of this shape into lines along the axes of the mask.
    pub fn new(shape: &[usize], mask: &[bool]) -> Lines {
        let strides = strides(shape);
        let part = |wanted: bool| -> (Vec<usize>, Vec<i64>) {
            let axes = shape.iter().zip(&strides).zip(mask).filter(|(_, along)| **along == wanted);
            axes.map(|((size, stride), _)| (*size, i64::try_from(*stride).unwrap_or(i64::MAX))).unzip()
        };
        let ((kept, kept_steps), (along, along_steps)) = (part(false), part(true));
        Lines {
            count: product(&kept),
            len: product(&along),
            begins: Walk::new(&kept, &[kept_steps]),
            along: Walk::new(&along, &[along_steps]),
        }
    }

    /// Splits a tensor of this shape into lines along one axis.
    pub fn along_axis(shape: &[usize], axis: usize) -> Lines {
        let mask: Vec<bool> = (0..shape.len()).map(|other| other == axis).collect();
        Lines::new(shape, &mask)
    }

    /// Returns `count` contiguous lines of `len` elements.
    pub fn rows(count: usize, len: usize) -> Lines {
        Lines::new(&[count, len], &[false, true])
    }

    /// Refuses a number of results other than one for each line.
    pub fn check_results(&self, results: usize) -> Result<()> {
        ensure!(results == self.count, Fail, "{results} outputs for {} lines", self.count);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_axes_merge() {
        let lines = Lines::new(&[2, 3, 4, 5], &[false, true, true, false]);
        assert_eq!((lines.count, lines.len), (10, 12));
        assert_eq!(lines.along.steps, [[5]]);
    }
}
