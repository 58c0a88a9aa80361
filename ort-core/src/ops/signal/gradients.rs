//! Gradients of Fourier transforms.
//!
//! The adjoint of a transform is the inverse transform without its scale.

use crate::dtype::DType;
use crate::ir::{Attribute, ValueId};
use crate::spec::{GradCx, axis_of};
use crate::{Result, ensure, error};

/// Pads `value` with zeros at the end of an axis, or crops it, to the size in a one-element list.
fn sized(cx: &mut GradCx<'_>, value: ValueId, axis: usize, size: ValueId) -> Result<ValueId> {
    let there = cx.sizes(value, axis, axis + 1)?;
    let (zero, axes) = (cx.ints(&[0])?, cx.ints(&[axis as i64])?);
    let missing = cx.emit("Sub", &[size, there], &[])?;
    // A negative pad crops.
    let pads = cx.join(&[zero, missing])?;
    cx.emit_some("Pad", &[Some(value), Some(pads), None, Some(axes)], &[])
}

pub(super) fn of_dft(cx: &mut GradCx<'_>) -> Result<()> {
    let (input, upstream) = (cx.input(0)?, cx.upstream()?);
    let rank = cx.rank(input)?;
    let axis = match cx.find_input(2) {
        None => rank - 2,
        Some(axis) => {
            let known = cx.known_ints(axis).and_then(|axis| axis.first().copied());
            let unknown =
                || error!(NotImplemented, "the gradient of a DFT along an axis that only the run knows");
            axis_of(known.ok_or_else(unknown)?, rank)?
        }
    };
    let (inverse, onesided) = (cx.attrs().flag("inverse")?, cx.attrs().flag("onesided")?);
    ensure!(!(inverse && onesided), NotImplemented, "an inverse DFT of one side has no gradient");
    let length = match cx.find_input(1) {
        Some(length) => {
            let length = cx.cast(length, DType::I64)?;
            cx.reshape_to(length, &[1])?
        }
        None => cx.sizes(input, axis, axis + 1)?,
    };
    // The bins that a one-sided output omits have a gradient of zero.
    let whole = if onesided { sized(cx, upstream, axis, length)? } else { upstream };
    let at = cx.integer(axis as i64)?;
    let attrs = [("inverse", Attribute::Int(i64::from(!inverse)))];
    let back = cx.emit_some("DFT", &[Some(whole), None, Some(at)], &attrs)?;
    // Only the inverse DFT divides by the length: undo that, or divide if the node itself is
    // inverse.
    let scale = cx.cast(length, cx.dtype(upstream)?)?;
    let back = cx.emit(if inverse { "Div" } else { "Mul" }, &[back, scale], &[])?;
    let size = cx.sizes(input, axis, axis + 1)?;
    // `dft_length` cropped or padded the input: undo it.
    let mut gradient = sized(cx, back, axis, size)?;
    let last = rank - 1;
    // A real input drops the imaginary part of its gradient.
    if cx.size_at(input, last)?.as_constant() != Some(2) {
        let numbers = cx.sizes(input, last, rank)?;
        gradient = sized(cx, gradient, last, numbers)?;
    }
    cx.set(0, gradient);
    Ok(())
}

/// Decomposes `STFT` into frames of the signal, times the window, transformed by `DFT`.
pub(super) fn stft_parts(cx: &mut GradCx<'_>) -> Result<Vec<ValueId>> {
    let signal = cx.input(0)?;
    let list = |cx: &mut GradCx<'_>, value: ValueId| {
        let value = cx.cast(value, DType::I64)?;
        cx.reshape_to(value, &[1])
    };
    let step = list(cx, cx.input(1)?)?;
    let window = cx.find_input(2);
    let length = match (cx.find_input(3), window) {
        (Some(length), _) => list(cx, length)?,
        (None, Some(window)) => cx.sizes(window, 0, 1)?,
        (None, None) => cx.sizes(signal, 1, 2)?,
    };
    let (samples, one) = (cx.sizes(signal, 1, 2)?, cx.ints(&[1])?);
    // Only whole frames count: `(samples - length) / step + 1`.
    let last = cx.emit("Sub", &[samples, length], &[])?;
    let frames = cx.emit("Div", &[last, step], &[])?;
    let frames = cx.emit("Add", &[frames, one], &[])?;
    let (starts, offsets) = (cx.range(frames)?, cx.range(length)?);
    let starts = cx.emit("Mul", &[starts, step], &[])?;
    let starts = cx.reshape_to(starts, &[-1, 1])?;
    // [frames, length]: the positions of the samples of each frame.
    let places = cx.emit("Add", &[starts, offsets], &[])?;
    let axis = [("axis", Attribute::Int(1))];
    let mut cut = cx.emit("Gather", &[signal, places], &axis)?;
    // Real signals may omit the last dimension.
    if cx.rank(signal)? == 2 {
        let last = cx.ints(&[-1])?;
        cut = cx.emit("Unsqueeze", &[cut, last], &[])?;
    }
    if let Some(window) = window {
        let window = cx.reshape_to(window, &[-1, 1])?;
        cut = cx.emit("Mul", &[cut, window], &[])?;
    }
    let at = cx.integer(2)?;
    let onesided = [("onesided", Attribute::Int(cx.attrs().int("onesided")?))];
    Ok(vec![cx.emit_some("DFT", &[Some(cut), None, Some(at)], &onesided)?])
}
