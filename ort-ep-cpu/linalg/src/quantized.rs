//! The quantized right side of `DequantizeMatMul` as an operand of GEMM.

use ort_core::dtype::DType;
use ort_core::ep::RunCx;
use ort_core::ops::quant::problem::{GranularityKind, Quantization};
use ort_core::ops::tensor::geometry::normalize_axis;
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error};

use ort_cpu_gemm::{Numbers, QuantizedMatrix, RhsOperand, Scales};
use ort_cpu_matmul::refused;
use ort_cpu_vector::simd::quantized_rows::QuantizedType;

/// The inputs that make the right side.
const MATRIX: usize = 1;
const SCALES: usize = 2;
const ZEROS: usize = 3;

/// Returns the right side of a run.
pub(crate) fn operand<'a>(
    cx: &RunCx<'a>,
    quantization: Quantization,
    transposed: bool,
) -> Result<RhsOperand<'a>> {
    let (matrix, scales) = (cx.input(MATRIX)?, cx.input(SCALES)?);
    let &[rows, columns] = matrix.shape() else {
        return Err(error!(InvalidArgument, "B has shape {:?}, expected a matrix", matrix.shape()));
    };
    let zeros = cx.find_input(ZEROS);
    if let Some(zeros) = &zeros {
        let fits = zeros.element_count() == scales.element_count();
        ensure!(fits, InvalidArgument, "there are not as many zero points as scales");
    }
    let kind = quantization.granularity(matrix.shape(), scales.shape())?.kind;
    let along_rows = match kind {
        GranularityKind::Tensor => true,
        _ => normalize_axis(quantization.axis, 2)? == 0,
    };
    // The elements of a block, and the scales from one block to the next, along both axes.
    let (mut block, mut strides) = match (kind, along_rows) {
        (GranularityKind::Tensor, _) => ([1, 1], [0, 0]),
        (GranularityKind::Axis, true) => ([1, 1], [1, 0]),
        (GranularityKind::Axis, false) => ([1, 1], [0, 1]),
        (GranularityKind::Blocks { size, .. }, true) => ([size, 1], [columns, 1]),
        (GranularityKind::Blocks { size, count }, false) => ([1, size], [count, 1]),
    };
    let mut shape = [rows, columns];
    if transposed {
        shape.reverse();
        block.reverse();
        strides.reverse();
    }
    let zeros = zeros.map(|zeros| zeros.bytes()).transpose()?;
    let scales = Scales { scales: numbers(scales)?, zeros, block, strides };
    let values = matrix.bytes()?;
    let matrix = QuantizedMatrix::new(type_of(matrix.dtype())?, shape, values, transposed, scales);
    Ok(RhsOperand::Quantized(matrix.map_err(refused)?))
}

fn type_of(dtype: DType) -> Result<QuantizedType> {
    let bits = dtype.bits().filter(|bits| dtype.is_integer() && matches!(bits, 2 | 4 | 8));
    let bits = bits.ok_or_else(|| error!(InvalidArgument, "a quantized matrix of type {dtype}"))?;
    Ok(QuantizedType { bits: bits as usize, signed: dtype.is_signed() })
}

fn numbers(view: TensorView<'_>) -> Result<Numbers<'_>> {
    match view.dtype() {
        DType::F32 => Ok(Numbers::F32(view.bytes()?)),
        DType::F16 => Ok(Numbers::F16(view.bytes()?)),
        DType::BF16 => Ok(Numbers::BF16(view.bytes()?)),
        other => Err(error!(InvalidArgument, "scales of type {other}, expected floats")),
    }
}
