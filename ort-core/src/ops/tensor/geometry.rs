//! Index arithmetic of data movement: axes, slices and strided reads.
//!
//! Shared by shape inference and the kernels.

use smallvec::SmallVec;

use crate::ir::Attributes;
use crate::{ErrorKind, Result, ensure, error, unknown_name};

/// The axis counted from the front; negative axes count from the back.
///
/// ```
/// use ort_core::ops::tensor::geometry::normalize_axis;
/// assert_eq!(normalize_axis(-1, 3)?, 2);
/// assert!(normalize_axis(3, 3).is_err());
/// # Ok::<(), ort_core::Error>(())
/// ```
pub fn normalize_axis(axis: i64, rank: usize) -> Result<usize> {
    let from_front = if axis < 0 { axis.checked_add(rank as i64) } else { Some(axis) };
    let index = from_front.and_then(|axis| usize::try_from(axis).ok()).filter(|&axis| axis < rank);
    index.ok_or_else(|| {
        error!(InvalidGraph, "axis {axis} is out of range for rank {rank}").help(match rank {
            0 => "a scalar has no axes: give the node a tensor of rank 1 or more".to_string(),
            _ => format!("set the node's `axis` or `axes` to {} to {}", -(rank as i64), rank - 1),
        })
    })
}

/// The axis of a device kernel, counted from the front. Unlike [`normalize_axis`], this takes axis
/// 0 of a scalar, which counts as a vector of one element.
pub fn kernel_axis(axis: i64, rank: usize) -> Result<usize> {
    let counted = if axis < 0 { axis.saturating_add_unsigned(rank as u64) } else { axis };
    let counted = usize::try_from(counted).ok().filter(|axis| *axis < rank.max(1));
    counted.ok_or_else(|| error!(Fail, "axis {axis} is out of range for rank {rank}"))
}

/// The product of sizes; `usize::MAX` on overflow. Next to a size of 0, the others may be
/// arbitrarily large.
pub fn product(sizes: &[usize]) -> usize {
    sizes.iter().fold(1, |all: usize, size| all.saturating_mul(*size))
}

/// The product of the sizes before an axis, its size, and the product of the sizes after it. A
/// scalar has an axis of size 1.
pub fn around_axis(shape: &[usize], axis: usize) -> [usize; 3] {
    let (front, back) = shape.split_at_checked(axis).unwrap_or((shape, &[]));
    match back.split_first() {
        Some((size, back)) => [product(front), *size, product(back)],
        None => [product(front), 1, 1],
    }
}

/// Counts the axes from the front, in the given order. Naming an axis twice is an error.
pub fn normalize_axes(axes: &[i64], rank: usize) -> Result<SmallVec<[usize; 6]>> {
    let mut result = SmallVec::with_capacity(axes.len().min(rank));
    for &axis in axes {
        let index = normalize_axis(axis, rank)?;
        ensure!(
            !result.contains(&index),
            InvalidArgument,
            help = "name each axis once, counted from the front or from the end",
            "axis {axis} is named twice"
        );
        result.push(index);
    }
    Ok(result)
}

/// The permutation of a `Transpose` node: the input axis of each output axis.
pub fn permutation(attrs: &Attributes, rank: usize) -> Result<SmallVec<[usize; 6]>> {
    let Some(perm) = attrs.find_ints("perm") else { return Ok((0..rank).rev().collect()) };
    ensure!(
        perm.len() == rank,
        InvalidArgument,
        "perm {perm:?} is not a permutation of the axes of a tensor of rank {rank}"
    );
    normalize_axes(perm, rank)
}

/// The range of dimensions that the attributes `start` and `end` of `Shape` select.
pub fn shape_range(start: i64, end: Option<i64>, rank: usize) -> std::ops::Range<usize> {
    let clamp = |index: i64| {
        let index = if index < 0 { index.saturating_add(rank as i64) } else { index };
        index.clamp(0, rank as i64) as usize
    };
    let (start, end) = (clamp(start), end.map_or(rank, clamp));
    start..end.max(start)
}

/// The strides of a contiguous tensor, in elements.
pub fn contiguous_strides(shape: &[usize]) -> SmallVec<[isize; 6]> {
    let mut strides: SmallVec<[isize; 6]> = SmallVec::from_elem(1, shape.len());
    // Strides of an empty tensor may saturate; no element is read through them.
    let mut next = 1isize;
    for (stride, &size) in strides.iter_mut().zip(shape).rev() {
        *stride = next;
        next = next.saturating_mul(isize::try_from(size).unwrap_or(isize::MAX));
    }
    strides
}

/// The part of one dimension that `Slice` takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SliceAxis {
    /// The first index taken.
    pub start: usize,
    /// The step between indices; not 0.
    pub step: i64,
    /// The number of indices taken.
    pub count: usize,
}

/// The help for a slice with step 0.
const SLICE_STEP: &str = "use 1 to go forward, or -1 to go back";

impl SliceAxis {
    /// Takes the whole dimension.
    pub const fn all(size: usize) -> SliceAxis {
        SliceAxis { start: 0, step: 1, count: size }
    }

    /// Resolves `start..end` with a step on a dimension of this size, clamping as ONNX does.
    pub fn new(size: usize, start: i64, end: i64, step: i64) -> Result<SliceAxis> {
        ensure!(step != 0, InvalidArgument, help = SLICE_STEP, "the step of a slice is 0");
        // The bounds of the clamps below would be out of order, which panics.
        if size == 0 {
            return Ok(SliceAxis { start: 0, step, count: 0 });
        }
        let size = size as i64;
        let absolute = |index: i64| if index < 0 { index.saturating_add(size) } else { index };
        // With a negative step, a start before the first element still takes that element, unlike
        // NumPy.
        let (starts, ends) = if step > 0 { ((0, size), (0, size)) } else { ((0, size - 1), (-1, size - 1)) };
        let start = absolute(start).clamp(starts.0, starts.1);
        // Exporters write `i64::MAX` for an open end.
        let end = absolute(end).clamp(ends.0, ends.1);
        let distance = if step > 0 { end - start } else { start - end };
        let count = if distance <= 0 { 0 } else { (distance as u64).div_ceil(step.unsigned_abs()) };
        Ok(SliceAxis { start: start.max(0) as usize, step, count: count as usize })
    }
}

/// The arguments of `Slice`.
#[derive(Debug, Clone, Copy)]
pub struct SliceArguments<'a> {
    /// The first index of each axis.
    pub starts: &'a [i64],
    /// The end of each axis, exclusive.
    pub ends: &'a [i64],
    /// The axes; by default the first ones.
    pub axes: Option<&'a [i64]>,
    /// The steps; 1 by default.
    pub steps: Option<&'a [i64]>,
}

impl SliceArguments<'_> {
    /// Returns the axis and step of each entry, and fails if the lists differ in length.
    pub fn axes_and_steps(&self, rank: usize) -> Result<AxesAndSteps> {
        let count = self.starts.len();
        ensure!(
            self.ends.len() == count,
            InvalidGraph,
            "{count} starts and {} ends are given, expected equal numbers",
            self.ends.len()
        );
        slice_axes_and_steps(count, self.axes, self.steps, rank)
    }

    /// Resolves the slice of each dimension of a tensor.
    pub fn resolve(&self, shape: &[usize]) -> Result<SmallVec<[SliceAxis; 6]>> {
        let mut parts: SmallVec<[SliceAxis; 6]> = shape.iter().map(|&size| SliceAxis::all(size)).collect();
        let bounds = self.starts.iter().zip(self.ends);
        for ((axis, step), (&start, &end)) in self.axes_and_steps(shape.len())?.into_iter().zip(bounds) {
            if let Some(part) = parts.get_mut(axis) {
                *part = SliceAxis::new(part.count, start, end, step)?;
            }
        }
        Ok(parts)
    }
}

/// The axis and step of each entry of a slice.
type AxesAndSteps = SmallVec<[(usize, i64); 6]>;

/// Returns the axis and step of each of a slice's `count` entries.
pub fn slice_axes_and_steps(
    count: usize,
    axes: Option<&[i64]>,
    steps: Option<&[i64]>,
    rank: usize,
) -> Result<AxesAndSteps> {
    let axes = match axes {
        Some(axes) => normalize_axes(axes, rank).map_err(|problem| {
            problem.reclassified(&[ErrorKind::InvalidGraph], ErrorKind::InvalidArgument)
        })?,
        // One more than the rank at most: the check below then fails without allocating `count`
        // axes.
        None => (0..count.min(rank + 1)).collect(),
    };
    ensure!(axes.len() == count && count <= rank, InvalidGraph, "{count} slices of {} axes", axes.len());
    let steps: SmallVec<[i64; 6]> = steps.map_or_else(|| SmallVec::from_elem(1, count), SmallVec::from_slice);
    ensure!(steps.len() == count, InvalidGraph, "{count} slices and {} steps", steps.len());
    ensure!(!steps.contains(&0), InvalidArgument, help = SLICE_STEP, "the step of a slice is 0");
    Ok(axes.into_iter().zip(steps).collect())
}

/// A strided read: the element at index `(i, j, ..)` is element
/// `offset + i * strides[0] + j * strides[1] + ..` of the source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Strided {
    /// The sizes of the result.
    pub sizes: SmallVec<[usize; 6]>,
    /// The stride in the source along each dimension of the result, in elements.
    pub strides: SmallVec<[isize; 6]>,
    /// The source index of the first element.
    pub offset: usize,
}

impl Strided {
    /// All elements of a contiguous tensor, in order.
    pub fn contiguous(shape: &[usize]) -> Strided {
        Strided { sizes: shape.into(), strides: contiguous_strides(shape), offset: 0 }
    }

    /// Permutes the dimensions.
    pub fn transpose(shape: &[usize], permutation: &[usize]) -> Strided {
        let strides = contiguous_strides(shape);
        Strided {
            sizes: permutation.iter().filter_map(|&axis| shape.get(axis).copied()).collect(),
            strides: permutation.iter().filter_map(|&axis| strides.get(axis).copied()).collect(),
            offset: 0,
        }
    }

    /// Slices each dimension.
    pub fn slice(shape: &[usize], parts: &[SliceAxis]) -> Strided {
        let strides = contiguous_strides(shape);
        let offset = parts.iter().zip(&strides).map(|(part, &stride)| part.start * stride as usize).sum();
        // A step that is never taken may exceed the tensor, and its stride would overflow.
        let step = |part: &SliceAxis, stride: isize| {
            if part.count < 2 { 0 } else { stride * isize::try_from(part.step).unwrap_or(0) }
        };
        Strided {
            sizes: parts.iter().map(|part| part.count).collect(),
            strides: parts.iter().zip(&strides).map(|(part, &stride)| step(part, stride)).collect(),
            offset,
        }
    }

    /// Broadcasts: repeats dimensions of size 1 and adds leading ones.
    pub fn expand(shape: &[usize], result: &[usize]) -> Result<Strided> {
        let missing = result.len().checked_sub(shape.len());
        let missing = missing
            .ok_or_else(|| error!(InvalidArgument, "shape {shape:?} does not expand to {result:?}"))?;
        let mut strides: SmallVec<[isize; 6]> = SmallVec::from_elem(0, missing);
        let sizes = shape.iter().zip(result.iter().skip(missing));
        for ((&size, &wanted), stride) in sizes.zip(contiguous_strides(shape)) {
            ensure!(size == wanted || size == 1, InvalidArgument, "{shape:?} does not expand to {result:?}");
            strides.push(if size == 1 { 0 } else { stride });
        }
        Ok(Strided { sizes: result.into(), strides, offset: 0 })
    }

    /// Repeats each dimension. The result has two dimensions for each of the source: the repeats,
    /// and the source's own.
    pub fn tile(shape: &[usize], repeats: &[usize]) -> Strided {
        let strides = contiguous_strides(shape);
        let pairs = shape.iter().zip(repeats);
        Strided {
            sizes: pairs.flat_map(|(&size, &repeat)| [repeat, size]).collect(),
            strides: strides.iter().flat_map(|&stride| [0, stride]).collect(),
            offset: 0,
        }
    }

    /// The number of elements of the result.
    pub fn count(&self) -> usize {
        self.sizes.iter().product()
    }

    /// Drops dimensions of size 1 and merges neighbours that are contiguous with each other.
    pub fn simplify(&self) -> Strided {
        let mut result = Strided { sizes: SmallVec::new(), strides: SmallVec::new(), offset: self.offset };
        for (&size, &stride) in self.sizes.iter().zip(&self.strides).filter(|(size, _)| **size != 1) {
            match (result.sizes.last_mut(), result.strides.last_mut()) {
                (Some(outer), Some(outer_stride)) if *outer_stride == stride * size as isize => {
                    *outer *= size;
                    *outer_stride = stride;
                }
                _ => {
                    result.sizes.push(size);
                    result.strides.push(stride);
                }
            }
        }
        result
    }

    /// Whether every read falls inside a source of `count` elements.
    pub fn fits(&self, count: usize) -> bool {
        if self.sizes.contains(&0) {
            return true;
        }
        // i128, because sizes times strides of a caller's arbitrary geometry may overflow.
        let (mut low, mut high) = (self.offset as i128, self.offset as i128);
        for (&size, &stride) in self.sizes.iter().zip(&self.strides) {
            let reach = (size as i128 - 1) * stride as i128;
            if reach < 0 {
                low += reach;
            } else {
                high += reach;
            }
        }
        low >= 0 && high < count as i128
    }

    /// Reads the elements into a vector; for small sources such as shapes.
    pub fn collect<T: Clone>(&self, from: &[T]) -> Result<Vec<T>> {
        ensure!(self.fits(from.len()), Fail, "an index is out of range for {} elements", from.len());
        if self.sizes.contains(&0) {
            return Ok(Vec::new());
        }
        // `fits` bounds all places, so no cast below loses anything.
        let mut places = vec![self.offset as isize];
        for (&size, &stride) in self.sizes.iter().zip(&self.strides) {
            let steps = |place: isize| (0..size as isize).map(move |index| place + index * stride);
            places = places.into_iter().flat_map(steps).collect();
        }
        Ok(places.into_iter().filter_map(|place| from.get(place as usize).cloned()).collect())
    }
}

/// How `Resize` treats target sizes with another aspect ratio than the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResizePolicy {
    /// Use the target sizes as they are.
    Stretch,
    /// One scale for all axes: the largest for which no size exceeds its target.
    NotLarger,
    /// One scale for all axes: the smallest for which no size falls below its target.
    NotSmaller,
}

impl ResizePolicy {
    /// Parses the attribute `keep_aspect_ratio_policy`.
    pub fn parse(name: &str) -> Result<ResizePolicy> {
        match name {
            "stretch" => Ok(ResizePolicy::Stretch),
            "not_larger" => Ok(ResizePolicy::NotLarger),
            "not_smaller" => Ok(ResizePolicy::NotSmaller),
            other => {
                let policies = ["stretch", "not_larger", "not_smaller"];
                Err(unknown_name("the policy", other, &policies))
            }
        }
    }

    /// Returns the scales and sizes of the resized axes.
    pub fn apply(self, from: &[i64], targets: &[i64]) -> (Vec<ResizeScale>, Vec<i64>) {
        let scales: Vec<ResizeScale> =
            from.iter().zip(targets).map(|(&from, &to)| ResizeScale::of_sizes(from, to)).collect();
        // Compares the fractions by cross-multiplication: the quotients would round.
        let less = |a: &ResizeScale, b: &ResizeScale| a.to * b.from < b.to * a.from;
        let choose = |a: ResizeScale, b: ResizeScale| match (self, less(&b, &a)) {
            (ResizePolicy::NotSmaller, true) | (ResizePolicy::NotLarger, false) => a,
            _ => b,
        };
        if self == ResizePolicy::Stretch {
            return (scales, targets.to_vec());
        }
        let scale = scales.into_iter().reduce(choose).unwrap_or(ResizeScale::ONE);
        // The standard's `round_int` rounds halfway cases up.
        let sizes = from.iter().map(|&size| (scale.times(size as f64) + 0.5).floor() as i64).collect();
        (vec![scale; from.len()], sizes)
    }
}

/// The scale of one `Resize` axis, output size over input size, as a fraction.
///
/// Between sizes, both numbers are integers: a coordinate is then rounded once, by a division, and
/// is exact if it falls halfway between two elements. A quotient stored as one number carries its
/// own rounding error and may pick the other of the two.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ResizeScale {
    to: f64,
    from: f64,
}

impl ResizeScale {
    /// The scale of an axis that keeps its size.
    pub const ONE: ResizeScale = ResizeScale { to: 1.0, from: 1.0 };

    /// A scale given as a number.
    pub fn given(scale: f32) -> ResizeScale {
        ResizeScale { to: f64::from(scale), from: 1.0 }
    }

    /// The scale from one size to another.
    pub fn of_sizes(from: i64, to: i64) -> ResizeScale {
        ResizeScale { to: to as f64, from: from as f64 }
    }

    /// Whether the size stays the same.
    pub fn is_one(self) -> bool {
        self.to == self.from
    }

    /// The scale as one number.
    pub fn value(self) -> f64 {
        self.to / self.from
    }

    /// Maps a size or coordinate of the input to the output.
    pub fn times(self, x: f64) -> f64 {
        x * self.to / self.from
    }

    /// Maps a size or coordinate of the output to the input.
    pub fn divide(self, x: f64) -> f64 {
        x * self.from / self.to
    }
}

/// `floor(size * scale)` in single precision, as ONNX's own inference computes it.
pub fn scaled_size(size: i64, scale: f32) -> i64 {
    (size as f32 * scale).floor() as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes, their targets, and the resulting sizes: halves round up, however the quotient of two
    /// sizes rounds.
    #[test]
    fn policies_keep_proportions() {
        use ResizePolicy::{NotLarger, NotSmaller, Stretch};
        let cases: [(ResizePolicy, [i64; 2], [i64; 2], [i64; 2]); 6] = [
            (Stretch, [4, 8], [3, 9], [3, 9]),
            (NotLarger, [4, 8], [3, 9], [3, 6]),
            (NotSmaller, [4, 8], [3, 9], [5, 9]),
            (NotLarger, [6, 3], [5, 9], [5, 3]),
            (NotSmaller, [10, 45], [7, 1], [7, 32]),
            (NotLarger, [10, 5], [7, 9], [7, 4]),
        ];
        for (policy, from, targets, expected) in cases {
            let (scales, sizes) = policy.apply(&from, &targets);
            assert_eq!(sizes, expected, "{policy:?} from {from:?} to {targets:?}");
            assert_eq!(policy == Stretch, scales[0] != scales[1]);
        }
    }

    /// Slices as ONNX defines them: size, start, end, step, and the indices taken.
    #[test]
    fn slices_take_what_onnx_takes() -> Result<()> {
        let cases: [(usize, i64, i64, i64, &[i64]); 10] = [
            (5, 1, 4, 1, &[1, 2, 3]),
            (5, -3, i64::MAX, 1, &[2, 3, 4]),
            (5, -1, i64::MIN, -1, &[4, 3, 2, 1, 0]),
            (5, 10, -10, -2, &[4, 2, 0]),
            (5, 3, 1, 1, &[]),
            (6, -9, i64::MIN, -1, &[0]),
            (0, 0, 5, 1, &[]),
            (0, -1, i64::MIN, -1, &[]),
            (4, i64::MIN, i64::MAX, i64::MAX, &[0]),
            (4, 3, 0, i64::MIN, &[3]),
        ];
        for (size, start, end, step, expected) in cases {
            let part = SliceAxis::new(size, start, end, step)?;
            let taken: Vec<i64> =
                (0..part.count as i64).map(|i| part.start as i64 + i * part.step.clamp(-9, 9)).collect();
            assert_eq!(taken, expected, "{size}: {start}..{end} by {step}");
        }
        assert!(SliceAxis::new(3, 0, 1, 0).is_err());
        Ok(())
    }

    #[test]
    fn a_scalar_has_an_axis() {
        assert_eq!(around_axis(&[], 0), [1, 1, 1]);
        assert_eq!(around_axis(&[2, 3, 4, 5], 2), [6, 4, 5]);
        assert_eq!(around_axis(&[2, 0, 4], 0), [1, 2, 0]);
        assert_eq!((kernel_axis(0, 0).ok(), kernel_axis(-1, 3).ok()), (Some(0), Some(2)));
        assert!(kernel_axis(1, 0).is_err() && kernel_axis(-4, 3).is_err());
    }

    #[test]
    fn orders_read_the_right_elements() -> Result<()> {
        let source: Vec<usize> = (0..6).collect();
        let transposed = Strided::transpose(&[2, 3], &[1, 0]);
        assert_eq!(transposed.collect(&source)?, [0, 3, 1, 4, 2, 5]);
        let expanded = Strided::expand(&[2, 1], &[2, 2, 3])?;
        assert_eq!(expanded.collect(&[7, 8])?, [7, 7, 7, 8, 8, 8, 7, 7, 7, 8, 8, 8]);
        let tiled = Strided::tile(&[2, 1], &[1, 2]);
        assert_eq!(tiled.collect(&[7, 8])?, [7, 7, 8, 8]);
        let reversed = Strided::slice(&[2, 3], &[SliceAxis::all(2), SliceAxis::new(3, -1, -9, -2)?]);
        assert_eq!(reversed.collect(&source)?, [2, 0, 5, 3]);
        assert!(Strided { offset: 4, ..reversed }.collect(&source).is_err());
        assert_eq!(Strided::transpose(&[2, 1, 3, 4], &[1, 0, 2, 3]).simplify().sizes.as_slice(), [24]);
        Ok(())
    }
}
