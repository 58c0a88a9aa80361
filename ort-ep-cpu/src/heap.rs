//! Bounds on what kernels take of the heap beside workspaces and outputs, for [`Executable::heap`].

use ort_core::Result;
use ort_core::ep::{Executable, IoShapes, RunCx};

/// Tables below this size are not counted: no data makes them larger.
const UNCOUNTED: usize = 64 << 10;

/// The bytes of tables as [`Executable::heap`] tells them.
pub(crate) fn tables(bytes: usize) -> usize {
    if bytes < UNCOUNTED { 0 } else { bytes }
}

/// The elements of a shape.
pub(crate) fn elements(shape: &[usize]) -> usize {
    if shape.contains(&0) {
        return 0;
    }
    shape.iter().fold(1, |count: usize, size| count.saturating_mul(*size))
}

/// The bytes of the last two dimensions of a shape as doubles.
pub(crate) fn matrix_bytes(shape: &[usize]) -> usize {
    elements(shape.last_chunk::<2>().map_or(shape, |matrix| &matrix[..])).saturating_mul(size_of::<f64>())
}

/// A kernel that is a function, with its bound.
pub(crate) struct WithHeap<B, R> {
    pub(crate) bound: B,
    pub(crate) run: R,
}

impl<B, R> Executable for WithHeap<B, R>
where
    B: Fn(&IoShapes<'_>) -> usize + Send + Sync,
    R: Fn(&mut RunCx<'_>) -> Result<()> + Send + Sync,
{
    fn heap(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        Ok(tables((self.bound)(shapes)))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        (self.run)(cx)
    }
}
