//! What placements are weighed by: the cost of copies and of work, and sizes where they are
//! symbols.
//!
//! The unit is the time in which the host reads or writes one byte of a tensor, about an eighth of
//! a nanosecond. All numbers are estimates of a usual machine; only their ratios count.

use crate::dim::{Bindings, Dim, EvaluateError};
use crate::ir::{Graph, Node, ValueId};
use crate::spec::{Cost, SymTensor, TripCount, ViewCx, known_ints};
use crate::tensor::Shape;

/// A copy between two memories, however small it is: the call, and the wait until the device has
/// come so far. About 20 µs.
pub(super) const COPY: u64 = 160 << 10;
/// A byte that is copied between two memories: a bus moves about as much as one core reads and
/// writes.
pub(super) const COPIED_BYTE: u64 = 1;
/// What a node costs on the host however small it is: finding its tensors and calling its kernel.
/// About 2 µs.
const NODE: u64 = 16 << 10;

/// What a size is taken for that only the caller or the run tells: one item of a batch, which is
/// the first axis of an input with several, and 64 of anything else, such as the words of a text.
const ITEMS: i64 = 1;
const LENGTH: i64 = 64;
/// The most bytes that a value is taken for, so that no sum overflows.
const MOST_BYTES: u64 = 1 << 36;
/// No loop is taken to run more often.
const MOST_ROUNDS: u64 = 1 << 16;
/// The bytes of a string.
const STRING_BYTES: usize = 8;

/// Estimates for the values of one graph.
pub(super) struct Estimates<'a> {
    graph: &'a Graph,
    bindings: Bindings,
}

impl<'a> Estimates<'a> {
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

    /// The bytes of a value. What is no tensor, or one of unknown rank, is taken for a line of
    /// elements.
    pub(super) fn bytes(&mut self, value: ValueId) -> u64 {
        let dtype = self.graph.value(value).ty.dtype();
        let elements = self.shape(value).map_or(LENGTH as usize, |shape| product(&shape));
        let bytes = dtype.and_then(|dtype| dtype.byte_len(elements));
        let bytes = bytes.unwrap_or_else(|| elements.saturating_mul(STRING_BYTES));
        (bytes as u64).min(MOST_BYTES)
    }

    /// What the host needs for a node: nothing for one that only describes or looks at a part of
    /// its input; else a call, and the bytes that are read and written. Those of constants are left
    /// out, as of a table of words only some rows are read.
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

    /// How often a control-flow node runs a subgraph.
    pub(super) fn rounds(&mut self, node: &Node, rounds: TripCount) -> u64 {
        let counted = match rounds {
            TripCount::Once => Some(1),
            TripCount::Counted => node.inputs.first().copied().flatten().and_then(|count| {
                let count = self.ints(count)?.first().copied()?;
                // A loop that only its condition ends may be told any number.
                u64::try_from(count).ok().filter(|count| *count < MOST_ROUNDS)
            }),
            TripCount::Slices => {
                let scanned = node.inputs.last().copied().flatten();
                scanned.and_then(|value| self.shape(value)?.first().copied()).map(|size| size as u64)
            }
        };
        counted.unwrap_or(LENGTH as u64)
    }

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

    fn size(&mut self, size: &Dim) -> usize {
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
