//! Kernels for sequences and optionals.

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

/// Reserves budget for the headers of `count` elements while the returned guard lives. Empty and
/// shared tensors have no bytes of their own, so otherwise any number of them would be free.
fn reserve_headers(cx: &RunCx<'_>, count: usize) -> Result<Reservation> {
    cx.reserve(count.saturating_mul(2 * size_of::<Value>()))
}

/// Returns the sequence at an input, unwrapping an optional.
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

/// Makes a sequence of tensors. The element type is explicit, so that an empty sequence has one.
fn sequence_value(element_type: ValueType, elements: Vec<Value>) -> Value {
    Value::Sequence(SequenceValue { element_type, elements })
}
