//! NHWC `QLinearConv` of ONNX Runtime: quantized convolution with constant filters.
//!
//! Filters have no zero point. The convolution has one group or is depthwise.

use ort_core::dim::Dim;
use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, NodeView, RunCx};
use ort_core::ir::Attributes;
use ort_core::ops::nn::geometry::Windows;
use ort_core::spec::MICROSOFT;
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error};

use super::conv_integer::ConvScales;
use super::window_of;
use ort_cpu_conv::nhwc::{FilterShape, NhwcConv, Requantize, nhwc_conv_workspace_len, unsigned_zero};
use ort_cpu_gemm::{Cpu, Window};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::packed::Packed;
use ort_cpu_kernel::quantized_convert::read_floats;
use ort_cpu_kernel::workspace::take;
use ort_cpu_matmul::refused;

cpu_kernels![KernelDef {
    domain: MICROSOFT,
    op: "QLinearConv",
    // Packing reads the filters at any alignment.
    unaligned: &[3],
    when: is_here,
    make,
    ..KernelDef::BASE
}];

// Input indices of `QLinearConv`.
const X_SCALE: usize = 1;
const X_ZERO: usize = 2;
const FILTERS: usize = 3;
const W_SCALE: usize = 4;
const ZEROS: usize = 5;
const Y_SCALE: usize = 6;
const Y_ZERO: usize = 7;
const BIAS: usize = 8;

fn is_here(node: &NodeView<'_>) -> bool {
    let (Some(weight), Some(zeros)) = (node.constant(FILTERS), node.constant(ZEROS)) else { return false };
    // Packing makes unsigned filters signed by subtracting 128, so a zero point of 128 vanishes.
    let shift = if weight.dtype() == DType::U8 { 128 } else { 0 };
    let no_zeros = zeros.view().to_ints().is_ok_and(|zeros| zeros.iter().all(|zero| *zero == shift));
    let last = node.attrs().flag("channels_last").unwrap_or(false);
    let group = node.attrs().int("group").ok().and_then(|group| usize::try_from(group).ok());
    let shape = group.and_then(|group| filter_shape(weight.shape(), group).ok());
    last && no_zeros && node.rank(0) == Some(4) && shape.is_some_and(|shape| shape.fits())
}

fn filter_shape(weight: &[usize], groups: usize) -> Result<FilterShape> {
    match weight {
        [filters, channels, height, width] => {
            let kernel = [1, *height, *width];
            Ok(FilterShape { filters: *filters, channels: *channels, groups, kernel })
        }
        _ => Err(error!(InvalidArgument, "a weight of shape {weight:?}")),
    }
}

struct NhwcKernel {
    attrs: Attributes,
    shape: FilterShape,
    /// The packed filters, followed by the requantization terms if scales and bias are constant.
    /// Otherwise each run computes the terms.
    packed: Packed<u8>,
    is_requantized: bool,
    /// Whether the image's quantized values are signed.
    signed: bool,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let group = cx.attrs().int("group")?;
    let groups = usize::try_from(group).map_err(|_| error!(InvalidGraph, "{group} groups of channels"))?;
    let weight = cx.constant(FILTERS).ok_or_else(|| error!(Fail, "the filters are not constant"))?;
    let (shape, unsigned) = (filter_shape(weight.shape(), groups)?, weight.dtype() == DType::U8);
    let (cpu, node) = (Cpu::with_threads(cx.threads), cx.node);
    let has_bias = node.node.inputs.get(BIAS).is_some_and(Option::is_some);
    let read = [X_SCALE, X_ZERO, W_SCALE, Y_SCALE].into_iter().chain(has_bias.then_some(BIAS));
    let is_requantized = read.clone().all(|input| node.constant(input).is_some());
    let signed = node.dtype(0) == Some(DType::I8);
    // One allocation holds both, because the terms are made from the packed filters.
    let filters_len = shape.packed_len(cpu);
    let terms_len = if is_requantized { shape.requantization_len(cpu) } else { 0 };
    let packed = Packed::new(cx, filters_len.saturating_add(terms_len), |packed| {
        let (filters, terms) = packed.split_at_mut(filters_len);
        shape.pack(cpu, (weight.bytes()?, unsigned), filters).map_err(refused)?;
        match is_requantized {
            true => {
                requantize(cpu, (shape, signed), filters, |input| Some(node.constant(input)?.view()), terms)
            }
            false => Ok(()),
        }
    })?;
    cx.consume(FILTERS);
    if is_requantized {
        // Each run still reads the image's zero point, because padding is filled with it.
        read.filter(|input| *input != X_ZERO).for_each(|input| cx.consume(input));
    }
    Ok(Box::new(NhwcKernel { attrs: cx.attrs().clone(), shape, packed, is_requantized, signed }))
}

/// Writes the requantization terms of packed filters.
fn requantize<'a>(
    cpu: Cpu,
    (shape, signed): (FilterShape, bool),
    filters: &[u8],
    input: impl Fn(usize) -> Option<TensorView<'a>>,
    to: &mut [u8],
) -> Result<()> {
    let required = |index| input(index).ok_or_else(|| error!(Fail, "input {index} is missing"));
    let bias = input(BIAS).map(|bias| bias.to_cow::<i32>()).transpose()?.unwrap_or_default();
    let [x, w, y] = [required(X_SCALE)?, required(W_SCALE)?, required(Y_SCALE)?];
    let scales = ConvScales::new([x, w, y], shape.filters)?;
    let by = Requantize {
        image_zero: unsigned_zero(zero_of(required(X_ZERO)?)?, signed),
        bias: &bias,
        factor: &|filter| scales.factor(filter),
    };
    shape.requantize(cpu, filters, &by, to).map_err(refused)
}

/// Reads a zero point.
fn zero_of(view: TensorView<'_>) -> Result<i32> {
    Ok(read_floats(view)?.first().copied().unwrap_or(0.0) as i32)
}

impl NhwcKernel {
    /// Returns the number of images, and the windows on each.
    fn windows(&self, image: &[usize]) -> Result<(usize, Window)> {
        let [batch, height, width, channels] = *image else {
            return Err(error!(InvalidArgument, "an image of shape {image:?}"));
        };
        let FilterShape { channels: of_filter, groups, kernel, .. } = self.shape;
        ensure!(
            of_filter.checked_mul(groups) == Some(channels),
            InvalidArgument,
            "{channels} channels do not match {groups} groups of {of_filter}"
        );
        // The first axis is the depth, which is 1 in `filter_shape`.
        let kernel = [kernel[1], kernel[2]].map(|size| Dim::constant(size as i64));
        Ok((batch, window_of(&Windows::new(&self.attrs, &kernel)?.on(&[height, width])?)?))
    }
}

impl Executable for NhwcKernel {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let (_, window) = self.windows(shapes.input(0))?;
        let cpu = Cpu::with_threads(shapes.threads);
        let copy = nhwc_conv_workspace_len(cpu, window, self.shape, self.signed).map_err(refused)?;
        let terms = if self.is_requantized { 0 } else { self.shape.requantization_len(cpu) };
        Ok(terms.saturating_add(copy))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (mut workspace, output, image) = (cx.workspace()?, cx.output(0)?, cx.input(0)?);
        let (batch, window) = self.windows(image.shape())?;
        let cpu = Cpu::with_threads(cx.threads());
        // Without constant terms, `terms` is empty.
        let (filters, terms) = self.packed.values().split_at(self.shape.packed_len(cpu));
        let requantization = match self.is_requantized {
            true => terms,
            false => {
                let terms = take(&mut workspace, self.shape.requantization_len(cpu))?;
                requantize(cpu, (self.shape, self.signed), filters, |input| cx.find_input(input), terms)?;
                terms
            }
        };
        let conv = NhwcConv {
            image: (image.bytes()?, self.signed),
            image_zero: zero_of(cx.input(X_ZERO)?)?,
            batch,
            window,
            shape: self.shape,
            filters,
            requantization,
            zero: zero_of(cx.input(Y_ZERO)?)?,
            signed: output.dtype().is_signed(),
        };
        conv.run(cpu, output.bytes_mut()?, workspace).map_err(refused)
    }
}
