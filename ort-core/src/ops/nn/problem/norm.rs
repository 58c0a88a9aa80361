//! Normalizations of rows, of groups of channels, and over neighbouring channels.

use crate::ir::Attributes;
use crate::ops::tensor::geometry::{kernel_axis, product};
use crate::{Result, ensure, error};

/// What `MeanVarianceNormalization` adds to the standard deviation.
pub const MVN_EPSILON: f32 = 1e-9;

/// Whether a normalization of rows subtracts their mean.
pub fn centers(op: &str) -> bool {
    matches!(op, "LayerNormalization" | "SkipLayerNormalization")
}

/// The rows of a normalization.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowNorm {
    /// The number of rows.
    pub count: usize,
    /// The elements of a row.
    pub len: usize,
}

impl RowNorm {
    /// Reads the attribute `axis` of a `LayerNormalization` or `RMSNormalization` node.
    ///
    /// # Errors
    ///
    /// If the axis is out of range.
    pub fn from_axis(attrs: &Attributes, shape: &[usize]) -> Result<RowNorm> {
        let axis = kernel_axis(attrs.int("axis")?, shape.len())?;
        let (front, row) = shape.split_at_checked(axis).unwrap_or((shape, &[]));
        Ok(RowNorm { count: product(front), len: product(row) })
    }

    /// Reads a `SkipLayerNormalization` node, or its form without a mean. `parameters` are the
    /// sizes of gamma, beta and bias, as far as they are given.
    ///
    /// # Errors
    ///
    /// If a parameter does not have the size of a row, or the skip does not fit the input.
    pub fn of_skip(
        shape: &[usize],
        skip: usize,
        parameters: impl IntoIterator<Item = usize>,
    ) -> Result<RowNorm> {
        let len = shape.last().copied().unwrap_or(0);
        for count in parameters {
            ensure!(count == len, InvalidArgument, "gamma, beta or bias has {count} values, expected {len}");
        }
        let count = product(shape);
        // The skip may lack the batch axis or have size 1 there, and then repeats for each item.
        let fits = count == 0 || skip > 0 && count.is_multiple_of(skip);
        ensure!(fits, InvalidArgument, "a skip of {skip} values for {count}");
        Ok(RowNorm { count: count.checked_div(len).unwrap_or(0), len })
    }
}

/// Returns the channels of an image of this shape, and the elements of a channel.
pub fn channels_of(shape: &[usize]) -> (usize, usize) {
    (shape.get(1).copied().unwrap_or(1), product(shape.get(2..).unwrap_or_default()))
}

/// Refuses a parameter that does not have one value for each channel.
pub fn check_parameter(count: usize, channels: usize) -> Result<()> {
    ensure!(
        count == channels,
        InvalidArgument,
        "got {count} parameters, expected one for each of the {channels} channels"
    );
    Ok(())
}

/// The groups of channels that `GroupNormalization` and `InstanceNormalization` normalize.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelGroups {
    /// The channels of an image.
    pub channels: usize,
    /// The groups of an image.
    pub groups: usize,
    /// The channels of a group.
    pub each: usize,
    /// The elements of a channel.
    pub spatial: usize,
    /// The groups of all images.
    pub count: usize,
}

impl ChannelGroups {
    /// Reads the attribute `num_groups` of a node on an image of this shape. Without one, each
    /// channel is a group.
    ///
    /// # Errors
    ///
    /// If the groups do not divide the channels.
    pub fn new(attrs: &Attributes, shape: &[usize]) -> Result<ChannelGroups> {
        let (channels, spatial) = channels_of(shape);
        // `GroupNormalization` alone has the attribute; `InstanceNormalization` normalizes each
        // channel.
        let groups = match attrs.find_int("num_groups") {
            Some(groups) => usize::try_from(groups).unwrap_or(0),
            None => channels,
        };
        let each = channels.checked_div(groups).unwrap_or(0);
        let even = each.checked_mul(groups) == Some(channels);
        ensure!(
            even,
            InvalidArgument,
            "the number of channels is {channels}, expected a multiple of num_groups {groups}"
        );
        let count = shape.first().copied().unwrap_or(1).saturating_mul(groups);
        Ok(ChannelGroups { channels, groups, each, spatial, count })
    }

    /// The elements of a group.
    pub fn len(&self) -> usize {
        self.each.saturating_mul(self.spatial)
    }

    /// Whether groups have no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The neighbouring channels and coefficients of `LRN`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LocalResponse {
    /// The channels of an image.
    pub channels: usize,
    /// The elements of a channel.
    pub spatial: usize,
    /// The neighbours before a channel, at most all channels.
    pub before: usize,
    /// The neighbours after a channel, at most all channels.
    pub after: usize,
    /// The factor of the sum of squares.
    pub alpha: f32,
    /// The exponent.
    pub beta: f32,
    /// What is added to the sum.
    pub bias: f32,
}

impl LocalResponse {
    /// Reads a node on an image of this shape.
    ///
    /// # Errors
    ///
    /// If the attribute `size` is not positive.
    pub fn new(attrs: &Attributes, shape: &[usize]) -> Result<LocalResponse> {
        let (channels, spatial) = channels_of(shape);
        let size = usize::try_from(attrs.int("size")?).ok().filter(|size| *size > 0);
        let size = size.ok_or_else(|| error!(InvalidGraph, "LRN over no channels"))?;
        Ok(LocalResponse {
            channels,
            spatial,
            // The bound by the channels keeps sums of a place and `size`, an attribute, from
            // overflowing.
            before: ((size - 1) / 2).min(channels),
            after: (size / 2).min(channels),
            alpha: attrs.float("alpha")? / size as f32,
            beta: attrs.float("beta")?,
            bias: attrs.float("bias")?,
        })
    }
}
