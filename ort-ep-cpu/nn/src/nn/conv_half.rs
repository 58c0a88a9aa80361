//! Pointwise `Conv` and `FusedConv` of half precision.
//!
//! The GEMM computes in `float`, on some rows of the image at a time: they are widened, multiplied
//! and rounded while they are in the L2 cache. Results are rounded once, after the epilogue.

use ort_core::dtype::{DType, Element, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, NodeView, Precision, RunCx};
use ort_core::spec::MICROSOFT;
use ort_core::{Result, ensure, error, for_each_type};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::conv::cpu_of;
use ort_cpu_gemm::{
    Cpu, Gemm, GemmError, LhsOperand, PackedLhs, RhsOperand, RhsSource, Step, Strided, pack_lhs,
    workspace_len_beside_ready,
};
use ort_cpu_kernel::activation::activation_of;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::{Narrow, via_f32_except};
use ort_cpu_kernel::packed::{PackedFloats, is_weight};
use ort_cpu_kernel::with_weight;
use ort_cpu_kernel::workspace::{bytes_of, scratch};
use ort_cpu_matmul::refused;
use ort_cpu_threads::parallel::{RowBlock, StridedRows};
use ort_cpu_vector::elementwise::Unary;
use ort_cpu_vector::simd::Isa;

const POINTWISE: KernelDef = KernelDef {
    op: "Conv",
    types: &[("T", TypeSet::of(&[DType::F16, DType::BF16]))],
    // Before the kernels that widen the whole image.
    rank: 3,
    unaligned: &[1],
    when: is_pointwise,
    make: |cx| via_f32_except(cx, &[IMAGE, ADDEND], &[0], make),
    ..KernelDef::BASE
};

cpu_kernels![POINTWISE, KernelDef { domain: MICROSOFT, op: "FusedConv", ..POINTWISE }];

// The places of the inputs.
const IMAGE: usize = 0;
const WEIGHT: usize = 1;
const BIAS: usize = 2;
const ADDEND: usize = 3;

/// Images of so few pixels fill vectors better with pixels as the rows of the GEMM.
const FEW_PIXELS: i64 = 128;

/// Values of a task, a part of L2.
const VALUES: usize = 64 << 10;

/// Whether the weights are constant, in one group, and each window is one pixel of a large image.
fn is_pointwise(node: &NodeView<'_>) -> bool {
    let (Some(weight), attrs) = (node.constant(WEIGHT), node.attrs()) else { return false };
    let all = |name: &str, value: i64| {
        attrs.find_ints(name).is_none_or(|given| given.iter().all(|given| *given == value))
    };
    let shape = node.shape(IMAGE).unwrap_or_default();
    let pixels = shape.iter().skip(2).try_fold(1_i64, |pixels, size| {
        let size = size.as_constant()?;
        Some(pixels.saturating_mul(size))
    });
    // Of an image of unknown size the product above is 1.
    let is_known = shape.len() == 4;
    matches!(weight.shape(), [_, _, 1, 1])
        && is_weight(node.dtype(WEIGHT))
        && attrs.int("group").is_ok_and(|group| group == 1)
        && all("strides", 1)
        && all("pads", 0)
        && (!is_known || pixels.is_none_or(|pixels| pixels > FEW_PIXELS))
}

struct HalfPointwise {
    filters: usize,
    channels: usize,
    packed: PackedFloats,
    activation: Option<Unary>,
    precision: Precision,
    dtype: DType,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let weight = cx.constant(WEIGHT).ok_or_else(|| error!(Fail, "the weight is not constant"))?;
    let [filters, channels] = [weight.shape()[0], weight.shape()[1]];
    let cpu = cpu_of(cx.threads, cx.precision, weight.shape(), 1);
    let (shape, strides) = ([filters, channels], [channels, 1]);
    let packed = PackedFloats::new(
        cx,
        PackedLhs::len(cpu, filters, channels),
        |packed| with_weight!(weight, weights => pack_lhs(cpu, weights, shape, strides, packed).map_err(refused)),
    )?;
    cx.consume(WEIGHT);
    let (activation, precision) = (activation_of(cx)?, cx.precision);
    let dtype = cx.node.dtype(IMAGE).unwrap_or(DType::F16);
    Ok(Box::new(HalfPointwise { filters, channels, packed, activation, precision, dtype }))
}

/// How an image is split into tasks.
struct Cut {
    /// What a task computes with: one thread.
    cpu: Cpu,
    /// Images, and rows and pixels in a row of each.
    image: [usize; 3],
    /// Rows of a task; fewer in the last one.
    rows: usize,
    /// The scratch of a task, in values: image, addend, result, and workspace of the GEMM.
    slot: [usize; 4],
}

impl HalfPointwise {
    fn cut(&self, threads: usize, shape: &[usize], has_addend: bool) -> Result<Cut> {
        let (filters, channels) = (self.filters, self.channels);
        let [batch, of_image, height, width] = *shape else {
            return Err(error!(InvalidArgument, "an image of shape {shape:?}"));
        };
        ensure!(
            of_image == channels,
            InvalidArgument,
            "an image of {of_image} channels does not match filters of {channels}"
        );
        let cpu = cpu_of(1, self.precision, &[filters, channels], 1);
        let addends = if has_addend { filters } else { 0 };
        let of_pixel = channels.saturating_add(filters).saturating_add(addends).max(1);
        // Enough tasks to balance threads of unequal speed.
        let fair = if threads > 1 { height.div_ceil(4 * threads) } else { height };
        let rows = (VALUES / of_pixel / width.max(1)).min(fair).clamp(1, height.max(1));
        let workspace = |rows: usize| {
            let shape = [filters, rows.saturating_mul(width), channels];
            workspace_len_beside_ready(cpu, 1, shape, RhsSource::Rows)
        };
        // The last task may have fewer rows, and may then be the only one that packs them.
        let workspace = workspace(rows).max(workspace(height % rows));
        let columns = rows.saturating_mul(width);
        let values = [channels, addends, filters].map(|count| count.saturating_mul(columns));
        let [image, addend, result] = values;
        let slot = [image, addend, result, workspace].map(|len| len.next_multiple_of(16));
        Ok(Cut { cpu, image: [batch, height, width], rows, slot })
    }

    fn run_as<T: Narrow + Element + Send + Sync>(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (threads, workspace) = (cx.threads(), scratch::<f32>(cx.workspace()?)?);
        let image = cx.input(IMAGE)?;
        let addend = cx.find_input(ADDEND).map(|addend| addend.as_slice::<T>()).transpose()?;
        let cut = self.cut(threads, image.shape(), addend.is_some())?;
        let bias = cx.find_input(BIAS).map(|bias| bias.as_slice::<f32>()).transpose()?;
        let ([batch, height, width], filters) = (cut.image, self.filters);
        let (plane, result) = (height * width, cx.output(0)?.as_mut_slice::<T>()?);
        ensure!(
            addend.is_none_or(|addend| addend.len() == result.len())
                && bias.is_none_or(|bias| bias.len() == filters),
            InvalidArgument,
            "bias and addend do not have the {filters} filters of the result"
        );
        if result.is_empty() {
            return Ok(());
        }
        let rows = StridedRows::new(result, [batch, height, filters], [filters * plane, width, plane], width);
        let rows = rows.ok_or_else(|| error!(Fail, "the result is too short"))?;
        let given = Given { image: image.as_slice::<T>()?, bias, addend };
        let failure = Mutex::new(None);
        let slot_len = cut.slot.iter().sum();
        rows.for_each_block(threads, [cut.rows, filters], (workspace, slot_len), |block, slot| {
            if let Err(problem) = self.run_rows(&cut, &given, block, slot) {
                *failure.lock() = Some(problem);
            }
        });
        failure.into_inner().map_or(Ok(()), |problem| Err(refused(problem)))
    }

    /// Computes some rows of all filters of an image.
    fn run_rows<T: Narrow>(
        &self,
        cut: &Cut,
        given: &Given<'_, T>,
        mut block: RowBlock<'_, T>,
        slot: &mut [f32],
    ) -> Result<(), GemmError> {
        let ([_, height, width], isa) = (cut.image, Isa::current());
        let (plane, rows) = (height * width, block.ranges[0].clone());
        let (first, columns) = (rows.start * width, rows.len() * width);
        let [image_len, addend_len, result_len, _] = cut.slot;
        let (image, rest) = slot.split_at_mut(image_len);
        let (addend, rest) = rest.split_at_mut(addend_len);
        let (result, workspace) = rest.split_at_mut(result_len);
        let widen = |from: &[T], planes: usize, to: &mut [f32]| {
            let from = from[block.outer * planes * plane..].chunks(plane);
            for (from, to) in from.zip(to.chunks_exact_mut(columns).take(planes)) {
                T::to_f32(isa, &from[first..first + columns], to);
            }
        };
        widen(given.image, self.channels, image);
        let mut epilogue: SmallVec<[Step<'_>; 3]> = SmallVec::new();
        epilogue.extend(given.bias.map(Step::RowBias));
        if let Some(from) = given.addend {
            widen(from, self.filters, addend);
            epilogue.push(Step::Residual { values: addend, row_stride: columns });
        }
        epilogue.extend(self.activation.map(Step::Activate));
        let rhs = RhsOperand::Plain(Strided::row_major(image, self.channels, columns)?);
        let lhs = PackedLhs::new(cut.cpu, self.packed.values(), self.filters, self.channels)?;
        let gemm = Gemm { epilogue: &epilogue, ..Gemm::new(LhsOperand::Packed(lhs), rhs) };
        gemm.run(cut.cpu, result, columns, workspace)?;
        for (filter, result) in result.chunks_exact(columns).take(self.filters).enumerate() {
            T::from_f32(isa, result, block.adjacent_rows(filter));
        }
        Ok(())
    }
}

/// The operands in memory.
struct Given<'a, T> {
    image: &'a [T],
    bias: Option<&'a [f32]>,
    addend: Option<&'a [T]>,
}

impl Executable for HalfPointwise {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let has_addend = shapes.inputs.get(ADDEND).is_some_and(Option::is_some);
        let cut = self.cut(shapes.threads, shapes.input(IMAGE), has_addend)?;
        let slot = cut.slot.iter().fold(0, |sum: usize, len| sum.saturating_add(*len));
        bytes_of::<f32>(slot.saturating_mul(shapes.threads.max(1)))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let dtype = self.dtype;
        for_each_type!(dtype in [F16, BF16], T => self.run_as::<T>(cx), else => {
            Err(error!(NotImplemented, "convolution of {}", dtype.name()))
        })
    }
}
