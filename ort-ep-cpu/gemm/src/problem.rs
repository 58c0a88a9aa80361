//! The problem descriptor of a GEMM: operands, scalars and epilogue.

use super::GemmError;
use super::epilogue::{Origin, Step};
use super::operand::{LhsOperand, RhsOperand};

/// One GEMM.
#[derive(Clone, Copy, Debug)]
pub struct Gemm<'a> {
    /// The left operand, M by K.
    pub lhs: LhsOperand<'a>,
    /// The right operand, K by N.
    pub rhs: RhsOperand<'a>,
    /// Scales the product `A * B`.
    pub alpha: f32,
    /// Scales the old C. If it is zero, C is only written and never read.
    pub beta: f32,
    /// Applied to each element once its accumulation is complete.
    pub epilogue: &'a [Step<'a>],
    /// Where this GEMM's first row is in the slices of the epilogue.
    pub origin: Origin,
}

impl<'a> Gemm<'a> {
    /// Creates the plain GEMM `lhs * rhs`.
    pub fn new(lhs: LhsOperand<'a>, rhs: RhsOperand<'a>) -> Self {
        Gemm { lhs, rhs, alpha: 1.0, beta: 0.0, epilogue: &[], origin: Origin::default() }
    }

    /// Returns M, N and K.
    ///
    /// # Errors
    ///
    /// If the operands differ in K.
    pub fn shape(&self) -> Result<[usize; 3], GemmError> {
        let ([m, k], [rows, n]) = (self.lhs.shape(), self.rhs.shape());
        if k != rows {
            return Err(GemmError::Shape("A has a different number of columns than B has rows"));
        }
        Ok([m, n, k])
    }
}

/// The results of a batch of GEMMs of one shape, at equal distances in one slice.
#[derive(Debug)]
pub struct Batch<'a> {
    /// Holds all results.
    pub values: &'a mut [f32],
    /// The number of results.
    pub count: usize,
    /// Stride from one row to the next.
    pub row_stride: usize,
    /// Stride from one result to the next.
    pub batch_stride: usize,
}
