//! The layers of the experts of `MoE` and `QMoE`: GEMMs with float or quantized weights.

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, RunCx};
use ort_core::tensor::{TensorView, element_count};
use ort_core::{Result, ensure, error};

use super::block_product::BlockProduct;
use super::matmul_nbits::numbers;
use ort_cpu_gemm::{
    Blocks, Cpu, Gemm, LhsOperand, Numbers, RhsOperand, RhsSource, Step, Strided, Zeros, workspace_len,
};
use ort_cpu_kernel::half_precision::widen;
use ort_cpu_kernel::workspace::take;
use ort_cpu_matmul::packed_weight::PackedWeight;
use ort_cpu_matmul::refused;
use ort_cpu_threads::interrupt::spending;
use ort_cpu_vector::simd::blocks::BlockLayout;

/// The inputs of a layer.
#[derive(Clone, Copy)]
pub(super) struct LayerInputs {
    pub(super) weights: usize,
    pub(super) bias: usize,
    /// The scales and zero points of `QMoE`.
    pub(super) scales: usize,
    pub(super) zeros: usize,
}

/// Quantized weights: for each output a row of codes, the first in the low bits of its byte.
#[derive(Clone, Copy)]
pub(super) struct Codes {
    pub(super) bits: usize,
    /// Codes of a scale; `None` if a row has one scale.
    pub(super) block: Option<usize>,
    /// Whether the rows may be quantized to 8 bits, block by block.
    pub(super) rounds: bool,
}

/// How a product reads quantized weights.
enum Reading {
    /// In blocks, each with a scale in the tensor, or in scratch if a row has one scale.
    Blocks(BlockProduct),
    /// Dequantized in scratch: the rows do not divide into blocks.
    Floats,
}

impl Codes {
    fn reading(&self, inputs: usize) -> Reading {
        /// The smallest and largest block of the product.
        const BLOCKS: [usize; 2] = [16, 128];
        let [least, most] = BLOCKS;
        let block = self.block.unwrap_or(most.min(1 << inputs.trailing_zeros().min(7)));
        match block >= least && inputs > 0 {
            true => {
                let layout = BlockLayout { bits: self.bits, block };
                Reading::Blocks(BlockProduct { layout, rounds: self.rounds })
            }
            false => Reading::Floats,
        }
    }
}

/// The weights of one layer for all experts, each of shape (outputs, inputs).
pub(super) enum Layer {
    /// Packed for GEMM at compile time, one per expert, with the shape of the tensor.
    Packed(Vec<PackedWeight>, [usize; 3]),
    /// Floats, read from the input on each run.
    Input,
    /// Quantized, read from the input on each run.
    Codes(Codes),
}

/// A layer of an expert, and the rows that it is applied to.
#[derive(Clone, Copy)]
pub(super) struct ExpertLayer {
    pub(super) inputs: LayerInputs,
    /// Outputs and inputs of the layer.
    pub(super) shape: [usize; 2],
    pub(super) experts: usize,
    pub(super) expert: usize,
    pub(super) rows: usize,
}

/// The scratch of a product.
pub(super) struct LayerMemory<'a> {
    /// Weights converted to `f32`, or scales and zero points.
    pub(super) weights: &'a mut [f32],
    /// A bias converted to `f32`.
    pub(super) bias: &'a mut [f32],
    pub(super) product: &'a mut [f32],
}

/// Returns part of a tensor as `f32`. Other types are converted into `scratch`.
pub(super) fn floats<'a>(
    threads: usize,
    view: TensorView<'a>,
    first: usize,
    len: usize,
    scratch: &'a mut [f32],
) -> Result<&'a [f32]> {
    let outside = || error!(Fail, "{len} values from {first} on are outside a tensor");
    if view.dtype() == DType::F32 {
        return view.as_slice::<f32>()?.get(first..).and_then(|values| values.get(..len)).ok_or_else(outside);
    }
    // The other types are half precision.
    let width = size_of::<u16>();
    let bytes = view.bytes()?.get(first * width..).and_then(|bytes| bytes.get(..len * width));
    let to = scratch.get_mut(..len).ok_or_else(|| error!(Fail, "the workspace is too small"))?;
    widen(threads, TensorView::host(view.dtype(), &[len], bytes.ok_or_else(outside)?), to)?;
    Ok(to)
}

/// Returns the numbers of one expert.
fn of_expert<'a>(view: TensorView<'a>, expert: usize, count: usize) -> Result<Numbers<'a>> {
    let width = if view.dtype() == DType::F32 { 4 } else { 2 };
    let bytes = part(view.bytes()?, expert, count * width)?;
    numbers(view.dtype(), bytes)
}

/// Returns the bytes of one expert, each of which has `len`.
fn part(bytes: &[u8], expert: usize, len: usize) -> Result<&[u8]> {
    let part = bytes.get(expert * len..).and_then(|rest| rest.get(..len));
    part.ok_or_else(|| {
        error!(
            InvalidArgument,
            "a quantized tensor has {} bytes, expected {len} for each expert",
            bytes.len()
        )
    })
}

impl Layer {
    /// Creates a layer of floats. Only constant `f32` weights are packed.
    pub(super) fn of_floats(cx: &mut CompileCx<'_>, index: usize) -> Result<Layer> {
        let Some(view) = cx.constant(index).filter(|view| view.dtype() == DType::F32) else {
            return Ok(Layer::Input);
        };
        let &[experts, outputs, inputs] = view.shape() else { return Ok(Layer::Input) };
        let size = element_count(&[outputs, inputs])?;
        // The tensor is [experts, outputs, inputs]. The strides give GEMM its [inputs, outputs].
        let pack = |expert: usize| PackedWeight::new(cx, view, expert * size, [inputs, outputs], [1, inputs]);
        let packed = (0..experts).map(pack).collect::<Result<Vec<PackedWeight>>>()?;
        cx.consume(index);
        Ok(Layer::Packed(packed, [experts, outputs, inputs]))
    }

    /// Returns the experts, outputs and inputs, given the shape of the weights.
    pub(super) fn shape(&self, weights: Option<&[usize]>) -> Result<[usize; 3]> {
        match (self, weights) {
            (Layer::Packed(_, shape), _) => Ok(*shape),
            (Layer::Input, Some(&[experts, outputs, inputs])) => Ok([experts, outputs, inputs]),
            (Layer::Codes(codes), Some(&[experts, outputs, bytes])) => {
                Ok([experts, outputs, bytes.saturating_mul(8 / codes.bits)])
            }
            (_, other) => Err(error!(InvalidArgument, "weights have shape {other:?}, expected rank 3")),
        }
    }

    /// Returns the `f32` elements of scratch of products of up to `rows` rows: those of
    /// [`LayerMemory::weights`], and those of [`LayerMemory::product`].
    pub(super) fn scratch_lens(
        &self,
        cpu: Cpu,
        rows: usize,
        [outputs, inputs]: [usize; 2],
        is_single: bool,
    ) -> Result<[usize; 2]> {
        let of_gemm =
            |source: RhsSource| move |rows: usize| workspace_len(cpu, 1, [rows, outputs, inputs], source);
        // A GEMM with fewer rows may use another blocking, so we take the maximum over all row
        // counts.
        let most = |len: &dyn Fn(usize) -> usize| (1..=rows).map(len).max().unwrap_or(0);
        let all = element_count(&[outputs, inputs])?;
        Ok(match self {
            Layer::Packed(..) => [0, most(&of_gemm(RhsSource::Packed))],
            Layer::Input => [if is_single { 0 } else { all }, most(&of_gemm(RhsSource::Strided))],
            Layer::Codes(codes) => match codes.reading(inputs) {
                Reading::Blocks(product) => {
                    let blocks = all / product.layout.block;
                    let parameters = if codes.block.is_some() { 0 } else { 2 * blocks };
                    [parameters, most(&|rows| product.scratch_len(cpu, [rows, outputs, inputs]))]
                }
                Reading::Floats => [all, most(&of_gemm(RhsSource::Strided))],
            },
        })
    }

    /// Multiplies rows with the weights of an expert, and adds its bias.
    pub(super) fn multiply(
        &self,
        cx: &RunCx<'_>,
        of: ExpertLayer,
        from: &[f32],
        to: &mut [f32],
        memory: LayerMemory<'_>,
    ) -> Result<()> {
        let ExpertLayer { inputs: indices, shape: [outputs, inputs], experts, expert, rows } = of;
        let LayerMemory { weights, bias, product } = memory;
        // All scratch was sized for the same number of threads.
        let cpu = Cpu::with_threads(cx.threads());
        let bias = match cx.find_input(indices.bias) {
            None => None,
            Some(view) => {
                let (shape, expected) = (view.shape(), [experts, outputs]);
                ensure!(
                    *shape == expected,
                    InvalidArgument,
                    "a bias has shape {shape:?}, expected {expected:?}"
                );
                Some(floats(cpu.threads, view, expert * outputs, outputs, bias)?)
            }
        };
        let (from, to) = (&from[..rows * inputs], &mut to[..rows * outputs]);
        let size = outputs * inputs;
        let plain = |weights| {
            let weights = Strided::new(weights, [inputs, outputs], [1, inputs]).map_err(refused)?;
            Ok::<_, ort_core::Error>(RhsOperand::Plain(weights))
        };
        let rhs = match self {
            Layer::Packed(packed, _) => {
                let packed = packed.get(expert).ok_or_else(|| error!(Fail, "there is no expert {expert}"))?;
                packed.operand(cpu)?
            }
            Layer::Input => {
                plain(floats(cpu.threads, cx.input(indices.weights)?, expert * size, size, weights)?)?
            }
            Layer::Codes(codes) => {
                let quantized = QuantizedExpert::new(cx, codes, &of)?;
                match codes.reading(inputs) {
                    Reading::Blocks(blocks) => {
                        let weights = quantized.blocks(blocks.layout, weights)?;
                        return blocks.run(cpu, from, weights, bias, (to, product));
                    }
                    Reading::Floats => plain(quantized.decode(weights)?)?,
                }
            }
        };
        let steps = bias.map(|bias| [Step::ColumnBias(bias)]);
        let lhs = LhsOperand::Plain(Strided::row_major(from, rows, inputs).map_err(refused)?);
        let gemm = Gemm { epilogue: steps.as_ref().map_or(&[], |steps| &steps[..]), ..Gemm::new(lhs, rhs) };
        gemm.run(cpu, to, outputs, product).map_err(refused)
    }
}

/// The quantized weights of one expert.
struct QuantizedExpert<'a> {
    codes: Codes,
    shape: [usize; 2],
    bytes: &'a [u8],
    scales: Numbers<'a>,
    zeros: Option<&'a [u8]>,
}

impl<'a> QuantizedExpert<'a> {
    fn new(cx: &RunCx<'a>, codes: &Codes, of: &ExpertLayer) -> Result<QuantizedExpert<'a>> {
        let ExpertLayer { inputs: indices, shape: [outputs, inputs], experts, expert, .. } = *of;
        let blocks = codes.block.map_or(1, |block| inputs / block);
        let count = element_count(&[outputs, blocks])?;
        let bytes = part(cx.input(indices.weights)?.bytes()?, expert, outputs * (inputs * codes.bits / 8))?;
        let scales = cx.input(indices.scales)?;
        ensure!(
            scales.element_count() == experts * count,
            InvalidArgument,
            "scales have shape {:?}, expected {count} for each of {experts} experts",
            scales.shape()
        );
        // Zero points of blocks start each row at a byte; one for each row follow each other.
        let zeros_len = match codes.block {
            Some(_) => outputs * (blocks * codes.bits).div_ceil(8),
            None => (outputs * codes.bits).div_ceil(8),
        };
        let zeros = match cx.find_input(indices.zeros) {
            Some(zeros) => Some(part(zeros.bytes()?, expert, zeros_len)?),
            None => None,
        };
        let scales = of_expert(scales, expert, count)?;
        Ok(QuantizedExpert { codes: *codes, shape: [outputs, inputs], bytes, scales, zeros })
    }

    fn middle(&self) -> f32 {
        (1_u32 << (self.codes.bits - 1)) as f32
    }

    /// The scale and zero point of a row that has one of each.
    fn of_row(&self, row: usize) -> [f32; 2] {
        let zero = self.zeros.map_or(self.middle(), |zeros| f32::from(code(self.codes.bits, zeros, row)));
        [self.scales.at(row), zero]
    }

    /// Returns the weights in blocks. If a row has one scale, `scratch` has it for each block.
    fn blocks<'s>(&self, layout: BlockLayout, scratch: &'s mut [f32]) -> Result<Blocks<'s>>
    where
        'a: 's,
    {
        let [outputs, inputs] = self.shape;
        let (scales, zeros) = match self.codes.block {
            Some(_) => (self.scales, self.zeros.map_or(Zeros::Middle, Zeros::Quantized)),
            None => {
                let blocks = inputs / layout.block;
                let mut rest = scratch;
                let scales = take(&mut rest, outputs * blocks)?;
                let zeros = take(&mut rest, outputs * blocks)?;
                let rows = scales.chunks_mut(blocks).zip(zeros.chunks_mut(blocks));
                for (row, (scales, zeros)) in spending(blocks, rows).enumerate() {
                    let [scale, zero] = self.of_row(row);
                    scales.fill(scale);
                    zeros.fill(zero);
                }
                let [scales, zeros] = [&*scales, &*zeros].map(|all| Numbers::F32(bytemuck::cast_slice(all)));
                (scales, Zeros::Numbers(zeros))
            }
        };
        Blocks::new(layout, [inputs, outputs], self.bytes, scales, zeros).map_err(refused)
    }

    /// Dequantizes all weights, whose rows have one scale each.
    fn decode<'s>(&self, scratch: &'s mut [f32]) -> Result<&'s [f32]> {
        let [outputs, inputs] = self.shape;
        let to = scratch.get_mut(..outputs * inputs);
        let to = to.ok_or_else(|| error!(Fail, "the workspace is too small"))?;
        for (row, to) in spending(inputs, to.chunks_mut(inputs.max(1))).enumerate() {
            let [scale, zero] = self.of_row(row);
            for (at, to) in to.iter_mut().enumerate() {
                *to = (f32::from(code(self.codes.bits, self.bytes, row * inputs + at)) - zero) * scale;
            }
        }
        Ok(to)
    }
}

/// Returns the code at an index of packed ones.
fn code(bits: usize, bytes: &[u8], index: usize) -> u8 {
    let byte = bytes.get(index * bits / 8).copied().unwrap_or(0);
    (byte >> (index * bits % 8)) & ((1_u32 << bits) - 1) as u8
}
