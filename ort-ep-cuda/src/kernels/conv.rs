//! `Conv`, `FusedConv`, `NhwcConv` and `ConvTranspose`: products of filters with windows, which are never unfolded. Convolutions that are
//! matrix products as they lie become such products.

pub(super) mod dnn;

use ort_core::dim::Dim;
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{KernelDef, NodeView};
use ort_core::ops::fused::activation::Activation;
use ort_core::ops::nn::geometry::{WindowAxis, Windows};
use ort_core::spec::{MICROSOFT, RUNTIME};
use ort_core::{Result, ensure, error};

use super::gemm::{Product, Side, finish, of_cores};
use super::{CudaKernel, cuda_kernels};
use crate::driver::Limits;
use crate::launch::{Launch, OpCx, Operand, scratch};

pub(super) const FLOATS: TypeSet = TypeSet::of(&[DType::F32, DType::F16, DType::BF16]);

const CONV: KernelDef =
    KernelDef { op: "Conv", types: &[("T", FLOATS)], when: has_up_to_three_axes, ..KernelDef::BASE };

const FUSED: KernelDef = KernelDef { domain: MICROSOFT, op: "FusedConv", in_place: &[(3, 0)], ..CONV };

cuda_kernels![
    CudaKernel::new(CONV, conv).with_workspace(|cx| workspace(cx, conv, Layout::ChannelsFirst)),
    CudaKernel::new(FUSED, conv).with_workspace(|cx| workspace(cx, conv, Layout::ChannelsFirst)),
    CudaKernel::new(KernelDef { domain: RUNTIME, op: "NhwcConv", ..FUSED }, nhwc_conv)
        .with_workspace(|cx| workspace(cx, nhwc_conv, Layout::ChannelsLast)),
    CudaKernel::new(KernelDef { op: "ConvTranspose", ..CONV }, conv_transpose)
        .with_workspace(|cx| scratch(cx, conv_transpose)),
];

/// Filters and positions of a block, as in `cu/conv.cuh`.
const BLOCK: usize = 64;
/// The filters of a group up to which each result has a thread: tiles would be all but empty.
const FEW_FILTERS: usize = 2;

/// The taps of all axes that kernels on tensor cores have bits for.
const MOST_TAPS: usize = 31;
/// The bytes of steps that such a kernel multiplies in a turn, and the turns that are worth a block.
const OF_TURN: usize = 64;
const TURNS: usize = 8;

/// Windows over three axes, those in front that the image does not have being of size 1.
pub(super) type Axes = [WindowAxis; 3];

const NO_AXIS: WindowAxis =
    WindowAxis { input: 1, output: 1, kernel: 1, stride: 1, dilation: 1, pads: [0; 2] };

/// Where the channels of images, and of filters, lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    ChannelsFirst,
    /// Those of a pixel, or of a tap, side by side.
    ChannelsLast,
}

/// The sizes of images, or of filters.
pub(super) struct Image {
    pub(super) batch: usize,
    pub(super) channels: usize,
    pub(super) places: Vec<usize>,
}

impl Image {
    pub(super) fn new(shape: &[usize], layout: Layout) -> Result<Image> {
        let (batch, channels, places) = match (layout, shape) {
            (Layout::ChannelsFirst, [batch, channels, places @ ..])
            | (Layout::ChannelsLast, [batch, places @ .., channels]) => (*batch, *channels, places.to_vec()),
            _ => return Err(error!(InvalidArgument, "an image or filters of shape {shape:?}")),
        };
        Ok(Image { batch, channels, places })
    }
}

/// Whether the image is known to have one to three spatial axes, or nothing is known of it.
pub(super) fn has_up_to_three_axes(node: &NodeView<'_>) -> bool {
    matches!(node.rank(0).or_else(|| node.output_type(0).shape().map(<[_]>::len)), None | Some(3..=5))
}

/// Windows as three axes, of places that kernels can count.
pub(super) fn three(axes: &[WindowAxis]) -> Result<Axes> {
    for axis in axes {
        let last = axis.output.saturating_mul(axis.stride).saturating_add(axis.input);
        let extent = axis.kernel.saturating_mul(axis.dilation).saturating_add(axis.pads.iter().sum());
        let fits = last.saturating_add(extent) < 1 << 31;
        ensure!(fits, NotImplemented, "windows as large as {axis:?} are beyond 32 bits");
    }
    match axes {
        [x] => Ok([NO_AXIS, NO_AXIS, *x]),
        [y, x] => Ok([NO_AXIS, *y, *x]),
        [z, y, x] => Ok([*z, *y, *x]),
        _ => Err(error!(NotImplemented, "windows over {} axes", axes.len())),
    }
}

/// The sizes of windows in the order of the kernels' structures: of images, results, kernels, strides, dilations, paddings before.
pub(super) fn window_sizes(axes: &Axes) -> Vec<usize> {
    let of: [fn(&WindowAxis) -> usize; 6] = [
        |axis| axis.input,
        |axis| axis.output,
        |axis| axis.kernel,
        |axis| axis.stride,
        |axis| axis.dilation,
        |axis| axis.pads[0],
    ];
    of.iter().flat_map(|of| axes.iter().map(of)).collect()
}

/// The name of a float type in entries.
pub(super) fn suffix_of(dtype: DType) -> Result<&'static str> {
    match dtype {
        DType::F32 => Ok("f32"),
        DType::F16 => Ok("f16"),
        DType::BF16 => Ok("bf16"),
        other => Err(error!(NotImplemented, "windows over an image of {other}")),
    }
}

fn volume(axes: &Axes, of: fn(&WindowAxis) -> usize) -> usize {
    axes.iter().map(of).fold(1, usize::saturating_mul)
}

/// How the work is cut for tensor cores.
struct Cut {
    /// The type in names of entries, and what a block has.
    suffix: &'static str,
    tile: &'static Tile,
    /// The blocks of filters and of positions, and the parts that sums are computed in.
    down: usize,
    across: usize,
    parts: usize,
}

/// What a block computes, as in `cu/conv_cores.cuh`.
struct Tile {
    name: &'static str,
    filters: usize,
    positions: usize,
    threads: u32,
}

const LARGE: Tile = Tile { name: "large", filters: 128, positions: 128, threads: 256 };
const SMALL: Tile = Tile { name: "small", filters: 64, positions: 64, threads: 128 };
const FEW: Tile = Tile { name: "few", filters: 32, positions: 128, threads: 128 };

/// The sizes of a convolution.
struct Conv {
    /// Of a transposed convolution, the windows lie on the result.
    transposed: bool,
    layout: Layout,
    axes: Axes,
    batch: usize,
    groups: usize,
    /// Channels and filters of a group.
    channels: usize,
    filters: usize,
}

impl Conv {
    /// Of an image and filters of these shapes.
    fn new(cx: &OpCx<'_>, transposed: bool, layout: Layout) -> Result<Conv> {
        let (image, weight) = (&cx.input(0)?.shape, &cx.input(1)?.shape);
        let Image { batch, channels, places } = Image::new(image, layout)?;
        let Image { batch: first, channels: second, places: kernel } = Image::new(weight, layout)?;
        let groups = usize::try_from(cx.attrs.int("group")?).ok().filter(|groups| *groups > 0);
        let groups = groups.ok_or_else(|| error!(InvalidGraph, "a convolution's group is not positive"))?;
        let fits = match transposed {
            false => second.checked_mul(groups) == Some(channels) && first.is_multiple_of(groups),
            true => channels == first && channels.is_multiple_of(groups),
        };
        ensure!(fits, InvalidArgument, "shapes {image:?} and {weight:?} do not fit {groups} groups");
        let kernel: Vec<Dim> = kernel.iter().map(|size| Dim::constant(*size as i64)).collect();
        let windows = Windows::new(cx.attrs, &kernel)?;
        let axes = match transposed {
            false => three(&windows.on(&places)?)?,
            true => {
                let mut axes = three(&windows.transposed_on(cx.attrs, &places)?)?;
                // From here on the image is the input again.
                axes.iter_mut().for_each(|axis| std::mem::swap(&mut axis.input, &mut axis.output));
                axes
            }
        };
        let filters = if transposed { second } else { first / groups };
        Ok(Conv { transposed, layout, axes, batch, groups, channels: channels / groups, filters })
    }

    /// The launches that compute it: a matrix product, tiles, or a thread for each result.
    fn launches(
        &self,
        cx: &OpCx<'_>,
        bias: Option<&Operand>,
        addend: Option<&Operand>,
    ) -> Result<Vec<Launch>> {
        let y = cx.output(0)?;
        let fits = bias.is_none_or(|bias| bias.count() == self.groups * self.filters)
            && addend.is_none_or(|addend| addend.shape == y.shape);
        ensure!(fits, InvalidArgument, "bias or addend do not fit a result of shape {:?}", y.shape);
        if y.count() == 0 {
            return Ok(Vec::new());
        }
        if let Some(launches) = dnn::launches(self, cx, bias, addend)? {
            return Ok(launches);
        }
        if let Some(product) = self.product(cx, bias, addend)? {
            return product.launches(cx);
        }
        if let Some(cut) = self.cut(&cx.limits, y.dtype)? {
            return self.on_cores(cx, &cut, [bias, addend]);
        }
        let (down, across) = (self.filters.div_ceil(BLOCK), self.positions().div_ceil(BLOCK));
        let (family, suffix) = (self.family(), suffix_of(y.dtype)?);
        let launch = if self.transposed || self.filters > FEW_FILTERS {
            let name = if self.transposed { "transposed" } else { "tiles" };
            let blocks = self.groups.saturating_mul(down).saturating_mul(across);
            Launch::of_type(family, suffix, format!("{family}_{name}_{suffix}"))?.grid([blocks, 1, 1])?
        } else {
            Launch::of_type(family, suffix, format!("{family}_planes_{suffix}"))?.threads(y.count())?
        };
        let launch = launch.tensor(cx.input(0)?).tensor(cx.input(1)?).find_tensor(bias).find_tensor(addend);
        let launch = self.ending(launch.tensor(y), cx, [down, across, 1])?;
        Ok(vec![launch.uint(y.count())?])
    }

    /// The family of its kernels, with which the names of all its entries begin.
    fn family(&self) -> &'static str {
        match self.layout {
            Layout::ChannelsFirst => "conv",
            Layout::ChannelsLast => "conv_pixels",
        }
    }

    /// A launch with the structures `Convolution` and `Finish` of the kernels as its next parameters.
    fn ending(&self, launch: Launch, cx: &OpCx<'_>, cut: [usize; 3]) -> Result<Launch> {
        let mut sizes = vec![self.batch, self.groups, self.channels, self.filters];
        sizes.extend(window_sizes(&self.axes));
        sizes.extend(cut);
        let finish = finish(Activation::of_attributes(cx.attrs)?.as_ref(), 1.0, 1.0);
        Ok(launch.uints::<25>(&sizes)?.bytes(&finish))
    }

    /// The positions of windows in all images.
    fn positions(&self) -> usize {
        self.batch.saturating_mul(volume(&self.axes, |axis| axis.output))
    }

    /// How tensor cores compute it, where they do.
    fn cut(&self, limits: &Limits, dtype: DType) -> Result<Option<Cut>> {
        let Some(suffix) = of_cores(limits, dtype)? else { return Ok(None) };
        let taps = self.axes.iter().map(|axis| axis.kernel).fold(0, usize::saturating_add);
        if self.transposed || self.filters <= FEW_FILTERS || taps > MOST_TAPS {
            return Ok(None);
        }
        let blocks =
            |tile: &Tile| [self.filters.div_ceil(tile.filters), self.positions().div_ceil(tile.positions)];
        let count = |tile: &Tile| blocks(tile).into_iter().fold(self.groups, usize::saturating_mul);
        let processors = limits.processors as usize;
        let tile = match self.filters {
            ..=32 => &FEW,
            65.. if count(&LARGE) >= processors => &LARGE,
            _ => &SMALL,
        };
        let [down, across] = blocks(tile);
        // Where blocks do not keep all processors busy, each computes a part of the sums.
        let depth = self.channels.saturating_mul(volume(&self.axes, |axis| axis.kernel));
        let turns = depth.saturating_mul(dtype.byte_len(1).unwrap_or(0)).div_ceil(OF_TURN);
        let wanted = processors.saturating_mul(2).checked_div(count(tile)).unwrap_or(1);
        let parts = wanted.min(turns / TURNS).max(1);
        Ok(Some(Cut { suffix, tile, down, across, parts }))
    }

    /// The parts of all sums, in the workspace, where there are several.
    fn parts(cx: &OpCx<'_>, cut: &Cut, taken: &mut usize) -> Result<Option<Operand>> {
        let shape = [cut.parts, cx.output(0)?.count()];
        Ok((cut.parts > 1).then(|| cx.workspace(taken, DType::F32, &shape)))
    }

    /// The launches on tensor cores.
    fn on_cores(
        &self,
        cx: &OpCx<'_>,
        cut: &Cut,
        [bias, addend]: [Option<&Operand>; 2],
    ) -> Result<Vec<Launch>> {
        let (y, Cut { suffix, tile, .. }) = (cx.output(0)?, cut);
        let parts = Conv::parts(cx, cut, &mut 0)?;
        let words = [cut.down, cut.across, cut.parts];
        let blocks = self.groups.saturating_mul(cut.down).saturating_mul(cut.across);
        let of = self.family();
        let family = format!("{of}_cores");
        let launch = Launch::of_type(&family, suffix, format!("{family}_{}_{suffix}", tile.name))?
            .grid([blocks, cut.parts, 1])?
            .block([tile.threads, 1, 1])
            .tensor(cx.input(0)?)
            .tensor(cx.input(1)?)
            .find_tensor(bias)
            .find_tensor(addend)
            .tensor(y)
            .find_tensor(parts.as_ref());
        let mut launches = vec![self.ending(launch, cx, words)?];
        if let Some(parts) = &parts {
            let join = Launch::of_type(&family, suffix, format!("{of}_join_{suffix}"))?.threads(y.count())?;
            let join = join.tensor(parts).find_tensor(bias).find_tensor(addend).tensor(y);
            launches.push(self.ending(join, cx, words)?.uint(y.count())?);
        }
        Ok(launches)
    }

    /// The convolution as a matrix product: with filters of one tap at each pixel, or with one window, which is the whole image.
    fn product(
        &self,
        cx: &OpCx<'_>,
        bias: Option<&Operand>,
        addend: Option<&Operand>,
    ) -> Result<Option<Product>> {
        let (x, w, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
        let is_plain = |axis: &WindowAxis| axis.pads == [0; 2] && axis.dilation == 1;
        if self.transposed || !self.axes.iter().all(is_plain) {
            return Ok(None);
        }
        let at_pixels = self.axes.iter().all(|axis| axis.kernel == 1 && axis.stride == 1);
        let on_all = self.groups == 1 && self.axes.iter().all(|axis| axis.kernel == axis.input);
        let depth = self.channels.saturating_mul(volume(&self.axes, |axis| axis.kernel));
        let (filters, groups) = (self.filters, self.groups);
        let is_last = self.layout == Layout::ChannelsLast;
        let (mut product, of_bias, shape) = if on_all || at_pixels && is_last && groups == 1 {
            let rows = self.positions();
            let windows = Side { sizes: vec![rows, depth], steps: vec![depth, 1] };
            let weights = Side { sizes: vec![depth, filters], steps: vec![1, depth] };
            (Product::new([x, w], [windows, weights], y)?, vec![filters], vec![rows, filters])
        } else if at_pixels && !is_last && filters > FEW_FILTERS {
            let places = volume(&self.axes, |axis| axis.output);
            let weights =
                Side { sizes: vec![groups, filters, depth], steps: vec![filters * depth, depth, 1] };
            let images = Side {
                sizes: vec![self.batch, groups, depth, places],
                steps: vec![groups * depth * places, depth * places, places, 1],
            };
            let product = Product::new([w, x], [weights, images], y)?;
            (product, vec![groups, filters, 1], vec![self.batch, groups, filters, places])
        } else {
            return Ok(None);
        };
        for (tensor, shape) in [(bias, of_bias), (addend, shape)] {
            if let Some(tensor) = tensor {
                product.add(tensor, Some(&shape))?;
            }
        }
        product.activation = Activation::of_attributes(cx.attrs)?;
        product.has_workspace = true;
        Ok(Some(product))
    }
}

/// What a library or the kernels here take: which of the two shows where the tensors of a run lie.
fn workspace(cx: &OpCx<'_>, launches: fn(&OpCx<'_>) -> Result<Vec<Launch>>, layout: Layout) -> Result<usize> {
    Ok(scratch(cx, launches)?.max(workspace_of_parts(cx, layout)?))
}

/// Room for the parts of sums where tensor cores compute several.
fn workspace_of_parts(cx: &OpCx<'_>, layout: Layout) -> Result<usize> {
    let (conv, mut taken) = (Conv::new(cx, false, layout)?, 0);
    if cx.output(0)?.count() > 0
        && conv.product(cx, None, None)?.is_none()
        && let Some(cut) = conv.cut(&cx.limits, cx.output(0)?.dtype)?
    {
        Conv::parts(cx, &cut, &mut taken)?;
    }
    Ok(taken)
}

fn conv(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    Conv::new(cx, false, Layout::ChannelsFirst)?.launches(cx, cx.find_input(2), cx.find_input(3))
}

fn nhwc_conv(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    Conv::new(cx, false, Layout::ChannelsLast)?.launches(cx, cx.find_input(2), cx.find_input(3))
}

fn conv_transpose(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    Conv::new(cx, true, Layout::ChannelsFirst)?.launches(cx, cx.find_input(2), None)
}
