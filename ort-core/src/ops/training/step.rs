//! Shared parts of optimizer steps.
//!
//! Their common inputs, the shape checks, and [`StepPen`], which emits a step as standard
//! operators.
//!
//! One node updates one parameter. With the attribute `first_row` it updates as many rows of it,
//! parts along axis 0, as the gradient has. A float attribute is read as the decimal number that
//! was written ([`Attributes::decimal`]), because `1 - 0.999` from the float's digits would be 1e-5
//! off.

use super::super::microsoft::draft_attributes;
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::{Attribute, Attributes, ValueId};
use crate::spec::{AttrKind, AttrSpec, Draft, InferCx, Param, TypeVar, attr, one, opt, var};
use crate::tensor::Tensor;
use crate::{Result, ensure, error};

pub(super) const PARAMETER: Param = one("parameter", "T");
pub(super) const GRADIENT: Param = one("gradient", "G");
pub(super) const LEARNING_RATE: Param = one("learning_rate", "tensor(float)");
/// The factor that is applied to the gradient first; 1 if absent.
pub(super) const SCALE: Param = opt("scale", "tensor(float)");
/// Whether to update; if false, each output is bitwise equal to its input.
pub(super) const UPDATE: Param = opt("update", "tensor(bool)");
/// The number of this update, counted from 1.
pub(super) const STEP: Param = one("step", "tensor(int64)");

pub(super) const TYPES: &[TypeVar] =
    &[var("T", TypeSet::of(&[DType::F32, DType::F64])), var("G", TypeSet::FLOATS)];

/// The first row that the gradient covers, if it does not cover all; other rows stay unchanged.
pub(super) const FIRST_ROW: AttrSpec = attr::optional("first_row", AttrKind::Int);

/// Gives each output the type of its input and checks the shapes.
///
/// Fails if a scalar input has dimensions, if the gradient has another shape than the parameter, or
/// if an absent state has an output.
pub(super) fn infer_step(cx: &mut InferCx<'_>, params: &[Param], states: &[usize]) -> Result<()> {
    let scalar =
        |param: &Param| [LEARNING_RATE, SCALE, UPDATE, STEP].iter().any(|one| one.name == param.name);
    // Positions differ between optimizers, so the scalars are found by name.
    let named = params.iter().enumerate();
    for (index, param) in named.filter(|(_, param)| scalar(param)) {
        check_scalar(cx, index, param.name)?;
    }
    match cx.attrs.find_int(FIRST_ROW.name) {
        Some(first) => check_rows(cx, first)?,
        None => check_like_parameter(cx, 1, GRADIENT.name)?,
    }
    for (output, input) in std::iter::once(&0).chain(states).enumerate() {
        match cx.input_type(*input).cloned() {
            Some(ty) => cx.set_type(output, ty),
            None => refuse_output(cx, output, params.get(*input))?,
        }
    }
    Ok(())
}

/// Fails if the gradient does not cover rows of the parameter.
fn check_rows(cx: &InferCx<'_>, first: i64) -> Result<()> {
    ensure!(first >= 0, InvalidGraph, "attribute '{}' is {first}, expected 0 or more", FIRST_ROW.name);
    let (Some(parameter), Some(gradient)) = (cx.shape(0), cx.shape(1)) else { return Ok(()) };
    let (Some(all), Some(rows)) = (parameter.first(), gradient.first()) else {
        return Err(error!(InvalidGraph, "rows of a scalar").help("leave out the attribute 'first_row'"));
    };
    if let (Some(all), Some(rows)) = (all.as_constant(), rows.as_constant()) {
        ensure!(
            // A hostile `first_row` may be near `i64::MAX`.
            first.checked_add(rows).is_some_and(|end| end <= all),
            InvalidGraph,
            help = "the gradient is of rows of the parameter: parts along axis 0",
            "{rows} rows from row {first} on are out of range for {all} rows"
        );
    }
    let mut expected = parameter.to_vec();
    expected.iter_mut().take(1).for_each(|size| *size = rows.clone());
    check_shape(cx, 1, GRADIENT.name, &expected, "of rows of the parameter")
}

/// Fails if a state has another shape than the parameter.
pub(super) fn same_shapes(cx: &InferCx<'_>, params: &[Param], states: &[usize]) -> Result<()> {
    let mut states = params.iter().enumerate().filter(|(index, _)| states.contains(index));
    states.try_for_each(|(index, param)| check_like_parameter(cx, index, param.name))
}

/// Fails if the node has an output for a state that is not given.
pub(super) fn refuse_output(cx: &InferCx<'_>, output: usize, input: Option<&Param>) -> Result<()> {
    let name = input.map_or("state", |param| param.name);
    ensure!(
        !cx.has_output(output),
        InvalidGraph,
        help = format!("give the node the input '{name}', zeros at first"),
        "output {output} is the new '{name}', which is not given"
    );
    Ok(())
}

pub(super) fn check_scalar(cx: &InferCx<'_>, index: usize, name: &str) -> Result<()> {
    let Some(shape) = cx.shape(index) else { return Ok(()) };
    ensure!(
        shape.is_empty(),
        InvalidGraph,
        help = "give it as a tensor without dimensions",
        "{name} has shape {shape:?}, expected a scalar"
    );
    Ok(())
}

/// Fails if an input has another shape than the parameter.
pub(super) fn check_like_parameter(cx: &InferCx<'_>, index: usize, name: &str) -> Result<()> {
    let Some(parameter) = cx.shape(0) else { return Ok(()) };
    check_shape(cx, index, name, parameter, "of the parameter")
}

/// Fails if an input cannot have this shape.
pub(super) fn check_shape(
    cx: &InferCx<'_>,
    index: usize,
    name: &str,
    expected: &[Dim],
    whose: &str,
) -> Result<()> {
    let Some(shape) = cx.shape(index) else { return Ok(()) };
    let differ = |(one, other): (&Dim, &Dim)| matches!((one.as_constant(), other.as_constant()), (Some(one), Some(other)) if one != other);
    let fits = shape.len() == expected.len() && !shape.iter().zip(expected).any(differ);
    ensure!(
        fits,
        InvalidGraph,
        help = "each node updates one parameter: check that the tensors belong together",
        "{name} has shape {shape:?}, expected that {whose}, {expected:?}"
    );
    Ok(())
}

/// Fails if an attribute is outside `least..bound`.
pub(super) fn check_range(attrs: &Attributes, name: &str, (least, bound): (f32, f32)) -> Result<()> {
    let value = attrs.float(name)?;
    ensure!(
        value >= least && value < bound,
        InvalidGraph,
        "attribute '{name}' is {value}, expected {least} or more and less than {bound}"
    );
    Ok(())
}

/// The range of decay rates.
pub(super) const SHARE: (f32, f32) = (0.0, 1.0);
/// The range of non-negative attributes.
pub(super) const POSITIVE: (f32, f32) = (0.0, f32::INFINITY);

/// Emits a step as standard operators, in the parameter's type.
pub(super) struct StepPen<'d, 'g> {
    pub(super) draft: &'d mut Draft<'g>,
    pub(super) attrs: Attributes,
    pub(super) dtype: DType,
    /// The range of updated rows, unless all are.
    rows: Option<[i64; 2]>,
}

impl<'d, 'g> StepPen<'d, 'g> {
    pub(super) fn new(draft: &'d mut Draft<'g>) -> Result<StepPen<'d, 'g>> {
        let (attrs, dtype) = (draft_attributes(draft)?, draft.dtype(0)?);
        let rows = match attrs.find_int(FIRST_ROW.name) {
            Some(first) => {
                // The rows are sliced at constants, so their number must be a constant too.
                let rows = draft.shape(1).and_then(|shape| shape.first()?.as_constant());
                let rows = rows.ok_or_else(|| error!(NotImplemented, "the number of rows is not known"))?;
                Some([first, first.saturating_add(rows)])
            }
            None => None,
        };
        Ok(StepPen { draft, attrs, dtype, rows })
    }

    /// The updated rows of the parameter or of a state.
    pub(super) fn tensor(&mut self, index: usize) -> Result<ValueId> {
        let whole = self.draft.required(index)?;
        match self.rows {
            Some([first, end]) => self.rows_of(whole, first, end),
            None => Ok(whole),
        }
    }

    fn rows_of(&mut self, tensor: ValueId, first: i64, end: i64) -> Result<ValueId> {
        let [first, end, axis] = [first, end, 0].map(|number| self.draft.constant_ints(&[number]));
        self.draft.emit("Slice", &[tensor, first?, end?, axis?], &[])
    }

    /// Puts the updated rows back into the whole tensor.
    fn around(&mut self, old: ValueId, new: ValueId) -> Result<ValueId> {
        let Some([first, end]) = self.rows else { return Ok(new) };
        // The other rows are copied unchanged. `Slice` clamps the open end.
        let (before, after) = (self.rows_of(old, 0, first)?, self.rows_of(old, end, i64::MAX)?);
        self.draft.emit("Concat", &[before, new, after], &[("axis", Attribute::Int(0))])
    }

    pub(super) fn attr(&self, name: &str) -> Result<f64> {
        self.attrs.decimal(name)
    }

    /// A scalar of the parameter's type.
    pub(super) fn number(&mut self, value: f64) -> Result<ValueId> {
        let dtype = self.dtype;
        self.number_of(value, dtype)
    }

    pub(super) fn number_of(&mut self, value: f64, dtype: DType) -> Result<ValueId> {
        let tensor = match dtype {
            DType::F64 => Tensor::scalar(value)?,
            // Parameters are float32 or float64.
            _ => Tensor::scalar(value as f32)?,
        };
        Ok(self.draft.constant(tensor))
    }

    /// Emits a node of one or two inputs.
    pub(super) fn op(&mut self, op: &str, inputs: &[ValueId]) -> Result<ValueId> {
        self.draft.emit(op, inputs, &[])
    }

    pub(super) fn cast(&mut self, value: ValueId, dtype: DType) -> Result<ValueId> {
        self.draft.emit("Cast", &[value], &[("to", Attribute::Int(i64::from(dtype.onnx_code())))])
    }

    /// `value * factor`.
    pub(super) fn times(&mut self, value: ValueId, factor: f64) -> Result<ValueId> {
        let factor = self.number(factor)?;
        self.op("Mul", &[value, factor])
    }

    /// `value + number`.
    pub(super) fn plus(&mut self, value: ValueId, number: f64) -> Result<ValueId> {
        let number = self.number(number)?;
        self.op("Add", &[value, number])
    }

    /// The scaled gradient, in the parameter's type.
    pub(super) fn gradient(&mut self) -> Result<ValueId> {
        let (gradient, dtype) = (self.draft.required(1)?, self.dtype);
        // Cast first, because a product of float16 numbers may overflow or vanish.
        let gradient = self.cast(gradient, dtype)?;
        let Some(scale) = self.draft.input(3) else { return Ok(gradient) };
        let scale = self.cast(scale, dtype)?;
        self.op("Mul", &[gradient, scale])
    }

    /// The learning rate in doubles: all factors of a step are computed in doubles.
    pub(super) fn rate(&mut self) -> Result<ValueId> {
        let rate = self.draft.required(2)?;
        self.cast(rate, DType::F64)
    }

    /// Casts a number computed in doubles to the parameter's type.
    pub(super) fn narrow(&mut self, value: ValueId) -> Result<ValueId> {
        let dtype = self.dtype;
        self.cast(value, dtype)
    }

    /// The bias correction `1 - decay^step` in doubles, or 1 without `correct_bias`.
    pub(super) fn bias(&mut self, decay: f64) -> Result<ValueId> {
        let one = self.number_of(1.0, DType::F64)?;
        if !self.attrs.flag("correct_bias")? {
            return self.op("Identity", &[one]);
        }
        let step = self.step()?;
        let decay = self.number_of(decay, DType::F64)?;
        let power = self.op("Pow", &[decay, step])?;
        self.op("Sub", &[one, power])
    }

    /// The step number, input 5, in doubles.
    pub(super) fn step(&mut self) -> Result<ValueId> {
        let step = self.draft.required(5)?;
        self.cast(step, DType::F64)
    }

    /// Weight decay: `value * (1 - rate * decay)`.
    pub(super) fn decayed(&mut self, value: ValueId, decay: f64) -> Result<ValueId> {
        let (rate, one) = (self.rate()?, self.number_of(1.0, DType::F64)?);
        let decay = self.number_of(decay, DType::F64)?;
        let lost = self.op("Mul", &[rate, decay])?;
        let kept = self.op("Sub", &[one, lost])?;
        let kept = self.narrow(kept)?;
        self.op("Mul", &[value, kept])
    }

    /// The sum of all elements, a scalar.
    pub(super) fn sum(&mut self, value: ValueId) -> Result<ValueId> {
        self.draft.emit("ReduceSum", &[value], &[("keepdims", Attribute::Int(0))])
    }

    /// The sum of all squares, a scalar.
    pub(super) fn sum_of_squares(&mut self, value: ValueId) -> Result<ValueId> {
        let squares = self.op("Mul", &[value, value])?;
        self.sum(squares)
    }

    /// The L2 norm of all elements, in doubles.
    pub(super) fn norm(&mut self, value: ValueId) -> Result<ValueId> {
        let wide = self.cast(value, DType::F64)?;
        let squares = self.sum_of_squares(wide)?;
        self.op("Sqrt", &[squares])
    }

    /// The root mean square of all elements, in doubles.
    pub(super) fn mean_root(&mut self, value: ValueId) -> Result<ValueId> {
        let wide = self.cast(value, DType::F64)?;
        let (squares, count) = (self.sum_of_squares(wide)?, self.op("Size", &[value])?);
        let count = self.cast(count, DType::F64)?;
        let mean = self.op("Div", &[squares, count])?;
        self.op("Sqrt", &[mean])
    }

    /// The mean along an axis, which keeps size 1.
    pub(super) fn mean(&mut self, value: ValueId, axis: i64) -> Result<ValueId> {
        let axes = self.draft.constant_ints(&[axis])?;
        self.op("ReduceMean", &[value, axes])
    }

    /// Replaces the node. Each pair is an input index and its new value; without an update the old
    /// value stays.
    ///
    /// The value of an absent input still fills its output's place, but nothing reads it.
    pub(super) fn finish(mut self, pairs: &[(usize, ValueId)]) -> Result<()> {
        let update = self.draft.input(4);
        let mut outputs = Vec::with_capacity(pairs.len());
        for (input, new) in pairs {
            let Some(old) = self.draft.input(*input) else {
                outputs.push(*new);
                continue;
            };
            let new = self.around(old, *new)?;
            outputs.push(match update {
                Some(update) => self.op("Where", &[update, new, old])?,
                None => self.op("Identity", &[new])?,
            });
        }
        self.draft.replace(&outputs)
    }
}

/// Fails if an input that the attributes require is absent.
pub(super) fn needs(cx: &InferCx<'_>, index: usize, name: &str, why: &str) -> Result<()> {
    match cx.has_input(index) {
        true => Ok(()),
        false => Err(error!(InvalidGraph, "input '{name}' is not given, but {why}")
            .help("it is a state of the optimizer: zeros at first, then the output of the step before")),
    }
}
