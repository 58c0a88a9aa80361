//! `Conv` and `FusedConv` where each channel has filters of its own: planes without a product, weights read where they are.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, NodeView, RunCx};
use ort_core::ops::nn::geometry::{WindowAxis, Windows};
use ort_core::spec::MICROSOFT;
use ort_core::tensor::Shape;
use ort_core::{Result, ensure, error};

use super::conv::groups_of;
use super::{for_each_unit, part_count, windows_of};
use crate::cpu_kernels;
use crate::kernels::elementwise::activation::activation_of;
use crate::kernels::linalg::widened::widened;
use crate::kernels::linalg::{bytes_of, scratch};
use crate::simd::Isa;
use crate::vector::activation::Activation;
use crate::vector::depthwise::DepthwisePlan;
use crate::vector::elementwise::{Binary, Operand, Unary, binary_in_place};
use crate::vector::window::Window;

const DEPTHWISE: KernelDef = KernelDef {
    op: "Conv",
    types: &[("T", TypeSet::of(&[DType::F32, DType::F16, DType::BF16]))],
    rank: 2,
    when: is_depthwise,
    make: |cx| widened(cx, make),
    ..KernelDef::BASE
};

cpu_kernels![DEPTHWISE, KernelDef { domain: MICROSOFT, op: "FusedConv", ..DEPTHWISE }];

fn is_depthwise(node: &NodeView<'_>) -> bool {
    let Some(weight) = node.fixed_shape(1) else { return false };
    let group = node.attrs().int("group").ok().and_then(|group| usize::try_from(group).ok());
    let Some(group) = group.filter(|group| *group > 1) else { return false };
    matches!(weight.len(), 3 | 4) && weight[1] == 1 && weight[0].is_multiple_of(group)
}

struct Depthwise {
    windows: Windows,
    weight: Shape,
    groups: usize,
    activation: Option<Unary>,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let shape = cx.node.fixed_shape(1).ok_or_else(|| error!(Fail, "the weight's shape is not known"))?;
    let (windows, groups) = (windows_of(cx, &shape)?, groups_of(cx)?);
    let activation = activation_of(cx)?;
    Ok(Box::new(Depthwise { windows, weight: Shape::from_vec(shape), groups, activation }))
}

/// A window over a plane, of height 1 where there is one axis.
pub(super) fn plane_window(axes: &[WindowAxis]) -> Result<Window> {
    let none = WindowAxis { input: 1, output: 1, kernel: 1, stride: 1, dilation: 1, pads: [0, 0] };
    let (y, x) = match axes {
        [x] => (none, *x),
        [y, x] => (*y, *x),
        _ => return Err(error!(Fail, "a plane has {} axes", axes.len())),
    };
    Ok(Window {
        input: [y.input, x.input],
        output: [y.output, x.output],
        kernel: [y.kernel, x.kernel],
        strides: [y.stride, x.stride],
        dilations: [y.dilation, x.dilation],
        pads: [y.pads[0], x.pads[0]],
    })
}

impl Depthwise {
    fn plan(&self, image: &[usize]) -> Result<(DepthwisePlan, Window)> {
        ensure!(
            image.len() == self.weight.len() && image[1] == self.groups,
            InvalidArgument,
            "an image of shape {image:?} does not fit a weight of shape {:?}",
            self.weight
        );
        let window = plane_window(&self.windows.on(&image[2..])?)?;
        Ok((DepthwisePlan::new(Isa::current(), window), window))
    }
}

impl Executable for Depthwise {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let image = shapes.input(0);
        let scratch = self.plan(image)?.0.scratch_len().next_multiple_of(16);
        bytes_of::<f32>(scratch.saturating_mul(part_count(shapes.threads, image[0] * self.weight[0])))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (threads, workspace) = (cx.threads(), scratch::<f32>(cx.workspace()?)?);
        let image = cx.input(0)?;
        let (plan, window) = self.plan(image.shape())?;
        let image = image.as_slice::<f32>()?;
        let weights = cx.input(1)?.as_slice::<f32>()?;
        let bias = cx.find_input(2).map(|bias| bias.as_slice::<f32>()).transpose()?;
        let addend = cx.find_input(3).map(|addend| addend.as_slice::<f32>()).transpose()?;
        let (filters, groups) = (self.weight[0], self.groups);
        ensure!(
            bias.is_none_or(|bias| bias.len() == filters),
            InvalidArgument,
            "the bias does not have {filters} values"
        );
        let [input, output] = [window.input, window.output].map(|[height, width]| height * width);
        let taps = window.kernel[0] * window.kernel[1];
        let result = cx.output(0)?.as_mut_slice::<f32>()?;
        ensure!(
            addend.is_none_or(|addend| addend.len() == result.len()),
            InvalidArgument,
            "the addend does not have the shape of the result"
        );
        let activation = self.activation.map_or(Activation::None, Activation::Unary);
        // Behind an addend, the activation waits for it.
        let first = if addend.is_some() { Activation::None } else { activation };
        let scratch_len = plan.scratch_len().next_multiple_of(16);
        for_each_unit(threads, (result, output), (workspace, scratch_len), |unit, plane, scratch| {
            let (batch, filter) = (unit / filters, unit % filters);
            let channel = batch * groups + filter / (filters / groups);
            let bias = bias.map_or(0.0, |bias| bias[filter]);
            let from = &image[channel * input..][..input];
            plan.run(from, &weights[filter * taps..][..taps], bias, first, plane, scratch);
            if let Some(addend) = addend {
                let isa = Isa::current();
                let addend = Operand::Slice(&addend[unit * output..][..output]);
                binary_in_place(isa, Binary::Add, plane, addend);
                activation.apply_in_place(isa, plane);
            }
        });
        Ok(())
    }
}
