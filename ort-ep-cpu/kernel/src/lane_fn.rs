//! Functions of one lane: the elements along an axis.

/// A function of one lane, in place. Types other than `f32` are converted to `f64`.
pub trait LaneFn: Sync {
    /// Applies the function to a lane of `f32`.
    fn f32(&self, lane: &mut [f32]);
    /// Applies the function to all columns of a block of `f32` at once. Returns false if it has no
    /// loop for that.
    fn f32_columns(&self, _block: &mut [f32], _inner: usize) -> bool {
        false
    }
    /// Applies the function to a lane of any other type.
    fn f64(&self, lane: &mut [f64]);
}
