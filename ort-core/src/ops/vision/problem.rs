//! Problem descriptors of region pooling: a node's attributes and shapes, read once.

use crate::ir::Attributes;
use crate::ops::tensor::geometry::product;
use crate::{Result, ensure, error};

/// Feature maps and the regions of them that `RoiAlign` and `MaxRoiPool` pool.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Regions {
    /// The number of feature maps.
    pub images: usize,
    /// The channels of a map.
    pub channels: usize,
    /// The height and width of a map.
    pub size: [usize; 2],
    /// The number of regions.
    pub count: usize,
    /// The height and width of a pooled region.
    pub pooled: [usize; 2],
    /// The size of a map over that of the image in whose coordinates regions are given.
    pub scale: f32,
}

impl Regions {
    /// Reads the shapes of maps, regions and result. `numbers` describe a region.
    ///
    /// # Errors
    ///
    /// If they do not fit each other.
    pub fn new(
        attrs: &Attributes,
        maps: &[usize],
        regions: &[usize],
        numbers: usize,
        result: &[usize],
    ) -> Result<Regions> {
        let (&[images, channels, height, width], &[count, _, rows, columns]) = (maps, result) else {
            return Err(error!(InvalidArgument, "feature maps of shape {maps:?}"));
        };
        // A region of an empty map has no element to pool.
        let is_readable = product(result) == 0 || product(maps) > 0;
        let fits = product(regions) == count.saturating_mul(numbers) && is_readable;
        ensure!(fits, InvalidArgument, "regions {regions:?} of feature maps {maps:?}");
        let scale = attrs.float("spatial_scale")?;
        Ok(Regions { images, channels, size: [height, width], count, pooled: [rows, columns], scale })
    }
}

/// The sampling of `RoiAlign`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoiAlign {
    /// Whether regions are shifted by half a pixel.
    pub half_pixel: bool,
    /// Whether bins take the maximum instead of the average.
    pub greatest: bool,
    /// The samples of a bin along each axis; 0 chooses them by the region's size.
    pub samples: usize,
}

impl RoiAlign {
    /// Reads the attributes of a node.
    pub fn new(attrs: &Attributes) -> Result<RoiAlign> {
        Ok(RoiAlign {
            half_pixel: attrs.string("coordinate_transformation_mode")? == "half_pixel",
            greatest: attrs.string("mode")? == "max",
            samples: usize::try_from(attrs.int("sampling_ratio")?).unwrap_or(0),
        })
    }
}
