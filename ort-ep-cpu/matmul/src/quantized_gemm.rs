//! GEMM with an 8-bit quantized right side.
//!
//! The right side is packed ahead or in the run. The left side is quantized dynamically.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as"
)]

use ort_core::dtype::DType;
use ort_core::ep::CompileCx;
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error};

use crate::matrix::{GemmTarget, Matrix};
use crate::refused;
use ort_cpu_gemm::Cpu;
use ort_cpu_gemm::integer::{
    Addend, Factors, PackedBytes, QuantizedLhs, QuantizedMatmul, Scaling, Target, multiply,
    multiply_workspace_len, pack_rhs, packed_rhs_len,
};
use ort_cpu_kernel::dynamic_quantize::ByteQuantizer;
use ort_cpu_kernel::packed::Packed;
use ort_cpu_kernel::workspace::take;

/// A constant quantized right side, packed.
pub struct PackedQuantized {
    bytes: Packed<u8>,
    unsigned: bool,
    /// Rows (k) and columns.
    pub shape: [usize; 2],
}

impl PackedQuantized {
    /// Packs a matrix of `shape` (k, columns) that starts at element `first` of a constant.
    pub fn new(
        cx: &mut CompileCx<'_>,
        view: TensorView<'_>,
        first: usize,
        shape: [usize; 2],
        strides: [usize; 2],
    ) -> Result<PackedQuantized> {
        let cpu = Cpu::with_threads(cx.threads);
        let unsigned = is_unsigned(view);
        let quantized =
            view.bytes()?.get(first..).ok_or_else(|| error!(InvalidGraph, "a weight is too short"))?;
        let len = packed_rhs_len(cpu, shape[0], shape[1]);
        let bytes = Packed::new(cx, len, |packed| {
            pack_rhs(cpu, (quantized, unsigned), shape, strides, packed).map_err(refused)
        })?;
        Ok(PackedQuantized { bytes, unsigned, shape })
    }

    /// Returns the packed matrix as an operand of GEMM.
    pub fn operand(&self, cpu: Cpu) -> Result<PackedBytes<'_>> {
        PackedBytes::new(cpu, (self.bytes.values(), self.unsigned), self.shape).map_err(refused)
    }
}

/// Returns whether quantized values are unsigned.
pub fn is_unsigned(view: TensorView<'_>) -> bool {
    view.dtype() == DType::U8
}

/// Quantized matrices as they are in memory, or packed ahead.
#[derive(Clone, Copy)]
enum QuantizedSource<'a> {
    Plain { bytes: &'a [u8], unsigned: bool },
    Packed(&'a [PackedQuantized]),
}

/// Quantized matrices `[k, columns]` one after another, each with its scales and zero points.
pub struct QuantizedWeights<'a> {
    quantized: QuantizedSource<'a>,
    shape: [usize; 2],
    scales: &'a [f32],
    zeros: Vec<i32>,
    count: usize,
}

impl<'a> QuantizedWeights<'a> {
    /// Creates weights of shape `[count, k, columns]`, with scales and zero points of shape
    /// `[count]` or `[count, columns]`.
    pub fn new(
        weights: TensorView<'a>,
        expected: [usize; 3],
        scales: TensorView<'a>,
        zeros: TensorView<'a>,
    ) -> Result<QuantizedWeights<'a>> {
        ensure!(
            weights.shape() == expected,
            InvalidArgument,
            "weights of shape {:?}, expected {expected:?}",
            weights.shape()
        );
        let quantized = QuantizedSource::Plain { bytes: weights.bytes()?, unsigned: is_unsigned(weights) };
        Self::with_values(quantized, expected, scales, zeros)
    }

    /// Like [`new`](Self::new), for packed weights.
    pub fn packed(
        weights: &'a [PackedQuantized],
        expected: [usize; 3],
        scales: TensorView<'a>,
        zeros: TensorView<'a>,
    ) -> Result<QuantizedWeights<'a>> {
        let [count, shape @ ..] = expected;
        let fits = weights.len() == count && weights.iter().all(|weights| weights.shape == shape);
        ensure!(fits, InvalidArgument, "packed weights are not of shape {expected:?}");
        Self::with_values(QuantizedSource::Packed(weights), expected, scales, zeros)
    }

    fn with_values(
        quantized: QuantizedSource<'a>,
        [count, k, columns]: [usize; 3],
        scales: TensorView<'a>,
        zeros: TensorView<'a>,
    ) -> Result<QuantizedWeights<'a>> {
        for (what, shape) in [("scales", scales.shape()), ("zero points", zeros.shape())] {
            ensure!(
                shape == [count] || shape == [count, columns],
                InvalidArgument,
                "{what} of shape {shape:?}, expected [{count}] or [{count}, {columns}]"
            );
        }
        // Zero points are bytes, so the cast is exact.
        let zeros = zeros.to_ints()?.into_iter().map(|zero| zero as i32).collect();
        Ok(QuantizedWeights { quantized, shape: [k, columns], scales: scales.as_slice()?, zeros, count })
    }

    /// Returns the matrix at `index`.
    pub fn at(&self, index: usize) -> QuantizedRhs<'_> {
        let len = self.shape[0] * self.shape[1];
        let (scales, zeros) = (self.scales.len() / self.count, self.zeros.len() / self.count);
        let quantized = match self.quantized {
            QuantizedSource::Plain { bytes, unsigned } => {
                QuantizedSource::Plain { bytes: &bytes[index * len..][..len], unsigned }
            }
            // A slice of one matrix, so that both kinds of source need one type only.
            QuantizedSource::Packed(packed) => QuantizedSource::Packed(&packed[index..=index]),
        };
        QuantizedRhs {
            quantized,
            shape: self.shape,
            scales: &self.scales[index * scales..][..scales],
            zeros: &self.zeros[index * zeros..][..zeros],
        }
    }
}

/// One quantized matrix, with one scale and zero point for all or for each column.
#[derive(Clone, Copy)]
pub struct QuantizedRhs<'a> {
    quantized: QuantizedSource<'a>,
    shape: [usize; 2],
    scales: &'a [f32],
    zeros: &'a [i32],
}

/// Returns the workspace in `f32` values for `count` quantized values, in whole cache lines.
pub fn quantized_len(count: usize) -> usize {
    // Workspaces are counted in `f32`, and each part starts at a cache line.
    count.div_ceil(size_of::<f32>()).next_multiple_of(16)
}

impl QuantizedRhs<'_> {
    /// Returns the workspace in values for a GEMM of this shape (rows, columns, k).
    pub fn workspace_len(cpu: Cpu, shape: [usize; 3], is_packed: bool) -> usize {
        let [rows, columns, k] = shape;
        let packed = if is_packed { 0 } else { quantized_len(packed_rhs_len(cpu, k, columns)) };
        let quantized = quantized_len(rows.saturating_mul(k));
        let of_matmul = multiply_workspace_len(shape, false);
        quantized.saturating_add(packed).saturating_add(columns).saturating_add(of_matmul)
    }

    /// Computes the GEMM `lhs * self`. The row-major `lhs` is quantized over its whole range.
    pub fn multiply(
        &self,
        cpu: Cpu,
        lhs: Matrix<'_, f32>,
        target: GemmTarget<'_, f32>,
        workspace: &mut [f32],
    ) -> Result<()> {
        let ([rows, k], columns) = (lhs.shape, self.shape[1]);
        let values = lhs.values.get(..rows * k).filter(|_| lhs.strides == [k, 1]);
        let values = values.ok_or_else(|| error!(Fail, "a quantized left side is not row-major"))?;
        let mut rest = workspace;
        let quantized: &mut [u8] = bytemuck::cast_slice_mut(take(&mut rest, quantized_len(rows * k))?);
        let quantized = &mut quantized[..rows * k];
        let rhs = match self.quantized {
            QuantizedSource::Packed([packed, ..]) => packed.operand(cpu)?,
            QuantizedSource::Packed([]) => return Err(error!(Fail, "there are no packed weights")),
            QuantizedSource::Plain { bytes, unsigned } => {
                let packed = take(&mut rest, quantized_len(packed_rhs_len(cpu, k, columns)))?;
                let packed: &mut [u8] = bytemuck::cast_slice_mut(packed);
                pack_rhs(cpu, (bytes, unsigned), self.shape, [columns, 1], packed).map_err(refused)?;
                PackedBytes::new(cpu, (packed, unsigned), self.shape).map_err(refused)?
            }
        };
        // One factor per column: the scale of the rows times that of the column.
        let factors = take(&mut rest, columns)?;
        // The range must be known before the first value can be quantized, so this reads `values`
        // twice.
        let quantizer = ByteQuantizer::covering(cpu.isa, cpu.threads, values);
        quantizer.encode(cpu.isa, cpu.threads, values, quantized);
        // A single zero point for all rows, because one range covers the whole left side.
        let zero = [quantizer.zero as i32];
        let lhs = QuantizedLhs { values: quantized, signed: false, rows, zeros: &zero };
        let factors = scaled(quantizer.scale, self.scales, factors);
        let GemmTarget { values, row_stride, add } = target;
        let addend = if add { Addend::Old } else { Addend::None };
        let target = Target::Numbers { values, scaling: Scaling { addend, ..Scaling::new(factors) } };
        let matmul = QuantizedMatmul { lhs, rhs, rhs_zeros: self.zeros, bias: &[] };
        multiply(cpu, &matmul, target, row_stride, bytemuck::cast_slice_mut(rest)).map_err(refused)
    }
}

/// Multiplies a scale with one scale, or with the scale of each column.
pub fn scaled<'a>(scale: f32, scales: &[f32], to: &'a mut [f32]) -> Factors<'a> {
    // A single factor needs no vector of factors, which the kernel would load for each column.
    if let [one] = scales {
        return Factors::One(scale * one);
    }
    to.iter_mut().zip(scales).for_each(|(to, other)| *to = scale * other);
    Factors::Columns(to)
}
