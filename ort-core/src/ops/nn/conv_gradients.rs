//! Gradients of convolutions and pools.
//!
//! A convolution is linear in the image and in the weights. Its transposes are operators of their
//! own, `ConvGradInput` and `ConvGradWeights` (Goodfellow, Bengio & Courville, Deep Learning, 9.5),
//! so second-order gradients are convolutions again.

use super::geometry::Windows;
use crate::dim::Dim;
use crate::ir::{Attribute, ValueId};
use crate::spec::{GradCx, RUNTIME};
use crate::{Result, error};

/// The attributes of a convolution or pool, one number per spatial axis.
#[derive(Clone)]
struct Geometry {
    strides: Vec<i64>,
    dilations: Vec<i64>,
    begins: Vec<i64>,
    ends: Vec<i64>,
    group: i64,
}

impl Geometry {
    /// Reads the attributes and resolves `auto_pad`.
    ///
    /// Strided `SAME` padding and `output_shape` depend on the spatial dimensions of the image,
    /// which must then be constants.
    fn of(cx: &GradCx<'_>, image: ValueId, kernel: &[i64], transposed: bool) -> Result<Geometry> {
        let attrs = cx.attrs();
        let rank = kernel.len();
        let list = |name: &str, len: usize, default: i64| match attrs.find_ints(name) {
            Some(values) if values.len() == len => values.to_vec(),
            _ => vec![default; len],
        };
        let (mut begins, mut ends) = (list("pads", rank * 2, 0), Vec::new());
        ends.extend(begins.split_off(rank));
        let same = !matches!(attrs.find_string("auto_pad"), None | Some("NOTSET" | "VALID"));
        // Only a transposed convolution has `output_shape`, which fixes the padding as `SAME` does.
        let explicit = transposed && attrs.find_ints("output_shape").is_some_and(|shape| !shape.is_empty());
        if same || explicit {
            let kernel: Vec<Dim> = kernel.iter().map(|&size| Dim::constant(size)).collect();
            let windows = Windows::new(attrs, &kernel)?;
            // Inference refused images of rank below 3, so the split is in range.
            let sizes = cx.shape(image)?.split_off(2);
            let pads = if transposed {
                windows.transposed_paddings(attrs, &sizes)?
            } else {
                windows.paddings(&sizes)
            };
            let pads = pads.ok_or_else(|| {
                error!(
                    NotImplemented,
                    "the gradient of {} whose padding depends on the image's size; give the height and \
                     width of the image, or the padding, as numbers",
                    cx.operator()
                )
            })?;
            (begins, ends) = pads.into_iter().map(|[begin, end]| (begin, end)).unzip();
        } else if attrs.find_string("auto_pad") == Some("VALID") {
            (begins, ends) = (vec![0; rank], vec![0; rank]);
        }
        let (strides, dilations) = (list("strides", rank, 1), list("dilations", rank, 1));
        Ok(Geometry { strides, dilations, begins, ends, group: attrs.find_int("group").unwrap_or(1) })
    }

    fn attrs(&self) -> [(&'static str, Attribute); 4] {
        [
            ("strides", Attribute::Ints(self.strides.clone())),
            ("dilations", Attribute::Ints(self.dilations.clone())),
            ("group", Attribute::Int(self.group)),
            ("pads", Attribute::Ints([self.begins.as_slice(), &self.ends].concat())),
        ]
    }

    /// The backward-data pass: adds each window's contribution to the positions that it covered, in
    /// the shape of `image`.
    fn spread(
        &self,
        cx: &mut GradCx<'_>,
        value: ValueId,
        weights: ValueId,
        image: ValueId,
    ) -> Result<ValueId> {
        let shape = cx.shape_of(image)?;
        let inputs = [value, weights, shape].map(Some);
        cx.pen.emit_in((RUNTIME, "ConvGradInput"), &inputs, &self.attrs())
    }

    /// The backward-filter pass: the gradient of the weights, in their shape.
    fn of_weights(
        &self,
        cx: &mut GradCx<'_>,
        image: ValueId,
        upstream: ValueId,
        weights: ValueId,
    ) -> Result<ValueId> {
        let shape = cx.shape_of(weights)?;
        let inputs = [image, upstream, shape].map(Some);
        cx.pen.emit_in((RUNTIME, "ConvGradWeights"), &inputs, &self.attrs())
    }

    /// The forward convolution of an image, with exactly as many windows as `like` has.
    fn gather(
        &self,
        cx: &mut GradCx<'_>,
        image: ValueId,
        weights: ValueId,
        like: ValueId,
    ) -> Result<ValueId> {
        let (rank, mut geometry) = (self.begins.len() + 2, self.clone());
        // Pad the end until the last window of `like` fits; if more windows fit, the slice below
        // drops them. Symbolic sizes have only the slice.
        let sizes = [image, weights, like].map(|value| cx.constant_sizes(value));
        if let [Some(image), Some(kernel), Some(windows)] = &sizes {
            let axes = image.iter().zip(kernel).zip(windows).skip(2);
            let numbers = self.strides.iter().zip(&self.dilations).zip(&self.begins);
            for ((end, ((image, kernel), windows)), ((stride, dilation), begin)) in
                geometry.ends.iter_mut().zip(axes).zip(numbers)
            {
                // The end of the last window, counted from the begin padding.
                let reach = (windows - 1) * stride + (kernel - 1) * dilation + 1;
                *end = (reach - image - begin).max(0);
            }
        }
        let all = cx.emit("Conv", &[image, weights], &geometry.attrs())?;
        if sizes.last().is_some_and(|like| like.is_some() && *like == cx.constant_sizes(all)) {
            return Ok(all);
        }
        let (starts, ends) = (cx.ints(&vec![0; rank - 2])?, cx.sizes(like, 2, rank)?);
        let axes = cx.ints(&(2..rank as i64).collect::<Vec<_>>())?;
        cx.emit("Slice", &[all, starts, ends, axes], &[])
    }
}

/// The spatial dimensions of the weights, which must be constants.
fn kernel(cx: &GradCx<'_>, weights: ValueId) -> Result<Vec<i64>> {
    let sizes = cx.constant_sizes(weights).map(|sizes| sizes.into_iter().skip(2).collect());
    sizes.ok_or_else(|| {
        error!(NotImplemented, "the gradient of {} whose kernel's size only the run knows", cx.operator())
    })
}

fn of_bias(cx: &mut GradCx<'_>, upstream: ValueId) -> Result<()> {
    if !cx.wants(2) {
        return Ok(());
    }
    // The bias is one number per channel, axis 1, so batch and space are summed.
    let axes: Vec<i64> = std::iter::once(0).chain(2..cx.rank(upstream)? as i64).collect();
    let sum = cx.sum_along(upstream, &axes)?;
    cx.set_reshaped(2, sum)
}

pub(super) fn of_conv(cx: &mut GradCx<'_>) -> Result<()> {
    let (image, weights, upstream) = (cx.input(0)?, cx.input(1)?, cx.upstream()?);
    let geometry = Geometry::of(cx, image, &kernel(cx, weights)?, false)?;
    if cx.wants(0) {
        let gradient = geometry.spread(cx, upstream, weights, image)?;
        cx.set(0, gradient);
    }
    if cx.wants(1) {
        let gradient = geometry.of_weights(cx, image, upstream, weights)?;
        cx.set(1, gradient);
    }
    of_bias(cx, upstream)
}

/// The transposed convolution is a convolution's backward-data pass: its gradients are that
/// convolution and its backward filter, with image and upstream gradient exchanged.
pub(super) fn of_conv_transpose(cx: &mut GradCx<'_>) -> Result<()> {
    let (image, weights, upstream) = (cx.input(0)?, cx.input(1)?, cx.upstream()?);
    let geometry = Geometry::of(cx, image, &kernel(cx, weights)?, true)?;
    if cx.wants(0) {
        let gradient = geometry.gather(cx, upstream, weights, image)?;
        cx.set(0, gradient);
    }
    if cx.wants(1) {
        let gradient = geometry.of_weights(cx, upstream, image, weights)?;
        cx.set(1, gradient);
    }
    of_bias(cx, upstream)
}

/// `ConvGradInput` is bilinear in the upstream gradient and the weights.
pub(super) fn of_input_gradient(cx: &mut GradCx<'_>) -> Result<()> {
    let (of_result, weights, upstream) = (cx.input(0)?, cx.input(1)?, cx.upstream()?);
    let geometry = Geometry::of(cx, upstream, &kernel(cx, weights)?, false)?;
    if cx.wants(0) {
        let gradient = geometry.gather(cx, upstream, weights, of_result)?;
        cx.set(0, gradient);
    }
    if cx.wants(1) {
        let gradient = geometry.of_weights(cx, upstream, of_result, weights)?;
        cx.set(1, gradient);
    }
    Ok(())
}

/// `ConvGradWeights` is bilinear in the image and the upstream gradient.
pub(super) fn of_weights_gradient(cx: &mut GradCx<'_>) -> Result<()> {
    let (image, of_result, upstream) = (cx.input(0)?, cx.input(1)?, cx.upstream()?);
    let geometry = Geometry::of(cx, image, &kernel(cx, upstream)?, false)?;
    if cx.wants(0) {
        let gradient = geometry.spread(cx, of_result, upstream, image)?;
        cx.set(0, gradient);
    }
    if cx.wants(1) {
        let gradient = geometry.gather(cx, image, upstream, of_result)?;
        cx.set(1, gradient);
    }
    Ok(())
}

/// Scatters the upstream gradient to the argmax of each window.
pub(super) fn of_max_pool(cx: &mut GradCx<'_>) -> Result<()> {
    let (image, upstream) = (cx.input(0)?, cx.first_upstream()?);
    // The scatter needs row-major indices. A node without them, or with column-major ones, runs
    // again.
    let by_rows = cx.attrs().find_int("storage_order").unwrap_or(0) == 0;
    let places = match cx.find_output(1).filter(|_| by_rows) {
        Some(places) => places,
        None => {
            let mut attrs = cx.attr_list();
            attrs.retain(|(name, _)| *name != "storage_order");
            let again = cx.emit_many("MaxPool", &[Some(image)], &attrs, 2)?;
            again.last().copied().ok_or_else(|| error!(Fail, "MaxPool has no output"))?
        }
    };
    let (places, upstream) = (cx.reshape_to(places, &[-1])?, cx.reshape_to(upstream, &[-1])?);
    // Windows overlap, so the scatter adds. The indices count from the start of the whole tensor.
    let (size, one) = (cx.emit("Size", &[image], &[])?, cx.ints(&[1])?);
    let size = cx.reshape(size, one)?;
    let zeros = cx.zeros(size, cx.dtype(upstream)?)?;
    let add = [("reduction", Attribute::String("add".into()))];
    let gradient = cx.emit("ScatterElements", &[zeros, places, upstream], &add)?;
    cx.set_reshaped(0, gradient)
}

/// Adds each window's value to the positions that it covers, in the shape of the image: the
/// transpose of a sum pool.
fn spread_windows(cx: &mut GradCx<'_>, value: ValueId) -> Result<ValueId> {
    let image = cx.input(0)?;
    let rank = cx.rank(image)?;
    let kernel = cx.attrs().ints("kernel_shape")?.to_vec();
    let geometry = Geometry::of(cx, image, &kernel, false)?;
    // Channels do not mix, so they become batch items and one kernel of ones serves them all.
    let alone = cx.ints(&[-1, 1])?;
    let alone_shape = |cx: &mut GradCx<'_>, value: ValueId| -> Result<ValueId> {
        let spatial = cx.sizes(value, 2, rank)?;
        let shape = cx.join(&[alone, spatial])?;
        cx.reshape(value, shape)
    };
    let (value, like) = (alone_shape(cx, value)?, alone_shape(cx, image)?);
    let one = cx.number(1.0, cx.dtype(value)?)?;
    let shape = cx.ints(&[[1, 1].as_slice(), &kernel].concat())?;
    let ones = cx.emit("Expand", &[one, shape], &[])?;
    let spread = geometry.spread(cx, value, ones, like)?;
    cx.reshape_like(spread, image)
}

/// Spreads each window's gradient evenly over its positions.
///
/// Average over sum of an image of ones is one over the count by which the window divides: it
/// accounts for padding and for windows that overhang the image.
pub(super) fn of_average_pool(cx: &mut GradCx<'_>) -> Result<()> {
    let (image, upstream) = (cx.input(0)?, cx.upstream()?);
    let (rank, dtype) = (cx.rank(image)?, cx.dtype(image)?);
    // The counts are the same for all items and channels: one image of ones is enough.
    let (alone, spatial) = (cx.ints(&[1, 1])?, cx.sizes(image, 2, rank)?);
    let shape = cx.join(&[alone, spatial])?;
    let one = cx.number(1.0, dtype)?;
    let ones = cx.emit("Expand", &[one, shape], &[])?;
    let mean = cx.emit("AveragePool", &[ones], &cx.attr_list())?;
    let mut of_sum = cx.attr_list();
    of_sum.retain(|(name, _)| *name != "count_include_pad");
    // `LpPool` with p = 1 sums the ones. It has no `count_include_pad`, because zeros add nothing.
    of_sum.push(("p", Attribute::Int(1)));
    let sum = cx.emit("LpPool", &[ones], &of_sum)?;
    let part = cx.emit("Div", &[mean, sum], &[])?;
    let parts = cx.emit("Mul", &[upstream, part], &[])?;
    let gradient = spread_windows(cx, parts)?;
    cx.set(0, gradient);
    Ok(())
}

/// `dx = sign(x) (|x| / y)^(p - 1) dy`, and 0 where the norm `y` is 0.
pub(super) fn of_lp_pool(cx: &mut GradCx<'_>) -> Result<()> {
    let (image, output, upstream) = (cx.input(0)?, cx.output(0)?, cx.upstream()?);
    let dtype = cx.dtype(image)?;
    let power = cx.attrs().int("p")? as f64 - 1.0;
    let (zero, power) = (cx.number(0.0, dtype)?, cx.number(power, dtype)?);
    // `y^(p - 1)` divides before the windows are spread, `|x|^(p - 1)` multiplies after it.
    let of_output = cx.emit("Pow", &[output, power], &[])?;
    let parts = cx.emit("Div", &[upstream, of_output], &[])?;
    let is_zero = cx.emit("Equal", &[output, zero], &[])?;
    let parts = cx.emit("Where", &[is_zero, zero, parts], &[])?;
    // The global pool has one window, whose gradient broadcasts over the image.
    let parts = match cx.operator() {
        "LpPool" => spread_windows(cx, parts)?,
        _ => parts,
    };
    let (size, sign) = (cx.emit("Abs", &[image], &[])?, cx.emit("Sign", &[image], &[])?);
    let size = cx.emit("Pow", &[size, power], &[])?;
    let factor = cx.emit("Mul", &[size, sign], &[])?;
    let gradient = cx.emit("Mul", &[parts, factor], &[])?;
    cx.set(0, gradient);
    Ok(())
}

/// Spreads the gradient evenly over the positions of a channel.
pub(super) fn of_global_average(cx: &mut GradCx<'_>) -> Result<()> {
    let (image, upstream) = (cx.input(0)?, cx.upstream()?);
    let rank = cx.rank(image)?;
    let spatial = cx.sizes(image, 2, rank)?;
    let count = cx.emit("ReduceProd", &[spatial], &[("keepdims", Attribute::Int(0))])?;
    let count = cx.cast(count, cx.dtype(upstream)?)?;
    let part = cx.emit("Div", &[upstream, count], &[])?;
    let shape = cx.shape_of(image)?;
    let gradient = cx.emit("Expand", &[part, shape], &[])?;
    cx.set(0, gradient);
    Ok(())
}

/// Splits the gradient evenly between tied maxima.
pub(super) fn of_global_max(cx: &mut GradCx<'_>) -> Result<()> {
    let (image, output, upstream) = (cx.input(0)?, cx.output(0)?, cx.upstream()?);
    let hit = cx.emit("Equal", &[image, output], &[])?;
    let hit = cx.cast(hit, cx.dtype(image)?)?;
    let axes: Vec<i64> = (2..cx.rank(image)? as i64).collect();
    let count = cx.sum_along(hit, &axes)?;
    let share = cx.emit("Div", &[upstream, count], &[])?;
    let gradient = cx.emit("Mul", &[share, hit], &[])?;
    cx.set(0, gradient);
    Ok(())
}
