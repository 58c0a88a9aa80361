//! Float weights whose channels are multiplied by factors, along two axes at most.

use std::sync::Arc;

use crate::elements::{Elements, ScaledElements, each_chunk};
use crate::weight::Weight;

/// The factors of a weight.
#[derive(Clone, Debug)]
pub(super) struct ScaleForm {
    /// Those of outputs and of inputs, each with its axis. No factors change nothing.
    pub(super) factors: [(usize, Arc<[f32]>); 2],
}

impl ScaleForm {
    /// The little-endian bytes of the elements after the multiplication.
    pub(super) fn run<E: Elements>(&self, elements: &E, shape: &[usize]) -> Vec<u8> {
        let inner = |axis: usize| shape.iter().skip(axis + 1).product();
        let [(one_axis, one), (other_axis, other)] = &self.factors;
        let once = ScaledElements { elements, scales: one, inner: inner(*one_axis) };
        let twice = ScaledElements { elements: &once, scales: other, inner: inner(*other_axis) };
        let mut bytes = Vec::with_capacity(elements.count() * size_of::<E::Element>());
        each_chunk(&twice, |values| {
            let narrow: Vec<E::Element> = values.iter().map(|value| E::Element::narrow(*value)).collect();
            bytes.extend(E::Element::bytes(&narrow));
        });
        bytes
    }
}
