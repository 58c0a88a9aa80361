//! Depthwise `Conv` and `FusedConv`, by direct loops over planes.
//!
//! Each channel has its own filters, so there is no GEMM. Weights are read in place, without
//! packing.

use std::ops::Range;

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, NodeView, RunCx};
use ort_core::ops::nn::geometry::{WindowAxis, Windows};
use ort_core::spec::MICROSOFT;
use ort_core::tensor::Shape;
use ort_core::{Result, ensure, error};
use smallvec::SmallVec;

use super::conv::groups_of;
use super::windows_of;
use ort_cpu_conv::parts_of_image;
use ort_cpu_kernel::activation::activation_of;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::via_f32;
use ort_cpu_kernel::workspace::{bytes_of, scratch};
use ort_cpu_threads::parallel::StridedRows;
use ort_cpu_vector::activation::Activation;
use ort_cpu_vector::depthwise::DepthwisePlan;
use ort_cpu_vector::elementwise::{Binary, Operand, Unary, binary_in_place};
use ort_cpu_vector::simd::Isa;
use ort_cpu_vector::window::Window;

const DEPTHWISE: KernelDef = KernelDef {
    op: "Conv",
    types: &[("T", TypeSet::of(&[DType::F32, DType::F16, DType::BF16]))],
    // Takes precedence over the GEMM kernel, which has rank 1.
    rank: 2,
    when: is_depthwise,
    make: |cx| via_f32(cx, make),
    ..KernelDef::BASE
};

cpu_kernels![DEPTHWISE, KernelDef { domain: MICROSOFT, op: "FusedConv", ..DEPTHWISE }];

fn is_depthwise(node: &NodeView<'_>) -> bool {
    let Some(weight) = node.fixed_shape(1) else { return false };
    let group = node.attrs().int("group").ok().and_then(|group| usize::try_from(group).ok());
    // A single group is an ordinary convolution, even of one channel.
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

/// Converts one or two axes to a window over a plane; one axis makes a plane of height 1.
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

/// A band of each image: consecutive rows of the result.
struct Part {
    /// The rows of the image that the band's windows cover.
    input: Range<usize>,
    plan: DepthwisePlan,
}

/// How the images of a batch are split into tasks.
struct Cut {
    window: Window,
    /// Rows of the result in each band (fewer in the last one), and the bands.
    rows: usize,
    parts: SmallVec<[Part; 2]>,
    /// Filters of a task.
    channels: usize,
}

/// Tasks for each thread. More than one evens out unequal speeds.
const TASKS_PER_THREAD: usize = 4;

impl Depthwise {
    fn cut(&self, threads: usize, image: &[usize]) -> Result<Cut> {
        ensure!(
            image.len() == self.weight.len() && image[1] == self.groups,
            InvalidArgument,
            "an image of shape {image:?} does not match a weight of shape {:?}",
            self.weight
        );
        let window = plane_window(&self.windows.on(&image[2..])?)?;
        // Images are split by rows before channels: a thread then writes the rows that it reads in
        // the next layer.
        let count = parts_of_image(threads, image[0], window.output);
        let rows = window.output[0].div_ceil(count).max(1);
        let part = |first: usize| {
            let (input, window) = window.band(first..(first + rows).min(window.output[0]));
            Part { input, plan: DepthwisePlan::new(Isa::current(), window) }
        };
        let parts: SmallVec<[Part; 2]> = (0..window.output[0]).step_by(rows).map(part).collect();
        // A single thread gains nothing from splitting the channels.
        let tasks =
            if threads > 1 { (threads * TASKS_PER_THREAD).div_ceil(image[0].max(1) * count) } else { 1 };
        Ok(Cut { window, rows, parts, channels: self.weight[0].div_ceil(tasks).max(1) })
    }
}

impl Cut {
    /// Returns the scratch of one thread, in values.
    fn scratch_len(&self) -> usize {
        let len = self.parts.iter().map(|part| part.plan.scratch_len()).max().unwrap_or(0);
        len.max(1).next_multiple_of(16)
    }
}

impl Executable for Depthwise {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let cut = self.cut(shapes.threads, shapes.input(0))?;
        bytes_of::<f32>(cut.scratch_len().saturating_mul(shapes.threads.max(1)))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (threads, workspace) = (cx.threads(), scratch::<f32>(cx.workspace()?)?);
        let image = cx.input(0)?;
        let batch = image.shape()[0];
        let cut = self.cut(threads, image.shape())?;
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
        let Window { input, output: [height, width], kernel, .. } = cut.window;
        let (plane, taps) = (height * width, kernel[0] * kernel[1]);
        let result = cx.output(0)?.as_mut_slice::<f32>()?;
        ensure!(
            addend.is_none_or(|addend| addend.len() == result.len()),
            InvalidArgument,
            "the addend does not have the shape of the result"
        );
        let activation = self.activation.map_or(Activation::None, Activation::Unary);
        // The addend comes before the activation, so the loops must not apply it.
        let first = if addend.is_some() { Activation::None } else { activation };
        let rows = StridedRows::new(result, [batch, height, filters], [filters * plane, width, plane], width);
        let rows = rows.ok_or_else(|| error!(Fail, "the result is too short"))?;
        rows.for_each_block(
            threads,
            [cut.rows, cut.channels],
            (workspace, cut.scratch_len()),
            |mut block, scratch| {
                let (batch, [rows, channels]) = (block.outer, block.ranges.clone());
                let Some(part) = cut.parts.get(rows.start / cut.rows) else { return };
                for filter in channels {
                    let channel = batch * groups + filter / (filters / groups);
                    // ONNX's depthwise multiplier: consecutive filters share a channel.
                    let from = &image[channel * input[0] * input[1]..]
                        [part.input.start * input[1]..part.input.end * input[1]];
                    let bias = bias.map_or(0.0, |bias| bias[filter]);
                    let to = block.adjacent_rows(filter);
                    part.plan.run(from, &weights[filter * taps..][..taps], bias, first, to, scratch);
                    if let Some(addend) = addend {
                        // The addend is added to the plane while it is in cache.
                        let isa = Isa::current();
                        let start = (batch * filters + filter) * plane + rows.start * width;
                        binary_in_place(isa, Binary::Add, to, Operand::Slice(&addend[start..][..to.len()]));
                        activation.apply_in_place(isa, to);
                    }
                }
            },
        );
        Ok(())
    }
}
