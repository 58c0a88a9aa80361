//! The `Adafactor` optimizer, in the form of `torch.optim`.
//!
//! Shazeer & Stern, Adaptive Learning Rates with Sublinear Memory Cost, 2018. For matrices it keeps
//! only the row and column means of the squared gradients.

use super::step::{
    GRADIENT, LEARNING_RATE, PARAMETER, POSITIVE, SCALE, STEP, StepPen, TYPES, UPDATE, check_range,
    check_shape, infer_step,
};
use crate::dim::Dim;
use crate::dtype::DType;
use crate::ir::{Attributes, ValueId};
use crate::ops;
use crate::spec::{Draft, InferCx, OP, OpSpec, Param, RUNTIME, attr, opt};
use crate::{Result, ensure, error};

const INPUTS: &[Param] = &[
    PARAMETER,
    GRADIENT,
    LEARNING_RATE,
    SCALE,
    UPDATE,
    STEP,
    opt("row_moment", "T"),
    opt("column_moment", "T"),
    opt("second_moment", "T"),
];
const ROW: usize = 6;
const COLUMN: usize = 7;
const SECOND: usize = 8;

static ADAFACTOR: OpSpec = OpSpec {
    domain: RUNTIME,
    name: "Adafactor",
    inputs: INPUTS,
    outputs: &[PARAMETER, opt("row_moment", "T"), opt("column_moment", "T"), opt("second_moment", "T")],
    types: TYPES,
    attrs: &[
        attr::float("beta2_decay", -0.8),
        attr::float("epsilon1", 0.0),
        attr::float("epsilon2", 1e-3),
        attr::float("clip_threshold", 1.0),
        attr::float("weight_decay", 0.0),
    ],
    infer,
    lower: Some(lower),
    ..OP
};

ops![ADAFACTOR];

/// The matrices of a parameter, whose second moments `Adafactor` factors into rows and columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FactoredShape {
    /// The number of matrices.
    pub matrices: usize,
    /// The rows of each.
    pub rows: usize,
    /// The columns of each.
    pub columns: usize,
    /// Whether the rank is 2 or more. If not, the parameter is one row, whose moments are kept
    /// whole.
    pub is_matrix: bool,
}

impl FactoredShape {
    /// Returns the matrices of a parameter: its last two dimensions.
    pub fn of(shape: &[usize]) -> FactoredShape {
        match *shape {
            [ref outer @ .., rows, columns] => {
                FactoredShape { matrices: outer.iter().product(), rows, columns, is_matrix: true }
            }
            _ => FactoredShape { matrices: 1, rows: 1, columns: shape.iter().product(), is_matrix: false },
        }
    }
}

/// Returns the lower bound of the mean square: `epsilon1`, or the machine epsilon of the
/// parameter's type if that is 0.
///
/// # Errors
///
/// If there is no such attribute.
pub fn adafactor_epsilon(attrs: &Attributes, dtype: DType) -> Result<f64> {
    let given = attrs.decimal("epsilon1")?;
    Ok(match (given == 0.0, dtype) {
        (false, _) => given,
        (true, DType::F64) => f64::EPSILON,
        (true, _) => f64::from(f32::EPSILON),
    })
}

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    for name in ["epsilon1", "epsilon2", "weight_decay"] {
        check_range(cx.attrs, name, POSITIVE)?;
    }
    let (decay, threshold) = (cx.attrs.float("beta2_decay")?, cx.attrs.float("clip_threshold")?);
    let (falls, clips) = (decay <= 0.0, threshold > 0.0);
    ensure!(falls, InvalidGraph, "attribute 'beta2_decay' is {decay}, expected 0 or less");
    ensure!(clips, InvalidGraph, "attribute 'clip_threshold' is {threshold}, expected more than 0");
    infer_step(cx, INPUTS, &[ROW, COLUMN, SECOND])?;
    let Some(shape) = cx.shape(0).map(<[Dim]>::to_vec) else {
        return Err(error!(
            InvalidGraph,
            "the rank of the parameter is not known, and its states depend on it"
        ));
    };
    let given = [ROW, COLUMN, SECOND].map(|index| cx.has_input(index));
    // Only matrices factor into rows and columns; scalars and vectors keep the whole second moment.
    match shape.len() {
        0 | 1 => {
            ensure!(given == [false, false, true], InvalidGraph, "{}", states(shape.len(), given));
            check_shape(cx, SECOND, "second_moment", &shape, "of the parameter")
        }
        rank => {
            ensure!(given == [true, true, false], InvalidGraph, "{}", states(rank, given));
            let reduced = |axis: usize| {
                let size =
                    |(at, size): (usize, &Dim)| if at == axis { Dim::constant(1) } else { size.clone() };
                shape.iter().enumerate().map(size).collect::<Vec<Dim>>()
            };
            check_shape(cx, ROW, "row_moment", &reduced(rank - 1), "of the parameter with a last size of 1")?;
            check_shape(
                cx,
                COLUMN,
                "column_moment",
                &reduced(rank - 2),
                "of the parameter with a last size but one of 1",
            )
        }
    }
}

/// The error message if the states do not match the rank.
fn states(rank: usize, given: [bool; 3]) -> String {
    let names = ["row_moment", "column_moment", "second_moment"];
    let given: Vec<&str> =
        names.into_iter().zip(given).filter(|(_, given)| *given).map(|(name, _)| name).collect();
    let expected = if rank < 2 { "second_moment alone" } else { "row_moment and column_moment" };
    format!("a parameter of rank {rank} has the states {expected}, got {given:?}")
}

fn lower(draft: &mut Draft<'_>) -> Result<()> {
    let mut pen = StepPen::new(draft)?;
    let (mut parameter, gradient) = (pen.draft.required(0)?, pen.gradient()?);
    let least = adafactor_epsilon(&pen.attrs, pen.dtype)?;
    let size = size(&mut pen, parameter)?;
    let decay = pen.attr("weight_decay")?;
    // Decoupled decay, before the update. The step size above is that of the undecayed parameter.
    if decay != 0.0 {
        parameter = pen.decayed(parameter, decay)?;
    }
    let (estimate, [row, column, second]) = estimate(&mut pen, gradient, least)?;
    // `torch.optim` clamps the estimate at the square of `epsilon1`.
    let bound = pen.number(least * least)?;
    let estimate = pen.op("Max", &[estimate, bound])?;
    let root = pen.op("Sqrt", &[estimate])?;
    let update = pen.op("Div", &[gradient, root])?;
    let (norm, threshold) = (pen.mean_root(update)?, pen.attr("clip_threshold")?);
    // Update clipping: the root mean square of the update is at most the threshold.
    let (one, threshold) = (pen.number_of(1.0, DType::F64)?, pen.number_of(threshold, DType::F64)?);
    let norm = pen.op("Div", &[norm, threshold])?;
    let norm = pen.op("Max", &[norm, one])?;
    let size = pen.op("Div", &[size, norm])?;
    let size = pen.narrow(size)?;
    let change = pen.op("Mul", &[size, update])?;
    let new = pen.op("Sub", &[parameter, change])?;
    pen.finish(&[(0, new), (ROW, row), (COLUMN, column), (SECOND, second)])
}

/// The step size, in doubles: the root mean square of the parameter, at least `epsilon2`, times the
/// learning rate, at most `1 / sqrt(step)`.
fn size(pen: &mut StepPen<'_, '_>, parameter: ValueId) -> Result<ValueId> {
    let least = pen.attr("epsilon2")?;
    let (norm, least) = (pen.mean_root(parameter)?, pen.number_of(least, DType::F64)?);
    let norm = pen.op("Max", &[norm, least])?;
    let step = pen.step()?;
    let (root, rate) = (pen.op("Sqrt", &[step])?, pen.rate()?);
    let bound = pen.op("Reciprocal", &[root])?;
    let rate = pen.op("Min", &[rate, bound])?;
    pen.op("Mul", &[norm, rate])
}

/// Returns the estimate of the second moment, and the new states. An absent state has another value
/// in its place, which nothing reads.
fn estimate(pen: &mut StepPen<'_, '_>, gradient: ValueId, least: f64) -> Result<(ValueId, [ValueId; 3])> {
    let power = pen.attr("beta2_decay")?;
    let (step, power) = (pen.step()?, pen.number_of(power, DType::F64)?);
    // The weight of the new squares, which is 1 in the first step.
    let weight = pen.op("Pow", &[step, power])?;
    let weight = pen.narrow(weight)?;
    let squares = pen.op("Mul", &[gradient, gradient])?;
    if let Some(old) = pen.draft.input(SECOND) {
        let second = nearer(pen, old, squares, weight)?;
        return Ok((second, [second; 3]));
    }
    let (row, column) = (pen.draft.required(ROW)?, pen.draft.required(COLUMN)?);
    let (rows, columns) = (pen.mean(squares, -1)?, pen.mean(squares, -2)?);
    let (row, column) = (nearer(pen, row, rows, weight)?, nearer(pen, column, columns, weight)?);
    // The rank-1 estimate: row times column over the mean of the rows.
    let (product, mean, least) = (pen.op("Mul", &[row, column])?, pen.mean(row, -2)?, pen.number(least)?);
    let mean = pen.op("Max", &[mean, least])?;
    let estimate = pen.op("Div", &[product, mean])?;
    Ok((estimate, [row, column, row]))
}

/// `from + weight * (to - from)`.
fn nearer(pen: &mut StepPen<'_, '_>, from: ValueId, to: ValueId, weight: ValueId) -> Result<ValueId> {
    let way = pen.op("Sub", &[to, from])?;
    let way = pen.op("Mul", &[weight, way])?;
    pen.op("Add", &[from, way])
}
