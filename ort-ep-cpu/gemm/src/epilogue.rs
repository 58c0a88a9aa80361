//! The GEMM epilogue: a list of steps that finish each element of C.
//!
//! Steps in the usual order run on the register tile inside the micro-kernel. The rest run on the
//! finished block while it is in cache.

use super::GemmError;
use super::kernels::RegisterActivation;
use super::matrix::check_extent;
/// The function that a [`Step`] applies to each element.
pub use ort_cpu_vector::elementwise::Unary as Activation;
use ort_cpu_vector::elementwise::{Binary, Operand, binary_in_place, unary_in_place};
use ort_cpu_vector::simd::Isa;

/// Returns the activation as the micro-kernel evaluates it in registers, or `None` if it cannot.
pub(super) fn in_registers(activation: Activation) -> Option<RegisterActivation> {
    Some(match activation {
        Activation::Relu => RegisterActivation::Clip { low: 0.0, high: f32::INFINITY },
        Activation::Clip { min, max } => RegisterActivation::Clip { low: min, high: max },
        Activation::LeakyRelu { alpha } => RegisterActivation::LeakyRelu { slope: alpha },
        Activation::HardSigmoid { alpha, beta } => {
            RegisterActivation::HardSigmoid { slope: alpha, offset: beta }
        }
        Activation::HardSwish => RegisterActivation::HardSwish,
        Activation::Silu => RegisterActivation::Silu,
        _ => return None,
    })
}

/// One epilogue step, applied to every element of C. Steps run in list order.
///
/// Steps in the order row bias, column bias, residual (or the old C), activation run in registers.
/// The first step out of that order, and all that follow it, run on the finished block while it is
/// in a near cache. So does an activation of more than a few instructions.
#[derive(Clone, Copy, Debug)]
pub enum Step<'a> {
    /// Adds one value per row.
    RowBias(&'a [f32]),
    /// Adds one value per column.
    ColumnBias(&'a [f32]),
    /// Adds a matrix of the size of the result.
    Residual {
        /// The matrix, starting at its first element.
        values: &'a [f32],
        /// Stride from one row to the next.
        row_stride: usize,
    },
    /// Adds the old C in place; each element is read before it is written. Requires that all of k
    /// is one block (`STEPS`) and that A is packed.
    Held,
    /// Multiplies by a constant.
    Scale(f32),
    /// Applies a function to each element.
    Activate(Activation),
}

/// The position of a GEMM's first row in the slices that its epilogue names. It lets the GEMMs of a
/// batch share one list of steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// Index of the first row's bias.
    pub bias_row: usize,
    /// Rows of a residual before the first row.
    pub residual_row: usize,
}

/// An epilogue, split into what the micro-kernel does in registers and the rest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Finish<'a> {
    pub(super) row_bias: Option<&'a [f32]>,
    pub(super) column_bias: Option<&'a [f32]>,
    pub(super) residual: Option<(&'a [f32], usize)>,
    /// Whether the old C is the residual.
    pub(super) is_held: bool,
    pub(super) activation: RegisterActivation,
    pub(super) rest: &'a [Step<'a>],
}

impl<'a> Finish<'a> {
    /// Splits `steps`, after checking their slices against a result of `rows` by `columns`.
    pub(super) fn new(
        steps: &'a [Step<'a>],
        origin: Origin,
        rows: usize,
        columns: usize,
    ) -> Result<Self, GemmError> {
        // All slices are checked once per GEMM, so that tiles index them without checks of their
        // own.
        check_lengths(steps, [origin.bias_row + rows, origin.residual_row + rows, columns])?;
        let mut finish = Finish {
            row_bias: None,
            column_bias: None,
            residual: None,
            is_held: false,
            activation: RegisterActivation::None,
            rest: steps,
        };
        // The position in the fixed order of register steps.
        let mut stage = 0;
        while let [step, rest @ ..] = finish.rest {
            match *step {
                Step::RowBias(values) if stage < 1 => {
                    (finish.row_bias, stage) = (Some(&values[origin.bias_row..]), 1);
                }
                Step::ColumnBias(values) if stage < 2 => (finish.column_bias, stage) = (Some(values), 2),
                Step::Residual { values, row_stride } if stage < 3 => {
                    // An empty result may start beyond the end of its residual.
                    let first = (origin.residual_row * row_stride).min(values.len());
                    (finish.residual, stage) = (Some((&values[first..], row_stride)), 3);
                }
                Step::Held if stage < 3 => (finish.is_held, stage) = (true, 3),
                Step::Activate(activation) if stage < 4 => match in_registers(activation) {
                    Some(activation) => (finish.activation, stage) = (activation, 4),
                    None => break,
                },
                // Out of order: this step and all later ones run on the finished block.
                _ => break,
            }
            finish.rest = rest;
        }
        // Steps of the rest run after the store, when the old C is gone.
        refuse_held(finish.rest)?;
        Ok(finish)
    }
}

/// Whether an epilogue adds the old C.
pub(super) fn has_held(steps: &[Step]) -> bool {
    steps.iter().any(|step| matches!(step, Step::Held))
}

fn refuse_held(steps: &[Step]) -> Result<(), GemmError> {
    match has_held(steps) {
        true => Err(GemmError::Shape("what a result holds can only be added in registers")),
        false => Ok(()),
    }
}

/// Checks an epilogue that runs on finished results. `lengths` are the required rows of a bias,
/// rows of a residual, and columns.
pub fn check(steps: &[Step], lengths: [usize; 3]) -> Result<(), GemmError> {
    refuse_held(steps)?;
    check_lengths(steps, lengths)
}

/// Checks the slices of `steps` against the required rows of a bias, rows of a residual, and
/// columns.
fn check_lengths(steps: &[Step], [bias, residual, columns]: [usize; 3]) -> Result<(), GemmError> {
    let short = |what, needed, len| match len < needed {
        true => Err(GemmError::TooShort { what, needed, len }),
        false => Ok(()),
    };
    for step in steps {
        match step {
            Step::RowBias(values) => short("a row bias", bias, values.len())?,
            Step::ColumnBias(values) => short("a column bias", columns, values.len())?,
            Step::Residual { values, row_stride } => {
                check_extent("a residual", values.len(), [residual, columns], [*row_stride, 1])?;
            }
            Step::Held | Step::Scale(_) | Step::Activate(_) => {}
        }
    }
    Ok(())
}

/// Applies `steps` to a part of row `row` that starts at column `column`.
pub fn apply(steps: &[Step], origin: Origin, [row, column]: [usize; 2], values: &mut [f32]) {
    let isa = Isa::current();
    let len = values.len();
    for step in steps {
        let (function, operand) = match *step {
            Step::RowBias(bias) => (Binary::Add, Operand::Scalar(bias[origin.bias_row + row])),
            Step::ColumnBias(bias) => (Binary::Add, Operand::Slice(&bias[column..][..len])),
            Step::Residual { values, row_stride } => {
                let first = (origin.residual_row + row) * row_stride + column;
                (Binary::Add, Operand::Slice(&values[first..][..len]))
            }
            // `refuse_held` has already rejected it.
            Step::Held => continue,
            Step::Scale(factor) => (Binary::Mul, Operand::Scalar(factor)),
            Step::Activate(function) => {
                unary_in_place(isa, function, values);
                continue;
            }
        };
        binary_in_place(isa, function, values, operand);
    }
}
