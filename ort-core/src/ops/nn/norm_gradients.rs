//! Gradients of normalizations.
//!
//! With `x̂ = (x - mean) / deviation` and `g` the gradient of `x̂`, the gradient of `x` is
//! `(g - mean(g) - x̂ mean(g x̂)) / deviation`. Each element also moves the mean and deviation of
//! all others (Ioffe & Szegedy, Batch Normalization, section 3; Ba, Kiros & Hinton, Layer
//! Normalization). Without centring, as in RMS normalization, the term `mean(g)` is absent.

use crate::Result;
use crate::dtype::DType;
use crate::ir::{Attribute, ValueId};
use crate::spec::{GradCx, RUNTIME};

/// A tensor normalized along some axes.
struct Normalized {
    /// The normalized elements, `x̂`.
    unit: ValueId,
    /// The inverse standard deviation, or inverse root mean square.
    inverse: ValueId,
    axes: Vec<i64>,
    centred: bool,
}

impl Normalized {
    fn new(
        cx: &mut GradCx<'_>,
        x: ValueId,
        axes: Vec<i64>,
        epsilon: f32,
        centred: bool,
    ) -> Result<Normalized> {
        let mut deviation = x;
        if centred {
            let mean = cx.mean_along(x, &axes)?;
            deviation = cx.emit("Sub", &[x, mean], &[])?;
        }
        let squares = cx.emit("Mul", &[deviation, deviation], &[])?;
        // The population variance, which divides by the count. Without centring it is the mean
        // square.
        let variance = cx.mean_along(squares, &axes)?;
        let inverse = inverse_root(cx, variance, epsilon)?;
        let unit = cx.emit("Mul", &[deviation, inverse], &[])?;
        Ok(Normalized { unit, inverse, axes, centred })
    }

    /// Returns the gradient of `x` from `upstream`, the gradient of `x̂`.
    fn gradient(&self, cx: &mut GradCx<'_>, upstream: ValueId) -> Result<ValueId> {
        // Means along the axes keep them with size 1, so they broadcast.
        let along = cx.emit("Mul", &[upstream, self.unit], &[])?;
        let along = cx.mean_along(along, &self.axes)?;
        let along = cx.emit("Mul", &[self.unit, along], &[])?;
        let mut rest = cx.emit("Sub", &[upstream, along], &[])?;
        if self.centred {
            let mean = cx.mean_along(upstream, &self.axes)?;
            rest = cx.emit("Sub", &[rest, mean], &[])?;
        }
        cx.emit("Mul", &[rest, self.inverse], &[])
    }
}

fn inverse_root(cx: &mut GradCx<'_>, variance: ValueId, epsilon: f32) -> Result<ValueId> {
    let epsilon = cx.number(f64::from(epsilon), cx.dtype(variance)?)?;
    let padded = cx.emit("Add", &[variance, epsilon], &[])?;
    let root = cx.emit("Sqrt", &[padded], &[])?;
    cx.emit("Reciprocal", &[root], &[])
}

/// The accumulator type: at least single precision.
fn wide(dtype: DType) -> DType {
    if matches!(dtype, DType::F16 | DType::BF16) { DType::F32 } else { dtype }
}

/// Sets the gradient of an input from a value of another type and a broadcast shape.
fn deliver(cx: &mut GradCx<'_>, index: usize, gradient: ValueId) -> Result<()> {
    if !cx.wants(index) {
        return Ok(());
    }
    let input = cx.input(index)?;
    let sum = cx.sum_to(gradient, input)?;
    let gradient = cx.cast(sum, cx.dtype(input)?)?;
    cx.set(index, gradient);
    Ok(())
}

fn in_wide(cx: &mut GradCx<'_>, value: ValueId) -> Result<ValueId> {
    let dtype = wide(cx.dtype(value)?);
    cx.cast(value, dtype)
}

/// The gradients of `LayerNormalization` and `RMSNormalization`.
pub(super) fn of_layer(cx: &mut GradCx<'_>) -> Result<()> {
    let (input, scale, upstream) = (cx.input(0)?, cx.input(1)?, cx.first_upstream()?);
    let (x, scale, upstream) = (in_wide(cx, input)?, in_wide(cx, scale)?, in_wide(cx, upstream)?);
    let rank = cx.rank(x)?;
    let axes = (cx.axis("axis", rank)? as i64..rank as i64).collect();
    let epsilon = cx.attrs().float("epsilon")?;
    // `RMSNormalization` does not centre.
    let normalized = Normalized::new(cx, x, axes, epsilon, cx.operator() == "LayerNormalization")?;
    let of_unit = cx.emit("Mul", &[upstream, scale], &[])?;
    if cx.wants(0) {
        let gradient = normalized.gradient(cx, of_unit)?;
        deliver(cx, 0, gradient)?;
    }
    let of_scale = cx.emit("Mul", &[upstream, normalized.unit], &[])?;
    deliver(cx, 1, of_scale)?;
    // `RMSNormalization` has no bias, and no one wants the gradient of an input that is left out.
    deliver(cx, 2, upstream)
}

/// Reshapes a value per channel so that it broadcasts against an image of this rank.
fn by_channel(cx: &mut GradCx<'_>, value: ValueId, rank: usize) -> Result<ValueId> {
    let shape: Vec<i64> = std::iter::once(-1).chain(std::iter::repeat_n(1, rank.saturating_sub(2))).collect();
    cx.reshape_to(value, &shape)
}

/// Sums over all axes but the channels and sets the gradient of an input with one value per
/// channel.
fn deliver_by_channel(cx: &mut GradCx<'_>, index: usize, gradient: ValueId) -> Result<()> {
    if !cx.wants(index) {
        return Ok(());
    }
    let axes: Vec<i64> = std::iter::once(0).chain(2..cx.rank(gradient)? as i64).collect();
    let sum = cx.sum_along(gradient, &axes)?;
    let sum = cx.cast(sum, cx.dtype(cx.input(index)?)?)?;
    cx.set_reshaped(index, sum)
}

/// The gradients of `InstanceNormalization` and `GroupNormalization`. Both normalize rows: the
/// elements of a channel, or of a group of channels.
pub(super) fn of_channels(cx: &mut GradCx<'_>) -> Result<()> {
    let (input, scale, upstream) = (cx.input(0)?, cx.input(1)?, cx.upstream()?);
    let (x, scale, upstream) = (in_wide(cx, input)?, in_wide(cx, scale)?, in_wide(cx, upstream)?);
    let rank = cx.rank(x)?;
    let scale = by_channel(cx, scale, rank)?;
    let of_unit = cx.emit("Mul", &[upstream, scale], &[])?;
    let groups = cx.attrs().find_int("num_groups");
    let shape = match groups {
        Some(groups) => vec![0, groups, -1],
        None => vec![0, 0, -1],
    };
    let (rows, of_rows) = (cx.reshape_to(x, &shape)?, cx.reshape_to(of_unit, &shape)?);
    let epsilon = cx.attrs().float("epsilon")?;
    // Rows are [batch, channels or groups, elements].
    let normalized = Normalized::new(cx, rows, vec![2], epsilon, true)?;
    if cx.wants(0) {
        let gradient = normalized.gradient(cx, of_rows)?;
        let gradient = cx.reshape_like(gradient, x)?;
        deliver(cx, 0, gradient)?;
    }
    let unit = cx.reshape_like(normalized.unit, x)?;
    let of_scale = cx.emit("Mul", &[upstream, unit], &[])?;
    deliver_by_channel(cx, 1, of_scale)?;
    deliver_by_channel(cx, 2, upstream)
}

/// Batch normalization in training mode, all tensors of one type that is not half precision: one
/// fused operator.
fn of_batch_in_training(cx: &mut GradCx<'_>) -> Result<()> {
    let (x, scale, upstream) = (cx.input(0)?, cx.input(1)?, cx.first_upstream()?);
    let epsilon = [("epsilon", Attribute::Float(cx.attrs().float("epsilon")?))];
    let inputs = [x, scale, upstream].map(Some);
    let gradients = cx.pen.emit_many_in((RUNTIME, "BatchNormalizationGrad"), &inputs, &epsilon, 3)?;
    for (index, gradient) in gradients.into_iter().enumerate() {
        if cx.wants(index) {
            cx.set(index, gradient);
        }
    }
    Ok(())
}

/// The gradients of `BatchNormalization`.
///
/// Training mode differentiates through the batch's own statistics. Otherwise the statistics are
/// inputs with gradients of their own.
pub(super) fn of_batch(cx: &mut GradCx<'_>) -> Result<()> {
    let dtypes = [cx.dtype(cx.input(0)?)?, cx.dtype(cx.input(1)?)?, cx.dtype(cx.first_upstream()?)?];
    // What the fused operator takes: float32 or float64 throughout, and an axis of channels.
    let is_one_type = [[DType::F32; 3], [DType::F64; 3]].contains(&dtypes);
    if cx.attrs().flag("training_mode")? && is_one_type && cx.rank(cx.input(0)?)? >= 2 {
        return of_batch_in_training(cx);
    }
    let (input, scale, upstream) = (cx.input(0)?, cx.input(1)?, cx.first_upstream()?);
    let (x, scale, upstream) = (in_wide(cx, input)?, in_wide(cx, scale)?, in_wide(cx, upstream)?);
    let rank = cx.rank(x)?;
    let (scale, epsilon) = (by_channel(cx, scale, rank)?, cx.attrs().float("epsilon")?);
    let of_unit = cx.emit("Mul", &[upstream, scale], &[])?;
    let unit = if cx.attrs().flag("training_mode")? {
        let axes = std::iter::once(0).chain(2..rank as i64).collect();
        let normalized = Normalized::new(cx, x, axes, epsilon, true)?;
        if cx.wants(0) {
            let gradient = normalized.gradient(cx, of_unit)?;
            deliver(cx, 0, gradient)?;
        }
        normalized.unit
    } else {
        let (mean, variance) = (cx.input(3)?, cx.input(4)?);
        let (mean, variance) = (in_wide(cx, mean)?, in_wide(cx, variance)?);
        let (mean, variance) = (by_channel(cx, mean, rank)?, by_channel(cx, variance, rank)?);
        let inverse = inverse_root(cx, variance, epsilon)?;
        let centred = cx.emit("Sub", &[x, mean], &[])?;
        let unit = cx.emit("Mul", &[centred, inverse], &[])?;
        // Running statistics do not depend on the image, so the normalization is affine in it.
        let gradient = cx.emit("Mul", &[of_unit, inverse], &[])?;
        deliver(cx, 0, gradient)?;
        if cx.wants(3) {
            let of_mean = cx.emit("Neg", &[gradient], &[])?;
            deliver_by_channel(cx, 3, of_mean)?;
        }
        if cx.wants(4) {
            // `x̂` is proportional to `(variance + epsilon)^(-1/2)`.
            let half = cx.number(-0.5, cx.dtype(x)?)?;
            let square = cx.emit("Mul", &[inverse, inverse], &[])?;
            let slope = cx.emit("Mul", &[square, half], &[])?;
            let of_variance = cx.emit("Mul", &[of_unit, unit], &[])?;
            let of_variance = cx.emit("Mul", &[of_variance, slope], &[])?;
            deliver_by_channel(cx, 4, of_variance)?;
        }
        unit
    };
    let of_scale = cx.emit("Mul", &[upstream, unit], &[])?;
    deliver_by_channel(cx, 1, of_scale)?;
    deliver_by_channel(cx, 2, upstream)
}

/// The gradient of `(x - mean) / (deviation + 1e-9)` along given axes, without the 1e-9.
pub(super) fn of_mean_variance(cx: &mut GradCx<'_>) -> Result<()> {
    let (x, upstream) = (cx.input(0)?, cx.upstream()?);
    let axes = cx.attrs().ints("axes")?.to_vec();
    let normalized = Normalized::new(cx, x, axes, 0.0, true)?;
    let gradient = normalized.gradient(cx, upstream)?;
    cx.set(0, gradient);
    Ok(())
}

/// The gradient of `x / norm(x)` along an axis, and 0 where the norm is 0.
pub(super) fn of_lp(cx: &mut GradCx<'_>) -> Result<()> {
    let (x, unit, upstream) = (cx.input(0)?, cx.output(0)?, cx.upstream()?);
    let axis = cx.ints(&[cx.attrs().int("axis")?])?;
    let (op, slope) = match cx.attrs().int("p")? {
        1 => ("ReduceL1", cx.emit("Sign", &[x], &[])?),
        // For p = 2 the norm's derivative is x over the norm, which is the output itself.
        _ => ("ReduceL2", unit),
    };
    let norm = cx.emit(op, &[x, axis], &[])?;
    let along = cx.emit("Mul", &[upstream, unit], &[])?;
    let along = cx.emit("ReduceSum", &[along, axis], &[])?;
    let along = cx.emit("Mul", &[along, slope], &[])?;
    let rest = cx.emit("Sub", &[upstream, along], &[])?;
    let gradient = cx.emit("Div", &[rest, norm], &[])?;
    let zero = cx.number(0.0, cx.dtype(x)?)?;
    // Replaces the quotient by 0 after the division, because NaN times 0 is NaN.
    let is_zero = cx.emit("Equal", &[norm, zero], &[])?;
    let gradient = cx.emit("Where", &[is_zero, zero, gradient], &[])?;
    cx.set(0, gradient);
    Ok(())
}

/// The gradient of `x s^-beta` with `s = bias + alpha / size * sum(neighbours^2)`.
///
/// An element scales itself by `s^-beta`, and enters `s` of every channel whose window covers it.
pub(super) fn of_local_response(cx: &mut GradCx<'_>) -> Result<()> {
    let (x, upstream) = (cx.input(0)?, cx.upstream()?);
    let (dtype, attrs) = (cx.dtype(x)?, cx.attrs());
    let (alpha, beta, bias) = (attrs.float("alpha")?, attrs.float("beta")?, attrs.float("bias")?);
    let size = attrs.int("size")?;
    // The standard's window of a channel c is c - floor((size - 1) / 2) to c + ceil((size - 1) /
    // 2).
    let (before, behind) = ((size - 1) / 2, size / 2);
    // Channels become the rows of a one-channel image, so that a pool sums over neighbours.
    // `count_include_pad` makes it divide by `size` everywhere, as the formula does.
    let rows = |cx: &mut GradCx<'_>, value: ValueId, pads: [i64; 2]| -> Result<ValueId> {
        let (batch, channels) = (cx.sizes(value, 0, 1)?, cx.sizes(value, 1, 2)?);
        let (one, rest) = (cx.ints(&[1])?, cx.ints(&[-1])?);
        let shape = cx.join(&[batch, one, channels, rest])?;
        let image = cx.reshape(value, shape)?;
        let attrs = [
            ("kernel_shape", Attribute::Ints(vec![size, 1])),
            ("pads", Attribute::Ints(vec![pads[0], 0, pads[1], 0])),
            ("count_include_pad", Attribute::Int(1)),
        ];
        let mean = cx.emit("AveragePool", &[image], &attrs)?;
        cx.reshape_like(mean, value)
    };
    let squares = cx.emit("Mul", &[x, x], &[])?;
    let mean = rows(cx, squares, [before, behind])?;
    let (alpha, bias) = (f64::from(alpha), cx.number(f64::from(bias), dtype)?);
    let weight = cx.number(alpha, dtype)?;
    // `alpha / size * sum` is `alpha * mean`.
    let sum = cx.emit("Mul", &[mean, weight], &[])?;
    let sum = cx.emit("Add", &[sum, bias], &[])?;
    let power = cx.number(-f64::from(beta), dtype)?;
    let scale = cx.emit("Pow", &[sum, power], &[])?;
    let own = cx.emit("Mul", &[upstream, scale], &[])?;
    let slope = cx.emit("Div", &[own, sum], &[])?;
    let slope = cx.emit("Mul", &[slope, x], &[])?;
    // Mirrored pads: the channels whose window covers this one, instead of those in its window.
    let around = rows(cx, slope, [behind, before])?;
    let factor = cx.number(-2.0 * alpha * f64::from(beta), dtype)?;
    let around = cx.emit("Mul", &[around, factor], &[])?;
    let around = cx.emit("Mul", &[around, x], &[])?;
    let gradient = cx.emit("Add", &[own, around], &[])?;
    cx.set(0, gradient);
    Ok(())
}
