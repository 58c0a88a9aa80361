//! Gradients of data movement.
//!
//! Each element's gradient moves back. The gradients of an element that was read several times
//! accumulate.

use crate::dtype::DType;
use crate::ir::{Attribute, ValueId};
use crate::spec::GradCx;
use crate::{Result, ensure, error};

/// Splits the gradient between the inputs.
pub(super) fn of_concat(cx: &mut GradCx<'_>) -> Result<()> {
    let upstream = cx.upstream()?;
    let rank = cx.rank(upstream)?;
    let axis = cx.axis("axis", rank)?;
    let count = cx.input_count();
    let sizes = (0..count).map(|index| {
        let input = cx.input(index)?;
        cx.sizes(input, axis, axis + 1)
    });
    let sizes = sizes.collect::<Result<Vec<ValueId>>>()?;
    let sizes = cx.join(&sizes)?;
    let attrs = [("axis", Attribute::Int(axis as i64))];
    let parts = cx.emit_many("Split", &[Some(upstream), Some(sizes)], &attrs, count)?;
    for index in cx.wanted() {
        let part = parts.get(index).ok_or_else(|| error!(Fail, "fewer parts than inputs"))?;
        cx.set(index, *part);
    }
    Ok(())
}

/// Concatenates the gradients of the parts; a part that nothing depends on has zeros.
pub(super) fn of_split(cx: &mut GradCx<'_>) -> Result<()> {
    let input = cx.input(0)?;
    let axis = cx.axis("axis", cx.rank(input)?)?;
    let count = cx.output_count();
    let mut gradients = Vec::with_capacity(count);
    for index in 0..count {
        gradients.push(match cx.find_upstream(index) {
            Some(upstream) => upstream,
            None => {
                let part = cx.demand_output(index)?;
                cx.filled(0.0, part)?
            }
        });
    }
    let gradient = cx.emit("Concat", &gradients, &[("axis", Attribute::Int(axis as i64))])?;
    cx.set(0, gradient);
    Ok(())
}

/// Writes the gradient back axis by axis: a slice of step 1 is padded with zeros, any other is
/// scattered to its indices.
pub(super) fn of_slice(cx: &mut GradCx<'_>) -> Result<()> {
    let (input, mut gradient) = (cx.input(0)?, cx.upstream()?);
    let rank = cx.rank(input)?;
    let mut bounds =
        SliceBounds { starts: Some(cx.input(1)?), ends: Some(cx.input(2)?), steps: cx.find_input(4) };
    let axes = match known_slice_axes(cx)? {
        Some(axes) => axes,
        None => {
            bounds = bounds.of_all_axes(cx, rank)?;
            (0..rank as i64).collect()
        }
    };
    for (entry, axis) in axes.into_iter().enumerate() {
        let axis = crate::spec::axis_of(axis, rank)?;
        let size = cx.sizes(input, axis, axis + 1)?;
        let places = cx.range(size)?;
        let zero = cx.ints(&[0])?;
        let step = entry_of(cx, bounds.steps, entry)?;
        // A step that is not constant takes the scatter, which is right for every step.
        let steps_of_one = step.is_none_or(|step| cx.known_ints(step).is_some_and(|step| step == [1]));
        let (start, end) = (entry_of(cx, bounds.starts, entry)?, entry_of(cx, bounds.ends, entry)?);
        // Slicing a range of indices yields the places that the slice took, clamped as by ONNX.
        let places = cx.emit_some("Slice", &[Some(places), start, end, Some(zero), step], &[])?;
        gradient = match steps_of_one {
            true => padded(cx, gradient, axis, places, size)?,
            false => {
                let whole = along(cx, gradient, axis, size)?;
                cx.sum_at(whole, axis, places, gradient)?
            }
        };
    }
    cx.set(0, gradient);
    Ok(())
}

/// Returns the axes of a slice, or `None` if they or their count are not constant.
fn known_slice_axes(cx: &GradCx<'_>) -> Result<Option<Vec<i64>>> {
    if let Some(axes) = cx.find_input(3) {
        return Ok(cx.known_ints(axes));
    }
    let count = cx.constant_sizes(cx.input(1)?).and_then(|sizes| sizes.first().copied());
    Ok(count.map(|count| (0..count).collect()))
}

/// The bound lists of a slice, with an entry for each of its axes.
#[derive(Clone, Copy)]
struct SliceBounds {
    starts: Option<ValueId>,
    ends: Option<ValueId>,
    steps: Option<ValueId>,
}

impl SliceBounds {
    /// Returns the same slice with an entry for each of the input's `rank` axes.
    ///
    /// Axes that it does not name are taken whole. No axis needs to be known before the run.
    fn of_all_axes(self, cx: &mut GradCx<'_>, rank: usize) -> Result<SliceBounds> {
        let axes = match cx.find_input(3) {
            Some(axes) => cx.cast(axes, DType::I64)?,
            None => {
                let count = cx.emit("Shape", &[cx.input(1)?], &[])?;
                cx.range(count)?
            }
        };
        let mut spread = |list: Option<ValueId>, whole: i64| -> Result<Option<ValueId>> {
            let Some(list) = list else { return Ok(None) };
            let list = cx.cast(list, DType::I64)?;
            let all = cx.ints(&vec![whole; rank])?;
            cx.emit("ScatterElements", &[all, axes, list], &[]).map(Some)
        };
        Ok(SliceBounds {
            starts: spread(self.starts, 0)?,
            ends: spread(self.ends, i64::MAX)?,
            steps: spread(self.steps, 1)?,
        })
    }
}

/// One entry of a list, as an `int64` list of one element.
fn entry_of(cx: &mut GradCx<'_>, list: Option<ValueId>, entry: usize) -> Result<Option<ValueId>> {
    let Some(list) = list else { return Ok(None) };
    if let Some(&known) = cx.known_ints(list).as_deref().and_then(|list| list.get(entry)) {
        return cx.ints(&[known]).map(Some);
    }
    let list = cx.cast(list, DType::I64)?;
    let entry = cx.ints(&[entry as i64])?;
    cx.emit("Gather", &[list, entry], &[]).map(Some)
}

/// Pads `value` with zeros along an axis such that it ends up at the consecutive `places` of
/// `size`.
fn padded(
    cx: &mut GradCx<'_>,
    value: ValueId,
    axis: usize,
    places: ValueId,
    size: ValueId,
) -> Result<ValueId> {
    let zero = cx.ints(&[0])?;
    // An empty slice has no first place: the appended zero stands in.
    let some = cx.join(&[places, zero])?;
    let begin = cx.emit("Gather", &[some, zero], &[])?;
    let count = cx.emit("Shape", &[places], &[])?;
    let end = cx.emit("Add", &[begin, count], &[])?;
    let end = cx.emit("Sub", &[size, end], &[])?;
    let pads = cx.join(&[begin, end])?;
    pad(cx, value, axis, pads)
}

/// Pads `value` with zeros at both ends of an axis, or crops it if `pads` are negative.
fn pad(cx: &mut GradCx<'_>, value: ValueId, axis: usize, pads: ValueId) -> Result<ValueId> {
    let axes = cx.ints(&[axis as i64])?;
    cx.emit_some("Pad", &[Some(value), Some(pads), None, Some(axes)], &[])
}

/// Zeros in the shape of `like`, with another size along an axis.
fn along(cx: &mut GradCx<'_>, like: ValueId, axis: usize, size: ValueId) -> Result<ValueId> {
    let rank = cx.rank(like)?;
    let (before, behind) = (cx.sizes(like, 0, axis)?, cx.sizes(like, axis + 1, rank)?);
    let shape = cx.join(&[before, size, behind])?;
    cx.zeros(shape, cx.dtype(like)?)
}

pub(super) fn of_gather(cx: &mut GradCx<'_>) -> Result<()> {
    let (data, indices, upstream) = (cx.input(0)?, cx.input(1)?, cx.upstream()?);
    let axis = cx.axis("axis", cx.rank(data)?)?;
    let gradient = cx.sum_at(data, axis, indices, upstream)?;
    cx.set(0, gradient);
    Ok(())
}

pub(super) fn of_gather_elements(cx: &mut GradCx<'_>) -> Result<()> {
    let (data, indices, upstream) = (cx.input(0)?, cx.input(1)?, cx.upstream()?);
    let zeros = cx.filled(0.0, data)?;
    let attrs =
        [("axis", Attribute::Int(cx.attrs().int("axis")?)), ("reduction", Attribute::String("add".into()))];
    let gradient = cx.emit("ScatterElements", &[zeros, indices, upstream], &attrs)?;
    cx.set(0, gradient);
    Ok(())
}

pub(super) fn of_gather_nd(cx: &mut GradCx<'_>) -> Result<()> {
    let (data, mut indices, upstream) = (cx.input(0)?, cx.input(1)?, cx.upstream()?);
    let rank = cx.rank(indices)?;
    let batch = usize::try_from(cx.attrs().int("batch_dims")?).unwrap_or(0);
    ensure!(batch < rank, InvalidGraph, "batch_dims {batch} for indices of rank {rank}");
    // Prefixes each index with its batch indices, because `ScatterND` has no `batch_dims`.
    for axis in (0..batch).rev() {
        let size = cx.sizes(indices, axis, axis + 1)?;
        let places = cx.range(size)?;
        let mut shape = vec![1; rank];
        if let Some(size) = shape.get_mut(axis) {
            *size = -1;
        }
        let places = cx.reshape_to(places, &shape)?;
        let (outer, one) = (cx.sizes(indices, 0, rank - 1)?, cx.ints(&[1])?);
        let shape = cx.join(&[outer, one])?;
        let places = cx.emit("Expand", &[places, shape], &[])?;
        indices = cx.emit("Concat", &[places, indices], &[("axis", Attribute::Int(-1))])?;
    }
    let zeros = cx.filled(0.0, data)?;
    let add = [("reduction", Attribute::String("add".into()))];
    let gradient = cx.emit("ScatterND", &[zeros, indices, upstream], &add)?;
    cx.set(0, gradient);
    Ok(())
}

/// Overwritten elements have a gradient of zero, and the updates have theirs.
///
/// Without a reduction the standard does not define which of two duplicate indices wins, so both
/// get the gradient.
pub(super) fn of_scatter(cx: &mut GradCx<'_>) -> Result<()> {
    let (indices, updates, upstream) = (cx.input(1)?, cx.input(2)?, cx.upstream()?);
    let op = cx.operator();
    let (gather, attrs) = match op {
        "ScatterElements" => ("GatherElements", vec![("axis", Attribute::Int(cx.attrs().int("axis")?))]),
        _ => ("GatherND", Vec::new()),
    };
    let reduction = cx.attrs().string("reduction")?;
    let replaces = match reduction {
        "none" => true,
        "add" => false,
        "mul" => return super::index_gradients::of_scatter_product(cx),
        _ => return super::index_gradients::of_scatter_extreme(cx),
    };
    if cx.wants(0) {
        let gradient = match replaces {
            true => {
                // The scatter repeats with zeros, which erase the gradient of what was overwritten.
                let zeros = cx.filled(0.0, updates)?;
                cx.emit(op, &[upstream, indices, zeros], &attrs)?
            }
            false => upstream,
        };
        cx.set(0, gradient);
    }
    if cx.wants(2) {
        let gradient = cx.emit(gather, &[upstream, indices], &attrs)?;
        cx.set(2, gradient);
    }
    Ok(())
}

/// Constant padding is cropped; the other modes copied elements, whose gradients accumulate.
pub(super) fn of_pad(cx: &mut GradCx<'_>) -> Result<()> {
    let (data, pads, upstream) = (cx.input(0)?, cx.input(1)?, cx.upstream()?);
    let mode = cx.attrs().string("mode")?;
    if mode == "constant" {
        let off = cx.emit("Neg", &[pads], &[])?;
        let inputs = [Some(upstream), Some(off), None, cx.find_input(3)];
        let inside = cx.emit_some("Pad", &inputs, &[])?;
        cx.set(0, inside);
        if cx.wants(2) {
            // The pad value has the gradient of everything outside the data.
            let keep = [("keepdims", Attribute::Int(0))];
            let all = cx.emit("ReduceSum", &[upstream], &keep)?;
            let inside = cx.emit("ReduceSum", &[inside], &keep)?;
            let rest = cx.emit("Sub", &[all, inside], &[])?;
            cx.set_reshaped(2, rest)?;
        }
        return Ok(());
    }
    let rank = cx.rank(data)?;
    let axes = match cx.find_input(3) {
        Some(axes) => cx
            .known_ints(axes)
            .ok_or_else(|| error!(NotImplemented, "the gradient of a Pad whose axes only the run knows"))?,
        None => (0..rank as i64).collect(),
    };
    let mut gradient = upstream;
    for (entry, axis) in axes.iter().enumerate() {
        let axis = crate::spec::axis_of(*axis, rank)?;
        let size = cx.sizes(data, axis, axis + 1)?;
        let places = cx.range(size)?;
        let of_axis = cx.ints(&[entry as i64, (entry + axes.len()) as i64])?;
        let pads = cx.emit("Gather", &[pads, of_axis], &[])?;
        // Padding a range of indices yields the element that each position was copied from.
        let attrs = [("mode", Attribute::String(mode.to_string()))];
        let places = cx.emit("Pad", &[places, pads], &attrs)?;
        let whole = along(cx, gradient, axis, size)?;
        gradient = cx.sum_at(whole, axis, places, gradient)?;
    }
    cx.set(0, gradient);
    Ok(())
}

/// Sums over the copies: one axis for the repeats and one for the data, dimension by dimension.
pub(super) fn of_tile(cx: &mut GradCx<'_>) -> Result<()> {
    let (data, repeats, upstream) = (cx.input(0)?, cx.input(1)?, cx.upstream()?);
    let rank = cx.rank(data)?;
    let sizes = cx.shape_of(data)?;
    let column = |cx: &mut GradCx<'_>, list| cx.reshape_to(list, &[-1, 1]);
    let (repeats, sizes) = (column(cx, repeats)?, column(cx, sizes)?);
    let pairs = cx.emit("Concat", &[repeats, sizes], &[("axis", Attribute::Int(1))])?;
    let pairs = cx.reshape_to(pairs, &[-1])?;
    // [repeats 0, size 0, repeats 1, size 1, ...].
    let copies = cx.reshape(upstream, pairs)?;
    let axes: Vec<i64> = (0..rank as i64).map(|axis| axis * 2).collect();
    let sum = cx.sum_along(copies, &axes)?;
    cx.set_reshaped(0, sum)
}

/// Applies the inverse operator with the same attributes.
pub(super) fn of_blocks(cx: &mut GradCx<'_>) -> Result<()> {
    let upstream = cx.upstream()?;
    let back = if cx.operator() == "DepthToSpace" { "SpaceToDepth" } else { "DepthToSpace" };
    with_same_attributes(cx, back, &[Some(upstream)])
}

/// Applies the operator itself to the gradient: it keeps or moves gradients as it does elements.
pub(super) fn of_itself(cx: &mut GradCx<'_>) -> Result<()> {
    let (upstream, op) = (cx.upstream()?, cx.operator());
    with_same_attributes(cx, op, &[Some(upstream), cx.find_input(1)])
}

fn with_same_attributes(cx: &mut GradCx<'_>, op: &str, inputs: &[Option<ValueId>]) -> Result<()> {
    let gradient = cx.emit_some(op, inputs, &cx.attr_list())?;
    cx.set(0, gradient);
    Ok(())
}

/// Scatters the gradient to the elements that were kept.
pub(super) fn of_compress(cx: &mut GradCx<'_>) -> Result<()> {
    let (input, condition, upstream) = (cx.input(0)?, cx.input(1)?, cx.upstream()?);
    // Without `axis` the input is flattened first.
    let (data, axis) = match cx.attrs().find_int("axis") {
        Some(axis) => (input, crate::spec::axis_of(axis, cx.rank(input)?)?),
        None => (cx.reshape_to(input, &[-1])?, 0),
    };
    let size = cx.sizes(data, axis, axis + 1)?;
    // Compressing a range of indices yields the places of those elements.
    let places = cx.range(size)?;
    let kept = cx.emit("Compress", &[places, condition], &[("axis", Attribute::Int(0))])?;
    let gradient = cx.sum_at(data, axis, kept, upstream)?;
    cx.set_reshaped(0, gradient)
}

/// Multiplies the gradient by the transposed interpolation matrix of each axis.
///
/// Interpolation is linear in the elements and separable, so along an axis it is a matrix product.
/// Resizing the identity matrix returns that matrix.
pub(super) fn of_resize(cx: &mut GradCx<'_>) -> Result<()> {
    let (input, mut gradient) = (cx.input(0)?, cx.upstream()?);
    let rank = cx.rank(input)?;
    let attrs = cx.attrs();
    let refused = |what: &str| error!(NotImplemented, "the gradient of a Resize with {what}");
    if attrs.string("coordinate_transformation_mode")? == "tf_crop_and_resize" {
        return Err(refused("tf_crop_and_resize"));
    }
    if attrs.string("keep_aspect_ratio_policy")? != "stretch" {
        return Err(refused("a policy for the aspect ratio"));
    }
    let axes: Vec<usize> = match attrs.find_ints("axes") {
        Some(axes) => axes.iter().map(|&axis| crate::spec::axis_of(axis, rank)).collect::<Result<_>>()?,
        None => (0..rank).collect(),
    };
    for (entry, &axis) in axes.iter().enumerate() {
        if is_kept(cx, entry, axis)? {
            continue;
        }
        // [output size, input size]: a row for each output element.
        let matrix = resizing_matrix(cx, input, entry, axis)?;
        let last = rank - 1;
        // MatMul works on the last axis, so `axis` swaps places with it.
        let order: Vec<usize> = (0..rank)
            .map(|at| {
                if at == axis {
                    last
                } else if at == last {
                    axis
                } else {
                    at
                }
            })
            .collect();
        let turned = cx.transpose(gradient, &order)?;
        let product = cx.emit("MatMul", &[turned, matrix], &[])?;
        gradient = cx.transpose(product, &order)?;
    }
    cx.set(0, gradient);
    Ok(())
}

/// Whether an axis certainly keeps its size and its elements.
fn is_kept(cx: &GradCx<'_>, entry: usize, axis: usize) -> Result<bool> {
    if let Some(scales) =
        cx.find_input(2).and_then(|scales| cx.known_floats(scales)).filter(|scales| !scales.is_empty())
    {
        return Ok(scales.get(entry) == Some(&1.0));
    }
    let of = |value: ValueId| cx.size_at(value, axis);
    Ok(of(cx.input(0)?)? == of(cx.output(0)?)?)
}

/// The interpolation matrix along an axis: the weight of each input element in each output element.
fn resizing_matrix(cx: &mut GradCx<'_>, input: ValueId, entry: usize, axis: usize) -> Result<ValueId> {
    let size = cx.sizes(input, axis, axis + 1)?;
    let places = cx.range(size)?;
    let column = cx.reshape_to(places, &[-1, 1])?;
    let unit = cx.emit("Equal", &[column, places], &[])?;
    let unit = cx.cast(unit, cx.dtype(input)?)?;
    let at = cx.ints(&[entry as i64])?;
    // `roi` matters to `tf_crop_and_resize` alone, which `of_resize` refused.
    let mut inputs = vec![Some(unit), None];
    for index in [2, 3] {
        let list = cx.find_input(index);
        let list = list.filter(|&list| cx.constant_sizes(list).is_none_or(|sizes| sizes != [0]));
        inputs.push(match list {
            Some(list) => Some(cx.emit("Gather", &[list, at], &[])?),
            None => None,
        });
    }
    let mut attrs = cx.attr_list();
    attrs.retain(|(name, _)| *name != "axes");
    attrs.push(("axes", Attribute::Ints(vec![0])));
    cx.emit_some("Resize", &inputs, &attrs)
}
