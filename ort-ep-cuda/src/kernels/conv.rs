//! `Conv`, `FusedConv`, `NhwcConv` and `ConvTranspose`: implicit GEMM, without im2col. A
//! convolution that is a plain GEMM on its tensors runs as one.

pub(super) mod dnn;
mod mma;
mod rows;
mod shape;

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::KernelDef;
use ort_core::ops::fused::activation::Activation;
use ort_core::ops::nn::geometry::WindowAxis;
use ort_core::ops::nn::problem::{ConvShape, PixelLayout, volume};
use ort_core::ops::tensor::geometry::Strided;
use ort_core::spec::{MICROSOFT, RUNTIME};
use ort_core::{Result, ensure};
use ort_gpu::gemm::{Gemm, MatrixLayout};
use ort_gpu::read::has_up_to_three_axes;

use super::gemm::Product;
use super::movement::gather;
use super::{CudaKernel, cuda_kernels, warpgroups};
use crate::driver::Limits;
use crate::launch::{Launch, OpCx, Operand, scratch};
pub(super) use mma::MmaDivision;
use rows::RowTiles;
use shape::FEW_FILTERS;
pub(super) use shape::{Conv, suffix_of, taps_fit, window_sizes};

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
impl Conv {
    /// Returns the launches: a library call, a GEMM, tiles, or a thread per result.
    fn launches(
        &self,
        cx: &OpCx<'_>,
        bias: Option<&Operand>,
        addend: Option<&Operand>,
    ) -> Result<Vec<Launch>> {
        let y = cx.output(0)?;
        // Kernels index bias and addend without a check, so their sizes are checked here.
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
            return self.by_mma(cx, &cut, [bias, addend]);
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
        let launch = self.with_epilogue(launch.tensor(y), cx, [down, across, 1])?;
        Ok(vec![launch.uint(y.count())?])
    }

    /// Returns the division for tensor cores, or `None` if they do not apply.
    pub(super) fn cut(&self, limits: &Limits, dtype: DType) -> Result<Option<MmaDivision>> {
        if self.filters <= FEW_FILTERS || !taps_fit(&self.axes) {
            return Ok(None);
        }
        let depth = self.depth();
        MmaDivision::new(limits, dtype, self.groups, [self.filters, self.positions(), depth])
    }

    /// Returns the type suffix and the division for warpgroups, or `None` if they do not apply.
    /// They read the channels of a tap in 16-byte vectors, so these must be NHWC and a multiple
    /// of 8.
    fn group_cut(&self, limits: &Limits, dtype: DType) -> Option<(&'static str, warpgroups::GroupDivision)> {
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
        cut: &warpgroups::GroupDivision,
        [bias, addend]: [Option<&Operand>; 2],
    ) -> Result<Vec<Launch>> {
        let (y, words) = (cx.output(0)?, [cut.across, cut.down, cut.parts]);
        // Parts are summed in float32 whatever the type of the result.
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
        let mut launches = vec![self.with_epilogue(launch, cx, words)?];
        if let Some(parts) = &parts {
            let entry = format!("conv_pixels_join_{suffix}");
            let join = Launch::of_type(family, suffix, entry)?.threads(warpgroups::joining(y.count()))?;
            let join = join.tensor(parts).find_tensor(bias).find_tensor(addend).tensor(y);
            launches.push(self.with_epilogue(join, cx, words)?.uint(y.count())?);
        }
        Ok(launches)
    }

    /// Returns the filters as the tensor core kernels read them, with channels and taps innermost,
    /// and the launches that transpose them if needed.
    fn filters_for_mma(&self, cx: &OpCx<'_>, taken: &mut usize) -> Result<(Operand, Vec<Launch>)> {
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
    pub(super) fn by_mma(
        &self,
        cx: &OpCx<'_>,
        cut: &MmaDivision,
        [bias, addend]: [Option<&Operand>; 2],
    ) -> Result<Vec<Launch>> {
        let (y, MmaDivision { suffix, tile, .. }, mut taken) = (cx.output(0)?, cut, 0);
        let parts = cut.parts(cx, &mut taken)?;
        let (filters, mut launches) = self.filters_for_mma(cx, &mut taken)?;
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
        launches.push(self.with_epilogue(launch, cx, cut.words())?);
        if let Some(parts) = &parts {
            let join = Launch::of_type(&family, suffix, format!("{of}_join_{suffix}"))?.threads(y.count())?;
            let join = join.tensor(parts).find_tensor(bias).find_tensor(addend).tensor(y);
            launches.push(self.with_epilogue(join, cx, cut.words())?.uint(y.count())?);
        }
        Ok(launches)
    }

    /// Returns the workspace bytes of the tensor core kernels.
    pub(super) fn workspace_for_mma(&self, cx: &OpCx<'_>) -> Result<usize> {
        let (y, mut taken) = (cx.output(0)?, 0);
        if let Some((_, cut)) = self.group_cut(&cx.limits, y.dtype) {
            // `by_warpgroups` reserves these partial sums.
            return Ok(if cut.parts > 1 { cut.parts * y.count() * size_of::<f32>() } else { 0 });
        }
        if y.count() > 0
            && RowTiles::new(self, &cx.limits, y.dtype)?.is_none()
            && let Some(cut) = self.cut(&cx.limits, y.dtype)?
        {
            cut.parts(cx, &mut taken)?;
            self.filters_for_mma(cx, &mut taken)?;
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
            // Windows are rows, and filters are columns. Filters are stored by rows of `depth`,
            // hence the transposed strides.
            let rows = self.positions();
            let windows = MatrixLayout { sizes: vec![rows, depth], steps: vec![depth, 1] };
            let weights = MatrixLayout { sizes: vec![depth, filters], steps: vec![1, depth] };
            (Product::new(Gemm::new([x, w], [windows, weights], y)?), vec![filters], vec![rows, filters])
        } else if at_pixels && !is_last && filters > FEW_FILTERS {
            // Filters are rows here: the result then has the order of NCHW without a transpose.
            let places = volume(&self.axes, |axis| axis.output);
            let weights =
                MatrixLayout { sizes: vec![groups, filters, depth], steps: vec![filters * depth, depth, 1] };
            let images = MatrixLayout {
                sizes: vec![self.batch, groups, depth, places],
                steps: vec![groups * depth * places, depth * places, places, 1],
            };
            let product = Product::new(Gemm::new([w, x], [weights, images], y)?);
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
        None => Ok(by_library.max(conv.workspace_for_mma(cx)?)),
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
