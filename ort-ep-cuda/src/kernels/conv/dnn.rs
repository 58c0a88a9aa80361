//! Convolutions and their gradients by cuDNN, if it is found.

use std::sync::Arc;

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ops::fused::activation::Activation;
use ort_core::ops::nn::geometry::WindowAxis;
use ort_core::ops::nn::problem::{ImageShape, NO_AXIS, PixelLayout, WindowAxes};
use ort_gpu::strides;

use super::super::finish::{Addend, finish};
use super::shape::{Conv, FEW_FILTERS};
use crate::launch::{Launch, OpCx, Operand};
use crate::libraries::{Convolution, DnnElement, Form, Pass, allows_tf32};

/// Returns the launches with cuDNN, or `None` if our own kernels compute the convolution.
pub(super) fn launches(
    conv: &Conv,
    cx: &OpCx<'_>,
    bias: Option<&Operand>,
    addend: Option<&Operand>,
) -> Result<Option<Vec<Launch>>> {
    let (x, w, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    // A window that covers the whole image is a GEMM. With few filters per group, our kernels give
    // each result a thread.
    let on_all =
        conv.groups == 1 && conv.axes.iter().all(|axis| axis.kernel == axis.input && axis.pads == [0; 2]);
    let is_thin = conv.groups > 1 && conv.filters <= FEW_FILTERS;
    if !conv.transposed && (on_all || is_thin) {
        return Ok(None);
    }
    let (pass, image, result, given) = match conv.transposed {
        false => (Pass::Forward, x, y, [x, w]),
        // The data gradient of a convolution whose result is the input here.
        true => (Pass::Data, y, x, [w, x]),
    };
    let mut axes = conv.axes;
    if conv.transposed {
        axes.iter_mut().for_each(|axis| std::mem::swap(&mut axis.input, &mut axis.output));
    }
    let windows = Windows { axes: &axes, groups: conv.groups, layout: conv.layout };
    let Some(convolution) = windows.convolution(cx, pass, [image, w, result])? else { return Ok(None) };
    // What the library cannot fuse goes to an epilogue pass below.
    let activation = Activation::of_attributes(cx.attrs)?;
    let in_place = addend.is_some_and(|addend| addend.arg == y.arg);
    let is_relu = activation.as_ref().is_some_and(|activation| activation.name == "Relu");
    let form = match (in_place, bias) {
        // The addend is already in the result's memory, so the library accumulates onto it.
        (true, _) => Form::Onto,
        (false, Some(_)) if is_relu && pass == Pass::Forward => Form::Relu,
        (false, _) => Form::Plain,
    };
    let fused = if form == Form::Relu { [bias, addend] } else { [None; 2] };
    let Some(launch) = call(cx, &convolution, form, (given, fused, y))? else { return Ok(None) };
    let mut launches = vec![launch];
    if form == Form::Relu {
        return Ok(Some(launches));
    }
    let ImageShape { batch, channels, places } = ImageShape::new(&y.shape, conv.layout)?;
    let positions = places.iter().product();
    let (sizes, of_bias) = match conv.layout {
        PixelLayout::ChannelsFirst => ([batch, channels, positions], vec![0, 1, 0]),
        PixelLayout::ChannelsLast => ([batch, positions, channels], vec![0, 0, 1]),
    };
    let mut rest = Vec::new();
    rest.extend(bias.map(|tensor| Addend { tensor, steps: of_bias, factor: 1.0 }));
    let steps = || strides(&sizes).into_iter().map(|step| step as i64).collect();
    let whole = addend.filter(|_| !in_place);
    rest.extend(whole.map(|tensor| Addend { tensor, steps: steps(), factor: 1.0 }));
    if !rest.is_empty() || activation.is_some() {
        launches.extend(finish(y, &sizes, &rest, activation.as_ref())?);
    }
    Ok(Some(launches))
}

/// Returns the launch of a convolution gradient, or `None` if our own kernels compute it.
pub(in crate::kernels) fn gradient(
    cx: &OpCx<'_>,
    pass: Pass,
    windows: &Windows<'_>,
    tensors: [&Operand; 3],
) -> Result<Option<Launch>> {
    let Some(convolution) = windows.convolution(cx, pass, tensors)? else { return Ok(None) };
    let given = [cx.input(usize::from(pass == Pass::Data))?, cx.input(usize::from(pass == Pass::Filter))?];
    call(cx, &convolution, Form::Plain, (given, [None; 2], cx.output(0)?))
}

/// Creates the library call with inputs, bias, addend and result.
fn call(
    cx: &OpCx<'_>,
    convolution: &Convolution,
    form: Form,
    ([first, second], [bias, addend], result): ([&Operand; 2], [Option<&Operand>; 2], &Operand),
) -> Result<Option<Launch>> {
    let Some(dnn) = cx.limits.libraries.and_then(|libraries| libraries.dnn.as_ref()) else { return Ok(None) };
    let Some((routine, workspace)) = dnn.convolution(convolution, form, cx.limits.room, cx.limits.turn)?
    else {
        return Ok(None);
    };
    let launch = Launch::library(Arc::new(routine)).tensor(first).tensor(second);
    let launch = launch.find_tensor(bias).find_tensor(addend).tensor(result);
    Ok(Some(launch.workspace(workspace)))
}

/// Windows on an image, with filters per group.
pub(in crate::kernels) struct Windows<'a> {
    pub(in crate::kernels) axes: &'a WindowAxes,
    pub(in crate::kernels) groups: usize,
    pub(in crate::kernels) layout: PixelLayout,
}

impl Windows<'_> {
    /// Describes the convolution to the library, or returns `None` if the library cannot compute
    /// it.
    fn convolution(
        &self,
        cx: &OpCx<'_>,
        pass: Pass,
        [x, w, y]: [&Operand; 3],
    ) -> Result<Option<Convolution>> {
        let Some(dnn) = cx.limits.libraries.and_then(|libraries| libraries.dnn.as_ref()) else {
            return Ok(None);
        };
        if [x, w, y].iter().any(|tensor| tensor.count() == 0) {
            return Ok(None);
        }
        let element = match y.dtype {
            dtype if x.dtype != dtype || w.dtype != dtype => return Ok(None),
            DType::F32 => DnnElement::F32,
            DType::F16 => DnnElement::F16,
            DType::BF16 => DnnElement::Bf16,
            _ => return Ok(None),
        };
        // cuDNN takes two or three spatial axes, so a 1-D convolution gets an axis of size 1.
        let given = x.rank().saturating_sub(2);
        let mut axes: Vec<WindowAxis> = self.axes.iter().skip(3 - given.min(3)).copied().collect();
        if given == 1 {
            let place = if dnn.options.pads_to_nc1d { 0 } else { 1 };
            axes.insert(place, NO_AXIS);
        }
        if !axes.iter().all(is_symmetric) {
            return Ok(None);
        }
        let shape = |tensor: &Operand, of: fn(&WindowAxis) -> usize| -> Result<Vec<usize>> {
            let ImageShape { batch, channels, .. } = ImageShape::new(&tensor.shape, self.layout)?;
            Ok([batch, channels].into_iter().chain(axes.iter().map(of)).collect())
        };
        let all = |of: fn(&WindowAxis) -> usize| axes.iter().map(of).collect::<Vec<usize>>();
        Ok(Some(Convolution {
            pass,
            element,
            tf32: element == DnnElement::F32 && allows_tf32(&cx.limits),
            channels_last: self.layout == PixelLayout::ChannelsLast,
            groups: self.groups,
            x: shape(x, |axis| axis.input)?,
            w: shape(w, |axis| axis.kernel)?,
            y: shape(y, |axis| axis.output)?,
            pads: all(|axis| axis.pads[0]),
            strides: all(|axis| axis.stride),
            dilations: all(|axis| axis.dilation),
        }))
    }
}

/// Whether the leading padding, applied on both sides, yields the axis's output size: cuDNN has one
/// padding per axis.
fn is_symmetric(axis: &WindowAxis) -> bool {
    let extent = (axis.kernel.saturating_sub(1)) * axis.dilation + 1;
    let room = (axis.input + 2 * axis.pads[0]).checked_sub(extent);
    room.is_some_and(|room| room / axis.stride.max(1) + 1 == axis.output)
}
