//! Convolutions by cuDNN, where it is found.

use std::sync::Arc;

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::operand::strides;
use ort_core::ops::fused::activation::Activation;
use ort_core::ops::nn::geometry::WindowAxis;

use super::super::finish::{Addend, finish};
use super::{Conv, FEW_FILTERS};
use crate::launch::{Launch, OpCx, Operand};
use crate::libraries::{Convolution, DnnElement, Form, allows_tf32};

/// The launches of a convolution by the library; none where our own kernels compute it.
pub(super) fn launches(
    conv: &Conv,
    cx: &OpCx<'_>,
    bias: Option<&Operand>,
    addend: Option<&Operand>,
) -> Result<Option<Vec<Launch>>> {
    let Some(dnn) = cx.limits.libraries.and_then(|libraries| libraries.dnn.as_ref()) else { return Ok(None) };
    let Some(convolution) = convolution(conv, cx, dnn.options.pads_to_nc1d)? else { return Ok(None) };
    let (x, w, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    let activation = Activation::of_attributes(cx.attrs)?;
    let in_place = addend.is_some_and(|addend| addend.arg == y.arg);
    let is_relu = activation.as_ref().is_some_and(|activation| activation.name == "Relu");
    let form = match (in_place, bias) {
        (true, _) => Form::Onto,
        (false, Some(_)) if is_relu => Form::Relu,
        (false, _) => Form::Plain,
    };
    let Some((routine, workspace)) = dnn.convolution(&convolution, form, cx.limits.room)? else {
        return Ok(None);
    };
    let is_fused = form == Form::Relu;
    let launch = Launch::library(Arc::new(routine))
        .tensor(x)
        .tensor(w)
        .find_tensor(bias.filter(|_| is_fused))
        .find_tensor(addend.filter(|_| is_fused))
        .tensor(y)
        .workspace(workspace);
    let mut launches = vec![launch];
    if is_fused {
        return Ok(Some(launches));
    }
    let [batch, filters, positions @ ..] = &*y.shape else { return Ok(None) };
    let sizes = [*batch, *filters, positions.iter().product()];
    let mut rest = Vec::new();
    rest.extend(bias.map(|tensor| Addend { tensor, steps: vec![0, 1, 0], factor: 1.0 }));
    let steps = || strides(&sizes).into_iter().map(|step| step as i64).collect();
    let whole = addend.filter(|_| !in_place);
    rest.extend(whole.map(|tensor| Addend { tensor, steps: steps(), factor: 1.0 }));
    if !rest.is_empty() || activation.is_some() {
        launches.extend(finish(y, &sizes, &rest, activation.as_ref())?);
    }
    Ok(Some(launches))
}

/// What the library is to compute; none where it cannot, or should not.
fn convolution(conv: &Conv, cx: &OpCx<'_>, pads_to_nc1d: bool) -> Result<Option<Convolution>> {
    let (x, w, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    // Windows that are the whole image are products of matrices; of few filters each result has a thread of ours.
    let on_all =
        conv.groups == 1 && conv.axes.iter().all(|axis| axis.kernel == axis.input && axis.pads == [0; 2]);
    let is_thin = conv.groups > 1 && conv.filters <= FEW_FILTERS;
    if conv.transposed || on_all || is_thin || x.count() == 0 || w.count() == 0 {
        return Ok(None);
    }
    let element = match y.dtype {
        dtype if x.dtype != dtype || w.dtype != dtype => return Ok(None),
        DType::F32 => DnnElement::F32,
        DType::F16 => DnnElement::F16,
        DType::BF16 => DnnElement::Bf16,
        _ => return Ok(None),
    };
    // The library takes images of two axes and of three.
    let given = x.rank().saturating_sub(2);
    let mut axes: Vec<WindowAxis> = conv.axes.iter().skip(3 - given.min(3)).copied().collect();
    if given == 1 {
        let place = if pads_to_nc1d { 0 } else { 1 };
        axes.insert(place, super::NO_AXIS);
    }
    if !axes.iter().all(is_symmetric) {
        return Ok(None);
    }
    let shape = |first: usize, second: usize, of: fn(&WindowAxis) -> usize| {
        [first, second].into_iter().chain(axes.iter().map(of)).collect::<Vec<usize>>()
    };
    let all = |of: fn(&WindowAxis) -> usize| axes.iter().map(of).collect::<Vec<usize>>();
    let (channels, filters) = (conv.channels * conv.groups, conv.filters * conv.groups);
    Ok(Some(Convolution {
        element,
        tf32: element == DnnElement::F32 && allows_tf32(&cx.limits),
        groups: conv.groups,
        x: shape(conv.batch, channels, |axis| axis.input),
        w: shape(filters, conv.channels, |axis| axis.kernel),
        y: shape(conv.batch, filters, |axis| axis.output),
        pads: all(|axis| axis.pads[0]),
        strides: all(|axis| axis.stride),
        dilations: all(|axis| axis.dilation),
    }))
}

/// Whether an axis has as many results with the padding before it on both sides, of which there is one for each stride.
fn is_symmetric(axis: &WindowAxis) -> bool {
    let extent = (axis.kernel.saturating_sub(1)) * axis.dilation + 1;
    let room = (axis.input + 2 * axis.pads[0]).checked_sub(extent);
    room.is_some_and(|room| room / axis.stride.max(1) + 1 == axis.output)
}
