//! Cost model of placement: transfers, work, and estimates for symbolic sizes.
//!
//! The unit is the time in which the host reads or writes one byte of a tensor, about an eighth of
//! a nanosecond. All numbers are estimates for a typical machine; only their ratios matter.

use crate::dim::{Bindings, Dim, EvaluateError};
use crate::ir::{Graph, Node, ValueId};
use crate::spec::{Cost, SymTensor, TripCount, ViewCx, known_ints};
use crate::tensor::Shape;

/// The fixed cost of a transfer between two memories: the call, and the wait until the device has
/// caught up. About 20 µs.
pub(super) const COPY: u64 = 160 << 10;
/// The cost of each transferred byte: a bus is about as fast as the memory accesses of one core.
pub(super) const COPIED_BYTE: u64 = 1;
/// The fixed cost of a node on the host: finding its tensors and calling its kernel. About 2 µs.
const NODE: u64 = 16 << 10;

/// The estimate for a symbolic batch size: one item. The batch is the first axis of an input with
/// several axes.
const ITEMS: i64 = 1;
/// The estimate for every other unknown size, such as the number of words in a text.
const LENGTH: i64 = 64;
/// The most bytes that a value is estimated to have, so that no sum overflows.
const MOST_BYTES: u64 = 1 << 36;
/// A constant trip count of at least this many iterations counts as unknown.
const MOST_ROUNDS: u64 = 1 << 16;
/// The bytes that a string is estimated to have.
const STRING_BYTES: usize = 8;

/// Estimates for the values and nodes of one graph.
pub(super) struct Estimates<'a> {
    graph: &'a Graph,
    bindings: Bindings,
}

impl<'a> Estimates<'a> {
    /// Creates estimates for a graph whose inputs have a batch size of one item.
    pub(super) fn new(graph: &'a Graph) -> Estimates<'a> {
        let mut bindings = Bindings::new();
        for shape in graph.inputs.iter().filter_map(|&input| graph.value(input).ty.shape()) {
            if let [batch, _, ..] = shape {
                for symbol in batch.symbols() {
                    bindings.insert(symbol, ITEMS);
                }
            }
        }
        Estimates { graph, bindings }
    }

    /// Estimates the bytes of a value. A value that is not a tensor, or has no known rank, counts
    /// as a row of [`LENGTH`] elements.
    pub(super) fn bytes(&mut self, value: ValueId) -> u64 {
        let dtype = self.graph.value(value).ty.dtype();
        let elements = self.shape(value).map_or(LENGTH as usize, |shape| product(&shape));
        let bytes = dtype.and_then(|dtype| dtype.byte_len(elements));
        let bytes = bytes.unwrap_or_else(|| elements.saturating_mul(STRING_BYTES));
        (bytes as u64).min(MOST_BYTES)
    }

    /// Estimates the cost of a node on the host. A node that only queries the shape of its input,
    /// or whose output is a view of it, costs nothing. Any other node costs a call plus the bytes
    /// read and written. Constants are left out, because a lookup reads only some rows of a table.
    pub(super) fn work(&mut self, node: &Node) -> u64 {
        if node.spec.cost == Cost::Free || self.is_view(node) {
            return 0;
        }
        let constants = &self.graph.constants;
        let values = node.reads().filter(|value| !constants.contains_key(value));
        let values = values.chain(node.outputs.iter().flatten().copied());
        let bytes = values.map(|value| self.bytes(value)).fold(0u64, u64::saturating_add);
        NODE + bytes.min(MOST_BYTES)
    }

    /// Estimates the trip count of a control-flow node.
    pub(super) fn rounds(&mut self, node: &Node, rounds: TripCount) -> u64 {
        let counted = match rounds {
            TripCount::Once => Some(1),
            TripCount::Counted => node.inputs.first().copied().flatten().and_then(|count| {
                let count = self.ints(count)?.first().copied()?;
                // A loop that only its condition ends may have an arbitrary bound.
                u64::try_from(count).ok().filter(|count| *count < MOST_ROUNDS)
            }),
            TripCount::Slices => {
                let scanned = node.inputs.last().copied().flatten();
                scanned.and_then(|value| self.shape(value)?.first().copied()).map(|size| size as u64)
            }
        };
        counted.unwrap_or(LENGTH as u64)
    }

    /// Whether the output of a node is a view of its input.
    fn is_view(&mut self, node: &Node) -> bool {
        let Some(view) = node.spec.view else { return false };
        let shapes = |estimates: &mut Estimates<'_>, values: &[Option<ValueId>]| -> Vec<Option<Shape>> {
            values.iter().map(|value| estimates.shape((*value)?)).collect()
        };
        let (inputs, outputs) = (shapes(self, &node.inputs), shapes(self, &node.outputs));
        let is_small = |shape: &Shape| (SymTensor::extent(shape) as u64) < MOST_BYTES;
        if !inputs.iter().chain(&outputs).flatten().all(is_small) {
            return false;
        }
        let ints: Vec<Option<Vec<i64>>> = node.inputs.iter().map(|value| self.ints((*value)?)).collect();
        view(&ViewCx { attrs: &node.attrs, inputs: &inputs, ints: &ints, outputs: &outputs }).is_some()
    }

    /// The elements of a small integer tensor, if they are known.
    fn ints(&self, value: ValueId) -> Option<Vec<i64>> {
        match self.graph.constants.get(&value) {
            Some(tensor) => known_ints(Some(tensor.view())),
            None => self.graph.value(value).symbolic.as_ref()?.as_ints(),
        }
    }

    fn shape(&mut self, value: ValueId) -> Option<Shape> {
        let shape = self.graph.value(value).ty.shape()?;
        Some(shape.iter().map(|size| self.size(size)).collect())
    }

    /// Estimates a dimension. A symbol without an estimate gets [`LENGTH`].
    fn size(&mut self, size: &Dim) -> usize {
        // Each round binds one more symbol, so the loop ends.
        loop {
            match size.evaluate(&self.bindings) {
                Ok(size) => return usize::try_from(size).unwrap_or(0),
                Err(EvaluateError::Unbound(symbol)) => {
                    self.bindings.insert(symbol, LENGTH);
                }
                Err(_) => return LENGTH as usize,
            }
        }
    }
}

fn product(shape: &[usize]) -> usize {
    shape.iter().fold(1usize, |count, &size| count.saturating_mul(size))
}
