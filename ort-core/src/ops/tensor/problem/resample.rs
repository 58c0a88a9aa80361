//! Resampling: `Resize`, `GridSample`, `AffineGrid`, and the blocks of `Col2Im`.

use crate::dtype::DType;
use crate::ir::Attributes;
use crate::ops::tensor::geometry::{ResizePolicy, normalize_axes, product};
use crate::tensor::TensorView;
use crate::{Result, ensure, error};

/// The coordinate transformation that reads a region, and extrapolates outside of the input.
const CROP: &str = "tf_crop_and_resize";

/// One axis of a `Resize`, or several adjacent ones that keep their size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ResizeAxis {
    /// The size of the input.
    pub from: usize,
    /// The size of the result.
    pub to: usize,
    /// Elements of the result per element of the input.
    pub scale: f32,
    /// The size of the result before truncation to an integer.
    pub width: f32,
    /// The part of the input that is read, from 0 to 1.
    pub roi: [f32; 2],
}

impl ResizeAxis {
    /// Whether the axis keeps its elements.
    pub fn stays(&self) -> bool {
        self.from == self.to && self.scale == 1.0 && self.roi == [0.0, 1.0]
    }
}

/// The attributes of `Resize` in single precision, in which devices compute.
#[derive(Clone, Copy, Debug)]
pub struct Resize<'a> {
    /// The attribute `mode`.
    pub mode: &'a str,
    /// The attribute `coordinate_transformation_mode`.
    pub transform: &'a str,
    /// The attribute `nearest_mode`.
    pub rounding: &'a str,
    /// Whether filters widen by the factor by which an axis shrinks.
    pub antialias: bool,
    /// Whether weights outside of the input count as 0.
    pub exclude_outside: bool,
    /// The value outside of the input.
    pub extrapolation: f32,
    /// The coefficient of the cubic filter.
    pub cubic_a: f32,
}

/// The optional inputs of `Resize`.
#[derive(Clone, Copy, Debug, Default)]
pub struct ResizeInputs<'a> {
    /// The region, starts before ends.
    pub roi: Option<TensorView<'a>>,
    /// The scales.
    pub scales: Option<TensorView<'a>>,
    /// The target sizes.
    pub sizes: Option<TensorView<'a>>,
}

impl<'a> Resize<'a> {
    /// Reads the attributes of a node.
    pub fn new(attrs: &'a Attributes) -> Result<Resize<'a>> {
        Ok(Resize {
            mode: attrs.string("mode")?,
            transform: attrs.string("coordinate_transformation_mode")?,
            rounding: attrs.string("nearest_mode")?,
            antialias: attrs.flag("antialias")?,
            exclude_outside: attrs.flag("exclude_outside")?,
            extrapolation: attrs.float("extrapolation_value")?,
            cubic_a: attrs.float("cubic_coeff_a")?,
        })
    }

    /// Whether a node with these attributes copies elements unchanged: the mode is nearest, and no
    /// value replaces those outside of the input.
    pub fn moves(attrs: &Attributes) -> bool {
        let is = |name: &str, value: &str| attrs.find_string(name) == Some(value);
        is("mode", "nearest") && !is("coordinate_transformation_mode", CROP)
    }

    /// Whether a region of the input is read.
    pub fn crops(&self) -> bool {
        self.transform == CROP
    }

    /// Returns the axes, adjacent ones merged if they keep their size.
    ///
    /// # Errors
    ///
    /// If axes, scales or the region do not fit the input.
    pub fn axes(
        &self,
        attrs: &Attributes,
        from: &[usize],
        to: &[usize],
        inputs: &ResizeInputs<'_>,
    ) -> Result<Vec<ResizeAxis>> {
        ensure!(from.len() == to.len(), InvalidArgument, "shape {from:?} cannot be resized to {to:?}");
        let chosen = match attrs.find_ints("axes") {
            Some(chosen) => normalize_axes(chosen, from.len())?.to_vec(),
            None => (0..from.len()).collect(),
        };
        let given = floats(inputs.scales)?;
        let scales = if given.is_empty() {
            let policy = ResizePolicy::parse(attrs.string("keep_aspect_ratio_policy")?)?;
            let sizes: Vec<i64> = chosen.iter().filter_map(|axis| Some(*from.get(*axis)? as i64)).collect();
            let missing = || error!(InvalidArgument, "input 3 is missing");
            // Only the scales are needed: inference set the sizes of the result.
            let targets = inputs.sizes.ok_or_else(missing)?.to_ints()?;
            policy.apply(&sizes, &targets).0.into_iter().map(|scale| scale.value() as f32).collect()
        } else {
            given.clone()
        };
        let count = chosen.len();
        ensure!(scales.len() == count, InvalidArgument, "{} scales are given for {count} axes", scales.len());
        let roi = if self.crops() { floats(inputs.roi)? } else { Vec::new() };
        let fits = !self.crops() || roi.len() == 2 * count;
        ensure!(fits, InvalidArgument, "a region of {} for {count} axes", roi.len());
        let is_symmetric = self.transform == "half_pixel_symmetric";
        let mut axes: Vec<ResizeAxis> = Vec::new();
        for (axis, (from, to)) in from.iter().zip(to).enumerate() {
            let (from, to) = (*from, *to);
            let mut own = ResizeAxis { from, to, scale: 1.0, width: to as f32, roi: [0.0, 1.0] };
            if let Some(entry) = chosen.iter().position(|chosen| *chosen == axis) {
                own.scale = scales.get(entry).copied().unwrap_or(1.0);
                // With given scales, coordinates use the fractional size of the result. The special
                // case for a result of one element depends on its actual size.
                if !given.is_empty() {
                    own.width = if to == 1 && !is_symmetric { 1.0 } else { own.scale * from as f32 };
                }
                if let (Some(start), Some(end)) = (roi.get(entry), roi.get(count + entry)) {
                    own.roi = [*start, *end];
                }
            }
            match axes.last_mut() {
                Some(last) if last.stays() && own.stays() => {
                    last.from = last.from.saturating_mul(from);
                    last.to = last.from;
                }
                _ => axes.push(own),
            }
        }
        Ok(axes)
    }

    /// Returns by how much antialiasing shrinks the filter's argument along an axis; 1 for none.
    pub fn stretch(&self, axis: &ResizeAxis) -> f32 {
        if self.antialias { axis.scale.min(1.0) } else { 1.0 }
    }

    /// Returns the first tap of an axis, relative to the element at or before a coordinate, and the
    /// number of taps.
    ///
    /// # Errors
    ///
    /// If the mode is not known.
    pub fn taps(&self, axis: &ResizeAxis) -> Result<(i64, i64)> {
        let support = match self.mode {
            "nearest" => return Ok((0, 1)),
            "linear" => 1.0,
            "cubic" => 2.0,
            other => return Err(error!(InvalidGraph, "the mode '{other}' is not known")),
        };
        // The filter is 0 beyond `support / stretch` elements. A tiny scale saturates in the casts.
        let first = (-support / f64::from(self.stretch(axis))).floor() as i64 + 1;
        Ok((first, 2i64.saturating_sub(first.saturating_mul(2))))
    }
}

/// Returns the numbers of a float tensor; none if it is left out.
fn floats(view: Option<TensorView<'_>>) -> Result<Vec<f32>> {
    let Some(view) = view else { return Ok(Vec::new()) };
    Ok(match view.dtype() {
        DType::F64 => view.to_vec::<f64>()?.into_iter().map(|number| number as f32).collect(),
        DType::F16 => view.to_vec::<half::f16>()?.into_iter().map(f32::from).collect(),
        _ => view.to_vec::<f32>()?,
    })
}

/// The sizes of a `GridSample` node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GridSample {
    /// The number of images.
    pub batch: usize,
    /// The channels of an image.
    pub channels: usize,
    /// The spatial sizes of an image.
    pub image: Vec<usize>,
    /// The points of an image's grid.
    pub points: usize,
}

impl GridSample {
    /// Whether a node with these attributes copies elements unchanged.
    pub fn moves(attrs: &Attributes) -> bool {
        attrs.find_string("mode") == Some("nearest")
    }

    /// Reads the shapes of an image and its grid.
    ///
    /// # Errors
    ///
    /// If they do not fit each other.
    pub fn new(image: &[usize], grid: &[usize]) -> Result<GridSample> {
        let invalid = || {
            error!(InvalidArgument, "the image of shape {image:?} does not match the grid of shape {grid:?}")
        };
        let ([batch, channels, sizes @ ..], Some((rank, places))) = (image, grid.split_last()) else {
            return Err(invalid());
        };
        // The grid is [N, places..., rank].
        let (first, places) = places.split_first().ok_or_else(invalid)?;
        let fits = *rank == sizes.len() && places.len() == sizes.len() && first == batch;
        ensure!(
            fits,
            InvalidArgument,
            "the image of shape {image:?} does not match the grid of shape {grid:?}"
        );
        Ok(GridSample { batch: *batch, channels: *channels, image: sizes.to_vec(), points: product(places) })
    }
}

/// The grid that `AffineGrid` generates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AffineGrid {
    /// The spatial sizes, the innermost first, as coordinates are listed.
    pub inner_first: Vec<usize>,
    /// The points of a grid.
    pub points: usize,
    /// Whether the outermost coordinates are those of corner elements' centers.
    pub align_corners: bool,
}

impl AffineGrid {
    /// Reads a node whose maps and grid have these shapes.
    ///
    /// # Errors
    ///
    /// If they do not fit each other.
    pub fn new(attrs: &Attributes, maps: &[usize], grid: &[usize]) -> Result<AffineGrid> {
        let [batch, spatial @ .., rank] = grid else {
            return Err(error!(InvalidArgument, "a grid of shape {grid:?}"));
        };
        // The maps are [N, 2, 3] or [N, 3, 4]: a linear part and a translation.
        let fits = *maps == [*batch, *rank, rank + 1] && spatial.len() == *rank;
        ensure!(fits, InvalidArgument, "maps of shape {maps:?} for a grid of shape {grid:?}");
        let inner_first = spatial.iter().rev().copied().collect();
        let align_corners = attrs.flag("align_corners")?;
        Ok(AffineGrid { inner_first, points: product(spatial), align_corners })
    }
}

/// One axis of the image that `Col2Im` sums blocks to. All numbers fit 32 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Col2ImAxis {
    /// The size of the image.
    pub size: usize,
    /// The size of a block.
    pub block: usize,
    /// The positions of a block.
    pub places: usize,
    /// The distance of positions; positive.
    pub stride: i64,
    /// The padding before the image.
    pub begin: i64,
    /// The distance of a block's elements; positive.
    pub dilation: i64,
}

/// The blocks of a `Col2Im` node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Col2Im {
    /// The axes of the image.
    pub axes: Vec<Col2ImAxis>,
}

impl Col2Im {
    /// Reads the attributes of a node for an image and blocks of these sizes.
    ///
    /// # Errors
    ///
    /// If an attribute does not have a value for each axis, or has one out of range.
    pub fn new(attrs: &Attributes, image: &[i64], blocks: &[i64]) -> Result<Col2Im> {
        let rank = image.len();
        ensure!(blocks.len() == rank, InvalidArgument, "a block {blocks:?} of an image {image:?}");
        let entry = |name: &str, index: usize, default: i64| match attrs.find_ints(name) {
            None => Ok(default),
            Some(list) => list.get(index).copied().ok_or_else(|| error!(InvalidGraph, "{name} is too short")),
        };
        let whole = |value: i64| {
            usize::try_from(value)
                .map_err(|_| error!(InvalidArgument, "a size is {value}, expected 0 or more"))
        };
        let mut axes = Vec::with_capacity(rank);
        for (index, (size, block)) in image.iter().zip(blocks).enumerate() {
            let (stride, dilation) = (entry("strides", index, 1)?, entry("dilations", index, 1)?);
            let (begin, end) = (entry("pads", index, 0)?, entry("pads", rank + index, 0)?);
            // Numbers below 2^31 keep the arithmetic below free of overflow. `i64::MIN` has no
            // absolute value in `i64`.
            let numbers = [stride, dilation, begin, end, *size, *block];
            let small = numbers.iter().all(|number| number.unsigned_abs() < 1 << 31);
            ensure!(
                small && stride > 0 && dilation > 0,
                InvalidGraph,
                "strides and dilations are not positive"
            );
            // The standard's number of block positions along the axis.
            let places = (size + begin + end - dilation * (block - 1) - 1).div_euclid(stride) + 1;
            let (size, block, places) = (whole(*size)?, whole(*block)?, whole(places)?);
            axes.push(Col2ImAxis { size, block, places, stride, begin, dilation });
        }
        Ok(Col2Im { axes })
    }

    /// The product of one number of all axes.
    pub fn volume(&self, of: fn(&Col2ImAxis) -> usize) -> usize {
        self.axes.iter().map(of).fold(1, usize::saturating_mul)
    }

    /// Refuses columns that are not one for each position of a block in an image.
    pub fn check_columns(&self, columns: usize, result: usize) -> Result<()> {
        let images = result.checked_div(self.volume(|axis| axis.size)).unwrap_or(0);
        let (block, places) = (self.volume(|axis| axis.block), self.volume(|axis| axis.places));
        ensure!(
            columns == images.saturating_mul(block.saturating_mul(places)) || result == 0,
            InvalidArgument,
            "the input has {columns} elements, expected {images} x {block} x {places}: images, elements of a block, positions of the block"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Col2Im;
    use crate::Result;
    use crate::ir::{Attribute, Attributes};
    use crate::spec::Registry;

    #[test]
    fn the_smallest_integer_is_refused() -> Result<()> {
        let spec = Registry::global()?.find("", "Col2Im").expect("the standard has it");
        let attrs = |pads: [i64; 2]| {
            Attributes::new(spec, vec![("pads".to_string(), Attribute::Ints(pads.to_vec()))])
        };
        assert_eq!(Col2Im::new(&attrs([1, 0])?, &[3], &[2])?.axes[0].places, 3);
        for pads in [[i64::MIN, 0], [0, i64::MIN]] {
            assert!(Col2Im::new(&attrs(pads)?, &[3], &[2]).is_err(), "{pads:?}");
        }
        assert!(Col2Im::new(&attrs([0, 0])?, &[i64::MIN], &[2]).is_err());
        assert!(Col2Im::new(&attrs([0, 0])?, &[3], &[i64::MIN]).is_err());
        Ok(())
    }
}
