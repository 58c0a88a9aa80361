//! Gradients of operators that place elements by index.
//!
//! Scatters with a reduction, caches, one-hot, unique and unpooled elements, and others whose rule
//! needs indices.

use crate::dtype::DType;
use crate::ir::{Attribute, ValueId};
use crate::spec::{GradCx, product};
use crate::{Result, error};

/// The destination of a scatter, for scattering and gathering other values at the same indices.
struct ScatterTarget {
    scatter: &'static str,
    gather: &'static str,
    axis: Vec<(&'static str, Attribute)>,
    data: ValueId,
    indices: ValueId,
}

impl ScatterTarget {
    fn of(cx: &GradCx<'_>) -> Result<ScatterTarget> {
        let scatter = cx.operator();
        let (gather, axis) = match scatter {
            "ScatterElements" => ("GatherElements", vec![("axis", Attribute::Int(cx.attrs().int("axis")?))]),
            _ => ("GatherND", Vec::new()),
        };
        Ok(ScatterTarget { scatter, gather, axis, data: cx.input(0)?, indices: cx.input(1)? })
    }

    fn reduced(&self, cx: &mut GradCx<'_>, onto: ValueId, updates: ValueId, how: &str) -> Result<ValueId> {
        let mut attrs = self.axis.clone();
        attrs.push(("reduction", Attribute::String(how.into())));
        cx.emit(self.scatter, &[onto, self.indices, updates], &attrs)
    }

    fn gathered(&self, cx: &mut GradCx<'_>, from: ValueId) -> Result<ValueId> {
        cx.emit(self.gather, &[from, self.indices], &self.axis)
    }

    /// Counts per destination the updates whose `holds` is 1.
    fn counted(&self, cx: &mut GradCx<'_>, holds: ValueId) -> Result<ValueId> {
        let zeros = cx.filled(0.0, self.data)?;
        self.reduced(cx, zeros, holds, "add")
    }
}

/// Splits the gradient evenly between the tied extremes at a destination: updates and the old
/// element.
pub(super) fn of_scatter_extreme(cx: &mut GradCx<'_>) -> Result<()> {
    let (places, updates) = (ScatterTarget::of(cx)?, cx.input(2)?);
    let (output, upstream) = (cx.output(0)?, cx.upstream()?);
    let dtype = cx.dtype(updates)?;
    let at_updates = places.gathered(cx, output)?;
    let hit = |cx: &mut GradCx<'_>, a: ValueId, b: ValueId| {
        let same = cx.emit("Equal", &[a, b], &[])?;
        cx.cast(same, dtype)
    };
    let (of_data, of_updates) = (hit(cx, places.data, output)?, hit(cx, updates, at_updates)?);
    // All ties at a destination: the updates that hit, and the old element if it does.
    let count = places.counted(cx, of_updates)?;
    let count = cx.emit("Add", &[count, of_data], &[])?;
    let share = cx.emit("Div", &[upstream, count], &[])?;
    if cx.wants(0) {
        let gradient = cx.emit("Mul", &[share, of_data], &[])?;
        cx.set(0, gradient);
    }
    if cx.wants(2) {
        let share = places.gathered(cx, share)?;
        let gradient = cx.emit("Mul", &[share, of_updates], &[])?;
        cx.set(2, gradient);
    }
    Ok(())
}

/// The product of the other factors at a destination. With one zero among the factors, only that
/// one has a gradient; with more, none has.
pub(super) fn of_scatter_product(cx: &mut GradCx<'_>) -> Result<()> {
    let (places, updates, upstream) = (ScatterTarget::of(cx)?, cx.input(2)?, cx.upstream()?);
    let dtype = cx.dtype(updates)?;
    let (zero, one) = (cx.number(0.0, dtype)?, cx.number(1.0, dtype)?);
    let is_zero = |cx: &mut GradCx<'_>, value: ValueId| cx.emit("Equal", &[value, zero], &[]);
    let (data_zero, update_zero) = (is_zero(cx, places.data)?, is_zero(cx, updates)?);
    let others =
        |cx: &mut GradCx<'_>, zeros: ValueId, value: ValueId| cx.emit("Where", &[zeros, one, value], &[]);
    let (data, factors) = (others(cx, data_zero, places.data)?, others(cx, update_zero, updates)?);
    let product = places.reduced(cx, data, factors, "mul")?;
    let (of_data, of_updates) = (cx.cast(data_zero, dtype)?, cx.cast(update_zero, dtype)?);
    let count = places.counted(cx, of_updates)?;
    let count = cx.emit("Add", &[count, of_data], &[])?;
    let product = cx.emit("Mul", &[product, upstream], &[])?;
    let share = |cx: &mut GradCx<'_>, is_zero: ValueId, own: ValueId, [product, count]: [ValueId; 2]| {
        // The other factors contain no zero if the count is no more than this factor's own.
        let limit = cx.emit("Where", &[is_zero, one, zero], &[])?;
        let alone = cx.emit("Equal", &[count, limit], &[])?;
        let rest = cx.emit("Div", &[product, own], &[])?;
        cx.emit("Where", &[alone, rest, zero], &[])
    };
    if cx.wants(0) {
        let gradient = share(cx, data_zero, data, [product, count])?;
        cx.set(0, gradient);
    }
    if cx.wants(2) {
        let there = [places.gathered(cx, product)?, places.gathered(cx, count)?];
        let gradient = share(cx, update_zero, factors, there)?;
        cx.set(2, gradient);
    }
    Ok(())
}

/// Sums the gradient over the positions of each of the two `values`.
pub(super) fn of_one_hot(cx: &mut GradCx<'_>) -> Result<()> {
    if !cx.wants(2) {
        return Ok(());
    }
    let (indices, depth, upstream) = (cx.input(0)?, cx.input(1)?, cx.upstream()?);
    // Only ones and zeros instead of the values: a mask of the hot positions.
    let values = cx.pen.constant(crate::tensor::Tensor::from_slice(&[2], &[0.0f32, 1.0])?);
    let dtype = cx.dtype(upstream)?;
    let values = cx.cast(values, dtype)?;
    let attrs = [("axis", Attribute::Int(cx.attrs().int("axis")?))];
    let hot = cx.emit("OneHot", &[indices, depth, values], &attrs)?;
    let on = cx.emit("Mul", &[upstream, hot], &[])?;
    let off = cx.emit("Sub", &[upstream, on], &[])?;
    let mut sums = Vec::with_capacity(2);
    let one = cx.ints(&[1])?;
    for part in [off, on] {
        let sum = cx.emit("ReduceSum", &[part], &[("keepdims", Attribute::Int(0))])?;
        sums.push(cx.reshape(sum, one)?);
    }
    let gradient = cx.emit("Concat", &sums, &[("axis", Attribute::Int(0))])?;
    cx.set(2, gradient);
    Ok(())
}

/// Scatters the gradient to the first occurrence of each value, which the output copied.
pub(super) fn of_unique(cx: &mut GradCx<'_>) -> Result<()> {
    let (input, upstream) = (cx.input(0)?, cx.upstream()?);
    // Output 1 holds the indices of the first occurrences.
    let first = cx.demand_output(1)?;
    let (data, axis) = match cx.attrs().find_int("axis") {
        Some(axis) => (input, crate::spec::axis_of(axis, cx.rank(input)?)?),
        None => (cx.reshape_to(input, &[-1])?, 0),
    };
    let gradient = cx.sum_at(data, axis, first, upstream)?;
    cx.set_reshaped(0, gradient)
}

/// The overwritten part of the cache has a gradient of zero, and the update has the gradient there.
pub(super) fn of_tensor_scatter(cx: &mut GradCx<'_>) -> Result<()> {
    let (cache, update, upstream) = (cx.input(0)?, cx.input(1)?, cx.upstream()?);
    let rank = cx.rank(cache)?;
    let axis = cx.axis("axis", rank)?;
    if cx.wants(0) {
        let zeros = cx.filled(0.0, update)?;
        let inputs = [Some(upstream), Some(zeros), cx.find_input(2)];
        let gradient = cx.emit_some("TensorScatter", &inputs, &cx.attr_list())?;
        cx.set(0, gradient);
    }
    if !cx.wants(1) {
        return Ok(());
    }
    // The indices along the axis: the start of each batch item, plus a range.
    let count = cx.sizes(update, axis, axis + 1)?;
    let steps = cx.range(count)?;
    let column = |at: usize| -> Vec<i64> { (0..rank).map(|axis| if axis == at { -1 } else { 1 }).collect() };
    let mut places = cx.reshape_to(steps, &column(axis))?;
    if let Some(starts) = cx.find_input(2) {
        let starts = cx.reshape_to(starts, &column(0))?;
        places = cx.emit("Add", &[places, starts], &[])?;
    }
    if cx.attrs().string("mode")? == "circular" {
        let size = cx.sizes(cache, axis, axis + 1)?;
        places = cx.emit("Mod", &[places, size], &[])?;
    }
    let shape = cx.shape_of(update)?;
    let places = cx.emit("Expand", &[places, shape], &[])?;
    let gradient =
        cx.emit("GatherElements", &[upstream, places], &[("axis", Attribute::Int(axis as i64))])?;
    cx.set(1, gradient);
    Ok(())
}

/// The element is `start + i * delta`; the limit only determines the count and has no gradient.
pub(super) fn of_range(cx: &mut GradCx<'_>) -> Result<()> {
    let upstream = cx.upstream()?;
    let keep = [("keepdims", Attribute::Int(0))];
    if cx.wants(0) {
        let sum = cx.emit("ReduceSum", &[upstream], &keep)?;
        cx.set_reshaped(0, sum)?;
    }
    if cx.wants(2) {
        let count = cx.sizes(upstream, 0, 1)?;
        let places = cx.range(count)?;
        let places = cx.cast(places, cx.dtype(upstream)?)?;
        let products = cx.emit("Mul", &[upstream, places], &[])?;
        let sum = cx.emit("ReduceSum", &[products], &keep)?;
        cx.set_reshaped(2, sum)?;
    }
    Ok(())
}

/// Pads what was cropped and crops what was padded.
pub(super) fn of_center_crop_pad(cx: &mut GradCx<'_>) -> Result<()> {
    let (input, upstream) = (cx.input(0)?, cx.upstream()?);
    let mut sizes = cx.shape_of(input)?;
    if let Some(axes) = cx.attrs().find_ints("axes") {
        let axes = cx.ints(axes)?;
        sizes = cx.emit("Gather", &[sizes, axes], &[])?;
    }
    let gradient = cx.emit("CenterCropPad", &[upstream, sizes], &cx.attr_list())?;
    cx.set(0, gradient);
    Ok(())
}

/// im2col of the gradient: a convolution with one one-hot filter per position of the block.
pub(super) fn of_col2im(cx: &mut GradCx<'_>) -> Result<()> {
    let (input, upstream) = (cx.input(0)?, cx.upstream()?);
    let block = cx.known_ints(cx.input(2)?);
    let block = block
        .ok_or_else(|| error!(NotImplemented, "the gradient of blocks whose size only the run knows"))?;
    let (rank, count) = (block.len(), product(&block)?);
    let dtype = cx.dtype(upstream)?;
    let places = cx.ints(&[count])?;
    let places = cx.range(places)?;
    let column = cx.reshape_to(places, &[-1, 1])?;
    let filters = cx.emit("Equal", &[column, places], &[])?;
    let filters = cx.cast(filters, dtype)?;
    // [positions, 1, block...]: each filter picks one position of the block.
    let filters = cx.reshape_to(filters, &[[count, 1].as_slice(), &block].concat())?;
    // Channels do not mix, so they become batch items.
    let (alone, spatial) = (cx.ints(&[-1, 1])?, cx.sizes(upstream, 2, rank + 2)?);
    let shape = cx.join(&[alone, spatial])?;
    let images = cx.reshape(upstream, shape)?;
    let columns = cx.emit("Conv", &[images, filters], &cx.attr_list())?;
    let shape = cx.shape_of(input)?;
    let gradient = cx.reshape(columns, shape)?;
    cx.set(0, gradient);
    Ok(())
}

/// Multiplies the gradient by the homogeneous coordinates of all positions, which the identity map
/// returns.
pub(super) fn of_affine_grid(cx: &mut GradCx<'_>) -> Result<()> {
    let (theta, size, upstream) = (cx.input(0)?, cx.input(1)?, cx.upstream()?);
    let dtype = cx.dtype(theta)?;
    let rank = cx.rank(upstream)? as i64 - 2;
    let unit: Vec<f64> =
        (0..rank * (rank + 1)).map(|at| if at / (rank + 1) == at % (rank + 1) { 1.0 } else { 0.0 }).collect();
    let shape = [1, rank as usize, rank as usize + 1];
    let unit = cx.pen.constant(crate::tensor::Tensor::from_slice(&shape, &unit)?);
    let unit = cx.cast(unit, dtype)?;
    // One batch item is enough: the base positions are the same for all.
    let (one, start, end) = (cx.ints(&[1])?, cx.ints(&[1])?, cx.ints(&[i64::MAX])?);
    let rest = cx.emit("Slice", &[size, start, end], &[])?;
    let rest = cx.cast(rest, DType::I64)?;
    let size = cx.join(&[one, rest])?;
    let base = cx.emit("AffineGrid", &[unit, size], &cx.attr_list())?;
    let base = cx.reshape_to(base, &[-1, rank])?;
    let ones = {
        let (shape, one) = (cx.sizes(base, 0, 1)?, cx.number(1.0, dtype)?);
        let width = cx.ints(&[1])?;
        let shape = cx.join(&[shape, width])?;
        cx.emit("Expand", &[one, shape], &[])?
    };
    let base = cx.emit("Concat", &[base, ones], &[("axis", Attribute::Int(1))])?;
    let rows = cx.reshape_to(upstream, &[0, -1, rank])?;
    // [N, rank, positions] and [positions, rank + 1] give the shape of theta.
    let rows = cx.transposed(rows)?;
    let gradient = cx.emit("MatMul", &[rows, base], &[])?;
    cx.set(0, gradient);
    Ok(())
}

/// Gathers each value's gradient from the place that it was put at.
pub(in crate::ops) fn of_max_unpool(cx: &mut GradCx<'_>) -> Result<()> {
    let (input, indices, mut upstream) = (cx.input(0)?, cx.input(1)?, cx.upstream()?);
    if cx.find_input(2).is_some() {
        // The indices refer to the image that was pooled, and `output_shape` crops that to its
        // upper left corner.
        let whole = cx.emit("MaxUnpool", &[input, indices], &cx.attr_list())?;
        let (all, there) = (cx.shape_of(whole)?, cx.shape_of(upstream)?);
        let missing = cx.emit("Sub", &[all, there], &[])?;
        let zeros = cx.ints(&vec![0; cx.rank(input)?])?;
        let pads = cx.join(&[zeros, missing])?;
        upstream = cx.emit("Pad", &[upstream, pads], &[])?;
    }
    let (flat, places) = (cx.reshape_to(upstream, &[-1])?, cx.reshape_to(indices, &[-1])?);
    let gradient = cx.emit("Gather", &[flat, places], &[])?;
    cx.set_reshaped(0, gradient)
}

/// The gradient of the scale: the quantized values minus their zero point, times the upstream
/// gradient, summed per scale.
pub(in crate::ops) fn of_dequantize(cx: &mut GradCx<'_>) -> Result<()> {
    let (codes, scale, upstream) = (cx.input(0)?, cx.input(1)?, cx.upstream()?);
    if !cx.wants(1) {
        return Ok(());
    }
    // Dequantizing with scales of 1 yields the values minus their zero point.
    let ones = cx.filled(1.0, scale)?;
    let inputs = [Some(codes), Some(ones), cx.find_input(2)];
    let plain = cx.emit_some("DequantizeLinear", &inputs, &cx.attr_list())?;
    let product = cx.emit("Mul", &[upstream, plain], &[])?;
    let product = cx.cast(product, cx.dtype(scale)?)?;
    let (rank, of_scale, block) = (cx.rank(codes)?, cx.rank(scale)?, cx.attrs().int("block_size")?);
    let sizes = cx.constant_sizes(scale);
    // A list of one scale is of the whole tensor, even with a block size.
    let is_single = sizes.is_some_and(|sizes| sizes.iter().all(|&size| size == 1));
    let gradient = if of_scale == 0 || is_single && (of_scale == 1 || block == 0) {
        cx.emit("ReduceSum", &[product], &[("keepdims", Attribute::Int(0))])?
    } else if block == 0 {
        let axis = cx.axis("axis", rank)?;
        let axes: Vec<i64> = (0..rank).filter(|at| *at != axis).map(|at| at as i64).collect();
        cx.sum_along(product, &axes)?
    } else {
        let axis = cx.axis("axis", rank)?;
        of_blocks(cx, [product, scale], axis, block)?
    };
    cx.set_reshaped(1, gradient)
}

/// Sums `value` over the blocks along `axis` that each have a scale of their own.
fn of_blocks(cx: &mut GradCx<'_>, [value, scale]: [ValueId; 2], axis: usize, block: i64) -> Result<ValueId> {
    let rank = cx.rank(value)?;
    let (blocks, size) = (cx.sizes(scale, axis, axis + 1)?, cx.ints(&[block])?);
    let (before, behind) = (cx.sizes(value, 0, axis)?, cx.sizes(value, axis + 1, rank)?);
    let mut whole = value;
    if cx.size_at(value, axis)?.as_constant().is_none_or(|size| size.checked_rem(block) != Some(0)) {
        // The standard allows a last block that is shorter than the others: zeros fill it up.
        let (filled, here) = (cx.emit("Mul", &[blocks, size], &[])?, cx.sizes(value, axis, axis + 1)?);
        let missing = cx.emit("Sub", &[filled, here], &[])?;
        let (none, at) = (cx.ints(&[0])?, cx.ints(&[axis as i64])?);
        let pads = cx.join(&[none, missing])?;
        whole = cx.emit_some("Pad", &[Some(value), Some(pads), None, Some(at)], &[])?;
    }
    let shape = cx.join(&[before, blocks, size, behind])?;
    let apart = cx.reshape(whole, shape)?;
    cx.sum_along(apart, &[axis as i64 + 1])
}

/// Decomposes `CumProd` into a scan that multiplies.
///
/// Its derivative has no division, so it holds at zeros too.
pub(in crate::ops) fn running_product(cx: &mut GradCx<'_>) -> Result<Vec<ValueId>> {
    use crate::ops::nn::recurrent_steps::Steps;
    let input = cx.input(0)?;
    let rank = cx.rank(input)?;
    let axis = cx.known_ints(cx.input(1)?).and_then(|axis| axis.first().copied());
    let axis = axis.ok_or_else(|| {
        error!(NotImplemented, "the gradient of CumProd along an axis that only the run knows")
    })?;
    let axis = crate::spec::axis_of(axis, rank)?;
    // The scan runs over the first axis.
    let order: Vec<usize> = std::iter::once(axis).chain((0..rank).filter(|at| *at != axis)).collect();
    let moved = cx.transpose(input, &order)?;
    let one = cx.number(1.0, cx.dtype(input)?)?;
    let shape = cx.sizes(moved, 1, rank)?;
    let ones = cx.emit("Expand", &[one, shape], &[])?;
    let mut steps = Steps::new(cx);
    let product = steps.carry(cx, ones);
    let x = steps.scan(cx, moved)?;
    let next = steps.pen().emit("Mul", &[product, x], &[])?;
    // The exclusive form leaves the element itself out: it collects the product before the step.
    let handed = if cx.attrs().flag("exclusive")? { product } else { next };
    let reversed = cx.attrs().flag("reverse")?;
    let results = steps.finish(cx, reversed, (&[next], &[handed]))?;
    let y = results.last().copied().ok_or_else(|| error!(Fail, "Scan has outputs"))?;
    let back: Vec<usize> = (1..=axis).chain([0]).chain(axis + 1..rank).collect();
    Ok(vec![cx.transpose(y, &back)?])
}

/// The gradients of a determinant and of an inverse.
///
/// For `Y = det X` it is `G Y X^-T`; for the inverse `Y = X^-1` it is `-Y^T G Y^T`. A singular
/// matrix has no finite gradient.
pub(in crate::ops) fn of_matrix(cx: &mut GradCx<'_>) -> Result<()> {
    let (input, output, upstream) = (cx.input(0)?, cx.output(0)?, cx.upstream()?);
    let gradient = if cx.operator() == "Det" {
        let inverse = cx.pen.emit_in((crate::spec::MICROSOFT, "Inverse"), &[Some(input)], &[])?;
        let turned = cx.transposed(inverse)?;
        let factor = cx.emit("Mul", &[upstream, output], &[])?;
        let last = cx.ints(&[-2, -1])?;
        let factor = cx.emit("Unsqueeze", &[factor, last], &[])?;
        cx.emit("Mul", &[factor, turned], &[])?
    } else {
        // From dY = -Y dX Y.
        let turned = cx.transposed(output)?;
        let product = cx.emit("MatMul", &[turned, upstream], &[])?;
        let product = cx.emit("MatMul", &[product, turned], &[])?;
        cx.emit("Neg", &[product], &[])?
    };
    cx.set(0, gradient);
    Ok(())
}
