//! Control flow: `If`, `Loop` and `Scan`, the operators that run subgraphs.

mod branch;
mod gradients;
mod looping;
pub(super) mod merge;
mod scan;

use crate::dtype::TypeSet;
use crate::spec::{TypeVar, Types};

/// The values that `If` returns and `Loop` carries: tensors, sequences and optionals.
const V: TypeVar = TypeVar {
    name: "V",
    types: Types {
        tensor: TypeSet::ALL_TENSOR_IR13,
        sequence: TypeSet::ALL_TENSOR_IR13,
        optional: TypeSet::ALL_TENSOR_IR13,
        optional_sequence: TypeSet::ALL_TENSOR,
        ..Types::NONE
    },
};
