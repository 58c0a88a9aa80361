//! Kernels on sequences and optionals.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as; positions and lengths of parts are checked before their first use"
)]

mod elements;
mod join;
mod map;
mod optional;

use ort_alloc::Reservation;
use ort_core::ep::RunCx;
use ort_core::ir::ValueType;
use ort_core::tensor::{SequenceValue, Value, ValueView};
use ort_core::{Result, error};

/// Counts the headers of so many elements in the budget, as long as what it returns lives: empty
/// tensors and those that are shared have no bytes of their own, however many they are.
fn reserve_headers(cx: &RunCx<'_>, count: usize) -> Result<Reservation> {
    cx.reserve(count.saturating_mul(2 * size_of::<Value>()))
}

/// The sequence at an input; an optional is taken for what it holds.
fn sequence<'a>(cx: &RunCx<'a>, input: usize) -> Result<&'a SequenceValue> {
    match cx.input_value(input)? {
        ValueView::Value(Value::Optional(optional)) => match &optional.element {
            Some(element) => element.sequence(),
            None => Err(error!(InvalidArgument, "expected a sequence, got an optional without element")),
        },
        ValueView::Value(value) => value.sequence(),
        ValueView::Tensor(_) => Err(error!(InvalidArgument, "expected a sequence, got a tensor")),
    }
}

/// A sequence of tensors, with the type that it has even when it is empty.
fn sequence_value(element_type: ValueType, elements: Vec<Value>) -> Value {
    Value::Sequence(SequenceValue { element_type, elements })
}
