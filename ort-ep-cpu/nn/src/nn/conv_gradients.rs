//! Convolution gradients: `ConvGradInput` and `ConvGradWeights`.
//!
//! They are GEMMs, or run plane by plane if the convolution is depthwise.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, NodeView, Precision, RunCx};
use ort_core::ir::Attributes;
use ort_core::ops::nn::geometry::WindowAxis;
use ort_core::spec::RUNTIME;
use ort_core::{Result, ensure};

use super::conv::{cpu_of, groups_of};
use super::conv_depthwise::plane_window;
use super::window_of;
use ort_cpu_conv::{
    ConvAttributes, ConvGeometry, image_gradient, image_gradient_workspace_len, weights_gradient,
    weights_gradient_workspace_len,
};
use ort_cpu_depthwise::gradients::{LANES, add_filter_gradient, plane_gradient};
use ort_cpu_gemm::Cpu;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::units::{for_each_unit, part_count};
use ort_cpu_kernel::workspace::{bytes_of, scratch};
use ort_cpu_matmul::refused;
use ort_cpu_threads::parallel::for_each_row_chunk_mut;
use ort_cpu_vector::simd::Isa;
use ort_cpu_vector::window::Window;

const SINGLE: KernelDef = KernelDef {
    domain: RUNTIME,
    op: "ConvGradInput",
    types: &[("T", TypeSet::of(&[DType::F32]))],
    when: |node: &NodeView<'_>| matches!(node.rank(0).or(node.rank(1)), Some(3..=5)),
    make: |cx| Ok(Box::new(ByInput(Convolution::of(cx)?))),
    ..KernelDef::BASE
};

cpu_kernels![
    SINGLE,
    KernelDef { op: "ConvGradWeights", make: |cx| Ok(Box::new(ByWeights(Convolution::of(cx)?))), ..SINGLE },
];

/// The fewest values that are worth a thread.
const WORTH_A_THREAD: usize = 4 << 10;

struct Convolution {
    attrs: Attributes,
    groups: usize,
    precision: Precision,
}

/// The sizes of a run.
struct GradientSizes {
    cpu: Cpu,
    geometry: ConvGeometry,
    /// The window over a plane, if the convolution is depthwise.
    plane: Option<Window>,
}

impl Convolution {
    fn of(cx: &CompileCx<'_>) -> Result<Convolution> {
        Ok(Convolution { attrs: cx.attrs().clone(), groups: groups_of(cx)?, precision: cx.precision })
    }

    /// Returns the sizes for these shapes of image, weight and result.
    fn sizes(&self, threads: usize, [image, weight, result]: [&[usize]; 3]) -> Result<GradientSizes> {
        let fits = image.len() >= 3 && weight.len() == image.len() && result.len() == image.len();
        ensure!(
            fits && result[..2] == [image[0], weight[0]],
            InvalidArgument,
            help = "they are those of a convolution: [N, C, ...], [M, C/group, ...] and [N, M, ...]",
            "an image of shape {image:?}, weights of shape {weight:?} and results of shape {result:?}"
        );
        let attributes = ConvAttributes { groups: self.groups, ..ConvAttributes::default() };
        let mut geometry = ConvGeometry::new(image, weight, &attributes).map_err(refused)?;
        let axes: Vec<WindowAxis> = (0..image.len() - 2)
            .map(|axis| {
                let number = |name: &str, default: usize| {
                    let given = self.attrs.find_ints(name).and_then(|values| values.get(axis).copied());
                    given.and_then(|value| usize::try_from(value).ok()).unwrap_or(default)
                };
                WindowAxis {
                    input: image[axis + 2],
                    output: result[axis + 2],
                    kernel: weight[axis + 2],
                    stride: number("strides", 1),
                    dilation: number("dilations", 1),
                    // The windows read only the padding at the start.
                    pads: [number("pads", 0); 2],
                }
            })
            .collect();
        geometry.window = window_of(&axes)?;
        // The GEMM of such a group would have a single row.
        let is_depthwise = geometry.group_channels() == 1 && geometry.group_filters() == 1;
        let plane = (is_depthwise && axes.len() <= 2).then(|| plane_window(&axes)).transpose()?;
        let cpu = cpu_of(threads, self.precision, weight, self.groups);
        Ok(GradientSizes { cpu, geometry, plane })
    }
}

/// The gradient with respect to the image.
struct ByInput(Convolution);

impl Executable for ByInput {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let given = [shapes.output(0), shapes.input(1), shapes.input(0)];
        let sizes = self.0.sizes(shapes.threads, given)?;
        match sizes.plane {
            Some(_) => Ok(0),
            None => bytes_of::<f32>(image_gradient_workspace_len(sizes.cpu, &sizes.geometry)),
        }
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (upstream, weight) = (cx.input(0)?, cx.input(1)?);
        let image = cx.output_shape(0).unwrap_or_default();
        let sizes = self.0.sizes(cx.threads(), [image, weight.shape(), upstream.shape()])?;
        let (upstream, weights) = (upstream.as_slice::<f32>()?, weight.as_slice::<f32>()?);
        let Some(window) = sizes.plane else {
            let workspace = scratch(cx.workspace()?)?;
            let gradient = cx.output(0)?.as_mut_slice::<f32>()?;
            return image_gradient(sizes.cpu, &sizes.geometry, [weights, upstream], gradient, workspace)
                .map_err(refused);
        };
        let [plane, results, taps] =
            [window.input, window.output, window.kernel].map(|[height, width]| height * width);
        // `plane` is 0 for an empty image; then there are no rows to visit.
        let least = WORTH_A_THREAD.div_ceil(plane.max(1));
        let channels = sizes.geometry.channels;
        let gradient = cx.output(0)?.as_mut_slice::<f32>()?;
        for_each_row_chunk_mut(sizes.cpu.threads, gradient, plane, least, |first, planes| {
            for (index, to) in planes.chunks_exact_mut(plane).enumerate() {
                let (unit, isa) = (first + index, Isa::current());
                // One filter per channel, so the channel of the plane selects it.
                let weights = &weights[unit % channels * taps..][..taps];
                plane_gradient(isa, &window, weights, &upstream[unit * results..][..results], to);
            }
        });
        Ok(())
    }
}

/// The gradient with respect to the weights.
struct ByWeights(Convolution);

impl Executable for ByWeights {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let given = [shapes.input(0), shapes.output(0), shapes.input(1)];
        let sizes = self.0.sizes(shapes.threads, given)?;
        bytes_of::<f32>(match sizes.plane {
            Some(window) => {
                // Each tap has a vector of accumulators.
                let sums = window.kernel[0] * window.kernel[1] * LANES;
                sums * part_count(shapes.threads, sizes.geometry.channels)
            }
            None => weights_gradient_workspace_len(sizes.cpu, &sizes.geometry),
        })
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (image, upstream) = (cx.input(0)?, cx.input(1)?);
        let weight = cx.output_shape(0).unwrap_or_default();
        let sizes = self.0.sizes(cx.threads(), [image.shape(), weight, upstream.shape()])?;
        let (image, upstream) = (image.as_slice::<f32>()?, upstream.as_slice::<f32>()?);
        let workspace = scratch(cx.workspace()?)?;
        let gradient = cx.output(0)?.as_mut_slice::<f32>()?;
        let Some(window) = sizes.plane else {
            return weights_gradient(sizes.cpu, &sizes.geometry, [image, upstream], gradient, workspace)
                .map_err(refused);
        };
        let [plane, results, taps] =
            [window.input, window.output, window.kernel].map(|[height, width]| height * width);
        let ConvGeometry { batch, channels, .. } = sizes.geometry;
        // A task owns a filter and runs over the batch in order, so the bits do not depend on
        // threads.
        for_each_unit(sizes.cpu.threads, (gradient, taps), (workspace, taps * LANES), |channel, to, sums| {
            sums.fill(0.0);
            for unit in (0..batch).map(|index| index * channels + channel) {
                let (from, upstream) =
                    (&image[unit * plane..][..plane], &upstream[unit * results..][..results]);
                add_filter_gradient(Isa::current(), &window, from, upstream, sums);
            }
            // Each tap has one accumulator per lane.
            for (to, sums) in to.iter_mut().zip(sums.chunks_exact(LANES)) {
                *to = sums.iter().sum();
            }
        });
        Ok(())
    }
}
