//! The two types that kernels compute in: `float` with SIMD, and `double` with plain loops.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as"
)]

use ort_core::Result;
use ort_core::dtype::Element;

pub use crate::matrix::{GemmTarget, Matrix};
use crate::packed_weight::PackedWeight;
use crate::quantized_gemm::QuantizedRhs;
use crate::refused;
use ort_cpu_gemm::generic::{self, Number, View};
use ort_cpu_gemm::{Cpu, Gemm, LhsOperand, RhsOperand, RhsSource, Strided, workspace_len};
use ort_cpu_threads::interrupt::{PIECE, pieces, pieces_mut, spend, spending};
use ort_cpu_vector::elementwise::{Unary, unary_in_place};
use ort_cpu_vector::simd::Isa;
use ort_cpu_vector::softmax::{Softmax, softmax_row_in_place};

/// The right side of a GEMM.
#[derive(Clone, Copy)]
pub enum Rhs<'a, T> {
    /// A matrix that is not packed.
    Plain(Matrix<'a, T>),
    /// A packed weight, for `float` only.
    Packed(&'a PackedWeight),
    /// An 8-bit quantized weight, for `float` only. The left side is quantized dynamically.
    Quantized(QuantizedRhs<'a>),
}

/// A type to compute in.
pub trait Real:
    Element + bytemuck::Pod + Number + PartialOrd + std::ops::Add<Output = Self> + std::ops::Mul<Output = Self>
{
    /// Rounds to the type.
    fn from_f64(value: f64) -> Self;
    /// Converts to `f64`.
    fn to_f64(self) -> f64;
    /// Computes `values[i] = function(values[i])`.
    fn map(function: Unary, values: &mut [Self]);
    /// Computes `values[i] *= factor`, with the factor rounded to the type.
    fn scale(factor: f64, values: &mut [Self]);
    /// Computes `values[i] /= divisor`.
    fn divide(values: &mut [Self], divisor: f32);
    /// Returns `1 / sqrt(count)`, rounded to the type.
    fn inverse_root(count: usize) -> f64;
    /// Computes the softmax of a row in place.
    fn softmax(row: &mut [Self]);
    /// Returns the workspace in values that [`Real::multiply`] needs for a shape (rows, columns,
    /// k).
    fn workspace_len(cpu: Cpu, shape: [usize; 3], source: RhsSource) -> usize;
    /// Computes the GEMM `lhs * rhs`.
    fn multiply(
        cpu: Cpu,
        lhs: Matrix<'_, Self>,
        rhs: Rhs<'_, Self>,
        target: GemmTarget<'_, Self>,
        workspace: &mut [Self],
    ) -> Result<()>;
}

impl Real for f32 {
    #[inline]
    fn from_f64(value: f64) -> f32 {
        value as f32
    }

    fn to_f64(self) -> f64 {
        f64::from(self)
    }

    fn map(function: Unary, values: &mut [f32]) {
        pieces_mut(values).for_each(|piece| unary_in_place(Isa::current(), function, piece));
    }

    fn scale(factor: f64, values: &mut [f32]) {
        Self::map(Unary::Affine { scale: factor as f32, shift: 0.0 }, values);
    }

    fn divide(values: &mut [f32], divisor: f32) {
        // One division for all values; a product with the inverse is within one rounding of the
        // quotient.
        Self::map(Unary::Affine { scale: 1.0 / divisor, shift: 0.0 }, values);
    }

    fn inverse_root(count: usize) -> f64 {
        f64::from(1.0 / (count as f32).sqrt())
    }

    fn softmax(row: &mut [f32]) {
        softmax_row_in_place(Isa::current(), Softmax::Linear, row);
    }

    fn workspace_len(cpu: Cpu, shape: [usize; 3], source: RhsSource) -> usize {
        workspace_len(cpu, 1, shape, source)
    }

    fn multiply(
        cpu: Cpu,
        lhs: Matrix<'_, f32>,
        rhs: Rhs<'_, f32>,
        target: GemmTarget<'_, f32>,
        workspace: &mut [f32],
    ) -> Result<()> {
        let rhs = match rhs {
            Rhs::Plain(rhs) => RhsOperand::Plain(strided(rhs)?),
            Rhs::Packed(packed) => packed.operand(cpu)?,
            Rhs::Quantized(weights) => return weights.multiply(cpu, lhs, target, workspace),
        };
        // With a beta of 0 the GEMM never reads the old values, which may be uninitialized scratch.
        let beta = if target.add { 1.0 } else { 0.0 };
        let lhs = LhsOperand::Plain(strided(lhs)?);
        let gemm = Gemm { beta, ..Gemm::new(lhs, rhs) };
        gemm.run(cpu, target.values, target.row_stride, workspace).map_err(refused)
    }
}

fn strided(matrix: Matrix<'_, f32>) -> Result<Strided<'_>> {
    Strided::new(matrix.values, matrix.shape, matrix.strides).map_err(refused)
}

impl Real for f64 {
    #[inline]
    fn from_f64(value: f64) -> f64 {
        value
    }

    fn to_f64(self) -> f64 {
        self
    }

    fn map(function: Unary, values: &mut [f64]) {
        pieces_mut(values).flatten().for_each(|value| *value = evaluate(function, *value));
    }

    fn scale(factor: f64, values: &mut [f64]) {
        pieces_mut(values).flatten().for_each(|value| *value *= factor);
    }

    fn divide(values: &mut [f64], divisor: f32) {
        pieces_mut(values).flatten().for_each(|value| *value /= f64::from(divisor));
    }

    fn inverse_root(count: usize) -> f64 {
        1.0 / (count as f64).sqrt()
    }

    fn softmax(row: &mut [f64]) {
        spend(8 * row.len().min(PIECE));
        // `f64::max` drops NaN, but `exp(NaN - max)` brings it back for the whole row.
        let max = pieces(row).flatten().copied().fold(f64::NEG_INFINITY, f64::max);
        pieces_mut(row).flatten().for_each(|value| *value = (*value - max).exp());
        let sum: f64 = pieces(row).flatten().sum();
        pieces_mut(row).flatten().for_each(|value| *value /= sum);
    }

    fn workspace_len(_: Cpu, [rows, columns, _]: [usize; 3], _: RhsSource) -> usize {
        rows * columns
    }

    fn multiply(
        cpu: Cpu,
        lhs: Matrix<'_, f64>,
        rhs: Rhs<'_, f64>,
        target: GemmTarget<'_, f64>,
        workspace: &mut [f64],
    ) -> Result<()> {
        let Rhs::Plain(rhs) = rhs else {
            return Err(ort_core::error!(Fail, "packed and quantized weights are of float"));
        };
        let GemmTarget { values: result, row_stride, add } = target;
        let lhs = View::new(lhs.values, lhs.shape, lhs.strides).map_err(refused)?;
        let rhs = View::new(rhs.values, rhs.shape, rhs.strides).map_err(refused)?;
        let (rows, columns) = (lhs.shape()[0], rhs.shape()[1]);
        // The generic GEMM writes contiguous rows, so the result goes through the workspace.
        let product = workspace
            .get_mut(..rows * columns)
            .ok_or_else(|| ort_core::error!(Fail, "the workspace is too small"))?;
        generic::multiply(cpu, lhs, rhs, product).map_err(refused)?;
        if columns == 0 {
            return Ok(());
        }
        for (row, product) in spending(4 + columns / 4, product.chunks(columns)).enumerate() {
            let to = result.get_mut(row * row_stride..).and_then(|rest| rest.get_mut(..columns));
            let to = to.ok_or_else(|| ort_core::error!(Fail, "a result is too short"))?;
            match add {
                true => to.iter_mut().zip(product).for_each(|(to, value)| *to += value),
                false => to.copy_from_slice(product),
            }
        }
        Ok(())
    }
}

/// Evaluates the functions of recurrent layers and attention in double precision.
fn evaluate(function: Unary, x: f64) -> f64 {
    let wide = f64::from;
    match function {
        Unary::Relu => x.max(0.0),
        Unary::Tanh => x.tanh(),
        Unary::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        // Parameters are `f32` attributes; widening them is exact.
        Unary::Affine { scale, shift } => wide(scale) * x + wide(shift),
        Unary::LeakyRelu { alpha } => {
            if x >= 0.0 {
                x
            } else {
                wide(alpha) * x
            }
        }
        Unary::ThresholdedRelu { alpha } => {
            if x >= wide(alpha) {
                x
            } else {
                0.0
            }
        }
        Unary::HardSigmoid { alpha, beta } => (wide(alpha) * x + wide(beta)).clamp(0.0, 1.0),
        Unary::Elu { alpha } => {
            if x >= 0.0 {
                x
            } else {
                wide(alpha) * x.exp_m1()
            }
        }
        Unary::Softsign => x / (1.0 + x.abs()),
        // `exp` of a large number would overflow; this form takes only that of a negative one.
        Unary::Softplus => x.max(0.0) + (-x.abs()).exp().ln_1p(),
        Unary::Clip { min, max } => x.clamp(wide(min), wide(max)),
        Unary::Silu => x / (1.0 + (-x).exp()),
        Unary::Exp => x.exp(),
        // No kernel in double precision asks for other functions. NaN would show a mistake in every
        // test.
        _ => f64::NAN,
    }
}
