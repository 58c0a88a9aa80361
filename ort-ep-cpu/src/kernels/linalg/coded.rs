//! Products with a right side of 8-bit codes, for which the left side is quantized on the way.

use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error};

use super::real::Matrix;
use super::refused;
use crate::gemm::Cpu;
use crate::gemm::generic::View;
use crate::gemm::integer::{self, ZeroPoints};
use crate::kernels::quant::dynamic_quantize::ByteCodes;

/// Codes of either sign.
#[derive(Clone, Copy)]
pub(crate) enum Codes<'a> {
    Unsigned(&'a [u8]),
    Signed(&'a [i8]),
}

impl<'a> Codes<'a> {
    pub(crate) fn new(view: TensorView<'a>) -> Result<Codes<'a>> {
        match view.dtype() {
            ort_core::dtype::DType::I8 => view.as_slice().map(Codes::Signed),
            _ => view.as_slice().map(Codes::Unsigned),
        }
    }
}

/// Matrices `[k, columns]` of codes one after the other, each with its scales and zero points.
pub(crate) struct CodedWeights<'a> {
    codes: Codes<'a>,
    shape: [usize; 2],
    scales: &'a [f32],
    zeros: Vec<i32>,
    count: usize,
}

impl<'a> CodedWeights<'a> {
    /// Weights of shape `[count, k, columns]`, with scales and zero points of shape `[count]` or `[count, columns]`.
    pub(crate) fn new(
        weights: TensorView<'a>,
        expected: [usize; 3],
        scales: TensorView<'a>,
        zeros: TensorView<'a>,
    ) -> Result<CodedWeights<'a>> {
        let [count, k, columns] = expected;
        ensure!(
            weights.shape() == expected,
            InvalidArgument,
            "weights of shape {:?}, expected {expected:?}",
            weights.shape()
        );
        for (what, shape) in [("scales", scales.shape()), ("zero points", zeros.shape())] {
            ensure!(
                shape == [count] || shape == [count, columns],
                InvalidArgument,
                "{what} of shape {shape:?}, expected [{count}] or [{count}, {columns}]"
            );
        }
        let zeros = zeros.to_ints()?.into_iter().map(|zero| zero as i32).collect();
        Ok(CodedWeights {
            codes: Codes::new(weights)?,
            shape: [k, columns],
            scales: scales.as_slice()?,
            zeros,
            count,
        })
    }

    /// The matrix at `index`.
    pub(crate) fn at(&self, index: usize) -> CodedRight<'_> {
        let len = self.shape[0] * self.shape[1];
        let (scales, zeros) = (self.scales.len() / self.count, self.zeros.len() / self.count);
        let codes = match self.codes {
            Codes::Unsigned(codes) => Codes::Unsigned(&codes[index * len..][..len]),
            Codes::Signed(codes) => Codes::Signed(&codes[index * len..][..len]),
        };
        CodedRight {
            codes,
            shape: self.shape,
            scales: &self.scales[index * scales..][..scales],
            zeros: &self.zeros[index * zeros..][..zeros],
        }
    }
}

/// One matrix of codes; scales and zero points are one, or one for each column.
#[derive(Clone, Copy)]
pub(crate) struct CodedRight<'a> {
    codes: Codes<'a>,
    shape: [usize; 2],
    scales: &'a [f32],
    zeros: &'a [i32],
}

/// Numbers of workspace for the codes of the left side, whole lines of the cache.
fn codes_len(rows: usize, k: usize) -> usize {
    rows.saturating_mul(k).div_ceil(size_of::<f32>()).next_multiple_of(16)
}

impl CodedRight<'_> {
    /// Numbers of workspace for a product of a shape (rows, columns, length of the sums).
    pub(crate) fn workspace_len([rows, columns, k]: [usize; 3]) -> usize {
        codes_len(rows, k).saturating_add(rows.saturating_mul(columns))
    }

    /// `result = a * b`, or `result + a * b` where `add`, with `a`, which lies row by row, as codes that cover its
    /// whole range. The rows of `result` lie `row_stride` apart.
    pub(crate) fn multiply(
        &self,
        cpu: Cpu,
        a: Matrix<'_, f32>,
        (result, row_stride, add): (&mut [f32], usize, bool),
        workspace: &mut [f32],
    ) -> Result<()> {
        let ([rows, k], columns) = (a.shape, self.shape[1]);
        let too_small = || error!(Fail, "the workspace is too small");
        let values = a.values.get(..rows * k).filter(|_| a.strides == [k, 1]);
        let values = values.ok_or_else(|| error!(Fail, "a left side of codes does not lie row by row"))?;
        let (codes, rest) = workspace.split_at_mut_checked(codes_len(rows, k)).ok_or_else(too_small)?;
        let sums = rest.get_mut(..rows * columns).ok_or_else(too_small)?;
        let codes: &mut [u8] = &mut bytemuck::cast_slice_mut(codes)[..rows * k];
        let sums: &mut [i32] = bytemuck::cast_slice_mut(sums);
        let quantized = ByteCodes::covering(cpu.isa, values);
        quantized.encode(cpu.isa, cpu.threads, values, codes);
        let zero = [quantized.zero as i32];
        let left = (View::new(codes, [rows, k], [k, 1]).map_err(refused)?, ZeroPoints::new(&zero));
        let zeros = ZeroPoints::new(self.zeros);
        match self.codes {
            Codes::Unsigned(codes) => {
                let right = View::new(codes, self.shape, [columns, 1]).map_err(refused)?;
                integer::multiply(cpu, left, (right, zeros), sums)
            }
            Codes::Signed(codes) => {
                let right = View::new(codes, self.shape, [columns, 1]).map_err(refused)?;
                integer::multiply(cpu, left, (right, zeros), sums)
            }
        }
        .map_err(refused)?;
        for (row, sums) in sums.chunks(columns.max(1)).enumerate() {
            let to = result.get_mut(row * row_stride..).and_then(|rest| rest.get_mut(..columns));
            let to = to.ok_or_else(|| error!(Fail, "a result is too short"))?;
            for (column, (to, sum)) in to.iter_mut().zip(sums).enumerate() {
                let scale = if let [scale] = self.scales { *scale } else { self.scales[column] };
                let product = *sum as f32 * (quantized.scale * scale);
                *to = if add { *to + product } else { product };
            }
        }
        Ok(())
    }
}
