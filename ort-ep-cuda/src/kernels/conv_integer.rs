//! `ConvInteger` and `QLinearConv`: 8-bit convolutions with zero points and 32-bit accumulators.

use std::ops::Deref;

use ort_core::ep::KernelDef;
use ort_core::ops::nn::geometry::WindowAxis;
use ort_core::ops::nn::problem::{ConvShape, PixelLayout, volume};
use ort_core::{Result, ensure};
use ort_gpu::gemm::{Gemm, MatrixLayout};
use ort_gpu::read::has_up_to_three_axes;

use super::conv::window_sizes;
use super::integer::{IntegerEpilogue, QuantizedGemm, Term};
use super::{CudaKernel, cuda_kernels};
use crate::driver::TENSOR_CORES;
use crate::launch::{Launch, OpCx, Operand};

cuda_kernels![
    CudaKernel::new(
        KernelDef { op: "ConvInteger", when: has_up_to_three_axes, ..KernelDef::BASE },
        conv_integer
    ),
    CudaKernel::new(
        KernelDef { op: "QLinearConv", when: has_up_to_three_axes, ..KernelDef::BASE },
        qlinear_conv
    ),
];

/// Filters and positions of a block, as in `cu/conv_integer.cu`.
const BLOCK: usize = 64;
/// The most filters of a group for which each result gets a thread: a tile would be almost empty.
const FEW_FILTERS: usize = 2;

/// The tensors besides image and filters, each with its role in the product. A tensor has one
/// value, or one per filter.
type TermTensors<'a> = [(Term, Option<&'a Operand>)];

fn conv_integer(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let terms = [(Term::LhsZero, cx.find_input(3)), (Term::RhsZero, cx.find_input(2))];
    launches(cx, [cx.input(0)?, cx.input(1)?], IntegerEpilogue::Accumulators, &terms)
}

fn qlinear_conv(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let terms = [
        (Term::LhsZero, Some(cx.input(5)?)),
        (Term::RhsZero, Some(cx.input(2)?)),
        (Term::LhsScale, Some(cx.input(4)?)),
        (Term::RhsScale, Some(cx.input(1)?)),
        (Term::Scale, Some(cx.input(6)?)),
        (Term::Zero, Some(cx.input(7)?)),
        (Term::Addend, cx.find_input(8)),
    ];
    launches(cx, [cx.input(0)?, cx.input(3)?], IntegerEpilogue::Quantized, &terms)
}

/// A convolution, by its sizes.
struct Conv(ConvShape);

impl Deref for Conv {
    type Target = ConvShape;

    fn deref(&self) -> &ConvShape {
        &self.0
    }
}

impl Conv {
    fn new(cx: &OpCx<'_>, x: &Operand, w: &Operand) -> Result<Conv> {
        ConvShape::new(cx.attrs, &x.shape, &w.shape, PixelLayout::ChannelsFirst).map(Conv)
    }

    /// Whether it is a GEMM of the filters with the unmodified image.
    fn is_pointwise(&self) -> bool {
        let is = |axis: &WindowAxis| axis.kernel == 1 && axis.stride == 1 && axis.pads == [0; 2];
        self.axes.iter().all(is) && self.filters > FEW_FILTERS
    }

    /// Describes the convolution as an implicit GEMM of the filters with all windows; the kernel
    /// computes the addresses of the right side itself.
    fn product(&self, [x, w]: [&Operand; 2], y: &Operand) -> Result<QuantizedGemm> {
        let (groups, filters) = (self.groups, self.filters);
        let (depth, places) = (self.depth(), volume(&self.axes, |axis| axis.output));
        let weights =
            MatrixLayout { sizes: vec![groups, filters, depth], steps: vec![filters * depth, depth, 1] };
        let (sizes, steps) = if self.is_pointwise() {
            let plane = depth * places;
            (vec![self.batch, groups, depth, places], vec![groups * plane, plane, places, 1])
        } else {
            (vec![groups, depth, self.batch.saturating_mul(places)], vec![0; 3])
        };
        Ok(QuantizedGemm::new(Gemm::new([w, x], [weights, MatrixLayout { sizes, steps }], y)?))
    }
}

fn launches(
    cx: &OpCx<'_>,
    [x, w]: [&Operand; 2],
    epilogue: IntegerEpilogue,
    terms: &TermTensors<'_>,
) -> Result<Vec<Launch>> {
    let (y, conv) = (cx.output(0)?, Conv::new(cx, x, w)?);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let mut product = conv.product([x, w], y)?.with_epilogue(epilogue);
    for (term, tensor) in terms {
        // A tensor with more than one value has one per filter.
        let count = tensor.map_or(1, Operand::count);
        let fits = count == 1 || count == conv.groups.saturating_mul(conv.filters);
        ensure!(fits, InvalidArgument, "{count} scales, zero points or biases for {} filters", w.size(0));
        product.add(*term, *tensor, &[conv.groups, conv.filters, 1])?;
    }
    if conv.is_pointwise() {
        return product.launches(cx);
    }
    let mut sizes = vec![conv.groups, conv.channels, conv.filters];
    sizes.extend(window_sizes(&conv.axes));
    let blocks = [product.gemm.rows.div_ceil(BLOCK), product.gemm.columns.div_ceil(BLOCK)];
    // A tile would be almost empty, so each result gets a thread.
    if conv.filters <= FEW_FILTERS {
        let launch = product.launch_of("conv_integer", "conv_planes", [1, 1])?.threads(y.count())?;
        return Ok(vec![launch.uints::<21>(&sizes)?.uint(y.count())?]);
    }
    // Without tensor cores, the kernel uses `dp4a` dot products.
    let entry = if cx.limits.capability >= TENSOR_CORES { "conv_cores" } else { "conv_dots" };
    Ok(vec![product.launch_of("conv_integer", entry, blocks)?.uints::<21>(&sizes)?])
}
