//! Sizes of the subscripts of an `Einsum` equation.

use ort_core::ops::{Equation, Label};
use ort_core::{Result, error};

/// Returns the size of each subscript of an equation. Sizes of 1 are broadcast.
pub(crate) fn sizes(equation: &Equation, shapes: &[&[usize]]) -> Result<Vec<(Label, usize)>> {
    let mut sizes: Vec<(Label, usize)> = Vec::new();
    for (labels, shape) in equation.inputs.iter().zip(shapes) {
        for (&label, &size) in labels.iter().zip(*shape) {
            match sizes.iter_mut().find(|(known, _)| *known == label) {
                None => sizes.push((label, size)),
                Some((_, known)) if *known == size || size == 1 => {}
                Some((_, known)) if *known == 1 => *known = size,
                Some((_, known)) => {
                    return Err(error!(InvalidArgument, "a subscript has sizes {known} and {size}"));
                }
            }
        }
    }
    Ok(sizes)
}

pub(crate) fn size_of_label(sizes: &[(Label, usize)], label: Label) -> usize {
    sizes.iter().find(|(known, _)| *known == label).map_or(1, |(_, size)| *size)
}
