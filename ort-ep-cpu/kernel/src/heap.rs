//! Upper bounds on the heap memory that kernels allocate besides workspaces and outputs, for
//! [`Executable::heap`].

use ort_core::Result;
use ort_core::ep::{Executable, IoShapes, RunCx};

/// Tables whose bound is smaller than this are not counted, because no input data makes them larger
/// than their bound.
const UNCOUNTED: usize = 64 << 10;

/// Returns the bytes of tables as [`Executable::heap`] reports them.
pub fn tables(bytes: usize) -> usize {
    if bytes < UNCOUNTED { 0 } else { bytes }
}

/// Returns the number of elements of a shape, saturating on overflow.
pub fn elements(shape: &[usize]) -> usize {
    // Before the product, which might saturate at sizes next to the 0.
    if shape.contains(&0) {
        return 0;
    }
    shape.iter().fold(1, |count: usize, size| count.saturating_mul(*size))
}

/// Returns the bytes of a shape's last two dimensions as `f64`.
pub fn matrix_bytes(shape: &[usize]) -> usize {
    elements(shape.last_chunk::<2>().map_or(shape, |matrix| &matrix[..])).saturating_mul(size_of::<f64>())
}

/// A kernel made of a closure and its heap bound.
pub struct WithHeap<B, R> {
    /// Returns the upper bound in bytes for the shapes of a run.
    pub bound: B,
    /// Runs the kernel.
    pub run: R,
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
