//! The gradient of `Einsum`: the equation solved for each operand.
//!
//! The upstream gradient replaces the operand, and the operand's subscripts become the output. Each
//! dimension of an ellipsis gets a letter of its own. A subscript that an operand repeats selects a
//! diagonal: its gradient is zero off that diagonal.

use super::einsum_equation::{Equation, Label};
use crate::ir::{Attribute, ValueId};
use crate::spec::GradCx;
use crate::{Result, error};

pub(super) fn of_einsum(cx: &mut GradCx<'_>) -> Result<()> {
    let inputs = (0..cx.input_count()).map(|index| cx.input(index)).collect::<Result<Vec<ValueId>>>()?;
    let ranks = inputs.iter().map(|&input| cx.rank(input)).collect::<Result<Vec<usize>>>()?;
    let equation = Equation::parse(cx.attrs().string("equation")?, &ranks)?;
    let letters = Letters::of(&equation)?;
    for index in cx.wanted() {
        of_operand(cx, &equation, &letters, index)?;
    }
    Ok(())
}

/// Sets the gradient of one operand.
fn of_operand(cx: &mut GradCx<'_>, equation: &Equation, letters: &Letters, index: usize) -> Result<()> {
    let Some(own) = equation.inputs.get(index) else { return Ok(()) };
    let mut terms = vec![letters.spell(&equation.output)?];
    let mut values = vec![cx.upstream()?];
    for (other, labels) in equation.inputs.iter().enumerate().filter(|(other, _)| *other != index) {
        terms.push(letters.spell(labels)?);
        values.push(cx.input(other)?);
    }
    let others = equation.inputs.iter().enumerate().filter(|(other, _)| *other != index);
    let known: Vec<Label> =
        equation.output.iter().chain(others.flat_map(|(_, labels)| labels)).copied().collect();
    // A subscript that only this operand has was summed over, so its gradient repeats along it.
    // `first` skips repeated subscripts, which `on_diagonal` handles.
    let first = |axis: usize| own.iter().position(|label| own.get(axis) == Some(label)) == Some(axis);
    let is_kept = |axis: usize| first(axis) && own.get(axis).is_some_and(|label| known.contains(label));
    let (kept, gone): (Vec<usize>, Vec<usize>) = (0..own.len()).partition(|&axis| is_kept(axis));
    let kept: Vec<Label> = kept.iter().filter_map(|&axis| own.get(axis).copied()).collect();
    let solved = format!("{}->{}", terms.join(","), letters.spell(&kept)?);
    let mut gradient = cx.emit("Einsum", &values, &[("equation", Attribute::String(solved))])?;
    if !gone.is_empty() {
        let gone: Vec<i64> = gone.iter().map(|&axis| axis as i64).collect();
        let gone = cx.ints(&gone)?;
        gradient = cx.emit("Unsqueeze", &[gradient, gone], &[])?;
    }
    let input = cx.input(index)?;
    for axis in (0..own.len()).filter(|&axis| !first(axis)) {
        let diagonal = own.iter().position(|label| own.get(axis) == Some(label)).unwrap_or(axis);
        gradient = on_diagonal(cx, gradient, input, [diagonal, axis])?;
    }
    // Inserted axes repeat to the input's size, and axes that the input had broadcast are summed.
    let shape = cx.shape_of(input)?;
    let gradient = cx.emit("Expand", &[gradient, shape], &[])?;
    cx.set_broadcast(index, gradient)
}

/// The gradient on the diagonal of two axes of `input`, zero elsewhere.
fn on_diagonal(cx: &mut GradCx<'_>, gradient: ValueId, input: ValueId, axes: [usize; 2]) -> Result<ValueId> {
    let rank = cx.rank(input)?;
    let mut indices = Vec::with_capacity(2);
    for axis in axes {
        let size = cx.sizes(input, axis, axis + 1)?;
        let range = cx.range(size)?;
        let shape: Vec<i64> = (0..rank).map(|other| if other == axis { -1 } else { 1 }).collect();
        indices.push(cx.reshape_to(range, &shape)?);
    }
    let is_equal = cx.emit("Equal", &indices, &[])?;
    let zero = cx.number(0.0, cx.dtype(gradient)?)?;
    cx.emit("Where", &[is_equal, gradient, zero], &[])
}

/// One letter per subscript, including the dimensions of an ellipsis.
struct Letters(Vec<(Label, char)>);

impl Letters {
    fn of(equation: &Equation) -> Result<Letters> {
        let mut labels: Vec<Label> = equation.inputs.iter().flatten().copied().collect();
        labels.sort();
        labels.dedup();
        let is_free = |letter: &char| !labels.contains(&Label::Letter(*letter));
        let mut free = ('a'..='z').chain('A'..='Z').filter(is_free);
        let mut letters = Vec::with_capacity(labels.len());
        for &label in &labels {
            let letter = match label {
                Label::Letter(letter) => Some(letter),
                Label::Ellipsis(_) => free.next(),
            };
            let letter = letter.ok_or_else(|| {
                error!(NotImplemented, "the gradient of Einsum with more than 52 different subscripts")
            })?;
            letters.push((label, letter));
        }
        Ok(Letters(letters))
    }

    fn spell(&self, labels: &[Label]) -> Result<String> {
        let letter = |label: &Label| {
            let found = self.0.iter().find(|(known, _)| known == label).map(|(_, letter)| *letter);
            found.ok_or_else(|| error!(InvalidGraph, "Einsum's output has a subscript that no input has"))
        };
        labels.iter().map(letter).collect()
    }
}
