//! `Conv`, `FusedConv`, `NhwcConv` and `ConvTranspose`: implicit GEMM, without im2col. A
//! convolution that is a plain GEMM on its tensors runs as one.

pub(super) mod dnn;
mod rows;

use std::ops::Deref;

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::KernelDef;
use ort_core::ops::fused::activation::Activation;
use ort_core::ops::nn::geometry::WindowAxis;
use ort_core::ops::nn::problem::{ConvShape, PixelLayout, WindowAxes, volume};
use ort_core::ops::tensor::geometry::Strided;
use ort_core::spec::{MICROSOFT, RUNTIME};
use ort_core::{Result, ensure, error};
use ort_gpu::read::{self, has_up_to_three_axes};

use super::gemm::{Product, Side, finish, of_cores};
use super::movement::gather;
use super::{CudaKernel, cuda_kernels, warpgroups};
use crate::driver::Limits;
use crate::launch::{Launch, OpCx, Operand, scratch};
use rows::RowTiles;

pub(super) const FLOATS: TypeSet = TypeSet::of(&[DType::F32, DType::F16, DType::BF16]);

const CONV: KernelDef =
    KernelDef { op: "Conv", types: &[("T", FLOATS)], when: has_up_to_three_axes, ..KernelDef::BASE };

const FUSED: KernelDef = KernelDef { domain: MICROSOFT, op: "FusedConv", in_place: &[(3, 0)], ..CONV };

cuda_kernels![
    CudaKernel::new(CONV, conv).with_workspace(|cx| workspace(cx, conv, Conv::second)),
    CudaKernel::new(FUSED, conv).with_workspace(|cx| workspace(cx, conv, Conv::second)),
    CudaKernel::new(KernelDef { domain: RUNTIME, op: "NhwcConv", ..FUSED }, nhwc_conv)
        .with_workspace(|cx| workspace(cx, nhwc_conv, Conv::last)),
    CudaKernel::new(KernelDef { op: "ConvTranspose", ..CONV }, conv_transpose)
        .with_workspace(|cx| workspace(cx, conv_transpose, Conv::transposed)),
];

/// Filters and positions of a block, as in `cu/conv.cuh`.
const BLOCK: usize = 64;
/// The most filters of a group for which each result gets a thread: a tile would be almost empty.
const FEW_FILTERS: usize = 2;

/// The most taps, summed over the axes, that the tensor core kernels have mask bits for.
const MOST_TAPS: usize = 31;
/// Bytes of depth that a tensor core kernel multiplies per iteration.
const OF_TURN: usize = 64;
/// The least number of iterations worth a block of its own.
const TURNS: usize = 8;

/// Returns the window sizes in the order of the kernels' structures: image, result, kernel,
/// strides, dilations, leading padding.
pub(super) fn window_sizes(axes: &WindowAxes) -> Vec<usize> {
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

/// Returns the suffix of a float type in entry names.
pub(super) fn suffix_of(dtype: DType) -> Result<&'static str> {
    match dtype {
        DType::F32 => Ok("f32"),
        DType::F16 => Ok("f16"),
        DType::BF16 => Ok("bf16"),
        other => Err(error!(NotImplemented, "windows over an image of {other} are not supported")),
    }
}

/// How the work is divided for tensor cores.
pub(super) struct Cut {
    /// The type's suffix in entry names, and the tile of a block.
    pub(super) suffix: &'static str,
    pub(super) tile: &'static Tile,
    /// All blocks, the blocks along filters and along columns, and the split-K parts.
    pub(super) blocks: usize,
    pub(super) down: usize,
    pub(super) across: usize,
    pub(super) parts: usize,
}

/// A block's tile, as in `cu/conv_cores.cuh`: filters by columns. A column is a position, or
/// whatever else a filter has results for.
pub(super) struct Tile {
    pub(super) name: &'static str,
    filters: usize,
    columns: usize,
    pub(super) threads: u32,
}

const LARGE: Tile = Tile { name: "large", filters: 128, columns: 128, threads: 256 };
const SMALL: Tile = Tile { name: "small", filters: 64, columns: 64, threads: 128 };
const FEW: Tile = Tile { name: "few", filters: 32, columns: 128, threads: 128 };

impl Cut {
    /// Divides `groups` GEMMs of `filters` by `columns` results over this depth. Returns `None` if
    /// tensor cores do not support the type.
    pub(super) fn new(
        limits: &Limits,
        dtype: DType,
        groups: usize,
        [filters, columns, depth]: [usize; 3],
    ) -> Result<Option<Cut>> {
        let Some(suffix) = of_cores(limits, dtype)? else { return Ok(None) };
        let blocks = |tile: &Tile| [filters.div_ceil(tile.filters), columns.div_ceil(tile.columns)];
        let count = |tile: &Tile| blocks(tile).into_iter().fold(groups, usize::saturating_mul);
        let processors = limits.processors as usize;
        let tile = match filters {
            // A tile of 64 filters would be half empty.
            ..=32 => &FEW,
            // Large tiles only if every multiprocessor gets one.
            65.. if count(&LARGE) >= processors => &LARGE,
            _ => &SMALL,
        };
        let [down, across] = blocks(tile);
        // Split-K: if the blocks do not keep all multiprocessors busy, each accumulates a part of
        // the depth.
        let turns = depth.saturating_mul(dtype.byte_len(1).unwrap_or(0)).div_ceil(OF_TURN);
        let wanted = processors.saturating_mul(2).checked_div(count(tile)).unwrap_or(1);
        let parts = wanted.min(turns / TURNS).max(1);
        Ok(Some(Cut { suffix, tile, blocks: count(tile), down, across, parts }))
    }

    /// Returns the division's fields of the kernels' `Convolution` structure.
    pub(super) fn words(&self) -> [usize; 3] {
        [self.down, self.across, self.parts]
    }

    /// Reserves the partial accumulators in the workspace; `None` without split-K.
    pub(super) fn parts(&self, cx: &OpCx<'_>, taken: &mut usize) -> Result<Option<Operand>> {
        let shape = [self.parts, cx.output(0)?.count()];
        Ok((self.parts > 1).then(|| cx.workspace(taken, DType::F32, &shape)))
    }
}

/// Whether the tensor core kernels have mask bits for all taps.
pub(super) fn taps_fit(axes: &WindowAxes) -> bool {
    axes.iter().map(|axis| axis.kernel).fold(0, usize::saturating_add) <= MOST_TAPS
}

/// A convolution, by its sizes.
pub(super) struct Conv(pub(super) ConvShape);

impl Deref for Conv {
    type Target = ConvShape;

    fn deref(&self) -> &ConvShape {
        &self.0
    }
}

impl Conv {
    /// The sizes of `Conv` and `FusedConv`, which are NCHW.
    fn second(cx: &OpCx<'_>) -> Result<Conv> {
        read::conv(cx, PixelLayout::ChannelsFirst).map(Conv)
    }

    /// The sizes of `NhwcConv`.
    fn last(cx: &OpCx<'_>) -> Result<Conv> {
        read::conv(cx, PixelLayout::ChannelsLast).map(Conv)
    }

    /// The sizes of `ConvTranspose`.
    fn transposed(cx: &OpCx<'_>) -> Result<Conv> {
        read::conv_transpose(cx).map(Conv)
    }

    /// Returns the launches: a library call, a GEMM, tiles, or a thread per result.
    fn launches(
        &self,
        cx: &OpCx<'_>,
        bias: Option<&Operand>,
        addend: Option<&Operand>,
    ) -> Result<Vec<Launch>> {
        let y = cx.output(0)?;
        let fits = bias.is_none_or(|bias| bias.count() == self.groups * self.filters)
            && addend.is_none_or(|addend| addend.shape == y.shape);
        ensure!(
            fits,
            InvalidArgument,
            "bias or addend does not broadcast to the output of shape {:?}",
            y.shape
        );
        if y.count() == 0 {
            return Ok(Vec::new());
        }
        // In order of preference; each one declines what it does not cover.
        if let Some(launches) = dnn::launches(self, cx, bias, addend)? {
            return Ok(launches);
        }
        if let Some(product) = self.product(cx, bias, addend)? {
            return product.launches(cx);
        }
        if let Some(tiles) = RowTiles::new(self, &cx.limits, y.dtype)? {
            return Ok(vec![tiles.launch(self, cx, [bias, addend])?]);
        }
        if let Some((suffix, cut)) = self.group_cut(&cx.limits, y.dtype) {
            return self.by_warpgroups(cx, suffix, &cut, [bias, addend]);
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

    /// Returns the kernel family, which is also the prefix of its entries.
    fn family(&self) -> &'static str {
        match self.layout {
            PixelLayout::ChannelsFirst => "conv",
            PixelLayout::ChannelsLast => "conv_pixels",
        }
    }

    /// Appends the kernels' structures `Convolution` and `Finish` to a launch.
    fn ending(&self, launch: Launch, cx: &OpCx<'_>, cut: [usize; 3]) -> Result<Launch> {
        let mut sizes = vec![self.batch, self.groups, self.channels, self.filters];
        sizes.extend(window_sizes(&self.axes));
        sizes.extend(cut);
        let finish = finish(Activation::of_attributes(cx.attrs)?.as_ref(), 1.0, 1.0);
        Ok(launch.uints::<25>(&sizes)?.bytes(&finish))
    }

    /// Returns the number of window positions in all images.
    fn positions(&self) -> usize {
        self.batch.saturating_mul(volume(&self.axes, |axis| axis.output))
    }

    /// Returns the division for tensor cores, or `None` if they do not apply.
    pub(super) fn cut(&self, limits: &Limits, dtype: DType) -> Result<Option<Cut>> {
        if self.filters <= FEW_FILTERS || !taps_fit(&self.axes) {
            return Ok(None);
        }
        let depth = self.depth();
        Cut::new(limits, dtype, self.groups, [self.filters, self.positions(), depth])
    }

    /// Returns the type suffix and the division for warpgroups, or `None` if they do not apply.
    /// They read the channels of a tap in 16-byte vectors, so these must be NHWC and a multiple
    /// of 8.
    fn group_cut(&self, limits: &Limits, dtype: DType) -> Option<(&'static str, warpgroups::Cut)> {
        let suffix = warpgroups::suffix_of(limits, dtype)?;
        let is_first = self.layout == PixelLayout::ChannelsFirst;
        if is_first
            || self.filters <= FEW_FILTERS
            || !self.channels.is_multiple_of(8)
            || !taps_fit(&self.axes)
        {
            return None;
        }
        let depth = self.depth();
        let sizes = [self.positions(), self.filters, depth];
        let cut = warpgroups::cut(limits, warpgroups::OF_NEAR_STEPS, self.groups, sizes, true)?;
        Some((suffix, cut))
    }

    /// Returns the launches by warpgroups: positions are rows, filters are columns.
    fn by_warpgroups(
        &self,
        cx: &OpCx<'_>,
        suffix: &str,
        cut: &warpgroups::Cut,
        [bias, addend]: [Option<&Operand>; 2],
    ) -> Result<Vec<Launch>> {
        let (y, words) = (cx.output(0)?, [cut.across, cut.down, cut.parts]);
        let parts = (cut.parts > 1).then(|| cx.workspace(&mut 0, DType::F32, &[cut.parts, y.count()]));
        let family = "conv_pixels_warpgroups";
        let launch = Launch::of_type(family, suffix, format!("{family}_{}_{suffix}", cut.tile.name))?
            .grid([cut.blocks, cut.parts, 1])?
            .block([cut.tile.threads, 1, 1])
            .shared(cut.tile.shared())
            .tensor(cx.input(0)?)
            .tensor(cx.input(1)?)
            .find_tensor(bias)
            .find_tensor(addend)
            .tensor(y)
            .find_tensor(parts.as_ref());
        let mut launches = vec![self.ending(launch, cx, words)?];
        if let Some(parts) = &parts {
            let entry = format!("conv_pixels_join_{suffix}");
            let join = Launch::of_type(family, suffix, entry)?.threads(warpgroups::joining(y.count()))?;
            let join = join.tensor(parts).find_tensor(bias).find_tensor(addend).tensor(y);
            launches.push(self.ending(join, cx, words)?.uint(y.count())?);
        }
        Ok(launches)
    }

    /// Returns the filters as the tensor core kernels read them, with channels and taps innermost,
    /// and the launches that transpose them if needed.
    fn filters_for_cores(&self, cx: &OpCx<'_>, taken: &mut usize) -> Result<(Operand, Vec<Launch>)> {
        let (w, taps) = (cx.input(1)?, self.taps());
        let ConvShape { groups, channels, filters, .. } = self.0;
        // Only the filters of a transposed convolution have the channels first; with one channel or
        // one filter, both orders agree.
        if !self.transposed || channels == 1 || filters == 1 {
            return Ok((w.clone(), Vec::new()));
        }
        let shape = [groups, channels, filters, taps];
        let order = Strided::transpose(&shape, &[0, 2, 1, 3]);
        let moved = cx.workspace(taken, w.dtype, &[groups, filters, channels, taps]);
        let launches = gather(w, &order, &moved)?;
        Ok((moved, launches))
    }

    /// Returns the launches on tensor cores.
    pub(super) fn on_cores(
        &self,
        cx: &OpCx<'_>,
        cut: &Cut,
        [bias, addend]: [Option<&Operand>; 2],
    ) -> Result<Vec<Launch>> {
        let (y, Cut { suffix, tile, .. }, mut taken) = (cx.output(0)?, cut, 0);
        let parts = cut.parts(cx, &mut taken)?;
        let (filters, mut launches) = self.filters_for_cores(cx, &mut taken)?;
        let of = self.family();
        let family = format!("{of}_cores");
        let tiles = if self.transposed { "_transposed" } else { "" };
        let launch = Launch::of_type(&family, suffix, format!("{family}{tiles}_{}_{suffix}", tile.name))?
            .grid([cut.blocks, cut.parts, 1])?
            .block([tile.threads, 1, 1])
            .tensor(cx.input(0)?)
            .tensor(&filters)
            .find_tensor(bias)
            .find_tensor(addend)
            .tensor(y)
            .find_tensor(parts.as_ref());
        launches.push(self.ending(launch, cx, cut.words())?);
        if let Some(parts) = &parts {
            let join = Launch::of_type(&family, suffix, format!("{of}_join_{suffix}"))?.threads(y.count())?;
            let join = join.tensor(parts).find_tensor(bias).find_tensor(addend).tensor(y);
            launches.push(self.ending(join, cx, cut.words())?.uint(y.count())?);
        }
        Ok(launches)
    }

    /// Returns the workspace bytes of the tensor core kernels.
    pub(super) fn workspace_for_cores(&self, cx: &OpCx<'_>) -> Result<usize> {
        let (y, mut taken) = (cx.output(0)?, 0);
        if let Some((_, cut)) = self.group_cut(&cx.limits, y.dtype) {
            return Ok(if cut.parts > 1 { cut.parts * y.count() * size_of::<f32>() } else { 0 });
        }
        if y.count() > 0
            && RowTiles::new(self, &cx.limits, y.dtype)?.is_none()
            && let Some(cut) = self.cut(&cx.limits, y.dtype)?
        {
            cut.parts(cx, &mut taken)?;
            self.filters_for_cores(cx, &mut taken)?;
        }
        Ok(taken)
    }

    /// Expresses the convolution as a GEMM, if it is pointwise or its one window covers the whole
    /// image.
    fn product(
        &self,
        cx: &OpCx<'_>,
        bias: Option<&Operand>,
        addend: Option<&Operand>,
    ) -> Result<Option<Product>> {
        let (x, w, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
        // Padding and dilation leave no plain matrix of the image.
        let is_plain = |axis: &WindowAxis| axis.pads == [0; 2] && axis.dilation == 1;
        if self.transposed || !self.axes.iter().all(is_plain) {
            return Ok(None);
        }
        let at_pixels = self.axes.iter().all(|axis| axis.kernel == 1 && axis.stride == 1);
        let on_all = self.groups == 1 && self.axes.iter().all(|axis| axis.kernel == axis.input);
        let depth = self.depth();
        let (filters, groups) = (self.filters, self.groups);
        let is_last = self.layout == PixelLayout::ChannelsLast;
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

/// Returns the workspace of the library or of our own kernels, whichever is larger: only a run
/// tells whether its tensors are aligned for the library.
fn workspace(
    cx: &OpCx<'_>,
    launches: fn(&OpCx<'_>) -> Result<Vec<Launch>>,
    conv: fn(&OpCx<'_>) -> Result<Conv>,
) -> Result<usize> {
    let (conv, by_library) = (conv(cx)?, scratch(cx, launches)?);
    match conv.product(cx, None, None)? {
        // `scratch` has counted the workspace of our own GEMM as well.
        Some(_) => Ok(by_library),
        None => Ok(by_library.max(conv.workspace_for_cores(cx)?)),
    }
}

fn conv(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    Conv::second(cx)?.launches(cx, cx.find_input(2), cx.find_input(3))
}

fn nhwc_conv(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    Conv::last(cx)?.launches(cx, cx.find_input(2), cx.find_input(3))
}

fn conv_transpose(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    Conv::transposed(cx)?.launches(cx, cx.find_input(2), None)
}
