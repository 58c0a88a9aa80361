//! Interpolated sampling as primitive operators, for its gradients.
//!
//! Covers `GridSample`, `RoiAlign` and `DeformConv`.
//!
//! Along each axis, a position reads a few taps with weights. Their combinations over the axes are
//! one gather each. Weights depend on the position and indices only on its floor, so gradients
//! reach both the image and the positions.

use crate::dtype::DType;
use crate::ir::{Attribute, ValueId};
use crate::spec::{GradCx, product};
use crate::{Result, ensure, error};

/// One element that a position reads along an axis.
pub(in crate::ops) struct Tap {
    /// The index inside the image, in `int64`.
    index: ValueId,
    /// The weight; 1 if absent.
    weight: Option<ValueId>,
    /// Where the tap counts; everywhere if absent.
    inside: Option<ValueId>,
}

/// The value of positions outside the image.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Padding {
    Zeros,
    Border,
    Reflection,
}

/// An axis of an image: its size in `int64`, and its size and last index in floats.
struct Axis {
    count: ValueId,
    size: ValueId,
    last: ValueId,
    zero: ValueId,
    one: ValueId,
    padding: Padding,
    /// The range of coordinates that the image covers.
    low: ValueId,
    high: ValueId,
}

impl Axis {
    fn of(cx: &mut GradCx<'_>, image: ValueId, axis: usize, padding: Padding, half: f64) -> Result<Axis> {
        let dtype = cx.dtype(image)?;
        let count = cx.sizes(image, axis, axis + 1)?;
        let size = cx.cast(count, dtype)?;
        let (zero, one) = (cx.number(0.0, dtype)?, cx.number(1.0, dtype)?);
        let last = cx.emit("Sub", &[size, one], &[])?;
        let (low, half) = (cx.number(-half, dtype)?, cx.number(half, dtype)?);
        let high = cx.emit("Add", &[last, half], &[])?;
        Ok(Axis { count, size, last, zero, one, padding, low, high })
    }

    fn clamped(&self, cx: &mut GradCx<'_>, x: ValueId) -> Result<ValueId> {
        let x = cx.emit("Max", &[x, self.zero], &[])?;
        cx.emit("Min", &[x, self.last], &[])
    }

    /// Whether a coordinate lies between two others.
    fn between(&self, cx: &mut GradCx<'_>, x: ValueId, low: ValueId, high: ValueId) -> Result<ValueId> {
        let (above, below) =
            (cx.emit("GreaterOrEqual", &[x, low], &[])?, cx.emit("LessOrEqual", &[x, high], &[])?);
        cx.emit("And", &[above, below], &[])
    }

    fn reflected(&self, cx: &mut GradCx<'_>, x: ValueId) -> Result<ValueId> {
        let dtype = cx.dtype(x)?;
        // With aligned corners, a one-pixel image has a range of 0, by which `Mod` must not divide.
        let least = cx.number(1e-3, dtype)?;
        let range = cx.emit("Sub", &[self.high, self.low], &[])?;
        let range = cx.emit("Max", &[range, least], &[])?;
        // Reflections repeat after twice the range: there and back.
        let twice = cx.emit("Add", &[range, range], &[])?;
        let distance = cx.emit("Sub", &[x, self.low], &[])?;
        let distance = cx.emit("Abs", &[distance], &[])?;
        let distance = cx.emit("Mod", &[distance, twice], &[("fmod", Attribute::Int(1))])?;
        let beyond = cx.emit("Greater", &[distance, range], &[])?;
        let back = cx.emit("Sub", &[twice, distance], &[])?;
        let distance = cx.emit("Where", &[beyond, back, distance], &[])?;
        cx.emit("Add", &[self.low, distance], &[])
    }

    /// Moves a coordinate outside the image as the padding says.
    fn padded(&self, cx: &mut GradCx<'_>, x: ValueId) -> Result<ValueId> {
        let moved = match self.padding {
            Padding::Zeros => return Ok(x),
            Padding::Border => self.clamped(cx, x)?,
            Padding::Reflection => self.reflected(cx, x)?,
        };
        let inside = self.between(cx, x, self.low, self.high)?;
        cx.emit("Where", &[inside, x, moved], &[])
    }

    /// The tap of an index that may be outside the image.
    fn tap(&self, cx: &mut GradCx<'_>, index: ValueId, weight: Option<ValueId>) -> Result<Tap> {
        let inside = self.between(cx, index, self.zero, self.last)?;
        let mut place = index;
        if self.padding == Padding::Reflection {
            let moved = self.reflected(cx, index)?;
            place = cx.emit("Where", &[inside, index, moved], &[])?;
        }
        // The gather needs a valid index even where `inside` discards the element.
        let index = self.clamped(cx, place)?;
        let index = cx.cast(index, DType::I64)?;
        Ok(Tap { index, weight, inside: Some(inside).filter(|_| self.padding == Padding::Zeros) })
    }

    /// The taps of linear interpolation: the two elements around a coordinate.
    fn linear(&self, cx: &mut GradCx<'_>, x: ValueId) -> Result<Vec<Tap>> {
        let below = cx.emit("Floor", &[x], &[])?;
        let fraction = cx.emit("Sub", &[x, below], &[])?;
        let rest = cx.emit("Sub", &[self.one, fraction], &[])?;
        let above = cx.emit("Add", &[below, self.one], &[])?;
        Ok(vec![self.tap(cx, below, Some(rest))?, self.tap(cx, above, Some(fraction))?])
    }

    /// The taps of Keys' cubic convolution with a = -0.75: the four elements around a coordinate.
    fn cubic(&self, cx: &mut GradCx<'_>, x: ValueId) -> Result<Vec<Tap>> {
        let dtype = cx.dtype(x)?;
        let below = cx.emit("Floor", &[x], &[])?;
        let t = cx.emit("Sub", &[x, below], &[])?;
        let a = -0.75;
        // By distance d: (a+2) d^3 - (a+3) d^2 + 1 up to 1, then a d^3 - 5a d^2 + 8a d - 4a.
        let near = [a + 2.0, -(a + 3.0), 0.0, 1.0];
        let far = [a, -5.0 * a, 8.0 * a, -4.0 * a];
        let mut taps = Vec::with_capacity(4);
        for (offset, factors) in [(-1.0, far), (0.0, near), (1.0, near), (2.0, far)] {
            let shift = cx.number(offset, dtype)?;
            let distance = cx.emit("Sub", &[t, shift], &[])?;
            let distance = cx.emit("Abs", &[distance], &[])?;
            let mut weight = cx.number(factors[0], dtype)?;
            // Horner's scheme.
            for factor in &factors[1..] {
                let factor = cx.number(*factor, dtype)?;
                weight = cx.emit("Mul", &[weight, distance], &[])?;
                weight = cx.emit("Add", &[weight, factor], &[])?;
            }
            let index = cx.emit("Add", &[below, shift], &[])?;
            taps.push(self.tap(cx, index, Some(weight))?);
        }
        Ok(taps)
    }
}

/// Reads the images `[batch, channels, pixels]` at positions `[batch, points]` and returns
/// `[batch, channels, points]`.
///
/// `axes` holds the size and the taps of each axis.
fn read(cx: &mut GradCx<'_>, images: ValueId, axes: &[(ValueId, Vec<Tap>)]) -> Result<ValueId> {
    let dtype = cx.dtype(images)?;
    let zero = cx.number(0.0, dtype)?;
    let middle = cx.ints(&[1])?;
    let channels = cx.sizes(images, 1, 2)?;
    let count: usize = axes.iter().map(|(_, taps)| taps.len()).product();
    let mut sum: Option<ValueId> = None;
    for combination in 0..count {
        // The number of a combination has a digit for each axis, whose base is the axis' number of
        // taps.
        let mut rest = combination;
        let (mut index, mut weight, mut inside): (Option<ValueId>, Option<ValueId>, Option<ValueId>) =
            (None, None, None);
        for (size, taps) in axes {
            let tap = taps.get(rest % taps.len()).ok_or_else(|| error!(Fail, "a pixel is missing"))?;
            rest /= taps.len();
            // Row-major index, outermost axis first.
            index = Some(match index {
                None => tap.index,
                Some(index) => {
                    let row = cx.emit("Mul", &[index, *size], &[])?;
                    cx.emit("Add", &[row, tap.index], &[])?
                }
            });
            weight = both(cx, "Mul", weight, tap.weight)?;
            inside = both(cx, "And", inside, tap.inside)?;
        }
        let index = index.ok_or_else(|| error!(Fail, "an image without axes"))?;
        let apart = cx.emit("Unsqueeze", &[index, middle], &[])?;
        let (batch, points) = (cx.sizes(index, 0, 1)?, cx.sizes(index, 1, 2)?);
        let shape = cx.join(&[batch, channels, points])?;
        let apart = cx.emit("Expand", &[apart, shape], &[])?;
        let mut pixel = cx.emit("GatherElements", &[images, apart], &[("axis", Attribute::Int(2))])?;
        if let Some(weight) = weight {
            let weight = cx.emit("Unsqueeze", &[weight, middle], &[])?;
            pixel = cx.emit("Mul", &[pixel, weight], &[])?;
        }
        // After the weight, so that a tap outside the image adds an exact zero.
        if let Some(inside) = inside {
            let inside = cx.emit("Unsqueeze", &[inside, middle], &[])?;
            pixel = cx.emit("Where", &[inside, pixel, zero], &[])?;
        }
        sum = both(cx, "Add", sum, Some(pixel))?;
    }
    sum.ok_or_else(|| error!(Fail, "a place reads no pixel"))
}

fn both(cx: &mut GradCx<'_>, op: &str, a: Option<ValueId>, b: Option<ValueId>) -> Result<Option<ValueId>> {
    match (a, b) {
        (Some(a), Some(b)) => cx.emit(op, &[a, b], &[]).map(Some),
        (a, b) => Ok(a.or(b)),
    }
}

/// Splits the last dimension into its elements and drops it.
fn columns(cx: &mut GradCx<'_>, value: ValueId, count: usize) -> Result<Vec<ValueId>> {
    let attrs = [("axis", Attribute::Int(-1)), ("num_outputs", Attribute::Int(count as i64))];
    let parts = cx.emit_many("Split", &[Some(value)], &attrs, count)?;
    let last = cx.ints(&[-1])?;
    parts.into_iter().map(|part| cx.emit("Squeeze", &[part, last], &[])).collect()
}

pub(super) fn grid_sample_parts(cx: &mut GradCx<'_>) -> Result<Vec<ValueId>> {
    let (image, grid) = (cx.input(0)?, cx.input(1)?);
    let rank = cx.rank(image)?;
    ensure!(rank > 2, InvalidGraph, "an image of rank {rank}");
    let spatial = rank - 2;
    let dtype = cx.dtype(image)?;
    let points = cx.sizes(grid, 1, rank - 1)?;
    let grid = cx.cast(grid, dtype)?;
    let rows = cx.reshape_to(grid, &[0, -1, spatial as i64])?;
    let positions = columns(cx, rows, spatial)?;
    let padding = match cx.attrs().string("padding_mode")? {
        "zeros" => Padding::Zeros,
        "border" => Padding::Border,
        _ => Padding::Reflection,
    };
    let aligned = cx.attrs().flag("align_corners")?;
    let mut axes = Vec::with_capacity(spatial);
    // A grid position is (x, y), innermost axis first; the image's axes are (H, W).
    for (index, position) in positions.into_iter().rev().enumerate() {
        let axis = Axis::of(cx, image, index + 2, padding, if aligned { 0.0 } else { 0.5 })?;
        let half = cx.number(0.5, dtype)?;
        let shifted = cx.emit("Add", &[position, axis.one], &[])?;
        // Maps [-1, 1] to [0, size - 1] with aligned corners, else to [-0.5, size - 0.5].
        let mut x = match aligned {
            true => {
                let x = cx.emit("Mul", &[shifted, half], &[])?;
                cx.emit("Mul", &[x, axis.last], &[])?
            }
            false => {
                let x = cx.emit("Mul", &[shifted, axis.size], &[])?;
                let x = cx.emit("Sub", &[x, axis.one], &[])?;
                cx.emit("Mul", &[x, half], &[])?
            }
        };
        let taps = match cx.attrs().string("mode")? {
            "nearest" => {
                x = cx.emit("Round", &[x], &[])?;
                let x = axis.padded(cx, x)?;
                vec![axis.tap(cx, x, None)?]
            }
            // Cubic interpolation pads the taps, not the position.
            "cubic" => axis.cubic(cx, x)?,
            _ => {
                let x = axis.padded(cx, x)?;
                axis.linear(cx, x)?
            }
        };
        axes.push((axis.count, taps));
    }
    let flat = cx.reshape_to(image, &[0, 0, -1])?;
    let result = read(cx, flat, &axes)?;
    let outer = cx.sizes(image, 0, 2)?;
    let shape = cx.join(&[outer, points])?;
    Ok(vec![cx.reshape(result, shape)?])
}

/// Bilinear samples of regions, averaged over each bin. The regions' coordinates have no gradient,
/// as in PyTorch.
pub(in crate::ops) fn of_roi_align(cx: &mut GradCx<'_>) -> Result<()> {
    cx.through(roi_align_parts)?;
    cx.forget(1);
    Ok(())
}

/// The coordinates of each region's samples, rows then columns, `[regions, samples]`. `counts` are
/// the samples of a region along both axes.
fn region_samples(cx: &mut GradCx<'_>, regions: ValueId, counts: [i64; 2]) -> Result<Vec<ValueId>> {
    let attrs = cx.attrs();
    let half_pixel = attrs.string("coordinate_transformation_mode")? == "half_pixel";
    let dtype = cx.dtype(regions)?;
    let scale = cx.number(f64::from(attrs.float("spatial_scale")?), dtype)?;
    let shift = cx.number(if half_pixel { -0.5 } else { 0.0 }, dtype)?;
    let corners = cx.emit("Mul", &[regions, scale], &[])?;
    let corners = cx.emit("Add", &[corners, shift], &[])?;
    let corners = columns(cx, corners, 4)?;
    let [left, top, right, bottom] = corners[..] else { return Err(error!(Fail, "a region has four sides")) };
    let mut coordinates = Vec::with_capacity(2);
    for (start, end, count) in [(top, bottom, counts[0]), (left, right, counts[1])] {
        let mut extent = cx.emit("Sub", &[end, start], &[])?;
        // Without the half-pixel shift, regions are at least one pixel wide and high.
        if !half_pixel {
            let one = cx.number(1.0, dtype)?;
            extent = cx.emit("Max", &[extent, one], &[])?;
        }
        // Sample centers, evenly spaced over the region: all bins have the same number of them.
        // Nodes compute them, because a hostile count would not fit into memory.
        let (half, total) = (cx.number(0.5, DType::F64)?, cx.number(count as f64, DType::F64)?);
        let count = cx.ints(&[count])?;
        let places = cx.range(count)?;
        let places = cx.cast(places, DType::F64)?;
        let places = cx.emit("Add", &[places, half], &[])?;
        let places = cx.emit("Div", &[places, total], &[])?;
        let places = cx.cast(places, dtype)?;
        let last = cx.ints(&[1])?;
        let (start, extent) =
            (cx.emit("Unsqueeze", &[start, last], &[])?, cx.emit("Unsqueeze", &[extent, last], &[])?);
        let inner = cx.emit("Mul", &[extent, places], &[])?;
        coordinates.push(cx.emit("Add", &[start, inner], &[])?);
    }
    Ok(coordinates)
}

fn roi_align_parts(cx: &mut GradCx<'_>) -> Result<Vec<ValueId>> {
    let (image, regions, batch) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let attrs = cx.attrs();
    let (samples, is_mean) = (attrs.int("sampling_ratio")?, attrs.string("mode")? == "avg");
    ensure!(is_mean, NotImplemented, "RoiAlign of the greatest samples has no gradient");
    ensure!(samples > 0, NotImplemented, "RoiAlign has no gradient where regions have samples by their size");
    let bins = [attrs.int("output_height")?, attrs.int("output_width")?];
    let counts = [product(&[bins[0], samples])?, product(&[bins[1], samples])?];
    let dtype = cx.dtype(image)?;
    let coordinates = region_samples(cx, regions, counts)?;
    // All points of all regions as `[1, points]`: the batch index is one more axis of the image.
    let count = cx.sizes(regions, 0, 1)?;
    let grid = cx.ints(&counts)?;
    let shape = cx.join(&[count, grid])?;
    let spread = |cx: &mut GradCx<'_>, value: ValueId, axes: &[i64]| {
        let axes = cx.ints(axes)?;
        let value = cx.emit("Unsqueeze", &[value, axes], &[])?;
        let value = cx.emit("Expand", &[value, shape], &[])?;
        cx.reshape_to(value, &[1, -1])
    };
    let index = spread(cx, batch, &[1, 2])?;
    let images = cx.sizes(image, 0, 1)?;
    let mut axes = vec![(images, vec![Tap { index, weight: None, inside: None }])];
    let mut inside: Option<ValueId> = None;
    for (at, coordinate) in coordinates.into_iter().enumerate() {
        let axis = Axis::of(cx, image, at + 2, Padding::Border, 0.0)?;
        let x = spread(cx, coordinate, &[if at == 0 { 2 } else { 1 }])?;
        // A sample more than one pixel outside the image counts as 0; up to there the border
        // repeats.
        let low = cx.number(-1.0, dtype)?;
        let here = axis.between(cx, x, low, axis.size)?;
        inside = both(cx, "And", inside, Some(here))?;
        let x = axis.clamped(cx, x)?;
        axes.push((axis.count, axis.linear(cx, x)?));
    }
    let rank = cx.rank(image)?;
    ensure!(rank == 4, InvalidGraph, "the feature maps have rank {rank}, expected 4");
    // [N, C, H, W] becomes [1, C, N * H * W], because a point may read any image.
    let turned = cx.transpose(image, &[1, 0, 2, 3])?;
    let channels = cx.sizes(image, 1, 2)?;
    let (front, rest) = (cx.ints(&[1])?, cx.ints(&[-1])?);
    let flat = cx.join(&[front, channels, rest])?;
    let flat = cx.reshape(turned, flat)?;
    let mut values = read(cx, flat, &axes)?;
    if let Some(inside) = inside {
        let zero = cx.number(0.0, dtype)?;
        values = cx.emit("Where", &[inside, values, zero], &[])?;
    }
    let inner = cx.ints(&[bins[0], samples, bins[1], samples])?;
    let shape = cx.join(&[channels, count, inner])?;
    let values = cx.reshape(values, shape)?;
    // [C, regions, bins, samples, bins, samples]: the mean is over both axes of samples.
    let axes = cx.ints(&[3, 5])?;
    let mean = cx.emit("ReduceMean", &[values, axes], &[("keepdims", Attribute::Int(0))])?;
    Ok(vec![cx.transpose(mean, &[1, 0, 2, 3])?])
}

/// The taps of all windows axis by axis, at `[maps, taps * windows]` positions shifted by the
/// offsets.
fn moved_taps(cx: &mut GradCx<'_>, kernel: &[i64], offset: Vec<ValueId>) -> Result<Vec<(ValueId, Vec<Tap>)>> {
    let (image, output, attrs) = (cx.input(0)?, cx.output(0)?, cx.attrs());
    let rank = kernel.len();
    let list = |name: &str, default: i64, count: usize| match attrs.find_ints(name) {
        Some(list) if list.len() == count => list.to_vec(),
        _ => vec![default; count],
    };
    let (strides, dilations, pads) =
        (list("strides", 1, rank), list("dilations", 1, rank), list("pads", 0, rank * 2));
    let (taps, dtype) = (product(kernel)?, cx.dtype(image)?);
    let windows = cx.sizes(output, 2, rank + 2)?;
    let mut axes = Vec::with_capacity(rank);
    let mut step = taps;
    for (at, offset) in offset.into_iter().enumerate() {
        let get = |list: &[i64]| list.get(at).copied().unwrap_or(1);
        // Taps are numbered in row-major order over the kernel.
        step /= get(kernel).max(1);
        // Where the windows begin along the axis, and the distance of each tap from there.
        let count = cx.sizes(output, at + 2, at + 3)?;
        let begins = cx.range(count)?;
        let (stride, pad) = (cx.integer(get(&strides))?, cx.integer(get(&pads))?);
        let begins = cx.emit("Mul", &[begins, stride], &[])?;
        let begins = cx.emit("Sub", &[begins, pad], &[])?;
        let column: Vec<i64> = (0..rank).map(|axis| if axis == at { -1 } else { 1 }).collect();
        let begins = cx.reshape_to(begins, &column)?;
        let begins = cx.emit("Expand", &[begins, windows], &[])?;
        let begins = cx.reshape_to(begins, &[1, 1, -1])?;
        // `tap / step % kernel * dilation`, by nodes, because a hostile kernel has too many taps.
        let mut shifts = cx.ints(&[taps])?;
        shifts = cx.range(shifts)?;
        for (op, by) in [("Div", step.max(1)), ("Mod", get(kernel).max(1)), ("Mul", get(&dilations))] {
            let by = cx.integer(by)?;
            shifts = cx.emit(op, &[shifts, by], &[])?;
        }
        let shifts = cx.reshape_to(shifts, &[1, -1, 1])?;
        let places = cx.emit("Add", &[begins, shifts], &[])?;
        let places = cx.cast(places, dtype)?;
        let places = cx.emit("Add", &[places, offset], &[])?;
        let places = cx.reshape_to(places, &[0, -1])?;
        let axis = Axis::of(cx, image, at + 2, Padding::Zeros, 0.0)?;
        axes.push((axis.count, axis.linear(cx, places)?));
    }
    Ok(axes)
}

/// Decomposes into the im2col of shifted windows and a GEMM with the filters.
pub(in crate::ops) fn deform_conv_parts(cx: &mut GradCx<'_>) -> Result<Vec<ValueId>> {
    let (image, filters, offset, output) = (cx.input(0)?, cx.input(1)?, cx.input(2)?, cx.output(0)?);
    let rank = cx.rank(image)? - 2;
    let attrs = cx.attrs();
    let unknown =
        || error!(NotImplemented, "the gradient of a DeformConv whose filters' size only the run knows");
    let kernel: Vec<i64> = cx.constant_sizes(filters).ok_or_else(unknown)?.into_iter().skip(2).collect();
    let taps = product(&kernel)?;
    let (groups, moved_groups) = (attrs.int("group")?, attrs.int("offset_group")?);
    let windows = cx.sizes(output, 2, rank + 2)?;
    let pixels = cx.emit("ReduceProd", &[windows], &[])?;
    let (all, inner) = (cx.ints(&[-1])?, cx.ints(&[taps, rank as i64])?);
    let shape = cx.join(&[all, inner, pixels])?;
    let offset = cx.reshape(offset, shape)?;
    // From [N * offset groups, taps, rank, windows] to [N * offset groups, taps, windows, rank].
    let offset = cx.transpose(offset, &[0, 1, 3, 2])?;
    let offset = columns(cx, offset, rank)?;
    let axes = moved_taps(cx, &kernel, offset)?;
    let channels = cx.size_at(image, 1)?.as_constant();
    let channels = channels.ok_or_else(|| {
        error!(NotImplemented, "the gradient of a DeformConv with channels that only the run counts")
    })?;
    ensure!(groups > 0 && moved_groups > 0, InvalidGraph, "group and offset_group are at least 1");
    let maps = cx.sizes(image, 0, 1)?;
    let spatial = cx.sizes(image, 2, rank + 2)?;
    let area = cx.emit("ReduceProd", &[spatial], &[])?;
    // Each offset group of channels has positions of its own, so groups become batch items.
    let of_map = cx.ints(&[channels / moved_groups])?;
    let (groups_of_maps, all) = (cx.ints(&[moved_groups])?, maps);
    let all = cx.emit("Mul", &[all, groups_of_maps], &[])?;
    let shape = cx.join(&[all, of_map, area])?;
    let flat = cx.reshape(image, shape)?;
    let mut values = read(cx, flat, &axes)?;
    if let Some(mask) = cx.find_input(4) {
        let points = cx.sizes(values, 2, 3)?;
        let one = cx.ints(&[1])?;
        let shape = cx.join(&[all, one, points])?;
        let mask = cx.reshape(mask, shape)?;
        values = cx.emit("Mul", &[values, mask], &[])?;
    }
    // `[groups, filters per group, channels per group * taps]` by
    // `[batch, groups, channels per group * taps, windows]`.
    let depth = product(&[channels / groups, taps])?;
    let outer = cx.ints(&[-1, groups, depth])?;
    let shape = cx.join(&[outer, pixels])?;
    let values = cx.reshape(values, shape)?;
    let filters = cx.reshape_to(filters, &[groups, -1, depth])?;
    let products = cx.emit("MatMul", &[filters, values], &[])?;
    let shape = cx.shape_of(output)?;
    let mut result = cx.reshape(products, shape)?;
    if let Some(bias) = cx.find_input(3) {
        let bias = cx.reshape_to(bias, &[vec![1, -1], vec![1; rank]].concat())?;
        result = cx.emit("Add", &[result, bias], &[])?;
    }
    Ok(vec![result])
}

/// Decomposes into a concatenation of state and sequence, and a depthwise convolution.
pub(in crate::ops) fn causal_conv_parts(cx: &mut GradCx<'_>) -> Result<Vec<ValueId>> {
    let (input, filters) = (cx.input(0)?, cx.input(1)?);
    let sizes = cx.constant_sizes(filters);
    let Some(&[channels, _, kernel]) = sizes.as_deref() else {
        return Err(error!(
            NotImplemented,
            "the gradient of a CausalConvWithState whose filters' size only the run knows"
        ));
    };
    let before = match cx.find_input(3) {
        Some(past) => past,
        None => {
            let (outer, carried) = (cx.sizes(input, 0, 2)?, cx.ints(&[kernel - 1])?);
            let shape = cx.join(&[outer, carried])?;
            cx.zeros(shape, cx.dtype(input)?)?
        }
    };
    let whole = cx.emit("Concat", &[before, input], &[("axis", Attribute::Int(2))])?;
    let inputs = [Some(whole), Some(filters), cx.find_input(2)];
    let mut result = cx.emit_some("Conv", &inputs, &[("group", Attribute::Int(channels))])?;
    if cx.attrs().string("activation")? != "none" {
        result = cx.emit("Swish", &[result], &[])?;
    }
    // The new state is the last `kernel - 1` inputs, including the old state's if the sequence is
    // short.
    let (time, end, axis) = (cx.sizes(input, 2, 3)?, cx.ints(&[i64::MAX])?, cx.ints(&[2])?);
    let state = cx.emit("Slice", &[whole, time, end, axis], &[])?;
    Ok(vec![result, state])
}
