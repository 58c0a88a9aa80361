//! Pools and `MaxUnpool`.

use super::conv::{ImageShape, PixelLayout, WindowAxes, three_axes};
use crate::ir::Attributes;
use crate::ops::nn::geometry::Windows;
use crate::ops::tensor::geometry::product;
use crate::{Result, ensure, error};

/// Reads the windows of a pool over an image of this shape.
///
/// # Errors
///
/// If an attribute is out of range, or does not fit the image.
pub fn pool_windows(attrs: &Attributes, shape: &[usize], layout: PixelLayout) -> Result<WindowAxes> {
    let image = ImageShape::new(shape, layout)?;
    three_axes(&Windows::of_pool(attrs, shape.len())?.on(&image.places)?)
}

/// What a pool combines the elements of a window to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolFold {
    /// The combination.
    pub kind: PoolKind,
    /// The power of a norm: the attribute `p`, 1 if there is none.
    pub power: i32,
}

/// The combinations of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolKind {
    /// Their mean.
    Average,
    /// Their maximum.
    Max,
    /// The sum of their magnitudes.
    L1,
    /// The root of the sum of their squares.
    L2,
    /// The norm of another power.
    Lp,
}

impl PoolFold {
    /// Reads a float pool other than `MaxPool`.
    ///
    /// # Errors
    ///
    /// If the attribute `p` of a norm is 0 or beyond 32 bits.
    pub fn of(op: &str, attrs: &Attributes) -> Result<PoolFold> {
        let power = attrs.find_int("p").unwrap_or(1);
        // The root of a norm is a power of 1 / p.
        let known = i32::try_from(power).ok().filter(|power| *power != 0);
        let power = known.ok_or_else(|| error!(InvalidGraph, "a norm with p = {power}"))?;
        let kind = match (op, power) {
            ("AveragePool" | "NhwcAveragePool" | "GlobalAveragePool", _) => PoolKind::Average,
            ("GlobalMaxPool", _) => PoolKind::Max,
            (_, 1) => PoolKind::L1,
            (_, 2) => PoolKind::L2,
            _ => PoolKind::Lp,
        };
        Ok(PoolFold { kind, power })
    }
}

/// The image that `MaxUnpool` restores; its indices count over it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnpooledImage {
    /// The shape, with batch and channels.
    pub shape: Vec<usize>,
}

impl UnpooledImage {
    /// Reads a node on values of this shape, with this number of indices, for a result of
    /// `result_rank` axes.
    ///
    /// # Errors
    ///
    /// If an attribute is out of range, or there is not one index for each value.
    pub fn new(
        attrs: &Attributes,
        values: &[usize],
        indices: &[usize],
        result_rank: usize,
    ) -> Result<UnpooledImage> {
        let [batch, channels, sizes @ ..] = values else {
            return Err(error!(InvalidArgument, "an image of shape {values:?}"));
        };
        let fits = product(indices) == product(values) && result_rank == values.len();
        ensure!(fits, InvalidArgument, "{indices:?} indices for values of shape {values:?}");
        // In a transposed pool the windows slide over the result, whose size is `input`.
        let windows = Windows::of_pool(attrs, values.len())?.transposed_on(attrs, sizes)?;
        let shape = [*batch, *channels].into_iter().chain(windows.iter().map(|axis| axis.input));
        Ok(UnpooledImage { shape: shape.collect() })
    }

    /// The number of elements.
    pub fn count(&self) -> usize {
        product(&self.shape)
    }
}
