//! Fourier transforms: `DFT` of whole signals and `STFT` of frames.

use super::gradients;
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::Attribute;
use crate::ops;
use crate::ops::axes;
use crate::spec::{Cost, Draft, Grad, InferCx, OP, OpSpec, Upgrade, attr, one, opt, var};
use crate::{Result, ensure, error};

const LENGTHS: TypeSet = TypeSet::of(&[DType::I32, DType::I64]);

static DFT: OpSpec = OpSpec {
    name: "DFT",
    grad: Grad::Rule(gradients::of_dft),
    since: 20,
    first: 17,
    inputs: &[one("input", "T1"), opt("dft_length", "T2").host(), opt("axis", "tensor(int64)").host()],
    outputs: &[one("output", "T1")],
    types: &[var("T1", TypeSet::FLOATS), var("T2", LENGTHS)],
    attrs: &[attr::int("inverse", 0), attr::int("onesided", 0)],
    cost: Cost::Compute,
    infer: infer_dft,
    upgrades: &[Upgrade { before: 20, apply: axis_to_input }],
    ..OP
};

static STFT: OpSpec = OpSpec {
    name: "STFT",
    grad: Grad::Parts(gradients::stft_parts),
    since: 17,
    first: 17,
    inputs: &[
        one("signal", "T1"),
        one("frame_step", "T2").host(),
        opt("window", "T1"),
        opt("frame_length", "T2").host(),
    ],
    outputs: &[one("output", "T1")],
    types: &[var("T1", TypeSet::FLOATS), var("T2", LENGTHS)],
    attrs: &[attr::int("onesided", 1)],
    cost: Cost::Compute,
    infer: infer_stft,
    ..OP
};

ops![DFT, STFT];

/// Version 17 had the axis as an attribute, 1 by default.
fn axis_to_input(draft: &mut Draft<'_>) -> Result<()> {
    if draft.attr("axis").is_none() {
        draft.set_attr("axis", Attribute::Int(1));
    }
    draft.attr_to_input("axis", 2)
}

/// The number that an optional input holds, or a fresh symbolic dimension if it is not constant.
fn number(cx: &InferCx<'_>, index: usize) -> Result<Option<Dim>> {
    if !cx.has_input(index) {
        return Ok(None);
    }
    match cx.dims(index).as_deref() {
        Some([number]) => Ok(Some(number.clone())),
        Some(_) => Err(error!(InvalidGraph, "input {index} must hold one number")),
        None => Ok(Some(cx.fresh())),
    }
}

fn infer_dft(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    ensure!(shape.len() >= 2, InvalidGraph, "a signal of rank {} has no axis to transform", shape.len());
    let (onesided, inverse) = (cx.attrs.flag("onesided")?, cx.attrs.flag("inverse")?);
    let last = shape.len() - 1;
    // The last axis holds real and imaginary parts. Only the inverse of a one-sided spectrum is
    // real.
    let mut output = axes::with_size(shape, last, if onesided && inverse { 1.into() } else { 2.into() });
    let axis = match number(cx, 2)? {
        // The default axis of version 20 is -2: the last one that is no pair of parts.
        None => Some(last - 1),
        Some(axis) => axis.as_constant().map(|axis| axes::normalize(axis, shape.len())).transpose()?,
    };
    // The unknown axis may be any but the last.
    let Some(axis) = axis else {
        output.iter_mut().take(last).for_each(|size| *size = cx.fresh());
        return cx.set_shape(0, output);
    };
    ensure!(axis != last, InvalidGraph, "the last axis holds real and imaginary parts");
    let length = match number(cx, 1)? {
        Some(length) => length,
        // The one-sided spectrum of an even length n has n / 2 + 1 bins.
        None if onesided && inverse => (axes::size(shape, axis)? - 1) * 2,
        None => axes::size(shape, axis)?.clone(),
    };
    let negative = length.as_constant().is_some_and(|length| length < 0);
    ensure!(!negative, InvalidGraph, "the length of the transform is {length}, expected 1 or more");
    // The other half of a real signal's spectrum is its complex conjugate, so one side omits it.
    let bins = if onesided && !inverse { length.floor_div(&Dim::constant(2)) + 1 } else { length };
    cx.set_shape(0, axes::with_size(&output, axis, bins))
}

fn infer_stft(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    let (batch, samples) = match shape {
        [batch, samples] | [batch, samples, _] => (batch, samples),
        _ => return Err(error!(InvalidGraph, "the signal has rank {}, expected 3", shape.len())),
    };
    let step = number(cx, 1)?.unwrap_or_else(|| cx.fresh());
    ensure!(
        step.as_constant().is_none_or(|step| step > 0),
        InvalidGraph,
        "frame_step is {step}, expected 1 or more"
    );
    // `frame_length` wins over the size of the window, and that over the whole signal.
    let window = cx.shape(2).and_then(|shape| shape.first()).cloned();
    let length = match (number(cx, 3)?, window) {
        (Some(length), _) => length,
        (None, Some(window)) => window,
        (None, None) if cx.has_input(2) => cx.fresh(),
        (None, None) => samples.clone(),
    };
    if let (Some(samples), Some(length)) = (samples.as_constant(), length.as_constant()) {
        let fits = (1..=samples).contains(&length);
        ensure!(fits, InvalidGraph, "the frame length is {length}, but the signal has {samples} samples");
    }
    // Only whole frames count; samples behind the last one are dropped.
    let frames = (samples - &length).floor_div(&step) + 1;
    let bins = if cx.attrs.flag("onesided")? { length.floor_div(&Dim::constant(2)) + 1 } else { length };
    cx.set_shape(0, vec![batch.clone(), frames, bins, 2.into()])
}
