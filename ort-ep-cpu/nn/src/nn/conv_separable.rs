//! `FusedPointwiseDepthwise`: a pointwise convolution fused with a depthwise one.
//!
//! The pointwise convolution has packed weights. The depthwise one consumes its result band by
//! band.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, NodeView, Precision, RunCx};
use ort_core::ops::fused::activation::Activation as Named;
use ort_core::ops::nn::geometry::Windows;
use ort_core::spec::RUNTIME;
use ort_core::{Result, ensure, error};
use smallvec::SmallVec;

use super::conv::cpu_of;
use super::conv_depthwise::plane_window;
use super::windows_of;
use ort_cpu_conv::separable::{SeparableGeometry, SeparableInput, forward, workspace_len};
use ort_cpu_gemm::{Cpu, PackedLhs, Step, pack_lhs};
use ort_cpu_kernel::activation::{activation_of, unary_of};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::via_f32;
use ort_cpu_kernel::packed::{PackedFloats, is_weight};
use ort_cpu_kernel::with_weight;
use ort_cpu_kernel::workspace::{bytes_of, scratch};
use ort_cpu_matmul::refused;
use ort_cpu_vector::activation::Activation;
use ort_cpu_vector::elementwise::Unary;

cpu_kernels![KernelDef {
    domain: RUNTIME,
    op: "FusedPointwiseDepthwise",
    types: &[("T", TypeSet::of(&[DType::F32, DType::F16]))],
    unaligned: &[1],
    when: is_known,
    make: |cx| via_f32(cx, make),
    ..KernelDef::BASE
}];

/// Returns whether the pointwise weights are constant, and there are one or two spatial axes.
fn is_known(node: &NodeView<'_>) -> bool {
    let constant = node.constant(1).is_some_and(|weight| matches!(weight.shape().len(), 3 | 4));
    constant && is_weight(node.dtype(1)) && node.fixed_shape(2).is_some()
}

struct Separable {
    windows: Windows,
    /// Channels of the image, and of the intermediate result.
    channels: [usize; 2],
    packed: PackedFloats,
    activations: [Option<Unary>; 2],
    precision: Precision,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let weight = cx.constant(1).ok_or_else(|| error!(Fail, "the pointwise weight is not constant"))?;
    let depthwise = cx.node.fixed_shape(2).ok_or_else(|| error!(Fail, "the weight's shape is not known"))?;
    let windows = windows_of(cx, &depthwise)?;
    let [filters, channels] = [weight.shape()[0], weight.shape()[1]];
    let inner = Named::inner_of_attributes(cx.attrs())?.as_ref().map(unary_of).transpose()?;
    // Inference checked that the kernel has size 1 along each axis: [filters, channels, 1, ...].
    let cpu = cpu_of(cx.threads, cx.precision, weight.shape(), 1);
    let (shape, strides) = ([filters, channels], [channels, 1]);
    let packed = PackedFloats::new(
        cx,
        PackedLhs::len(cpu, filters, channels),
        |packed| with_weight!(weight, weights => pack_lhs(cpu, weights, shape, strides, packed).map_err(refused)),
    )?;
    cx.consume(1);
    let activations = [inner, activation_of(cx)?];
    Ok(Box::new(Separable {
        windows,
        channels: [channels, filters],
        packed,
        activations,
        precision: cx.precision,
    }))
}

impl Separable {
    fn geometry(&self, image: &[usize]) -> Result<SeparableGeometry> {
        let [channels, filters] = self.channels;
        ensure!(
            matches!(image.len(), 3 | 4) && image[1] == channels,
            InvalidArgument,
            "an image of shape {image:?} does not have {channels} channels and one or two axes"
        );
        let window = plane_window(&self.windows.on(&image[2..])?)?;
        Ok(SeparableGeometry { batch: image[0], channels, filters, window })
    }

    fn cpu(&self, threads: usize) -> Cpu {
        let [channels, filters] = self.channels;
        cpu_of(threads, self.precision, &[filters, channels], 1)
    }
}

impl Executable for Separable {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        bytes_of::<f32>(workspace_len(self.cpu(shapes.threads), self.geometry(shapes.input(0))?))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let workspace = scratch::<f32>(cx.workspace()?)?;
        let geometry = self.geometry(cx.input(0)?.shape())?;
        let cpu = self.cpu(cx.threads());
        let [inner, outer] = self.activations;
        let mut epilogue: SmallVec<[Step<'_>; 2]> = SmallVec::new();
        if let Some(bias) = cx.find_input(3) {
            // Filters are the rows of the GEMM, so the bias is by rows.
            epilogue.push(Step::RowBias(bias.as_slice()?));
        }
        epilogue.extend(inner.map(Step::Activate));
        let input = SeparableInput {
            image: cx.input(0)?.as_slice()?,
            pointwise: PackedLhs::new(cpu, self.packed.values(), geometry.filters, geometry.channels)
                .map_err(refused)?,
            epilogue: &epilogue,
            depthwise: cx.input(2)?.as_slice()?,
            bias: cx.find_input(4).map(|bias| bias.as_slice()).transpose()?,
            // The inner activation is in the epilogue; this one follows the depthwise convolution.
            activation: outer.map_or(Activation::None, Activation::Unary),
        };
        let output = cx.output(0)?.as_mut_slice::<f32>()?;
        forward(cpu, geometry, input, output, workspace).map_err(refused)
    }
}
