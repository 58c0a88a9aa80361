//! `ConvGradInput` and `ConvGradWeights`: implicit GEMM without im2col, or a thread or block per
//! result if groups are small.

use ort_core::dtype::DType;
use ort_core::ep::{KernelDef, NodeView};
use ort_core::ops::nn::geometry::WindowAxis;
use ort_core::ops::nn::problem::{ConvShape, PixelLayout, WindowAxes, three_axes, volume};
use ort_core::spec::RUNTIME;
use ort_core::{Result, ensure, error};

use super::step::spread;
use crate::kernels::conv::dnn::{Windows, gradient};
use crate::kernels::conv::{Conv, FLOATS, MmaDivision, suffix_of, taps_fit, window_sizes};
use crate::kernels::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand, scratch};
use crate::libraries::Pass;

const FAMILY: &str = "training_conv";
const MMA_FAMILY: &str = "training_conv_cores";

const INPUT: KernelDef = KernelDef {
    domain: RUNTIME,
    op: "ConvGradInput",
    types: &[("T", FLOATS)],
    host_inputs: &[2],
    when: has_up_to_three_axes,
    ..KernelDef::BASE
};

cuda_kernels![
    CudaKernel::new(INPUT, by_input).with_workspace(workspace_by_input),
    CudaKernel::new(KernelDef { op: "ConvGradWeights", ..INPUT }, by_weights)
        .with_workspace(workspace_by_weights),
];

/// The rows and columns of a tile, as in `cu/training_conv.cu`.
const BLOCK: usize = 64;
/// The most filters or channels of a group for which a tile would be almost empty.
const FEW_FILTERS: usize = 2;
/// The same for channels times taps.
const FEW_COLUMNS: usize = 8;
/// The windows in a split-K piece.
const PIECE: usize = 512;
/// The number of blocks that keep a device busy.
const BLOCKS: usize = 512;
/// The number of words in the structure `Convolution`.
const WORDS: usize = 25;

fn has_up_to_three_axes(node: &NodeView<'_>) -> bool {
    matches!(node.rank(0).or_else(|| node.rank(1)), Some(3..=5))
}

/// The sizes of the forward convolution.
struct GradShape {
    axes: WindowAxes,
    batch: usize,
    groups: usize,
    /// Channels and filters of a group.
    channels: usize,
    filters: usize,
}

impl GradShape {
    /// Reads the sizes from image, filters and result.
    fn new(cx: &OpCx<'_>, [image, weight, result]: [&Operand; 3]) -> Result<GradShape> {
        let groups = usize::try_from(cx.attrs.int("group")?).ok().filter(|groups| *groups > 0);
        let groups = groups.ok_or_else(|| error!(InvalidGraph, "a convolution's group is not positive"))?;
        let rank = image.rank();
        let fits = rank >= 3
            && weight.rank() == rank
            && result.rank() == rank
            && (result.size(0), result.size(1)) == (image.size(0), weight.size(0))
            && weight.size(1).checked_mul(groups) == Some(image.size(1))
            && weight.size(0).is_multiple_of(groups);
        ensure!(
            fits,
            InvalidArgument,
            help = "they are those of a convolution: [N, C, ...], [M, C/group, ...] and [N, M, ...]",
            "an image of shape {:?}, weights of shape {:?} and results of shape {:?} in {groups} groups",
            image.shape,
            weight.shape,
            result.shape
        );
        let axes: Vec<WindowAxis> = (0..rank - 2)
            .map(|axis| {
                let number = |name: &str, default: usize| {
                    let given = cx.attrs.find_ints(name).and_then(|values| values.get(axis).copied());
                    given.and_then(|value| usize::try_from(value).ok()).unwrap_or(default)
                };
                WindowAxis {
                    input: image.size(axis + 2),
                    output: result.size(axis + 2),
                    kernel: weight.size(axis + 2),
                    stride: number("strides", 1),
                    dilation: number("dilations", 1),
                    pads: [number("pads", 0); 2],
                }
            })
            .collect();
        let (channels, filters) = (weight.size(1), weight.size(0) / groups);
        Ok(GradShape { axes: three_axes(&axes)?, batch: image.size(0), groups, channels, filters })
    }

    fn volume(&self, of: fn(&WindowAxis) -> usize) -> usize {
        volume(&self.axes, of)
    }

    /// Returns channels times taps of a group's filters.
    fn columns(&self) -> usize {
        self.channels.saturating_mul(self.volume(|axis| axis.kernel))
    }

    fn windows(&self) -> usize {
        self.batch.saturating_mul(self.volume(|axis| axis.output))
    }

    /// Returns a library call for the gradient, if there is one. For groups of few filters we use
    /// our own kernels, which read each value once.
    fn by_library(&self, cx: &OpCx<'_>, pass: Pass, tensors: [&Operand; 3]) -> Result<Option<Launch>> {
        if self.groups > 1 && self.filters.min(self.channels) <= FEW_FILTERS {
            return Ok(None);
        }
        let windows = Windows { axes: &self.axes, groups: self.groups, layout: PixelLayout::ChannelsFirst };
        gradient(cx, pass, &windows, tensors)
    }

    /// Whether a tile of the filter gradient would be almost empty.
    fn has_few_columns(&self) -> bool {
        self.filters <= FEW_FILTERS || self.columns() <= FEW_COLUMNS
    }

    /// Expresses the data gradient as a transposed convolution.
    fn transposed(&self) -> Conv {
        let mut axes = self.axes;
        axes.iter_mut().for_each(|axis| std::mem::swap(&mut axis.input, &mut axis.output));
        let (channels, filters) = (self.filters, self.channels);
        let (layout, batch, groups) = (PixelLayout::ChannelsFirst, self.batch, self.groups);
        Conv(ConvShape { transposed: true, layout, axes, batch, groups, channels, filters })
    }

    /// Returns the division of the filter gradient for tensor cores, or `None` if they do not
    /// apply.
    fn mma_division(&self, cx: &OpCx<'_>) -> Result<Option<MmaDivision>> {
        if self.has_few_columns() || !taps_fit(&self.axes) {
            return Ok(None);
        }
        let dtype = cx.output(0)?.dtype;
        MmaDivision::new(&cx.limits, dtype, self.groups, [self.filters, self.columns(), self.windows()])
    }

    /// Returns the tiles of the filter gradient, down and across, and the split-K pieces of the
    /// windows.
    fn cut(&self) -> [usize; 3] {
        let (down, across) = (self.filters.div_ceil(BLOCK), self.columns().div_ceil(BLOCK));
        let blocks = self.groups.saturating_mul(down).saturating_mul(across).max(1);
        [down, across, (self.windows() / PIECE).min(BLOCKS / blocks).max(1)]
    }

    fn pass(&self, launch: Launch, [down, across, splits]: [usize; 3]) -> Result<Launch> {
        let mut words = vec![self.batch, self.groups, self.channels, self.filters];
        words.extend(window_sizes(&self.axes));
        words.extend([down, across, splits]);
        launch.uints::<WORDS>(&words)
    }
}

fn by_input(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (upstream, weight, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    let sizes = GradShape::new(cx, [y, weight, upstream])?;
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    if let Some(launch) = sizes.by_library(cx, Pass::Data, [y, weight, upstream])? {
        return Ok(vec![launch]);
    }
    let suffix = suffix_of(y.dtype)?;
    if sizes.channels <= FEW_FILTERS {
        let launch = Launch::new(FAMILY, format!("by_input_planes_{suffix}"));
        let launch = launch.tensor(upstream).tensor(weight).tensor(y);
        return Ok(vec![spread(cx, sizes.pass(launch, [0; 3])?.uint(y.count())?, y.count())?]);
    }
    let conv = sizes.transposed();
    // The forward pass's tensor core kernels for transposed convolutions serve here as well.
    if let Some(cut) = conv.cut(&cx.limits, y.dtype)? {
        return conv.by_mma(cx, &cut, [None; 2]);
    }
    let positions = sizes.batch.saturating_mul(sizes.volume(|axis| axis.input));
    let (down, across) = (sizes.channels.div_ceil(BLOCK), positions.div_ceil(BLOCK));
    let launch = Launch::new(FAMILY, format!("by_input_{suffix}")).tensor(upstream).tensor(weight).tensor(y);
    let blocks = sizes.groups.saturating_mul(down).saturating_mul(across);
    Ok(vec![sizes.pass(launch, [down, across, 1])?.grid([blocks, 1, 1])?])
}

fn workspace_by_input(cx: &OpCx<'_>) -> Result<usize> {
    let sizes = GradShape::new(cx, [cx.output(0)?, cx.input(1)?, cx.input(0)?])?;
    Ok(scratch(cx, by_input)?.max(sizes.transposed().workspace_for_mma(cx)?))
}

/// Reserves the split-K partial sums; `None` if windows are not split.
fn parts(cx: &OpCx<'_>, sizes: &GradShape, taken: &mut usize) -> Result<Option<Operand>> {
    if let Some(cut) = sizes.mma_division(cx)? {
        return cut.parts(cx, taken);
    }
    let [_, _, splits] = sizes.cut();
    let cuts = splits > 1 && !sizes.has_few_columns();
    let count = cx.output(0)?.count();
    Ok(cuts.then(|| cx.workspace(taken, DType::F32, &[splits, count])))
}

fn workspace_by_weights(cx: &OpCx<'_>) -> Result<usize> {
    let (image, upstream) = (cx.input(0)?, cx.input(1)?);
    let mut taken = 0;
    parts(cx, &GradShape::new(cx, [image, cx.output(0)?, upstream])?, &mut taken)?;
    // Only a run tells whether its tensors are aligned for the library, so the workspace covers
    // both.
    Ok(scratch(cx, by_weights)?.max(taken))
}

fn by_weights(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (image, upstream, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    let sizes = GradShape::new(cx, [image, y, upstream])?;
    let count = y.count();
    if count == 0 {
        return Ok(Vec::new());
    }
    if let Some(launch) = sizes.by_library(cx, Pass::Filter, [image, y, upstream])? {
        return Ok(vec![launch]);
    }
    let suffix = suffix_of(y.dtype)?;
    let given = |launch: Launch| launch.tensor(image).tensor(upstream).tensor(y);
    if sizes.has_few_columns() {
        let launch = Launch::new(FAMILY, format!("by_weights_planes_{suffix}"));
        return Ok(vec![sizes.pass(given(launch), [0; 3])?.grid([count, 1, 1])?]);
    }
    let parts = parts(cx, &sizes, &mut 0)?;
    let (launch, cut) = match sizes.mma_division(cx)? {
        Some(cut) => (given(mma_launch(&cut)?), cut.words()),
        None => {
            let [down, across, splits] = sizes.cut();
            let blocks = sizes.groups.saturating_mul(down).saturating_mul(across);
            let launch = Launch::new(FAMILY, format!("by_weights_{suffix}"));
            (given(launch).grid([blocks, splits, 1])?, [down, across, splits])
        }
    };
    let mut launches = vec![sizes.pass(launch.find_tensor(parts.as_ref()), cut)?];
    if let Some(parts) = &parts {
        let [_, _, splits] = cut;
        let join = Launch::new(FAMILY, format!("by_weights_join_{suffix}")).tensor(parts).tensor(y);
        launches.push(spread(cx, join.uint(count)?.uint(splits)?, count)?);
    }
    Ok(launches)
}

/// Returns the launch of the filter gradient on tensor cores, without parameters.
fn mma_launch(cut: &MmaDivision) -> Result<Launch> {
    let MmaDivision { suffix, tile, .. } = cut;
    let launch = Launch::of_type(MMA_FAMILY, suffix, format!("{MMA_FAMILY}_{}_{suffix}", tile.name))?;
    Ok(launch.grid([cut.blocks, cut.parts, 1])?.block([tile.threads, 1, 1]))
}
