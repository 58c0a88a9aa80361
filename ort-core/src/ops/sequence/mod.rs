//! Sequences and optionals.

mod elements;
mod join;
mod map;
mod optional;

use crate::dtype::{DType, TypeSet};
use crate::ir::ValueType;
use crate::spec::{InferCx, TypeVar, Types};

/// The element types of tensors in sequences.
const CONTAINED: TypeSet = TypeSet::ALL_TENSOR.difference(TypeSet::of(&[DType::BF16]));

/// The type variable of a sequence of tensors.
const S: TypeVar = TypeVar { name: "S", types: Types::sequences(CONTAINED) };

/// The types of a position in a sequence.
const POSITION: TypeSet = TypeSet::of(&[DType::I32, DType::I64]);

/// The element type of the sequence at an input.
fn element_type(cx: &InferCx<'_>, input: usize) -> ValueType {
    match cx.input_type(input) {
        Some(ValueType::Sequence(element)) => (**element).clone(),
        _ => ValueType::Unknown,
    }
}

fn sequence_of(element: ValueType) -> ValueType {
    ValueType::Sequence(Box::new(element))
}
