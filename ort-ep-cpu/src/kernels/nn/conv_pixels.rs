//! `QLinearConv` of ONNX Runtime with the channels last: convolutions of codes whose filters are constant and have no zero
//! point, in one group or with one filter for each channel.

use ort_core::dim::Dim;
use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, NodeView, RunCx};
use ort_core::ir::Attributes;
use ort_core::ops::nn::geometry::Windows;
use ort_core::spec::MICROSOFT;
use ort_core::{Result, ensure, error};

use super::conv_integer::Scales;
use super::window_of;
use crate::conv::pixels::{FilterShape, PixelConv, pixel_conv_workspace_len};
use crate::cpu_kernels;
use crate::gemm::{Cpu, Window};
use crate::kernels::linalg::{Packed, refused};
use crate::kernels::quant::codes::read_floats;

cpu_kernels![KernelDef {
    domain: MICROSOFT,
    op: "QLinearConv",
    unaligned: &[3],
    when: is_here,
    make,
    ..KernelDef::BASE
}];

/// Which input the filters are, and which their zero points.
const FILTERS: usize = 3;
const ZEROS: usize = 5;

fn is_here(node: &NodeView<'_>) -> bool {
    let (Some(weight), Some(zeros)) = (node.constant(FILTERS), node.constant(ZEROS)) else { return false };
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

struct Pixels {
    attrs: Attributes,
    shape: FilterShape,
    packed: Packed<u8>,
    unsigned: bool,
    /// Whether the image's codes have a sign.
    signed: bool,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let group = cx.attrs().int("group")?;
    let groups = usize::try_from(group).map_err(|_| error!(InvalidGraph, "{group} groups of channels"))?;
    let weight = cx.constant(FILTERS).ok_or_else(|| error!(Fail, "the filters are not constant"))?;
    let (shape, unsigned) = (filter_shape(weight.shape(), groups)?, weight.dtype() == DType::U8);
    let cpu = Cpu::with_threads(cx.threads);
    let packed = Packed::new(cx, shape.packed_len(cpu), |packed| {
        shape.pack(cpu, (weight.bytes()?, unsigned), packed).map_err(refused)
    })?;
    cx.consume(FILTERS);
    let signed = cx.node.dtype(0) == Some(DType::I8);
    Ok(Box::new(Pixels { attrs: cx.attrs().clone(), shape, packed, unsigned, signed }))
}

impl Pixels {
    /// Images, and the windows on each.
    fn windows(&self, image: &[usize]) -> Result<(usize, Window)> {
        let [batch, height, width, channels] = *image else {
            return Err(error!(InvalidArgument, "an image of shape {image:?}"));
        };
        let FilterShape { channels: of_filter, groups, kernel, .. } = self.shape;
        ensure!(
            of_filter.checked_mul(groups) == Some(channels),
            InvalidArgument,
            "{channels} channels do not fit {groups} groups of {of_filter}"
        );
        let kernel = [kernel[1], kernel[2]].map(|size| Dim::constant(size as i64));
        Ok((batch, window_of(&Windows::new(&self.attrs, &kernel)?.on(&[height, width])?)?))
    }
}

impl Executable for Pixels {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let (_, window) = self.windows(shapes.input(0))?;
        let cpu = Cpu::with_threads(shapes.threads);
        pixel_conv_workspace_len(cpu, window, self.shape, self.signed).map_err(refused)
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (workspace, output, image) = (cx.workspace()?, cx.output(0)?, cx.input(0)?);
        let (batch, window) = self.windows(image.shape())?;
        let zero_of = |index: usize| -> Result<i32> {
            Ok(read_floats(cx.input(index)?)?.first().copied().unwrap_or(0.0) as i32)
        };
        let bias = cx.find_input(8).map(|bias| bias.to_cow::<i32>()).transpose()?.unwrap_or_default();
        let scales = Scales::new(cx, self.shape.filters)?;
        let conv = PixelConv {
            image: (image.bytes()?, self.signed),
            image_zero: zero_of(2)?,
            batch,
            window,
            shape: self.shape,
            filters: (self.packed.values(), self.unsigned),
            bias: &bias,
            zero: zero_of(7)?,
            signed: output.dtype().is_signed(),
        };
        let cpu = Cpu::with_threads(cx.threads());
        conv.run(cpu, |filter| scales.factor(filter), output.bytes_mut()?, workspace).map_err(refused)
    }
}
