//! What happens to a tile of the product before it is left: a list of steps.

use super::kernels::Ending;
use super::operand::check_extent;
use super::{GemmError, Origin};

/// An activation that needs only a few instructions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `max(x, 0)`.
    Relu,
    /// `min(max(x, min), max)`.
    Clip {
        /// The least result.
        min: f32,
        /// The greatest result.
        max: f32,
    },
    /// `x` where positive, else `alpha * x`.
    LeakyRelu {
        /// The slope on the negative side.
        alpha: f32,
    },
    /// `min(max(alpha * x + beta, 0), 1)`.
    HardSigmoid {
        /// The slope.
        alpha: f32,
        /// The value at zero.
        beta: f32,
    },
    /// `x * HardSigmoid(x)` with slope 1/6 and offset 1/2.
    HardSwish,
}

impl Activation {
    fn ending(self) -> Ending {
        match self {
            Activation::Relu => Ending::Clip { low: 0.0, high: f32::INFINITY },
            Activation::Clip { min, max } => Ending::Clip { low: min, high: max },
            Activation::LeakyRelu { alpha } => Ending::LeakyRelu { slope: alpha },
            Activation::HardSigmoid { alpha, beta } => Ending::HardSigmoid { slope: alpha, offset: beta },
            Activation::HardSwish => Ending::HardSwish,
        }
    }
}

/// One step, applied to every element of the result. Steps run in the order they are listed.
///
/// Lists that keep to the order row bias, column bias, residual, activation run in registers; what
/// follows the first step out of that order runs on the finished tile in the nearest cache.
#[derive(Clone, Copy, Debug)]
pub enum Step<'a> {
    /// Adds one value per row.
    RowBias(&'a [f32]),
    /// Adds one value per column.
    ColumnBias(&'a [f32]),
    /// Adds a matrix of the size of the result.
    Residual {
        /// The matrix, from its first element on.
        values: &'a [f32],
        /// From one row to the next.
        row_stride: usize,
    },
    /// Multiplies by a number.
    Scale(f32),
    /// Applies an activation.
    Activate(Activation),
    /// Applies any function of single elements to runs of the result: erf, exp, tanh.
    Map(fn(&mut [f32])),
}

/// A list of steps, sorted into what a kernel does in registers and the rest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Finish<'a> {
    pub(super) row_bias: Option<&'a [f32]>,
    pub(super) column_bias: Option<&'a [f32]>,
    pub(super) residual: Option<(&'a [f32], usize)>,
    pub(super) ending: Ending,
    pub(super) rest: &'a [Step<'a>],
}

impl<'a> Finish<'a> {
    /// Sorts `steps`, after checking their lengths against a result of `rows` by `columns`.
    pub(super) fn new(
        steps: &'a [Step<'a>],
        origin: Origin,
        rows: usize,
        columns: usize,
    ) -> Result<Self, GemmError> {
        check(steps, [origin.bias_row + rows, origin.residual_row + rows, columns])?;
        let mut finish =
            Finish { row_bias: None, column_bias: None, residual: None, ending: Ending::None, rest: steps };
        // How far in the fixed order the list has come.
        let mut stage = 0;
        while let [step, rest @ ..] = finish.rest {
            match *step {
                Step::RowBias(values) if stage < 1 => {
                    (finish.row_bias, stage) = (Some(&values[origin.bias_row..]), 1);
                }
                Step::ColumnBias(values) if stage < 2 => (finish.column_bias, stage) = (Some(values), 2),
                Step::Residual { values, row_stride } if stage < 3 => {
                    let first = (origin.residual_row * row_stride).min(values.len());
                    (finish.residual, stage) = (Some((&values[first..], row_stride)), 3);
                }
                Step::Activate(activation) if stage < 4 => {
                    (finish.ending, stage) = (activation.ending(), 4);
                }
                _ => break,
            }
            finish.rest = rest;
        }
        Ok(finish)
    }
}

/// Checks the slices of `steps` against the rows of a bias, the rows of a residual, and the columns.
pub(crate) fn check(steps: &[Step], [bias, residual, columns]: [usize; 3]) -> Result<(), GemmError> {
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
            Step::Scale(_) | Step::Activate(_) | Step::Map(_) => {}
        }
    }
    Ok(())
}

/// Applies `steps` to a run of row `row` that starts at column `column`.
pub(crate) fn apply(steps: &[Step], origin: Origin, [row, column]: [usize; 2], values: &mut [f32]) {
    for step in steps {
        match *step {
            Step::RowBias(bias) => values.iter_mut().for_each(|value| *value += bias[origin.bias_row + row]),
            Step::ColumnBias(bias) => add(values, &bias[column..]),
            Step::Residual { values: residual, row_stride } => {
                add(values, &residual[(origin.residual_row + row) * row_stride + column..]);
            }
            Step::Scale(factor) => values.iter_mut().for_each(|value| *value *= factor),
            Step::Activate(activation) => activate(activation, values),
            Step::Map(map) => map(values),
        }
    }
}

fn add(values: &mut [f32], other: &[f32]) {
    values.iter_mut().zip(other).for_each(|(value, other)| *value += other);
}

fn activate(activation: Activation, values: &mut [f32]) {
    /// Keeps NaN, which `f32::clamp` does and `f32::max` does not; bounds may be in any order.
    fn clip(value: f32, min: f32, max: f32) -> f32 {
        let raised = if value < min { min } else { value };
        if raised > max { max } else { raised }
    }
    fn each(values: &mut [f32], f: impl Fn(f32) -> f32) {
        values.iter_mut().for_each(|value| *value = f(*value));
    }
    match activation {
        Activation::Relu => each(values, |value| clip(value, 0.0, f32::INFINITY)),
        Activation::Clip { min, max } => each(values, |value| clip(value, min, max)),
        Activation::LeakyRelu { alpha } => {
            each(values, |value| if value < 0.0 { alpha * value } else { value });
        }
        Activation::HardSigmoid { alpha, beta } => each(values, |value| clip(alpha * value + beta, 0.0, 1.0)),
        Activation::HardSwish => each(values, |value| value * clip(value / 6.0 + 0.5, 0.0, 1.0)),
    }
}
