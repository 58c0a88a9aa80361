//! The inputs and outputs of a model: their names and types, and the check of a value against them.

use crate::ir::ValueType;
use crate::tensor::ValueView;
use crate::{Result, ensure, error};

/// An input or output of a model.
#[derive(Clone, Debug)]
pub struct ValueSpec {
    /// The name.
    pub name: String,
    /// The type, with symbolic sizes.
    pub ty: ValueType,
    /// Whether the caller may omit it.
    pub has_default: bool,
}

/// Refuses a tensor of another element type, and a tensor where another kind of value is expected.
pub(super) fn check_type(name: &str, expected: &ValueType, value: &ValueView<'_>) -> Result<()> {
    match (expected, value.tensor()) {
        (ValueType::Tensor(expected), Ok(tensor)) => ensure!(
            expected.dtype == tensor.dtype(),
            InvalidArgument,
            "input '{name}' is {}, expected {}",
            tensor.dtype().name(),
            expected.dtype.name()
        ),
        (ValueType::Tensor(_), Err(problem)) => return Err(problem.within(format!("input '{name}'"))),
        // An unknown type accepts any value, and an optional may hold a tensor.
        (ValueType::Unknown | ValueType::Optional(_), _) => {}
        (_, Ok(_)) => {
            return Err(error!(InvalidArgument, "input '{name}' is a tensor, expected {expected}"));
        }
        _ => {}
    }
    Ok(())
}
