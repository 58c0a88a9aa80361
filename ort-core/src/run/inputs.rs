//! Run inputs: their values, the symbolic dimensions that they bind, and whether a plan fits them.

#![allow(
    clippy::indexing_slicing,
    reason = "ids of slots are made with the program, and each table of a program and plan has an entry for each"
)]

use crate::dim::{Bindings, unify};
use crate::plan::RunPlan;
use crate::program::Program;
use crate::tensor::{Value, ValueView};
use crate::{Error, Result, ensure, error};

/// The values given for a program's inputs.
#[derive(Clone, Copy)]
pub(crate) enum Given<'a> {
    Views(&'a [ValueView<'a>]),
    /// The values of an I/O binding. An input in one of the binding's buffers is `None`.
    Values(&'a [Option<Value>]),
}

impl<'a> Given<'a> {
    /// Returns a view of the input at `index`.
    pub(crate) fn get(self, index: usize) -> Option<ValueView<'a>> {
        match self {
            Given::Views(views) => views.get(index).copied(),
            Given::Values(values) => values.get(index)?.as_ref().map(Value::view),
        }
    }
}

/// Binds symbolic dimensions to the sizes of the inputs.
///
/// Returns the first conflict: a dimension name with two sizes. A conflict is not an error here,
/// because the caller may compile the model again with independent dimensions.
///
/// # Errors
///
/// The rank of an input, or one of the sizes that the model fixes, differs. The error names the
/// input.
pub(crate) fn bind(
    program: &Program,
    given: &[ValueView<'_>],
    bindings: &mut Bindings,
) -> Result<Option<Error>> {
    let mut conflict = None;
    for (slot, value) in program.given.iter().zip(given) {
        let info = program.graph.value(program.slots[slot.index()].value);
        let (Ok(tensor), Some(formal)) = (value.tensor(), info.ty.shape()) else { continue };
        let place = || format!("input '{}'", info.name);
        ensure!(
            tensor.rank() == formal.len(),
            InvalidArgument,
            help = "give it a tensor of that rank",
            "input '{}' has rank {}, expected rank {}: {}",
            info.name,
            tensor.rank(),
            formal.len(),
            info.ty
        );
        for (axis, (dim, &size)) in formal.iter().zip(tensor.shape()).enumerate() {
            let Err(problem) = unify(dim, size as i64, bindings) else { continue };
            let shape = tensor.shape();
            let problem = error!(
                InvalidArgument,
                "axis {axis} has {problem}: got shape {shape:?}, expected {}", info.ty
            )
            .help(match dim.as_constant() {
                Some(_) => "use the size that the model declares",
                None => "use one size for all dimensions of that name",
            })
            .within(place());
            // Only a symbolic dimension can be made independent.
            match dim.as_constant() {
                Some(_) => return Err(problem),
                // The loop goes on, because a later input may have an error that no session
                // accepts.
                None => conflict = conflict.or(Some(problem)),
            }
        }
    }
    Ok(conflict)
}

/// Whether every input has the shape that the plan assumes. If the plan does not know the shape of
/// an input, any shape fits.
pub(crate) fn fits(program: &Program, plan: &RunPlan, given: &[ValueView<'_>]) -> bool {
    program.given.iter().zip(given).all(|(slot, value)| {
        match (&plan.slots[slot.index()].shape, value.tensor()) {
            (Some(planned), Ok(tensor)) => planned.as_slice() == tensor.shape(),
            _ => true,
        }
    })
}

/// Whether a value is a tensor in device memory.
pub(crate) fn is_on_device(value: &ValueView<'_>) -> bool {
    value.tensor().is_ok_and(|tensor| !tensor.is_host())
}
