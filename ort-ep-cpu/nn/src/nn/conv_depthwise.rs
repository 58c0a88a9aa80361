//! Depthwise `Conv` and `FusedConv`, by direct loops over planes.
//!
//! Each channel has its own filters, so there is no GEMM. Weights are read in place, without
//! packing.

use std::ops::Range;

use ort_core::dtype::{DType, Element, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, NodeView, RunCx};
use ort_core::ops::nn::geometry::{WindowAxis, Windows};
use ort_core::spec::MICROSOFT;
use ort_core::tensor::Shape;
use ort_core::{Result, ensure, error, for_each_type};
use smallvec::SmallVec;

use super::conv::groups_of;
use super::windows_of;
use ort_cpu_conv::parts_of_image;
use ort_cpu_depthwise::planes::{DepthwisePlan, Planes};
use ort_cpu_kernel::activation::activation_of;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::{Narrow, via_f32_except};
use ort_cpu_kernel::workspace::{bytes_of, scratch};
use ort_cpu_threads::parallel::StridedRows;
use ort_cpu_vector::activation::Activation;
use ort_cpu_vector::elementwise::{Binary, Operand, Unary, binary_in_place};
use ort_cpu_vector::simd::Isa;
use ort_cpu_vector::window::Window;

/// The places of the inputs whose type the kernel converts itself.
const IMAGE: usize = 0;
const ADDEND: usize = 3;

const DEPTHWISE: KernelDef = KernelDef {
    op: "Conv",
    types: &[("T", TypeSet::of(&[DType::F32, DType::F16, DType::BF16]))],
    // Takes precedence over the GEMM kernel, which has rank 1.
    rank: 2,
    when: is_depthwise,
    // Planes of half precision are widened one at a time, while they are in cache.
    make: |cx| via_f32_except(cx, &[IMAGE, ADDEND], &[0], make),
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
    /// The type of image, addend and result.
    dtype: DType,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let shape = cx.node.fixed_shape(1).ok_or_else(|| error!(Fail, "the weight's shape is not known"))?;
    let (windows, groups) = (windows_of(cx, &shape)?, groups_of(cx)?);
    let activation = activation_of(cx)?;
    let dtype = cx.node.dtype(IMAGE).unwrap_or(DType::F32);
    Ok(Box::new(Depthwise { windows, weight: Shape::from_vec(shape), groups, activation, dtype }))
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

/// Where results begin.
struct Place {
    batch: usize,
    filter: usize,
    row: usize,
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
    /// Returns the scratch of one thread for images of type `T`, in values: that of the loops, and
    /// that of the conversion.
    fn scratch_lens<T: Narrow>(&self) -> [usize; 2] {
        let plan = self.parts.iter().map(|part| part.plan.scratch_len()).max().unwrap_or(0);
        let input = self.parts.iter().map(|part| part.input.len()).max().unwrap_or(0);
        let [from, to] = [input * self.window.input[1], self.rows * self.window.output[1]];
        // The addend of a plane is widened, too.
        let wide = T::scratch_len(from, to.saturating_add(T::scratch_len(0, to)));
        [plan.max(1), wide].map(|len| len.next_multiple_of(16))
    }
}

impl Executable for Depthwise {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let cut = self.cut(shapes.threads, shapes.input(IMAGE))?;
        let dtype = self.dtype;
        let lens = for_each_type!(dtype in [F32, F16, BF16], T => cut.scratch_lens::<T>(), else => [0; 2]);
        bytes_of::<f32>(lens.iter().sum::<usize>().saturating_mul(shapes.threads.max(1)))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let dtype = self.dtype;
        for_each_type!(dtype in [F32, F16, BF16], T => self.run_as::<T>(cx), else => {
            Err(error!(NotImplemented, "depthwise convolution of {}", dtype.name()))
        })
    }
}

impl Depthwise {
    fn run_as<T: Narrow + Element + Send + Sync>(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (isa, threads, workspace) = (Isa::current(), cx.threads(), scratch::<f32>(cx.workspace()?)?);
        let image = cx.input(IMAGE)?;
        let batch = image.shape()[0];
        let cut = self.cut(threads, image.shape())?;
        let image = image.as_slice::<T>()?;
        let weights = cx.input(1)?.as_slice::<f32>()?;
        let bias = cx.find_input(2).map(|bias| bias.as_slice::<f32>()).transpose()?;
        let addend = cx.find_input(ADDEND).map(|addend| addend.as_slice::<T>()).transpose()?;
        let (filters, groups) = (self.weight[0], self.groups);
        ensure!(
            bias.is_none_or(|bias| bias.len() == filters),
            InvalidArgument,
            "the bias does not have {filters} values"
        );
        let Window { input, output: [height, width], kernel, .. } = cut.window;
        let (plane, taps) = (height * width, kernel[0] * kernel[1]);
        let result = cx.output(0)?.as_mut_slice::<T>()?;
        ensure!(
            addend.is_none_or(|addend| addend.len() == result.len()),
            InvalidArgument,
            "the addend does not have the shape of the result"
        );
        let activation = self.activation.map_or(Activation::None, Activation::Unary);
        // The addend comes before the activation, so the loops must not apply it.
        let before_addend = if addend.is_some() { Activation::None } else { activation };
        let rows = StridedRows::new(result, [batch, height, filters], [filters * plane, width, plane], width);
        let rows = rows.ok_or_else(|| error!(Fail, "the result is too short"))?;
        let [plan_len, wide_len] = cut.scratch_lens::<T>();
        let input_len = input[0] * input[1];
        // Computes the filters from `first` on, as many as `to` has results for. `from` holds their
        // rows of the image.
        let run = |part: &Part, first: Place, from: &[T], to: &mut [T], scratch: &mut [f32]| {
            let (scratch, wide) = scratch.split_at_mut(plan_len);
            let start = (first.batch * filters + first.filter) * plane + first.row * width;
            let addend = addend.map(|addend| &addend[start..][..to.len()]);
            let (own, wide) = wide.split_at_mut(T::scratch_len(0, to.len()));
            T::in_f32(isa, from, to, wide, |values, to| {
                let (weights, bias) =
                    (&weights[first.filter * taps..], bias.map(|bias| &bias[first.filter..]));
                let planes = Planes { values, stride: input_len, weights, bias };
                part.plan.run(planes, before_addend, to, scratch);
                if let Some(addend) = addend {
                    let addend = T::widened(isa, addend, own);
                    binary_in_place(isa, Binary::Add, to, Operand::Slice(addend));
                    activation.apply_in_place(isa, to);
                }
            });
        };
        // The scratch of a conversion holds one plane.
        let is_together = filters == groups && T::scratch_len(1, 1) == 0;
        rows.for_each_block(
            threads,
            [cut.rows, cut.channels],
            (workspace, plan_len + wide_len),
            |mut block, scratch| {
                let (batch, [rows, channels]) = (block.outer, block.ranges.clone());
                let Some(part) = cut.parts.get(rows.start / cut.rows) else { return };
                let planes_of = |filter: usize| {
                    let channel = batch * groups + filter / (filters / groups);
                    &image[channel * input_len + part.input.start * input[1]..]
                };
                let place = |filter| Place { batch, filter, row: rows.start };
                if is_together && let Some(to) = block.adjacent_planes() {
                    return run(part, place(channels.start), planes_of(channels.start), to, scratch);
                }
                for filter in channels {
                    let from = &planes_of(filter)[..part.input.len() * input[1]];
                    run(part, place(filter), from, block.adjacent_rows(filter), scratch);
                }
            },
        );
        Ok(())
    }
}
