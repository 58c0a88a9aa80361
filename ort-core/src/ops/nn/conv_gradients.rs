//! Gradients of convolutions and pools.
//!
//! A convolution is linear in the image and in the weights. Its transpose by the image is the transposed convolution; by
//! the weights it is a convolution of the image with the gradient, batch and channels exchanged, strides and dilations too
//! (Goodfellow, Bengio & Courville, Deep Learning, 9.5).

use super::geometry::Windows;
use crate::ir::{Attribute, ValueId};
use crate::spec::GradCx;
use crate::{Result, error};

/// The numbers of a convolution or pool, one for each spatial axis.
struct Geometry {
    strides: Vec<i64>,
    dilations: Vec<i64>,
    begins: Vec<i64>,
    ends: Vec<i64>,
    group: i64,
}

impl Geometry {
    /// As the attributes say. `SAME` padding depends on the image's size, which must then be a number.
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
        let explicit = transposed && attrs.find_ints("output_shape").is_some_and(|shape| !shape.is_empty());
        if same || explicit {
            let sizes = cx.constant_sizes(image).ok_or_else(|| {
                error!(NotImplemented, "the gradient of {} with padding by size", cx.operator())
                    .help("give the image's sizes, or its padding, as numbers")
            })?;
            let kernel: Vec<_> = kernel.iter().map(|&size| crate::dim::Dim::constant(size)).collect();
            let sizes: Vec<usize> =
                sizes.iter().skip(2).map(|&size| usize::try_from(size).unwrap_or(0)).collect();
            let windows = Windows::new(attrs, &kernel)?;
            let axes = if transposed { windows.transposed_on(attrs, &sizes)? } else { windows.on(&sizes)? };
            begins = axes.iter().map(|axis| axis.pads[0] as i64).collect();
            ends = axes.iter().map(|axis| axis.pads[1] as i64).collect();
        } else if attrs.find_string("auto_pad") == Some("VALID") {
            (begins, ends) = (vec![0; rank], vec![0; rank]);
        }
        let (strides, dilations) = (list("strides", rank, 1), list("dilations", rank, 1));
        Ok(Geometry { strides, dilations, begins, ends, group: attrs.find_int("group").unwrap_or(1) })
    }

    fn attrs(&self, pads: bool) -> Vec<(&'static str, Attribute)> {
        let mut attrs = vec![
            ("strides", Attribute::Ints(self.strides.clone())),
            ("dilations", Attribute::Ints(self.dilations.clone())),
            ("group", Attribute::Int(self.group)),
        ];
        if pads {
            attrs.push(("pads", Attribute::Ints([self.begins.as_slice(), &self.ends].concat())));
        }
        attrs
    }

    /// What each window adds to the places of an image that it lay over, in the shape of `image`.
    fn spread(
        &self,
        cx: &mut GradCx<'_>,
        value: ValueId,
        weights: ValueId,
        image: ValueId,
    ) -> Result<ValueId> {
        let whole = cx.emit("ConvTranspose", &[value, weights], &self.attrs(false))?;
        let rank = self.begins.len() + 2;
        let (wanted, there) = (cx.sizes(image, 2, rank)?, cx.sizes(whole, 2, rank)?);
        let begins = cx.ints(&self.begins.iter().map(|begin| -begin).collect::<Vec<_>>())?;
        // Padding is cut off; places behind the last window have zeros.
        let ends = cx.emit("Sub", &[wanted, there], &[])?;
        let ends = cx.emit("Sub", &[ends, begins], &[])?;
        let pads = cx.join(&[begins, ends])?;
        let axes = cx.ints(&(2..rank as i64).collect::<Vec<_>>())?;
        cx.emit_some("Pad", &[Some(whole), Some(pads), None, Some(axes)], &[])
    }

    /// The gradient of weights, in their shape.
    fn of_weights(
        &self,
        cx: &mut GradCx<'_>,
        image: ValueId,
        upstream: ValueId,
        weights: ValueId,
    ) -> Result<ValueId> {
        let rank = self.begins.len() + 2;
        let exchanged: Vec<usize> = [1, 0].into_iter().chain(2..rank).collect();
        // Filters stay in the order of their groups; the batch is summed over.
        let upstream = cx.transpose(upstream, &exchanged)?;
        let image = match self.group {
            1 => cx.transpose(image, &exchanged)?,
            group => by_groups(cx, image, group)?,
        };
        let turned = Geometry {
            strides: self.dilations.clone(),
            dilations: self.strides.clone(),
            begins: self.begins.clone(),
            ends: self.ends.clone(),
            group: self.group,
        };
        let sums = cx.emit("Conv", &[image, upstream], &turned.attrs(true))?;
        let sums = cx.transpose(sums, &exchanged)?;
        // Places that no window reached make more sums than there are weights.
        if cx.constant_sizes(sums).is_some_and(|sizes| Some(sizes) == cx.constant_sizes(weights)) {
            return Ok(sums);
        }
        let ends = cx.sizes(weights, 2, rank)?;
        let starts = cx.ints(&vec![0; rank - 2])?;
        let axes = cx.ints(&(2..rank as i64).collect::<Vec<_>>())?;
        cx.emit("Slice", &[sums, starts, ends, axes], &[])
    }
}

/// An image of N times G times C channels as C images of G times N channels.
fn by_groups(cx: &mut GradCx<'_>, image: ValueId, group: i64) -> Result<ValueId> {
    let rank = cx.rank(image)?;
    let (batch, spatial) = (cx.sizes(image, 0, 1)?, cx.sizes(image, 2, rank)?);
    let groups = cx.ints(&[group, -1])?;
    let shape = cx.join(&[batch, groups, spatial])?;
    let split = cx.reshape(image, shape)?;
    let order: Vec<usize> = [2, 1, 0].into_iter().chain(3..rank + 1).collect();
    let turned = cx.transpose(split, &order)?;
    let channels = cx.sizes(turned, 0, 1)?;
    let rest = cx.ints(&[-1])?;
    let shape = cx.join(&[channels, rest, spatial])?;
    cx.reshape(turned, shape)
}

/// The spatial sizes of weights.
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

/// A transposed convolution's result is the image of a convolution whose result is the image here.
pub(super) fn of_conv_transpose(cx: &mut GradCx<'_>) -> Result<()> {
    let (image, weights, upstream) = (cx.input(0)?, cx.input(1)?, cx.upstream()?);
    let geometry = Geometry::of(cx, image, &kernel(cx, weights)?, true)?;
    if cx.wants(0) {
        let rank = cx.rank(image)?;
        let all = cx.emit("Conv", &[upstream, weights], &geometry.attrs(true))?;
        let (starts, ends) = (cx.ints(&vec![0; rank - 2])?, cx.sizes(image, 2, rank)?);
        let axes = cx.ints(&(2..rank as i64).collect::<Vec<_>>())?;
        let gradient = cx.emit("Slice", &[all, starts, ends, axes], &[])?;
        cx.set(0, gradient);
    }
    if cx.wants(1) {
        let gradient = geometry.of_weights(cx, upstream, image, weights)?;
        cx.set(1, gradient);
    }
    of_bias(cx, upstream)
}

/// The gradient goes to the place that was the greatest.
pub(super) fn of_max_pool(cx: &mut GradCx<'_>) -> Result<()> {
    let (image, upstream) = (cx.input(0)?, cx.first_upstream()?);
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
    let (size, one) = (cx.emit("Size", &[image], &[])?, cx.ints(&[1])?);
    let size = cx.reshape(size, one)?;
    let zeros = cx.zeros(size, cx.dtype(upstream)?)?;
    let add = [("reduction", Attribute::String("add".into()))];
    let gradient = cx.emit("ScatterElements", &[zeros, places, upstream], &add)?;
    cx.set_reshaped(0, gradient)
}

/// What the windows of a pool add to each place, in the shape of the image; each channel by itself.
fn spread_windows(cx: &mut GradCx<'_>, value: ValueId) -> Result<ValueId> {
    let image = cx.input(0)?;
    let rank = cx.rank(image)?;
    let kernel = cx.attrs().ints("kernel_shape")?.to_vec();
    let geometry = Geometry::of(cx, image, &kernel, false)?;
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

/// Each window's gradient in equal parts to its places. The mean of ones over their sum is one over a window's count, padding and
/// windows beyond the image considered.
pub(super) fn of_average_pool(cx: &mut GradCx<'_>) -> Result<()> {
    let (image, upstream) = (cx.input(0)?, cx.upstream()?);
    let (rank, dtype) = (cx.rank(image)?, cx.dtype(image)?);
    let (alone, spatial) = (cx.ints(&[1, 1])?, cx.sizes(image, 2, rank)?);
    let shape = cx.join(&[alone, spatial])?;
    let one = cx.number(1.0, dtype)?;
    let ones = cx.emit("Expand", &[one, shape], &[])?;
    let mean = cx.emit("AveragePool", &[ones], &cx.attr_list())?;
    let mut of_sum = cx.attr_list();
    of_sum.retain(|(name, _)| *name != "count_include_pad");
    of_sum.push(("p", Attribute::Int(1)));
    let sum = cx.emit("LpPool", &[ones], &of_sum)?;
    let part = cx.emit("Div", &[mean, sum], &[])?;
    let parts = cx.emit("Mul", &[upstream, part], &[])?;
    let gradient = spread_windows(cx, parts)?;
    cx.set(0, gradient);
    Ok(())
}

/// `sign(x) (|x| / y)^(p - 1)`, and 0 where the norm is.
pub(super) fn of_lp_pool(cx: &mut GradCx<'_>) -> Result<()> {
    let (image, output, upstream) = (cx.input(0)?, cx.output(0)?, cx.upstream()?);
    let dtype = cx.dtype(image)?;
    let power = cx.attrs().int("p")? as f64 - 1.0;
    let (zero, power) = (cx.number(0.0, dtype)?, cx.number(power, dtype)?);
    let of_output = cx.emit("Pow", &[output, power], &[])?;
    let parts = cx.emit("Div", &[upstream, of_output], &[])?;
    let is_zero = cx.emit("Equal", &[output, zero], &[])?;
    let parts = cx.emit("Where", &[is_zero, zero, parts], &[])?;
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

/// Equal parts for all pixels of a channel.
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

/// Pixels that are equally great share the gradient.
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
