//! Gradients of reductions: how an element's change moves the value that it went into.

use crate::Result;
use crate::ir::{Attribute, ValueId};
use crate::spec::GradCx;

/// Broadcasts a value of the reduced shape along the reduced dimensions.
fn repeated(cx: &mut GradCx<'_>, mut value: ValueId) -> Result<ValueId> {
    let input = cx.input(0)?;
    if !cx.attrs().flag("keepdims")?
        && let Some(axes) = cx.find_input(1)
    {
        // Without axes all dimensions are reduced, and a scalar broadcasts as it is.
        value = cx.emit("Unsqueeze", &[value, axes], &[])?;
    }
    let shape = cx.shape_of(input)?;
    cx.emit("Expand", &[value, shape], &[])
}

/// Returns the input, and the output and upstream gradient broadcast to its shape.
fn parts(cx: &mut GradCx<'_>) -> Result<[ValueId; 3]> {
    let (input, output, upstream) = (cx.input(0)?, cx.output(0)?, cx.upstream()?);
    Ok([input, repeated(cx, output)?, repeated(cx, upstream)?])
}

pub(super) fn of_sum(cx: &mut GradCx<'_>) -> Result<()> {
    let upstream = cx.upstream()?;
    let gradient = repeated(cx, upstream)?;
    cx.set(0, gradient);
    Ok(())
}

pub(super) fn of_mean(cx: &mut GradCx<'_>) -> Result<()> {
    let (input, output, upstream) = (cx.input(0)?, cx.output(0)?, cx.upstream()?);
    let gradient = repeated(cx, upstream)?;
    let all = cx.emit("Size", &[input], &[])?;
    let kept = cx.emit("Size", &[output], &[])?;
    // An output without elements would divide by zero.
    let one = cx.ints(&[1])?;
    let kept = cx.emit("Max", &[kept, one], &[])?;
    let count = cx.emit("Div", &[all, kept], &[])?;
    let count = cx.cast(count, cx.dtype(input)?)?;
    let gradient = cx.emit("Div", &[gradient, count], &[])?;
    cx.set_broadcast(0, gradient)
}

/// Splits the gradient evenly between tied extremes.
pub(super) fn of_extreme(cx: &mut GradCx<'_>) -> Result<()> {
    let (input, upstream) = (cx.input(0)?, cx.upstream()?);
    let output = cx.output(0)?;
    let extreme = repeated(cx, output)?;
    let hit = cx.emit("Equal", &[input, extreme], &[])?;
    let hit = cx.cast(hit, cx.dtype(input)?)?;
    // The number of ties of each output, by the node's own axes and `keepdims`.
    let inputs = [Some(hit), cx.find_input(1)];
    let count = cx.emit_some("ReduceSum", &inputs, &cx.attr_list())?;
    let share = cx.emit("Div", &[upstream, count], &[])?;
    let share = repeated(cx, share)?;
    let gradient = cx.emit("Mul", &[share, hit], &[])?;
    cx.set(0, gradient);
    Ok(())
}

/// The product of the other elements: the whole product over the element.
///
/// If the element is the only zero, it is the product without it; with more zeros it is 0 for all
/// of them.
pub(super) fn of_product(cx: &mut GradCx<'_>) -> Result<()> {
    let [input, product, upstream] = parts(cx)?;
    let dtype = cx.dtype(input)?;
    let (zero, one) = (cx.number(0.0, dtype)?, cx.number(1.0, dtype)?);
    let is_zero = cx.emit("Equal", &[input, zero], &[])?;
    // Zeros count as 1, so that the quotients are defined.
    let safe = cx.emit("Where", &[is_zero, one, input], &[])?;
    let others = cx.emit("Div", &[product, safe], &[])?;
    let reduce = |cx: &mut GradCx<'_>, op: &str, value: ValueId| -> Result<ValueId> {
        let inputs = [Some(value), cx.find_input(1)];
        let reduced = cx.emit_some(op, &inputs, &cx.attr_list())?;
        repeated(cx, reduced)
    };
    let without = reduce(cx, "ReduceProd", safe)?;
    let zeros = cx.cast(is_zero, dtype)?;
    let zeros = reduce(cx, "ReduceSum", zeros)?;
    let only_zero = cx.emit("Equal", &[zeros, one], &[])?;
    let at_zero = cx.emit("Where", &[only_zero, without, zero], &[])?;
    let factor = cx.emit("Where", &[is_zero, at_zero, others], &[])?;
    let gradient = cx.emit("Mul", &[upstream, factor], &[])?;
    cx.set(0, gradient);
    Ok(())
}

pub(super) fn of_l1(cx: &mut GradCx<'_>) -> Result<()> {
    let (input, upstream) = (cx.input(0)?, cx.upstream()?);
    // The subgradient at 0 is 0.
    let sign = cx.emit("Sign", &[input], &[])?;
    let upstream = repeated(cx, upstream)?;
    let gradient = cx.emit("Mul", &[upstream, sign], &[])?;
    cx.set(0, gradient);
    Ok(())
}

/// `dx = x / |x| dy`, and 0 if all elements are 0.
pub(super) fn of_l2(cx: &mut GradCx<'_>) -> Result<()> {
    let (input, output, upstream) = (cx.input(0)?, cx.output(0)?, cx.upstream()?);
    let zero = cx.number(0.0, cx.dtype(input)?)?;
    let factor = cx.emit("Div", &[upstream, output], &[])?;
    let is_zero = cx.emit("Equal", &[output, zero], &[])?;
    let factor = cx.emit("Where", &[is_zero, zero, factor], &[])?;
    let factor = repeated(cx, factor)?;
    let gradient = cx.emit("Mul", &[factor, input], &[])?;
    cx.set(0, gradient);
    Ok(())
}

/// `dx = dy / sum`; the sum is the exponential of the output.
pub(super) fn of_log_sum(cx: &mut GradCx<'_>) -> Result<()> {
    let (output, upstream) = (cx.output(0)?, cx.upstream()?);
    let sum = cx.emit("Exp", &[output], &[])?;
    let gradient = cx.emit("Div", &[upstream, sum], &[])?;
    let gradient = repeated(cx, gradient)?;
    cx.set(0, gradient);
    Ok(())
}

/// `dx = exp(x - y) dy`: the element's share of the sum of exponentials.
pub(super) fn of_log_sum_exp(cx: &mut GradCx<'_>) -> Result<()> {
    let [input, output, upstream] = parts(cx)?;
    let part = cx.emit("Sub", &[input, output], &[])?;
    let part = cx.emit("Exp", &[part], &[])?;
    let gradient = cx.emit("Mul", &[upstream, part], &[])?;
    cx.set(0, gradient);
    Ok(())
}

pub(super) fn of_sum_square(cx: &mut GradCx<'_>) -> Result<()> {
    let (input, upstream) = (cx.input(0)?, cx.upstream()?);
    let twice = cx.emit("Add", &[upstream, upstream], &[])?;
    let twice = repeated(cx, twice)?;
    let gradient = cx.emit("Mul", &[twice, input], &[])?;
    cx.set(0, gradient);
    Ok(())
}

/// The gradient of a prefix sum is the prefix sum of the gradient from the other end.
///
/// An element enters every sum from its position on.
pub(super) fn of_running_sum(cx: &mut GradCx<'_>) -> Result<()> {
    let (axis, upstream) = (cx.input(1)?, cx.upstream()?);
    let attrs = [
        ("exclusive", Attribute::Int(cx.attrs().int("exclusive")?)),
        ("reverse", Attribute::Int(i64::from(!cx.attrs().flag("reverse")?))),
    ];
    let gradient = cx.emit("CumSum", &[upstream, axis], &attrs)?;
    cx.set(0, gradient);
    Ok(())
}

/// Scatters the gradients of the values back to their indices.
pub(super) fn of_top_k(cx: &mut GradCx<'_>) -> Result<()> {
    let (input, upstream) = (cx.input(0)?, cx.first_upstream()?);
    let axis = cx.attrs().int("axis")?;
    let attrs = [("axis", Attribute::Int(axis))];
    let indices = cx.demand_output(1)?;
    let zeros = cx.filled(0.0, input)?;
    // The indices of a row are distinct, so the scatter needs no reduction.
    let gradient = cx.emit("ScatterElements", &[zeros, indices, upstream], &attrs)?;
    cx.set(0, gradient);
    Ok(())
}
